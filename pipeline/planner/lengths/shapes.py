"""A distribution of written lengths, and what is asked of it.

Everything comes from one closed form: the moments of a length cut at any point. Lengths are in
tokens and end at the limit; a length at the limit is longer than none.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

_NUM_BINS = 400  # the last one holds the longest 0.25 %
_GRID = 600
_TINY = 1e-12
_FAR_OUT = 30.0  # standard deviations, where the normal's tail is its density over z


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalCut:
    """Lengths whose logarithm is normal before the limit cuts them. Sigma 0: all are equal."""

    mu: float
    sigma: float
    limit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLengths:
    """A sample in ascending bins of about equal counts, each held by its mean."""

    bin_means: tuple[float, ...]
    weights: tuple[float, ...]
    limit_tokens: int


LengthShape = LogNormalCut | SampledLengths


def binned(ascending: Sequence[float], limit_tokens: int) -> SampledLengths:
    """A sorted sample, small enough to keep."""
    count = min(_NUM_BINS, len(ascending))
    edges = [len(ascending) * index // count for index in range(count + 1)]
    spans = list(pairwise(edges))
    return SampledLengths(
        bin_means=tuple(sum(ascending[low:high]) / (high - low) for low, high in spans),
        weights=tuple((high - low) / len(ascending) for low, high in spans),
        limit_tokens=limit_tokens,
    )


# --- moments -----------------------------------------------------------------------------------


def moment(shape: LengthShape, power: int) -> float:
    """The mean of the lengths raised to a power."""
    return moment_cut_at(shape, power, shape.limit_tokens)


def cv_of(shape: LengthShape) -> float:
    """Standard deviation over mean."""
    mean = moment(shape, 1)
    return math.sqrt(max(moment(shape, 2) / mean**2 - 1, 0.0))


def mean_cut_at(shape: LengthShape, tokens: float) -> float:
    """The mean of what lies within the first so many tokens of each completion."""
    return moment_cut_at(shape, 1, tokens)


def moment_cut_at(shape: LengthShape, power: int, cut: float) -> float:
    """The mean of the power of the lengths, each cut at so many tokens (at most the limit)."""
    cut = min(cut, shape.limit_tokens)
    if cut <= 0:
        return 0.0
    if isinstance(shape, SampledLengths):
        pairs = zip(shape.bin_means, shape.weights, strict=True)
        return math.fsum(weight * min(mean, cut) ** power for mean, weight in pairs)
    if shape.sigma == 0:
        return min(math.exp(shape.mu), cut) ** power
    # E[min(X, c)^k] = e^(k mu + k^2 sigma^2 / 2) Phi(z - k sigma) + c^k Phi(-z), z of c.
    z = (math.log(cut) - shape.mu) / shape.sigma
    spread = power * shape.sigma
    below = math.exp(power * shape.mu + spread * spread / 2 + log_of_normal_cdf(z - spread))
    return below + cut**power * normal_cdf(-z)


def normal_cdf(z: float) -> float:
    """The part of a standard normal that lies below z."""
    return math.erfc(-z / math.sqrt(2)) / 2


def log_of_normal_cdf(z: float) -> float:
    """Its logarithm, which is there where the part itself is too small to be told from 0."""
    if z > -_FAR_OUT:
        return math.log(normal_cdf(z))
    return -z * z / 2 - math.log(-z * math.sqrt(2 * math.pi))


# --- one completion ----------------------------------------------------------------------------


def survival(shape: LengthShape, tokens: float) -> float:
    """The fraction of completions that are longer than so many tokens."""
    if tokens >= shape.limit_tokens:
        return 0.0
    if isinstance(shape, SampledLengths):
        return math.fsum(shape.weights[bisect_right(shape.bin_means, tokens) :])
    return _uncut_survival(shape, tokens)


def at_limit_fraction(shape: LengthShape) -> float:
    """The fraction of completions that the limit ends."""
    if isinstance(shape, SampledLengths):
        first = bisect_right(shape.bin_means, shape.limit_tokens - _TINY * shape.limit_tokens)
        return math.fsum(shape.weights[first:])
    return _uncut_survival(shape, shape.limit_tokens * (1 - _TINY))


def _uncut_survival(shape: LogNormalCut, tokens: float) -> float:
    if tokens <= 0:
        return 1.0
    if shape.sigma == 0:
        return float(math.exp(shape.mu) > tokens)
    return normal_cdf((shape.mu - math.log(tokens)) / shape.sigma)


def sampled_length(shape: LengthShape, random: Random) -> float:
    """One length, drawn."""
    if isinstance(shape, SampledLengths):
        return random.choices(shape.bin_means, shape.weights)[0]
    return min(math.exp(random.gauss(shape.mu, shape.sigma)), float(shape.limit_tokens))


# --- requests that run -------------------------------------------------------------------------


def mean_remaining(shape: LengthShape, emitted_tokens: float) -> float:
    """What one request is expected to write yet, having written so much."""
    alive = survival(shape, emitted_tokens)
    if alive < _TINY:
        return 0.0
    return (moment(shape, 1) - mean_cut_at(shape, emitted_tokens)) / alive


def mean_emitted(shape: LengthShape) -> float:
    """What a running request has written, at a random moment of a long run.

    A long completion runs longer and is seen more often: E[o^2] / 2 E[o]. What it has yet to
    write has the same distribution, so this is the mean of that too.
    """
    return moment(shape, 2) / (2 * moment(shape, 1))


def longest_remaining(shape: LengthShape, running_requests: float) -> float:
    """What the last of so many running requests is expected to write yet, in a long run."""
    mean = moment(shape, 1)
    return _longest(shape, running_requests, lambda r: 1 - mean_cut_at(shape, r) / mean)


def longest_of(shape: LengthShape, completions: float) -> float:
    """The expected length of the longest of so many completions."""
    return _longest(shape, completions, lambda tokens: survival(shape, tokens))


def _longest(shape: LengthShape, count: float, longer: Callable[[float], float]) -> float:
    """The mean of the largest of `count` lengths, from the fraction that is longer than any."""
    points = [shape.limit_tokens * (step / _GRID) ** 2 for step in range(_GRID + 1)]
    above = [1 - math.pow(1 - min(max(longer(point), 0.0), 1.0), count) for point in points]
    return sum(
        (points[step + 1] - points[step]) * (above[step] + above[step + 1]) / 2
        for step in range(_GRID)
    )
