"""The console on a terminal and without one."""

import json
import logging
import re
import sys

import pytest

from pipeline.console import console
from pipeline.console.console import LogFormat, is_terminal, open_console
from schemas.estimate import Band
from schemas.progress import Progress
from tests.fakes.example_report import run_progress, worker_report

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d"
READY = "event=engine_ready worker=w0 engine=fake release='1'"


@pytest.fixture
def clock_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the clock by a number."""
    now = [1000.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    return now


def make_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make standard error a terminal of 100 columns with colours."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def progress(rows_done: int, *tokens: int, days_left: Band | None = None) -> Progress:
    workers = [
        worker_report(f"w{number}", completion_tokens=count, in_flight=3, timeouts=1)
        for number, count in enumerate(tokens)
    ]
    return run_progress(
        *workers, rows_done=rows_done, rows_error=2, rows_failed=1, days_left=days_left
    )


def lines(text: str) -> list[str]:
    """Return the log lines without their time."""
    return [re.sub(rf"^{TIME} ", "", line) for line in text.splitlines()]


def test_log_shows_events_at_once_and_progress_at_intervals(
    clock_s: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with open_console("driver") as opened, opened.display() as show:
        show(progress(0, 0, 0), [READY])
        clock_s[0] += 9.9
        show(progress(5, 500, 490), [])
        assert lines(capsys.readouterr().err) == [f"INFO worker {READY}"]
        clock_s[0] += 0.1
        # 600 and 400 tokens in 10 s.
        show(progress(7, 600, 400), ["event=x"])
        assert lines(capsys.readouterr().err) == [
            "INFO driver event=x",
            (
                "INFO driver event=progress rows=7/100 tokens_per_s=100 in_flight=6 errors=2 "
                "failed=1 engines=2 waiting=0 retries=0 timeouts=2 refusals=0 "
                "time_left='not known yet'"
            ),
        ]
        clock_s[0] += 9.9
        show(progress(8, 600, 400), [])
        assert capsys.readouterr().err == ""


def test_terminal_shows_sentences_above_a_bar_with_the_estimates_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_terminal(monkeypatch)
    left = Band(p10=1.0, p50=2.0, p90=3.0)
    with open_console("driver") as opened, opened.display() as show:
        show(progress(45, 100, days_left=left), [READY, "event=warning the lock is gone"])
        print("from a library", file=sys.stderr)
        print("from Ray")
        logging.getLogger("a.library").warning("told %s", "twice")
    shown = capsys.readouterr().err
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    rows = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    sentences = [re.sub(r"^\d\d:\d\d:\d\d ", "", row) for row in rows]
    assert sentences.index("w0: fake is ready (release 1)") < sentences.index("the lock is gone")
    assert "from a library" in sentences
    assert "from Ray" in sentences
    assert "told twice" in sentences
    (bar,) = {row for row in rows if "45/100 rows (45%)" in row}
    assert bar.endswith("45/100 rows (45%), time left 2.0 days (1.0-3.0)")
    assert "━" in bar
    assert rows[-2] == "1 engine, 0 tokens/s, 3 in flight, 2 error rows, 1 failed row, 1 timeout"
    # A warning is yellow.
    assert re.search(r"\x1b\[33mthe lock is gone", shown)
    assert "event=" not in shown


def test_no_colour_on_a_terminal_with_no_color_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    with open_console("driver") as opened, opened.display() as show:
        show(progress(45, 100), ["event=warning the lock is gone"])
    shown = capsys.readouterr().err
    assert "the lock is gone" in shown
    assert "45/100 rows" in shown
    assert not re.search(r"\x1b\[[0-9;]*m", shown)


def test_without_a_terminal_there_is_no_escape_code_whatever_the_environment_asks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with open_console("driver") as opened:
        assert opened.terminal is None
        opened.log("event=warning the lock is gone")
    shown = capsys.readouterr().err
    assert re.fullmatch(rf"{TIME} WARNING driver event=warning the lock is gone\n", shown)


@pytest.mark.parametrize(
    ("log_format", "shown"),
    [
        ("lines", rf"{TIME} INFO worker {READY}\n"),
        (
            "json",
            (
                rf'{{"time": "{TIME}", "level": "info", "component": "worker", '
                r'"event": "engine_ready", "worker": "w0", "engine": "fake", "release": "1"}\n'
            ),
        ),
    ],
)
def test_lines_and_json_can_be_asked_for_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    log_format: LogFormat,
    shown: str,
) -> None:
    make_terminal(monkeypatch)
    with open_console("driver", log_format) as opened, opened.display() as show:
        show(progress(1), [READY])
    assert re.fullmatch(shown, capsys.readouterr().err)


def test_error_is_one_plain_line_and_in_json_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    with open_console("driver") as opened:
        opened.report_error(ValueError("no such file"))
    assert capsys.readouterr().err == "no such file\n"
    with open_console("driver", "json") as opened:
        opened.report_error(ValueError("a: no such\nfile"))
    values = json.loads(capsys.readouterr().err)
    assert (values["level"], values["event"], values["message"]) == (
        "error",
        "error",
        "a: no such\nfile",
    )


def test_dumb_terminal_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert is_terminal({"TERM": "xterm"})
    assert is_terminal({})
    assert not is_terminal({"TERM": "dumb"})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert not is_terminal({"TERM": "xterm"})


def test_of_other_libraries_only_warnings_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = logging.getLogger("a.library")
    monkeypatch.setattr(library, "level", logging.INFO)
    with open_console("driver"):
        library.info("a request")
        library.warning("two\nlines")
    assert lines(capsys.readouterr().err) == ["WARNING a.library two\\nlines"]


def test_closed_console_leaves_logging_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(logging.getLogger().handlers)
    with open_console("driver") as opened:
        assert logging.getLogger().handlers != before
    opened.log(READY)
    assert logging.getLogger().handlers == before
    assert capsys.readouterr().err == ""
