"""Values of a JSON array, or of objects one after the other, split without parsing them.

Invariant: memory is bounded by the largest value, and a value beyond the limit of a row is passed
over. The work is linear in the size of the file: no byte is looked at more than a few times.
"""

import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.dataset.sources.lines import LongLine
from pipeline.dataset.sources.rows import MAX_ROW_BYTES
from schemas.units import MIB

_STRUCTURE = re.compile(rb'["\[\]{},]')
_STRUCTURE_INSIDE = re.compile(rb'["\[\]{}]')
_IN_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


class UnclosedError(Exception):
    """The file ends within a value or before the array's closing bracket."""


def array_elements(stream: io.BufferedReader) -> Iterator[bytes | LongLine]:
    """Yield the elements of an array. Raises UnclosedError when it is not closed."""
    return _Splitter(stream=stream, is_array=True).values()


def objects(stream: io.BufferedReader) -> Iterator[bytes | LongLine]:
    """Yield objects that stand one after the other. Raises UnclosedError."""
    return _Splitter(stream=stream, is_array=False).values()


@dataclass(slots=True, kw_only=True)
class _Splitter:
    """Position in the stream: what was read of the current value, and where in it the scan is."""

    stream: io.BufferedReader
    is_array: bool
    _buffer: bytearray = field(default_factory=bytearray)
    _position: int = 0
    _depth: int = 0
    _in_string: bool = False
    _dropped_bytes: int = 0
    """Bytes of the current value that were passed over."""
    _digest: Any = None

    def values(self) -> Iterator[bytes | LongLine]:
        if self.is_array:
            self._skip_opening_bracket()
        while True:
            end = self._value_end()
            if end is None:
                if not self._more():
                    break
                continue
            is_last = self.is_array and self._buffer[end : end + 1] == b"]"
            value = self._take(end)
            if isinstance(value, LongLine) or value.strip():
                yield value
            if is_last:
                self._check_end()
                return
        if self.is_array or self._buffer.strip() or self._dropped_bytes:
            raise UnclosedError

    def _skip_opening_bracket(self) -> None:
        while b"[" not in self._buffer:
            if not self._more():
                raise UnclosedError
        del self._buffer[: self._buffer.index(b"[") + 1]

    def _more(self) -> bool:
        """Read on; what exceeds the limit of a row is dropped first. Return False at the end."""
        if len(self._buffer) > MAX_ROW_BYTES:
            self._drop(self._position)
        data = self.stream.read1(MIB)
        self._buffer += data
        return bool(data)

    def _drop(self, end: int) -> None:
        self._digest = self._digest or hashlib.sha256()
        self._digest.update(self._buffer[:end])
        self._dropped_bytes += end
        del self._buffer[:end]
        self._position = 0

    def _take(self, end: int) -> bytes | LongLine:
        """Take the value up to `end`, with the comma or bracket behind it in an array."""
        value: bytes | LongLine
        if self._dropped_bytes or end > MAX_ROW_BYTES:
            self._drop(end)
            value = LongLine(num_bytes=self._dropped_bytes, digest=self._digest.hexdigest())
        else:
            value = bytes(self._buffer[:end])
            del self._buffer[:end]
        if self.is_array:
            del self._buffer[:1]
        self._position = self._depth = self._dropped_bytes = 0
        self._digest = None
        return value

    def _value_end(self) -> int | None:
        """Scan on to the end of the value; None where the buffer ends first."""
        while True:
            if self._in_string and not self._leave_string():
                return None
            pattern = _STRUCTURE_INSIDE if self._depth else _STRUCTURE
            found = pattern.search(self._buffer, self._position)
            if found is None:
                self._position = len(self._buffer)
                return None
            self._position = found.end()
            mark = found[0]
            if mark == b'"':
                self._in_string = True
            elif mark in b"{[":
                self._depth += 1
            elif not self._depth:
                if self.is_array and mark in b",]":
                    return found.start()
            elif mark in b"}]":
                self._depth -= 1
                if not self._depth and not self.is_array:
                    return found.end()

    def _leave_string(self) -> bool:
        """Move behind the closing quote; return False where the buffer ends first."""
        match = _IN_STRING.match(self._buffer, self._position)
        assert match is not None, "matches any text"
        self._position = match.end()
        if self._buffer[self._position : self._position + 1] != b'"':
            # The rest is nothing, or a backslash whose character is not read yet.
            return False
        self._position += 1
        self._in_string = False
        return True

    def _check_end(self) -> None:
        while True:
            if self._buffer.strip():
                raise UnclosedError
            self._buffer.clear()
            if not self._more():
                return
