"""Job time on one hardware option: days, GPU-hours, and what widens their band.

    T = N E[o] / (rate x u) + T_start + T_tail

An option is a sum of replica groups fed from one queue, so its rate is a sum and only its last
requests make a tail. This module knows neither how a rate was found nor what an hour costs.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from pipeline.errors import PlanError
from pipeline.planner.lengths.curve import SurvivalCurve
from pipeline.planner.lengths.lengths import LengthModel
from pipeline.planner.lengths.shapes import (
    LengthShape,
    longest_of,
    longest_remaining,
    mean_emitted,
    moment,
)
from pipeline.planner.rate.errors import RateGroup, rate_of
from schemas.estimate import Assumption, Band
from schemas.units import P90_SDS, SECONDS_PER_DAY

# assumed, until a run shows its own: 0.95, and 0.88 to 0.98 in eight cases out of ten. In the logit
# the three are evenly spaced: 1.99, 2.94, 3.89.
AVAILABILITY = Band(p10=0.88, p50=0.95, p90=0.98)
# assumed: a run is interrupted about every half day, so that much evidence equals the prior
_HOURS_OF_THE_PRIOR = 12.0

DRAWS = 4000
_SEED = 20_261_130
# assumed: graph capture and kernel tuning last two to ten minutes, by model and release
CAPTURE_LOW_S, CAPTURE_HIGH_S = 120.0, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """Time of the whole job on one option, and what widens it."""

    tokens_per_s: Band
    """Tokens per second of all groups, before availability."""
    days: Band
    gpu_hours: Band
    start_hours: float
    tail_hours: float
    restart_hours: float
    """Hours that an availability below 1 costs at the p50."""
    assumptions: tuple[Assumption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens still to generate, and how well they are known."""

    completions: float
    tokens: float
    relative_error: float
    source: str
    shape: LengthShape


def whole_job(num_completions: int, lengths: LengthModel) -> Work:
    """Return the work of the whole job. Raises PlanError without completions."""
    if num_completions < 1:
        raise PlanError(f"completions: found {num_completions}; expected 1 or more")
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
    """Return the bands of days and hours. A job that has `started` has paid its start."""
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
        assumptions=_assumptions(work, groups, availability, started, middle),
    )


def time_assumptions(
    work: Work, groups: Sequence[RateGroup], *, availability: Band, started: bool
) -> tuple[Assumption, ...]:
    """Return what widens the band of `job_time`, without the band."""
    _check(work, groups)
    middle = _seconds(work, groups, availability, started)
    return _assumptions(work, groups, availability, started, middle)


def _check(work: Work, groups: Sequence[RateGroup]) -> None:
    if not work.tokens > 0:
        raise PlanError(f"job time: found {work.tokens:g} tokens to generate; expected more than 0")
    for group in groups:
        if group.replicas < 1 or not group.tokens_per_s > 0:
            raise PlanError(
                f"{group.name}: found {group.replicas} replicas at {group.tokens_per_s:g} "
                "tokens/s; expected more than 0 of both"
            )
    if not groups:
        raise PlanError("job time: found no group of replicas; expected 1 or more")


# --- the middle case ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seconds:
    """Seconds of one case, by part."""

    generating_s: float
    start_s: float


def start_seconds(groups: Sequence[RateGroup], capture_s: float) -> float:
    """Return seconds lost to starting, each group weighted by its share of the rate."""
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


def band_of(values: Iterable[float]) -> Band:
    """Return the p10, p50 and p90 of the values."""
    ascending = sorted(values)

    def at(fraction: float) -> float:
        place = fraction * (len(ascending) - 1)
        low = math.floor(place)
        high = math.ceil(place)
        return ascending[low] + (place - low) * (ascending[high] - ascending[low])

    return Band(p10=at(0.1), p50=at(0.5), p90=at(0.9))


def _draws(
    work: Work, groups: Sequence[RateGroup], availability: Band, started: bool, tail_s: float
) -> list[tuple[float, float]]:
    """Return the job's seconds and tokens/s for each draw of everything that is uncertain."""
    usual_rate = rate_of(groups)
    drawn = []
    for cast in _casts(tuple(heavy_tailed_by_name(groups).items())):
        longer = work.relative_error * cast.longer_sds
        rates = [
            group.replicas
            * group.tokens_per_s
            * math.exp(log_rate_factor(group, cast.luck, longer))
            for group in groups
        ]
        rate = sum(rates)
        start_s = 0.0 if started else start_seconds(groups, cast.capture_s)
        u = drawn_availability(cast.availability_sds, availability)
        generating_s = work.tokens * math.exp(longer) / rate / u
        drawn.append((generating_s + start_s + tail_s * usual_rate / rate, rate))
    return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cast:
    """Throw of the dice: the luck of each spread by name, and of what all jobs share."""

    luck: Mapping[str, float]
    longer_sds: float
    capture_s: float
    availability_sds: float


# The options of one estimate differ in their rates, hardly ever in the names of their spreads.
@lru_cache(maxsize=4)
def _casts(heavy_tailed: tuple[tuple[str, bool], ...]) -> tuple[_Cast, ...]:
    random = Random(_SEED)  # noqa: S311 - draws of a band, no secret
    return tuple(
        _Cast(
            luck=luck_of(dict(heavy_tailed), random),
            longer_sds=random.gauss(0, 1),
            capture_s=random.uniform(CAPTURE_LOW_S, CAPTURE_HIGH_S),
            availability_sds=random.gauss(0, 1),
        )
        for _ in range(DRAWS)
    )


