"""Metadata of a GGUF file.

The library's reader builds an array for each of the vocabulary's tokens, which takes seconds.
Layout: ggml, docs/gguf.md, versions 2 and 3.
"""

import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.untrusted.parsing import UNREADABLE, reason

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
# Type of a value: its format in the module struct.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT_LENGTH = struct.Struct("<Q")


def gguf_metadata(path: Path, wanted: Collection[str]) -> Mapping[str, object]:
    """Return those of the wanted values that the file has. Raises ConfigError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data=data).metadata(wanted)
    except (OSError, struct.error, *UNREADABLE) as error:
        found = reason(error)
        raise ConfigError(f"engine.model_file: cannot read {path} as GGUF: {found}") from None


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Reads values one after the other."""

    data: mmap.mmap
    at: int = 0

    def metadata(self, wanted: Collection[str]) -> dict[str, object]:
        """Return the wanted values. Raises ValueError or struct.error for another format."""
        magic, version = self.data[:4], struct.unpack_from("<I", self.data, 4)[0]
        if magic != _MAGIC or version not in _VERSIONS:
            raise ValueError("it does not begin as GGUF 2 or 3")
        (num_values,) = struct.unpack_from("<Q", self.data, 16)
        self.at = 24
        found: dict[str, object] = {}
        for _ in range(num_values):
            key = self._bytes().decode("utf-8", "replace")
            value = self._value(int(self._number("I")), is_wanted=key in wanted)
            if key in wanted:
                found[key] = value
        return found

    def _number(self, kind: str) -> int | float | bool:
        number: int | float | bool
        (number,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return number

    def _bytes(self) -> bytes:
        length = int(self._number("Q"))
        if length > len(self.data) - self.at:
            raise ValueError("a text is longer than the file")
        self.at += length
        return self.data[self.at - length : self.at]

    def _value(self, kind: int, *, is_wanted: bool) -> object:
        if kind == _STRING:
            return self._bytes().decode("utf-8", "replace")
        if kind == _ARRAY:
            return self._array(is_wanted=is_wanted)
        if kind not in _NUMBERS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self._number(_NUMBERS[kind])

    def _array(self, *, is_wanted: bool) -> list[object]:
        kind, length = int(self._number("I")), int(self._number("Q"))
        if kind in _NUMBERS:
            start = self.at
            self.at += length * struct.calcsize(f"<{_NUMBERS[kind]}")
            if self.at > len(self.data):
                raise ValueError("an array is longer than the file")
            if not is_wanted:
                return []
            return list(struct.unpack_from(f"<{length}{_NUMBERS[kind]}", self.data, start))
        if kind == _STRING:
            return self._texts(length, is_wanted=is_wanted)
        return [self._value(kind, is_wanted=is_wanted) for _ in range(length)]

    def _texts(self, length: int, *, is_wanted: bool) -> list[object]:
        """Read an array of texts. In one loop, because vocabularies have 100,000s of them."""
        data, at, texts = self.data, self.at, list[object]()
        for _ in range(length):
            (num_bytes,) = _TEXT_LENGTH.unpack_from(data, at)
            at += _TEXT_LENGTH.size + num_bytes
            if at > len(data):
                raise ValueError("a text is longer than the file")
            if is_wanted:
                texts.append(data[at - num_bytes : at].decode("utf-8", "replace"))
        self.at = at
        return texts
