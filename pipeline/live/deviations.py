"""Deviations of running engines from their forecast: batch, step time, accept length, prefill.

Each input is compared with its own 95 % band, so that a slow step is not mistaken for a small
batch. Each engine's latest reading is also compared with the earlier readings of all engines.
"""

import math
from collections.abc import Iterator, Sequence

from pipeline.live.forecast import Forecast
from pipeline.live.readings import (
    READING_SD,
    SteadyMeans,
    end_of,
    independent_in,
    means_of,
    offset_at,
    under_latest_cap,
)
from schemas.estimate import Deviation, LiveReading

# Fraction of the forecast's running requests below which the batch is a different one.
_FEW_RUNNING = 0.7
# Standard deviations at the edge of the 95 % band.
_OUTSIDE = 1.96
# assumed: a smaller difference between two shares of GPU time does not matter, whatever their ratio
_LEAST_PREFILL_DIFFERENCE = 0.03
# assumed: error of the prefill constants, by the scatter of published fits
_PREFILL_LOG_SD = 0.25


def deviations(steady: Sequence[LiveReading], forecast: Forecast) -> Iterator[Deviation]:
    """Yield the inputs outside their 95 % bands, and a batch below 0.7 of the forecast's."""
    if not steady:
        return
    means = means_of(under_latest_cap(steady), forecast)
    for check in (_of_running, _of_step, _of_accept, _of_prefill):
        deviation = check(means, forecast)
        if deviation is not None:
            yield deviation
    yield from _drifts(steady, forecast)


def _of_running(means: SteadyMeans, forecast: Forecast) -> Deviation | None:
    predicted = forecast.running_requests
    if means.running_requests >= _FEW_RUNNING * predicted:
        return None
    cause = "the KV pool, a short queue or prefill keeps it below its cap"
    if means.cap_requests < _FEW_RUNNING * predicted:
        cause = "the cap is too low: see max_running_requests in the engine's log"
    return Deviation(
        input="running_requests",
        predicted=predicted,
        measured=means.running_requests,
        sentence=f"an engine runs {means.running_requests:.0f} requests at once (cap "
        f"{means.cap_requests:.0f}), {predicted:.0f} expected: {cause}",
    )


def _of_step(means: SteadyMeans, forecast: Forecast) -> Deviation | None:
    """Compare the seconds per step, without prefill, at the measured running requests."""
    accept = forecast.accept_length or 1.0
    rate = forecast.tokens_per_s_at(means.running_requests)
    predicted = means.running_requests * accept * (1 - _expected_share(means, forecast)) / rate
    written = means.accept_length or accept
    decoding = max(1 - _prefill_share(means, forecast), 0.01)
    measured = means.running_requests * written * decoding / means.tokens_per_s
    if not _outside(measured / predicted, forecast.step_log_sd, means.independent_readings):
        return None
    way = "longer" if measured > predicted else "shorter"
    return Deviation(
        input="step_time",
        predicted=predicted,
        measured=measured,
        sentence=f"a step of {means.running_requests:.0f} requests takes {1000 * measured:.3g} ms, "
        f"{way} than the {1000 * predicted:.3g} ms expected: kernels, links or clocks differ from "
        "the figures for this card and release",
    )


def _of_accept(means: SteadyMeans, forecast: Forecast) -> Deviation | None:
    if means.accept_length is None or forecast.accept_length is None:
        return None
    ratio = means.accept_length / forecast.accept_length
    if not _outside(ratio, forecast.accept_log_sd, math.inf):
        return None
    effect = "MTP gains less: see its break-even" if ratio < 1 else "MTP gains more"
    return Deviation(
        input="accept_length",
        predicted=forecast.accept_length,
        measured=means.accept_length,
        sentence=f"the accept length is {means.accept_length:.2g} tokens, "
        f"{forecast.accept_length:.2g} expected: {effect}",
    )


def _of_prefill(means: SteadyMeans, forecast: Forecast) -> Deviation | None:
    """Compare shares of GPU time: prompt tokens counted times the forecast's seconds for one."""
    measured, predicted = _prefill_share(means, forecast), _expected_share(means, forecast)
    if abs(measured - predicted) < _LEAST_PREFILL_DIFFERENCE:
        return None
    ratio = max(measured, 1e-3) / max(predicted, 1e-3)
    if not _outside(ratio, _PREFILL_LOG_SD, math.inf):
        return None
    cause = (
        "prompts are longer or completions shorter than assumed, or requests are retracted"
        if ratio > 1
        else "prompts are shorter or completions longer than assumed, or the prefix cache is hit"
    )
    return Deviation(
        input="prefill_share",
        predicted=predicted,
        measured=measured,
        sentence=f"prefill uses {100 * measured:.0f} % of GPU time, {100 * predicted:.0f} % "
        f"expected: {cause}",
    )


def _prefill_share(means: SteadyMeans, forecast: Forecast) -> float:
    return min(means.prompt_tokens_per_s * forecast.prefill_s_per_token, 1.0)


def _expected_share(means: SteadyMeans, forecast: Forecast) -> float:
    """Return the expected share: prompts enter as completions leave, so it follows the rate."""
    rate = forecast.tokens_per_s_at(means.running_requests)
    usual = forecast.tokens_per_s_at(forecast.running_requests)
    return min(forecast.prefill_share * rate / usual, 1.0)


def _drifts(steady: Sequence[LiveReading], forecast: Forecast) -> Iterator[Deviation]:
    """Yield engines whose latest reading is slower or faster than the earlier readings say."""
    for latest in {reading.engine: reading for reading in sorted(steady, key=end_of)}.values():
        earlier = [reading for reading in steady if reading.end_s <= latest.start_s]
        drift = _drift(latest, earlier, forecast) if earlier else None
        if drift is not None:
            yield drift


def _drift(
    latest: LiveReading, earlier: Sequence[LiveReading], forecast: Forecast
) -> Deviation | None:
    offset = offset_at(latest.running_requests, earlier, forecast)
    expected = forecast.tokens_per_s_at(latest.running_requests) * math.exp(offset.mean)
    independent = independent_in(latest, forecast)
    if not _outside(latest.tokens_per_s / expected, offset.sd, independent):
        return None
    accept = latest.accept_length or 1.0
    way = "slower" if latest.tokens_per_s < expected else "faster"
    return Deviation(
        input="step_time",
        predicted=latest.running_requests * accept / expected,
        measured=latest.running_requests * accept / latest.tokens_per_s,
        sentence=f"{latest.engine} has become {way}: {latest.tokens_per_s:,.0f} tokens/s with "
        f"{latest.running_requests:.0f} running requests, {expected:,.0f} by earlier readings",
    )


def _outside(ratio: float, log_sd: float, independent: float) -> bool:
    """Return True outside the 95 % band of the prediction and of the readings' own noise."""
    noise = math.hypot(log_sd, READING_SD / math.sqrt(independent))
    return abs(math.log(ratio)) > _OUTSIDE * noise
