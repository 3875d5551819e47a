"""Days from tokens and rates: the founding figures, the tail against a simulation, the band."""

import heapq
import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PlanError
from pipeline.planner.estimate.job_time import (
    AVAILABILITY,
    availability_seen,
    band_of,
    drawn_availability,
    job_time,
    remaining_work,
    start_seconds,
    tail_seconds,
    whole_job,
)
from pipeline.planner.lengths.lengths import log_normal_cut, output_lengths
from pipeline.planner.lengths.shapes import LengthShape, moment
from pipeline.planner.rate.errors import RateEvidence, RateGroup, Spread, rate_spreads
from schemas.estimate import Band
from tests.fakes.drawn_lengths import sampled_length

ALWAYS = Band(p10=1, p50=1, p90=1)
LENGTHS = output_lengths(2529, 1.2, 32_768, "bench", mean_relative_error=0.0)


def group(**changes: object) -> RateGroup:
    """Four RTX PRO 6000 as the founding bench ran them: 8 requests and 400 tokens/s a card."""
    given = {
        "name": "4 x RTX PRO 6000", "replicas": 4, "gpus_per_replica": 1, "tokens_per_s": 400.0,
        "running_requests": 8.0, "small_step_s": 0.0145, "load_s": 0.0, "spreads": (),
        **changes,
    }  # fmt: skip
    return RateGroup(**given)  # type: ignore[arg-type]


def spread(name: str = "rate model", log_sd: float = 0.2, *, heavy: bool = False) -> Spread:
    return Spread(
        name=name, value="", source="", measure="", log_sd=log_sd, heavy_tailed=heavy
    )  # fmt: skip


# --- founding figures --------------------------------------------------------------------------


def test_the_founding_days_imply_the_founding_length() -> None:
    # 4 cards x 16.5 days x 86,400 s x 400 tokens/s = 2.281e9 tokens; / 902,087 = 2,529.
    assert pytest.approx(2529, abs=0.5) == 4 * 16.5 * 86_400 * 400 / 902_087
    found = job_time(whole_job(902_087, LENGTHS), [group()], availability=ALWAYS, started=True)
    assert found.days.p50 == pytest.approx(16.5, abs=0.01)
    # 16.5 x 24 x 4 = 1,584
    assert found.gpu_hours.p50 == pytest.approx(1584, abs=1)
    assert found.tokens_per_s.p50 == pytest.approx(1600)


def test_availability_and_start_are_added() -> None:
    # 2.281e9 tokens / 1,600 = 1,425,864 s, / 0.95 = 1,500,909; start 60 + (120 + 600) / 2 = 420 s
    found = job_time(whole_job(902_087, LENGTHS), [group(load_s=60.0)])
    assert found.start_hours == pytest.approx(420 / 3600)
    # A twentieth of the generating time is lost: 1,500,909 x 0.05 / 3,600 = 20.8 h
    assert found.restart_hours == pytest.approx(20.85, abs=0.05)
    assert found.days.p50 == pytest.approx((1_500_909 + 420) / 86_400, rel=0.01)
    # 0.88 to 0.98 of the time: 18.75 to 16.84 days
    assert found.days.p90 == pytest.approx(18.75, rel=0.01)
    assert found.days.p10 == pytest.approx(16.84, rel=0.01)


def test_groups_are_a_sum_that_one_queue_feeds() -> None:
    slow, fast = group(), group(name="1 x B200", replicas=1, tokens_per_s=4800.0)
    work = whole_job(902_087, LENGTHS)
    both = job_time(work, [slow, fast], availability=ALWAYS, started=True)
    # 1,600 + 4,800 = 6,400: a quarter of 16.5 days, on five cards
    assert both.days.p50 == pytest.approx(16.5 / 4, rel=0.001)
    assert both.gpu_hours.p50 == pytest.approx(both.days.p50 * 24 * 5)
    # The slow ones load for an hour, the fast one for none: a quarter of the rate is missed.
    late = [group(load_s=3600.0), group(name="1 x B200", replicas=1, tokens_per_s=4800.0)]
    assert start_seconds(late, 0) == pytest.approx(900)


# --- the tail ----------------------------------------------------------------------------------


