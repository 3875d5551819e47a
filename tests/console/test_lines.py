"""Forms of a log record, each by hand."""

import json
import logging
import sys
from datetime import UTC, timedelta, timezone

import pytest

from pipeline.console.lines import (
    JsonFormat,
    LineFormat,
    SentenceFormat,
    line_logger,
    sentence,
)
from pipeline.store.event_line import event_line

# 2026-12-01 03:37:48 UTC
AT_S = 1_796_096_268.25
PARIS = timezone(timedelta(hours=1))
READY = "event=engine_ready worker=w0 engine=SGLang release='0.5.23'"


def record(line: str, *, name: str = "regenerate.worker", level: str = "INFO") -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": name,
            "levelname": level,
            "levelno": logging.getLevelNamesMapping()[level],
            "msg": line,
            "created": AT_S,
        }
    )


def test_line_has_iso_time_with_offset_level_component_and_the_event_unchanged() -> None:
    assert LineFormat(UTC).format(record(READY)) == (
        f"2026-12-01T03:37:48+00:00 INFO worker {READY}"
    )
    assert LineFormat(PARIS).format(record("a\nb", level="ERROR")) == (
        "2026-12-01T04:37:48+01:00 ERROR worker a\\nb"
    )


def test_json_has_the_fields_of_the_line() -> None:
    text = JsonFormat(PARIS).format(record(READY))
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2026-12-01T04:37:48+01:00",
        "level": "info",
        "component": "worker",
        "event": "engine_ready",
        "worker": "w0",
        "engine": "SGLang",
        "release": "0.5.23",
    }
    warning = JsonFormat(UTC).format(record("event=warning é is\ngone", level="WARNING"))
    assert json.loads(warning) == {
        "time": "2026-12-01T03:37:48+00:00",
        "level": "warning",
        "component": "worker",
        "event": "warning",
        "message": "é is\ngone",
    }
    assert "é" in warning


def test_numbers_are_numbers_in_json_and_no_field_hides_the_time() -> None:
    values = json.loads(JsonFormat(UTC).format(record("event=progress rows=7/100 errors=2 time=9")))
    assert (values["rows"], values["errors"]) == ("7/100", 2)
    assert values["time"] == "2026-12-01T03:37:48+00:00"


def test_terminal_shows_the_time_and_a_sentence() -> None:
    shown = SentenceFormat(PARIS).format(record(READY))
    assert shown == "04:37:48 w0: SGLang is ready (release 0.5.23)"
    look = "event=look report='/o/report.html' status='cmd /o' dashboard='none'"
    assert SentenceFormat(UTC).format(record(look)).splitlines() == [
        "03:37:48 Report     /o/report.html",
        "03:37:48 Status     cmd /o",
        "03:37:48 Dashboard  none",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("event=warning the lock is gone", "the lock is gone"),
        ("event=session rows=902087 done=0 folder=/o", "902,087 rows, 0 of them done, in /o"),
        ("not an event", "not an event"),
        # Its fields are not those of the sentence: nothing is lost.
        ("event=engine_ready worker=w0", "Engine ready: worker w0"),
        ("event=session rows=many done=0 folder=/o", "Session: rows many, done 0, folder /o"),
        ("event=brand_new some_count=3 and text", "Brand new: some count 3, and text"),
        ("event=brand_new", "Brand new"),
    ],
)
def test_sentence_of_an_event(line: str, words: str) -> None:
    assert sentence(event_line(line)) == words


def test_traceback_stays_with_its_record() -> None:
    found = record("broken", level="ERROR")
    try:
        raise ValueError("why")
    except ValueError:
        found.exc_info = sys.exc_info()
    (line,) = LineFormat(UTC).format(found).splitlines()
    assert line.startswith("2026-12-01T03:37:48+00:00 ERROR worker broken\\nTraceback")
    assert line.endswith("ValueError: why")


@pytest.mark.parametrize(
    ("line", "name", "level"),
    [
        (READY, "regenerate.worker", "INFO"),
        ("event=step_down cause=pool worker=w1", "regenerate.engine", "WARNING"),
        ("event=worker_ended worker=w1 cause='no work left'", "regenerate.driver", "INFO"),
        ("event=worker_ended worker=w1 cause='its node leaves'", "regenerate.driver", "WARNING"),
        ("event=given_up cause=x reason='y' worker=w1", "regenerate.engine", "ERROR"),
        # An engine's warning names its worker; any other is the command's own.
        ("event=warning c.json is ignored: bad worker=w1", "regenerate.engine", "WARNING"),
        ("event=warning the lock is gone", "regenerate.export", "WARNING"),
        ("event=nothing_to_do x", "regenerate.export", "INFO"),
        ("some words", "regenerate.export", "INFO"),
    ],
)
def test_event_has_its_component_and_level(
    line: str, name: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        line_logger("export")(line)
    (found,) = caplog.records
    assert (found.name, found.levelname, found.getMessage()) == (name, level, line)
