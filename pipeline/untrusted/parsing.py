"""Door for what others wrote: servers, data sets, models' repositories, edited files.

A parser meets hostile input with other errors than it documents: a number of 100,000 digits is a
plain ValueError, a list in a list in a list a RecursionError, a length of 2^62 bytes a MemoryError
or an OverflowError, and a library in Rust raises its PanicException past every handler of errors.
Behind this door there is one error, UnreadableError, and nothing is read before its size is known.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson

UNREADABLE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(RecursionError, OverflowError, MemoryError),
)
"""Errors of data that is broken, hostile or of another form."""

_PANIC = "PanicException"
_REASON_LENGTH = 200

T = TypeVar("T")


class UnreadableError(ValueError):
    """Data that cannot be used; the text is a short line that says why."""


def parsed(data: bytes) -> Any:  # noqa: ANN401 - any JSON
    """Parse JSON. Raises one of `UNREADABLE`.

    orjson needs a fifth of the time, and refuses halves of surrogate pairs.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises UnreadableError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableError(f"not JSON: {error}") from None
    except UNREADABLE as error:
        raise UnreadableError(f"not usable as JSON: {reason(error)}") from None
    if not isinstance(value, dict):
        raise UnreadableError("not a JSON object")
    return value


def bytes_of(path: Path, *, most: int) -> bytes:
    """Read a whole file. Raises UnreadableError for one of more than `most` bytes, and OSError."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UnreadableError(f"larger than {most:,} bytes")
    return data


def guarded(call: Callable[[], T]) -> T:
    """Call a parser in C or Rust. Raises UnreadableError for any error of its own, and a panic."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # A panic is no Exception; any other BaseException is not the parser's.
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise UnreadableError(reason(error)) from None


def reason(error: BaseException) -> str:
    """Return the first line of an error, with its kind where it has no text."""
    lines = str(error).strip().splitlines()
    text = lines[0][:_REASON_LENGTH] if lines else ""
    if isinstance(error, RecursionError):
        return "nested too deep"
    return text or type(error).__name__
