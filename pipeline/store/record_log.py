"""Records appended to a file: each is read back whole, or not at all.

A record has its length and checksum before it, so a reader recognises one that a crash truncated,
and stops there.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import IO

# A mark, the record's length and its CRC-32.
_HEAD = struct.Struct("<4sQI")
_MARK = b"RRL1"


def framed(record: bytes | memoryview) -> bytes:
    """Return the record as it is appended."""
    return _HEAD.pack(_MARK, len(record), zlib.crc32(record)) + record


def whole_records(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the records from the file's position to the last whole one."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        mark, length, checksum = _HEAD.unpack(head)
        record = file.read(length) if mark == _MARK else b""
        if len(record) < length or mark != _MARK or zlib.crc32(record) != checksum:
            return
        yield record
