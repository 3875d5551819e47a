"""Figures of launch logs, and what they calibrate."""

from dataclasses import replace

import pytest

from pipeline.errors import PlanError
from pipeline.planner.sglang.calibration import (
    Difference,
    calibration_from_json,
    calibration_from_text,
    calibration_json,
    calibration_of,
    check_calibration,
    fits_layout,
    readings,
)
from pipeline.planner.sglang.flags import parse_launch_line
from schemas.plan import Calibration
from schemas.units import GIB

TWO_RANKS = """\
[2026-11-12 03:14:01 TP0] Load weight begin. avail mem=94.17 GB
[2026-11-12 03:14:01 TP1] Load weight begin. avail mem=93.50 GB
[2026-11-12 03:14:41 TP0] Load weight end. type=X, avail mem=43.21 GB, mem usage=50.96 GB.
[2026-11-12 03:14:41 TP1] Load weight end. type=X, avail mem=42.00 GB
[2026-11-12 03:14:42 TP0] Load weight end. type=XMTP, avail mem=37.68 GB, mem usage=5.53 GB.
[2026-11-12 03:14:44 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, K size: 1 GB
[2026-11-12 03:14:44 TP0] Mamba Cache is allocated. max_mamba_cache_size: 31, conv_state size: 1GB
[2026-11-12 03:14:55 TP0] Capture cuda graph end. Time elapsed: 9.80 s. mem usage=1.20 GB. avail
[2026-11-12 03:14:58 TP0] Capture draft CUDA graph end. elapsed=1.80 s, mem usage=0.30 GB, avail
[2026-11-12 03:14:58 TP1] Capture cuda graph end. Time elapsed: 9.80 s. mem usage=1.40 GB. avail
"""
SAVED = Calibration(
    model="m", gpu="H200", release="0.5.23", free_before_load_bytes=1, weights_bytes=2,
    draft_weights_bytes=None, graph_bytes=4, layout="2",
)  # fmt: skip


def test_pools_follow_the_rank_with_the_least_memory() -> None:
    found = readings(TWO_RANKS)
    assert found.free_before_load_gib == 93.50
    # Rank 1 prints no usage: 93.50 - 42.00 = 51.50, more than rank 0's 50.96.
    assert found.weights_gib == pytest.approx(51.5)
    assert found.draft_weights_gib == 5.53
    # Rank 0 captures twice, 1.20 + 0.30 GiB.
    assert found.graphs_gib == pytest.approx(1.5)
    assert (found.max_total_num_tokens, found.state_slots) == (1000, 31)
    assert found.max_running_requests is None


def test_last_line_about_tokens_and_requests_counts() -> None:
    ready = "max_total_num_tokens=9, max_running_requests=5\n"
    found = readings(TWO_RANKS + ready + ready.replace("9", "8").replace("5", "4"))
    assert (found.max_total_num_tokens, found.max_running_requests) == (8, 4)


def test_log_without_a_figure_is_refused() -> None:
    with pytest.raises(PlanError, match="no launch line of SGLang"):
        readings("nothing\n")
    assert readings("max_running_requests=5").weights_gib is None


def test_figures_become_bytes() -> None:
    made = calibration_of(readings(TWO_RANKS), model="m", gpu="g", release="r", layout="2")
    assert made == Calibration(
        model="m", gpu="g", release="r", free_before_load_bytes=int(93.5 * GIB),
        weights_bytes=int(51.5 * GIB), draft_weights_bytes=int(5.53 * GIB),
        graph_bytes=int(1.5 * GIB), layout="2",
    )  # fmt: skip


def test_saved_calibration_is_the_same_when_read() -> None:
    assert calibration_from_json(dict(calibration_json(SAVED))) == SAVED
    assert calibration_from_text('{"model": "m", "gpu": "g", "release": "r"}', "f").layout is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "^f is not JSON"),
        ("[]", "^f is not a JSON object$"),
        ('{"model": "m", "gpu": "g"}', "^f: not a saved calibration: release$"),
        ('{"model": "m", "gpu": "g", "release": "r", "x": 1}', "^f: not a saved calibration: x$"),
        ('{"model": "m", "gpu": "g", "release": "r", "graph_bytes": 1.5}', "graph_bytes = 1.5; it"),
        ('{"model": "m", "gpu": "g", "release": "r", "graph_bytes": true}', "graph_bytes = True"),
    ],
)
def test_file_that_is_no_calibration_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        calibration_from_text(text, "f")


def test_calibration_holds_for_its_own_layout() -> None:
    two, four = parse_launch_line(["--tp", "2"]), parse_launch_line(["--tp", "4"])
    assert fits_layout(SAVED, two)
    assert not fits_layout(SAVED, four)
    assert fits_layout(replace(SAVED, layout=None), four)


def test_calibration_of_something_else_is_refused() -> None:
    check_calibration(SAVED, model="m", gpu="H200", release="0.5.23")
    for name, of in (("model", "x"), ("gpu", "B200"), ("release", "0.5.21")):
        given = {"model": "m", "gpu": "H200", "release": "0.5.23", name: of}
        with pytest.raises(PlanError, match=f"is for {name} '.*', the launch for '{of}'"):
            check_calibration(SAVED, **given)


def test_difference_is_relative_to_the_log() -> None:
    assert Difference(name="n", forecast=110, logged=100).percent() == pytest.approx(10)
    assert Difference(name="n", forecast=90, logged=100).percent() == pytest.approx(-10)
    assert Difference(name="n", forecast=1, logged=0).percent() == 0
