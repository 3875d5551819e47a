"""Decide which plan each engine runs: what a trial may gain, and what a switch costs. Pure.

Invariants: what trials may cost in all, if none finds a faster plan, stays within a share of the
job's time; each plan is tried once; no engine stays on a plan that may be slower than the one that
the forecast ranks first; a switch is expected to save more than it costs.

All gains and costs are seconds of the job. One engine of `n` that stands still for a second costs
the job `1 / n` seconds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from pipeline.trial.beliefs import Beliefs

# All trials of a job may cost this share of it, if none finds a faster plan.
MOST_COST_FRACTION = 0.008
# assumed: a plan that a forecast ranks near the best has at least half of its rate
_MOST_SLOWER = 0.5
# A plan is faster or slower beyond doubt with this chance. assumed: errors of readings are larger
# than their spans show in one case of twenty
_CERTAIN = 0.98
# A plan takes the place of the forecast's first if it is this much slower with at most this chance.
_SLOWER, _CHANCE_OF_SLOWER = 0.005, 0.005
# A switch is worth its price only if the gain is this many times as high.
_LEAST_RETURN = 1.5
# Engines that switch at once, over all: the others go on, and show if the plan comes up.
_SWITCHING_FRACTION = 1 / 8
# Points at which a distribution is cut for an expectation.
_NUM_POINTS = 41


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job at one moment, and what its trials cost."""

    num_engines: int
    first: int
    """Plan that the forecast ranks first, which a job without trials would run."""
    time_left_s: float
    """Time left at the rate of the best plan."""
    whole_s: float
    """Expected time of the whole job, from which the allowance for trials follows."""
    restart_s: float
    """Time from an engine's stop to its first steady token, with its rows continued."""
    reading_s: float
    """Time from an engine's start until its rate is read well enough to decide."""
    spent_s: float = 0.0
    """Cost of the trials so far."""

    @property
    def most_switching(self) -> int:
        return max(1, math.floor(self.num_engines * _SWITCHING_FRACTION))

    @property
    def allowance_s(self) -> float:
        """Most that further trials may cost."""
        return MOST_COST_FRACTION * self.whole_s - self.spent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Engine of a job in its trial."""

    plan: int
    is_read: bool = False
    """True once its rate under the plan is read well enough to decide."""
    is_switching: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Order to an engine to start again under another plan."""

    engine: int
    plan: int
    reason: Literal["try", "take_over"]
    gain_s: float
    """Expected gain for the job, less the price."""


# --- the start ----------------------------------------------------------------------------------


def first_plans(beliefs: Beliefs, job: Job) -> tuple[int, ...]:
    """Return the plan of each engine at the start: the best one, and others that pay on one each.

    An engine that starts anyway costs no restart, so most plans are tried here.
    """
    best, allowance_s = beliefs.best, job.allowance_s
    others = [plan for plan in range(len(beliefs.means)) if plan != best]
    value = {plan: trial_value_s(beliefs, plan, job, is_start=True) for plan in others}
    cost_s = most_trial_cost_s(job, is_start=True)
    tried: list[int] = []
    for plan in sorted(others, key=value.__getitem__, reverse=True):
        has_room = len(tried) + 1 < job.num_engines
        if has_room and value[plan] > 0 and cost_s <= allowance_s:
            tried.append(plan)
            allowance_s -= cost_s
    return (*(best for _ in range(job.num_engines - len(tried))), *tried)


# --- while it runs ------------------------------------------------------------------------------


def next_switches(
    beliefs: Beliefs, engines: Sequence[EngineState], tried: frozenset[int], job: Job
) -> tuple[Switch, ...]:
    """Return the switches that pay now; none while what is read settles nothing.

    `tried` has all plans that an engine has run, or failed to start with.
    """
    is_settled = all(engine.is_read or engine.is_switching for engine in engines)
    unread = {engine.plan for engine in engines} - {one.plan for one in engines if one.is_read}
    switches = _take_overs(beliefs, engines, tried - unread, job, is_settled=is_settled)
    if switches or not is_settled:
        return switches
    return _next_trial(beliefs, engines, tried, job)