def simulated_tail_s(
    shape: LengthShape, cards: int, running: int, small_s: float, full_s: float, per_card: int,
    seed: int,
) -> float:  # fmt: skip
    """One queue, cards whose step grows evenly with what they run: end of all less ideal time."""
    random = Random(seed)
    waiting = [sampled_length(shape, random) for _ in range(cards * per_card)]
    tokens = sum(waiting)
    engines: list[list[float]] = [[] for _ in range(cards)]  # written marks at which each ends
    for engine in engines:
        engine.extend(waiting.pop() for _ in range(running))
        heapq.heapify(engine)
    mark = [0.0] * cards

    def step_s(engine: list[float]) -> float:
        return small_s + (full_s - small_s) * (len(engine) - 1) / (running - 1)

    events = [((engine[0]) * step_s(engine), card) for card, engine in enumerate(engines)]
    heapq.heapify(events)
    now = 0.0
    while events:
        now, card = heapq.heappop(events)
        mark[card] = heapq.heappop(engines[card])
        if waiting:
            heapq.heappush(engines[card], mark[card] + waiting.pop())
        if engines[card]:
            ahead = engines[card][0] - mark[card]
            heapq.heappush(events, (now + ahead * step_s(engines[card]), card))
    return now - tokens * full_s / (cards * running)


@pytest.mark.parametrize(("cv", "running", "per_card"), [(1.2, 80, 2400), (0.6, 80, 2400)])
def test_the_tail_is_that_of_a_simulation(cv: float, running: int, per_card: int) -> None:
    shape = log_normal_cut(2500, cv, 32_768)
    small_s, full_s = 0.037, 0.072
    simulated = [
        simulated_tail_s(shape, 4, running, small_s, full_s, per_card, seed) for seed in range(8)
    ]
    option = group(
        running_requests=float(running), tokens_per_s=running / full_s, small_step_s=small_s
    )
    told = tail_seconds(4 * per_card, [option], shape)
    assert told == pytest.approx(sum(simulated) / len(simulated), rel=0.12)
    assert 0.03 < told / 3600 < 0.3


def test_a_job_that_fits_in_one_batch_lasts_as_long_as_its_longest() -> None:
    # 32 run at once, 4 are asked for, all of 1,000 tokens: they run all alone, each at small_step.
    equal = log_normal_cut(1000, 0, 32_768)
    option = group(small_step_s=0.01, tokens_per_s=8 / 0.01)
    work_s = 4 * 1000 / (4 * 800)
    assert work_s + tail_seconds(4, [option], equal) == pytest.approx(10, rel=0.01)


def test_a_pilot_pays_some_percent_and_the_whole_job_next_to_nothing() -> None:
    # As published for simulations of one card: 6,000 prompts 1 to 7 %, a shard of 225,000 0.003 to
    # 0.2 %. Here 0.037 s x (21,600 longest - 3,080 mean remaining) = 685 s of 13,700 s: 5 %.
    option = group(replicas=1, running_requests=80.0, tokens_per_s=1110.0, small_step_s=0.037)

    def part(completions: int) -> float:
        ideal_s = completions * 2529 / 1110
        return tail_seconds(completions, [option], LENGTHS.shape) / ideal_s

    assert 0.01 < part(6000) < 0.07
    assert part(225_522) < 0.002


# --- the band ----------------------------------------------------------------------------------


def test_the_band_is_that_of_a_log_normal() -> None:
    # sd 0.2: p90 / p10 = e^(2 x 1.2816 x 0.2) = 1.67
    found = job_time(
        whole_job(902_087, LENGTHS), [group(spreads=(spread(),))], availability=ALWAYS, started=True
    )
    assert found.days.p90 / found.days.p10 == pytest.approx(1.67, rel=0.03)
    assert found.tokens_per_s.p90 / found.tokens_per_s.p10 == pytest.approx(1.67, rel=0.03)


def test_a_heavy_tail_keeps_the_standard_deviation() -> None:
    # Student's t of 4: its p90 is 1.533, its sd root 2: at sd 0.2 the p90 is e^(0.2 x 1.084).
    found = job_time(
        whole_job(902_087, LENGTHS),
        [group(spreads=(spread(heavy=True),))],
        availability=ALWAYS,
        started=True,
    )
    assert math.log(found.days.p90 / found.days.p10) / 2 == pytest.approx(0.2 * 1.084, rel=0.05)


def test_a_dry_run_of_a_dense_bf16_model_is_wide_by_two() -> None:
    # 0.19 rate model, 0.15 running requests, 0.10 release and length, 0.03 availability:
    # root of the sum of squares 0.28, e^(2 x 1.28 x 0.28) = 2.0
    evidence = RateEvidence(
        model_log_sd=0.19, support=(), cap_logged=False, accept_length=None, accept_measured=False,
        release="0.5.23", release_measured=False, stages=1,
    )  # fmt: skip
    spreads = rate_spreads(evidence)
    lengths = output_lengths(2529, 1.2, 32_768, "bench")
    found = job_time(whole_job(902_087, lengths), [group(spreads=spreads)])
    assert found.days.p90 / found.days.p10 == pytest.approx(1.95, abs=0.15)
    names = [assumption.name for assumption in found.assumptions]
    assert names[:2] == ["rate model", "running requests"]
    assert set(names) == {
        "rate model", "running requests", "engine release", "mean output length", "availability",
        "start-up",
    }  # fmt: skip
    assert sum(part.variance_share for part in found.assumptions) == pytest.approx(1)


