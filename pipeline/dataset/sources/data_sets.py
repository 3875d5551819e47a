"""Saved data sets and hub names. Only this module uses `datasets`.

It is imported only for the inputs that it reads: for files, a command starts 0.6 s sooner without
it (measured: datasets 5.2, 2026-11).
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.dataset.sources.arrow_rows import READ_BATCH_ROWS, table_rows
from pipeline.dataset.sources.rows import Row, RowFile
from pipeline.errors import ConfigError
from pipeline.untrusted.parsing import UNREADABLE
from schemas.config.requests import PromptsConfig

if TYPE_CHECKING:
    import datasets


def saved_data_set(path: Path, config: PromptsConfig) -> RowFile:
    """Open what `save_to_disk` wrote. Raises ConfigError for a split that it does not have."""
    _check_files_are_inside(path)
    library = _quiet_datasets()
    loaded = library.load_from_disk(str(path))
    if isinstance(loaded, library.DatasetDict):
        return _row_file(loaded[_split(loaded, path, config)], str(path))
    if config.split not in (None, "train", str(loaded.split)):
        raise ConfigError(
            f"prompts.split: found {config.split!r}, but {path} is a data set without splits; "
            f"remove the key"
        )
    return _row_file(loaded, str(path))


def hub_data_set(config: PromptsConfig) -> RowFile:
    loaded = _quiet_datasets().load_dataset(
        config.path, name=config.name, split=config.split or "train", streaming=True
    )
    return _row_file(loaded, config.path)


def _quiet_datasets() -> Any:  # noqa: ANN401 - the library ships no types
    """Import the library without progress bars, logs and requests to the hub."""
    import datasets

    datasets.disable_progress_bars()
    # Else each opened file is reported to the hub, which takes 5 s each without a network.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # Errors are raised as well.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _split(loaded: "datasets.DatasetDict", path: Path, config: PromptsConfig) -> str:
    """Return the split that is named, else `train`, else the only one."""
    split = config.split or (next(iter(loaded)) if len(loaded) == 1 else "train")
    if split not in loaded:
        raise ConfigError(
            f"prompts.split: {path} has no split {split!r}; it has {', '.join(loaded)}"
        )
    return split


def _check_files_are_inside(path: Path) -> None:
    """Raise ConfigError for a data set that names files outside its folder, or without rows."""
    for state in path.glob("**/state.json"):
        names = _listed_files(state)
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"prompts.path: {state} names {name!r}, outside its folder")
        if not names and state.parent == path:
            raise ConfigError(f"prompts.path: {path} has no rows")


def _listed_files(state: Path) -> list[str]:
    """Read the names of a data set's files. Raises ConfigError for another kind of file."""
    try:
        listed = json.loads(state.read_text())["_data_files"]
        return [str(entry["filename"]) for entry in listed]
    except UNREADABLE:
        raise ConfigError(f"prompts.path: {state} is not what save_to_disk writes") from None


def _row_file(data_set: "datasets.Dataset | datasets.IterableDataset", where: str) -> RowFile:
    names = data_set.column_names
    if names is None:
        data_set = data_set._resolve_features()  # noqa: SLF001 - the library's own way, unexported
        names = data_set.column_names or []
    schema = data_set.features.arrow_schema if data_set.features else None
    rows = partial(_batched, data_set, where)
    return RowFile(where=where, columns=tuple(names), arrow_schema=schema, rows=rows)


def _batched(
    data_set: "datasets.Dataset | datasets.IterableDataset",
    where: str,
    names: list[str],
    types: object | None,
) -> Iterator[Row]:
    """Decode rows in batches, which is several times as fast as one by one."""
    chosen = data_set.select_columns(names).with_format("arrow")
    for table in chosen.iter(batch_size=READ_BATCH_ROWS):
        yield from table_rows(table.select(names), types or table.schema, where)