def _take_overs(
    beliefs: Beliefs,
    engines: Sequence[EngineState],
    read: frozenset[int],
    job: Job,
    *,
    is_settled: bool,
) -> tuple[Switch, ...]:
    """Let engines take over the best of the plans that have been read."""
    known = [plan for plan in sorted(read) if _is_safe(beliefs, plan, job)]
    if not known:
        return ()
    best = max(known, key=beliefs.means.__getitem__)
    num_free = job.most_switching - sum(engine.is_switching for engine in engines)
    found = []
    for number, engine in enumerate(engines):
        if engine.plan == best or engine.is_switching:
            continue
        gain_s = switch_gain_s(beliefs, engine.plan, best, job)
        price_s = job.restart_s / job.num_engines
        is_certain = beliefs.chance_to_beat(best, engine.plan) >= _CERTAIN
        pays = (is_certain or is_settled) and gain_s > _LEAST_RETURN * price_s
        if pays or (is_settled and _may_cost_s(beliefs, engine.plan, job) > price_s):
            found.append(
                Switch(engine=number, plan=best, reason="take_over", gain_s=gain_s - price_s)
            )
    found.sort(key=lambda switch: -switch.gain_s)
    return tuple(found[: max(0, num_free)])


def _is_safe(beliefs: Beliefs, plan: int, job: Job) -> bool:
    """Return whether a plan is as good as certain not to be slower than the forecast's first."""
    if plan == job.first:
        return True
    return beliefs.lead(plan, job.first).cdf(-_SLOWER) <= _CHANCE_OF_SLOWER


def _may_cost_s(beliefs: Beliefs, plan: int, job: Job) -> float:
    """Return what an engine that stays on a plan that is not safe may cost the job."""
    if _is_safe(beliefs, plan, job):
        return 0.0
    lead = beliefs.lead(plan, job.first).inv_cdf(_CHANCE_OF_SLOWER)
    return job.time_left_s / job.num_engines * (math.exp(-lead) - 1.0)


def _next_trial(
    beliefs: Beliefs, engines: Sequence[EngineState], tried: frozenset[int], job: Job
) -> tuple[Switch, ...]:
    """Try the plan that promises the most on one engine, if that pays."""
    if any(engine.is_switching for engine in engines):
        return ()
    left = [plan for plan in range(len(beliefs.means)) if plan not in tried]
    value = {plan: trial_value_s(beliefs, plan, job, is_start=False) for plan in left}
    payable = [
        plan
        for plan in left
        if value[plan] > 0 and most_trial_cost_s(job, is_start=False) <= job.allowance_s
    ]
    if not payable:
        return ()
    plan = max(payable, key=value.__getitem__)
    return (Switch(engine=len(engines) - 1, plan=plan, reason="try", gain_s=value[plan]),)


# --- gains and costs ----------------------------------------------------------------------------


def switch_gain_s(beliefs: Beliefs, from_plan: int, to_plan: int, job: Job) -> float:
    """Return what one engine's switch gains for the job, before its price."""
    saved = _expected(beliefs.lead(to_plan, from_plan), lambda lead: 1.0 - math.exp(-lead))
    return saved * job.time_left_s / job.num_engines


def trial_value_s(beliefs: Beliefs, plan: int, job: Job, *, is_start: bool) -> float:
    """Return what trying a plan on one engine is worth: its expected gain less its cost.

    If it is faster, all engines take it over; if it is not, its engine goes back.
    """
    best, share = _incumbent(beliefs, plan), 1.0 / job.num_engines
    restart_s = job.restart_s * share
    others_s = job.restart_s - restart_s

    def outcome_s(lead: float) -> float:
        """Gain for a true lead."""
        slower_s = job.reading_s * share * max(0.0, 1.0 - math.exp(lead))
        taken_over_s = job.time_left_s * (1.0 - math.exp(-lead)) - others_s
        begun_s = 0.0 if is_start else restart_s
        return max(taken_over_s, -restart_s) - slower_s - begun_s

    return _expected(beliefs.lead(plan, best), outcome_s)


def most_trial_cost_s(job: Job, *, is_start: bool) -> float:
    """Return what a trial that fails costs the job at most."""
    restarts = 1 if is_start else 2
    return (restarts * job.restart_s + _MOST_SLOWER * job.reading_s) / job.num_engines


def _incumbent(beliefs: Beliefs, plan: int) -> int:
    """Return the best of the other plans."""
    others = (other for other in range(len(beliefs.means)) if other != plan)
    return max(others, key=beliefs.means.__getitem__)


def _expected(lead: NormalDist, value: Callable[[float], float]) -> float:
    """Return the mean of a function of a lead, over slices of equal chance."""
    points = ((number + 0.5) / _NUM_POINTS for number in range(_NUM_POINTS))
    return sum(value(lead.inv_cdf(point)) for point in points) / _NUM_POINTS
