"""The search: what it returns fits, is ranked, and keeps to its limits."""

from dataclasses import replace

import pytest

from pipeline.errors import PlanError
from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.plan import ExpectedLengths, plan_launch
from pipeline.planner.rate import search as search_module
from pipeline.planner.rate.search import (
    Candidate,
    FoundPlan,
    HardwareOption,
    SearchLimits,
    SearchQuery,
    best_plans,
)
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from schemas.plan import LaunchPlan, ModelFacts

LENGTHS = ExpectedLengths(prompt_tokens=300, output_tokens=6000)
MAY_CHANGE_OUTPUT = SearchLimits(kv_dtype=True, state_dtype=True)


def facts(name: str) -> ModelFacts:
    """A model of the catalogue."""
    return load_model(name)


def option(gpu: str, count: int) -> HardwareOption:
    """Cards of one kind."""
    return HardwareOption(gpu=gpu_named(gpu), count=count)


def search(
    name: str,
    *options: HardwareOption,
    limits: SearchLimits | None = None,
    line: str = "",
    lengths: ExpectedLengths = LENGTHS,
) -> tuple[FoundPlan, ...]:
    """The best plans of a model on some hardware."""
    base: LaunchFlags = parse_launch_line([*line.split(), "--model-path", name])
    query = SearchQuery(
        model=facts(name), options=options, limits=limits or SearchLimits(), base=base
    )
    return best_plans(query, lengths)


@pytest.mark.parametrize(
    ("name", "gpu", "count"),
    [
        ("Qwen/Qwen3.6-27B", "rtx-pro-6000", 4),
        ("Qwen/Qwen3-32B", "h100", 2),
        ("deepseek-ai/DeepSeek-V3", "h200", 8),
        ("deepseek-ai/DeepSeek-V4-Flash", "rtx-pro-6000", 4),
        ("openai/gpt-oss-20b", "rtx-5090", 1),
    ],
)
def test_every_plan_found_fits_when_it_is_explained(name: str, gpu: str, count: int) -> None:
    found = search(name, option(gpu, count), limits=MAY_CHANGE_OUTPUT)
    assert found
    for item in found:
        again = plan_launch(facts(name), gpu_named(gpu), parse_launch_line(item.plan.argv))
        assert isinstance(again, LaunchPlan)
        assert again.verdict == "fits"
        assert again.capacity == item.plan.capacity


def test_the_best_comes_first() -> None:
    found = search("Qwen/Qwen3-32B", option("h100", 4), option("b200", 2))
    counts = [item.requests_in_all for item in found]
    assert counts == sorted(counts, reverse=True)


def test_flags_that_change_the_output_are_left_alone_unless_allowed() -> None:
    careful = search("Qwen/Qwen3.6-27B", option("rtx-pro-6000", 1))
    words = {word for item in careful for word in item.plan.argv}
    assert words.isdisjoint({"--kv-cache-dtype", "--mamba-ssm-dtype", "--quantization"})
    free = search("Qwen/Qwen3.6-27B", option("rtx-pro-6000", 1), limits=MAY_CHANGE_OUTPUT)
    assert free[0].requests_in_all > careful[0].requests_in_all


def test_flags_of_the_run_file_are_kept() -> None:
    line = "--mem-fraction-static 0.8 --chunked-prefill-size 2048 --disable-radix-cache"
    for item in search("Qwen/Qwen3.6-27B", option("h200", 1), line=line):
        assert item.plan.settings.mem_fraction_static == 0.8
        assert item.plan.settings.chunked_prefill_size == 2048
        assert item.plan.settings.disable_radix_cache


def test_mtp_may_be_ruled_out() -> None:
    found = search("Qwen/Qwen3.6-27B", option("h200", 1), limits=SearchLimits(mtp=False))
    assert not any("--speculative-algorithm" in item.plan.argv for item in found)


def test_another_rank_reorders_the_plans() -> None:
    def most_speculative(candidate: Candidate) -> float:
        return float(candidate.launch.flags.number("speculative-num-draft-tokens") or 0)

    name = "Qwen/Qwen3.6-27B"
    query = SearchQuery(
        model=facts(name),
        options=(option("h200", 1),),
        limits=SearchLimits(),
        base=parse_launch_line(["--model-path", name]),
    )
    found = best_plans(query, LENGTHS, rank=most_speculative)
    assert found[0].plan.settings.speculation.num_draft_tokens == 4  # type: ignore[union-attr]  # speculation is on


def test_nothing_that_fits_is_one_line() -> None:
    with pytest.raises(PlanError, match=r"no plan fits .* on 1 x GeForce RTX 5090"):
        search("deepseek-ai/DeepSeek-V3", option("rtx-5090", 1))


def test_flag_of_the_run_file_finds_what_the_search_finds_by_itself() -> None:
    by_itself = search("Qwen/Qwen3.6-27B", option("rtx-pro-6000", 4))[0]
    given = search("Qwen/Qwen3.6-27B", option("rtx-pro-6000", 4), line="--disable-radix-cache")[0]
    assert "--disable-radix-cache" in by_itself.plan.argv
    assert given.plan.capacity == by_itself.plan.capacity


