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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import ResumeError
from pipeline.parquet_files import opened_parquet
from pipeline.storage import Folder
from schemas.completion import COMPLETION_SCHEMA, Completion
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

DATA, STAGING, QUARANTINE, LOGS = "data", "staging", "quarantine", "logs"
RUN_FILE, MANIFEST_FILE = "run.json", "manifest.jsonl"

_FOOTER_KEY = b"regenerate.part"

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
        "flag_counts": _flag_counts((row.status, row.flags) for row in completions),
    }
    data = _part_bytes(table, summary)
    folder.write_whole(f"{STAGING}/{name}", data)
    return _part_from(table, summary, len(data))


def _flag_counts(rows: Iterable[tuple[str, Iterable[str]]]) -> list[tuple[str, int]]:
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
            metadata = (file.schema_arrow.metadata or {}).get(_FOOTER_KEY)
            if metadata is None:
                return "is not a part of this run"
            summary = json.loads(metadata)
            table = file.read(columns=["row_id", "sample_index", "content_hash"])
        if summary["run_id"] != record.run_id:
            return "belongs to another run"
        if summary["name"] != path.rpartition("/")[2]:
            return f"is a copy of {summary['name']}"
        return _part_from(table, summary, folder.size_bytes(path))
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


def take_back_errors(
    folder: Folder,
    record: RunRecord,
    parts: Sequence[Part],
    row_ids: Iterable[pa.Array],
    *,
    errors: bool = True,
    flags: Collection[str] = (),
    now_s: float,
) -> tuple[Part, ...]:
    """Rewrite parts without the error rows of `row_ids`, so that those can be asked again.

    With `flags`, rows that bear one of them go too.

    Each part is replaced in one rename, so a row is never visible twice; a crash leaves every
    part either as it was or without its error rows.
    """
    kept: list[Part] = []
    asked = pa.concat_arrays(list(row_ids))
    for part in parts:
        is_asked = (errors and part.num_errors) or dict(part.flag_counts).keys() & set(flags)
        remaining: Part | None = part
        if is_asked:
            remaining = _without(folder, record, part, asked, errors=errors, flags=set(flags))
        if remaining is None:
            folder.remove(f"{DATA}/{part.name}")
            folder.append_line(MANIFEST_FILE, event_line("unlisted", {"name": part.name}))
            continue
        if remaining is not part:
            # Unlisted first: between the move and the listing the file alone is believed.
            folder.append_line(MANIFEST_FILE, event_line("unlisted", {"name": part.name}))
            remaining = publish(folder, remaining, now_s=now_s)
        kept.append(remaining)
    return tuple(kept)


def _without(
    folder: Folder,
    record: RunRecord,
    part: Part,
    asked: pa.Array,
    *,
    errors: bool,
    flags: set[str],
) -> Part | None:
    """The part staged anew; itself when none of its rows is asked for; None when all are."""
    with opened_parquet(folder, f"{DATA}/{part.name}") as file:
        table = file.read()
        summary = json.loads(file.schema_arrow.metadata[_FOOTER_KEY])
    bad = [
        (errors and status == "error") or not flags.isdisjoint(found)
        for status, found in _states_and_flags(table)
    ]
    stays = pc.invert(pc.and_(pa.array(bad, pa.bool_()), pc.is_in(table["row_id"], asked)))
    num_before, table = table.num_rows, table.filter(stays)
    if table.num_rows == num_before:
        return part
    if not table.num_rows:
        return None
    num_errors = pc.sum(pc.equal(table["status"], "error")).as_py()
    summary |= {"num_errors": num_errors, "run_id": record.run_id}
    summary["num_turns"] = pc.sum(pc.list_value_length(table["turns"])).as_py()
    summary["flag_counts"] = _flag_counts(_states_and_flags(table))
    summary |= {name: _turn_sum(table, name) for name in ("prompt_tokens", "completion_tokens")}
    data = _part_bytes(table, summary)
    folder.write_whole(f"{STAGING}/{part.name}", data)
    return _part_from(table, summary, len(data))


def _states_and_flags(table: pa.Table) -> Iterator[tuple[str, list[str]]]:
    yield from zip(table["status"].to_pylist(), table["flags"].to_pylist(), strict=True)


def _turn_sum(table: pa.Table, name: str) -> int:
    turns = pc.list_flatten(table["turns"].combine_chunks())
    return int(pc.sum(pc.struct_field(turns, name)).as_py() or 0)


# -- what is done


@dataclass(slots=True)
class DoneRows:
    """The published rows, held as Arrow columns: a million take tens of megabytes."""

    row_ids: pa.Array
    sample_indexes: pa.Array
    content_hashes: pa.Array

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "DoneRows":
        return cls(
            pa.array([row_id for part in parts for row_id in part.row_ids], pa.string()),
            pa.array([s for part in parts for s in part.sample_indexes], pa.int32()),
            pa.array([h for part in parts for h in part.content_hashes], pa.string()),
        )

    def mark(
        self,
        ids: Iterator[tuple[pa.Array, pa.Array]],
        states: bytearray,
        *,
        samples: int,
        done: int,
    ) -> tuple[int, str | None]:
        """Set `states[prompt_number * samples + sample_index] = done` for every published row.

        `ids` are the input's row ids and content hashes in order. Returns how many rows were
        marked, and the first row id whose published content is another than the input's.
        """
        if not len(self.row_ids):
            return 0, None
        batches = list(ids)
        row_ids = pa.chunked_array([ids for ids, _ in batches], pa.string())
        hashes = pa.chunked_array([hashes for _, hashes in batches], pa.string())
        marked, first_changed = 0, len(row_ids)
        for sample in range(samples):
            published_ids, published_hashes = self._of_sample(sample)
            # All of the input at once: each look-up makes a table of all that is published.
            found = pc.index_in(row_ids, value_set=published_ids)
            for number in _numbers_where(pc.is_valid(found)):
                states[number * samples + sample] = done
                marked += 1
            same = pc.equal(pc.take(published_hashes, found), hashes)
            others = _numbers_where(pc.invert(pc.fill_null(same, True)))
            first_changed = min(first_changed, next(others, first_changed))
        changed = row_ids[first_changed].as_py() if first_changed < len(row_ids) else None
        return marked, changed

    def _of_sample(self, sample: int) -> tuple[pa.Array, pa.Array]:
        chosen = pc.equal(self.sample_indexes, pa.scalar(sample, pa.int32()))
        return self.row_ids.filter(chosen), self.content_hashes.filter(chosen)


def _numbers_where(true: pa.ChunkedArray) -> Iterator[int]:
    start = 0
    for chunk in true.chunks:
        for number in pc.indices_nonzero(chunk).to_pylist():
            yield start + number
        start += len(chunk)


# -- parquet


def _part_bytes(table: pa.Table, summary: dict[str, object]) -> bytes:
    metadata = {_FOOTER_KEY: json.dumps(summary).encode()}
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), buffer, compression="zstd")
    return buffer.getvalue()


def _part_from(table: pa.Table, summary: dict[str, object], size_bytes: int) -> Part:
    counted = {key: value for key, value in summary.items() if key != "run_id"}
    counted["flag_counts"] = tuple(map(tuple, counted.get("flag_counts", ())))  # type: ignore[call-overload]
    return Part(
        size_bytes=size_bytes,
        row_ids=tuple(table["row_id"].to_pylist()),
        sample_indexes=tuple(table["sample_index"].to_pylist()),
        content_hashes=tuple(table["content_hash"].to_pylist()),
        **counted,  # type: ignore[arg-type]
    )
