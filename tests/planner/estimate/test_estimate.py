"""The estimate's joins: plans, bills and warnings of one option, on a real model and cards."""

from dataclasses import replace
from datetime import date

import pytest

from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.estimate import estimate as joins
from pipeline.planner.estimate.estimate import (
    EstimateQuery,
    PricedGroup,
    option_name,
    rated_group,
    run_estimate,
)
from pipeline.planner.estimate.job_time import job_time, whole_job
from pipeline.planner.lengths.lengths import output_lengths
from pipeline.planner.rate.ranking import Load
from pipeline.planner.rate.search import HardwareOption, SearchLimits
from pipeline.planner.sglang.flags import parse_launch_line
from schemas.estimate import AsLaunched, Price, PromptLengths

MODEL = "Qwen/Qwen3.6-27B"
LENGTHS = output_lengths(2529, 1.2, 32_768, "stated")
QUERY = EstimateQuery(
    model=load_model(MODEL),
    num_completions=902_087,
    prompts=PromptLengths(mean_tokens=512, cv=0.0, sampled=0, source="stated"),
    load=Load(prompt_tokens_mean=512, lengths=LENGTHS),
    limits=SearchLimits(mtp=False, prefix_cache=False, pipeline=False),
    base=parse_launch_line(["--model-path", MODEL, "--context-length", "65536"]),
    version="0.5.23",
    release_known=True,
    storage_bytes_per_s=1e9,
    hours_between_preemptions=12.0,
    calibrations={},
    today=date(2026, 12, 1),
)


def group(gpu: str, count: int, usd: float | None = 2.0, spot: float | None = 1.0) -> PricedGroup:
    hardware = HardwareOption(gpu=gpu_named(gpu), count=count)
    return PricedGroup(hardware=hardware, own_usd=usd, own_spot_usd=spot)


def test_bill_counts_all_cards_of_the_option_also_idle_ones() -> None:
    # Two of three cards run: TP 2 is asked for.
    query = replace(QUERY, base=QUERY.base.changed({"tp-size": "2"}))
    (option,) = run_estimate(query, [(group("b200", 3),)]).options
    assert option.gpu_hours.p50 == pytest.approx(option.days.p50 * 24 * 3)
    assert option.gpu_hours.p10 == pytest.approx(option.days.p10 * 24 * 3)
    assert option.gpu_hours.p90 == pytest.approx(option.days.p90 * 24 * 3)
    own, spot = option.bills
    assert own.usd.p50 == pytest.approx(option.gpu_hours.p50 * 2.0)
    assert spot.usd.p50 == pytest.approx(option.gpu_hours.p50 * 1.0 + spot.preemption_usd)
    assert spot.preemption_usd > 0
    assert "1 of 3 B200 are idle: a replica uses 2" in option.warnings


