"""Stage, publish, manifest, what is done.

Invariant: a part is visible only when whole, and a row is visible in at most one part. Workers
write finished rows to `staging/`; the coordinator alone moves a part to `data/` and then lists it
with its row ids in `manifest.jsonl`. What is done is the set of row ids in published parts, never
a count or a position. `data/` holds published parquet and nothing else, because readers glob.

A part names itself and its run in its footer, so a crash between the move and the listing is
mended from the file, and a copy, a stranger's file or a cut-off one is told apart and set aside
under `quarantine/`, where nothing is ever deleted.
"""

import dataclasses
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import ConfigError, ResumeError
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import (
    DATA,
    LOGS,
    MANIFEST_FILE,
    QUARANTINE,
    RUN_FILE,
    RUN_FILE_COPY,
    STAGING,
)
from schemas.completion import COMPLETION_SCHEMA, Completion
from schemas.config import RunFile, stored_run_file
from schemas.manifest import (
    CanaryEvent,
    EngineRun,
    FailedRow,
    Part,
    RunIdentity,
    RunManifest,
    RunRecord,
    Session,
    event_line,
    manifest_from_lines,
)

FOOTER_KEY = b"regenerate.part"

RowKey = str | tuple[str, int]
"""A row id, with its sample index when that is not 0: a million bare strings cost half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What an output folder holds after it was put in order."""

    parts: tuple[Part, ...]
    reports: tuple[str, ...]
    """One line for each thing that was not as a clean stop leaves it."""


# -- a worker's side


def stage_part(
    folder: Folder,
    name: str,
    completions: Sequence[Completion],
    *,
    run_id: str,
    carried_schema: pa.Schema,
    worker_id: str,
) -> Part:
    """Write `completions` whole and synced to `staging/<name>`; nothing is visible yet."""
    table = completion_table(completions, carried_schema)
    summary = {
        "run_id": run_id,
        "name": name,
        "worker_id": worker_id,
        "num_errors": sum(row.status == "error" for row in completions),
        "prompt_tokens": sum(row.prompt_tokens for row in completions),
        "completion_tokens": sum(row.completion_tokens for row in completions),
        "num_turns": sum(len(row.turns) for row in completions),
        "flag_counts": flag_counts((row.status, row.flags) for row in completions),
    }
    data = part_bytes(table, summary)
    folder.write_whole(f"{STAGING}/{name}", data)
    return part_from(table, summary, len(data))


def flag_counts(rows: Iterable[tuple[str, Iterable[str]]]) -> list[tuple[str, int]]:
    counts = Counter(flag for status, flags in rows if status == "ok" for flag in flags)
    return sorted(counts.items())


def completion_table(completions: Sequence[Completion], carried_schema: pa.Schema) -> pa.Table:
    """COMPLETION_SCHEMA and the carried columns, a row each."""
    rows = [_flat(completion) for completion in completions]
    columns = [
        pa.array([row[column.name] for row in rows], type=column.type)
        for column in COMPLETION_SCHEMA
    ]
    columns += [_carried_array(completions, column) for column in carried_schema]
    return pa.table(columns, schema=pa.schema([*COMPLETION_SCHEMA, *carried_schema]))


