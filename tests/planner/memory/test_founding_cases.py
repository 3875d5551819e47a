"""The two launches that the planner exists for, with the arithmetic in comments."""

import pytest

from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.plan import plan_launch
from pipeline.planner.sglang.flags import parse_launch_line
from schemas.plan import Calibration, LaunchPlan
from schemas.units import GIB

MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)


def plan(model: str, version: str, line: str, calibration: Calibration | None = None) -> LaunchPlan:
    """The forecast on RTX PRO 6000 cards."""
    made = plan_launch(
        load_model(model),
        gpu_named("rtx-pro-6000"),
        parse_launch_line(line.split()),
        version=version,
        calibration=calibration,
    )
    assert isinstance(made, LaunchPlan), made
    return made


def qwen(version: str, line: str) -> LaunchPlan:
    """Qwen3.6-27B in bf16 on one card."""
    return plan("Qwen/Qwen3.6-27B", version, line)


# One state slot: 48 linear layers x (conv 10240 columns x 3 x 2 B + 48 heads x 128 x 128 x 4 B)
# = 48 x (61,440 + 3,145,728) = 153,944,064 B = 0.14337 GiB.
# Free before load: 94.97 - 0.8 = 94.17 GiB. Weights: 50.95 + 0.125 GiB.
# Verify states up to 0.5.12: 48 requests x 4 tokens x 0.14337 = 27.53 GiB, taken first.


@pytest.mark.parametrize(
    "radix", ["--mamba-scheduler-strategy extra_buffer", "--disable-radix-cache"]
)
def test_mtp_at_0_80_fails_on_0_5_12_because_of_the_verify_states(radix: str) -> None:
    # 94.17 x 0.80 - 51.08 = 24.26 GiB, less 27.53: nothing is left for slots or for KV.
    made = qwen("0.5.12", f"--mem-fraction-static 0.80 {MTP} {radix}")
    assert made.verdict == "does_not_fit"
    assert made.stage == "state_pool"
    assert "Not enough memory. Please try to increase --mem-fraction-static" in made.message
    assert made.intermediate_state_bytes == 48 * 4 * 153_944_064
    assert made.intermediate_state_bytes / GIB == pytest.approx(27.53, abs=0.005)


def test_radix_on_needs_about_0_833_on_0_5_12() -> None:
    # Slots start where f x 94.17 - 51.08 - 27.53 > 0: f > 0.8348; one request needs 5 slots,
    # 5 x 0.14337 x 1.9 / 0.9 = 1.51 GiB more, f = 0.851.
    line = f"--mamba-scheduler-strategy extra_buffer {MTP}"
    assert qwen("0.5.12", f"--mem-fraction-static 0.830 {line}").capacity.state_slots == 0
    made = qwen("0.5.12", f"--mem-fraction-static 0.90 {line}")
    # 0.90: 84.75 - 51.08 - 27.53 = 6.14; x 0.9/1.9 = 2.91; / 0.14337 = 20 slots, 4 requests
    assert made.capacity.state_slots == 20
    assert made.capacity.max_running_requests == 4
    assert made.capacity.limited_by == "state slots"


def test_radix_off_needs_about_0_907_on_0_5_12_and_then_runs_48() -> None:
    # 240 states: 48 x 4 + 48 = 34.41 GiB; (51.08 + 34.41) / 94.17 = 0.9078
    line = f"--disable-radix-cache {MTP}"
    assert qwen("0.5.12", f"--mem-fraction-static 0.904 {line}").verdict != "fits"
    assert qwen("0.5.12", f"--mem-fraction-static 0.904 {line}").capacity.max_running_requests == 0
    made = qwen("0.5.12", f"--mem-fraction-static 0.912 {line}")
    assert made.capacity.max_running_requests == 48
    assert made.capacity.state_slots == 48


def test_the_same_flags_fit_on_0_5_23_with_6_running() -> None:
    # The draft's own embedding and head stand while the pool is sized:
    # 0.79 + 2 x 248320 x 5120 x 2 B (2.368 GiB) = 5.53 GiB.
    # rest = 94.17 - 51.08 - 5.53 - 18.83 - 0.098 = 18.63; x 0.9/1.9 = 8.83;
    # K = (8.83 - 5 x 0.14337) // (0.14337 x 1.8) = 31; 31 // 5 = 6 requests;
    # verify states (6 + 1) x 4 x 0.14337 = 4.01; slots 32 x 0.14337 = 4.59; KV 10.03 GiB.
    made = qwen("0.5.23", f"--mem-fraction-static 0.80 {MTP}")
    assert made.verdict == "fits"
    assert made.draft_weights_bytes / GIB == pytest.approx(5.53, abs=0.005)
    assert made.capacity.state_slots == 31
    assert made.capacity.max_running_requests == 6
    assert made.kv_bytes_per_token == 65_536
    assert made.capacity.max_total_num_tokens == pytest.approx(166_000, rel=0.02)
    assert made.intermediate_state_bytes / GIB == pytest.approx(4.01, abs=0.01)
    assert any("reset to 48" in note and "6 run at once" in note for note in made.warnings)


