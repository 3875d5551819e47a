"""State slots and verify states, worked out by hand."""

import pytest

from pipeline.planner.memory.state_pool import StatePool, slot_bytes, state_pool
from schemas.plan import LinearState
from tests.fakes.launches import MTP, launch_of

# Qwen3.6-27B: 48 layers of 10,240 columns x 3 x 2 B and 48 heads x 128 x 128 x 4 B
SLOT = 48 * (61_440 + 3_145_728)
BUFFER = "--mamba-radix-cache-strategy extra_buffer"


def pool(line: str, slots: float, version: str = "0.5.23") -> StatePool:
    """The pool of a launch whose budget is that of some slots."""
    launch = launch_of("Qwen/Qwen3.6-27B", line, version=version)
    assert isinstance(launch.model.state, LinearState)
    return state_pool(launch, launch.model.state, slots * SLOT)


def test_budget_is_divided_between_states_and_kv() -> None:
    # 100 x 0.9 / 1.9 = 47.4 slots, one of them spare
    made = pool(BUFFER, 100)
    assert (made.slots, made.slots_per_request) == (46, 5)
    assert (made.state_bytes, made.intermediate_bytes) == (47 * SLOT, 0)
    assert made.rest_bytes == 53 * SLOT
    # no spare slot before 0.5.16
    assert pool(BUFFER, 100, version="0.5.14").slots == 47
    # 100 x 2 / 3 = 66.7
    assert pool(f"{BUFFER} --mamba-full-memory-ratio 2", 100).slots == 65


def test_verify_states_share_the_budget() -> None:
    # 47.37 - 1 x (1 + 4) = 42.37; / (1 + 4 / 5) = 23.5; 23 // 5 = 4 requests and the spare one
    made = pool(f"{BUFFER} {MTP}", 100)
    assert made.slots == 23
    assert made.intermediate_bytes == (4 + 1) * 4 * SLOT
    assert made.state_bytes == 24 * SLOT
    assert made.rest_bytes == 56 * SLOT
    # One request given: its verify states alone are kept.
    one = pool(f"{BUFFER} {MTP} --max-running-requests 1", 100)
    assert one.intermediate_bytes == (1 + 1) * 4 * SLOT


def test_old_releases_reserve_verify_states_of_all_requests_first() -> None:
    # 100 - 10 x 4 = 60; x 0.9 / 1.9 = 28.4
    made = pool(f"{BUFFER} {MTP} --max-running-requests 10", 100, version="0.5.12")
    assert (made.slots, made.intermediate_bytes) == (28, 40 * SLOT)
    assert made.rest_bytes == 32 * SLOT


def test_given_slots_are_kept_whatever_the_budget() -> None:
    made = pool(f"{BUFFER} --max-mamba-cache-size 10", 100)
    assert (made.slots, made.state_bytes, made.rest_bytes) == (10, 11 * SLOT, 89 * SLOT)
    old = pool(f"{BUFFER} --max-mamba-cache-size 10", 100, version="0.5.12")
    assert (old.slots, old.state_bytes, old.rest_bytes) == (10, 10 * SLOT, 90 * SLOT)


def test_without_prefix_cache_each_request_has_one_slot() -> None:
    made = pool("--disable-radix-cache --max-running-requests 6", 100)
    assert (made.slots, made.slots_per_request) == (6, 1)
    # every slot runs, and is verified
    drafted = pool(f"--disable-radix-cache --max-running-requests 6 {MTP}", 100)
    assert drafted.intermediate_bytes == (6 + 1) * 4 * SLOT
    # given slots bound the requests: 3 of 6
    given = f"--disable-radix-cache --max-running-requests 6 --max-mamba-cache-size 3 {MTP}"
    assert pool(given, 100).intermediate_bytes == (3 + 1) * 4 * SLOT


@pytest.mark.parametrize(
    ("line", "slots"),
    [
        ("--mamba-radix-cache-strategy no_buffer", 3),
        ("--mamba-radix-cache-strategy extra_buffer", 5),
        ("--mamba-radix-cache-strategy extra_buffer --disable-overlap-schedule", 4),
        ("--mamba-radix-cache-strategy extra_buffer_lazy", 4),
        ("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 --mamba-radix-cache-strategy extra_buffer", 4),
        ("--disable-radix-cache", 1),
    ],
)
def test_slots_that_a_request_occupies(line: str, slots: int) -> None:
    assert pool(line, 100).slots_per_request == slots


def test_replay_ring_takes_the_place_of_verify_states() -> None:
    made = pool(f"{BUFFER} {MTP} --max-running-requests 7 --enable-linear-replayssm-spec", 100)
    # a layer: 4 tokens x (2 x 48 x 128 x 2 B + 2 x 16 x 128 x 2 B + 48 x 4 B) = 131,840 B;
    # 48 layers, 7 requests and a spare one
    ring = 131_840 * 48 * 8
    assert made.intermediate_bytes == ring
    assert made.rest_bytes == 100 * SLOT - made.state_bytes - ring


def test_replay_ring_of_kda_has_a_window_of_its_own() -> None:
    line = f"--tp 8 {MTP} --max-running-requests 7 --enable-linear-replayssm-spec {BUFFER}"
    launch = launch_of("moonshotai/Kimi-K3", line, gpu="b300")
    state = launch.model.state
    assert isinstance(state, LinearState)
    made = state_pool(launch, state, 1e12)
    # 12 of 96 heads: 16 tokens x (4 x 12 x 128 x 2 B + 12 x 4 B x 128); 69 layers, 8 requests
    assert made.intermediate_bytes == 16 * (12_288 + 6_144) * 69 * 8


def test_groups_that_ranks_do_not_divide_are_padded() -> None:
    # Nemotron 3 Nano over 16 ranks: 8 groups become 16; (64 x 64 + 2 x 16 x 128) / 16 = 512
    # columns, 4 of 64 heads of 64 x 128 in fp32, 23 layers
    launch = launch_of("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "--tp 16")
    state = launch.model.state
    assert isinstance(state, LinearState)
    split = slot_bytes(state, launch.ranks, "float32")
    assert split == 23 * (512 * 3 * 2 + 4 * 64 * 128 * 4)
    assert slot_bytes(state, launch.ranks, "bfloat16") == 23 * (512 * 3 * 2 + 4 * 64 * 128 * 2)


def test_pipeline_stage_has_its_own_layers_states() -> None:
    launch = launch_of("Qwen/Qwen3.6-27B", "--pp-size 4")
    assert isinstance(launch.model.state, LinearState)
    assert state_pool(launch, launch.model.state, 1e10).slot_bytes == SLOT // 4