def _carried_array(completions: Sequence[Completion], column: pa.Field) -> pa.Array:
    values = [completion.carried.get(column.name) for completion in completions]
    if pa.types.is_string(column.type):
        values = [_carried_text(value) for value in values]
    try:
        return pa.array(values, type=column.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ResumeError(
            f"prompts.keep_columns: {column.name!r} holds values that are not {column.type}, "
            f"the type that this run's earlier parts have: {error}"
        ) from None


def _carried_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _flat(completion: Completion) -> dict[str, object]:
    row = {field.name: getattr(completion, field.name) for field in dataclasses.fields(completion)}
    row["messages"] = [dataclasses.asdict(message) for message in completion.messages]
    row["turns"] = [dataclasses.asdict(turn) for turn in completion.turns]
    row["sampling"] = dataclasses.asdict(completion.sampling)
    row["started_at"] = datetime.fromtimestamp(completion.started_at_s, UTC)
    row["finished_at"] = datetime.fromtimestamp(completion.finished_at_s, UTC)
    return row


# -- the coordinator's side


def publish(folder: Folder, part: Part, *, now_s: float) -> Part:
    """Move a staged part to `data/`, then list it. Its rows are done when this returns."""
    folder.move(f"{STAGING}/{part.name}", f"{DATA}/{part.name}")
    listed = dataclasses.replace(part, published_at_s=now_s)
    folder.append_line(MANIFEST_FILE, event_line("part", listed))
    return listed


def discard(folder: Folder, part: Part) -> None:
    """Drop a staged part that may not be published."""
    folder.remove(f"{STAGING}/{part.name}")


def list_failed(folder: Folder, row: FailedRow) -> None:
    folder.append_line(MANIFEST_FILE, event_line("failed", row))


def list_canary(folder: Folder, event: CanaryEvent) -> None:
    folder.append_line(MANIFEST_FILE, event_line("canary", event))


def list_engine(folder: Folder, engine: EngineRun) -> None:
    folder.append_line(MANIFEST_FILE, event_line("engine", engine))


def begin_session(folder: Folder, session: Session) -> None:
    folder.append_line(MANIFEST_FILE, event_line("session", session))


# -- the driver's side


def read_manifest(folder: Folder) -> RunManifest:
    return manifest_from_lines(folder.read_lines(MANIFEST_FILE))


def read_run(folder: Folder) -> RunRecord | None:
    """The folder's run; None for a fresh folder. Raises ResumeError when it cannot be read."""
    if not folder.exists(RUN_FILE):
        return None
    try:
        return RunRecord.from_json(folder.read(RUN_FILE).decode())
    except (ValueError, KeyError, TypeError) as error:
        raise ResumeError(f"{folder.place(RUN_FILE)}: not a run record of ours: {error}") from None


def example_completion(folder: Folder) -> dict[str, object] | None:
    """Row id and messages of one published completion, an `ok` one where there is any."""
    for name in reversed(read_manifest(folder).parts):
        try:
            with opened_parquet(folder, f"{DATA}/{name}") as file:
                table = file.read(columns=["row_id", "status", "messages"])
        except (pa.ArrowException, OSError):
            # Taken away or cut since it was published; the next session reports it.
            continue
        good = table.filter(pc.equal(table["status"], "ok"))
        if good.num_rows:
            return good.slice(0, 1).to_pylist()[0]  # type: ignore[no-any-return]
    return None


def write_run(folder: Folder, record: RunRecord) -> None:
    for name in (DATA, STAGING, LOGS):
        folder.make(name)
    folder.write_whole(RUN_FILE, record.to_json().encode())


def check_identity(record: RunRecord, identity: RunIdentity, *, accept_drift: bool) -> list[str]:
    """The settings that differ from the folder's run, a line each.

    Raises ResumeError with those lines unless `accept_drift`.
    """
    lines = [
        f"{name}: the run in this folder has {ours!r}, the run file says {theirs!r}"
        for name, ours, theirs in record.identity.differences(identity)
    ]
    if lines and not accept_drift:
        raise ResumeError(
            "\n".join(lines) + "\nrows of both settings would stand in one data set; use another "
            "output.folder, or --accept-drift to go on"
        )
    return lines


def check_columns(record: RunRecord) -> None:
    """Raises ResumeError for a folder whose parts have other columns than those written here."""
    ours, theirs = set(COMPLETION_SCHEMA.names), set(record.columns)
    if ours != theirs:
        names = ", ".join(sorted(ours ^ theirs))
        raise ResumeError(
            f"output.folder: its parts were written by another version of this project, with other "
            f"columns ({names}); finish it with that version, or use another folder"
        )


def recover(folder: Folder, record: RunRecord, *, now_s: float) -> Recovery:
    """Put the folder in order after any crash, and tell what is done.

    Whole parts in `staging/` are published, since their rows are finished. Whatever in `data/` is
    not a whole part of this run is moved to `quarantine/` and reported.
    """
    folder.end_last_line(MANIFEST_FILE)
    manifest = read_manifest(folder)
    reports = [
        f"{MANIFEST_FILE} line {number} cannot be read and is left out"
        for number in manifest.unreadable_lines
    ]
    done: set[RowKey] = set()
    parts: list[Part] = []
    for part, report in _published_parts(folder, manifest, record, done, now_s):
        parts += [part] if part else []
        reports += [report] if report else []
    for part, report in _staged_parts(folder, record, done, now_s):
        parts += [part] if part else []
        reports += [report] if report else []
    return Recovery(parts=tuple(parts), reports=tuple(reports))


def _published_parts(
    folder: Folder,
    manifest: RunManifest,
    record: RunRecord,
    done: set[RowKey],
    now_s: float,
) -> Iterator[tuple[Part | None, str | None]]:
    present = folder.sizes(DATA)
    for name in [name for name in manifest.parts if name not in present]:
        rows = manifest.parts[name].num_rows
        folder.append_line(MANIFEST_FILE, event_line("unlisted", {"name": name}))
        yield None, f"{DATA}/{name} is listed but gone; its {rows} rows are done again"
    # Listed parts first: of a part and its copy, the listed one stays.
    for name in sorted(present, key=lambda name: (name not in manifest.parts, name)):
        listed = manifest.parts.get(name)
        is_as_listed = listed and listed.size_bytes == present[name]
        if listed and is_as_listed and _claim(listed, done):
            yield listed, None
            continue
        found = _own_part(folder, f"{DATA}/{name}", record)
        if isinstance(found, Part) and _claim(found, done):
            adopted = dataclasses.replace(found, published_at_s=now_s)
            folder.append_line(MANIFEST_FILE, event_line("part", adopted))
            yield adopted, None if not listed else f"{DATA}/{name} was listed again from its rows"
            continue
        why = "holds rows that another part has" if isinstance(found, Part) else found
        yield None, _quarantined(folder, f"{DATA}/{name}", why, listed)


def _staged_parts(
    folder: Folder, record: RunRecord, done: set[RowKey], now_s: float
) -> Iterator[tuple[Part | None, str | None]]:
    for name in folder.names(STAGING):
        if name.endswith(".tmp"):
            folder.remove(f"{STAGING}/{name}")
            continue
        found = _own_part(folder, f"{STAGING}/{name}", record)
        if not isinstance(found, Part):
            yield None, _quarantined(folder, f"{STAGING}/{name}", found, None)
        elif _claim(found, done):
            yield publish(folder, found, now_s=now_s), None
        else:
            # The same rows were published under a later lease.
            discard(folder, found)


def _claim(part: Part, done: set[RowKey]) -> bool:
    pairs = zip(part.row_ids, part.sample_indexes, strict=True)
    keys: set[RowKey] = {(row_id, sample) if sample else row_id for row_id, sample in pairs}
    if len(keys) < part.num_rows or not done.isdisjoint(keys):
        return False
    done |= keys
    return True


def _own_part(folder: Folder, path: str, record: RunRecord) -> Part | str:
    """The part in a file as its own footer and rows tell it, or why it is none of this run's."""
    try:
        with opened_parquet(folder, path) as file:
            metadata = (file.schema_arrow.metadata or {}).get(FOOTER_KEY)
            if metadata is None:
                return "is not a part of this run"
            summary = json.loads(metadata)
            table = file.read(columns=["row_id", "sample_index", "content_hash"])
        if summary["run_id"] != record.run_id:
            return "belongs to another run"
        if summary["name"] != path.rpartition("/")[2]:
            return f"is a copy of {summary['name']}"
        return part_from(table, summary, folder.size_bytes(path))
    except (pa.ArrowInvalid, pa.ArrowException, OSError, ValueError):
        return "is cut off or no parquet file"
    except (KeyError, TypeError):
        # It bears our footer key, and a footer or columns that are none of ours.
        return "is not a part of this run"


def _quarantined(folder: Folder, path: str, why: str, listed: Part | None) -> str:
    name = path.rpartition("/")[2]
    folder.make(QUARANTINE)
    target, number = f"{QUARANTINE}/{name}", 1
    while folder.exists(target):
        target, number = f"{QUARANTINE}/{name}.{number}", number + 1
    folder.move(path, target)
    if listed:
        folder.append_line(MANIFEST_FILE, event_line("unlisted", {"name": name}))
    again = f"; its {listed.num_rows} rows are done again" if listed else ""
    return f"{path} {why}; moved to {target}{again}"


def rows_of(
    folder: Folder, names: Sequence[str], columns: Sequence[str]
) -> Iterator[dict[str, object]]:
    """Rows of published parts, a part at a time; what is gone or cut is left out."""
    for name in names:
        try:
            with opened_parquet(folder, f"{DATA}/{name}") as file:
                table = file.read(columns=list(columns))
        except (pa.ArrowException, OSError):
            # Taken away since it was published; the next session reports it.
            continue
        yield from table.to_pylist()


# -- what is done


# -- parquet


def part_bytes(table: pa.Table, summary: dict[str, object]) -> bytes:
    metadata = {FOOTER_KEY: json.dumps(summary).encode()}
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), buffer, compression="zstd")
    return buffer.getvalue()


