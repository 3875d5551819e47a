"""Rows of CSV files. Every value is text, and an empty field is null."""

import csv
from collections.abc import Iterator
from functools import partial

from pipeline.dataset.sources.files import InputFile
from pipeline.dataset.sources.lines import LongLine, bounded_lines
from pipeline.dataset.sources.rows import (
    MAX_ROW_BYTES,
    Row,
    RowFile,
    check_names_differ,
    too_large,
    unreadable,
)
from pipeline.errors import ConfigError

# Excel writes semicolons where the comma is the decimal mark.
_DELIMITERS = (",", ";", "\t", "|")


def csv_file(file: InputFile) -> RowFile:
    """Read the header. Raises ConfigError for a file without one."""
    with file.opened_text() as stream:
        first = next(bounded_lines(stream, file.where), b"")
    header = "" if isinstance(first, LongLine) else first.decode("utf-8", "surrogateescape")
    delimiter = max(_DELIMITERS, key=lambda mark: len(next(csv.reader([header], delimiter=mark))))
    columns = tuple(name.strip() for name in next(csv.reader([header], delimiter=delimiter)))
    if not any(columns):
        raise ConfigError(f"prompts.path: {file.where} has no line with the names of its columns")
    check_names_differ(columns, file.where)
    rows = partial(_rows, file, columns, delimiter)
    return RowFile(where=file.where, columns=columns, arrow_schema=None, rows=lambda *_: rows())


def _rows(file: InputFile, columns: tuple[str, ...], delimiter: str) -> Iterator[Row]:
    # The module's own limit is 128 KiB, for all readers of the process.
    csv.field_size_limit(MAX_ROW_BYTES)
    long_lines: list[LongLine] = []
    with file.opened_text() as stream:
        texts = _texts(bounded_lines(stream, file.where), long_lines)
        reader = csv.reader(texts, delimiter=delimiter)
        next(reader)
        while True:
            where = f"{file.where} line {reader.line_num + 1}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield unreadable(f"{where}: not CSV: {error}", f"{file.name} {reader.line_num}")
                continue
            if long_lines:
                line = long_lines.pop()
                yield too_large(where, line.num_bytes, line.digest, {})
            elif fields:
                yield _row(fields, columns, where)


def _texts(lines: Iterator[bytes | LongLine], long_lines: list[LongLine]) -> Iterator[str]:
    for line in lines:
        if isinstance(line, LongLine):
            long_lines.append(line)
            yield "\n"
        else:
            # A byte that is not UTF-8 spoils its own row alone.
            yield line.decode("utf-8", "surrogateescape")


def _row(fields: list[str], columns: tuple[str, ...], where: str) -> Row:
    content = "\x1f".join(fields)
    if len(fields) != len(columns):
        found = f"found {len(fields)} fields; expected {len(columns)}"
        return unreadable(f"{where}: {found}", _printable(content))
    if content != _printable(content):
        return unreadable(f"{where}: not UTF-8", _printable(content))
    return {name: text or None for name, text in zip(columns, fields, strict=True)}


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
