"""Readings of a running engine: which of them count, and the rate that they add up to."""

import math

import pytest

from pipeline.live.readings import engine_rate, means_of, steady_readings, under_latest_cap
from tests.fakes.forecast import FORECAST, rate_at
from tests.fakes.forecast import steady_reading as reading

# --- which readings count ----------------------------------------------------------------------


def test_ramp_up_and_tail_do_not_count() -> None:
    filling = reading(engine_age_s=0.0, tokens_per_s=300.0)
    tail = reading(start_s=9000.0, end_s=9100.0, running_requests=12.0, tokens_per_s=300.0)
    steady = reading()
    assert steady_readings([filling, steady, tail], mean_residence_s=180) == (steady,)
    # An engine that never fills its cap is steady at what it runs.
    low = reading(running_requests=50.0)
    assert steady_readings([low], mean_residence_s=180) == (low,)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"engine_age_s": 179.9}, False),
        ({"end_s": 600.0}, False),
        ({"running_requests": 0.0}, False),
        ({"tokens_per_s": 0.0}, False),
        # Nine tenths of the most that the engine has run.
        ({"running_requests": 72.0}, True),
        ({"running_requests": 71.9}, False),
        # Other engines and other caps have their own most.
        ({"running_requests": 20.0, "engine": "worker-1"}, True),
        ({"running_requests": 20.0, "cap_requests": 20}, True),
    ],
)
def test_reading_counts_from_one_residence_time_on_and_near_the_most(
    changes: dict[str, object], counts: bool
) -> None:
    steady = steady_readings([reading(), reading(**changes)], mean_residence_s=180)
    assert len(steady) == 1 + counts


def test_rate_is_that_of_the_latest_cap() -> None:
    before = reading(cap_requests=40, running_requests=40.0, tokens_per_s=rate_at(40))
    after = reading(start_s=2000.0, end_s=2900.0)
    other = reading(engine="worker-1", cap_requests=40)
    # Readings may come in any order.
    assert under_latest_cap([after, before, other]) == [after, other]
    assert engine_rate([after, before], FORECAST).running_requests == 80


# --- the rate ----------------------------------------------------------------------------------


def test_without_steady_readings_the_forecast_is_kept() -> None:
    rate = engine_rate((), FORECAST)
    assert (rate.running_requests, rate.log_sd, rate.independent_readings) == (80, 0.2, 0)
    # 80 % of a log-normal of sd 0.2 are within e^(1.2816 x 0.2) = 1.292 of its median.
    assert rate.tokens_per_s.p50 == pytest.approx(1111.1, abs=0.1)
    assert rate.tokens_per_s.p90 == pytest.approx(1111.1 * 1.2922, rel=1e-3)
    assert rate.tokens_per_s.p10 == pytest.approx(1111.1 / 1.2922, rel=1e-3)


def test_quarter_of_an_hour_narrows_the_band() -> None:
    # Ten independent readings of 90 s: root(0.02^2 + 0.05^2 / 10) = 0.0255, with the prior of 0.2
    # 0.0253. The weight of the prior is 0.0253^2 / 0.2^2 = 1.6 %: 0.984 x ln 0.8 = -0.2196.
    rate = engine_rate([reading(tokens_per_s=0.8 * rate_at(80))], FORECAST)
    assert rate.independent_readings == pytest.approx(10)
    assert rate.log_sd == pytest.approx(0.0253, abs=0.0001)
    middle = rate_at(80) * math.exp(-0.2196)
    assert rate.tokens_per_s.p50 == pytest.approx(middle, rel=1e-3)
    # e^(1.2816 x 0.0253) = 1.033
    assert rate.tokens_per_s.p90 / rate.tokens_per_s.p50 == pytest.approx(1.033, abs=0.001)
    assert rate.tokens_per_s.p50 / rate.tokens_per_s.p10 == pytest.approx(1.033, abs=0.001)


def test_means_are_weighted_by_time() -> None:
    # 900 s and 300 s: weights 3 and 1.
    short = reading(
        start_s=1500.0, end_s=1800.0, cap_requests=40, running_requests=40.0, tokens_per_s=900.0,
        accept_length=2.0, prompt_tokens_per_s=100.0,
    )  # fmt: skip
    means = means_of([reading(tokens_per_s=1100.0), short], FORECAST)
    assert (means.cap_requests, means.running_requests) == (70, 70)
    assert means.tokens_per_s == pytest.approx(1050)
    assert means.prompt_tokens_per_s == pytest.approx(196)
    # Only one of them reports an accept length.
    assert means.accept_length == 2.0
    # 1,200 s of half residence times of 90 s.
    assert means.independent_readings == pytest.approx(13.33, abs=0.01)
    assert means_of([reading()], FORECAST).accept_length is None
