"""Put an output folder in order and decide what this session has to do. No Ray, no engine.

Invariant: nothing is started before the folder's run and the run file agree, and no row is dropped
from the data set because it is missing from the input: rows that were published stay.
"""

import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.dataset.done_rows import DoneRows, RowsToRedo, take_back
from pipeline.dataset.frozen import FrozenPrompts, freeze, frozen_prompts, remove_other_sets
from pipeline.dataset.prompts import InputColumns, input_fingerprint, read_prompts
from pipeline.dataset.recovery import recover
from pipeline.dataset.run_record import (
    check_columns,
    check_identity,
    list_in_manifest,
    read_manifest,
    read_run,
    write_run,
)
from pipeline.errors import ConfigError, ResumeError
from pipeline.quality.canary import Excess, excesses, settings_fingerprint, tally_of
from pipeline.run.ledger import DONE
from pipeline.store.folder import Folder
from schemas.completion import COMPLETION_SCHEMA
from schemas.config import RunFile
from schemas.manifest import CanaryEvent, CanaryVerdict, Part, RunIdentity, RunRecord, Session
from schemas.prompt import Prompt
from schemas.session import CanaryPlan, SessionPlan, Tally

_PROGRESS_ROWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What this session starts from."""

    plan: SessionPlan
    session: Session
    row_states: bytearray
    excesses: tuple[Excess, ...] = ()
    """Limits that the canary's rows of earlier sessions are over: nothing is to be started."""


def prepare(
    config: RunFile,
    folder: Folder,
    *,
    token: str,
    accept_drift: bool,
    retry_errors: bool,
    retry_flags: Collection[str] = (),
    accept_canary: bool = False,
    now_s: float,
    log: Callable[[str], None],
) -> Prepared:
    """Freeze the input, mend the folder, and mark what is done.

    Raises ConfigError for the input and ResumeError for a folder that holds another run.
    """
    record = read_run(folder)
    if record is not None:
        check_columns(record)
    frozen = _frozen(config, folder, record, accept_drift, log)
    if not frozen.num_rows:
        raise ConfigError(f"prompts.path: {config.prompts.path} has no rows")
    identity = run_identity(config, frozen.columns)
    record = _agreed_record(
        folder, record, identity, frozen, accept_drift=accept_drift, now_s=now_s, log=log
    )
    recovery = recover(folder, record, now_s=now_s)
    for report in recovery.reports:
        log(f"event=mended {report}")
    parts = recovery.parts
    states, marked = _marked(config, frozen, parts)
    drift = _disjoint_input(config, parts, marked, accept_drift=accept_drift)
    if retry_errors or retry_flags:
        # After that check: rows that are taken back may be the only ones that the inputs share.
        redo = RowsToRedo(
            row_ids=frozen.row_ids(), errors=retry_errors, flags=frozenset(retry_flags)
        )
        parts = take_back(folder, record, parts, redo, now_s=now_s)
        states, marked = _marked(config, frozen, parts)
    drift = _changed_input(config, marked, accept_drift=accept_drift) or drift
    if drift is not None:
        record = _with_drift(folder, record, drift, log)
    session = Session(
        session_id=uuid.uuid4().hex[:8],
        started_at_s=now_s,
        rows_total=len(states),
        rows_done=marked.num_rows,
        rows_error=sum(part.num_errors for part in parts),
        rows_outside_input=sum(part.num_rows for part in parts) - marked.num_rows,
    )
    list_in_manifest(folder, session)
    record = _with_quality(folder, record, config)
    due = _canary(
        config,
        folder,
        session,
        settings_fingerprint(record.identity),
        accept=accept_canary,
        now_s=now_s,
    )
    remove_other_sets(folder, frozen.name)
    plan = SessionPlan(
        root=folder.where,
        config=config,
        run_id=record.run_id,
        session_id=session.session_id,
        token=token,
        frozen_name=frozen.name,
        carried_schema=record.carried_schema,
        rows_error=session.rows_error,
        canary=due.plan,
        accepted_shares=due.accepted,
    )
    return Prepared(plan=plan, session=session, row_states=states, excesses=due.excesses)