def test_cheapest_comes_first_and_unpriced_options_last_by_days(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.planner.estimate.prices.listed_prices", lambda gpu: ())
    dear, cheap = group("b200", 1, 20.0, None), group("b200", 2, 0.1, None)
    slow, fast = group("h200", 1, None, None), group("h200", 4, None, None)
    estimate = run_estimate(QUERY, [(slow,), (dear,), (fast,), (cheap,)])
    assert [option.option for option in estimate.options] == [
        "2 x B200", "1 x B200", "4 x H200", "1 x H200"
    ]  # fmt: skip
    assert estimate.assumptions == estimate.options[0].assumptions[:3]
    assert estimate.options[2].bills == ()
    assert any("no price for H200 is known" in text for text in estimate.options[2].warnings)


def test_option_that_fits_nothing_is_listed_with_its_reason() -> None:
    estimate = run_estimate(QUERY, [(group("l4", 1),), (group("b200", 1),)])
    assert [option.option for option in estimate.options] == ["1 x B200"]
    (unfit,) = estimate.unfit
    assert unfit.option == "1 x L4"
    assert MODEL in unfit.reason


def test_option_of_two_kinds_has_the_sum_of_their_rates_and_one_blended_price() -> None:
    both = (group("b200", 1, 4.0, 2.0), group("h200", 3, 2.0, 1.0))
    (option,) = run_estimate(QUERY, [both]).options
    assert option.option == option_name(both) == "1 x B200 + 3 x H200"
    assert option.num_gpus == 4
    rates = [rated_group(QUERY, one).search.plans[0].tokens_per_s for one in both]
    assert option.tokens_per_s.p50 == pytest.approx(sum(rates), rel=0.02)
    # (1 x 4 + 3 x 2) / 4 and (1 x 2 + 3 x 1) / 4
    assert [bill.price.usd_per_gpu_hour for bill in option.bills] == [2.5, 1.25]
    assert len(option.plans) == 2


def test_blended_price_takes_every_source_once_and_is_stale_with_any() -> None:
    first = Price(
        kind="on_demand", low_usd_per_gpu_hour=1, usd_per_gpu_hour=2, high_usd_per_gpu_hour=3,
        source="a", date="2026-11", stale=False,
    )  # fmt: skip
    second = replace(first, low_usd_per_gpu_hour=5, usd_per_gpu_hour=6, stale=True)
    blended = joins._blended([first, second], [3, 1])
    # (3 x 1 + 5) / 4, (3 x 2 + 6) / 4, (3 x 3 + 3) / 4
    assert blended.low_usd_per_gpu_hour == 2
    assert blended.usd_per_gpu_hour == 3
    assert blended.high_usd_per_gpu_hour == 3
    assert (blended.source, blended.date, blended.stale) == ("a", "2026-11", True)
    assert joins._blended([first], [3]) is first


def test_preemption_of_two_kinds_is_weighted_by_what_they_cost() -> None:
    both = [rated_group(QUERY, group("b200", 1)), rated_group(QUERY, group("h200", 3))]
    prices = [replace(_price(), usd_per_gpu_hour=4.0), replace(_price(), usd_per_gpu_hour=2.0)]
    each = [joins._preemption(QUERY, rated) for rated in both]
    mean = joins._mean_preemption(QUERY, both, prices)
    # Weights 1 x 4 and 3 x 2.
    expected = 0.4 * each[0].seconds_a_token + 0.6 * each[1].seconds_a_token
    assert mean.seconds_a_token == pytest.approx(expected)
    assert mean.start_s == pytest.approx(0.4 * each[0].start_s + 0.6 * each[1].start_s)
    free = [replace(price, usd_per_gpu_hour=0.0) for price in prices]
    assert joins._mean_preemption(QUERY, both, free) == each[0]


def _price() -> Price:
    return Price(
        kind="spot", low_usd_per_gpu_hour=1, usd_per_gpu_hour=1, high_usd_per_gpu_hour=1,
        source="a", date="2026-11", stale=False,
    )  # fmt: skip


def test_preemption_loses_the_mean_emitted_tokens_at_the_pace_of_the_full_batch() -> None:
    rated = rated_group(QUERY, group("b200", 1))
    preemption = joins._preemption(QUERY, rated)
    running, rate = rated.best.resident.running_requests, rated.best.tokens_per_s
    assert preemption.seconds_a_token == pytest.approx(running / rate)
    # E[o^2] / 2 E[o] of lengths with CV 1.2: 2,529 x (1 + 1.44) / 2, less what the limit cuts.
    assert preemption.emitted_tokens == pytest.approx(2529 * 2.44 / 2, rel=0.03)
    # 51.1 GiB of weights at 1 GB/s, and six minutes between two and ten of graph capture.
    assert preemption.start_s == pytest.approx(51.1 * 2**30 / 1e9 + 360, rel=0.02)
    assert preemption.hours_between == 12


def test_group_carries_the_evidence_of_its_plan() -> None:
    rated = rated_group(QUERY, group("b200", 2))
    assert (rated.rate.name, rated.rate.replicas, rated.rate.gpus_per_replica) == ("2 x B200", 2, 1)
    assert rated.rate.tokens_per_s == pytest.approx(rated.best.tokens_per_s / 2)
    assert rated.rate.load_s == pytest.approx(rated.best.found.plan.weights_bytes / 1e9)
    names = {spread.name for spread in rated.rate.spreads}
    assert {"rate model", "running requests"} <= names
    assert "accept length" not in names
    # Where the KV pool limits the requests, longer completions leave room for fewer.
    assert rated.rate.elasticity_to_length < 0
    # One request alone is faster than one of the full batch.
    full_s = rated.rate.running_requests / rated.rate.tokens_per_s
    assert 0 < rated.rate.small_step_s < full_s


def test_unknown_release_widens_the_rate() -> None:
    known = rated_group(QUERY, group("b200", 1)).rate.spreads
    unknown = rated_group(replace(QUERY, release_known=False), group("b200", 1)).rate.spreads
    assert sum(s.log_sd**2 for s in unknown) > sum(s.log_sd**2 for s in known)


def test_named_release_that_is_unknown_is_a_warning_and_none_is_not() -> None:
    (named,) = run_estimate(replace(QUERY, version="0.9.9"), [(group("b200", 1),)]).options
    (unnamed,) = run_estimate(replace(QUERY, version=None), [(group("b200", 1),)]).options
    assert any("0.9.9" in text for text in named.warnings)
    assert not any("0.9.9" in text for text in unnamed.warnings)
    assert len(named.warnings) == len(unnamed.warnings) + 1


def test_plan_of_a_full_pool_names_the_cap_that_avoids_retraction() -> None:
    (option,) = run_estimate(QUERY, [(group("rtx-pro-6000", 4),)]).options
    (plan,) = option.plans
    assert plan.retraction_risk
    (text,) = [text for text in plan.warnings if "retracts requests" in text]
    calm = int(text.split("cap running requests at ")[1].split()[0])
    assert 0 < calm < plan.cap_requests


def test_days_of_an_option_are_those_of_its_rate() -> None:
    rated = rated_group(QUERY, group("b200", 7))
    time = job_time(whole_job(QUERY.num_completions, LENGTHS), [rated.rate])
    (option,) = run_estimate(QUERY, [(group("b200", 7),)]).options
    assert option.days == time.days
    assert (option.start_hours, option.tail_hours) == (time.start_hours, time.tail_hours)
    band = option.plans[0].tokens_per_s_per_gpu
    assert band.p50 == pytest.approx(rated.best.tokens_per_s / 7)


def test_cards_without_an_engine_here_come_after_all_others() -> None:
    amd, mixed = group("mi300x", 4, 0.01), (group("mi300x", 1, 0.01), group("b200", 1, 0.01))
    estimate = run_estimate(QUERY, [(amd,), mixed, (group("b200", 4, 9.0),)])
    first, *others = estimate.options
    assert (first.option, first.cannot_run) == ("4 x B200", None)
    for option in others:
        assert option.cannot_run is not None
        assert option.cannot_run.startswith("Instinct MI300X: regenerate starts no engine on ROCm")
    # What widens the band is told of an option that can run.
    assert estimate.assumptions == first.assumptions[:3]


def launched(line: str, *groups: PricedGroup) -> AsLaunched:
    flags = parse_launch_line([*line.split(), "--model-path", MODEL])
    query = replace(QUERY, own_launch=flags)
    (found,) = run_estimate(query, [groups]).as_launched
    return found


def test_own_launch_line_runs_as_it_is() -> None:
    # The state pool of 0.8 with the prefix cache on holds 78 slots, 5 a request.
    slow = launched("--mem-fraction-static 0.8", group("rtx-pro-6000", 4))
    assert slow.estimate is not None
    (plan,) = slow.estimate.plans
    assert (plan.cap_requests, plan.replicas, plan.prefix_cache) == (15, 4, True)
    best = run_estimate(QUERY, [(group("rtx-pro-6000", 4),)]).options[0]
    assert slow.estimate.days.p50 > 2 * best.days.p50
    assert slow.estimate.bills[0].usd.p50 > 2 * best.bills[0].usd.p50


def test_best_plan_launched_by_hand_is_as_fast() -> None:
    best = run_estimate(QUERY, [(group("b200", 2),)]).options[0]
    (plan,) = best.plans
    again = launched(" ".join(plan.argv), group("b200", 2)).estimate
    assert again is not None
    assert again.plans[0].cap_requests == plan.cap_requests
    assert again.days.p50 == pytest.approx(best.days.p50)


def test_own_launch_line_may_quantise_the_weights() -> None:
    plain = launched("--tp 1", group("b200", 1)).estimate
    fp8 = launched("--tp 1 --quantization fp8", group("b200", 1)).estimate
    assert plain is not None
    assert fp8 is not None
    # Half the weights leave room for more requests, and are read in half the time.
    assert fp8.plans[0].cap_requests > plain.plans[0].cap_requests
    assert fp8.plans[0].step.dense_s < 0.7 * plain.plans[0].step.dense_s


@pytest.mark.parametrize(
    ("line", "replicas"),
    [("--tp 2", 4), ("--tp 2 --dp 2", 4), ("--dp 8", 8), ("--tp 4 --pp 2", 1)],
)
def test_launch_line_is_started_as_often_as_the_cards_hold_it(line: str, replicas: int) -> None:
    found = launched(f"{line} --disable-radix-cache", group("b200", 8)).estimate
    assert found is not None
    assert found.plans[0].replicas == replicas


@pytest.mark.parametrize(
    ("line", "cards", "reason"),
    [
        ("--tp 4", group("b200", 2), "one launch needs 4 cards, and there are 2"),
        ("--dp 3", group("b200", 2), "one launch needs 3 cards, and there are 2"),
        ("--tp 1", group("l40s", 4), "weights: "),
        ("--mem-fraction-static 0.5", group("rtx-pro-6000", 1), "state pool: "),
    ],
)
def test_launch_line_that_does_not_start_says_why(
    line: str, cards: PricedGroup, reason: str
) -> None:
    found = launched(line, cards)
    assert found.estimate is None
    assert found.reason.startswith(reason), found.reason
