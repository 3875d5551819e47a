"""Engines of one launch on one kind of card: which count, and what the time left is made from."""

import pytest

from pipeline.live.groups import comparable, measured_group, running_engines, updated_group
from pipeline.live.readings import engine_rate
from pipeline.planner.estimate.job_time import job_time, whole_job
from pipeline.planner.lengths.lengths import output_lengths
from pipeline.planner.rate.errors import RateGroup, Spread
from tests.fakes.forecast import FORECAST, rate_at
from tests.fakes.forecast import steady_reading as reading
from tests.fakes.known import known


def group() -> RateGroup:
    prior = Spread(name="rate model", value="", source="", measure="", log_sd=0.25)
    return RateGroup(
        name="4 x RTX PRO 6000", replicas=4, gpus_per_replica=1, tokens_per_s=rate_at(80),
        running_requests=80.0, small_step_s=0.037, load_s=60.0, spreads=(prior,),
    )  # fmt: skip


def test_group_keeps_its_plan_until_there_is_a_reading() -> None:
    planned = group()
    assert updated_group(planned, engine_rate((), FORECAST)) is planned


def test_measured_rate_replaces_every_spread_of_the_plan() -> None:
    rate = engine_rate([reading(tokens_per_s=0.8 * rate_at(80), running_requests=76.0)], FORECAST)
    updated = updated_group(group(), rate)
    assert updated.tokens_per_s == rate.tokens_per_s.p50
    assert updated.running_requests == 76.0
    (spread,) = updated.spreads
    assert (spread.name, spread.log_sd) == ("measured rate of 4 x RTX PRO 6000", rate.log_sd)
    assert "10 independent readings" in spread.source


def test_quarter_of_an_hour_narrows_the_days() -> None:
    # Rate to 2.5 %; 256 prompts of CV 1.2 have their mean to 7.5 %: with availability p90 / p10
    # falls from 2.0 to 1.3.
    lengths = output_lengths(2500, 1.2, 32_768, "run file")
    planned = job_time(whole_job(902_087, lengths), [group()]).days
    rate = engine_rate([reading(tokens_per_s=0.8 * rate_at(80))], FORECAST)
    pilot = output_lengths(2500, 1.2, 32_768, "pilot", mean_relative_error=0.075)
    live = job_time(whole_job(902_087, pilot), [updated_group(group(), rate)], started=True)
    assert planned.p90 / planned.p10 == pytest.approx(2.0, abs=0.15)
    assert live.days.p90 / live.days.p10 == pytest.approx(1.27, abs=0.05)
    assert "measured rate of 4 x RTX PRO 6000" in {part.name for part in live.assumptions}


# --- without a plan ----------------------------------------------------------------------------


def test_group_without_a_plan_starts_from_its_first_readings() -> None:
    # Two spans of 100 s, 8 and 4 running, 80 and 60 tokens/s: 14,000 tokens in 1,200 request
    # seconds are 11.67 tokens/s per request; 6 run on average: 70 tokens/s, 0.0857 s per step.
    readings = [
        reading(
            start_s=0.0, end_s=100.0, engine_age_s=0.0, running_requests=8.0, tokens_per_s=80.0
        ),
        reading(
            start_s=100.0, end_s=200.0, engine_age_s=100.0, running_requests=4.0,
            tokens_per_s=60.0, accept_length=1.5,
        ),
    ]  # fmt: skip
    found = measured_group("embedded engines", 2500.0, readings, 2, 3)
    assert found.rate is not None
    assert (found.rate.name, found.rate.replicas, found.rate.gpus_per_replica) == (
        "embedded engines", 2, 3
    )  # fmt: skip
    assert found.rate.tokens_per_s == pytest.approx(70)
    assert found.rate.running_requests == pytest.approx(6)
    assert found.rate.small_step_s == pytest.approx(6 / 70)
    assert found.rate.load_s == 0
    (spread,) = found.rate.spreads
    assert (spread.name, spread.log_sd) == ("first readings of embedded engines", 0.3)
    assert spread.value == "70 tokens/s per engine ± 30 %"
    # No reading is a residence time of 2,500 / 11.67 = 214 s old.
    assert found.update.independent_readings == 0
    assert known(found.update.tokens_per_s).p50 == pytest.approx(140)
    assert found.update.accept_length == 1.5
    assert found.update.deviations == ()


def test_group_that_has_written_nothing_has_no_rate() -> None:
    found = measured_group("engines", 2500.0, [reading(tokens_per_s=0.0)], 1, 1)
    assert found.rate is None
    assert (found.update.tokens_per_s, found.update.running_requests) == (None, None)
    assert measured_group("engines", 2500.0, [reading(running_requests=0.0)], 1, 1).rate is None
    gone = measured_group("engines", 2500.0, [reading()], 0, 1)
    assert gone.rate is None
    assert gone.update.running_requests == 80.0


# --- which engines, which readings -------------------------------------------------------------


def test_engine_counts_until_it_is_silent_for_five_minutes() -> None:
    readings = [
        reading(engine="w0", end_s=1600.0),
        reading(engine="w1", end_s=1900.0),
        # It has replaced w1.
        reading(engine="w1r1", end_s=1900.0),
    ]
    assert running_engines(readings, 1900.0) == 2
    assert running_engines(readings, 1900.1) == 1


def test_many_engines_are_represented_by_some() -> None:
    few = [reading(engine=f"w{n}") for n in range(200)]
    assert comparable(few) is few
    # 400 engines of 10 readings: n^2 x 10 comparisons are at most 40,000 for 63 of them.
    many = [reading(engine=f"w{n:03}") for n in range(400) for _ in range(10)]
    chosen = comparable(many)
    assert len({each.engine for each in chosen}) == 63
    assert len(chosen) == 630
