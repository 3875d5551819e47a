"""A running engine's readings folded into the dry run's rate.

Lengths are learned in `censored_lengths`, days follow in `job_time`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from pipeline.planner.disagreements import disagreements
from pipeline.planner.live_readings import (
    Forecast,
    looks_in,
    mean_of,
    offset_from,
    recent,
    steady_readings,
)
from pipeline.planner.rate_groups import RateGroup, Spread
from pipeline.planner.rate_offset import Offset
from schemas.estimate import Band, LiveReading, LiveUpdate

_P90 = 1.2816  # of a standard normal


def live_update(readings: Sequence[LiveReading], forecast: Forecast) -> LiveUpdate:
    """The rate of one engine as it runs, from engines of one launch on one kind of card."""
    steady = steady_readings(readings, mean_residence_s=forecast.mean_residence_s)
    running = forecast.running_requests
    if steady:
        running = mean_of(recent(steady), forecast).running_requests
    predicted = forecast.tokens_per_s_at(running)
    offset = offset_from(steady, forecast, running)
    return LiveUpdate(
        running_requests=running,
        tokens_per_s=_rate_band(predicted, offset),
        log_offset=offset.mean,
        log_sd=offset.sd,
        independent_readings=math.fsum(looks_in(reading, forecast) for reading in steady),
        disagreements=tuple(disagreements(steady, forecast)),
    )


def updated_group(group: RateGroup, update: LiveUpdate) -> RateGroup:
    """The group as it runs: its rate measured, its running requests known."""
    if update.independent_readings == 0:
        return group
    measured = Spread(
        name=f"measured rate of {group.name}",
        value=f"{update.tokens_per_s.p50:.3g} tokens/s an engine ± {100 * update.log_sd:.0f} %",
        source=f"the run's own counters, {update.independent_readings:.0f} independent readings",
        measure="more hours of the run",
        log_sd=update.log_sd,
    )
    return replace(
        group,
        tokens_per_s=update.tokens_per_s.p50,
        running_requests=update.running_requests,
        spreads=(measured,),
    )


def _rate_band(predicted: float, offset: Offset) -> Band:
    p10, p50, p90 = (
        predicted * math.exp(offset.mean + side * _P90 * offset.sd) for side in (-1, 0, 1)
    )
    return Band(p10=p10, p50=p50, p90=p90)
