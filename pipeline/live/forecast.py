"""What is expected of one running engine: by the dry run, or by its own first readings.

The dry run's batch, accept length and prompts stand; the output lengths are those known by the
time, so that long completions are not taken for slow steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from pipeline.live.disagreements import disagreements
from pipeline.live.offset import Offset
from pipeline.live.readings import Forecast, looks_in, mean_of, offset_from, recent, steady_readings
from pipeline.planner.estimate.estimate import RatedGroup
from pipeline.planner.rate.errors import ACCEPT_LENGTH_SD, RateGroup, Spread
from pipeline.planner.rate.ranking import Load
from pipeline.planner.rate.throughput import rate_at, taken_by_a_prompt_s
from schemas.estimate import Band, LiveReading, LiveUpdate
from schemas.plan import NoSpeculation
from schemas.units import P90_SDS

_OF_THE_STEP = ("rate model", "engine release", "pipeline stages")
_OF_THE_CAP = "running requests"
# assumed: how far a rate is off that a few readings of a filling engine give alone
_ROUGH_LOG_SD = 0.5


def forecast_of(rated: RatedGroup, load: Load) -> Forecast:
    """One engine of the dry run's plan, writing completions of these lengths."""
    best, work = rated.best, load.workload()
    replica, running = best.replica, best.resident.running_requests
    accept = load.accept_length(replica)

    @cache
    def tokens_per_s_at(running_requests: float) -> float:
        return rate_at(replica, running_requests, work, accept_length=accept).tokens_per_s

    usual = rate_at(replica, running, work, accept_length=accept)
    prompt_s = taken_by_a_prompt_s(replica, running, work, usual.step.step_s(), usual.accept_length)
    sds = {spread.name: spread.log_sd for spread in rated.rate.spreads}
    drafts = not isinstance(replica.settings.speculation, NoSpeculation)
    return Forecast(
        running_requests=running,
        tokens_per_s_at=tokens_per_s_at,
        accept_length=usual.accept_length if drafts else None,
        prefill_share=usual.prefill_share,
        prefill_s_per_token=prompt_s / work.prompt_tokens_mean,
        mean_residence_s=work.output_tokens_mean * running / usual.tokens_per_s,
        rate_log_sd=_together(sd for name, sd in sds.items() if name != _OF_THE_CAP),
        step_log_sd=_together(sds.get(name, 0.0) for name in _OF_THE_STEP),
        accept_log_sd=sds.get("accept length", ACCEPT_LENGTH_SD),
    )


def measured_forecast(
    readings: Sequence[LiveReading], output_tokens_mean: float
) -> Forecast | None:
    """One engine as its readings alone have it; None while no token is counted."""
    request_s = math.fsum(r.running_requests * (r.end_s - r.start_s) for r in readings)
    tokens = math.fsum(r.tokens_per_s * (r.end_s - r.start_s) for r in readings)
    if not request_s > 0 or not tokens > 0:
        return None
    pace = tokens / request_s
    seconds = math.fsum(r.end_s - r.start_s for r in readings)
    return Forecast(
        running_requests=request_s / seconds,
        tokens_per_s_at=lambda running: pace * running,
        accept_length=None,
        prefill_share=0.0,
        prefill_s_per_token=0.0,
        mean_residence_s=output_tokens_mean / pace,
        rate_log_sd=_ROUGH_LOG_SD,
        step_log_sd=_ROUGH_LOG_SD,
        accept_log_sd=ACCEPT_LENGTH_SD,
    )


def measured_group(name: str, engines: int, gpus_per_engine: int, forecast: Forecast) -> RateGroup:
    """Engines of which no plan is known. The tail runs at the pace of a full engine at worst."""
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
                value=f"{rate:.3g} tokens/s an engine ± {100 * _ROUGH_LOG_SD:.0f} %",
                source="assumed: engines that have only begun",
                measure="the time that an average request takes",
                log_sd=_ROUGH_LOG_SD,
            ),
        ),
    )


def _together(sds: Iterable[float]) -> float:
    return math.sqrt(math.fsum(sd * sd for sd in sds))


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
        predicted * math.exp(offset.mean + side * P90_SDS * offset.sd) for side in (-1, 0, 1)
    )
    return Band(p10=p10, p50=p50, p90=p90)
