"""Parts: parquet files of finished rows, staged by workers and published by the coordinator.

Invariant: a part becomes visible only when it is complete. Workers write to `staging/`; the
coordinator alone moves a part to `data/` and then lists it, with its row ids, in
`manifest.jsonl`. `data/` contains published parquet and nothing else, because readers glob it.

The footer of a part names the part and its run, so recovery can list it again from the file alone
and tell it from a copy, a foreign file or a truncated one.
"""

import dataclasses
import io
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.dataset.frozen import schema_from_text
from pipeline.dataset.run_record import list_in_manifest, read_manifest
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA, STAGING
from schemas.completion import COMPLETION_SCHEMA, OPTIONAL_COLUMNS
from schemas.manifest import Part, RunRecord, Unlisted

_FOOTER_KEY = b"regenerate.part"
_ID_COLUMNS = ["row_id", "sample_index", "content_hash"]


# -- staging


def stage_table(folder: Folder, name: str, table: pa.Table, *, run_id: str, worker_id: str) -> Part:
    """Write a table of completions to `staging/<name>`, whole, synced and with its footer."""
    return stage_tables(folder, name, [table], run_id=run_id, worker_id=worker_id)


def stage_tables(
    folder: Folder, name: str, tables: Iterable[pa.Table], *, run_id: str, worker_id: str
) -> Part:
    """Write tables of completions to `staging/<name>` as one part, a row group each."""
    tables = iter(tables)
    first = next(tables)
    schema = first.schema.remove_metadata()
    counts, ids, buffer = _Counts(), [], io.BytesIO()
    with pq.ParquetWriter(buffer, schema, compression="zstd", write_page_checksum=True) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table.replace_schema_metadata(None))
            counts.add(table)
            ids.append(table.select(_ID_COLUMNS))
        footer = {"run_id": run_id, "name": name, "worker_id": worker_id, **counts.as_footer()}
        writer.add_key_value_metadata({_FOOTER_KEY: json.dumps(footer).encode()})
    data = buffer.getvalue()
    folder.write_whole(f"{STAGING}/{name}", data)
    return part_from(pa.concat_tables(ids), footer, len(data))


@dataclass(slots=True)
class _Counts:
    """Counts of a part's rows, for its footer."""

    num_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_turns: int = 0
    tokens_saved: int = 0
    flags: Counter[str] = field(default_factory=Counter)

    def add(self, table: pa.Table) -> None:
        for status, row_flags in states_and_flags(table):
            if status == "ok":
                self.flags.update(row_flags)
        turns = pc.list_flatten(table["turns"].combine_chunks())
        self.num_errors += _total(pc.equal(table["status"], "error"))
        self.prompt_tokens += _total(pc.struct_field(turns, "prompt_tokens"))
        self.completion_tokens += _total(pc.struct_field(turns, "completion_tokens"))
        self.num_turns += len(turns)
        self.tokens_saved += _tokens_saved(turns)

    def as_footer(self) -> dict[str, object]:
        return {
            "num_errors": self.num_errors,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "num_turns": self.num_turns,
            "tokens_saved": self.tokens_saved,
            "flag_counts": sorted(self.flags.items()),
        }


def _total(values: pa.Array) -> int:
    return int(pc.sum(values).as_py() or 0)


def _tokens_saved(turns: pa.Array) -> int:
    """Add up the tokens that turns had when they were continued; old runs do not record them."""
    if turns.type.get_field_index("continued") < 0:
        return 0
    places = pc.list_flatten(pc.struct_field(turns, "continued"))
    return _total(pc.struct_field(places, "at_token"))


def states_and_flags(table: pa.Table) -> Iterator[tuple[str, list[str]]]:
    """Status and quality flags of each row."""
    return zip(table["status"].to_pylist(), table["flags"].to_pylist(), strict=True)


def own_columns(carried: Collection[str]) -> pa.Schema:
    """Return the columns of a new run's parts before the carried ones."""
    return pa.schema(
        [f for f in COMPLETION_SCHEMA if not (f.name in OPTIONAL_COLUMNS and f.name in carried)]
    )


