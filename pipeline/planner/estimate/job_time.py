"""How long a job takes on one hardware option: days, GPU-hours, and what their band hangs on.

    T = N E[o] / (rate x u) + T_start + T_tail

An option is a sum of groups of replicas fed from one queue, so that its rate is a sum and only its
last requests make a tail. Knows neither how a rate was found nor what an hour costs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

from pipeline.errors import PlanError
from pipeline.planner.lengths.lengths import LengthModel
from pipeline.planner.lengths.shapes import (
    LengthShape,
    longest_of,
    longest_remaining,
    mean_emitted,
    mean_remaining,
    moment,
)
from pipeline.planner.rate.errors import RateGroup, rate_of
from schemas.estimate import Assumption, Band
from schemas.units import P90_SDS, SECONDS_PER_DAY

# assumed, until a run shows its own: 0.95, and 0.88 to 0.98 in eight cases of ten. In the logit
# those three lie evenly: 1.99, 2.94, 3.89.
AVAILABILITY = Band(p10=0.88, p50=0.95, p90=0.98)
# assumed: what interrupts a run comes once in half a day or so; that long says as much as the band
_HOURS_OF_THE_PRIOR = 12.0

DRAWS = 4000
_SEED = 20_261_130
# Graph capture and kernel tuning. assumed: two to ten minutes, by model and release
CAPTURE_LOW_S, CAPTURE_HIGH_S = 120.0, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """What one option takes for the whole job."""

    tokens_per_s: Band
    """Of all groups, before availability."""
    days: Band
    gpu_hours: Band
    start_hours: float
    tail_hours: float
    restart_hours: float
    """Of the p50: what availability below one costs."""
    overhead_fraction: float
    """Of the p50: start and tail over the time in between."""
    assumptions: tuple[Assumption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens yet to generate, and how well they are known."""

    completions: float
    tokens: float
    relative_error: float
    source: str
    shape: LengthShape


def whole_job(num_completions: int, lengths: LengthModel) -> Work:
    """All of it, from the first prompt on."""
    if num_completions < 1:
        raise PlanError(f"completions: {num_completions} found, 1 or more expected")
    summary = lengths.summary
    return Work(
        completions=num_completions,
        tokens=num_completions * summary.mean_tokens,
        relative_error=summary.mean_relative_error,
        source=summary.source,
        shape=lengths.shape,
    )


def job_time(
    work: Work,
    groups: Sequence[RateGroup],
    *,
    availability: Band = AVAILABILITY,
    started: bool = False,
) -> JobTime:
    """The band of days and hours. A job that has started pays no start any more."""
    _check(work, groups)
    gpus = sum(group.replicas * group.gpus_per_replica for group in groups)
    tail_s = tail_seconds(work.completions, groups, work.shape)
    draws = _draws(work, groups, availability, started, tail_s)
    days = band_of(seconds / SECONDS_PER_DAY for seconds, _ in draws)
    middle = _seconds(work, groups, availability, started)
    return JobTime(
        tokens_per_s=band_of(rate for _, rate in draws),
        days=days,
        gpu_hours=Band(
            p10=days.p10 * 24 * gpus, p50=days.p50 * 24 * gpus, p90=days.p90 * 24 * gpus
        ),
        start_hours=middle.start_s / 3600,
        tail_hours=tail_s / 3600,
        restart_hours=middle.generating_s * (1 - availability.p50) / 3600,
        overhead_fraction=(middle.start_s + tail_s) / middle.generating_s,
        assumptions=_assumptions(work, groups, availability, started, middle),
    )


def _check(work: Work, groups: Sequence[RateGroup]) -> None:
    if not work.tokens > 0:
        raise PlanError(f"job time: {work.tokens:g} tokens to generate found, more than 0 expected")
    for group in groups:
        if group.replicas < 1 or not group.tokens_per_s > 0:
            raise PlanError(
                f"{group.name}: {group.replicas} replicas at {group.tokens_per_s:g} tokens/s "
                "found, more than 0 of both expected"
            )
    if not groups:
        raise PlanError("job time: no group of replicas found, 1 or more expected")


# --- the middle case ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seconds:
    """The parts of one case."""

    generating_s: float
    start_s: float


def start_seconds(groups: Sequence[RateGroup], capture_s: float) -> float:
    """Until the groups generate: each is missed by its part of the rate, the others go ahead."""
    weighted = sum(
        group.replicas * group.tokens_per_s * (group.load_s + capture_s) for group in groups
    )
    return weighted / rate_of(groups)