def heavy_tailed_by_name(groups: Sequence[RateGroup]) -> dict[str, bool]:
    """Return for each spread of the groups whether its luck has heavy tails."""
    return {spread.name: spread.heavy_tailed for group in groups for spread in group.spreads}


def luck_of(heavy_tailed: Mapping[str, bool], random: Random) -> dict[str, float]:
    """Draw the luck of every spread by name, in standard deviations."""
    return {name: _luck(random, is_heavy) for name, is_heavy in heavy_tailed.items()}


def log_rate_factor(group: RateGroup, luck: Mapping[str, float], longer: float) -> float:
    """Return the logarithm of a group's rate over the usual one, at this luck and mean length."""
    spread = math.fsum(spread.log_sd * luck[spread.name] for spread in group.spreads)
    return spread + group.elasticity_to_length * longer


def _luck(random: Random, heavy_tailed: bool) -> float:
    """Draw with standard deviation 1 from a normal, or from Student's t with 4 degrees of freedom.

    The t distribution's own standard deviation is root 2.
    """
    normal = random.gauss(0, 1)
    if not heavy_tailed:
        return normal
    return normal / math.sqrt(random.gammavariate(2, 2) / 4) / math.sqrt(2)


# --- what widens the band ----------------------------------------------------------------------


def _assumptions(
    work: Work, groups: Sequence[RateGroup], availability: Band, started: bool, middle: _Seconds
) -> tuple[Assumption, ...]:
    """Return each assumption's share of the variance of log days, to first order, widest first."""
    rate = rate_of(groups)
    parts = [group.replicas * group.tokens_per_s / rate for group in groups]
    sds: dict[str, float] = {}
    texts: dict[str, tuple[str, str, str]] = {}
    for part, group in zip(parts, groups, strict=True):
        for spread in group.spreads:
            sds[spread.name] = sds.get(spread.name, 0.0) + part * spread.log_sd
            texts.setdefault(spread.name, (spread.value, spread.source, spread.measure))
    slowed = sum(
        part * group.elasticity_to_length for part, group in zip(parts, groups, strict=True)
    )
    sds["mean output length"] = work.relative_error * (1 - slowed)
    texts["mean output length"] = (
        f"{work.tokens / work.completions:,.0f} tokens ± {100 * work.relative_error:.0f} %",
        work.source,
        "a pilot of a few hundred random prompts, counted once all have finished",
    )
    sds["availability"] = math.log(availability.p90 / availability.p10) / 2 / P90_SDS
    texts["availability"] = (
        f"{availability.p50:.2f} ({availability.p10:.2f} to {availability.p90:.2f})",
        "assumed: restarts, hangs, throttling and retries use up the rest"
        if availability == AVAILABILITY
        else "the run so far",
        "the first day of the run: engine time spent generating over elapsed time",
    )
    sds = {name: sd * middle.generating_s / _whole_s(middle) for name, sd in sds.items()}
    if not started:
        sds["start-up"] = (CAPTURE_HIGH_S - CAPTURE_LOW_S) / math.sqrt(12) / _whole_s(middle)
        texts["start-up"] = (
            f"{middle.start_s / 60:.0f} minutes ± 4",
            "assumed: graph capture and kernel tuning last 2 to 10 minutes",
            "one launch of the engine on the target card, timed",
        )
    return _shares(sds, texts)


def _whole_s(middle: _Seconds) -> float:
    return middle.generating_s + middle.start_s


def _shares(
    sds: Mapping[str, float], texts: Mapping[str, tuple[str, str, str]]
) -> tuple[Assumption, ...]:
    total = math.fsum(sd * sd for sd in sds.values())
    found = []
    for name, sd in sorted(sds.items(), key=lambda item: -abs(item[1])):
        value, source, measure = texts[name]
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
    """Return the work left: waiting completions, and the rest of the running ones."""
    waiting = max(num_completions - finished - len(running_tokens), 0)
    curve, rest = SurvivalCurve.of(lengths.shape), 0.0
    for tokens, count in Counter(running_tokens).items():
        rest += 0.0 if curve.is_beyond(tokens) else count * curve.mean_left(tokens)
    return Work(
        completions=waiting + len(running_tokens),
        tokens=waiting * lengths.summary.mean_tokens + rest,
        relative_error=lengths.summary.mean_relative_error,
        source=lengths.summary.source,
        shape=lengths.shape,
    )


def drawn_availability(normal: float, band: Band) -> float:
    """Map a standard normal draw to an availability with the band's p10, p50 and p90.

    On either side of the median the logit is normal.
    """
    if band.p10 == band.p90:
        return band.p50
    side = band.p10 if normal < 0 else band.p90
    width = abs(_logit(side) - _logit(band.p50)) / P90_SDS
    return _fraction(_logit(band.p50) + width * normal)


def availability_seen(generating_s: float, passed_s: float, prior: Band = AVAILABILITY) -> Band:
    """Combine the prior with what a run has shown: generating time over elapsed time."""
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


# A draw asks for the logits of its band, thousands of times the same three.
@lru_cache(maxsize=16)
def _logit(fraction: float) -> float:
    fraction = min(max(fraction, 1e-6), 1 - 1e-6)
    return math.log(fraction / (1 - fraction))


def _fraction(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def tail_seconds(completions: float, groups: Sequence[RateGroup], shape: LengthShape) -> float:
    """Return the extra seconds of the last requests over the same work at full rate.

    When the queue is empty, B requests run. If the step time grows linearly from s (alone) to f
    (full batch), the last request ends after s E[longest remaining] + (f - s) E[remaining]; at
    full rate the same work lasts f E[remaining]. The difference is s times the longest remaining
    length over the mean. In a job shorter than its batches all requests start at once, and the
    longest completion ends last.
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