def own_schema_of(folder: Folder, record: RunRecord) -> pa.Schema:
    """Return the columns of the run's parts before the carried ones.

    All parts of a run have the same, so that `data/` is one data set whatever release resumes it.
    A run whose release recorded only their names has those of its parts.
    """
    if record.own_schema:
        return schema_from_text(record.own_schema)
    for place in (DATA, STAGING):
        for name in folder.names(place):
            schema = _schema_of_part(folder, f"{place}/{name}", record.run_id)
            if schema is not None:
                return pa.schema([field for field in schema if field.name in record.columns])
    return own_columns(schema_from_text(record.carried_schema).names)


def _schema_of_part(folder: Folder, path: str, run_id: str) -> pa.Schema | None:
    """Return the schema of a complete part of this run; None for any other file."""
    try:
        with opened_parquet(folder, path) as file:
            footer = footer_of(file)
            is_own = isinstance(footer, dict) and footer.get("run_id") == run_id
            return file.schema_arrow.remove_metadata() if is_own else None
    except (pa.ArrowException, OSError, ValueError):
        # Truncated or foreign: recovery reports it.
        return None


# -- publishing


def publish(folder: Folder, part: Part, *, now_s: float) -> Part:
    """Move a staged part to `data/`, then list it. Its rows are done when this returns."""
    folder.move(f"{STAGING}/{part.name}", f"{DATA}/{part.name}")
    listed = dataclasses.replace(part, published_at_s=now_s)
    list_in_manifest(folder, listed)
    return listed


def unlist(folder: Folder, name: str) -> None:
    """Record that the part's rows are no longer done."""
    list_in_manifest(folder, Unlisted(name=name))


def discard(folder: Folder, part: Part) -> None:
    """Remove a staged part that may not be published."""
    folder.remove(f"{STAGING}/{part.name}")


# -- reading


def footer_of(file: Any) -> Any:  # noqa: ANN401 - pyarrow ships no types
    """Parse the footer of an open parquet file; None where it has none of ours.

    Raises ValueError when it is not JSON.
    """
    text = (file.metadata.metadata or {}).get(_FOOTER_KEY)
    return None if text is None else json.loads(text)


def part_from(table: pa.Table, footer: dict[str, object], size_bytes: int) -> Part:
    """Build the Part of a file from its id columns and its footer.

    Raises KeyError or TypeError for a footer that is not ours.
    """
    counts = {key: value for key, value in footer.items() if key != "run_id"}
    counts["flag_counts"] = tuple(map(tuple, counts.get("flag_counts", ())))  # type: ignore[call-overload]
    return Part(
        size_bytes=size_bytes,
        row_ids=tuple(table["row_id"].to_pylist()),
        sample_indexes=tuple(table["sample_index"].to_pylist()),
        content_hashes=tuple(table["content_hash"].to_pylist()),
        **counts,  # type: ignore[arg-type]
    )


def rows_of(
    folder: Folder, names: Sequence[str], columns: Sequence[str]
) -> Iterator[dict[str, object]]:
    """Rows of published parts, one part at a time; missing and truncated parts are skipped."""
    for table in _tables(folder, names, columns):
        yield from table.to_pylist()


def example_completion(folder: Folder) -> dict[str, object] | None:
    """Row id and messages of a recently published `ok` row, without flags where one has none.

    None when there is no `ok` row.
    """
    names, flagged = [*reversed(read_manifest(folder).parts)], None
    for table in _tables(folder, names, ["row_id", "messages", "status", "flags"]):
        good = table.filter(pc.equal(table["status"], "ok"))
        clean = good.filter(pc.equal(pc.list_value_length(good["flags"]), 0))
        if clean.num_rows:
            return _example(clean)
        if flagged is None and good.num_rows:
            flagged = _example(good)
    return flagged


def _example(table: pa.Table) -> dict[str, object]:
    return table.select(["row_id", "messages"]).slice(0, 1).to_pylist()[0]  # type: ignore[no-any-return]


def _tables(folder: Folder, names: Sequence[str], columns: Sequence[str]) -> Iterator[pa.Table]:
    for name in names:
        try:
            with opened_parquet(folder, f"{DATA}/{name}") as file:
                table = file.read(columns=list(columns))
        except (pa.ArrowException, OSError):
            # Removed or truncated since it was published: the next session's recovery reports it.
            continue
        yield table
