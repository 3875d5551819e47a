"""Output of commands: progress on a terminal and in a log, and answers that nobody reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from jobs import terminal
from pipeline.errors import ConfigError, PlanError
from pipeline.store.folder import Folder
from schemas.estimate import Band
from schemas.progress import Progress
from tests.fakes.example_report import run_progress, worker_report
from tests.fakes.running import ROOT


@pytest.fixture
def clock_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the clock by a number."""
    now = [1000.0]
    monkeypatch.setattr("jobs.terminal.time.monotonic", lambda: now[0])
    return now


def progress(rows_done: int, *tokens: int, days_left: Band | None = None) -> Progress:
    workers = [
        worker_report(f"w{number}", completion_tokens=count, in_flight=3)
        for number, count in enumerate(tokens)
    ]
    return run_progress(
        *workers, rows_done=rows_done, rows_error=2, rows_failed=1, days_left=days_left
    )


def lines(text: str) -> list[str]:
    """Return the log lines without their time."""
    return [line.partition(" ")[2] for line in text.splitlines()]


def test_log_shows_events_at_once_and_progress_at_intervals(
    clock_s: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.display(100, 0) as show:
        show(progress(0, 0, 0), ["event=engine_ready"])
        clock_s[0] += 9.9
        show(progress(5, 500, 490), [])
        assert lines(capsys.readouterr().err) == ["event=engine_ready"]
        clock_s[0] += 0.1
        # 600 and 400 tokens in 10 s.
        show(progress(7, 600, 400), ["event=x"])
        assert lines(capsys.readouterr().err) == [
            "event=x",
            "event=progress rows=7/100 tokens_per_s=100 in_flight=6 errors=2 failed=1",
        ]
        clock_s[0] += 9.9
        show(progress(8, 600, 400), [])
        assert capsys.readouterr().err == ""


def test_rate_is_that_of_the_last_minute_and_never_negative(
    clock_s: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.display(100, 0) as show:
        for tokens in (0, 9000, 12000):
            show(progress(1, tokens), [])
            clock_s[0] += 35.0
        # 0 s is out of the window at 70 s: 3,000 tokens in 35 s.
        assert "tokens_per_s=86 " in lines(capsys.readouterr().err)[-1]
        # A worker that was replaced counts from 0.
        show(progress(1, 10), [])
        assert "tokens_per_s=0 " in lines(capsys.readouterr().err)[-1]


def test_time_left_is_shown_once_it_is_known(
    clock_s: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.display(100, 0) as show:
        clock_s[0] += 10.0
        show(progress(1, 0, days_left=Band(p10=1.0, p50=2.0, p90=3.0)), [])
    (line,) = lines(capsys.readouterr().err)
    assert line.endswith(" time_left='2.0 days (1.0-3.0)'")


def test_bar_counts_rows_and_shows_events_above(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with terminal.display(100, 40) as show:
        show(progress(45, 100), ["event=engine_ready"])
    shown = capsys.readouterr().err
    assert "event=engine_ready" in shown
    assert "45/100" in shown
    assert "in_flight=3 errors=2 failed=1" in shown


# -- answers


def test_reader_that_closes_the_pipe_is_no_error() -> None:
    code = "from jobs.terminal import tell\nfor _ in range(20000): tell('x' * 50)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(20) == 0


def test_answer_about_a_run_is_the_commands_exit_status(tmp_path: Path) -> None:
    opened: list[str] = []

    def answer(folder: Folder) -> int:
        opened.append(folder.where)
        return 3

    assert terminal.about_a_run(str(tmp_path), answer) == 3
    assert opened == [str(tmp_path)]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("out: no run"), "out: no run"),
        (PermissionError(13, "Permission denied", "a/b"), "a/b: cannot be read: Permission denied"),
        (OSError("gone"), "gone"),
    ],
)
def test_error_that_the_user_can_fix_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    def answer(folder: Folder) -> int:
        raise error

    assert terminal.about_a_run(str(tmp_path), answer) == 2
    assert capsys.readouterr().err.rstrip().endswith(line)


def test_option_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=rf"cannot read {tmp_path}/none: No such file"):
        terminal.read_text(tmp_path / "none")
    with pytest.raises(PlanError, match=rf"cannot write {tmp_path}: Is a directory"):
        terminal.write_text(tmp_path, "x")
    terminal.write_text(tmp_path / "a", "é")
    assert terminal.read_text(tmp_path / "a") == "é"
