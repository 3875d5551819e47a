"""The one door to the files of an output folder.

Every name is relative to the folder. A file is written whole or not at all, and is on the disk
when the call returns; a line is appended whole or is a cut-off last line that readers leave out.
This module knows nothing of what the bytes mean.
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on a local or shared file system."""

    root: Path

    def path(self, name: str) -> Path:
        return self.root / name

    def make(self, name: str = ".") -> None:
        self.path(name).mkdir(parents=True, exist_ok=True)

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def size_bytes(self, name: str) -> int:
        return self.path(name).stat().st_size

    def names(self, name: str = ".") -> list[str]:
        """Names of the entries of a sub-folder, sorted; none when it is not there."""
        try:
            return sorted(os.listdir(self.path(name)))  # noqa: PTH208 - names, no Path objects
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def read_lines(self, name: str) -> Iterator[bytes]:
        """Whole lines of a file; a last one without its line feed is a cut-off append."""
        if not self.exists(name):
            return
        with self.path(name).open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line[:-1]

    def write_whole(self, name: str, data: bytes) -> None:
        """Write under another name, sync, rename: readers see the old file or the new one."""
        target = self.path(name)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync_folder(target.parent)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not be there yet. Of two callers one at most is told True.

        False when it is there, and where the file system has no hard links to make sure with.
        """
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
        """Append `line`, which ends in its line feed, in one write, and sync."""
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
        """Close a cut-off last line, so that the next append does not run on from it."""
        if not self.exists(name) or not self.size_bytes(name):
            return
        with self.path(name).open("rb") as file:
            file.seek(-1, os.SEEK_END)
            is_ended = file.read() == b"\n"
        if not is_ended:
            self.append_line(name, b"\n")

    def move(self, source: str, target: str) -> None:
        """Rename within the folder; atomic."""
        self.path(source).replace(self.path(target))
        _sync_folder(self.path(target).parent)

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
