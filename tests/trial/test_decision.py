"""Trials and switches of plans: cases that are worked out by hand, and simulated jobs."""

import math
from dataclasses import replace

import pytest

from pipeline.trial.beliefs import Beliefs, PlanForecast, prior_beliefs
from pipeline.trial.decision import (
    EngineState,
    Job,
    first_plans,
    most_trial_cost_s,
    next_switches,
    switch_gain_s,
    trial_value_s,
)
from tests.scores.score_trial import LONG_S, MOST_LOSS, scored

HOUR_S = 3600.0
JOB = Job(
    num_engines=4,
    first=0,
    time_left_s=11 * HOUR_S,
    whole_s=12 * HOUR_S,
    restart_s=200.0,
    reading_s=600.0,
)


def known(*rates: float, error: float = 1e-6) -> Beliefs:
    """Beliefs about plans whose rates have been read, each with this error."""
    plans = [PlanForecast(name=str(rate), tokens_per_s=rate, log_sd=error) for rate in rates]
    return prior_beliefs(plans, shared_log_sd=0.0)


def engines(*plans: int) -> list[EngineState]:
    return [EngineState(plan=plan, is_read=True) for plan in plans]


# -- gains and costs


def test_switch_to_a_faster_plan_gains_what_its_engine_saves_in_the_time_left() -> None:
    # 1 - 1/1.1 of 11 hours, of which a quarter is this engine's.
    assert switch_gain_s(known(1.0, 1.1), 0, 1, JOB) == pytest.approx(900.0, rel=1e-4)
    # The other way round it costs 10 % of them.
    assert switch_gain_s(known(1.0, 1.1), 1, 0, JOB) == pytest.approx(-990.0, rel=1e-4)


def test_trial_of_a_plan_that_is_surely_slower_costs_restarts_and_the_time_of_its_reading() -> None:
    # One engine of four is 10 % slower for 600 s. At the start it has only the way back.
    slower_s = 0.1 * 600 / 4
    beliefs = known(1.0, 0.9)
    assert trial_value_s(beliefs, 1, JOB, is_start=True) == pytest.approx(-50 - slower_s, rel=1e-3)
    assert trial_value_s(beliefs, 1, JOB, is_start=False) == pytest.approx(
        -100 - slower_s, rel=1e-3
    )
    # At most it is half as fast: 300 s of one engine of four.
    assert most_trial_cost_s(JOB, is_start=True) == pytest.approx(50 + 75)
    assert most_trial_cost_s(JOB, is_start=False) == pytest.approx(100 + 75)


def test_trial_of_a_plan_that_is_surely_faster_gains_the_time_left_less_all_restarts() -> None:
    # 3,600 s saved over all engines; the other three restart, 50 s of the job each.
    beliefs = known(1.0, 1.1)
    assert trial_value_s(beliefs, 1, JOB, is_start=True) == pytest.approx(3600 - 150, rel=1e-3)
    assert trial_value_s(beliefs, 1, JOB, is_start=False) == pytest.approx(3600 - 200, rel=1e-3)


def test_plan_of_the_same_forecast_is_worth_trying_for_its_error_alone() -> None:
    # The lead is normal with an error of 0.141, and half of it counts: its mean above 0 is
    # 0.141 * 0.399 = 0.056, less what its curvature takes. Of 11 hours that is some 2,000 s.
    value_s = trial_value_s(known(1.0, 1.0, error=0.1), 1, JOB, is_start=True)
    assert value_s == pytest.approx(1900, rel=0.1)


# -- the start


def test_plans_that_promise_something_start_on_one_engine_each_and_the_best_on_the_rest() -> None:
    beliefs = known(1.0, 0.97, 0.95, 0.3, error=0.1)
    assert first_plans(beliefs, replace(JOB, num_engines=8)) == (0, 0, 0, 0, 0, 0, 1, 2)


def test_one_engine_starts_with_the_best_plan() -> None:
    assert first_plans(known(0.9, 1.0, error=0.1), replace(JOB, num_engines=1)) == (1,)


def test_no_more_plans_are_tried_than_leave_an_engine_with_the_best() -> None:
    beliefs = known(1.0, 0.99, 0.98, 0.97, error=0.1)
    assert first_plans(beliefs, replace(JOB, num_engines=2, restart_s=20.0)) == (0, 1)


def test_job_too_short_to_repay_a_trial_has_none() -> None:
    short = replace(JOB, time_left_s=1800.0, whole_s=1800.0)
    assert first_plans(known(1.0, 0.99, 0.98, error=0.1), short) == (0, 0, 0, 0)


def test_trials_at_the_start_cost_no_more_than_their_allowance() -> None:
    beliefs = known(*([1.0] * 5), error=0.1)
    many = replace(JOB, num_engines=8)
    # Each costs 25 s for its engine's way back and 37.5 s of a rate that may be half of the best;
    # the allowance is 0.8 % of 12 hours, 345.6 s.
    assert len(set(first_plans(beliefs, many))) == 5
    spent = replace(many, spent_s=345.6 - 126)
    assert len(set(first_plans(beliefs, spent))) == 3


