"""Rates of a run's engines, group by group: engines of one launch on one kind of card.

A group on a card that the plan knows starts from the plan; any other from its first readings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.live.deviations import deviations
from pipeline.live.forecast import (
    FIRST_READINGS_LOG_SD,
    Forecast,
    forecast_of,
    measured_forecast,
)
from pipeline.live.readings import EngineRate, end_of, engine_rate, latest, steady_readings
from pipeline.planner.estimate.estimate import RatedGroup
from pipeline.planner.rate.errors import RateGroup, Spread
from pipeline.planner.rate.ranking import Load
from schemas.estimate import GroupUpdate, LiveReading
from schemas.progress import slot_of

# An engine that has reported nothing for this long, while others report, does not count.
# assumed: one that is started again loads its model in less
_GONE_AFTER_S = 300.0
# Each engine's latest reading is compared with all earlier ones: at most this many comparisons,
# above which a subset of the engines represents all.
_MOST_COMPARED = 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGroup:
    """A group's rate for the time left, and the figures that the update prints."""

    rate: RateGroup | None
    """Input of the time left; None while the rate is unknown."""
    update: GroupUpdate


# --- which engines, which readings -------------------------------------------------------------


def running_engines(readings: Sequence[LiveReading], latest_s: float) -> int:
    """Return how many of the engines are running at the time of the run's latest reading."""
    current = [r for r in readings if latest_s - r.end_s <= _GONE_AFTER_S]
    # A worker replaces the one before it in its slot.
    return len({slot_of(reading.engine) for reading in current})


def comparable(readings: Sequence[LiveReading]) -> Sequence[LiveReading]:
    """Return the readings of as many engines as can be compared in reasonable time."""
    engines = sorted({reading.engine for reading in readings})
    most = len(engines)
    while most > 1 and most * len(readings) * most / len(engines) > _MOST_COMPARED:
        most -= 1
    if most == len(engines):
        return readings
    chosen = {engines[place * len(engines) // most] for place in range(most)}
    return [reading for reading in readings if reading.engine in chosen]


# --- a group -----------------------------------------------------------------------------------


def planned_group(
    rated: RatedGroup, load: Load, readings: Sequence[LiveReading], engines: int
) -> LiveGroup:
    """Return the group of engines whose card is in the plan."""
    forecast = forecast_of(rated, load)
    steady = steady_readings(readings, mean_residence_s=forecast.mean_residence_s)
    rate, planned = engine_rate(latest(steady, forecast), forecast), engine_rate((), forecast)
    usual = forecast.tokens_per_s_at(forecast.running_requests)
    group = replace(rated.rate, replicas=max(engines, 1), tokens_per_s=usual)
    return LiveGroup(
        rate=updated_group(group, rate) if engines else None,
        update=GroupUpdate(
            name=rated.rate.name,
            engines=engines,
            running_requests=rate.running_requests,
            tokens_per_s=rate.tokens_per_s.times(engines),
            accept_length=_latest_accept(readings),
            independent_readings=rate.independent_readings,
            expected_running_requests=forecast.running_requests,
            expected_tokens_per_s=planned.tokens_per_s.times(engines),
            expected_accept_length=forecast.accept_length,
            deviations=tuple(deviations(steady, forecast)),
        ),
    )


def measured_group(
    name: str,
    output_tokens_mean: float,
    readings: Sequence[LiveReading],
    engines: int,
    gpus_per_engine: int,
) -> LiveGroup:
    """Return the group of engines that no plan is known for."""
    forecast = measured_forecast(readings, output_tokens_mean)
    rate = None
    if forecast:
        steady = steady_readings(readings, mean_residence_s=forecast.mean_residence_s)
        rate = engine_rate(latest(steady, forecast), forecast)
    group = None
    if forecast and rate and engines:
        first = _first_readings_group(name, engines, gpus_per_engine, forecast)
        group = updated_group(first, rate)
    return LiveGroup(
        rate=group,
        update=GroupUpdate(
            name=name,
            engines=engines,
            running_requests=rate.running_requests if rate else None,
            tokens_per_s=rate.tokens_per_s.times(engines) if rate else None,
            accept_length=_latest_accept(readings),
            independent_readings=rate.independent_readings if rate else 0.0,
            expected_running_requests=None,
            expected_tokens_per_s=None,
            expected_accept_length=None,
            # Readings cannot deviate from what was fitted to them.
            deviations=(),
        ),
    )


def _first_readings_group(
    name: str, engines: int, gpus_per_engine: int, forecast: Forecast
) -> RateGroup:
    """Return the group at its measured rate; its tail is at worst as slow as a full engine."""
    rate = forecast.tokens_per_s_at(forecast.running_requests)
    return RateGroup(
        name=name,
        replicas=engines,
        gpus_per_replica=gpus_per_engine,
        tokens_per_s=rate,
        running_requests=forecast.running_requests,
        small_step_s=forecast.running_requests / rate,
        load_s=0.0,
        spreads=(
            Spread(
                name=f"first readings of {name}",
                value=f"{rate:.3g} tokens/s per engine ± {100 * FIRST_READINGS_LOG_SD:.0f} %",
                source="assumed: engines that have only just started",
                measure="waiting for one average request to finish",
                log_sd=FIRST_READINGS_LOG_SD,
            ),
        ),
    )


def updated_group(group: RateGroup, rate: EngineRate) -> RateGroup:
    """Return the group at its measured rate and running requests, once there is a reading."""
    if rate.independent_readings == 0:
        return group
    measured = Spread(
        name=f"measured rate of {group.name}",
        value=f"{rate.tokens_per_s.p50:.3g} tokens/s per engine ± {100 * rate.log_sd:.0f} %",
        source=f"the run's own counters, {rate.independent_readings:.0f} independent readings",
        measure="more hours of the run",
        log_sd=rate.log_sd,
    )
    return replace(
        group,
        tokens_per_s=rate.tokens_per_s.p50,
        running_requests=rate.running_requests,
        spreads=(measured,),
    )


def _latest_accept(readings: Sequence[LiveReading]) -> float | None:
    with_accept = [r for r in readings if r.accept_length is not None]
    return max(with_accept, key=end_of).accept_length if with_accept else None
