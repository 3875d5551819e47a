"""Flags that go together, and where a change applies."""

import pytest

from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory import changes
from pipeline.planner.memory.plan import plan_launch
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from schemas.plan import LaunchPlan, ModelFacts, PlanSettings

QWEN = load_model("Qwen/Qwen3.6-27B")
DEEPSEEK = load_model("deepseek-ai/DeepSeek-V3")
MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)


def line(text: str) -> LaunchFlags:
    return parse_launch_line(["--model-path", "m", *text.split()])


def settings(text: str, model: ModelFacts = QWEN) -> PlanSettings:
    made = plan_launch(model, gpu_named("h200"), line(text), version="0.5.23")
    assert isinstance(made, LaunchPlan)
    return made.settings


@pytest.mark.parametrize(
    ("current", "fractions"),
    [
        (0.85, ["0.88", "0.82", "0.95"]),
        # 0.97 and 0.40 are the last that may be tried.
        (0.94, ["0.97", "0.91"]),
        (0.43, ["0.46", "0.4", "0.53"]),
        (0.42, ["0.45", "0.52"]),
    ],
)
def test_fractions_keep_within_their_bounds(current: float, fractions: list[str]) -> None:
    nearby = changes.nearby_fractions(current, (0.03, -0.03, 0.1))
    assert [change["mem-fraction-static"] for change in nearby] == fractions


def test_part_of_a_chunk_counts_all_attention_ranks() -> None:
    # 8,192 tokens over 8 ranks are 1,024 each; the flag gives the whole.
    text = "--tp-size 8 --dp-size 8 --enable-dp-attention --chunked-prefill-size 8192"
    over_ranks = settings(text, DEEPSEEK)
    assert over_ranks.chunked_prefill_size == 1024
    assert changes.chunk_change(over_ranks, 2) == {"chunked-prefill-size": "4096"}


def test_shorter_drafts_have_one_token_more_than_steps() -> None:
    shorter = list(changes.shorter_drafts(settings(MTP)))
    assert [change["speculative-num-steps"] for change in shorter] == ["2", "1"]
    assert [change["speculative-num-draft-tokens"] for change in shorter] == ["3", "2"]
    assert {change["speculative-eagle-topk"] for change in shorter} == {"1"}
    assert not list(changes.shorter_drafts(settings("")))


def test_speculation_is_dropped_with_all_its_flags() -> None:
    flags = line(f"{MTP} --speculative-attention-mode decode --mem-fraction-static 0.8")
    rest = flags.changed(changes.without_speculation(flags))
    assert [name for name, _ in rest.values] == ["mem-fraction-static"]


def test_states_change_only_where_that_saves_something() -> None:
    extra = "--mamba-radix-cache-strategy extra_buffer"
    assert list(changes.lazy_extra_buffer(settings(extra))) == [changes.LAZY_EXTRA_BUFFER]
    assert not list(changes.lazy_extra_buffer(settings(f"{extra}_lazy")))
    assert list(changes.without_prefix_cache(settings(extra))) == [changes.WITHOUT_PREFIX_CACHE]
    assert not list(changes.without_prefix_cache(settings("--disable-radix-cache")))
    assert list(changes.bf16_states(line(""), QWEN)) == [changes.BF16_STATES]
    assert not list(changes.bf16_states(line("--mamba-ssm-dtype bfloat16"), QWEN))
    assert not list(changes.bf16_states(line(""), DEEPSEEK)), "it has no states"


def test_more_ranks_divide_heads_and_experts_and_fit_the_cards() -> None:
    # 24 heads: 16 ranks do not divide them. 128 heads and 256 experts: all do.
    assert QWEN.heads == 24
    assert changes.tensor_ranks(QWEN) == [1, 2, 4, 8]
    two = settings("--tp-size 2")
    assert list(changes.more_tensor_ranks(two, QWEN)) == [{"tp-size": "4"}, {"tp-size": "8"}]
    assert list(changes.more_tensor_ranks(two, QWEN, num_gpus=4)) == [{"tp-size": "4"}]
    assert not list(changes.more_tensor_ranks(two, QWEN, num_gpus=3))
    # Two stages of two ranks use four cards: eight are needed for four ranks.
    staged = settings("--tp-size 2 --pp-size 2")
    assert not list(changes.more_tensor_ranks(staged, QWEN, num_gpus=7))
    assert list(changes.more_tensor_ranks(staged, QWEN, num_gpus=8)) == [{"tp-size": "4"}]
    assert list(changes.more_tensor_ranks(settings("--tp-size 8", DEEPSEEK), DEEPSEEK)) == [
        {"tp-size": "16"}
    ]
