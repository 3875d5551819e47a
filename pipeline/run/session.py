"""Repair an output folder and decide what this session has to do. No Ray, no engine.

Invariant: nothing is started before the folder's run and the run file agree, and no row is dropped
from the data set because it is missing from the input: rows that were published stay.
"""

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.chat_template.run_facts import facts_of_run, find_facts, thinking_warnings
from pipeline.dataset.done_rows import DoneRows, RowsToRedo, error_row_ids, take_back
from pipeline.dataset.frozen import (
    FrozenPrompts,
    freeze,
    frozen_prompts,
    remove_other_sets,
    schema_from_text,
    schema_text,
)
from pipeline.dataset.parts import own_columns, own_schema_of
from pipeline.dataset.prompts import InputColumns, input_fingerprint, read_prompts
from pipeline.dataset.recovery import recover
from pipeline.dataset.run_record import (
    check_columns,
    check_identity,
    list_in_manifest,
    read_run,
    write_run,
)
from pipeline.engines.served import chat_template
from pipeline.errors import ConfigError, ResumeError
from pipeline.quality.canary import Excess, settings_fingerprint
from pipeline.run.canary import canary_due
from pipeline.run.ledger import DONE
from pipeline.store.folder import Folder
from schemas.chat_template import TemplateFacts
from schemas.config.run_file import RunFile
from schemas.manifest import Part, RunIdentity, RunRecord, Session
from schemas.prompt import Prompt
from schemas.session import Breach, SessionPlan

_PROGRESS_ROWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Choices of the command line for one session. The defaults resume a run as it is."""

    accept_drift: bool = False
    """Continue although settings that change rows, or the input, have changed."""
    accept_canary: bool = False
    retry_errors: bool = False
    retry_flags: frozenset[str] = frozenset()
    """Quality flags whose rows are generated again."""
    accepted_breaches: frozenset[Breach] = frozenset()
    """Faults of engines' first answers with which the run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The start of a session."""

    plan: SessionPlan
    session: Session
    row_states: bytearray
    excesses: tuple[Excess, ...] = ()
    """Limits that the canary's rows of earlier sessions exceed: nothing is to be started."""


def prepare(
    config: RunFile,
    folder: Folder,
    options: SessionOptions,
    *,
    token: str,
    now_s: float,
    log: Callable[[str], None],
) -> Prepared:
    """Freeze the input, repair the folder, and mark what is done.

    Raises ConfigError for the input and ResumeError for a folder that holds another run.
    """
    preparation = _Preparation(config=config, folder=folder, options=options, now_s=now_s, log=log)
    record = read_run(folder)
    if record is not None:
        check_columns(record)
    frozen = preparation.freeze(record)
    if not frozen.num_rows:
        raise ConfigError(f"prompts.path: {config.prompts.path} has no rows")
    record = preparation.agree(record, frozen)
    facts = preparation.template_facts(record)
    record, done = preparation.mark_done(record, frozen)
    session = done.session(now_s=now_s)
    list_in_manifest(folder, session)
    record = _with_policies(folder, record, config, facts)
    due = canary_due(folder, config, record, session, accept=options.accept_canary, now_s=now_s)
    remove_other_sets(folder, frozen.name)
    plan = SessionPlan(
        root=folder.where,
        config=config,
        run_id=record.run_id,
        session_id=session.session_id,
        token=token,
        frozen_name=frozen.name,
        carried_schema=record.carried_schema,
        own_schema=record.own_schema,
        rows_error=session.rows_error,
        template=facts,
        rows_depend_on=f"{settings_fingerprint(record.identity)}-{facts.digest or 'unknown'}",
        canary=due.plan,
        accepted_shares=due.accepted,
        accepted_breaches=options.accepted_breaches,
    )
    return Prepared(plan=plan, session=session, row_states=done.row_states, excesses=due.excesses)


