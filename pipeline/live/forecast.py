"""The expected performance of one running engine: from the plan, or from its own first readings.

The plan's batch, accept length and prompts are kept. The output lengths are the current estimate,
so that long completions are not mistaken for slow steps.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from pipeline.planner.estimate.estimate import RatedGroup
from pipeline.planner.rate.errors import ACCEPT_LENGTH_SD
from pipeline.planner.rate.ranking import Load
from pipeline.planner.rate.throughput import prompt_cost_s, rate_at
from schemas.estimate import LiveReading
from schemas.plan import NoSpeculation

# assumed: error of a rate that comes from the first readings of an engine that is still filling
FIRST_READINGS_LOG_SD = 0.3
_STEP_SPREADS = ("rate model", "engine release", "pipeline stages")
_CAP_SPREAD = "running requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected performance of one engine."""

    running_requests: float
    """The cap times the occupancy."""
    tokens_per_s_at: Callable[[float], float]
    """Tokens/s as a function of running requests."""
    accept_length: float | None
    """Mean tokens kept per step; None with MTP off."""
    prefill_share: float
    prefill_s_per_token: float
    mean_residence_s: float
    rate_log_sd: float
    """Error of the rate at known running requests: rate model, accept length and release."""
    step_log_sd: float
    """Error of the step time alone: rate model and release."""
    accept_log_sd: float


def forecast_of(rated: RatedGroup, load: Load) -> Forecast:
    """Return the forecast for one engine of the plan under this load."""
    best, work = rated.best, load.workload()
    replica, running = best.replica, best.resident.running_requests
    accept = load.accept_length(replica)

    @cache
    def tokens_per_s_at(running_requests: float) -> float:
        return rate_at(replica, running_requests, work, accept_length=accept).tokens_per_s

    usual = rate_at(replica, running, work, accept_length=accept)
    prompt_s = prompt_cost_s(replica, running, work, usual.step.step_s(), usual.accept_length)
    sds = {spread.name: spread.log_sd for spread in rated.rate.spreads}
    drafts = not isinstance(replica.settings.speculation, NoSpeculation)
    return Forecast(
        running_requests=running,
        tokens_per_s_at=tokens_per_s_at,
        accept_length=usual.accept_length if drafts else None,
        prefill_share=usual.prefill_share,
        prefill_s_per_token=prompt_s / work.prompt_tokens_mean,
        mean_residence_s=work.output_tokens_mean * running / usual.tokens_per_s,
        rate_log_sd=_root_sum_square(sd for name, sd in sds.items() if name != _CAP_SPREAD),
        step_log_sd=_root_sum_square(sds.get(name, 0.0) for name in _STEP_SPREADS),
        accept_log_sd=sds.get("accept length", ACCEPT_LENGTH_SD),
    )


def measured_forecast(
    readings: Sequence[LiveReading], output_tokens_mean: float
) -> Forecast | None:
    """Return a forecast from the later half of the readings, or None before tokens are counted.

    The first answers are the short ones, and nothing is counted before them.
    """
    first_s = min((reading.start_s for reading in readings), default=0.0)
    last_s = max((reading.end_s for reading in readings), default=0.0)
    readings = [reading for reading in readings if reading.end_s >= (first_s + last_s) / 2]
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
        rate_log_sd=FIRST_READINGS_LOG_SD,
        step_log_sd=FIRST_READINGS_LOG_SD,
        accept_log_sd=ACCEPT_LENGTH_SD,
    )


def _root_sum_square(sds: Iterable[float]) -> float:
    return math.sqrt(math.fsum(sd * sd for sd in sds))
