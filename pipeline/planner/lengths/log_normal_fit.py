"""The log-normal that best explains completions of which some still run: maximum likelihood.

A running request says that its length is more than what it has written; so does one that the
limit ended. In theta = 1 / sigma and gamma = mu / sigma the log-likelihood is concave (Olsen,
Econometrica 46, 1978), so that Newton's steps, halved where they go too far, find its one top.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.planner.lengths.shapes import log_of_normal_cdf

_STEPS = 100
_HALVINGS = 40
_LEAST_ENDS = 5  # ends below the limit; fewer do not fix two figures
_SQRT_TWO_PI = math.sqrt(2 * math.pi)

Counts = Sequence[tuple[int, int]]  # tokens, and how many requests
Matrix = tuple[float, float, float]  # of two by two, symmetric: 11, 12, 22


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalFit:
    """Mu and sigma of the logarithm before any cut, and the covariance of their errors."""

    mu: float
    sigma: float
    covariance: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class CensoredLogs:
    """Logarithms: of ends by count, sum and sum of squares, of what is longer by value."""

    ends: int
    total: float
    squares: float
    longer_than: tuple[tuple[float, int], ...]


def log_normal_fit(ended: Counts, longer_than: Counts) -> LogNormalFit | None:
    """The fit to lengths that ended and lengths that are known to be longer, each with its count.

    None where too few ended, or all at one length.
    """
    logs = [(math.log(max(tokens, 1)), count) for tokens, count in ended]
    ends = sum(count for _, count in logs)
    if ends < _LEAST_ENDS or max(logs)[0] - min(logs)[0] < 1e-9:
        return None
    seen = CensoredLogs(
        ends=ends,
        total=math.fsum(count * log for log, count in logs),
        squares=math.fsum(count * log * log for log, count in logs),
        longer_than=tuple((math.log(tokens), count) for tokens, count in longer_than if tokens > 1),
    )
    mean = seen.total / seen.ends
    width = math.sqrt(max(seen.squares / seen.ends - mean * mean, 1e-12))
    return _top(seen, theta=1 / width, gamma=mean / width)


def _top(seen: CensoredLogs, *, theta: float, gamma: float) -> LogNormalFit | None:
    value = _log_likelihood(seen, theta, gamma)
    for _ in range(_STEPS):
        slope, curve = _derivatives(seen, theta, gamma)
        step = _solved(curve, slope)
        gain = slope[0] * step[0] + slope[1] * step[1]
        if gain < 1e-10:
            return _fit(theta, gamma, curve)
        share = 1.0
        for _ in range(_HALVINGS):
            near = (theta + share * step[0], gamma + share * step[1])
            reached = _log_likelihood(seen, *near) if near[0] > 0 else -math.inf
            if reached >= value + 1e-4 * share * gain:
                break
            share /= 2
        else:
            return _fit(theta, gamma, curve)
        (theta, gamma), value = near, reached
    return None


def _log_likelihood(seen: CensoredLogs, theta: float, gamma: float) -> float:
    of_ends = (
        theta**2 * seen.squares - 2 * theta * gamma * seen.total + seen.ends * gamma**2
    )  # the sum of (theta y - gamma)^2
    total = seen.ends * math.log(theta) - of_ends / 2
    for log, count in seen.longer_than:
        total += count * log_of_normal_cdf(gamma - theta * log)
    return total


def _derivatives(
    seen: CensoredLogs, theta: float, gamma: float
) -> tuple[tuple[float, float], Matrix]:
    """The gradient in (theta, gamma), and the matrix of second derivatives with its sign turned."""
    slope_theta = seen.ends / theta - theta * seen.squares + gamma * seen.total
    slope_gamma = theta * seen.total - seen.ends * gamma
    curve = [seen.ends / theta**2 + seen.squares, -seen.total, float(seen.ends)]
    for log, count in seen.longer_than:
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
    """Mu = gamma / theta and sigma = 1 / theta, their errors by the delta method."""
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
    """Density over what lies above."""
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
