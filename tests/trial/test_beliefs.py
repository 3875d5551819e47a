"""Beliefs about plans' rates: what a reading of one says about it and about the others."""

import math

import pytest

from pipeline.trial.beliefs import PlanForecast, prior_beliefs

EXACT = 1e-6
PLANS = (
    PlanForecast(name="a", tokens_per_s=1000.0, log_sd=0.1),
    PlanForecast(name="b", tokens_per_s=900.0, log_sd=0.1),
)


def test_before_any_reading_the_forecast_decides_and_shared_errors_cancel() -> None:
    known = prior_beliefs(PLANS, shared_log_sd=0.2)
    lead = known.lead(0, 1)
    assert known.best == 0
    assert lead.mean == pytest.approx(math.log(1000 / 900))
    # Each plan's own error of 0.1, and nothing of the 0.2 that both share.
    assert lead.variance == pytest.approx(0.1**2 + 0.1**2)
    # ln(10/9) = 0.105 over an error of 0.141: 0.745 standard deviations.
    assert known.chance_to_beat(0, 1) == pytest.approx(0.772, abs=0.001)


def test_reading_of_one_plan_moves_the_others_by_the_error_that_they_share() -> None:
    known = prior_beliefs(PLANS, shared_log_sd=0.2)
    read = known.after_reading(0, 1000.0 * math.exp(0.2), EXACT)
    assert read.means[0] == pytest.approx(math.log(1000) + 0.2)
    # Of its surprise of 0.2 the shared part is 0.04 / (0.04 + 0.01).
    assert read.means[1] == pytest.approx(math.log(900) + 0.2 * 0.8)
    assert read.lead(0, 1).mean == pytest.approx(math.log(1000 / 900) + 0.2 * 0.2)


def test_reading_as_uncertain_as_the_forecast_counts_half() -> None:
    known = prior_beliefs(PLANS[:1], shared_log_sd=0.0)
    read = known.after_reading(0, 1000.0 * math.exp(0.3), 0.1)
    assert read.means[0] == pytest.approx(math.log(1000) + 0.15)
    assert read.covariances[0][0] == pytest.approx(0.1**2 / 2)


def test_readings_of_both_plans_decide_whatever_was_forecast() -> None:
    known = prior_beliefs(PLANS, shared_log_sd=0.2)
    for plan, rate in ((0, 700.0), (1, 770.0)):
        known = known.after_reading(plan, rate, EXACT)
    assert known.best == 1
    assert known.lead(1, 0).mean == pytest.approx(math.log(1.1), abs=1e-6)
    assert known.chance_to_beat(1, 0) == pytest.approx(1.0)


def test_order_of_readings_does_not_matter() -> None:
    known = prior_beliefs(PLANS, shared_log_sd=0.2)
    one = known.after_reading(0, 800.0, 0.05).after_reading(1, 950.0, 0.02)
    other = known.after_reading(1, 950.0, 0.02).after_reading(0, 800.0, 0.05)
    assert one.means == pytest.approx(other.means)