# -- switches


def test_faster_plan_is_taken_over_by_one_engine_after_the_other() -> None:
    beliefs = known(1.0, 1.1)
    (switch,) = next_switches(beliefs, engines(0, 0, 0, 1), frozenset({0, 1}), JOB)
    assert (switch.engine, switch.plan, switch.reason) == (0, 1, "take_over")
    # 900 s less its own 200 s on one of four engines.
    assert switch.gain_s == pytest.approx(850, rel=1e-3)
    busy = [EngineState(plan=1, is_switching=True), *engines(0, 0, 1)]
    assert next_switches(beliefs, busy, frozenset({0, 1}), JOB) == ()
    # Of 32 engines four at a time.
    large = replace(JOB, num_engines=32)
    switches = next_switches(beliefs, engines(*[0] * 31, 1), frozenset({0, 1}), large)
    assert [switch.engine for switch in switches] == [0, 1, 2, 3]


def test_switch_that_the_time_left_does_not_repay_is_left_out() -> None:
    # 1.5 times the price of 50 s: the gain of an eleventh of a quarter must exceed 75 s.
    beliefs, states = known(1.0, 1.1), engines(0, 0, 0, 1)
    least_s = 75 * 4 * 11
    late = replace(JOB, time_left_s=least_s - 10)
    assert next_switches(beliefs, states, frozenset({0, 1}), late) == ()
    early = replace(JOB, time_left_s=least_s + 10)
    assert len(next_switches(beliefs, states, frozenset({0, 1}), early)) == 1


def test_engine_leaves_a_plan_that_is_slower() -> None:
    (switch,) = next_switches(known(1.0, 0.9), engines(0, 0, 0, 1), frozenset({0, 1}), JOB)
    assert (switch.engine, switch.plan) == (3, 0)


def test_plan_that_only_seems_faster_does_not_take_the_place_of_the_first() -> None:
    # 2 % faster, with an error of 1.4 % of the two readings: slower in 8 cases of 100.
    states = engines(0, 0, 0, 1)
    (switch,) = next_switches(known(1.0, 1.02, error=0.01), states, frozenset({0, 1}), JOB)
    assert (switch.engine, switch.plan) == (3, 0)
    (switch,) = next_switches(known(1.0, 1.05, error=0.01), states, frozenset({0, 1}), JOB)
    assert (switch.engine, switch.plan) == (0, 1)


def test_nothing_is_decided_before_it_is_read() -> None:
    beliefs = known(1.0, 1.05, error=0.1)
    unread = [*engines(0, 0, 0), EngineState(plan=1)]
    assert next_switches(beliefs, unread, frozenset({0, 1}), JOB) == ()


def test_one_engine_tries_plans_by_turns_and_goes_back_to_the_best() -> None:
    job = replace(JOB, num_engines=1, time_left_s=100 * HOUR_S, whole_s=100 * HOUR_S)
    beliefs = known(1.0, 0.98, 0.5, error=0.1)
    (trial,) = next_switches(beliefs, engines(0), frozenset({0}), job)
    assert (trial.plan, trial.reason) == (1, "try")
    read = beliefs.after_reading(0, 1.0, 0.01).after_reading(1, 0.9, 0.01)
    (back,) = next_switches(read, engines(1), frozenset({0, 1}), job)
    assert (back.plan, back.reason) == (0, "take_over")
    # The last plan is not worth its price.
    assert next_switches(read, engines(0), frozenset({0, 1}), job) == ()


def test_plan_is_tried_once() -> None:
    job = replace(JOB, num_engines=1, time_left_s=100 * HOUR_S, whole_s=100 * HOUR_S)
    beliefs = known(1.0, 0.99, error=0.1)
    assert next_switches(beliefs, engines(0), frozenset({0, 1}), job) == ()


def test_no_trial_follows_once_the_allowance_is_spent() -> None:
    job = replace(JOB, num_engines=1, time_left_s=100 * HOUR_S, whole_s=100 * HOUR_S)
    beliefs = known(1.0, 0.99, error=0.1)
    assert next_switches(beliefs, engines(0), frozenset({0}), job)
    spent = replace(job, spent_s=0.008 * job.whole_s - 699)
    assert next_switches(beliefs, engines(0), frozenset({0}), spent) == ()


# -- simulated jobs


def test_simulated_jobs_end_close_to_the_best_plan_and_none_loses_by_its_trials() -> None:
    results = [scored(seed) for seed in range(80)]
    long = [one for one in results if one.case.oracle_s >= LONG_S]
    regret = math.fsum(one.regret for one in long) / len(long)
    assert regret <= 0.01
    assert regret < math.fsum(one.static_regret for one in long) / len(long) / 3
    assert max(one.loss for one in results) <= MOST_LOSS
    assert sum(one.num_switches for one in long) > 0
