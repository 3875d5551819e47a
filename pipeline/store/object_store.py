"""Store: files under a path or a URL, for object stores and the destination of an export.

Invariant: a file exists whole or not at all. On a file system it is written under another name,
synced and renamed. In a store an object appears when its upload completes, and a killed process
completes none. After an error the library may complete a truncated upload; the next export
overwrites it. The last object written, `export.json`, makes many files one data set.

A failed request to a store is retried for some seconds after the store's own library has given up.
URLs appear in messages and logs, so a URL that contains a key is refused.

Uses `pyarrow.fs` rather than fsspec: the pyarrow wheel, which writes the parquet, includes S3 with
multipart uploads; fsspec needs a package with a cloud SDK for each store.
"""

import os
import re
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
from pipeline.store.folder import replacing
from schemas.config.section import is_url

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_PATIENCE_S = 25.0
# The default of `S3FileSystem`. A file system from `from_uri` makes 31 attempts, whatever each one
# costs, so that a write to a silent server ends after 288 s (measured: pyarrow 26).
_LIBRARY_ATTEMPTS = 3

# Schemes that pyarrow 26 opens.
_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "file", "hdfs", "viewfs")
# RFC 3986 §2: any other character is written %XX.
_NOT_IN_A_URL = re.compile(r"[^!#-;=?-\[\]_a-z~]|%(?![0-9A-Fa-f]{2})")
# URL options that the constructor of `S3FileSystem` does not accept.
_LOST_IN_A_COPY = ("tls_verify_certificates", "tls_ca_dir_path", "smart_defaults")