def run_identity(config: RunFile, columns: InputColumns) -> RunIdentity:
    """The settings that alter rows, in the run file's own names. Hardware and capacity do not."""
    settings: dict[str, object] = {
        "model": config.model,
        "thinking": config.thinking,
        "reasoning_in_history": config.reasoning_in_history,
        "chat_template_kwargs": dict(config.chat_template_kwargs),
        **{f"sampling.{key}": value for key, value in config.sampling.model_dump().items()},
        **{f"prompts.{name}": value for name, value in dataclasses.asdict(columns).items()},
        "prompts.system_prompt": config.prompts.system_prompt,
        "prompts.id_column": config.prompts.id_column,
        "prompts.keep_columns": list(config.prompts.keep_columns),
    }
    if config.engine.kind == "embedded" and config.engine.model_file is not None:
        settings["engine.model_file"] = Path(config.engine.model_file).name
    return RunIdentity(settings=settings)


# -- the input


def _frozen(
    config: RunFile,
    folder: Folder,
    record: RunRecord | None,
    accept_drift: bool,
    log: Callable[[str], None],
) -> FrozenPrompts:
    """The frozen prompts of this very input, read again only when it has changed."""
    fingerprint = input_fingerprint(config.prompts)
    name = fingerprint or uuid.uuid4().hex[:16]
    standing = frozen_prompts(folder, name) if fingerprint else None
    if standing is not None:
        return standing
    stream = read_prompts(config.prompts)
    if record is not None:
        # Before a million rows are read: the settings that are known to differ.
        identity = run_identity(config, stream.columns)
        check_identity(record, identity, accept_drift=accept_drift)
    log(f"event=reading_prompts path={config.prompts.path} column={stream.columns.column}")
    stream = dataclasses.replace(stream, prompts=_told(stream.prompts, log))
    frozen = freeze(folder, name, stream)
    log(f"event=prompts_read rows={frozen.num_rows} bad_rows={frozen.num_problems}")
    return frozen


def _told(prompts: Iterable[Prompt], log: Callable[[str], None]) -> Iterator[Prompt]:
    for number, prompt in enumerate(prompts, start=1):
        if number % _PROGRESS_ROWS == 0:
            log(f"event=reading_prompts rows={number}")
        yield prompt


# -- the folder's run


def _agreed_record(
    folder: Folder,
    record: RunRecord | None,
    identity: RunIdentity,
    frozen: FrozenPrompts,
    *,
    accept_drift: bool,
    now_s: float,
    log: Callable[[str], None],
) -> RunRecord:
    if record is None:
        record = RunRecord(
            run_id=uuid.uuid4().hex[:16],
            created_at_s=now_s,
            identity=identity,
            carried_schema=frozen.carried_schema,
            columns=tuple(COMPLETION_SCHEMA.names),
        )
        write_run(folder, record)
        return record
    drift = check_identity(record, identity, accept_drift=accept_drift)
    if not drift:
        return record
    kept = next((line for line in drift if line.startswith("prompts.keep_columns:")), None)
    if kept is not None:
        raise ResumeError(
            f"{kept}\nthe parts of one data set have the same columns, so --accept-drift "
            "does not reach this key; use another output.folder"
        )
    for line in drift:
        log(f"event=drift_accepted {line}")
    record = dataclasses.replace(
        record, identity=identity, accepted_drift=(*record.accepted_drift, *drift)
    )
    write_run(folder, record)
    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marked:
    """How many rows of the input are published, and the first whose content was another."""

    num_rows: int
    changed_id: str | None


