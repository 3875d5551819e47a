"""Text of others cannot steer a terminal or forge a line."""

import json
import logging

import pytest

from pipeline.console.lines import JsonFormat, LineFormat, SentenceFormat
from pipeline.console.printable import printable

HOSTILE = [
    "\x1b[2J\x1b]0;title\x07", "\x07", "\x08\x08", "\r", "\x0b", "\x0c", "\x1c", "\x85",
    "\x9b31m", "\u2028", "\u2029", "\u202e", "\u2066", "\u200f", "\ufeff", "\ud83d",
    "\U000e0041", "\x00", "\x7f",
]  # fmt: skip


FORMS = {"lines": LineFormat(), "sentences": SentenceFormat(), "json": JsonFormat()}


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_steers_a_terminal_is_escaped_and_json_stays_the_same(text: str) -> None:
    shown = printable(f"a{text}b")
    assert shown.isascii()
    assert shown.isprintable()
    if text != "\ud83d":
        assert json.loads(printable(json.dumps({"a": text}, ensure_ascii=False))) == {"a": text}


@pytest.mark.parametrize(
    "text",
    [
        *("plain", "Grüße\tan alle\n", "日本語"),
        *("👩\u200d💻", "\u0645\u06cc\u200c\u062e", "a\xa0b"),
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
@pytest.mark.parametrize(
    "form", [LineFormat(), SentenceFormat(), JsonFormat()], ids=lambda form: type(form).__name__
)
def test_record_is_one_printable_line(form: logging.Formatter, text: str) -> None:
    cause = f"HTTP 500{text}event=done rows=1"
    message = f"event=engine_failed worker=w0 cause={cause!r}"
    record = logging.LogRecord("regenerate.worker", logging.ERROR, "", 0, message, None, None)
    shown = form.format(record)
    assert len(shown.splitlines()) == 1
    assert shown.isprintable()
