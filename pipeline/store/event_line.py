"""Log lines of a run: `event=kind key=value … text`.

A line is built where something happens and travels as text: from workers over the coordinator to
the driver, to the events file and to the console. A value with spaces is quoted as Python does.
"""

import ast
import re
from dataclasses import dataclass, field

_FIELD = r"""(\w+)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S+)"""
_KIND = re.compile(r"event=(\w+)(?:\s+|$)")
_FIRST_FIELD = re.compile(rf"{_FIELD}(?:\s+|$)")
# The driver's end of the line adds it to lines of an engine, which may end in text.
_LAST_WORKER = re.compile(r"(?:^|\s+)worker=(\S+)$")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine:
    """A log line in its parts."""

    kind: str | None
    """Name of the event; None for a line that is text alone."""
    fields: dict[str, str | int | float] = field(default_factory=dict)
    text: str = ""
    """Words after the fields."""


def event_line(line: str) -> EventLine:
    """Parse a log line. Unquoted numbers become numbers."""
    kind = _KIND.match(line)
    if kind is None:
        return EventLine(kind=None, text=line)
    fields: dict[str, str | int | float] = {}
    rest = line[kind.end() :]
    while found := _FIRST_FIELD.match(rest):
        fields[found[1]] = _value(found[2])
        rest = rest[found.end() :]
    if last := _LAST_WORKER.search(rest):
        fields["worker"] = last[1]
        rest = rest[: last.start()]
    return EventLine(kind=kind[1], fields=fields, text=rest.strip())


def _value(word: str) -> str | int | float:
    if _NUMBER.fullmatch(word):
        return float(word) if "." in word else int(word)
    if word[0] in "'\"":
        try:
            return str(ast.literal_eval(word))
        except (ValueError, SyntaxError):
            # A truncated line, or a lone quotation mark.
            return word
    return word
