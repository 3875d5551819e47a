"""Output of commands: answers that nobody reads, and one line for an error."""

import subprocess
import sys
from pathlib import Path

import pytest

from jobs import terminal
from pipeline.errors import ConfigError, PlanError
from pipeline.store.folder import Folder
from tests.fakes.running import ROOT


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