def _seconds(
    work: Work, groups: Sequence[RateGroup], availability: Band, started: bool
) -> _Seconds:
    capture_s = (CAPTURE_LOW_S + CAPTURE_HIGH_S) / 2
    return _Seconds(
        generating_s=work.tokens / rate_of(groups) / availability.p50,
        start_s=0.0 if started else start_seconds(groups, capture_s),
    )


# --- the draws ---------------------------------------------------------------------------------


def band_of(figures: Iterable[float]) -> Band:
    """The p10, p50 and p90 of many figures."""
    ascending = sorted(figures)

    def at(fraction: float) -> float:
        place = fraction * (len(ascending) - 1)
        low = math.floor(place)
        high = math.ceil(place)
        return ascending[low] + (place - low) * (ascending[high] - ascending[low])

    return Band(p10=at(0.1), p50=at(0.5), p90=at(0.9))


def _draws(
    work: Work, groups: Sequence[RateGroup], availability: Band, started: bool, tail_s: float
) -> list[tuple[float, float]]:
    """Seconds for the job and tokens/s, for each draw of all that is not known."""
    random = Random(_SEED)  # noqa: S311 - draws of a band, no secret
    heavy = {spread.name: spread.heavy_tailed for group in groups for spread in group.spreads}
    usual_rate = rate_of(groups)
    drawn = []
    for _ in range(DRAWS):
        luck = {name: _luck(random, heavy_tailed) for name, heavy_tailed in heavy.items()}
        longer = work.relative_error * random.gauss(0, 1)
        rates = [
            group.replicas * group.tokens_per_s * math.exp(_log_factor(group, luck, longer))
            for group in groups
        ]
        rate = sum(rates)
        start_s = 0.0
        capture_s = random.uniform(CAPTURE_LOW_S, CAPTURE_HIGH_S)
        if not started:
            start_s = start_seconds(groups, capture_s)
        u = drawn_availability(random.gauss(0, 1), availability)
        generating_s = work.tokens * math.exp(longer) / rate / u
        drawn.append((generating_s + start_s + tail_s * usual_rate / rate, rate))
    return drawn


def _log_factor(group: RateGroup, luck: Mapping[str, float], longer: float) -> float:
    spread = math.fsum(spread.log_sd * luck[spread.name] for spread in group.spreads)
    return spread + group.elasticity_to_length * longer


def _luck(random: Random, heavy_tailed: bool) -> float:
    """Standard deviation 1: of a normal, or of Student's t of 4, whose own is root 2."""
    normal = random.gauss(0, 1)
    if not heavy_tailed:
        return normal
    return normal / math.sqrt(random.gammavariate(2, 2) / 4) / math.sqrt(2)


# --- what the band hangs on --------------------------------------------------------------------


def _assumptions(
    work: Work, groups: Sequence[RateGroup], availability: Band, started: bool, middle: _Seconds
) -> tuple[Assumption, ...]:
    """Each assumption's part of the variance of log days, to first order, widest first."""
    rate = rate_of(groups)
    parts = [group.replicas * group.tokens_per_s / rate for group in groups]
    sds: dict[str, float] = {}
    told: dict[str, tuple[str, str, str]] = {}
    for part, group in zip(parts, groups, strict=True):
        for spread in group.spreads:
            sds[spread.name] = sds.get(spread.name, 0.0) + part * spread.log_sd
            told.setdefault(spread.name, (spread.value, spread.source, spread.measure))
    slowed = sum(
        part * group.elasticity_to_length for part, group in zip(parts, groups, strict=True)
    )
    sds["mean output length"] = work.relative_error * (1 - slowed)
    told["mean output length"] = (
        f"{work.tokens / work.completions:,.0f} tokens ± {100 * work.relative_error:.0f} %",
        work.source,
        "a pilot of some hundred prompts chosen at random, counted when all have finished",
    )
    sds["availability"] = math.log(availability.p90 / availability.p10) / 2 / P90_SDS
    told["availability"] = (
        f"{availability.p50:.2f} ({availability.p10:.2f} to {availability.p90:.2f})",
        "assumed: restarts, hangs, throttling and retries take the rest"
        if availability == AVAILABILITY
        else "the run so far",
        "the first day of the run, time that engines generate over time that passed",
    )
    sds = {name: sd * middle.generating_s / _whole_s(middle) for name, sd in sds.items()}
    if not started:
        sds["start-up"] = (CAPTURE_HIGH_S - CAPTURE_LOW_S) / math.sqrt(12) / _whole_s(middle)
        told["start-up"] = (
            f"{middle.start_s / 60:.0f} minutes ± 4",
            "assumed: graph capture and kernel tuning take 2 to 10 minutes",
            "one launch of the engine on the target card, timed",
        )
    return _shares(sds, told)


