"""Files of a data set: parquet, or JSON lines that may be compressed, written and read in pieces.

Invariant: JSON lines are strict JSON, one object per row with the columns in the schema's order.
Values that JSON lacks become text: times in ISO 8601, bytes in base64; NaN and infinity are null.
"""

import base64
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.export import ExportOptions
from schemas.units import MIB

# Rows that are Python objects at once, and bytes of JSON lines read at once.
_BATCH_ROWS, _READ_BYTES = 256, MIB
_SUFFIXES = {"none": "", "zstd": ".zst", "gzip": ".gz"}


class DataFiles(Protocol):
    """Files of one type."""

    @property
    def suffix(self) -> str: ...

    def writer(self, stream: Any, schema: pa.Schema) -> Any:  # noqa: ANN401 - pyarrow ships no types
        """Open a context whose value has `write_table`; the stream stays open after it."""

    def rows(self, stream: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        """Read at least these columns of each row."""


def data_files(options: ExportOptions) -> DataFiles:
    """Return the type of file that the options name."""
    if options.file_type == "parquet":
        return _ParquetFiles(options.compression)
    return _JsonLines(options.compression)


class _ParquetFiles:
    suffix = ".parquet"

    def __init__(self, compression: str) -> None:
        self._compression = compression

    def writer(self, stream: Any, schema: pa.Schema) -> Any:  # noqa: ANN401 - pyarrow ships no types
        return pq.ParquetWriter(stream, schema, compression=self._compression)

    def rows(self, stream: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        with pq.ParquetFile(stream) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns)):
                yield from batch.to_pylist()


class _JsonLines:
    def __init__(self, compression: str) -> None:
        self._codec = None if compression == "none" else compression
        self.suffix = f".jsonl{_SUFFIXES[compression]}"

    @contextmanager
    def writer(self, stream: Any, schema: pa.Schema) -> Iterator["_LineWriter"]:  # noqa: ANN401
        if self._codec is None:
            yield _LineWriter(stream, schema)
            return
        with pa.CompressedOutputStream(_StaysOpen(stream), self._codec) as compressed:
            yield _LineWriter(compressed, schema)

    def rows(self, stream: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        for line in _lines(self._plain(stream)):
            row = json.loads(line)
            yield {name: row[name] for name in columns}

    def _plain(self, stream: Any) -> Any:  # noqa: ANN401 - pyarrow ships no types
        return stream if self._codec is None else pa.CompressedInputStream(stream, self._codec)


class _LineWriter:
    def __init__(self, stream: Any, schema: pa.Schema) -> None:  # noqa: ANN401 - pyarrow ships no types
        self._stream, self._names = stream, schema.names
        # Texts, integers and lists of them are JSON already, and are most of the data.
        self._unsafe = [field.name for field in schema if not _is_json(field.type)]

    def write_table(self, table: pa.Table) -> None:
        for start in range(0, table.num_rows, _BATCH_ROWS):
            rows = table.slice(start, _BATCH_ROWS).to_pylist()
            for row in rows:
                for name in self._unsafe:
                    row[name] = _plain_value(row[name])
            self._stream.write(b"".join(map(_line, rows)))


def _line(row: dict[str, Any]) -> bytes:
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def _is_json(kind: pa.DataType) -> bool:
    """Tell whether every value of a type is JSON as pyarrow converts it to Python."""
    if pa.types.is_struct(kind):
        return all(_is_json(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_json(kind.value_type)
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )


def _plain_value(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(one) for one in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    return value


def _lines(stream: Any) -> Iterator[bytes]:  # noqa: ANN401 - pyarrow ships no types
    """Yield the stream's lines; an incomplete last one too."""
    pieces: list[bytes] = []
    while data := stream.read(_READ_BYTES):
        first, *others = bytes(data).split(b"\n")
        pieces.append(first)
        for line in others:
            yield b"".join(pieces)
            pieces = [line]
    if any(pieces):
        yield b"".join(pieces)


class _StaysOpen:
    """Output that a compressor, which closes what it writes to, leaves open."""

    closed = False

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 - pyarrow ships no types
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def tell(self) -> int:
        return int(self._stream.tell())

    def writable(self) -> bool:
        return True