def part_from(table: pa.Table, summary: dict[str, object], size_bytes: int) -> Part:
    counted = {key: value for key, value in summary.items() if key != "run_id"}
    counted["flag_counts"] = tuple(map(tuple, counted.get("flag_counts", ())))  # type: ignore[call-overload]
    return Part(
        size_bytes=size_bytes,
        row_ids=tuple(table["row_id"].to_pylist()),
        sample_indexes=tuple(table["sample_index"].to_pylist()),
        content_hashes=tuple(table["content_hash"].to_pylist()),
        **counted,  # type: ignore[arg-type]
    )


def check_has_run(folder: Folder) -> RunRecord:
    """The folder's run. Raises ConfigError where there is no folder, or no run in it."""
    if (fault := folder.fault()) is not None:
        raise ConfigError(f"{folder.where}: {fault}; expected the output.folder of a run")
    if (record := read_run(folder)) is None:
        raise ConfigError(f"{folder.where}: no run here: it has no {RUN_FILE}")
    return record


def check_has_begun(folder: Folder, manifest: RunManifest) -> None:
    """Raises ConfigError where no session is listed, or none of the lines is an event."""
    if not manifest.sessions and manifest.unreadable_lines:
        where = f"{folder.place(MANIFEST_FILE)} line {manifest.unreadable_lines[0]}"
        raise ConfigError(f"{where}: found no event of a run, and no session in any other line")
    if not manifest.sessions:
        raise ConfigError(f"{folder.where}: the run here has not begun: it has read no prompts yet")


def write_run_file(folder: Folder, config: RunFile) -> None:
    """The run file as the session has it, for reports; it holds no secret."""
    folder.write_whole(RUN_FILE_COPY, config.model_dump_json(indent=1).encode())


def read_run_file_copy(folder: Folder) -> RunFile | None:
    if not folder.exists(RUN_FILE_COPY):
        return None
    return stored_run_file(folder.read(RUN_FILE_COPY))
