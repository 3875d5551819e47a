"""Which input of the dry run a running engine contradicts: batch, step, accept length, prefill.

Each input is held against its own 95 % band, so that a slow step is not taken for a small batch;
an engine's latest reading is held against those before it.
"""

import math
from collections.abc import Iterator, Sequence

from pipeline.live.readings import (
    LOOK_SD,
    Forecast,
    SteadyMeans,
    looks_in,
    mean_of,
    offset_from,
    reading_end,
    recent,
)
from schemas.estimate import Disagreement, LiveReading

_FEW_RUNNING = 0.7  # of what was predicted: the batch is another one
_OUTSIDE = 1.96  # of the 95 % band
# assumed: a share of device time that differs by less is no news, whatever its ratio
_PREFILL_SHARE_NEWS = 0.03
_PREFILL_LOG_SD = 0.25  # assumed: prefill's own constants, as published fits scatter


def disagreements(steady: Sequence[LiveReading], forecast: Forecast) -> Iterator[Disagreement]:
    """The inputs of the dry run that lie outside their 95 % bands; the batch below 0.7 of it."""
    if not steady:
        return
    seen = mean_of(recent(steady), forecast)
    against_dry_run = (
        _of_running(seen, forecast),
        _of_step(seen, forecast),
        _of_accept(seen, forecast),
        _of_prefill(seen, forecast),
    )
    yield from (found for found in against_dry_run if found is not None)
    yield from _drifts(steady, forecast)


def _of_running(seen: SteadyMeans, forecast: Forecast) -> Disagreement | None:
    predicted = forecast.running_requests
    if seen.running_requests >= _FEW_RUNNING * predicted:
        return None
    cause = "its KV pool, its queue or the time that prefill takes keep it below its own limit"
    if seen.cap_requests < _FEW_RUNNING * predicted:
        cause = "the engine admits no more: see max_running_requests in its log"
    return Disagreement(
        input="running_requests",
        predicted=predicted,
        measured=seen.running_requests,
        sentence=f"{seen.running_requests:.0f} requests run in an engine that may run "
        f"{seen.cap_requests:.0f}, {predicted:.0f} were expected: {cause}",
    )


def _of_step(seen: SteadyMeans, forecast: Forecast) -> Disagreement | None:
    """Seconds a step, prefill taken off, at the running requests that are seen."""
    accept = forecast.accept_length or 1.0
    rate = forecast.tokens_per_s_at(seen.running_requests)
    predicted = seen.running_requests * accept * (1 - _expected_share(seen, forecast)) / rate
    written = seen.accept_length or accept
    decoding = max(1 - _prefill_share(seen, forecast), 0.01)
    measured = seen.running_requests * written * decoding / seen.tokens_per_s
    if not _outside(measured / predicted, forecast.step_log_sd, seen.looks):
        return None
    way = "longer" if measured > predicted else "shorter"
    return Disagreement(
        input="step_time",
        predicted=predicted,
        measured=measured,
        sentence=f"a step of {seen.running_requests:.0f} requests takes {1000 * measured:.3g} ms, "
        f"{way} than the {1000 * predicted:.3g} ms expected: kernels, links or clocks are not as "
        "the card's and the release's figures say",
    )


def _of_accept(seen: SteadyMeans, forecast: Forecast) -> Disagreement | None:
    if seen.accept_length is None or forecast.accept_length is None:
        return None
    ratio = seen.accept_length / forecast.accept_length
    if not _outside(ratio, forecast.accept_log_sd, math.inf):
        return None
    end = "MTP gains less: see the break-even" if ratio < 1 else "MTP gains more"
    return Disagreement(
        input="accept_length",
        predicted=forecast.accept_length,
        measured=seen.accept_length,
        sentence=f"{seen.accept_length:.2g} tokens a step are kept, {forecast.accept_length:.2g} "
        f"were expected: {end}",
    )


def _of_prefill(seen: SteadyMeans, forecast: Forecast) -> Disagreement | None:
    """By prompt tokens counted, at the seconds a prompt token that the dry run reckons with."""
    measured, predicted = _prefill_share(seen, forecast), _expected_share(seen, forecast)
    if abs(measured - predicted) < _PREFILL_SHARE_NEWS:
        return None
    ratio = max(measured, 1e-3) / max(predicted, 1e-3)
    if not _outside(ratio, _PREFILL_LOG_SD, math.inf):
        return None
    cause = (
        "prompts are longer or completions shorter than the lengths say, or requests are retracted"
        if ratio > 1
        else "prompts are shorter, completions longer, or the prefix cache is hit"
    )
    return Disagreement(
        input="prefill_share",
        predicted=predicted,
        measured=measured,
        sentence=f"prefill takes {100 * measured:.0f} % of device time, {100 * predicted:.0f} % "
        f"were expected: {cause}",
    )


def _prefill_share(seen: SteadyMeans, forecast: Forecast) -> float:
    return min(seen.prompt_tokens_per_s * forecast.prefill_s_per_token, 1.0)


def _expected_share(seen: SteadyMeans, forecast: Forecast) -> float:
    """Prompts come in as completions go out: the share goes with the rate."""
    rate = forecast.tokens_per_s_at(seen.running_requests)
    usual = forecast.tokens_per_s_at(forecast.running_requests)
    return min(forecast.prefill_share * rate / usual, 1.0)


def _drifts(steady: Sequence[LiveReading], forecast: Forecast) -> Iterator[Disagreement]:
    """Each engine's latest reading against all before it: has it become slower, or faster?"""
    for latest in {reading.engine: reading for reading in sorted(steady, key=reading_end)}.values():
        before = [reading for reading in steady if reading.end_s <= latest.start_s]
        found = _drift(latest, before, forecast) if before else None
        if found is not None:
            yield found


def _drift(
    latest: LiveReading, before: Sequence[LiveReading], forecast: Forecast
) -> Disagreement | None:
    offset = offset_from(before, forecast, latest.running_requests)
    expected = forecast.tokens_per_s_at(latest.running_requests) * math.exp(offset.mean)
    if not _outside(latest.tokens_per_s / expected, offset.sd, looks_in(latest, forecast)):
        return None
    accept = latest.accept_length or 1.0
    way = "slower" if latest.tokens_per_s < expected else "faster"
    return Disagreement(
        input="step_time",
        predicted=latest.running_requests * accept / expected,
        measured=latest.running_requests * accept / latest.tokens_per_s,
        sentence=f"{latest.engine} has become {way}: {latest.tokens_per_s:,.0f} tokens/s with "
        f"{latest.running_requests:.0f} running, {expected:,.0f} by the readings before",
    )


def _outside(ratio: float, log_sd: float, looks: float) -> bool:
    """Outside the 95 % band of what is predicted and of the readings' own noise."""
    return abs(math.log(ratio)) > _OUTSIDE * math.hypot(log_sd, LOOK_SD / math.sqrt(looks))
