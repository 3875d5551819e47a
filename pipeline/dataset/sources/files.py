"""Files of the input: which are read, in which format, and which are left out and why."""

import io
import lzma
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from pipeline.errors import ConfigError
from pipeline.store.object_store import Entry, Store, open_place, place
from schemas.config.requests import PromptsConfig
from schemas.config.section import is_url
from schemas.units import MIB

Format = Literal["parquet", "json_lines", "json", "csv", "arrow"]

_FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "json_lines",
    ".ndjson": "json_lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
_TEXT_FORMATS = ("json_lines", "json", "csv")
_READ_BUFFER_BYTES = MIB
_MOST_NAMES_SHOWN = 8

# What `datasets` writes about a data set.
_METADATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
# Words in file names and the splits that they mean: datasets/data_files.py, 5.2.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# The names that `datasets` gives to files on the hub: train-00000-of-00012.parquet.
_SHARD_NAME = re.compile(r"(?:^|/)(?P<split>\w+(?:\.\w+)*)-[0-9]{5}-of-[0-9]{5}")


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
    def format(self) -> Format | None:
        """Format by the ending of the name; None for one that is not read."""
        suffixes = self._suffixes
        if not suffixes:
            return None
        if suffixes[-1] not in _COMPRESSIONS:
            return _FORMATS.get(suffixes[-1])
        known = _FORMATS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return known if known in _TEXT_FORMATS else None

    @property
    def ending(self) -> str:
        """Return the end of the name that tells the format."""
        suffixes = self._suffixes
        is_compressed = suffixes and suffixes[-1] in _COMPRESSIONS
        return "".join(suffixes[-2:] if is_compressed else suffixes[-1:])

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the file as it is, for random access."""
        with self.store.open_input(self.name) as file:
            yield file

    @contextmanager
    def opened_text(self) -> Iterator[io.BufferedReader]:
        """Open the file as a stream of bytes, decompressed."""
        compression = _COMPRESSIONS.get(self._suffixes[-1]) if self._suffixes else None
        with self.opened() as file, _decompressed(file, compression) as raw:
            yield io.BufferedReader(raw, _READ_BUFFER_BYTES)

    @property
    def _suffixes(self) -> list[str]:
        named = self.store.where.partition("?")[0] if self.name == "." else self.name
        return [suffix.lower() for suffix in Path(named).suffixes]


def _decompressed(file: Any, compression: str | None) -> Any:  # noqa: ANN401 - pyarrow ships no types
    if compression is None:
        return nullcontext(file)
    if compression == "xz":
        return lzma.open(io.BufferedReader(file, _READ_BUFFER_BYTES))
    return pa.CompressedInputStream(file, compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of an input."""

    files: tuple[InputFile, ...] = ()
    """Files to read, in order; empty for a hub name."""
    left_out: tuple[str, ...] = ()
    """Files that are not read, one line per reason."""
    is_saved_data_set: bool = False


def is_file_name(path: str) -> bool:
    """Return whether a path ends like a file that can be read, and not like a hub name."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes[-2:]]
    return any(suffix in _FORMATS for suffix in suffixes)


def list_input(config: PromptsConfig) -> Listing:
    """List the input's files; none for a hub name.

    Raises ConfigError for an existing path without readable files, and for a path or a store that
    cannot be used.
    """
    if not is_url(config.path) and not _exists(config.path):
        return Listing()
    if not is_url(config.path) and not (Path(config.path).is_dir() or Path(config.path).is_file()):
        raise ConfigError(f"prompts.path: {config.path} is neither a file nor a folder")
    store = open_place(config.path)
    top = store.root_entry()
    if top is not None and top.is_file:
        return Listing(files=(_single_file(_input_file(store, top, "."), config),))
    entries = sorted(store.files(), key=lambda entry: Path(entry.name).parts)
    files = [_input_file(store, entry, entry.name) for entry in entries]
    if store.is_local and is_saved_data_set(Path(config.path)):
        return Listing(files=tuple(files), is_saved_data_set=True)
    if is_url(config.path) and not files:
        raise ConfigError(f"prompts.path: no file or folder {config.path}")
    return _chosen([file for file in files if not _is_hidden(file.name)], config)


def is_saved_data_set(path: Path) -> bool:
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError as error:
        raise ConfigError(f"prompts.path: cannot read {path}: {error.strerror}") from None


def _input_file(store: Store, entry: Entry, name: str) -> InputFile:
    return InputFile(
        store=store, name=name, size_bytes=entry.size_bytes, modified_ns=entry.modified_ns
    )


def _single_file(file: InputFile, config: PromptsConfig) -> InputFile:
    if file.format is None:
        raise ConfigError(
            f"prompts.path: {config.path} ends in {file.ending or 'nothing'!r}; expected "
            f"{', '.join(_FORMATS)}, or a text format with {', '.join(_COMPRESSIONS)} behind it"
        )
    if config.split not in (None, "train"):
        raise ConfigError(
            f"prompts.split: found {config.split!r}, but {config.path} is one file, which has no "
            f"splits; remove the key"
        )
    return file


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


# -- files of a folder


def _chosen(files: list[InputFile], config: PromptsConfig) -> Listing:
    """Choose the files of a folder that have a known format and belong to the split."""
    metadata = [file for file in files if Path(file.name).name in _METADATA]
    data = [file for file in files if file.format and file not in metadata]
    others = [file for file in files if not file.format]
    if not data:
        raise ConfigError(
            f"prompts.path: folder {config.path} has no file that ends in {', '.join(_FORMATS)}"
        )
    splits = {file.name: _split_of(file.name) for file in data}
    split = _chosen_split(set(splits.values()), config)
    left_out = {
        "they have no format that is read": others,
        "they describe a data set and have no rows": metadata,
        f"prompts.split is {split!r}": [file for file in data if splits[file.name] != split],
    }
    return Listing(
        files=tuple(file for file in data if splits[file.name] == split),
        left_out=tuple(
            f"{_names(unread)} in {config.path}: {reason}"
            for reason, unread in left_out.items()
            if unread
        ),
    )


def _chosen_split(present: set[str], config: PromptsConfig) -> str:
    """Return the split to read: the one named, else `train`, else the only one."""
    wanted = config.split or ("train" if "train" in present or len(present) > 1 else None)
    split = wanted or next(iter(present))
    if split not in present:
        raise ConfigError(
            f"prompts.split: {config.path} has no split {split!r}; its files are named after "
            f"{', '.join(sorted(present))}"
        )
    return split


def _split_of(name: str) -> str:
    """Return the split that a file's path names; `train` where it names none."""
    if (shard := _SHARD_NAME.search(name)) is not None:
        return shard["split"]
    words = re.split(r"[-._ 0-9/]+", name.lower())
    return next(
        (split for split, known in _SPLIT_WORDS.items() if not set(known).isdisjoint(words)),
        "train",
    )


def _names(files: list[InputFile]) -> str:
    shown = ", ".join(file.name for file in files[:_MOST_NAMES_SHOWN])
    more = len(files) - _MOST_NAMES_SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown
