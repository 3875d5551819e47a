"""Texts of a server as columns, logs and JSON can hold them."""

import json
from typing import Any

import orjson

_CAUSE_LENGTH = 300

UNREADABLE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(RecursionError, OverflowError, MemoryError),
)
"""Errors of JSON that is broken, hostile or of another form: a number of 100,000 digits raises a
ValueError, a list in a list in a list a RecursionError."""


def parsed(data: bytes) -> Any:  # noqa: ANN401 - any JSON
    """Parse JSON. Raises one of `UNREADABLE`.

    orjson needs a fifth of the time, and refuses halves of surrogate pairs.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def unicode_text(text: str) -> str:
    """Replace unpaired surrogates, which no file can hold, with question marks."""
    return text.encode("utf-8", "replace").decode()


def one_line(text: str) -> str:
    """Cut a text to one short line."""
    line = unicode_text(" ".join(text[: 4 * _CAUSE_LENGTH].split()))
    return line if len(line) <= _CAUSE_LENGTH else line[: _CAUSE_LENGTH - 3] + "..."
