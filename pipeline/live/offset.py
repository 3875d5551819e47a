"""The offset of the true rate from the predicted one, estimated from measured points.

The logarithm of true over predicted rate is one unknown offset per engine, card and setting. Before
any reading it is 0 within the prediction's own error. A reading says more about it, the nearer its
running requests are to those of the target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# How far two points of one setting differ beyond the prediction, by the ratio of their running
# requests: (ratio up to, sd of the logarithm). fitted: readings of one setting at several running
# requests against a prediction anchored at one of them; median 0.3, 5, 8 and 13 %
_SAME = 1.1
_DISTANCE_SDS = ((_SAME, 0.02), (2.0, 0.08), (4.0, 0.13), (math.inf, 0.20))
# Two batches with at least this ratio define a line.
_APART = 1.3
# With the slope measured too, a point outside the measured ones is better known than from a single
# one. assumed: half the error that the distance causes there
_KNOWN_SLOPE = 0.5
_LEAST_SD = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """A measured point and its prediction."""

    running_requests: float
    tokens_per_s: float
    predicted_tokens_per_s: float
    independent: float = math.inf
    """Independent readings in it; infinite for the mean of a whole benchmark run."""

    def log_ratio(self) -> float:
        """Return the logarithm of measured over predicted."""
        return math.log(self.tokens_per_s / self.predicted_tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """A normal distribution of the logarithm of true over predicted."""

    mean: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """An estimate of the offset from some of the readings."""

    mean: float
    variance: float


def rate_offset(
    measured: Sequence[MeasuredRate],
    target_running_requests: float,
    *,
    prior_sd: float,
    reading_sd: float,
    predicted_at_target: float | None = None,
) -> Offset:
    """Return the average of 0 and the readings' estimates, weighted by their precision.

    `reading_sd` is the noise of one independent reading. Where `predicted_at_target` is given,
    readings at two batches define a line that replaces the predicted slope.
    """
    line = None
    if predicted_at_target is not None:
        line = _on_the_line(measured, target_running_requests, predicted_at_target, reading_sd)
    evidence = [line] if line else _by_distance(measured, target_running_requests, reading_sd)
    evidence.append(_Evidence(mean=0.0, variance=max(prior_sd, _LEAST_SD) ** 2))
    precision = math.fsum(1 / each.variance for each in evidence)
    weighted = math.fsum(each.mean / each.variance for each in evidence)
    return Offset(mean=weighted / precision, sd=math.sqrt(1 / precision))


def _by_distance(
    measured: Sequence[MeasuredRate], target: float, reading_sd: float
) -> list[_Evidence]:
    """Return one estimate per class of distance: more readings do not reduce its error."""
    evidence = []
    for distance_sd in sorted({_distance_sd(point, target) for point in measured}):
        near = [point for point in measured if _distance_sd(point, target) == distance_sd]
        mean, noise = _mean_ratio(near, reading_sd)
        evidence.append(_Evidence(mean=mean, variance=distance_sd**2 + noise))
    return evidence


def _distance_sd(point: MeasuredRate, target: float) -> float:
    ratio = max(point.running_requests / target, target / point.running_requests)
    return next(sd for up_to, sd in _DISTANCE_SDS if ratio <= up_to)


def _mean_ratio(points: Sequence[MeasuredRate], reading_sd: float) -> tuple[float, float]:
    """Return the mean log ratio, weighted by independent readings, and its variance from noise."""
    whole = [point for point in points if math.isinf(point.independent)]
    if whole:
        return math.fsum(point.log_ratio() for point in whole) / len(whole), 0.0
    readings = math.fsum(point.independent for point in points)
    mean = math.fsum(point.independent * point.log_ratio() for point in points) / readings
    return mean, reading_sd**2 / readings


# --- two batches define a line -----------------------------------------------------------------


def _on_the_line(
    measured: Sequence[MeasuredRate], target: float, predicted_at_target: float, reading_sd: float
) -> _Evidence | None:
    """Fit seconds per token t = a + d b to the measured points; None where that is no line."""
    if not measured:
        return None
    low = min(point.running_requests for point in measured)
    high = max(point.running_requests for point in measured)
    if high < _APART * low:
        return None
    base_s, slope_s = _line(measured)
    if base_s < 0 or slope_s < 0 or base_s + slope_s * target <= 0:
        return None
    rate = target / (base_s + slope_s * target)
    middle = math.sqrt(low * high)
    ends = ([p for p in measured if (p.running_requests > middle) == upper] for upper in (0, 1))
    noise = max(_mean_ratio(end, reading_sd)[1] for end in ends)
    # Beyond the measured ends, the noise of the two grows with the line.
    noise *= max(abs(target - (low + high) / 2) / ((high - low) / 2), 1.0) ** 2
    inside = low / _SAME <= target <= high * _SAME
    nearest = min(_distance_sd(point, target) for point in measured)
    distance_sd = _DISTANCE_SDS[0][1] if inside else max(_KNOWN_SLOPE * nearest, 0.02)
    return _Evidence(mean=math.log(rate / predicted_at_target), variance=distance_sd**2 + noise)


def _line(measured: Sequence[MeasuredRate]) -> tuple[float, float]:
    """Return base and slope by least squares of relative errors, weighted by readings."""
    most = max((p.independent for p in measured if math.isfinite(p.independent)), default=1.0)
    ones = sums = squares = ends = products = 0.0
    for point in measured:
        running = point.running_requests
        seconds = running / point.tokens_per_s
        weight = min(point.independent, most) / seconds**2
        ones += weight
        sums += weight * running
        squares += weight * running**2
        ends += weight * seconds
        products += weight * running * seconds
    slope = (ones * products - sums * ends) / (ones * squares - sums**2)
    return (ends - slope * sums) / ones, slope