def _marked(
    config: RunFile, frozen: FrozenPrompts, parts: tuple[Part, ...]
) -> tuple[bytearray, _Marked]:
    """A state byte for each row of the input, with what was met in marking it."""
    samples = config.samples_per_prompt
    states = bytearray(frozen.num_rows * samples)
    done = DoneRows.of(parts)
    num_rows, changed = done.mark(frozen.ids(), states, samples=samples, done=DONE)
    return states, _Marked(num_rows=num_rows, changed_id=changed)


def _disjoint_input(
    config: RunFile, parts: tuple[Part, ...], marked: _Marked, *, accept_drift: bool
) -> str | None:
    """What to record when no published row is the input's. Raises ResumeError."""
    num_published = sum(len(part.row_ids) for part in parts)
    if not num_published or marked.num_rows:
        return None
    path = config.prompts.path
    drift = f"prompts.path: none of the {num_published} published rows has its id in {path}"
    return _accepted(drift, accept_drift=accept_drift)


def _changed_input(config: RunFile, marked: _Marked, *, accept_drift: bool) -> str | None:
    """What to record when a row's prompt has changed under its id. Raises ResumeError."""
    if marked.changed_id is None:
        return None
    drift = (
        f"prompts.path: the prompt with id {marked.changed_id!r} in {config.prompts.path} is not "
        f"the one that was published under that id"
    )
    return _accepted(drift, accept_drift=accept_drift)


def _accepted(drift: str, *, accept_drift: bool) -> str:
    if not accept_drift:
        raise ResumeError(
            f"{drift}; this is another input: use another output.folder, or --accept-drift to "
            f"keep the published rows and go on"
        )
    return drift


# -- the canary


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """What of the canary this session has before it."""

    plan: CanaryPlan | None = None
    accepted: dict[str, float] = field(default_factory=dict)
    excesses: tuple[Excess, ...] = ()


def _canary(
    config: RunFile,
    folder: Folder,
    session: Session,
    settings: str,
    *,
    accept: bool,
    now_s: float,
) -> _Due:
    """A canary that has passed or was accepted stays so for as long as the settings do."""
    manifest, canary_rows = read_manifest(folder), config.quality.canary_rows
    event = manifest.canary
    if event is not None and event.settings != settings:
        event = None
    if event is not None and event.verdict in ("passed", "accepted"):
        return _Due(accepted=event.shares)

    def tell(verdict: CanaryVerdict, found: tuple[Excess, ...] = ()) -> None:
        shares = {excess.name: excess.found for excess in found}
        told = CanaryEvent(
            session_id=session.session_id,
            verdict=verdict,
            settings=settings,
            shares=shares,
            at_s=now_s,
        )
        list_in_manifest(folder, told)

    tally = tally_of(manifest.canary_parts) if event is not None else Tally()
    rows_open = session.rows_total - session.rows_done
    rows_left = min(rows_open, max(0, canary_rows - tally.num_rows))
    found = excesses(tally, config, num_rows=tally.num_rows + rows_left) if tally.num_rows else ()
    if accept:
        tell("accepted", found)
        return _Due(accepted={excess.name: excess.found for excess in found})
    if not canary_rows or not rows_open:
        return _Due()
    if event is None:
        tell("begun")
    if found:
        return _Due(excesses=found)
    if not rows_left:
        tell("passed")
        return _Due()
    return _Due(plan=CanaryPlan(rows_left=rows_left, tally=tally, settings=settings))


def _with_quality(folder: Folder, record: RunRecord, config: RunFile) -> RunRecord:
    """The record with this session's policy, which the export follows."""
    quality = config.quality.model_dump()
    if record.quality == quality:
        return record
    record = dataclasses.replace(record, quality=quality)
    write_run(folder, record)
    return record


def _with_drift(
    folder: Folder, record: RunRecord, drift: str, log: Callable[[str], None]
) -> RunRecord:
    """The record with a change of the input that was accepted, named once."""
    log(f"event=drift_accepted {drift}")
    if drift in record.accepted_drift:
        return record
    record = dataclasses.replace(record, accepted_drift=(*record.accepted_drift, drift))
    write_run(folder, record)
    return record
