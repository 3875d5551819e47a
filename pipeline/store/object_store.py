"""The one door to object stores, and to the destination of an export wherever it is.

`pyarrow.fs` and not fsspec: it is in the wheel that writes the parquet, S3 and its multipart upload
included, where fsspec takes a package a store, each with a cloud SDK of its own.

Commit: a file is there when it is whole, or not at all. On a file system it is written under
another name, synced and renamed. A store has no rename, and needs none: an object appears when its
upload is completed, never in part, and a process that is killed completes none. After an error the
library may complete an upload that is cut short; the next export writes over it. What makes many
files one data set is the last object written, `export.json`.

A request to a store that fails is tried again for some seconds, after the store's own library has
done so. A URL is shown wherever its folder is named, so that one with a key in it is refused.
"""

import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qs, urlsplit

import pyarrow as pa
from pyarrow import fs

from pipeline.errors import ConfigError
from schemas.config import is_url

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_PATIENCE_S = 25.0
# After so long nothing is tried again, unless who opened the store has more patience.
_TRIES_OF_THE_LIBRARY = 3
# What `S3FileSystem` takes by default. What `from_uri` opens tries 31 times whatever each try
# takes, so that a write to a server that keeps silent ends after 288 s (measured: pyarrow 26).

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "file", "hdfs", "viewfs")
# What pyarrow 26 opens.
_NOT_IN_A_URL = re.compile(r"[^!#-;=?-\[\]_a-z~]|%(?![0-9A-Fa-f]{2})")
# RFC 3986 §2: anything else is written %XX.
_LOST_IN_A_COPY = ("tls_verify_certificates", "tls_ca_dir_path", "smart_defaults")
# Options of a URL that `S3FileSystem` takes from nowhere else.

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a folder in a store."""

    name: str
    is_file: bool
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Store:
    """A folder or a prefix of a bucket; names are relative to it.

    Raises ConfigError when the store cannot be used, FileNotFoundError for what is not there.
    """

    where: str
    _filesystem: Any
    _root: str
    patience_s: float = _PATIENCE_S
    """For so long a request that fails is tried again."""

    @property
    def is_local(self) -> bool:
        return isinstance(self._filesystem, fs.LocalFileSystem)

    @property
    def bucket(self) -> str:
        return self._root.partition("/")[0]

    def has_bucket(self) -> bool:
        """Asked once: whoever sets a run up hears of a wrong key at once."""
        try:
            found = self._filesystem.get_file_info(self.bucket)
        except (OSError, pa.ArrowException):
            # A key that is good for this prefix alone may not ask for the bucket.
            self.first_entry()
            return True
        return bool(found.type != fs.FileType.NotFound)

    def first_entry(self) -> Entry | None:
        """What the store's own place is, asked once: a wrong endpoint or key is told of at once."""
        with self._told():
            info = self._filesystem.get_file_info(self._root)
        return None if info.type == fs.FileType.NotFound else _entry(info, ".")

    def entry(self, name: str) -> Entry | None:
        info = self._patiently(lambda: self._filesystem.get_file_info(self._path(name)))
        return None if info.type == fs.FileType.NotFound else _entry(info, name)

    def entries(self, name: str = ".") -> list[Entry]:
        """Of one folder, sorted; none when it is not there."""
        return sorted(self._listed(name, recursive=False), key=lambda entry: entry.name)

    def size_bytes(self, name: str) -> int | None:
        """None where there is no such file."""
        found = self.entry(name)
        return found.size_bytes if found is not None and found.is_file else None

    def names(self, name: str = ".") -> list[str]:
        """Of all files, however deep."""
        return sorted(entry.name for entry in self.files(name))

    def files(self, name: str = ".") -> list[Entry]:
        """All of them, however deep; their names are relative to the store."""
        return [entry for entry in self._listed(name, recursive=True) if entry.is_file]

    def read(self, name: str) -> bytes:
        def whole() -> bytes:
            with self._filesystem.open_input_stream(self._path(name)) as stream:
                return bytes(stream.read())

        return self._patiently(whole)

    def open_input(self, name: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
        """A file to read parts of; to be closed by the caller."""
        opened = self._patiently(lambda: self._filesystem.open_input_file(self._path(name)))
        if self.is_local:
            return opened
        return pa.PythonFile(_PatientFile(opened, self._patiently), mode="r")

    def write_whole(self, name: str, data: bytes) -> None:
        def write() -> None:
            with self.writing(name) as stream:
                stream.write(data)

        self._patiently(write)

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

    def copy(self, source: str, target: str) -> None:
        """Within the store; no byte of it passes here."""
        self._patiently(lambda: self._filesystem.copy_file(self._path(source), self._path(target)))

    def remove(self, name: str) -> None:
        """A file; none there is no fault."""

        try:
            self._patiently(lambda: self._filesystem.delete_file(self._path(name)))
        except FileNotFoundError:
            return

    def remove_folder(self, name: str) -> None:
        path = self._path(name)
        self._patiently(lambda: self._filesystem.delete_dir_contents(path, missing_dir_ok=True))

    # -- inside

    def _path(self, name: str) -> str:
        return self._root if name in ("", ".") else f"{self._root}/{name}"

    def _listed(self, name: str, *, recursive: bool) -> list[Entry]:
        top = self._path(name)
        selector = fs.FileSelector(top, recursive=recursive, allow_not_found=True)
        infos = self._patiently(lambda: self._filesystem.get_file_info(selector))
        start = len(self._root.strip("/")) + 1
        return [
            _entry(info, info.path.strip("/")[start:] if recursive else info.base_name)
            for info in infos
            if info.base_name
        ]

    def _patiently(self, request: Callable[[], Answer]) -> Answer:
        until_s, slept_s = monotonic() + self.patience_s, 0.0
        for pause_s in () if self.is_local else chain(_PAUSES_S, repeat(_PAUSES_S[-1])):
            slept_s += pause_s
            try:
                return request()
            except FileNotFoundError:
                raise
            except (OSError, pa.ArrowException, ConfigError):
                if max(monotonic() + pause_s - until_s, slept_s - self.patience_s) > 0:
                    with self._told():
                        raise
                sleep(pause_s)
        with self._told():
            return request()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{self.where}: cannot be used: {said}") from None


def _entry(info: Any, name: str) -> Entry:  # noqa: ANN401 - pyarrow ships no types
    is_file = info.type == fs.FileType.File
    return Entry(
        name=name,
        is_file=is_file,
        size_bytes=info.size if is_file else 0,
        modified_ns=info.mtime_ns or 0,
    )


class _PatientFile:
    """What pyarrow asks of a file that is read in parts, each part asked for patiently."""

    closed = False

    def __init__(self, file: Any, patiently: Callable[[Callable[[], Any]], Any]) -> None:  # noqa: ANN401
        self._file, self._patiently, self._size = file, patiently, int(file.size())
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, num_bytes: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        wanted = left if num_bytes < 0 else min(num_bytes, left)
        at = self._position
        data = bytes(self._patiently(lambda: self._file.read_at(wanted, at))) if wanted else b""
        self._position += len(data)
        return data

    def close(self) -> None:
        self.closed = True
        self._file.close()


# -- opening


def _with_one_request_uploads(where: str) -> str:
    """A small object goes up in one request and not in three, unless the URL says otherwise."""
    if not where.startswith("s3://") or "allow_delayed_open=" in where:
        return where
    return f"{where}{'&' if '?' in where else '?'}allow_delayed_open=true"


def place(where: str, name: str) -> str:
    """A file under a path or URL, as people are told of it."""
    address, question, options = where.partition("?") if is_url(where) else (where, "", "")
    return where if name == "." else f"{address.rstrip('/')}/{name}{question}{options}"


def open_store(where: str) -> Store:
    """A path, or a URL such as s3://bucket/prefix; keys and endpoint come from the environment.

    Raises ConfigError for a URL that names no store, and for one that holds a key: URLs are shown.
    """
    if not is_url(where) and Path(where).is_file():
        raise ConfigError(f"{where}: found a file; expected a folder")
    return open_place(where)


def open_place(where: str) -> Store:
    """The same for what may be a file: `.` is its name then."""
    if not is_url(where):
        return Store(where, fs.LocalFileSystem(), str(Path(where).absolute()))
    address = _checked_address(where)
    shown = where.partition("?")[0]
    try:
        filesystem, root_path = fs.FileSystem.from_uri(_with_one_request_uploads(where))
        filesystem = _with_few_tries(filesystem, address)
    except (pa.ArrowException, OSError, ValueError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{shown}: not a store that can be opened: {said}") from None
    if not root_path.strip("/"):
        raise ConfigError(f"{shown}: not a store that can be opened: it names no bucket or folder")
    return Store(where, filesystem, root_path.rstrip("/"))


def _checked_address(where: str) -> SplitResult:
    """Raises ConfigError, without what may be a key, for what pyarrow would repeat in its error."""
    address = urlsplit(where)
    holder = address.netloc.rpartition("@")[0]
    endpoint = parse_qs(address.query).get("endpoint_override", [""])[0]
    if ":" in holder or (address.scheme == "s3" and holder) or "@" in endpoint:
        raise ConfigError(
            f"{address.scheme}://…@{address.netloc.rpartition('@')[2]}{address.path}: found a key "
            f"in the URL; expected it in the environment: AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY for s3://"
        )
    shown = where.partition("?")[0]
    if address.scheme not in _SCHEMES:
        raise ConfigError(
            f"{shown}: not a store that can be opened: expected s3://, gs:// or abfs://"
        )
    if (wrong := _NOT_IN_A_URL.search(where)) is not None:
        written = "".join(f"%{byte:02X}" for byte in wrong[0].encode())
        raise ConfigError(
            f"{shown}: not a store that can be opened: found {wrong[0]!r} in the URL; expected it "
            f"written {written}"
        )
    return address


def _with_few_tries(filesystem: Any, address: SplitResult) -> Any:  # noqa: ANN401 - no types
    """The same file system, made anew with a bound on how often its library tries."""
    if address.scheme != "s3" or parse_qs(address.query).keys() & set(_LOST_IN_A_COPY):
        return filesystem
    # What it is made anew from in another process; there is no other way to read its options.
    _, (options,) = filesystem.__reduce__()
    strategy = fs.AwsStandardS3RetryStrategy(max_attempts=_TRIES_OF_THE_LIBRARY)
    return fs.S3FileSystem(**options, retry_strategy=strategy)
