"""Source: an input opened for one pass over its rows as dicts. Only this module uses `datasets`.

Invariant: memory does not grow with the number of rows or the layout of the file. `datasets` is
imported only for the inputs that it reads: for files, a command starts 0.6 s sooner without it
(measured: datasets 5.2, 2026-11).
"""

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.store.object_store import Entry, Store, open_place, place
from schemas.config.requests import PromptsConfig
from schemas.config.run_file import is_url
from schemas.units import MIB

if TYPE_CHECKING:
    import datasets

_PARQUET_ENDINGS = (".parquet", ".pq")
_JSON_LINES_ENDINGS = (".jsonl", ".ndjson", ".json")
_KNOWN_ENDINGS = _PARQUET_ENDINGS + _JSON_LINES_ENDINGS
_READ_BATCH_ROWS = 512
_READ_BUFFER_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened input."""

    columns: tuple[str, ...]
    arrow_schema: object | None
    rows: Callable[[list[str]], Iterator[dict[str, object]]]
    """Iterate once over the named columns, one dict per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file of the input, on disk or in a store."""

    store: Store
    name: str
    size_bytes: int
    modified_ns: int

    @property
    def where(self) -> str:
        return place(self.store.where, self.name)

    @property
    def suffix(self) -> str:
        named = self.store.where.partition("?")[0] if self.name == "." else self.name
        return Path(named).suffix

    @contextmanager
    def opened(self) -> Iterator[Any]:
        with self.store.open_input(self.name) as file:
            yield file


def input_files(config: PromptsConfig) -> list[InputFile]:
    """List the input's files in order; empty for a hub name.

    Raises ConfigError for an existing path without readable files, and for a store that cannot be
    used.
    """
    if not is_url(config.path) and not Path(config.path).exists():
        return []
    store = open_place(config.path)
    top = store.root_entry()
    if top is not None and top.is_file:
        file = _input_file(store, top, ".")
        if file.suffix not in _KNOWN_ENDINGS:
            raise ConfigError(
                f"prompts.path: {config.path} ends in {file.suffix or 'nothing'!r}; expected "
                f".parquet, .jsonl, .ndjson or .json"
            )
        return [file]
    entries = sorted(store.files(), key=lambda entry: Path(entry.name).parts)
    files = [_input_file(store, entry, entry.name) for entry in entries]
    if store.is_local and _is_saved_data_set(Path(config.path)):
        return files
    visible = [file for file in files if not _is_hidden(file.name)]
    for endings in (_PARQUET_ENDINGS, _JSON_LINES_ENDINGS):
        chosen = [file for file in visible if file.suffix in endings]
        if chosen:
            return chosen
    if is_url(config.path) and not files:
        raise ConfigError(f"prompts.path: no file or folder {config.path}")
    raise ConfigError(f"prompts.path: folder {config.path} has no .parquet or JSON-lines file")


def _input_file(store: Store, entry: Entry, name: str) -> InputFile:
    return InputFile(
        store=store, name=name, size_bytes=entry.size_bytes, modified_ns=entry.modified_ns
    )


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def open_source(config: PromptsConfig) -> Source:
    """Open files, a saved data set or a hub name. Raises ConfigError when it cannot be read."""
    path = Path(config.path)
    files = input_files(config)
    if not files and (path.suffix in _KNOWN_ENDINGS or path.is_absolute()):
        raise ConfigError(f"prompts.path: no file or folder {config.path}")
    unreadable = f"cannot read {config.path}"
    if not files:
        unreadable = (
            f"{config.path} is not a file or folder here and could not be loaded as a hub data set"
        )
    with one_line_error(unreadable):
        if not files:
            return _data_set_source(_loaded(config.path, name=config.name, split=config.split))
        if path.is_dir() and _is_saved_data_set(path):
            return _data_set_source(_saved_split(path, config))
        if files[0].suffix in _JSON_LINES_ENDINGS:
            return _json_lines_source(files, config)
        return _parquet_source(files)


@contextmanager
def one_line_error(what: str) -> Iterator[None]:
    """Turn an error of a library into a ConfigError with the first line of its text.

    The exceptions of `datasets` differ by release and fault; a failed cast is a TypeError.
    """
    try:
        yield
    except (OSError, ValueError, TypeError, pa.ArrowException, *_errors_of_datasets()) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"prompts.path: {what}: {reason}") from None


def _errors_of_datasets() -> tuple[type[Exception], ...]:
    # A library that is not imported has raised nothing.
    library = sys.modules.get("datasets")
    return () if library is None else (library.exceptions.DatasetsError,)


def _is_saved_data_set(path: Path) -> bool:
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _quiet_datasets() -> Any:  # noqa: ANN401 - the library ships no types
    """Import the library without progress bars, logs and requests to the hub."""
    import datasets

    datasets.disable_progress_bars()
    # Else each opened file is reported to the hub, which takes 5 s each without a network.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # Errors are raised as well.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _saved_split(path: Path, config: PromptsConfig) -> "datasets.Dataset":
    library = _quiet_datasets()
    loaded = library.load_from_disk(str(path))
    if not isinstance(loaded, library.DatasetDict):
        return loaded
    if config.split not in loaded:
        raise ConfigError(
            f"prompts.split: {path} has no split {config.split!r}; it has {', '.join(loaded)}"
        )
    return loaded[config.split]


def _loaded(loader: str, **options: object) -> "datasets.IterableDataset":
    return _quiet_datasets().load_dataset(loader, streaming=True, **options)


def _data_set_source(data_set: "datasets.Dataset | datasets.IterableDataset") -> Source:
    names = data_set.column_names
    if names is None:
        data_set = data_set._resolve_features()  # noqa: SLF001 - the library's own way, unexported
        names = data_set.column_names or []
    schema = data_set.features.arrow_schema if data_set.features else None
    return Source(columns=tuple(names), arrow_schema=schema, rows=partial(_batched, data_set))


def _batched(
    data_set: "datasets.Dataset | datasets.IterableDataset", names: list[str]
) -> Iterator[dict[str, object]]:
    """Decode rows in batches, which is several times as fast as one by one."""
    for batch in data_set.select_columns(names).iter(batch_size=_READ_BATCH_ROWS):
        for values in zip(*(batch[name] for name in names), strict=True):
            yield dict(zip(names, values, strict=True))


def _parquet_source(files: list[InputFile]) -> Source:
    schema = _common_schema([_schema_of(file) for file in files])
    rows = partial(_parquet_rows, files, schema)
    return Source(columns=tuple(schema.names), arrow_schema=schema, rows=rows)


def _schema_of(file: InputFile) -> pa.Schema:
    with file.opened() as opened:
        return pq.read_schema(opened)


def _common_schema(schemas: list[pa.Schema]) -> pa.Schema:
    """Return the first file's columns; one without values there gets its type from the others."""
    try:
        common = pa.unify_schemas(schemas, promote_options="default")
    except pa.ArrowException:
        # The types clash: the file at fault is reported when it is read.
        return schemas[0]
    return pa.schema([common.field(name) for name in schemas[0].names])