def run_identity(config: RunFile, columns: InputColumns) -> RunIdentity:
    """Return the settings that change rows, in the run file's own names."""
    settings: dict[str, object] = {
        "model": config.model,
        "thinking": config.thinking,
        "reasoning_in_history": config.reasoning_in_history,
        "chat_template_kwargs": dict(config.chat_template_kwargs),
        **{
            f"sampling.{key}": value
            for key, value in config.sampling.model_dump(exclude={"base"}).items()
        },
        "request": config.request or None,
        **{f"prompts.{name}": value for name, value in dataclasses.asdict(columns).items()},
        "prompts.system_prompt": config.prompts.system_prompt,
        "prompts.history": config.prompts.history,
        # Null by default, as in the runs of releases without the key.
        "prompts.system_turns": None if config.prompts.fits_system_turns else "as_given",
        "prompts.id_column": config.prompts.id_column,
        "prompts.keep_columns": list(config.prompts.keep_columns),
    }
    if config.engine.kind == "embedded" and config.engine.model_file is not None:
        settings["engine.model_file"] = Path(config.engine.model_file).name
    return RunIdentity(settings=settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """Rows of the input that are published."""

    parts: tuple[Part, ...]
    row_states: bytearray
    """A byte for each row of the input."""
    num_rows: int
    changed_id: str | None
    """The first row whose prompt is not the published one."""

    @property
    def num_published(self) -> int:
        """Published rows, those outside the input included."""
        return sum(len(part.row_ids) for part in self.parts)

    def session(self, *, now_s: float) -> Session:
        return Session(
            session_id=uuid.uuid4().hex[:8],
            started_at_s=now_s,
            rows_total=len(self.row_states),
            rows_done=self.num_rows,
            rows_error=sum(part.num_errors for part in self.parts),
            rows_outside_input=sum(part.num_rows for part in self.parts) - self.num_rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preparation:
    """The steps of one preparation."""

    config: RunFile
    folder: Folder
    options: SessionOptions
    now_s: float
    log: Callable[[str], None]

    # -- the chat template

    def template_facts(self, record: RunRecord | None) -> TemplateFacts:
        """Find what the model's template does; report it once, with what it cannot do."""
        found = find_facts(self.config, chat_template(self.config))
        facts = facts_of_run(record, found.facts, accept_drift=self.options.accept_drift)
        if record is not None and record.template == facts:
            return facts
        if facts.digest is None:
            self.log(f"event=template at_hand=false source={facts.source!r} why={found.why_none!r}")
        else:
            self.log(f"event=template at_hand=true source={facts.source!r} hash={facts.digest}")
        for warning in thinking_warnings(self.config, facts):
            self.log(f"event=warning {warning}")
        return facts

    # -- the input

    def freeze(self, record: RunRecord | None) -> FrozenPrompts:
        """Return the frozen prompts of this very input, read again only when it has changed."""
        config = self.config
        fingerprint = input_fingerprint(config.prompts)
        name = fingerprint or uuid.uuid4().hex[:16]
        frozen = frozen_prompts(self.folder, name) if fingerprint else None
        if frozen is not None:
            damage = frozen.damage()
            if damage is None:
                return frozen
            self.log(f"event=mended {damage}; the prompts are frozen again from the input")
        stream = read_prompts(config.prompts)
        if record is not None:
            # Settings that differ are known before a million rows are read.
            identity = run_identity(config, stream.columns)
            check_identity(record, identity, accept_drift=self.options.accept_drift)
        self.log(f"event=reading_prompts path={config.prompts.path} column={stream.columns.column}")
        for line in stream.left_out:
            self.log(f"event=input_left_out {line}")
        stream = dataclasses.replace(stream, prompts=self._with_progress(stream.prompts))
        frozen = freeze(self.folder, name, stream)
        self.log(f"event=prompts_read rows={frozen.num_rows} bad_rows={frozen.num_problems}")
        return frozen

    def _with_progress(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        for number, prompt in enumerate(prompts, start=1):
            if number % _PROGRESS_ROWS == 0:
                self.log(f"event=reading_prompts rows={number}")
            yield prompt

    # -- the folder's run

    def agree(self, record: RunRecord | None, frozen: FrozenPrompts) -> RunRecord:
        """Return the run's record, new or with the drift that the user accepts."""
        identity = run_identity(self.config, frozen.columns)
        if record is None:
            own = own_columns(schema_from_text(frozen.carried_schema).names)
            record = RunRecord(
                run_id=uuid.uuid4().hex[:16],
                created_at_s=self.now_s,
                identity=identity,
                carried_schema=frozen.carried_schema,
                columns=tuple(own.names),
                own_schema=schema_text(own),
            )
            write_run(self.folder, record)
            return record
        drift = check_identity(record, identity, accept_drift=self.options.accept_drift)
        record = _with_own_schema(self.folder, record)
        _check_columns_of_tools(record, frozen)
        if not drift:
            return record
        _check_kept_columns(drift)
        record = dataclasses.replace(record, identity=identity)
        return self._note_drift(record, drift)

    def mark_done(self, record: RunRecord, frozen: FrozenPrompts) -> tuple[RunRecord, _Done]:
        """Repair the folder, take rows back that are to be retried, and mark what is done.

        Raises ResumeError when the input is another one than the published rows had.
        """
        recovery = recover(self.folder, record, now_s=self.now_s)
        for report in recovery.reports:
            self.log(f"event=mended {report}")
        done = self._done(frozen, recovery.parts)
        drift = self._disjoint_input(done)
        options = self.options
        if options.retry_errors or options.retry_flags:
            # After that check: rows that are taken back may be the only ones that the inputs share.
            redo = RowsToRedo(
                row_ids=frozen.row_ids(), errors=options.retry_errors, flags=options.retry_flags
            )
            parts = take_back(self.folder, record, done.parts, redo, now_s=self.now_s)
            done = self._done(frozen, parts)
        drift = self._changed_input(done) or drift
        if drift is None:
            return record, done
        return self._note_drift(record, [drift], once=True), done

    def _done(self, frozen: FrozenPrompts, parts: tuple[Part, ...]) -> _Done:
        samples = self.config.samples_per_prompt
        states = bytearray(frozen.num_rows * samples)
        num_rows, changed_id = DoneRows.of(parts).mark(
            frozen.ids(),
            states,
            samples=samples,
            done=DONE,
            error_ids=lambda: error_row_ids(self.folder, parts),
        )
        return _Done(parts=parts, row_states=states, num_rows=num_rows, changed_id=changed_id)

    # -- an input that changed

    def _disjoint_input(self, done: _Done) -> str | None:
        """Return the drift to record when no published row is in the input. Raises ResumeError."""
        if not done.num_published or done.num_rows:
            return None
        path = self.config.prompts.path
        return self._accepted(
            f"prompts.path: none of the {done.num_published} published rows has its id in {path}"
        )

    def _changed_input(self, done: _Done) -> str | None:
        """Return the drift to record when a prompt changed under its id. Raises ResumeError."""
        if done.changed_id is None:
            return None
        return self._accepted(
            f"prompts.path: the prompt with id {done.changed_id!r} in {self.config.prompts.path} "
            f"is not the one that was published under that id"
        )

    def _accepted(self, drift: str) -> str:
        if not self.options.accept_drift:
            raise ResumeError(
                f"{drift}; this is another input: use another output.folder, or --accept-drift to "
                f"keep the published rows and go on"
            )
        return drift

    def _note_drift(
        self, record: RunRecord, drift: Sequence[str], *, once: bool = False
    ) -> RunRecord:
        """Log accepted drift and record it; a change of the input is recorded `once`."""
        for line in drift:
            self.log(f"event=drift_accepted {line}")
        new = [line for line in drift if not (once and line in record.accepted_drift)]
        if not new:
            return record
        record = dataclasses.replace(record, accepted_drift=(*record.accepted_drift, *new))
        write_run(self.folder, record)
        return record


def _check_kept_columns(drift: Sequence[str]) -> None:
    columns_drift = next((line for line in drift if line.startswith("prompts.keep_columns:")), None)
    if columns_drift is not None:
        raise ResumeError(
            f"{columns_drift}\nthe parts of one data set have the same columns, so --accept-drift "
            "does not reach this key; use another output.folder"
        )


def _check_columns_of_tools(record: RunRecord, frozen: FrozenPrompts) -> None:
    messages = schema_from_text(record.own_schema).field("messages").type.value_type
    if frozen.has_tools and messages.get_field_index("tool_calls") < 0:
        raise ResumeError(
            "output.folder: its parts have no columns for tools, because an earlier release began "
            "this run, and rows of prompts.path have tools; use another output.folder"
        )


def _with_own_schema(folder: Folder, record: RunRecord) -> RunRecord:
    """Record the columns of a run whose release recorded only their names."""
    if record.own_schema:
        return record
    schema = own_schema_of(folder, record)
    columns = tuple(schema.names)
    record = dataclasses.replace(record, columns=columns, own_schema=schema_text(schema))
    write_run(folder, record)
    return record


def _with_policies(
    folder: Folder, record: RunRecord, config: RunFile, facts: TemplateFacts
) -> RunRecord:
    """Record this session's quality policy and chat template, which the export follows."""
    quality = config.quality.model_dump()
    if (record.quality, record.template) == (quality, facts):
        return record
    record = dataclasses.replace(record, quality=quality, template=facts)
    write_run(folder, record)
    return record
