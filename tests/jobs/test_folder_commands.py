"""Commands that read a run's folder, given another one: one line and exit status 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import canary, estimate, report, status
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import EVENTS_FILE, MANIFEST_FILE, RUN_FILE, RUN_FILE_COPY
from tests.fakes.example_run import write_example_run

COMMANDS: dict[str, Callable[[Path], int]] = {
    "status": lambda folder: status.main([str(folder)]),
    "status --watch": lambda folder: status.main([str(folder), "--watch"]),
    "report": lambda folder: report.main([str(folder)]),
    "canary": lambda folder: canary.main([str(folder)]),
    "estimate": lambda folder: estimate.main(["--update-from", str(folder)]),
}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = LocalFolder(tmp_path_factory.mktemp("run") / "out")
    write_example_run(folder, num_parts=6)
    return folder.root


@pytest.fixture
def run(example: Path, tmp_path: Path) -> Path:
    """Copy the run's folder for one test."""
    shutil.copytree(example, tmp_path / "run")
    return tmp_path / "run"


def one_line(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], *, code: int = 2
) -> str:
    assert COMMANDS[command](folder) == code
    out, err = capsys.readouterr()
    assert out == ""
    [only] = err.splitlines()
    return str(only).removeprefix("estimate: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_folder_without_a_run_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "data").mkdir(parents=True)
    expected = {
        "none": "no such folder; expected the output.folder of a run",
        "file": "found a file; expected the output.folder of a run",
        "empty": "no run here: it has no run.json",
        "other": "no run here: it has no run.json",
        "other/data": "no run here: it has no run.json",
    }
    for name, said in expected.items():
        folder = tmp_path / name
        assert one_line(command, folder, capsys) == f"{folder}: {said}"


@pytest.mark.parametrize("command", COMMANDS)
def test_run_record_of_something_else_is_named(
    command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in (b"", b"{", b"[1]", b"\xff\x00"):
        (run / RUN_FILE).write_bytes(content)
        said = one_line(command, run, capsys)
        assert said.startswith(f"{run / RUN_FILE}: not a run record: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_folder_where_a_file_should_be_is_named(
    command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / MANIFEST_FILE).unlink()
    (run / MANIFEST_FILE).mkdir()
    said = one_line(command, run, capsys)
    assert said == (
        f"output.folder: {run / MANIFEST_FILE} is a folder, expected a file; move it away"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_run_without_a_session_says_whether_it_has_begun(
    command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / MANIFEST_FILE).write_bytes(b"\x00\xff\n{}\n")
    assert one_line(command, run, capsys).startswith(
        f"{run / MANIFEST_FILE} line 1: found no event of a run"
    )
    (run / MANIFEST_FILE).unlink()
    assert one_line(command, run, capsys) == (
        f"{run}: the run here has not begun: it has read no prompts yet"
    )


def test_spoilt_side_file_that_is_a_folder_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / EVENTS_FILE).unlink()
    (run / EVENTS_FILE).mkdir()
    assert one_line("report", run, capsys) == (
        f"output.folder: {run / EVENTS_FILE} is a folder, expected a file; move it away"
    )


# -- the canary's command


def test_canary_that_passed_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / MANIFEST_FILE).read_text().splitlines()
    # The verdict follows the rows that it judges.
    lines.sort(key=lambda line: json.loads(line).get("verdict") == "passed")
    (run / MANIFEST_FILE).write_text("".join(line + "\n" for line in lines))
    assert canary.main([str(run)]) == 0
    assert capsys.readouterr().out == "canary     passed, 48 rows\n"


def test_canary_that_failed_is_shown_as_the_run_showed_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (run / MANIFEST_FILE).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        if event.get("verdict") == "passed":
            event["verdict"] = "failed"
    (run / MANIFEST_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    config = json.loads((run / RUN_FILE_COPY).read_text())
    config["quality"]["looping"]["max_share"] = 0.001
    (run / RUN_FILE_COPY).write_text(json.dumps(config))
    assert canary.main([str(run)]) == 3
    assert "stopped the run after 48 rows" in capsys.readouterr().out
    assert canary.main([str(run), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "failed"
    assert [excess["name"] for excess in told["canary"]["excesses"]] == ["looping"]
    (run / RUN_FILE_COPY).unlink()
    said = one_line("canary", run, capsys)
    assert said == f"{run}: the limits are not known: no readable {RUN_FILE_COPY}"


def test_run_without_a_canary_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / MANIFEST_FILE).read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("event") != "canary"]
    (run / MANIFEST_FILE).write_text("".join(line + "\n" for line in kept))
    assert one_line("canary", run, capsys).startswith(f"{run}: no canary has run here")
