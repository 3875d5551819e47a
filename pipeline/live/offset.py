"""How far the true rate lies from the predicted one, learned from measured points.

The logarithm of true over predicted is one unknown offset of an engine, a card and a setting. It is
0 before any reading, within the prediction's own error. A reading tells it the better, the nearer
its running requests are to those that are asked about.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# How much more two points of one setting differ, the further apart their running requests are:
# (ratio up to, sd of the logarithm). fitted: readings of one setting at several running requests,
# held against a prediction that is anchored at one of them; median 0.3, 5, 8 and 13 %
_SAME = 1.1
_DISTANCE_SDS = ((_SAME, 0.02), (2.0, 0.08), (4.0, 0.13), (math.inf, 0.20))
# Two batches whose ratio is at least this are two points on a line.
_APART = 1.3
# With the slope measured too, a point outside the measured ones is better known than from one
# alone. assumed: half of the error that the distance makes there
_KNOWN_SLOPE = 0.5
_LEAST_SD = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """One measured point beside its prediction."""

    running_requests: float
    tokens_per_s: float
    predicted_tokens_per_s: float
    independent: float = math.inf
    """Independent looks in it; infinite for the mean of a whole benchmark run."""

    def log_ratio(self) -> float:
        """Of measured over predicted."""
        return math.log(self.tokens_per_s / self.predicted_tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """A normal distribution of the logarithm of true over predicted."""

    mean: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What some readings together say of the offset."""

    mean: float
    variance: float


def anchored(anchor: MeasuredRate, target_running_requests: float, *, prior_sd: float) -> Offset:
    """The offset at some running requests, from one measured point."""
    return rate_offset([anchor], target_running_requests, prior_sd=prior_sd, look_sd=0.0)


def rate_offset(
    measured: Sequence[MeasuredRate],
    target_running_requests: float,
    *,
    prior_sd: float,
    look_sd: float,
    predicted_at_target: float | None = None,
) -> Offset:
    """The average of 0 and what the readings say, each weighed by its precision.

    `look_sd` is the noise of one independent look. Readings at two batches, where the prediction
    at the target is given, make a line of their own and the predicted slope is dropped.
    """
    line = None
    if predicted_at_target is not None:
        line = _on_the_line(measured, target_running_requests, predicted_at_target, look_sd)
    looks = [line] if line else _by_distance(measured, target_running_requests, look_sd)
    looks.append(_Look(mean=0.0, variance=max(prior_sd, _LEAST_SD) ** 2))
    precision = math.fsum(1 / look.variance for look in looks)
    weighted = math.fsum(look.mean / look.variance for look in looks)
    return Offset(mean=weighted / precision, sd=math.sqrt(1 / precision))


def _by_distance(measured: Sequence[MeasuredRate], target: float, look_sd: float) -> list[_Look]:
    """One look for each class of distance: what the distance hides, many readings hide too."""
    looks = []
    for distance_sd in sorted({_distance_sd(point, target) for point in measured}):
        near = [point for point in measured if _distance_sd(point, target) == distance_sd]
        mean, noise = _mean_ratio(near, look_sd)
        looks.append(_Look(mean=mean, variance=distance_sd**2 + noise))
    return looks


def _distance_sd(point: MeasuredRate, target: float) -> float:
    ratio = max(point.running_requests / target, target / point.running_requests)
    return next(sd for up_to, sd in _DISTANCE_SDS if ratio <= up_to)


def _mean_ratio(points: Sequence[MeasuredRate], look_sd: float) -> tuple[float, float]:
    """Mean log ratio, each point weighed by its looks, and the variance that noise leaves it."""
    whole = [point for point in points if math.isinf(point.independent)]
    if whole:
        return math.fsum(point.log_ratio() for point in whole) / len(whole), 0.0
    looks = math.fsum(point.independent for point in points)
    mean = math.fsum(point.independent * point.log_ratio() for point in points) / looks
    return mean, look_sd**2 / looks


# --- two batches make a line -------------------------------------------------------------------


def _on_the_line(
    measured: Sequence[MeasuredRate], target: float, predicted_at_target: float, look_sd: float
) -> _Look | None:
    """Seconds a token t = a + d b through what was measured; None where that is no line."""
    if not measured:
        return None
    low = min(point.running_requests for point in measured)
    high = max(point.running_requests for point in measured)
    if high < _APART * low:
        return None
    base_s, slope_s = _line([(p.running_requests, p.tokens_per_s, p.independent) for p in measured])
    if base_s < 0 or slope_s < 0 or base_s + slope_s * target <= 0:
        return None
    rate = target / (base_s + slope_s * target)
    middle = math.sqrt(low * high)
    ends = ([p for p in measured if (p.running_requests > middle) == upper] for upper in (0, 1))
    noise = max(_mean_ratio(end, look_sd)[1] for end in ends)
    # Beyond the measured ends, the noise of the two is stretched with the line.
    noise *= max(abs(target - (low + high) / 2) / ((high - low) / 2), 1.0) ** 2
    inside = low / _SAME <= target <= high * _SAME
    nearest = min(_distance_sd(point, target) for point in measured)
    distance_sd = _DISTANCE_SDS[0][1] if inside else max(_KNOWN_SLOPE * nearest, 0.02)
    return _Look(mean=math.log(rate / predicted_at_target), variance=distance_sd**2 + noise)


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Least squares of relative errors, each point (b, tokens/s, looks) weighed by its looks."""
    most = max((looks for *_, looks in points if math.isfinite(looks)), default=1.0)
    ones = sums = squares = ends = products = 0.0
    for running, rate, looks in points:
        seconds = running / rate
        weight = min(looks, most) / seconds**2
        ones += weight
        sums += weight * running
        squares += weight * running**2
        ends += weight * seconds
        products += weight * running * seconds
    slope = (ones * products - sums * ends) / (ones * squares - sums**2)
    return (ends - slope * sums) / ones, slope
