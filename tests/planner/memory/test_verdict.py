"""Errors, doubts and the table of a launch, worked out by hand."""

from dataclasses import replace

import pytest

from pipeline.planner.memory.budget import memory_budget
from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.memory.sizing import Sized, Stopped, assess, load_figures
from pipeline.planner.memory.verdict import (
    fits,
    judgement,
    needs_error_bytes,
    uncertainty_bytes,
)
from schemas.plan import Calibration
from schemas.units import GIB, MIB
from tests.fakes.launches import MTP, launch_of

QWEN, HYBRID = "Qwen/Qwen3-32B", "Qwen/Qwen3.6-27B"


def error_mib(launch: ResolvedLaunch, weights_bytes: int = 0) -> float:
    load = replace(load_figures(launch), weights_bytes=weights_bytes)
    return uncertainty_bytes(launch, load) / MIB


def test_error_grows_with_ranks_and_weights() -> None:
    one, two = launch_of(QWEN), launch_of(QWEN, "--tp 2")
    # 410 MiB of context and 256 of rounding; 614 MiB on several ranks
    assert error_mib(one) == pytest.approx((410**2 + 256**2) ** 0.5)
    assert error_mib(two) == pytest.approx((614**2 + 256**2) ** 0.5)
    assert error_mib(launch_of(QWEN, "--pp-size 2")) == pytest.approx(error_mib(two))
    # 1 % of 20,000 MiB
    assert error_mib(one, 20_000 * MIB) == pytest.approx((410**2 + 456**2) ** 0.5)
    assert error_mib(launch_of(QWEN, gpu="dgx-spark")) == pytest.approx((2048**2 + 256**2) ** 0.5)


def test_exact_file_size_and_logged_figures_narrow_the_error() -> None:
    launch = launch_of(QWEN)
    exact = replace(launch, model=replace(launch.model, checkpoint_bytes=65 * 10**9))
    assert error_mib(exact, 20_000 * MIB) == pytest.approx((410**2 + 256**2) ** 0.5)
    free = Calibration(
        model=QWEN, gpu="h200", release="0.5.23", free_before_load_bytes=140 * GIB,
        weights_bytes=None, draft_weights_bytes=None, graph_bytes=None,
    )  # fmt: skip
    assert error_mib(replace(launch, calibration=free)) == pytest.approx((32**2 + 256**2) ** 0.5)
    both = replace(free, weights_bytes=61 * GIB)
    assert error_mib(replace(launch, calibration=both)) == pytest.approx((2 * 32**2) ** 0.5)


def test_error_of_the_needs_is_three_tenths_and_some() -> None:
    assert needs_error_bytes(1000 * MIB) == 700 * MIB


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_draft_has_a_row_of_its_own(version: str) -> None:
    line = f"--mem-fraction-static 0.6 --mamba-radix-cache-strategy extra_buffer {MTP}"
    launch = launch_of(HYBRID, line, version=version)
    rows = {row.name: row for row in memory_budget(launch, assess(launch)).rows}
    when = "before" if launch.rules.draft_loads_before_pool else "after"
    assert rows["draft weights"].note == f"loaded {when} the pools"
    assert rows["draft weights"].bytes == load_figures(launch).draft_resident_bytes
    plain = launch_of(HYBRID)
    assert "draft weights" not in {row.name for row in memory_budget(plain, assess(plain)).rows}


def test_stopped_launch_lists_what_the_fraction_keeps_free() -> None:
    launch = launch_of(QWEN, "--mem-fraction-static 0.3")
    outcome = assess(launch)
    assert isinstance(outcome, Stopped)
    rows = {row.name: row.bytes for row in memory_budget(launch, outcome).rows}
    free = load_figures(launch).free_before_bytes
    assert rows["kept free by mem_fraction_static"] == int(free * (1 - 0.3))
    assert sum(rows.values()) == launch.gpu.total_bytes
    assert rows["left over"] < 0


def spare_slot_doubts(line: str) -> int:
    launch = launch_of(HYBRID, f"--mem-fraction-static 0.7 {line}")
    outcome = assess(launch)
    assert isinstance(outcome, Sized), outcome
    return sum("no state slot is spare" in doubt for doubt in judgement(launch, outcome).doubts)


def test_one_request_on_all_given_slots_is_in_doubt() -> None:
    buffered = "--mamba-radix-cache-strategy extra_buffer --max-mamba-cache-size"
    assert spare_slot_doubts(f"{buffered} 5") == 1
    assert spare_slot_doubts(f"{buffered} 10") == 1
    # a spare slot, more than two requests, one slot each
    assert spare_slot_doubts(f"{buffered} 6") == 0
    assert spare_slot_doubts(f"{buffered} 15") == 0
    assert spare_slot_doubts("--disable-radix-cache --max-mamba-cache-size 2") == 0


@pytest.mark.parametrize(
    "line",
    ["", f"{MTP} --disable-radix-cache", "--max-mamba-cache-size 8"],
    ids=["plain", "mtp", "slots"],
)
@pytest.mark.parametrize(("model", "gpu"), [(QWEN, "h100"), (HYBRID, "rtx-pro-6000")])
@pytest.mark.parametrize("version", ["0.5.10", "0.5.9", "0.5.23"])
def test_search_asks_for_the_same_verdict(line: str, model: str, gpu: str, version: str) -> None:
    verdicts = set()
    for hundredths in range(60, 99, 2):
        flags = f"{line} --mem-fraction-static 0.{hundredths} --max-running-requests 4"
        launch = launch_of(model, flags, gpu=gpu, version=version)
        sized = assess(launch)
        if isinstance(sized, Sized):
            verdict = judgement(launch, sized).verdict
            assert fits(launch, sized) == (verdict == "fits")
            verdicts.add(verdict)
    assert verdicts