def _whole_s(middle: _Seconds) -> float:
    return middle.generating_s + middle.start_s


def _shares(
    sds: Mapping[str, float], told: Mapping[str, tuple[str, str, str]]
) -> tuple[Assumption, ...]:
    total = math.fsum(sd * sd for sd in sds.values())
    found = []
    for name, sd in sorted(sds.items(), key=lambda item: -abs(item[1])):
        value, source, measure = told[name]
        found.append(
            Assumption(
                name=name,
                value=value,
                source=source,
                variance_share=sd * sd / total if total else 0.0,
                measure=measure,
            )
        )
    return tuple(found)


# --- what is left ------------------------------------------------------------------------------


def remaining_work(
    num_completions: int, finished: int, running_tokens: Sequence[int], lengths: LengthModel
) -> Work:
    """What is yet to generate: all that wait, and what the running ones have not written."""
    waiting = max(num_completions - finished - len(running_tokens), 0)
    yet = math.fsum(mean_remaining(lengths.shape, tokens) for tokens in running_tokens)
    return Work(
        completions=waiting + len(running_tokens),
        tokens=waiting * lengths.summary.mean_tokens + yet,
        relative_error=lengths.summary.mean_relative_error,
        source=lengths.summary.source,
        shape=lengths.shape,
    )


def drawn_availability(normal: float, band: Band) -> float:
    """One draw whose p10, p50 and p90 are the band's, normal in the logit on either side."""
    if band.p10 == band.p90:
        return band.p50
    side = band.p10 if normal < 0 else band.p90
    width = abs(_logit(side) - _logit(band.p50)) / P90_SDS
    return _fraction(_logit(band.p50) + width * normal)


def availability_seen(generating_s: float, passed_s: float, prior: Band = AVAILABILITY) -> Band:
    """The prior and what a run has shown: engines' generating time over the time that passed."""
    hours = passed_s / 3600
    if hours <= 0:
        return prior
    weight = hours / (hours + _HOURS_OF_THE_PRIOR)
    middle = (1 - weight) * prior.p50 + weight * min(generating_s / passed_s, 1.0)
    narrower = math.sqrt(1 - weight)
    low = narrower * (_logit(prior.p10) - _logit(prior.p50))
    high = narrower * (_logit(prior.p90) - _logit(prior.p50))
    return Band(
        p10=_fraction(_logit(middle) + low), p50=middle, p90=_fraction(_logit(middle) + high)
    )


def _logit(fraction: float) -> float:
    fraction = min(max(fraction, 1e-6), 1 - 1e-6)
    return math.log(fraction / (1 - fraction))


def _fraction(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def tail_seconds(completions: float, groups: Sequence[RateGroup], shape: LengthShape) -> float:
    """What the last requests take beyond their work at full rate.

    When the queue is empty, B requests run. With a step that grows evenly from s (alone) to f
    (full batch), the last one ends after s E[longest remaining] + (f - s) E[remaining]; at full
    rate the same work takes f E[remaining]. The difference is s times what the longest remaining
    is over the mean. In a job shorter than its batches, all start at once and the longest of all
    completions is the last.
    """
    resident = sum(group.replicas * group.running_requests for group in groups)
    part = min(1.0, completions / resident)
    remaining = moment(shape, 1) if part < 1 else mean_emitted(shape)
    ends = []
    for group in groups:
        requests = max(group.replicas * group.running_requests * part, 1.0)
        longest = (longest_of if part < 1 else longest_remaining)(shape, requests)
        slower_s = max(group.running_requests / group.tokens_per_s - group.small_step_s, 0.0)
        ends.append(group.small_step_s * longest + slower_s * part * remaining)
    return max(max(ends) - resident * part * remaining / rate_of(groups), 0.0)


def static_shard_penalty(num_completions: int, shards: int, cv: float) -> float:
    """How much longer the slowest of equal random shards takes than the mean one.

    One queue costs nothing of this; a split of input sorted by topic costs tens of percent.
    The mean of the largest of k normals by Blom's approximation.
    """
    if shards < 2:
        return 0.0
    largest = NormalDist().inv_cdf((shards - 0.375) / (shards + 0.25))
    return largest * cv / math.sqrt(num_completions / shards)