def test_without_mtp_there_are_80_slots_at_0_80() -> None:
    # 24.26 x 0.9/1.9 = 11.49; / 0.14337 = 80; 80 // 3 = 26 requests without tracked states
    made = qwen("0.5.12", "--mem-fraction-static 0.80")
    assert made.capacity.state_slots == 80
    assert made.capacity.max_running_requests == 26


def test_two_cards_fit_on_0_5_12() -> None:
    # Half the weights (25.6 GiB) and half of each state (73.41 MiB) on each card.
    made = qwen("0.5.12", f"--tp 2 --mem-fraction-static 0.80 {MTP} --disable-radix-cache")
    assert made.verdict == "fits"
    assert made.capacity.max_running_requests == 48


def flash(version: str, line: str) -> LaunchPlan:
    """DeepSeek-V4-Flash over four cards."""
    return plan("deepseek-ai/DeepSeek-V4-Flash", version, f"--tp 4 {line}")


def test_flash_weights_with_fp32_scales_and_the_nextn_draft() -> None:
    # Experts a layer and card: 3 x 4096 x 2048 x 256 / 4 values: 0.750 GiB at 4 bits, and scales
    # of 0.1875 GiB in fp32 or 0.047 in e8m0; 43 layers, 3.05 GiB of other weights, 0.49 of
    # embedding and head, and two rotary tables of 1,048,576 x 64 x 4 B: 0.50 GiB.
    line = "--mem-fraction-static 0.90 --speculative-algorithm EAGLE"
    old = flash("0.5.14", f"{line} --moe-runner-backend triton")
    assert old.weights_bytes / GIB == pytest.approx(44.35, abs=0.1)
    assert old.draft_weights_bytes / GIB == pytest.approx(1.5, abs=0.05)
    new = flash("0.5.17", "--mem-fraction-static 0.90 --speculative-algorithm EAGLE")
    assert new.weights_bytes / GIB == pytest.approx(38.31, abs=0.1)


def test_flash_is_warned_of_the_indexer_before_launch() -> None:
    # fp32 keys: n x n/4 pairs x 512 B = 7.5 GiB at n = 7,932 tokens in one chunk
    made = flash("0.5.14", "--mem-fraction-static 0.90 --speculative-algorithm EAGLE")
    assert made.verdict == "does_not_fit"
    assert made.stage == "runtime"
    note = next(note for note in made.warnings if "indexer" in note)
    assert "outside mem_fraction_static" in note
    assert "7.5 GiB" in note
    assert "7.9k tokens" in note


def test_flash_token_costs_by_release() -> None:
    # paged layout: 0.1 x (585 x 43 + 8/256 x 10,240 x 21) + 21 x (585 + 132) / 4 + 20 x 864/128
    # = 3,187.5 + 3,764.25 + 135 = 7,086.75; x 44/43 under speculation, with rings of 16
    assert flash("0.5.23", "").kv_bytes_per_token == pytest.approx(7_086.75)
    assert flash("0.5.23", "--speculative-algorithm EAGLE").kv_bytes_per_token == pytest.approx(
        7_939.19, abs=0.01
    )
    assert flash("0.5.12", "").kv_bytes_per_token == pytest.approx(15_955.85, abs=0.01)
    assert flash("0.5.12", "--speculative-algorithm EAGLE").kv_bytes_per_token == pytest.approx(
        26_071, abs=1
    )


def test_a_calibration_replaces_the_assumed_figures() -> None:
    logged = Calibration(
        model="Qwen/Qwen3.6-27B",
        gpu="rtx-pro-6000",
        release="0.5.23",
        free_before_load_bytes=int(93.0 * GIB),
        weights_bytes=int(51.3 * GIB),
        draft_weights_bytes=None,
        graph_bytes=None,
    )
    line = f"--mem-fraction-static 0.80 {MTP}"
    made = plan("Qwen/Qwen3.6-27B", "0.5.23", line, logged)
    assumed = qwen("0.5.23", line)
    assert made.free_before_load_bytes == logged.free_before_load_bytes
    assert made.weights_bytes == logged.weights_bytes
    assert made.uncertainty_bytes < assumed.uncertainty_bytes / 5
