"""StoreFolder: an output folder in an object store; `open_folder` opens a folder of either kind.

A store has no rename, append or lock. They are replaced as follows:

- A file is an object. It appears, or replaces the old one, when its upload completes.
- `move` copies within the store and then removes the source. A process that dies in between leaves
  both; recovery finds the rows of the source published and drops it.
- Appended lines form a journal: the objects under `NAME/`, in the order of their names. Each object
  belongs to one writer, which uploads it again with every line until it has a megabyte, and then
  starts the next. Two writers never write the same object, so no line is lost during a take-over.
- A log of records is the objects under `NAME/`, one per record, in the order of their names.
- `create` does not need conditional writes, which not every store has, but read-after-write
  consistency, as S3, GCS and Azure have it. Each caller writes a claim, and gets True only if it
  then finds no other claim and no file. Of two callers, the later claim finds the earlier one, or
  the file that resulted from it.
"""

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from pipeline.errors import ConfigError
from pipeline.store.folder import CLAIMS, Folder, LocalFolder
from pipeline.store.object_store import Store, open_store, place
from pipeline.store.own_folder import own_temporary_folder
from schemas.config.section import is_url
from schemas.units import MIB

# The manifest of 900,000 rows has about 72 MB: 72 objects, and half a megabyte per publication.
_JOURNAL_OBJECT_BYTES = MIB
_PARALLEL_READS = 8
_KEPT_LOG_BYTES = MIB

# How long coordinator and workers retry a request. Longer than most outages: a run that ends loses
# the rows in flight.
WORKING_PATIENCE_S = 600.0


def open_folder(where: str | Path, *, patience_s: float | None = None) -> Folder:
    """Open a path, or the URL of a prefix such as `s3://bucket/run`.

    A failed request to a store is retried for `patience_s`.
    Raises ConfigError for a URL that names no store.
    """
    text = str(where)
    if not is_url(text):
        return LocalFolder(Path(text).absolute())
    if urlsplit(text).scheme == "file":
        return LocalFolder(Path(unquote(urlsplit(text).path)))
    store = open_store(text)
    return StoreFolder(store if patience_s is None else replace(store, patience_s=patience_s))


class StoreFolder(Folder):
    """A prefix of a bucket. Each instance is one writer; pickling it opens another."""

    settle_s: ClassVar[float] = 3.0
    # An upload per second and worker would cost as much as a small engine.
    append_interval_s: ClassVar[float] = 10.0
    is_remote: ClassVar[bool] = True

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = uuid.uuid4().hex[:8]
        # Journal → name and content of its object that is being filled.
        self._journals: dict[str, tuple[str, bytes]] = {}
        self._appending = Lock()
        # Log → records that it has.
        self._num_records: Counter[str] = Counter()

    def __reduce__(self) -> tuple[Callable[[str], Folder], tuple[str]]:
        return partial(open_folder, patience_s=self._store.patience_s), (self.where,)

    @property
    def where(self) -> str:
        return self._store.where

    def place(self, name: str) -> str:
        return place(self.where, name)

    def fault(self) -> str | None:
        return None if self._store.has_bucket() else f"there is no bucket {self._store.bucket!r}"

    def make(self, name: str = ".") -> None:
        """Check that the bucket exists; prefixes need not be created."""
        if name == "." and (fault := self.fault()) is not None:
            raise ConfigError(f"{self.where}: {fault}")

    def exists(self, name: str) -> bool:
        return self._store.size_bytes(name) is not None

    def size_bytes(self, name: str) -> int:
        size_bytes = self._store.size_bytes(name)
        if size_bytes is None:
            raise FileNotFoundError(self.place(name))
        return size_bytes

    def names(self, name: str = ".") -> list[str]:
        return sorted({entry.name for entry in self._store.entries(name)})

    def sizes(self, name: str = ".") -> dict[str, int]:
        return {entry.name: entry.size_bytes for entry in self._store.entries(name)}

    def folder_names(self, name: str = ".") -> list[str]:
        return sorted({entry.name for entry in self._store.entries(name) if not entry.is_file})

    def read(self, name: str) -> bytes:
        return self._store.read(name)

    def open_input(self, name: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
        return self._store.open_input(name)

    def read_lines(self, name: str) -> Iterator[bytes]:
        if self.exists(name):
            yield from _whole_lines(self.read(name))
            return
        objects = iter(self.names(name))
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            while batch := list(islice(objects, _PARALLEL_READS)):
                paths = [f"{name}/{each}" for each in batch]
                for data in pool.map(self._read_journal_object, paths):
                    yield from _whole_lines(data)

    def write_whole(self, name: str, data: bytes) -> None:
        self._store.write_whole(name, data)

    def create(self, name: str, data: bytes) -> bool:
        claims, own = f"{name}.{CLAIMS}", uuid.uuid4().hex
        if self.exists(name):
            return False
        self.write_whole(f"{claims}/{own}", b"")
        try:
            if self.names(claims) != [own] or self.exists(name):
                return False
            self.write_whole(name, data)
        finally:
            self.remove(f"{claims}/{own}")
        return True

    def append_line(self, name: str, line: bytes) -> None:
        with self._appending:
            current, content = self._journals.get(name, ("", b""))
            if not current or len(content) + len(line) > _JOURNAL_OBJECT_BYTES:
                current, content = self._next_journal_object(name), b""
            content += line
            self.write_whole(f"{name}/{current}", content)
            self._journals[name] = (current, content)

    def end_last_line(self, name: str) -> None:
        """Do nothing: objects are never truncated."""

    def append_record(self, name: str, record: bytes | memoryview) -> None:
        self.write_whole(f"{name}/{self._num_records[name]:08d}", bytes(record))
        self._num_records[name] += 1

    def read_records(self, name: str) -> Iterator[bytes]:
        for each in self.names(name):
            yield self.read(f"{name}/{each}")

    def remove_records(self, name: str) -> None:
        for each in self.names(name):
            self.remove(f"{name}/{each}")
        self._store.remove_tree(name)

    def replace_lines(self, name: str, lines: Sequence[bytes]) -> None:
        """Write the new lines first: a process that dies here duplicates lines, and loses none."""
        data = b"".join(line + b"\n" for line in lines)
        with self._appending:
            older, current = self.names(name), self._next_journal_object(name)
            self.write_whole(f"{name}/{current}", data)
            self._journals[name] = (current, data)
            for each in older:
                self.remove(f"{name}/{each}")

    def move(self, source: str, target: str) -> None:
        self._store.copy(source, target)
        self._store.remove(source)

    def remove(self, name: str) -> None:
        self._store.remove(name)

    def remove_folder(self, name: str) -> None:
        self._store.remove_folder(name)

    def local_file(self, name: str) -> Path:
        own = hashlib.sha256(self.where.encode()).hexdigest()[:16]
        return own_temporary_folder() / own / name

    def keep_local(self, name: str) -> None:
        """Upload the last megabyte of the file, if it exists."""
        path = self.local_file(name)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _KEPT_LOG_BYTES))
            self.write_whole(name, file.read())

    # -- inside

    def _read_journal_object(self, name: str) -> bytes:
        try:
            return self.read(name)
        except FileNotFoundError:
            # Replaced since the names were listed: the object that replaced it comes later.
            return b""

    def _next_journal_object(self, name: str) -> str:
        last = next(reversed(self.names(name)), "")
        return f"{int(last.partition('-')[0] or -1) + 1:08d}-{self._writer}"


def _whole_lines(data: bytes) -> Iterator[bytes]:
    yield from data.split(b"\n")[:-1]
