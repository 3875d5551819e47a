"""The layout of a launch: ranks, stages and micro-batches."""

import pytest

from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.layout import (
    Parallel,
    largest_share,
    layout_name,
    no_overlap,
    parallel_of,
    requests_at_once,
    stage_layers,
    tensor_ranks_of,
)


def layout(line: str) -> Parallel:
    """The layout of a line."""
    return parallel_of(parse_launch_line(line.split()))


def test_layout_of_a_bare_line_is_one_rank() -> None:
    assert layout("") == Parallel(
        tp_size=1, pp_size=1, micro_batches=1, largest_micro_batch=None, attention_dp_size=1,
        attention_tp_size=1, dcp_size=1, dense_tp_size=1, all_to_all="none", redundant_experts=0,
        dp_lm_head=False,
    )  # fmt: skip


def test_every_size_is_read_from_its_flag() -> None:
    line = (
        "--tp 16 --pp-size 2 --pp-async-batch-depth 3 --pp-max-micro-batch-size 5 --dp 4 "
        "--enable-dp-attention --attn-cp-size 2 --dcp-size 3 --moe-dense-tp-size 1 "
        "--moe-a2a-backend deepep --ep-num-redundant-experts 32 --enable-dp-lm-head"
    )
    # 16 ranks / 4 of data parallelism / 2 of context parallelism leave 2 for attention.
    assert layout(line) == Parallel(
        tp_size=16, pp_size=2, micro_batches=5, largest_micro_batch=5, attention_dp_size=4,
        attention_tp_size=2, dcp_size=3, dense_tp_size=1, all_to_all="deepep",
        redundant_experts=32, dp_lm_head=True,
    )  # fmt: skip


def test_data_parallelism_divides_attention_only_where_it_is_switched_on() -> None:
    copies, divided = layout("--tp 8 --dp 4"), layout("--tp 8 --dp 4 --enable-dp-attention")
    assert (copies.attention_dp_size, copies.attention_tp_size) == (1, 8)
    assert (divided.attention_dp_size, divided.attention_tp_size) == (4, 2)
    own = layout("--tp 8 --attn-dp-size 2")
    assert (own.attention_dp_size, own.attention_tp_size, own.dense_tp_size) == (2, 4, 8)


def test_async_depth_counts_in_a_pipeline_alone() -> None:
    assert layout("--pp-async-batch-depth 3").micro_batches == 1
    assert layout("--pp-size 4").micro_batches == 4


@pytest.mark.parametrize(
    ("line", "ranks", "name"),
    [
        ("", 4, "4"), ("--tp 2", 2, "2"), ("--pp-size 2", 2, "2-pp2"),
        ("--tp 1 --pp-size 4", 1, "1-pp4"), ("--pp-size 8", 1, "1-pp8"),
    ],
)  # fmt: skip
def test_layout_of_a_launch_on_four_cards(line: str, ranks: int, name: str) -> None:
    flags = parse_launch_line(line.split())
    assert tensor_ranks_of(flags, 4) == ranks
    assert layout_name(flags, 4) == name


@pytest.mark.parametrize(
    ("line", "waits"),
    [("", False), ("--pp-size 1", False), ("--pp-size 2", True),
     ("--disable-overlap-schedule", True)],
)  # fmt: skip
def test_pipelines_never_overlap(line: str, waits: bool) -> None:
    assert no_overlap(parse_launch_line(line.split())) is waits


def test_last_stages_have_the_remaining_layers() -> None:
    assert stage_layers(64, 4) == (16, 16, 16, 16)
    assert stage_layers(61, 4) == (15, 15, 15, 16)
    assert stage_layers(62, 4) == (15, 15, 16, 16)
    assert stage_layers(7, 1) == (7,)


def test_largest_stage_of_a_hybrid_has_its_share_of_each_kind() -> None:
    # Qwen3.6-27B: 64 layers, every fourth of full attention. Three stages have 21, 21 and 22; the
    # last has layers 42 to 63, of which 43, 47, ... 63 are full: 6 of 16, and 16 of 48 linear ones.
    assert largest_share(16, 64, 3) == 6 / 16
    # Any 22 layers in a row have at most 17 linear ones: the bound that is planned with.
    assert largest_share(48, 64, 3) == 17 / 48
    assert largest_share(48, 64, 4) == 1 / 4
    assert largest_share(48, 64, 1) == 1
    assert largest_share(1, 64, 4) == 1
    assert largest_share(0, 64, 4) == 1


@pytest.mark.parametrize(
    ("stages", "micro_batches", "largest", "requests"),
    [
        (1, 1, None, 100),
        (1, 1, 5, 100),
        # 100 // 3 = 33 in each of 3, so one request waits.
        (3, 3, None, 99),
        (3, 2, None, 66),
        (3, 4, None, 100),
        (3, 3, 5, 15),
    ],
)
def test_requests_that_fit_in_the_micro_batches(
    stages: int, micro_batches: int, largest: int | None, requests: int
) -> None:
    assert requests_at_once(100, stages, micro_batches, largest) == requests


def test_micro_batch_has_at_least_one_request() -> None:
    assert requests_at_once(2, 4, 4, None) == 2