def test_ranks_of_the_run_file_are_kept() -> None:
    for found in search("Qwen/Qwen3.6-27B", option("rtx-pro-6000", 4), line="--tp 2"):
        assert found.plan.settings.tp_size == 2


def test_stages_are_tried_over_pcie_and_left_out_where_they_cannot_be() -> None:
    def stages(gpu: str, line: str = "", **limits: bool) -> set[int]:
        found = search("Qwen/Qwen3.6-27B", option(gpu, 4), limits=SearchLimits(**limits), line=line)
        return {item.plan.settings.pp_size for item in found}

    assert stages("rtx-pro-6000") == {1, 2, 4}
    assert stages("rtx-pro-6000", pipeline=False) == {1}
    assert stages("h100") == {1}
    assert stages("rtx-pro-6000", "--tp-size 2") == {1}
    assert stages("rtx-pro-6000", "--pp-size 2") == {2}


def test_models_without_stages_are_not_tried_with_them() -> None:
    found = search("Qwen/Qwen3-Next-80B-A3B-Instruct", option("rtx-pro-6000", 4))
    assert {item.plan.settings.pp_size for item in found} == {1}


def test_replicas_are_not_asked_for_by_hand() -> None:
    with pytest.raises(PlanError, match="--dp-size multiplies the cards"):
        search("Qwen/Qwen3.6-27B", option("rtx-pro-6000", 4), line="--dp-size 2")


def test_requests_that_the_model_cannot_hold_are_refused() -> None:
    longer = ExpectedLengths(prompt_tokens=300_000, output_tokens=100)
    with pytest.raises(PlanError, match="300000 prompt and 100 output tokens"):
        search("Qwen/Qwen3.6-27B", option("b200", 1), lengths=longer)


def test_context_covers_the_longest_request_in_whole_steps() -> None:
    # 2 x 300 + 6000 x (1 + 6 x 0.5) = 24,600 -> 25 x 1024
    for item in search("Qwen/Qwen3-32B", option("h200", 1)):
        assert item.plan.settings.context_length == 25_600


def test_context_covers_the_longest_completion_where_one_is_set() -> None:
    # max(4 x 300, 2048) + 20,000 = 22,048 -> 22 x 1024
    limited = replace(LENGTHS, output_limit_tokens=20_000)
    for item in search("Qwen/Qwen3-32B", option("h200", 1), lengths=limited):
        assert item.plan.settings.context_length == 22_528


def test_prefix_cache_is_offered_unless_ruled_out() -> None:
    def caches(**limits: bool) -> set[bool]:
        plans = search("Qwen/Qwen3-32B", option("h200", 1), limits=SearchLimits(**limits))
        return {not item.plan.settings.disable_radix_cache for item in plans}

    assert caches() == {True, False}
    assert caches(prefix_cache=False) == {False}


def test_attention_ranks_are_offered_to_experts_with_latent_attention_alone() -> None:
    def attention_ranks(name: str, **limits: bool) -> set[int]:
        plans = search(name, option("b200", 8), limits=SearchLimits(mtp=False, **limits))
        return {item.plan.settings.attention_dp_size for item in plans}

    assert attention_ranks("deepseek-ai/DeepSeek-V3") == {1, 8}
    assert attention_ranks("deepseek-ai/DeepSeek-V3", attention_dp=False) == {1}
    assert attention_ranks("openai/gpt-oss-120b") == {1}


@pytest.mark.parametrize(
    ("name", "gpu", "count", "limits"),
    [
        ("Qwen/Qwen3.6-27B", "rtx-pro-6000", 2, SearchLimits()),
        ("Qwen/Qwen3.6-27B", "b200", 1, MAY_CHANGE_OUTPUT),
        ("Qwen/Qwen3.6-35B-A3B", "rtx-5090", 4, SearchLimits()),
        ("Qwen/Qwen3-32B", "h100", 2, SearchLimits()),
    ],
)
def test_limits_that_the_search_skips_run_no_more_requests(
    name: str, gpu: str, count: int, limits: SearchLimits
) -> None:
    base = parse_launch_line(["--model-path", name])
    query = SearchQuery(model=facts(name), options=(option(gpu, count),), limits=limits, base=base)
    near: Candidate | None = None
    for shape in search_module._all_shapes(query, LENGTHS):
        best = search_module._best_of_shape(shape, near)
        tried = [
            candidate
            for chunk in search_module._CHUNKS
            for limit in search_module._request_limits(shape)
            if (candidate := search_module._with_limits(shape, chunk, limit)) is not None
        ]
        most = max((candidate.requests_a_replica for candidate in tried), default=None)
        assert (best is None) == (most is None)
        assert best is None or most is None or best.requests_a_replica >= most
        near = best or near
