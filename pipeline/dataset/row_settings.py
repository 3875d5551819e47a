"""Settings of single rows, read from columns of the input. Pure."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.dataset.conversations import is_blank, value_in_text
from schemas.config.requests import MAX_INT32, MAX_TEMPERATURE
from schemas.prompt import Problem, RowSettings

_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_WORDS |= {"false": False, "no": False, "off": False, "0": False}


class _WrongValueError(Exception):
    """A value that is not what the setting expects; its text says what is expected."""


def row_settings(row: Mapping[str, object], columns: Mapping[str, str]) -> RowSettings | Problem:
    """Read a row's settings; a null or an empty text leaves one to the run file."""
    values: dict[str, Any] = {}
    for setting, column in columns.items():
        value = row.get(column)
        if is_blank(value):
            continue
        try:
            values[setting] = _READERS[setting](value)
        except _WrongValueError as error:
            found = repr(value)[:60]
            return Problem(kind="bad_setting", text=f"{column}: found {found}; expected {error}")
    return RowSettings(**values)


def _truth(value: object) -> bool:
    known = _WORDS.get(str(value).strip().lower()) if isinstance(value, bool | int | str) else None
    if known is None:
        raise _WrongValueError("true or false")
    return known


def _max_tokens(value: object) -> int:
    number = _number(value)
    if number is None or not 1 <= number <= MAX_INT32 or number != int(number):
        raise _WrongValueError("a number of tokens, at least 1")
    return int(number)


def _temperature(value: object) -> float:
    number = _number(value)
    if number is None or not 0 <= number <= MAX_TEMPERATURE:
        raise _WrongValueError(f"a number from 0 to {MAX_TEMPERATURE}")
    return number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _template_kwargs(value: object) -> dict[str, object]:
    read = value_in_text(value) if isinstance(value, str) else value
    if not isinstance(read, dict):
        raise _WrongValueError("an object of chat-template words")
    # In parquet a row has the fields of all rows, with null in those that it lacks.
    known = {str(name): word for name, word in read.items() if word is not None}
    try:
        json.dumps(known, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise _WrongValueError("an object of JSON values") from None
    return known


_READERS: dict[str, Callable[[object], object]] = {
    "thinking": _truth,
    "max_tokens": _max_tokens,
    "temperature": _temperature,
    "chat_template_kwargs": _template_kwargs,
}
