"""Rows of JSON files: one object per line, one array of objects, or objects one after the other.

JSON is parsed without a schema: a column may be a list in one row and text in the next. A value
that is not JSON is one bad row.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Literal

from pipeline.dataset.sources.files import InputFile
from pipeline.dataset.sources.json_values import UnclosedError, array_elements, objects
from pipeline.dataset.sources.lines import LongLine, bounded_lines
from pipeline.dataset.sources.rows import BadRow, Row, RowFile, too_large, unreadable
from pipeline.errors import ConfigError

_Layout = Literal["lines", "array", "objects"]


def json_file(file: InputFile) -> RowFile:
    rows = partial(_rows, file)
    return RowFile(where=file.where, columns=None, arrow_schema=None, rows=lambda *_: rows())


def _rows(file: InputFile) -> Iterator[Row]:
    layout = _layout(file)
    with file.opened_text() as stream:
        if layout == "lines":
            for number, line in enumerate(bounded_lines(stream, file.where), start=1):
                if isinstance(line, LongLine) or line.strip():
                    yield _row(line, f"{file.where} line {number}")
            return
        values = array_elements(stream) if layout == "array" else objects(stream)
        number = 0
        try:
            for number, value in enumerate(values, start=1):
                yield _row(value, f"{file.where} element {number}")
        except UnclosedError:
            raise ConfigError(
                f"prompts.path: {file.where}: the JSON breaks off or has text behind its end, "
                f"after element {number}"
            ) from None


def _layout(file: InputFile) -> _Layout:
    """Tell the layout by the first line that is not blank."""
    with file.opened_text() as stream:
        lines = (line for line in bounded_lines(stream, file.where) if _is_some(line))
        first, second = next(lines, b""), next(lines, None)
    if isinstance(first, LongLine):
        # An array may be one line. Rows that are so long are bad in either case.
        return _layout_of_long_line(file)
    is_whole = not isinstance(_parsed(first), str)
    if first.lstrip().startswith(b"[") and not (is_whole and second is not None):
        return "array"
    if file.format == "json_lines" or is_whole:
        return "lines"
    return "objects"


def _layout_of_long_line(file: InputFile) -> _Layout:
    with file.opened_text() as stream:
        start = stream.read1(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    return "array" if start.startswith(b"[") else "lines"


def _is_some(line: bytes | LongLine) -> bool:
    return isinstance(line, LongLine) or bool(line.strip())


def _row(value: bytes | LongLine, where: str) -> Row:
    if isinstance(value, LongLine):
        return too_large(where, value.num_bytes, value.digest, {})
    row = _parsed(value)
    if isinstance(row, dict):
        return row
    fault = row if isinstance(row, str) else f"found a {type(row[0]).__name__}"
    return _bad_row(value, f"{where}: {fault}; expected one JSON object per row")


def _bad_row(value: bytes, text: str) -> BadRow:
    return unreadable(text, value.strip().decode("utf-8", "backslashreplace"))


def _parsed(value: bytes) -> dict[str, object] | tuple[object] | str:
    """Parse one value: an object, another value in a tuple, or what is wrong."""
    try:
        parsed = json.loads(value.rstrip().decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except ValueError:
        # Python parses no number of more than 4,300 digits.
        return "has a number with too many digits"
    except RecursionError:
        return "nested too deep"
    return parsed if isinstance(parsed, dict) else (parsed,)
