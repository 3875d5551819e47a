"""Lines of a text file, each bounded in memory."""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.dataset.sources.rows import MAX_ROW_BYTES
from pipeline.errors import ConfigError
from schemas.units import MIB

_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongLine:
    """A line that exceeds the limit of a row; its text was passed over."""

    num_bytes: int
    digest: str


def bounded_lines(stream: io.BufferedReader, where: str) -> Iterator[bytes | LongLine]:
    """Yield the lines with their line feeds, without a byte order mark. Raises ConfigError."""
    line = stream.readline(MAX_ROW_BYTES + 1)
    if line.startswith(_UTF16_MARKS):
        raise ConfigError(f"prompts.path: {where} is UTF-16 text; expected UTF-8")
    line = line.removeprefix(_UTF8_MARK)
    while line:
        yield line if len(line) <= MAX_ROW_BYTES else _passed_over(stream, line)
        line = stream.readline(MAX_ROW_BYTES + 1)


def _passed_over(stream: io.BufferedReader, start: bytes) -> LongLine:
    digest, num_bytes, piece = hashlib.sha256(), 0, start
    while piece:
        digest.update(piece)
        num_bytes += len(piece)
        piece = b"" if piece.endswith(b"\n") else stream.readline(MIB)
    return LongLine(num_bytes=num_bytes, digest=digest.hexdigest())
