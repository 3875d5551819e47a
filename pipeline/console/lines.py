"""Log records as text: sentences for a terminal, `event=… key=value` or JSON for machines. Pure."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime, tzinfo
from typing import Any

from pipeline.console.events import EVENTS, UNKNOWN
from pipeline.console.printable import on_one_line, printable
from pipeline.store.event_line import EventLine, event_line

LOGGER = "regenerate"
"""Parent of the loggers of all components."""


def line_logger(command: str) -> Callable[[str], None]:
    """Return the function that logs lines; `command` is the component of its own ones."""

    def log(line: str) -> None:
        parsed = event_line(line)
        kind = EVENTS.get(parsed.kind or "", UNKNOWN)
        component = kind.component or ("engine" if "worker" in parsed.fields else command)
        is_usual = kind.usual_cause is not None and parsed.fields.get("cause") == kind.usual_cause
        level = logging.INFO if is_usual else kind.level
        logging.getLogger(f"{LOGGER}.{component}").log(level, "%s", line)

    return log


class ZonedFormatter(logging.Formatter):
    """Base of the formats, which print the local time, or that of a given zone."""

    def __init__(self, zone: tzinfo | None = None) -> None:
        super().__init__()
        self._zone = zone

    def time_of(self, record: logging.LogRecord) -> datetime:
        return datetime.fromtimestamp(record.created, self._zone).astimezone(self._zone)

    def message_of(self, record: logging.LogRecord) -> str:
        """Return the line of a record, with the traceback if it has one."""
        message = record.getMessage()
        if record.exc_info:
            message += f"\n{self.formatException(record.exc_info)}"
        return message


class LineFormat(ZonedFormatter):
    """`2026-12-01T03:37:48+00:00 INFO worker event=engine_ready worker=w0 …`, one line each."""

    def format(self, record: logging.LogRecord) -> str:
        time = self.time_of(record).isoformat(timespec="seconds")
        message = on_one_line(self.message_of(record))
        return f"{time} {record.levelname} {component_of(record)} {message}"


class JsonFormat(ZonedFormatter):
    """JSON lines with the same fields; text after the fields is `message`."""

    def format(self, record: logging.LogRecord) -> str:
        parsed = event_line(self.message_of(record))
        values: dict[str, Any] = {
            "time": self.time_of(record).isoformat(timespec="seconds"),
            "level": record.levelname.lower(),
            "component": component_of(record),
        }
        if parsed.kind is not None:
            values["event"] = parsed.kind
        # A field may not replace one of those above.
        values |= {name: value for name, value in parsed.fields.items() if name not in values}
        if parsed.text:
            values["message"] = parsed.text
        return printable(json.dumps(values, ensure_ascii=False))


class SentenceFormat(ZonedFormatter):
    """`03:37:48 w0: SGLang is ready (release 0.5.23)`."""

    def format(self, record: logging.LogRecord) -> str:
        time = self.time_of(record).strftime("%H:%M:%S")
        lines = sentence(event_line(self.message_of(record))).splitlines()
        return "\n".join(f"{time} {line}" for line in lines)


def component_of(record: logging.LogRecord) -> str:
    """Return the component of a record of ours, or the name of another library's logger."""
    return record.name.removeprefix(f"{LOGGER}.")


def sentence(line: EventLine) -> str:
    """Return the sentence of an event, or its words where its fields are not those expected.

    The fields' own line feeds are escaped: only the text behind them has lines.
    """
    if line.kind is None:
        return printable(line.text)
    kind = EVENTS.get(line.kind, UNKNOWN)
    fields = {
        name: on_one_line(value) if isinstance(value, str) else value
        for name, value in line.fields.items()
    }
    try:
        words = kind.sentence.format(text=printable(line.text), **fields)
    except (KeyError, ValueError, TypeError):
        words = ""
    return words or _plain_words(line.kind, fields, printable(line.text))


def _plain_words(kind: str, fields: Mapping[str, object], text: str) -> str:
    listed = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items())
    words = ", ".join(filter(None, (listed, text)))
    name = kind.replace("_", " ").capitalize()
    return f"{name}: {words}" if words else name
