"""The one door to a destination, on a file system or in an object store.

`pyarrow.fs` and not fsspec: it is in the wheel that writes the parquet, S3 and its multipart upload
included, where fsspec takes a package a store, each with a cloud SDK of its own.

Commit: a file is there when it is whole, or not at all. On a file system it is written under
another name, synced and renamed. A store has no rename, and needs none: an object appears when its
upload is completed, never in part, and a process that is killed completes none. After an error the
library may complete an upload that is cut short; the next export writes over it. What makes many
files one data set is the last object written, `export.json`.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Store:
    """A folder or a prefix of a bucket; names are relative to it."""

    where: str
    _filesystem: Any
    _root: str

    @property
    def is_local(self) -> bool:
        return isinstance(self._filesystem, fs.LocalFileSystem)

    def size_bytes(self, name: str) -> int | None:
        """None where there is no such file."""
        with self._told():
            info = self._filesystem.get_file_info(self._path(name))
        return info.size if info.type == fs.FileType.File else None

    def names(self) -> list[str]:
        """Of all files, however deep."""
        selector = fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        with self._told():
            infos = self._filesystem.get_file_info(selector)
        files = [info.path for info in infos if info.type == fs.FileType.File]
        return sorted(path[len(self._root) :].lstrip("/") for path in files)

    def read(self, name: str) -> bytes:
        with self._told(), self._filesystem.open_input_stream(self._path(name)) as stream:
            return bytes(stream.read())

    def open_input(self, name: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
        return self._filesystem.open_input_file(self._path(name))

    def write_whole(self, name: str, data: bytes) -> None:
        with self.writing(name) as stream:
            stream.write(data)

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A stream to a file that is whole once the block has ended well."""
        path = self._path(name)
        if not self.is_local:
            with self._told():
                stream = self._filesystem.open_output_stream(path)
            yield stream
            with self._told():
                stream.close()
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        with self._told():
            self._filesystem.delete_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            said = str(error).splitlines()[0]
            raise ConfigError(f"{self.where}: cannot be used: {said}") from None


def open_store(where: str) -> Store:
    """A path, or a URL such as s3://bucket/prefix; keys and endpoint come from the environment.

    Raises ConfigError for a URL that names no store.
    """
    if "://" not in where:
        root = Path(where).absolute()
        if root.is_file():
            raise ConfigError(f"{where}: found a file; expected a folder")
        return Store(where, fs.LocalFileSystem(), str(root))
    try:
        filesystem, root_path = fs.FileSystem.from_uri(where)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"{where}: not a store that can be opened: {said}") from None
    if not root_path.strip("/"):
        raise ConfigError(f"{where}: not a store that can be opened: it names no bucket or folder")
    return Store(where, filesystem, root_path.rstrip("/"))
