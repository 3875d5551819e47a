"""Distributions of output lengths: moments, survival, and the lengths of running requests.

Everything follows from one closed form: the moments of a length cut at any point. Lengths are in
tokens and end at the limit: no length is longer than it.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# The last bin has the longest 0.25 %.
_NUM_BINS = 400
_GRID = 600
_TINY = 1e-12
# Standard deviations beyond which the normal's tail equals its density over z.
_FAR_OUT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalCut:
    """Lengths whose logarithm is normal before the cut. Sigma 0: all are equal."""

    mu: float
    sigma: float
    limit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLengths:
    """A sample in ascending bins of about equal counts, each represented by its mean."""

    bin_means: tuple[float, ...]
    weights: tuple[float, ...]
    limit_tokens: int


LengthShape = LogNormalCut | SampledLengths


def binned(ascending: Sequence[float], limit_tokens: int) -> SampledLengths:
    """Return a sorted sample as bins."""
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
    """Return the mean of the lengths raised to a power."""
    return moment_cut_at(shape, power, shape.limit_tokens)


def cv_of(shape: LengthShape) -> float:
    """Return standard deviation over mean."""
    mean = moment(shape, 1)
    return math.sqrt(max(moment(shape, 2) / mean**2 - 1, 0.0))


def mean_cut_at(shape: LengthShape, tokens: float) -> float:
    """Return the mean of the lengths, each cut at `tokens`."""
    return moment_cut_at(shape, 1, tokens)


def moment_cut_at(shape: LengthShape, power: int, cut: float) -> float:
    """Return the mean of the lengths raised to a power, each cut at `cut` tokens or the limit."""
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
    """Return the fraction of a standard normal below z.

    `statistics.NormalDist.cdf` is 0 below z = -8.3; this is accurate in that tail too.
    """
    return math.erfc(-z / math.sqrt(2)) / 2


def log_of_normal_cdf(z: float) -> float:
    """Return the logarithm of `normal_cdf`, accurate even where that underflows to 0."""
    if z > -_FAR_OUT:
        return math.log(normal_cdf(z))
    return -z * z / 2 - math.log(-z * math.sqrt(2 * math.pi))


# --- one completion ----------------------------------------------------------------------------


def survival(shape: LengthShape, tokens: float) -> float:
    """Return the fraction of completions that are longer than `tokens`."""
    if tokens >= shape.limit_tokens:
        return 0.0
    if isinstance(shape, SampledLengths):
        return math.fsum(shape.weights[bisect_right(shape.bin_means, tokens) :])
    return _uncut_survival(shape, tokens)


def at_limit_fraction(shape: LengthShape) -> float:
    """Return the fraction of completions that the limit ends."""
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


# --- running requests --------------------------------------------------------------------------


def mean_remaining(shape: LengthShape, emitted_tokens: float) -> float:
    """Return the expected tokens left of a request that has generated `emitted_tokens`."""
    alive = survival(shape, emitted_tokens)
    if alive < _TINY:
        return 0.0
    return (moment(shape, 1) - mean_cut_at(shape, emitted_tokens)) / alive


def mean_emitted(shape: LengthShape) -> float:
    """Return the mean tokens so far of a running request, at a random moment of a long run.

    A long completion runs longer and is observed more often: E[o^2] / 2 E[o]. The tokens left have
    the same distribution, so this is their mean too.
    """
    return moment(shape, 2) / (2 * moment(shape, 1))


def longest_remaining(shape: LengthShape, running_requests: float) -> float:
    """Return the expected tokens left of the longest of the running requests, in a long run."""
    mean = moment(shape, 1)
    return _longest(shape, running_requests, lambda r: 1 - mean_cut_at(shape, r) / mean)


def longest_of(shape: LengthShape, completions: float) -> float:
    """Return the expected length of the longest of this many completions."""
    return _longest(shape, completions, lambda tokens: survival(shape, tokens))


def _longest(shape: LengthShape, count: float, longer: Callable[[float], float]) -> float:
    """Return the mean of the largest of `count` lengths, given the fraction above each length."""
    points = [shape.limit_tokens * (step / _GRID) ** 2 for step in range(_GRID + 1)]
    above = [1 - math.pow(1 - min(max(longer(point), 0.0), 1.0), count) for point in points]
    return sum(
        (points[step + 1] - points[step]) * (above[step] + above[step + 1]) / 2
        for step in range(_GRID)
    )
