"""Calibrations of the run's engines: kept by model, card, release and layout, logged once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.engines.launch import Calibrations, beyond_uncertainty
from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.plan import plan_launch
from pipeline.planner.sglang.calibration import Difference
from pipeline.planner.sglang.failures import figures
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from pipeline.store.folder import LocalFolder
from schemas.plan import LaunchPlan

MODEL = "Qwen/Qwen3.6-27B"
LOG = (
    "Load weight begin. avail mem=90.00 GB\n"
    "Load weight end. avail mem=35.00 GB, mem usage=55.00 GB.\n"
    "Capture cuda graph end. Time elapsed: 1.0 s. mem usage=1.50 GB. avail mem=8.00 GB.\n"
)


def calibrations(folder: Path, log: list[str], gpu: str = "rtx-pro-6000") -> Calibrations:
    return Calibrations(
        folder=LocalFolder(folder),
        log=log.append,
        model=load_model(MODEL),
        gpu=gpu_named(gpu),
        version="0.5.23",
    )


def line(text: str = "") -> LaunchFlags:
    return parse_launch_line(["--model-path", MODEL, *text.split()])


def learned(at: Calibrations, log_text: str = LOG, flags: str = "") -> None:
    logged = figures(log_text)
    assert logged is not None
    at.learn(logged, line(flags))


def test_measured_figures_are_found_again_by_the_same_card_and_layout(tmp_path: Path) -> None:
    log: list[str] = []
    learned(calibrations(tmp_path, log), flags="--tp-size 2")
    again = calibrations(tmp_path, [])
    again.load("2")
    assert again.current is not None
    assert again.current.weights_bytes == 55 * 2**30
    assert again.current.free_before_load_bytes == 90 * 2**30
    assert again.current.graph_bytes is None, "the graphs may be only some of them"
    assert again.current.layout == "2"
    for other, layout in (
        (calibrations(tmp_path, []), "1"),
        (calibrations(tmp_path, [], "h200"), "2"),
    ):
        other.load(layout)
        assert other.current is None
    (name,) = LocalFolder(tmp_path).names("calibrations")
    assert name.startswith("Qwen-Qwen3.6-27B-RTX-PRO-6000-Blackwell-0.5.")


def test_plan_that_was_off_is_logged_by_the_first_engine_alone(tmp_path: Path) -> None:
    log: list[str] = []
    at = calibrations(tmp_path, log)
    learned(at)
    assert log[0].split() == ["event=plan_off", "figure", "forecast", "logged", "off", "by"]
    (weights,) = [text for text in log if "weights_gib" in text and "draft" not in text]
    assert "55.00" in weights
    length = len(log)
    learned(at)
    learned(calibrations(tmp_path, log))
    assert len(log) == length


def test_log_without_figures_of_memory_measures_nothing(tmp_path: Path) -> None:
    at = calibrations(tmp_path, [])
    learned(at, "max_total_num_tokens=1000\n")
    assert at.current is None
    assert not (tmp_path / "calibrations").exists()


@pytest.mark.parametrize("text", ["{", json.dumps({"model": "m"})])
def test_file_that_is_no_calibration_is_ignored_with_a_warning(tmp_path: Path, text: str) -> None:
    learned(calibrations(tmp_path, []))
    (file,) = (tmp_path / "calibrations").iterdir()
    file.write_text(text)
    log: list[str] = []
    again = calibrations(tmp_path, log)
    again.load("1")
    assert again.current is None
    assert len(log) == 1
    assert f"event=warning calibrations/{file.name} is ignored: " in log[0]


def test_difference_counts_beyond_what_the_plan_calls_uncertain() -> None:
    made = plan_launch(load_model(MODEL), gpu_named("rtx-pro-6000"), line(), version="0.5.23")
    assert isinstance(made, LaunchPlan)
    capacity = replace(made.capacity, max_total_num_tokens=10_000)
    made = replace(made, uncertainty_bytes=2**30, uncertainty_tokens=500, capacity=capacity)
    # 1 GiB of the weights, 500 tokens, and 5 % of other counts, but at least one.
    allowed = [
        Difference(name="weights_gib", forecast=50.0, logged=51.0),
        Difference(name="max_total_num_tokens", forecast=10_000, logged=10_500),
        Difference(name="state_slots", forecast=105, logged=100),
        Difference(name="max_running_requests", forecast=3, logged=2),
    ]
    beyond = [
        Difference(name="weights_gib", forecast=50.0, logged=48.9),
        Difference(name="max_total_num_tokens", forecast=10_000, logged=9_499),
        Difference(name="state_slots", forecast=106, logged=100),
        Difference(name="max_running_requests", forecast=4, logged=2),
    ]
    assert beyond_uncertainty(made, tuple(allowed + beyond)) == tuple(beyond)