Result = TypeVar("Result")


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

    Raises ConfigError when the store cannot be used, FileNotFoundError for a missing file.
    """

    where: str
    _filesystem: Any
    _root: str
    patience_s: float = _PATIENCE_S
    """Time during which a failed request is retried."""

    @property
    def is_local(self) -> bool:
        return isinstance(self._filesystem, fs.LocalFileSystem)

    @property
    def bucket(self) -> str:
        return self._root.partition("/")[0]

    def has_bucket(self) -> bool:
        """Check the bucket without retrying, so that a wrong key is reported at once."""
        try:
            info = self._filesystem.get_file_info(self.bucket)
        except (OSError, pa.ArrowException):
            # A key for this prefix alone has no access to the bucket.
            self.root_entry()
            return True
        return bool(info.type != fs.FileType.NotFound)

    def root_entry(self) -> Entry | None:
        """Look up the root without retrying, so that a wrong endpoint is reported at once."""
        with self._as_config_errors():
            info = self._filesystem.get_file_info(self._root)
        return None if info.type == fs.FileType.NotFound else _entry(info, ".")

    def entry(self, name: str) -> Entry | None:
        """Look up a file or folder; None when it does not exist."""
        info = self._retrying(lambda: self._filesystem.get_file_info(self._path(name)))
        return None if info.type == fs.FileType.NotFound else _entry(info, name)

    def entries(self, name: str = ".") -> list[Entry]:
        """List one folder, sorted by name; empty when it does not exist."""
        return sorted(self._listed(name, recursive=False), key=lambda entry: entry.name)

    def size_bytes(self, name: str) -> int | None:
        """Return the size of a file; None when it does not exist."""
        entry = self.entry(name)
        return entry.size_bytes if entry is not None and entry.is_file else None

    def names(self, name: str = ".") -> list[str]:
        """List the names of all files below a folder, sorted."""
        return sorted(entry.name for entry in self.files(name))

    def files(self, name: str = ".") -> list[Entry]:
        """List all files below a folder, with names relative to the store."""
        return [entry for entry in self._listed(name, recursive=True) if entry.is_file]

    def read(self, name: str) -> bytes:
        def read() -> bytes:
            with self._filesystem.open_input_stream(self._path(name)) as stream:
                return bytes(stream.read())

        return self._retrying(read)

    def open_input(self, name: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
        """Open a file for random access; the caller closes it."""
        opened = self._retrying(lambda: self._filesystem.open_input_file(self._path(name)))
        if self.is_local:
            return opened
        return pa.PythonFile(_RetryingFile(opened, self._retrying), mode="r")

    def write_whole(self, name: str, data: bytes) -> None:
        def write() -> None:
            with self.writing(name) as stream:
                stream.write(data)

        self._retrying(write)

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """Open a stream to a file that appears, whole, once the block succeeds."""
        path = self._path(name)
        if not self.is_local:
            with self._as_config_errors():
                stream = self._filesystem.open_output_stream(path)
            yield stream
            with self._as_config_errors():
                stream.close()
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            yield file

    def copy(self, source: str, target: str) -> None:
        """Copy within the store; the data does not pass through this machine."""
        self._retrying(lambda: self._filesystem.copy_file(self._path(source), self._path(target)))

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        try:
            self._retrying(lambda: self._filesystem.delete_file(self._path(name)))
        except FileNotFoundError:
            return

    def remove_tree(self, name: str) -> None:
        """Remove a folder with its marker, which a store keeps for one that became empty."""
        try:
            self._retrying(lambda: self._filesystem.delete_dir(self._path(name)))
        except FileNotFoundError:
            return

    def remove_folder(self, name: str) -> None:
        path = self._path(name)
        self._retrying(lambda: self._filesystem.delete_dir_contents(path, missing_dir_ok=True))

    # -- inside

    def _path(self, name: str) -> str:
        return self._root if name in ("", ".") else f"{self._root}/{name}"

    def _listed(self, name: str, *, recursive: bool) -> list[Entry]:
        top = self._path(name)
        selector = fs.FileSelector(top, recursive=recursive, allow_not_found=True)
        infos = self._retrying(lambda: self._filesystem.get_file_info(selector))
        start = len(self._root.strip("/")) + 1
        return [
            _entry(info, info.path.strip("/")[start:] if recursive else info.base_name)
            for info in infos
            if info.base_name
        ]

    def _retrying(self, request: Callable[[], Result]) -> Result:
        until_s, slept_s = monotonic() + self.patience_s, 0.0
        for pause_s in () if self.is_local else chain(_PAUSES_S, repeat(_PAUSES_S[-1])):
            slept_s += pause_s
            try:
                return request()
            except FileNotFoundError:
                raise
            except (OSError, pa.ArrowException, ConfigError):
                if max(monotonic() + pause_s - until_s, slept_s - self.patience_s) > 0:
                    with self._as_config_errors():
                        raise
                sleep(pause_s)
        with self._as_config_errors():
            return request()

    @contextmanager
    def _as_config_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{self.where}: cannot be used: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _entry(info: Any, name: str) -> Entry:  # noqa: ANN401 - pyarrow ships no types
    is_file = info.type == fs.FileType.File
    return Entry(
        name=name,
        is_file=is_file,
        size_bytes=info.size if is_file else 0,
        modified_ns=info.mtime_ns or 0,
    )


class _RetryingFile:
    """The file object that pyarrow expects for random access; each read is retried."""

    closed = False

    def __init__(self, file: Any, retrying: Callable[[Callable[[], Any]], Any]) -> None:  # noqa: ANN401 - pyarrow ships no types
        self._file, self._retrying, self._size = file, retrying, int(file.size())
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, num_bytes: int = -1) -> bytes:
        start, rest = self._position, max(0, self._size - self._position)
        length = rest if num_bytes < 0 else min(num_bytes, rest)
        data = bytes(self._retrying(lambda: self._file.read_at(length, start))) if length else b""
        self._position += len(data)
        return data

    def close(self) -> None:
        self.closed = True
        self._file.close()


# -- opening


def _with_one_request_uploads(where: str) -> str:
    """Upload small objects in one request instead of three, unless the URL says otherwise."""
    if not where.startswith("s3://") or "allow_delayed_open=" in where:
        return where
    return f"{where}{'&' if '?' in where else '?'}allow_delayed_open=true"


def place(where: str, name: str) -> str:
    """Path or URL of a file under `where`, for messages."""
    address, question, options = where.partition("?") if is_url(where) else (where, "", "")
    return where if name == "." else f"{address.rstrip('/')}/{name}{question}{options}"


def open_store(where: str) -> Store:
    """Open a path, or a URL such as s3://bucket/prefix; the environment has keys and endpoint.

    Raises ConfigError for a file, for a URL that names no store, and for one that contains a key.
    """
    if not is_url(where) and Path(where).is_file():
        raise ConfigError(f"{where}: found a file; expected a folder")
    return open_place(where)


def open_place(where: str) -> Store:
    """Open a path or URL that may be a file; a file has the name `.`."""
    if not is_url(where):
        return Store(where, fs.LocalFileSystem(), str(Path(where).absolute()))
    address = _checked_address(where)
    shown = where.partition("?")[0]
    try:
        filesystem, root_path = fs.FileSystem.from_uri(_with_one_request_uploads(where))
        filesystem = _with_few_retries(filesystem, address)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"{shown}: not a store that can be opened: {_first_line(error)}"
        ) from None
    if not root_path.strip("/"):
        raise ConfigError(f"{shown}: not a store that can be opened: it names no bucket or folder")
    return Store(where, filesystem, root_path.rstrip("/"))


def _checked_address(where: str) -> SplitResult:
    """Check a URL. Raises ConfigError without the key that pyarrow's own error would repeat."""
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


def _with_few_retries(filesystem: Any, address: SplitResult) -> Any:  # noqa: ANN401 - no types
    """Rebuild the file system with a bound on its library's own retries."""
    if address.scheme != "s3" or parse_qs(address.query).keys() & set(_LOST_IN_A_COPY):
        return filesystem
    # The arguments of its pickle: there is no other way to read its options.
    _, (options,) = filesystem.__reduce__()
    strategy = fs.AwsStandardS3RetryStrategy(max_attempts=_LIBRARY_ATTEMPTS)
    return fs.S3FileSystem(**options, retry_strategy=strategy)