def _parquet_rows(
    files: list[InputFile], schema: pa.Schema, names: list[str]
) -> Iterator[dict[str, object]]:
    """Yield the rows of all files with the types of the first.

    `datasets` is not used here, because it decodes whole row groups: one of 200,000 prompts of 2 KB
    needs 1.4 GB with it, and 0.13 GB here (measured: datasets 5.2).
    """
    types = pa.schema([schema.field(name) for name in names])
    options = {"pre_buffer": False, "buffer_size": _READ_BUFFER_BYTES}
    for file in files:
        with file.opened() as opened, pq.ParquetFile(opened, **options) as parquet:
            missing = [name for name in names if name not in parquet.schema_arrow.names]
            if missing:
                raise ConfigError(f"prompts.path: {file.where} has no column {missing[0]!r}")
            for batch in parquet.iter_batches(_READ_BATCH_ROWS, columns=names):
                table = pa.Table.from_batches([batch]).select(names)
                with one_line_error(
                    f"the columns of {file.where} are not those of {files[0].where}"
                ):
                    table = table.cast(types)
                yield from table.to_pylist()


def _json_lines_source(files: list[InputFile], config: PromptsConfig) -> Source:
    """Parse JSON lines without a schema: a column may be a list in one row and text in the next.

    The columns are those of the first rows, and of more until all that the run file names appear.
    """
    named = {config.column, config.id_column, config.system_column, *config.keep_columns} - {None}
    columns: dict[str, None] = {}
    for number, row in enumerate(_json_rows(files)):
        if number >= _READ_BATCH_ROWS and named <= columns.keys():
            break
        columns |= dict.fromkeys(row)
    if not columns:
        raise ConfigError(f"prompts.path: {config.path} has no rows")
    return Source(columns=tuple(columns), arrow_schema=None, rows=lambda _: _json_rows(files))


def _json_rows(files: list[InputFile]) -> Iterator[dict[str, object]]:
    for file in files:
        with one_line_error(f"cannot read {file.where}"), file.opened() as opened:
            texts = io.TextIOWrapper(io.BufferedReader(opened, _READ_BUFFER_BYTES), "utf-8")
            for number, text in enumerate(texts, start=1):
                line = text.removeprefix("\ufeff").removesuffix("\n")
                if line.strip():
                    yield _json_object(line, file.where, number)


def _json_object(text: str, file: str, number: int) -> dict[str, object]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"prompts.path: {file} line {number}: not JSON: {error.msg} at column {error.colno}; "
            f"expected one JSON object per line"
        ) from None
    except RecursionError:
        raise ConfigError(f"prompts.path: {file} line {number}: nested too deep") from None
    if not isinstance(row, dict):
        raise ConfigError(
            f"prompts.path: {file} line {number}: found a {type(row).__name__}; "
            f"expected one JSON object per line"
        )
    return row
