"""Readings of running engines: which of them count, and what they say together.

Only steady running counts: after one mean residence time, and with nearly as many requests as
there ever are. Neighbours in time see the same requests, so a span counts as so many looks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.live.offset import MeasuredRate, Offset, rate_offset
from schemas.estimate import LiveReading

_STEADY = 0.9  # of the most that run
# Noise of one look, half a mean residence time long. assumed: the running requests' lengths and
# prompts vary by some percent from one look to the next; repeats of whole runs differ by 2 %
LOOK_SD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the dry run says of one engine."""

    running_requests: float
    """The cap times the occupancy."""
    tokens_per_s_at: Callable[[float], float]
    """By running requests."""
    accept_length: float | None
    """None with MTP off."""
    prefill_share: float
    prefill_s_per_token: float
    mean_residence_s: float
    rate_log_sd: float
    """Of the rate at known running requests: model, accept length and release together."""
    step_log_sd: float
    """Of the step time alone: model and release."""
    accept_log_sd: float


def steady_readings(
    readings: Sequence[LiveReading], *, mean_residence_s: float
) -> tuple[LiveReading, ...]:
    """Readings of full engines: no filling up, no tail.

    Full is what an engine is seen to run under its own cap: KV or the load may keep it below.
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


def looks_in(reading: LiveReading, forecast: Forecast) -> float:
    """Independent looks in a span: neighbours of half a residence time see the same requests."""
    return (reading.end_s - reading.start_s) / (forecast.mean_residence_s / 2)


def recent(steady: Sequence[LiveReading]) -> list[LiveReading]:
    """The readings of each engine under the cap that it has had last."""
    last = {reading.engine: reading.cap_requests for reading in sorted(steady, key=reading_end)}
    return [reading for reading in steady if reading.cap_requests == last[reading.engine]]


def reading_end(reading: LiveReading) -> float:
    """To put readings in the order of time."""
    return reading.end_s


def offset_from(steady: Sequence[LiveReading], forecast: Forecast, running: float) -> Offset:
    """How far these engines are from the forecast, at so many running requests."""
    measured = [
        MeasuredRate(
            running_requests=reading.running_requests,
            tokens_per_s=reading.tokens_per_s,
            predicted_tokens_per_s=forecast.tokens_per_s_at(reading.running_requests),
            independent=looks_in(reading, forecast),
        )
        for reading in steady
    ]
    return rate_offset(
        measured, running, prior_sd=forecast.rate_log_sd, look_sd=LOOK_SD,
        predicted_at_target=forecast.tokens_per_s_at(running),
    )  # fmt: skip


# --- what they say together --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyMeans:
    """Means over the steady readings."""

    cap_requests: float
    running_requests: float
    tokens_per_s: float
    accept_length: float | None
    prompt_tokens_per_s: float
    looks: float


def mean_of(steady: Sequence[LiveReading], forecast: Forecast) -> SteadyMeans:
    """Each reading weighed by its looks. Accept lengths that no engine told stay untold."""

    def mean(figure: Callable[[LiveReading], float], readings: Sequence[LiveReading]) -> float:
        looks = [looks_in(reading, forecast) for reading in readings]
        weighed = zip(looks, readings, strict=True)
        return math.fsum(look * figure(reading) for look, reading in weighed) / math.fsum(looks)

    told = [reading for reading in steady if reading.accept_length]
    return SteadyMeans(
        cap_requests=mean(lambda reading: reading.cap_requests, steady),
        running_requests=mean(lambda reading: reading.running_requests, steady),
        tokens_per_s=mean(lambda reading: reading.tokens_per_s, steady),
        accept_length=mean(lambda reading: reading.accept_length or 0.0, told) if told else None,
        prompt_tokens_per_s=mean(lambda reading: reading.prompt_tokens_per_s, steady),
        looks=math.fsum(looks_in(reading, forecast) for reading in steady),
    )
