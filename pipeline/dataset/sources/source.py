"""Source: an input opened for one pass over its rows.

Invariant: memory does not grow with the number of rows or the layout of the files, and no file or
row is dropped silently: a row that cannot be read is a BadRow, a file that is not read is named.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.dataset.sources.arrow_rows import arrow_file, parquet_file
from pipeline.dataset.sources.csv_rows import csv_file
from pipeline.dataset.sources.data_sets import hub_data_set, saved_data_set
from pipeline.dataset.sources.files import InputFile, is_file_name, list_input
from pipeline.dataset.sources.json_rows import json_file
from pipeline.dataset.sources.library_errors import one_line_error
from pipeline.dataset.sources.rows import BadRow, Row, RowFile
from pipeline.errors import ConfigError
from schemas.config.requests import PromptsConfig
from schemas.config.section import is_url

# Rows of a JSON file whose keys are its columns.
_ROWS_LOOKED_AT = 512

_READERS: dict[str, Callable[[InputFile], RowFile]] = {
    "parquet": parquet_file,
    "json": json_file,
    "json_lines": json_file,
    "csv": csv_file,
    "arrow": arrow_file,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened input."""

    columns: tuple[str, ...]
    arrow_schema: object | None
    """The columns' types (a pyarrow.Schema); None where only the rows show them."""
    rows: Callable[[list[str], Collection[str]], Iterator[Row]]
    """Iterate once over the named columns; every file must have those of the second list."""
    left_out: tuple[str, ...] = ()
    """Files that are not read, one line per reason."""


def open_source(config: PromptsConfig, named: Collection[str]) -> Source:
    """Open files, a saved data set or a hub name; `named` are the columns of the run file.

    Raises ConfigError when it cannot be read.
    """
    listing = list_input(config)
    path = Path(config.path)
    if listing.is_saved_data_set:
        with one_line_error(f"cannot read {config.path}"):
            return _source([saved_data_set(path, config)])
    if listing.files:
        files = [_opened(file) for file in listing.files]
        return _source(files, listing.left_out, named)
    if is_file_name(config.path) or path.is_absolute() or is_url(config.path):
        raise ConfigError(f"prompts.path: no file or folder {config.path}")
    with one_line_error(
        f"{config.path} is not a file or folder here and could not be loaded as a hub data set"
    ):
        return _source([hub_data_set(config)])


def _opened(file: InputFile) -> RowFile:
    with one_line_error(f"cannot read {file.where}"):
        return _READERS[str(file.format)](file)


def _source(
    files: list[RowFile], left_out: tuple[str, ...] = (), named: Collection[str] = ()
) -> Source:
    columns = _columns(files, named)
    if not columns:
        raise ConfigError(f"prompts.path: {files[0].where} has no rows{_example_fault(files)}")
    schema = _common_schema(files)
    return Source(
        columns=columns,
        arrow_schema=schema,
        rows=partial(_rows, files, schema),
        left_out=left_out,
    )


def _columns(files: list[RowFile], named: Collection[str]) -> tuple[str, ...]:
    """Return the columns of all files.

    Those of JSON are the keys of the first rows, and of more until all that are named appear.
    """
    columns: dict[str, None] = {}
    for file in files:
        columns |= dict.fromkeys(_first_keys(file) if file.columns is None else file.columns)
    missing = set(named) - columns.keys()
    if missing:
        columns |= dict.fromkeys(_later_keys(files, missing))
    return tuple(columns)


def _first_keys(file: RowFile) -> Iterator[str]:
    with one_line_error(f"cannot read {file.where}"):
        for row in islice(file.rows([], None), _ROWS_LOOKED_AT):
            if isinstance(row, dict):
                yield from row


def _later_keys(files: list[RowFile], missing: set[str]) -> Iterator[str]:
    for file in (file for file in files if file.columns is None):
        with one_line_error(f"cannot read {file.where}"):
            for row in file.rows([], None):
                found = missing & row.keys() if isinstance(row, dict) else set()
                yield from found
                missing -= found
                if not missing:
                    return


def _example_fault(files: list[RowFile]) -> str:
    """Return what is wrong with the first bad row, for an input that has no other."""
    rows = (row for file in files if file.columns is None for row in file.rows([], None))
    fault = next((row.problem.text for row in rows if isinstance(row, BadRow)), None)
    return "" if fault is None else f" that can be read: {fault}"


def _common_schema(files: list[RowFile]) -> Any:  # noqa: ANN401 - pyarrow ships no types
    """Return the types of all files' columns; None where a file has no types.

    A column without values in one file gets its type from the others.
    """
    schemas: list[Any] = [file.arrow_schema for file in files]
    if any(schema is None for schema in schemas):
        return None
    try:
        return pa.unify_schemas(schemas, promote_options="default")
    except pa.ArrowException:
        # The types clash: the file at fault is reported when it is read.
        known: dict[str, Any] = {}
        for schema in schemas:
            known = {**{field.name: field for field in schema}, **known}
        return pa.schema(list(known.values()))


def _rows(
    files: Sequence[RowFile], schema: object | None, names: list[str], required: Collection[str]
) -> Iterator[Row]:
    for file in files:
        present = [name for name in names if file.columns is None or name in file.columns]
        missing = [name for name in required if name not in present]
        if missing:
            raise ConfigError(f"prompts.path: {file.where} has no column {missing[0]!r}")
        with one_line_error(f"cannot read {file.where}"):
            yield from file.rows(present, schema)
