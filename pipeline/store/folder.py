"""Folder: the protocol for the files of an output folder, and its file-system version.

All names are relative to the folder. A file is written whole or not at all, and every process can
read it when the call returns. A line is appended whole, or is a truncated last line that readers
skip. `pipeline.store.bucket` has the version for object stores, and opens either.
"""

import os
import shutil
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import pyarrow as pa

from pipeline.store.record_log import framed, whole_records

# Suffix of the sub-folder next to a file in which the callers of `create` leave their claims.
CLAIMS = "claims"


class Folder(Protocol):
    """A folder on a disk or in a store. Reading a missing file raises FileNotFoundError."""

    settle_s: ClassVar[float]
    """Time after which a write that another process has begun is visible."""
    append_interval_s: ClassVar[float]
    """Least time between two records of one log: what a crash may cost."""
    is_remote: ClassVar[bool]
    """True where `local_file` is outside the folder, and `keep_local` copies it in."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Path or URL with which another process opens the same folder; it contains no secret."""

    def place(self, name: str) -> str:
        """Path or URL of a file, for messages."""
        return f"{self.where}/{name}"

    @abstractmethod
    def fault(self) -> str | None:
        """Explain why the folder cannot be read; None when it can, or that is unknown."""

    @abstractmethod
    def make(self, name: str = ".") -> None:
        """Create a sub-folder and its parents."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def size_bytes(self, name: str) -> int: ...

    @abstractmethod
    def names(self, name: str = ".") -> list[str]:
        """List the names in a sub-folder, sorted; empty when it does not exist."""

    @abstractmethod
    def sizes(self, name: str = ".") -> dict[str, int]:
        """Map the same names to sizes in bytes, in a store by its listing alone."""

    @abstractmethod
    def folder_names(self, name: str = ".") -> list[str]:
        """List the same names, sub-folders only."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def open_input(self, name: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
        """Open a pyarrow file for random access; the caller closes it."""

    @abstractmethod
    def read_lines(self, name: str) -> Iterator[bytes]:
        """Yield whole lines; a last line without its line feed is truncated and left out."""

    @abstractmethod
    def write_whole(self, name: str, data: bytes) -> None:
        """Write or replace a file atomically: readers see the old file or the new one."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist yet; of several callers at most one gets True.

        False when it exists, and when that cannot be ruled out.
        """

    @abstractmethod
    def append_line(self, name: str, line: bytes) -> None:
        """Append `line`, which ends in a line feed."""

    @abstractmethod
    def end_last_line(self, name: str) -> None:
        """End a truncated last line, so that the next append starts a new one."""

    @abstractmethod
    def replace_lines(self, name: str, lines: Sequence[bytes]) -> None:
        """Replace all appended lines by these, which have no line feeds."""

    @abstractmethod
    def append_record(self, name: str, record: bytes | memoryview) -> None:
        """Append a record to a log, and sync. Each log has one writer."""

    @abstractmethod
    def read_records(self, name: str) -> Iterator[bytes]:
        """Yield the records of a log up to the last whole one."""

    @abstractmethod
    def remove_records(self, name: str) -> None:
        """Remove a log if it exists."""

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Rename within the folder, replacing the target; the target appears whole."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def remove_folder(self, name: str) -> None:
        """Remove a sub-folder with its files, as far as possible."""

    @abstractmethod
    def local_file(self, name: str) -> Path:
        """Path at which a process on this machine writes the file directly, such as a log."""

    @abstractmethod
    def keep_local(self, name: str) -> None:
        """Copy what was written to `local_file` into the folder, unless it is there already."""


@dataclass(frozen=True, slots=True)
class LocalFolder(Folder):
    """A folder on a local or shared file system."""

    root: Path

    settle_s: ClassVar[float] = 0.5
    append_interval_s: ClassVar[float] = 1.0
    is_remote: ClassVar[bool] = False

    @property
    def where(self) -> str:
        return str(self.root)

    def fault(self) -> str | None:
        if not self.root.exists():
            return "no such folder"
        return None if self.root.is_dir() else "found a file"

    def path(self, name: str) -> Path:
        return self.root / name

    def make(self, name: str = ".") -> None:
        self.path(name).mkdir(parents=True, exist_ok=True)

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def size_bytes(self, name: str) -> int:
        return self.path(name).stat().st_size

    def names(self, name: str = ".") -> list[str]:
        try:
            return sorted(os.listdir(self.path(name)))  # noqa: PTH208 - names, no Path objects
        except FileNotFoundError:
            return []

    def sizes(self, name: str = ".") -> dict[str, int]:
        entries = {entry: self.path(name) / entry for entry in self.names(name)}
        return {entry: _size_bytes(path) for entry, path in entries.items()}

    def folder_names(self, name: str = ".") -> list[str]:
        return [entry for entry in self.names(name) if (self.path(name) / entry).is_dir()]

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def open_input(self, name: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
        path = self.path(name)
        if path.is_fifo():
            # Opening one waits for its writer, perhaps forever.
            raise OSError(f"{path} is a pipe")
        return pa.OSFile(str(path))

    def read_lines(self, name: str) -> Iterator[bytes]:
        if not self.exists(name):
            return
        with self.path(name).open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line[:-1]

    def write_whole(self, name: str, data: bytes) -> None:
        with replacing(self.path(name)) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Create the file with a hard link; return False on a file system without links."""
        target = self.path(name)
        temporary = _temporary_beside(target)
        temporary.write_bytes(data)
        try:
            # A hard link is atomic on network file systems where O_EXCL is not.
            target.hardlink_to(temporary)
        except OSError:
            # The file exists, or the file system has no links, such as a mounted object store.
            return False
        finally:
            temporary.unlink()
        return True

    def append_line(self, name: str, line: bytes) -> None:
        """Append in one write, and sync."""
        self._append(name, line)

    def append_record(self, name: str, record: bytes | memoryview) -> None:
        self._append(name, framed(record))

    def read_records(self, name: str) -> Iterator[bytes]:
        with self.path(name).open("rb") as file:
            yield from whole_records(file)

    def remove_records(self, name: str) -> None:
        self.remove(name)

    def _append(self, name: str, data: bytes) -> None:
        target = self.path(name)
        is_new = not target.exists()
        descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            _sync_folder(target.parent)

    def end_last_line(self, name: str) -> None:
        if not self.exists(name) or not self.size_bytes(name):
            return
        with self.path(name).open("rb") as file:
            file.seek(-1, os.SEEK_END)
            is_ended = file.read() == b"\n"
        if not is_ended:
            self.append_line(name, b"\n")

    def replace_lines(self, name: str, lines: Sequence[bytes]) -> None:
        self.write_whole(name, b"".join(line + b"\n" for line in lines))

    def move(self, source: str, target: str) -> None:
        self.path(source).replace(self.path(target))
        _sync_folder(self.path(target).parent)

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        # A file that another process has open on a network file system may stay.
        shutil.rmtree(self.path(name), ignore_errors=True)

    def local_file(self, name: str) -> Path:
        return self.path(name)

    def keep_local(self, name: str) -> None:
        """Do nothing: the file is in the folder already."""


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        # A link to nothing, or one to itself: its own size.
        return path.lstat().st_size


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `target`, whole and synced, once the block succeeds."""
    temporary = _temporary_beside(target)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _temporary_beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
