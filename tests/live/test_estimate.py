"""The estimate of a run from its folder: the launch that it compares with, and the command."""

import json
from pathlib import Path

import pytest

from jobs.estimate import main
from pipeline.live.estimate import expectation
from pipeline.live.update import Planned
from pipeline.store.folder import LocalFolder
from schemas.config.engine import EngineConfig
from schemas.config.run_file import RunFile
from tests.fakes.live_run import TODAY, filled_folder, run_file

# --- the launch --------------------------------------------------------------------------------


def test_dry_run_is_of_the_launch_that_came_up(tmp_path: Path) -> None:
    folder, config = LocalFolder(tmp_path), run_file(tmp_path)
    engine = EngineConfig(kind="sglang", command=["c"], max_running_requests=3)
    config = config.model_copy(update={"engine": engine})
    launched = "--tp-size 2 --mem-fraction-static 0.80 --max-running-requests 3"
    as_it_runs = expectation(folder, config, today=TODAY, launched=launched).plan
    assert isinstance(as_it_runs, Planned)
    best = as_it_runs.groups[0].best
    assert best.replica.settings.tp_size == 2
    # How many run is what memory leaves, not what the launch was limited to.
    assert best.resident.cap_requests > 3


def test_dry_run_keeps_the_stages_of_the_launch_and_adds_none(tmp_path: Path) -> None:
    config = run_file(tmp_path)
    engine = config.engine.model_copy(update={"gpus": 2})
    config = config.model_copy(update={"engine": engine})
    for launched, layout in (("--pp-size 2", (1, 2)), ("--mem-fraction-static 0.8", (2, 1))):
        plan = expectation(LocalFolder(tmp_path), config, today=TODAY, launched=launched).plan
        assert isinstance(plan, Planned)
        settings = plan.groups[0].best.replica.settings
        assert (settings.tp_size, settings.pp_size) == layout


# --- calibrations of the run -------------------------------------------------------------------


def calibration(folder: LocalFolder, name: str, **changes: object) -> None:
    """Write a calibration of a launch that found 10 GiB less free memory than forecast."""
    values = {
        "model": "Qwen/Qwen3.6-27B", "gpu": "RTX PRO 6000 Blackwell",
        "release": "0.5.23", "layout": "1",
        "free_before_load_bytes": 84 << 30, "weights_bytes": 51 << 30, **changes,
    }  # fmt: skip
    folder.make("calibrations")
    folder.write_whole(f"calibrations/{name}.json", json.dumps(values).encode())


def expected_cap(folder: LocalFolder, config: RunFile, launched: str | None = None) -> float:
    expected = expectation(folder, config, today=TODAY, launched=launched).plan
    assert isinstance(expected, Planned), expected
    return expected.groups[0].best.resident.cap_requests


def test_engines_own_figures_replace_what_the_plan_assumes(tmp_path: Path) -> None:
    folder, config = LocalFolder(tmp_path), run_file(tmp_path)
    assumed = expected_cap(folder, config)
    plan = expectation(folder, config, today=TODAY).plan
    assert isinstance(plan, Planned)
    calibration(folder, "a")
    assert expected_cap(folder, config) < assumed
    measured = expectation(folder, config, today=TODAY).plan
    assert isinstance(measured, Planned)
    # The cap is measured and widens no band.
    names = {spread.name for spread in measured.groups[0].rate.spreads}
    assert {each.name for each in plan.groups[0].rate.spreads} - names == {"running requests"}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"}, {"gpu": "B200"}, {"release": "0.5.20"}, {"layout": "2"},
        {"weights_bytes": "51"},
    ],
)  # fmt: skip
def test_figures_of_another_launch_change_nothing(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    folder, config = LocalFolder(tmp_path), run_file(tmp_path)
    assumed = expected_cap(folder, config)
    calibration(folder, "a", **changes)
    folder.write_whole("calibrations/b.json", b"\xff{]")
    assert expected_cap(folder, config) == assumed


def test_figures_are_those_of_the_layout_that_came_up(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    config = run_file(tmp_path, hardware=[{"gpu": "rtx-pro-6000", "count": 2}])
    one, two = "--tp-size 1", "--tp-size 2"
    assumed = expected_cap(folder, config, one), expected_cap(folder, config, two)
    calibration(folder, "a", layout="2", weights_bytes=26 << 30)
    assert expected_cap(folder, config, one) == assumed[0]
    assert expected_cap(folder, config, two) < assumed[1]


# --- the command -------------------------------------------------------------------------------


def test_command_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = filled_folder(tmp_path)
    assert main(["--update-from", str(folder.root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows_total"], found["rows_done"], found["completions_left"]) == (100, 30, 70)
    assert found["counted_by"] == "answers"
    assert found["tokens_per_s"]["p50"] == pytest.approx(100, rel=0.02)
    assert found["days_left"]["p10"] < found["days_left"]["p50"] < found["days_left"]["p90"]
    assert main(["--update-from", str(folder.root)]) == 0
    text = capsys.readouterr().out
    assert "time left" in text
    assert "none to compare with: embedded engines" in text


def test_folder_without_run_or_readings_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--update-from", str(tmp_path)]) == 2
    assert "no run here" in capsys.readouterr().err
    folder = filled_folder(tmp_path)
    folder.remove("live-readings.jsonl")
    assert main(["--update-from", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no readings yet" in error
    assert error.count("\n") == 1
    folder.write_whole("live-readings.jsonl", b'{"record": "reading"}\n')
    assert main(["--update-from", str(tmp_path)]) == 2
    assert "live-readings.jsonl line 1" in capsys.readouterr().err
