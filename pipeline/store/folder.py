"""The one door to the files of an output folder, on a file system or in an object store.

Every name is relative to the folder. A file is written whole or not at all, and is there for all
to read when the call returns; a line is appended whole or is a cut-off last line that readers leave
out. This module knows nothing of what the bytes mean. `pipeline.store_folder` opens either kind.
"""

import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

CLAIMS = "claims"
"""Ending of the sub-folder beside a file in which those who `create` it lay their claims."""


class Folder(ABC):
    """A folder, wherever it is. Reading what is not there raises FileNotFoundError."""

    settle_s: ClassVar[float]
    """After so long a write of another process that had begun before is seen."""
    is_elsewhere: ClassVar[bool]
    """Whether `local_file` is outside the folder, and `keep_local` has to bring it there."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Path or URL, from which another process opens the same folder; holds no secret."""

    def place(self, name: str) -> str:
        """A file of the folder as people are told of it."""
        return f"{self.where}/{name}"

    @abstractmethod
    def fault(self) -> str | None:
        """Why there is no such folder to read, where that can be told."""

    @abstractmethod
    def make(self, name: str = ".") -> None: ...

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def size_bytes(self, name: str) -> int: ...

    @abstractmethod
    def names(self, name: str = ".") -> list[str]:
        """Names of the entries of a sub-folder, sorted; none when it is not there."""

    @abstractmethod
    def sizes(self, name: str = ".") -> dict[str, int]:
        """Of the same entries, their bytes: of a store by its listing alone."""

    @abstractmethod
    def folder_names(self, name: str = ".") -> list[str]:
        """Of those, the folders."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def open_input(self, name: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
        """A pyarrow file to read parts of, to be closed by the caller."""

    @abstractmethod
    def read_lines(self, name: str) -> Iterator[bytes]:
        """Whole lines of a file; a last one without its line feed is a cut-off append."""

    @abstractmethod
    def write_whole(self, name: str, data: bytes) -> None:
        """Write a file, or in place of one: readers see the old file or the new one."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not be there yet. Of two callers one at most is told True.

        False when it is there, and where that cannot be made sure of.
        """

    @abstractmethod
    def append_line(self, name: str, line: bytes) -> None:
        """Append `line`, which ends in its line feed, whole."""

    @abstractmethod
    def end_last_line(self, name: str) -> None:
        """Close a cut-off last line, so that the next append does not run on from it."""

    @abstractmethod
    def replace_lines(self, name: str, lines: Sequence[bytes]) -> None:
        """Put these lines, without their line feeds, in place of all that were appended."""

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Rename within the folder; the target appears whole, in place of what stood there."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; none there is no fault."""

    @abstractmethod
    def remove_folder(self, name: str) -> None:
        """Remove a sub-folder and what it holds, as far as that can be done."""

    @abstractmethod
    def local_file(self, name: str) -> Path:
        """Where a process of this machine writes a file of the folder by itself."""

    @abstractmethod
    def keep_local(self, name: str) -> None:
        """Bring what was written to `local_file` into the folder, where that is elsewhere."""


@dataclass(frozen=True, slots=True)
class LocalFolder(Folder):
    """A folder on a local or shared file system."""

    root: Path

    settle_s: ClassVar[float] = 0.5
    is_elsewhere: ClassVar[bool] = False

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
        return {entry: self.size_bytes(f"{name}/{entry}") for entry in self.names(name)}

    def folder_names(self, name: str = ".") -> list[str]:
        return [entry for entry in self.names(name) if (self.path(name) / entry).is_dir()]

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def open_input(self, name: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
        return pa.OSFile(str(self.path(name)))

    def read_lines(self, name: str) -> Iterator[bytes]:
        if not self.exists(name):
            return
        with self.path(name).open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line[:-1]

    def write_whole(self, name: str, data: bytes) -> None:
        """Under another name, synced, renamed."""
        target = self.path(name)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync_folder(target.parent)

    def create(self, name: str, data: bytes) -> bool:
        """By a hard link; False where the file system has none."""
        target = self.path(name)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        temporary.write_bytes(data)
        try:
            # A hard link is atomic on network file systems where O_EXCL is not.
            target.hardlink_to(temporary)
        except OSError:
            # There already, or a file system without links, such as a mounted object store.
            return False
        finally:
            temporary.unlink()
        return True

    def append_line(self, name: str, line: bytes) -> None:
        """In one write, and synced."""
        target = self.path(name)
        is_new = not target.exists()
        descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            view = memoryview(line)
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
        """It is there already."""


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
