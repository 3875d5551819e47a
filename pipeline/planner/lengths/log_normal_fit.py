"""Maximum-likelihood log-normal of completions, some of which are still running.

The length of a running request is only known to exceed its tokens so far; the same holds for one
that the limit ended. In theta = 1 / sigma and gamma = mu / sigma the log-likelihood is concave
(Olsen, Econometrica 46, 1978), so Newton's steps, halved where they overshoot, find its maximum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.planner.lengths.shapes import log_of_normal_cdf

_STEPS = 100
_HALVINGS = 40
# Fewer completions below the limit do not determine two parameters.
_LEAST_ENDED = 5
_SQRT_TWO_PI = math.sqrt(2 * math.pi)

# Pairs of tokens and number of requests.
Counts = Sequence[tuple[int, int]]
# Symmetric two by two: elements 11, 12 and 22.
Matrix = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalFit:
    """Mean and standard deviation of the logarithm before any cut, with their covariance."""

    mu: float
    sigma: float
    covariance: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class CensoredLogs:
    """Logarithms of lengths: sums over those that ended, and lower bounds of the others."""

    ended: int
    total: float
    squares: float
    longer_than: tuple[tuple[float, int], ...]


def log_normal_fit(ended: Counts, longer_than: Counts) -> LogNormalFit | None:
    """Fit lengths that ended and lower bounds of other lengths, each with its count.

    Return None where too few ended, or all at one length.
    """
    logs = [(math.log(max(tokens, 1)), count) for tokens, count in ended]
    num_ended = sum(count for _, count in logs)
    if num_ended < _LEAST_ENDED or max(logs)[0] - min(logs)[0] < 1e-9:
        return None
    sample = CensoredLogs(
        ended=num_ended,
        total=math.fsum(count * log for log, count in logs),
        squares=math.fsum(count * log * log for log, count in logs),
        longer_than=tuple((math.log(tokens), count) for tokens, count in longer_than if tokens > 1),
    )
    mean = sample.total / sample.ended
    width = math.sqrt(max(sample.squares / sample.ended - mean * mean, 1e-12))
    return _maximum(sample, theta=1 / width, gamma=mean / width)


def _maximum(sample: CensoredLogs, *, theta: float, gamma: float) -> LogNormalFit | None:
    value = _log_likelihood(sample, theta, gamma)
    for _ in range(_STEPS):
        slope, curve = _derivatives(sample, theta, gamma)
        step = _solved(curve, slope)
        gain = slope[0] * step[0] + slope[1] * step[1]
        if gain < 1e-10:
            return _fit(theta, gamma, curve)
        share = 1.0
        for _ in range(_HALVINGS):
            near = (theta + share * step[0], gamma + share * step[1])
            reached = _log_likelihood(sample, *near) if near[0] > 0 else -math.inf
            if reached >= value + 1e-4 * share * gain:
                break
            share /= 2
        else:
            return _fit(theta, gamma, curve)
        (theta, gamma), value = near, reached
    return None


def _log_likelihood(sample: CensoredLogs, theta: float, gamma: float) -> float:
    # The sum of (theta y - gamma)^2.
    distances = (
        theta**2 * sample.squares - 2 * theta * gamma * sample.total + sample.ended * gamma**2
    )
    total = sample.ended * math.log(theta) - distances / 2
    for log, count in sample.longer_than:
        total += count * log_of_normal_cdf(gamma - theta * log)
    return total


def _derivatives(
    sample: CensoredLogs, theta: float, gamma: float
) -> tuple[tuple[float, float], Matrix]:
    """Return the gradient in (theta, gamma) and the negative matrix of second derivatives."""
    slope_theta = sample.ended / theta - theta * sample.squares + gamma * sample.total
    slope_gamma = theta * sample.total - sample.ended * gamma
    curve = [sample.ended / theta**2 + sample.squares, -sample.total, float(sample.ended)]
    for log, count in sample.longer_than:
        z = theta * log - gamma
        hazard = _hazard(z)
        slope_theta -= count * hazard * log
        slope_gamma += count * hazard
        bend = count * hazard * (hazard - z)
        curve[0] += bend * log * log
        curve[1] -= bend * log
        curve[2] += bend
    return (slope_theta, slope_gamma), (curve[0], curve[1], curve[2])


def _fit(theta: float, gamma: float, curve: Matrix) -> LogNormalFit:
    """Return mu = gamma / theta and sigma = 1 / theta, with errors by the delta method."""
    inverse = _inverse(curve)
    to_mu = (-gamma / theta**2, 1 / theta)
    to_sigma = (-1 / theta**2, 0.0)
    return LogNormalFit(
        mu=gamma / theta,
        sigma=1 / theta,
        covariance=(
            _between(to_mu, inverse, to_mu),
            _between(to_mu, inverse, to_sigma),
            _between(to_sigma, inverse, to_sigma),
        ),
    )


# --- the normal's tail, and two by two ---------------------------------------------------------


def _hazard(z: float) -> float:
    """Return the normal's density over its upper tail at z."""
    return math.exp(-z * z / 2 - log_of_normal_cdf(-z)) / _SQRT_TWO_PI


def _inverse(matrix: Matrix) -> Matrix:
    first, cross, second = matrix
    determinant = first * second - cross * cross
    return (second / determinant, -cross / determinant, first / determinant)


def _solved(matrix: Matrix, vector: tuple[float, float]) -> tuple[float, float]:
    first, cross, second = _inverse(matrix)
    return (first * vector[0] + cross * vector[1], cross * vector[0] + second * vector[1])


def _between(left: tuple[float, float], matrix: Matrix, right: tuple[float, float]) -> float:
    first, cross, second = matrix
    turned = (first * right[0] + cross * right[1], cross * right[0] + second * right[1])
    return left[0] * turned[0] + left[1] * turned[1]
