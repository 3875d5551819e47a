"""Tokens/s, accept lengths and bands, worked out by hand."""

import math
from dataclasses import replace

import pytest

from pipeline.planner.memory.sizing import Sized, assess
from pipeline.planner.rate.errors import (
    ACCEPT_LENGTH_SD,
    PIPELINE_SD,
    RELEASE_SD,
    RUNNING_REQUESTS_SD,
    RateClass,
    RateEvidence,
    RateGroup,
    rate_class_of,
    rate_of,
    rate_spreads,
)
from pipeline.planner.rate.kernels import FITTED
from pipeline.planner.rate.replica import Replica, replica_of_launch
from pipeline.planner.rate.running import cap_of, occupancy
from pipeline.planner.rate.step_time import decode_step, prefill_s
from pipeline.planner.rate.throughput import (
    ASSUMED_ACCEPT_LENGTH,
    Workload,
    accept_odds,
    assumed_accept_length,
    chained_accept_length,
    log_band,
    rate_at,
)
from tests.fakes.launches import MTP, catalogue_model, launch_of

WORK = Workload(prompt_tokens_mean=500, output_tokens_mean=2000, output_tokens_cv=1.0)
KNOWN = RateEvidence(
    model_log_sd=0.16, support=(), cap_logged=True, accept_length=None, accept_measured=False,
    release="0.5.23", release_measured=True, stages=1,
)  # fmt: skip


def replica(name: str, line: str = "", gpu: str = "h200") -> Replica:
    return replica_of_launch(launch_of(name, line, gpu=gpu), FITTED)


def test_running_requests_are_longer_than_the_mean() -> None:
    # 500 + 2000 x (1 + 1) / 2
    assert WORK.context_tokens() == 2500
    assert replace(WORK, output_tokens_cv=0.0).context_tokens() == 1500


def test_rate_counts_one_prefill_and_its_share_of_the_steps_per_request() -> None:
    launch = replica("Qwen/Qwen3-32B", "--tp 2")
    rate = rate_at(launch, 40, WORK)
    prefill = prefill_s(launch, 500)
    decode = 2000 * decode_step(launch, 40, 2500).step_s() / 40
    assert rate.tokens_per_s == pytest.approx(2000 / (prefill + decode))
    assert rate.prefill_share == pytest.approx(prefill / (prefill + decode))
    # a rate per GPU of two, and 80 % of it within 1.084 deviations
    band = rate.tokens_per_s_per_gpu
    assert band.p50 == pytest.approx(rate.tokens_per_s / 2)
    assert band.p90 / band.p50 == pytest.approx(math.exp(1.084 * rate.log_sd))
    assert band.p50 / band.p10 == pytest.approx(math.exp(1.084 * rate.log_sd))


def test_accepted_drafts_divide_the_steps() -> None:
    launch = replica("Qwen/Qwen3.6-27B", MTP)
    rate = rate_at(launch, 8, WORK, accept_length=3.0)
    decode = 2000 * decode_step(launch, 8, 2500).step_s() / (8 * 3.0)
    assert rate.tokens_per_s == pytest.approx(2000 / (prefill_s(launch, 500) + decode))
    # not measured, 2.6 of four draft tokens are assumed, and the error is wider
    assumed = rate_at(launch, 8, WORK)
    assert assumed.accept_length == pytest.approx(ASSUMED_ACCEPT_LENGTH)
    assert rate.log_sd == pytest.approx(rate.model_log_sd)
    assert assumed.log_sd**2 == pytest.approx(assumed.model_log_sd**2 + ACCEPT_LENGTH_SD**2)


def test_chain_keeps_a_token_only_behind_one_that_is_kept() -> None:
    # 1 + 0.5 + 0.25 + 0.125
    assert chained_accept_length(0.5, 4) == 1.875
    assert accept_odds(1.875, 4) == pytest.approx(0.5)
    # two draft tokens with the odds of 2.6 of four: 1 + 0.7066
    odds = accept_odds(2.6, 4)
    pair = MTP.replace("num-steps 3", "num-steps 1").replace("tokens 4", "tokens 2")
    assert assumed_accept_length(replica("Qwen/Qwen3.6-27B", pair)) == pytest.approx(1 + odds)
    assert assumed_accept_length(replica("Qwen/Qwen3.6-27B")) == 1.0


def test_band_is_symmetric_in_the_logarithm() -> None:
    band = log_band(100.0, 0.2)
    assert band.p50 == 100.0
    assert band.p90 == pytest.approx(124.21, abs=0.01)
    assert band.p10 * band.p90 == pytest.approx(100.0**2)


@pytest.mark.parametrize(
    ("name", "rate_class"),
    [
        ("Qwen/Qwen3-32B", "bf16 dense"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "bf16 experts"),
        ("deepseek-ai/DeepSeek-V3", "fp8 experts"),
        ("openai/gpt-oss-20b", "4-bit"),
    ],
)
def test_class_of_the_error(name: str, rate_class: RateClass) -> None:
    assert rate_class_of(catalogue_model(name)) == rate_class


def test_each_lack_of_evidence_is_one_spread() -> None:
    assert [spread.name for spread in rate_spreads(KNOWN)] == ["rate model"]
    (model,) = rate_spreads(KNOWN)
    assert (model.log_sd, model.heavy_tailed) == (0.16, True)
    assert model.value == "no reading near to it, ± 16 %"
    nothing = replace(
        KNOWN, cap_logged=False, accept_length=2.6, release_measured=False, stages=4
    )  # fmt: skip
    assert [(spread.name, spread.log_sd) for spread in rate_spreads(nothing)] == [
        ("rate model", 0.16),
        ("running requests", RUNNING_REQUESTS_SD),
        ("accept length", ACCEPT_LENGTH_SD),
        ("pipeline stages", PIPELINE_SD),
        ("engine release", RELEASE_SD),
    ]
    measured = rate_spreads(replace(nothing, accept_measured=True))
    assert "accept length" not in [spread.name for spread in measured]


def test_groups_add_up_their_replicas() -> None:
    group = RateGroup(
        name="4 x H200", replicas=4, gpus_per_replica=1, tokens_per_s=100.0, running_requests=8.0,
        small_step_s=0.01, load_s=0.0, spreads=(),
    )  # fmt: skip
    assert rate_of([group, replace(group, replicas=2, tokens_per_s=50.0)]) == 500.0


def test_cap_is_the_smallest_of_limit_pool_and_window() -> None:
    launch = launch_of("openai/gpt-oss-20b", "--max-running-requests 100")
    sized = assess(launch)
    assert isinstance(sized, Sized)
    small = replace(sized, pool=replace(sized.pool, tokens=50_000, swa_tokens=12_800))
    # 50,000 / 1,000; 12,800 / 128 = 100 windows
    assert cap_of(small, launch.model, 1000) == (50, "KV pool")
    assert cap_of(small, launch.model, 100) == (100, "max_running_requests")
    narrow = replace(small, pool=replace(small.pool, swa_tokens=1_280))
    assert cap_of(narrow, launch.model, 1000) == (10, "window pool")
    # contexts below the window fill only their own part: 1,280 / 64
    assert cap_of(narrow, launch.model, 64) == (20, "window pool")


def test_prefill_leaves_places_that_do_not_decode() -> None:
    assert occupancy(0.0) == 0.95
    assert occupancy(0.5) == pytest.approx(0.75)
