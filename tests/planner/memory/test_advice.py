"""Advice points in the right direction, and following it works."""

import pytest

from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.plan import explain_launch, plan_launch
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from schemas.plan import Advice, LaunchPlan, ModelFacts

MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)


def facts(name: str) -> ModelFacts:
    """A model of the catalogue."""
    return load_model(name)


def planned(
    name: str, gpu: str, flags: LaunchFlags, version: str = "0.5.23", *, advice: bool = True
) -> LaunchPlan:
    """The forecast of a launch that is not refused."""
    plan = explain_launch if advice else plan_launch
    made = plan(facts(name), gpu_named(gpu), flags, version=version)
    assert isinstance(made, LaunchPlan), made
    return made


def line(text: str) -> LaunchFlags:
    """Flags of a line split at spaces."""
    return parse_launch_line(text.split())


def about_fraction(plan: LaunchPlan) -> Advice:
    """The advice on the fraction."""
    return next(advice for advice in plan.advice if advice.flag == "--mem-fraction-static")


def test_a_pool_failure_wants_a_higher_fraction() -> None:
    # Qwen3-32B in bf16 takes 61 of 78.4 GiB; 0.75 leaves nothing for KV.
    flags = line("--mem-fraction-static 0.75")
    made = planned("Qwen/Qwen3-32B", "h100", flags)
    assert (made.verdict, made.stage) == ("does_not_fit", "pool")
    advice = about_fraction(made)
    assert "raise" in advice.reason
    assert float(advice.value) > 0.75
    mended = flags.changed({"mem-fraction-static": advice.value})
    assert planned("Qwen/Qwen3-32B", "h100", mended).verdict == "fits"


def test_a_slack_failure_wants_a_lower_fraction() -> None:
    flags = line("--mem-fraction-static 0.97 --chunked-prefill-size 16384")
    made = planned("Qwen/Qwen3-8B", "h100", flags)
    assert made.verdict == "does_not_fit"
    assert made.stage in ("graph_capture", "runtime")
    advice = about_fraction(made)
    assert "lower" in advice.reason
    assert float(advice.value) < 0.97
    mended = flags.changed({"mem-fraction-static": advice.value})
    assert planned("Qwen/Qwen3-8B", "h100", mended).verdict == "fits"


def test_no_value_works_is_said_with_what_would() -> None:
    flags = line(f"--mem-fraction-static 0.80 {MTP} --disable-radix-cache")
    made = planned("Qwen/Qwen3.6-27B", "rtx-pro-6000", flags, "0.5.23")
    assert made.verdict == "does_not_fit"
    assert about_fraction(made).effect == "no value works"
    others = {advice.flag for advice in made.advice}
    assert {"--max-running-requests", "--tp-size", "--mamba-ssm-dtype"} <= others


def test_weights_that_do_not_fit_want_more_cards() -> None:
    made = planned("deepseek-ai/DeepSeek-V3", "h100", line("--tp 4"))
    assert (made.verdict, made.stage) == ("does_not_fit", "weights")
    assert "CUDA out of memory" in made.message
    assert {advice.flag for advice in made.advice} >= {"--tp-size"}


@pytest.mark.parametrize("radix", ["--mamba-scheduler-strategy extra_buffer", ""])
def test_following_any_advice_makes_it_fit(radix: str) -> None:
    text = f"--mem-fraction-static 0.80 {MTP} {radix or '--disable-radix-cache'}"
    made = planned("Qwen/Qwen3.6-27B", "rtx-pro-6000", line(text), "0.5.12")
    assert made.advice
    for advice in made.advice:
        if advice.flag == "--speculative-algorithm" or "with --mem" in advice.effect:
            continue
        changes: dict[str, str | None] = {advice.flag.removeprefix("--"): advice.value}
        if advice.flag == "--speculative-num-steps":
            changes["speculative-num-draft-tokens"] = "2"
        mended = line(text).changed(changes)
        again = planned("Qwen/Qwen3.6-27B", "rtx-pro-6000", mended, "0.5.12", advice=False)
        assert again.verdict == "fits", advice


def test_a_launch_short_of_state_slots_is_told_what_gives_more_requests() -> None:
    made = planned("Qwen/Qwen3.6-27B", "h200", line("--mem-fraction-static 0.8"))
    assert made.verdict == "fits"
    assert made.capacity.limited_by == "state slots"
    assert {advice.flag for advice in made.advice} >= {"--mamba-ssm-dtype"}


def test_hierarchical_cache_is_host_memory_and_saves_nothing_for_distinct_prompts() -> None:
    flags = line("--enable-hierarchical-cache --hicache-size 100")
    made = planned("Qwen/Qwen3-32B", "h200", flags, advice=False)
    # 100 decimal GB = 93.1 GiB
    note = next(note for note in made.warnings if "hierarchical cache" in note)
    assert "93.1 GiB of host memory per rank" in note
    assert "saves nothing" in note


def test_a_small_pool_is_told_to_refuse_long_requests() -> None:
    made = planned("Qwen/Qwen3-32B", "h100", line("--max-total-tokens 8192"), advice=False)
    assert any("fewer than --context-length" in note for note in made.warnings)