def test_a_cap_that_lengths_lower_makes_lengths_weigh_more() -> None:
    lengths = output_lengths(2529, 1.2, 32_768, "bench", mean_relative_error=0.1)
    work = whole_job(902_087, lengths)
    plain = job_time(work, [group()], availability=ALWAYS, started=True).days
    limited = [group(elasticity_to_length=-0.5)]
    wide = job_time(work, limited, availability=ALWAYS, started=True).days
    # Days go with length to the power of 1.5.
    assert math.log(wide.p90 / wide.p50) / math.log(plain.p90 / plain.p50) == pytest.approx(
        1.5, rel=0.001
    )


@settings(derandomize=True, max_examples=20, deadline=None)
@given(
    st.floats(min_value=0.0, max_value=0.5),
    st.floats(min_value=100, max_value=5000),
    st.integers(min_value=1, max_value=8),
    st.booleans(),
)
def test_the_band_is_ordered_and_more_replicas_never_take_longer(
    log_sd: float, rate: float, replicas: int, heavy: bool
) -> None:
    def days(count: int) -> Band:
        option = group(
            replicas=count, tokens_per_s=rate, spreads=(spread(log_sd=log_sd, heavy=heavy),)
        )
        return job_time(whole_job(902_087, LENGTHS), [option]).days

    some, more = days(replicas), days(replicas + 1)
    assert 0 < some.p10 <= some.p50 <= some.p90
    assert more.p50 < some.p50


def test_the_same_job_has_the_same_band() -> None:
    work = whole_job(1000, LENGTHS)
    assert job_time(work, [group()]) == job_time(work, [group()])


def test_the_availability_drawn_is_the_one_stated() -> None:
    for normal, stated in ((-1.2816, 0.88), (0, 0.95), (1.2816, 0.98)):
        assert drawn_availability(normal, AVAILABILITY) == pytest.approx(stated, abs=1e-6)
    assert drawn_availability(1.5, ALWAYS) == 1


def test_a_run_learns_its_own_availability() -> None:
    # Half a day weighs as much as the prior: (0.95 + 0.99) / 2; 108 hours nine times as much.
    assert availability_seen(0, 0) == AVAILABILITY
    half_a_day = availability_seen(0.99 * 43_200, 43_200)
    assert half_a_day.p50 == pytest.approx(0.97)
    days = availability_seen(0.99 * 388_800, 388_800)
    assert days.p50 == pytest.approx(0.986)
    assert days.p90 - days.p10 < half_a_day.p90 - half_a_day.p10 < 0.1


def test_percentiles_by_hand() -> None:
    assert band_of(range(11)) == Band(p10=1, p50=5, p90=9)


# --- what is left ------------------------------------------------------------------------------


def test_running_requests_have_the_rest_of_their_length_to_write() -> None:
    # Equal lengths of 1,000: 90 wait, of two running 400 and 0 are written: 600 + 1,000 are left.
    equal = output_lengths(1000, 0, 32_768, "run file")
    work = remaining_work(100, 8, [400, 0], equal)
    assert work.completions == 92
    assert work.tokens == pytest.approx(91_600, rel=1e-3)
    assert remaining_work(100, 100, [], equal).tokens == 0


def test_all_that_wait_and_run_sum_to_the_job() -> None:
    shape = LENGTHS.shape
    assert remaining_work(50, 0, [0] * 50, LENGTHS).tokens == pytest.approx(
        50 * moment(shape, 1), rel=1e-3
    )


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([], "found no group of replicas"),
        ([group(replicas=0)], "4 x RTX PRO 6000: found 0 replicas at 400 tokens/s"),
        ([group(tokens_per_s=0.0)], "found 4 replicas at 0 tokens/s"),
    ],
)
def test_an_option_that_runs_nothing_is_refused(groups: list[RateGroup], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        job_time(whole_job(10, LENGTHS), groups)


def test_a_job_with_nothing_left_is_refused() -> None:
    with pytest.raises(PlanError, match="found 0 tokens to generate"):
        job_time(remaining_work(10, 10, [], LENGTHS), [group()])


def test_zero_completions_are_refused() -> None:
    with pytest.raises(PlanError, match="completions: found 0; expected 1 or more"):
        whole_job(0, LENGTHS)
