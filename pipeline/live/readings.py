"""Readings of running engines: which of them count, and the rate that they add up to.

Only steady running counts: after one mean residence time, and with nearly the most requests that
the engine has run. Neighbours in time sample the same requests, so a span counts as a number of
independent readings.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.live.forecast import Forecast
from pipeline.live.offset import MeasuredRate, Offset, rate_offset
from schemas.estimate import Band, LiveReading
from schemas.units import P90_SDS

# Fraction of the most requests that the engine has run under its cap.
_STEADY = 0.9
# The latest readings: this share of the steady time, and at least this many mean residence times.
_LATEST_SHARE, _LATEST_RESIDENCES = 0.3, 4.0
# Noise of one independent reading, half a mean residence time long. assumed: the running requests'
# lengths and prompts vary by some percent between readings; repeats of whole runs differ by 2 %
READING_SD = 0.05


# --- which readings count ----------------------------------------------------------------------


def steady_readings(
    readings: Sequence[LiveReading], *, mean_residence_s: float
) -> tuple[LiveReading, ...]:
    """Return the readings of full engines, without ramp-up and tail.

    Full is the most requests that an engine has run under its cap, which the KV pool or the load
    may keep below the cap itself.
    """
    settled = [
        reading
        for reading in readings
        if reading.engine_age_s >= mean_residence_s
        and reading.end_s > reading.start_s
        and reading.running_requests > 0
        and reading.tokens_per_s > 0
    ]
    fullest: dict[tuple[str, int], float] = {}
    for reading in settled:
        key = (reading.engine, reading.cap_requests)
        fullest[key] = max(fullest.get(key, 0.0), reading.running_requests)
    return tuple(
        reading
        for reading in settled
        if reading.running_requests >= _STEADY * fullest[reading.engine, reading.cap_requests]
    )


def latest(steady: Sequence[LiveReading], forecast: Forecast) -> Sequence[LiveReading]:
    """Return the readings of the last few residence times, or of the last third of steady time.

    A rate that drifts, or an engine that stepped down, shows in these alone.
    """
    if not steady:
        return steady
    first_s = min(reading.start_s for reading in steady)
    last_s = max(reading.end_s for reading in steady)
    span_s = max(_LATEST_SHARE * (last_s - first_s), _LATEST_RESIDENCES * forecast.mean_residence_s)
    return [reading for reading in steady if reading.end_s > last_s - span_s]


def under_latest_cap(steady: Sequence[LiveReading]) -> list[LiveReading]:
    """Return the readings that each engine made under its latest cap."""
    latest = {reading.engine: reading.cap_requests for reading in sorted(steady, key=end_of)}
    return [reading for reading in steady if reading.cap_requests == latest[reading.engine]]


def end_of(reading: LiveReading) -> float:
    """Return the sort key that puts readings in order of time."""
    return reading.end_s


def independent_in(reading: LiveReading, forecast: Forecast) -> float:
    """Return the number of independent readings in a span: one per half mean residence time."""
    return (reading.end_s - reading.start_s) / (forecast.mean_residence_s / 2)


# --- the rate ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRate:
    """The rate of one engine, from its forecast and its readings together."""

    running_requests: float
    tokens_per_s: Band
    log_sd: float
    independent_readings: float
    """Half mean residence times of steady running; 0 while there are none."""


def engine_rate(steady: Sequence[LiveReading], forecast: Forecast) -> EngineRate:
    """Return the rate of an engine whose launch and card the steady readings share."""
    running = forecast.running_requests
    if steady:
        running = means_of(under_latest_cap(steady), forecast).running_requests
    predicted = forecast.tokens_per_s_at(running)
    offset = offset_at(running, steady, forecast)
    p10, p50, p90 = (
        predicted * math.exp(offset.mean + side * P90_SDS * offset.sd) for side in (-1, 0, 1)
    )
    return EngineRate(
        running_requests=running,
        tokens_per_s=Band(p10=p10, p50=p50, p90=p90),
        log_sd=offset.sd,
        independent_readings=math.fsum(independent_in(reading, forecast) for reading in steady),
    )


def offset_at(running: float, steady: Sequence[LiveReading], forecast: Forecast) -> Offset:
    """Return how far the engines' rate is off the forecast with this many requests running."""
    measured = [
        MeasuredRate(
            running_requests=reading.running_requests,
            tokens_per_s=reading.tokens_per_s,
            predicted_tokens_per_s=forecast.tokens_per_s_at(reading.running_requests),
            independent=independent_in(reading, forecast),
        )
        for reading in steady
    ]
    return rate_offset(
        measured,
        running,
        prior_sd=forecast.rate_log_sd,
        reading_sd=READING_SD,
        predicted_at_target=forecast.tokens_per_s_at(running),
    )


# --- means -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyMeans:
    """Means over the steady readings."""

    cap_requests: float
    running_requests: float
    tokens_per_s: float
    accept_length: float | None
    """Mean tokens kept per step; None where no engine reports them."""
    prompt_tokens_per_s: float
    independent_readings: float


def means_of(steady: Sequence[LiveReading], forecast: Forecast) -> SteadyMeans:
    """Return the means, each reading weighted by the independent readings in it."""

    def mean(figure: Callable[[LiveReading], float], readings: Sequence[LiveReading]) -> float:
        weights = [independent_in(reading, forecast) for reading in readings]
        weighted = zip(weights, readings, strict=True)
        return math.fsum(weight * figure(reading) for weight, reading in weighted) / math.fsum(
            weights
        )

    with_accept = [reading for reading in steady if reading.accept_length]
    return SteadyMeans(
        cap_requests=mean(lambda reading: reading.cap_requests, steady),
        running_requests=mean(lambda reading: reading.running_requests, steady),
        tokens_per_s=mean(lambda reading: reading.tokens_per_s, steady),
        accept_length=mean(lambda reading: reading.accept_length or 0.0, with_accept)
        if with_accept
        else None,
        prompt_tokens_per_s=mean(lambda reading: reading.prompt_tokens_per_s, steady),
        independent_readings=math.fsum(independent_in(reading, forecast) for reading in steady),
    )
