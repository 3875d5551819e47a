"""Survival of completions by length, from finished and running requests together.

Kaplan and Meier's curve as far as enough requests reach, beyond it a fitted log-normal that is cut
at the limit. A running request counts as "longer than its tokens so far".
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipeline.planner.lengths.log_normal_fit import Counts, LogNormalFit, log_normal_fit
from pipeline.planner.lengths.shapes import (
    LengthShape,
    LogNormalCut,
    SampledLengths,
    at_limit_fraction,
    log_of_normal_cdf,
    mean_remaining,
    moment_cut_at,
    survival,
)

# The curve is used while at least this many requests are at risk. measured on replayed streams: 2
# to 40 do equally well on log-normal lengths; on others, fewer are better
_LEAST_AT_RISK = 2
# Real lengths have other tails than a log-normal: relative error of the tail beyond the curve.
# measured on replayed streams: without it the 95 % band holds 85 % after one batch
_TAIL_ERROR = 0.3
# assumed: while more than this share outlives the curve, finished requests cannot stand for them
FEW_OUTLIVE = 0.2
# Quantiles of the tail that the curve's shape gets.
_TAIL_LENGTHS = 16
_BISECTIONS = 40
# assumed: the tail is judged by the longest tenth, of at least this many
_LONGEST_SHARE, _LEAST_LONGEST = 0.1, 10
# assumed: a request beyond the curve writes on for one of these shares of the horizon
_AGAIN = (0.1, 0.25, 0.5, 1.0)
# Step in mu and sigma for slopes by difference.
_NUDGE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEstimate:
    """Lengths of all requests, estimated from the finished and running ones."""

    mean_tokens: float
    mean_relative_error: float
    """Standard error of the mean over the mean."""
    cv: float
    at_limit_fraction: float
    finished: int
    running: int
    shape: SampledLengths
    """The curve with its tail."""
    tail_share: float = 0.0
    """Fraction of completions that outlive the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLengths:
    """Requests by length: ended below the limit, or known to be longer."""

    ended: Counts
    longer_than: Counts
    """Running requests, and those that the limit ended."""
    finished: int
    running: int
    limit_tokens: int

    def fit(self) -> LogNormalFit | None:
        """Return the likeliest log-normal; None where too few have ended."""
        return log_normal_fit(self.ended, self.longer_than)


def observed_lengths(
    finished: Counter[int], running: Counter[int], limit_tokens: int
) -> ObservedLengths:
    """Return the requests by length; no length may exceed the limit."""
    at_limit = Counter({limit_tokens: finished[limit_tokens]})
    below = [(tokens, count) for tokens, count in finished.items() if tokens < limit_tokens]
    return ObservedLengths(
        ended=sorted(below),
        longer_than=sorted((at_limit + running).items()),
        finished=finished.total(),
        running=running.total(),
        limit_tokens=limit_tokens,
    )


def curve_estimate(
    observed: ObservedLengths, prior: LengthShape | None = None
) -> LengthEstimate | None:
    """Return the area under the curve and its tail; None while too few have finished.

    While many requests outlive the curve, the finished ones may be the short half of two kinds, so
    the tail is also the `prior`'s.
    """
    horizon = _horizon(observed)
    steps = _curve(observed, horizon)
    outliving = steps[-1].survival if steps else 1.0
    beyond: _Beyond | None = _NOTHING_BEYOND
    if horizon >= observed.limit_tokens:
        beyond = _AT_THE_LIMIT
    elif outliving > 0:
        fit = observed.fit()
        beyond = _beyond(fit, horizon, observed.limit_tokens) if fit else None
        excess = _excess_of_the_longest(observed, steps)
        if excess is not None and (fit is None or excess.is_likelier_than(fit)):
            beyond = excess.beyond(horizon, observed.limit_tokens)
        if beyond is None and outliving <= FEW_OUTLIVE:
            beyond = _as_long_again(horizon, observed.limit_tokens)
        if beyond is not None and prior is not None and outliving > FEW_OUTLIVE:
            beyond = _with_prior(beyond, prior, horizon)
    if beyond is None or not observed.finished:
        return None
    return _estimate(observed, steps, horizon, outliving, beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A length at which some requests ended."""

    tokens: int
    at_risk: int
    ended: int
    survival: float
    """Fraction of requests that are longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beyond:
    """Tokens beyond the horizon, of the requests that outlive it."""

    mean_tokens: float
    squares: float
    """E[o^2] minus the square of the horizon."""
    at_limit_fraction: float
    mean_variance: float
    lengths: tuple[float, ...] = ()
    """Lengths that represent equal shares of the tail."""


_NOTHING_BEYOND = _Beyond(mean_tokens=0.0, squares=0.0, at_limit_fraction=0.0, mean_variance=0.0)
_AT_THE_LIMIT = _Beyond(mean_tokens=0.0, squares=0.0, at_limit_fraction=1.0, mean_variance=0.0)


def _horizon(observed: ObservedLengths) -> int:
    """Return the longest length that enough requests have reached; the longest if none runs."""
    least_at_risk = _LEAST_AT_RISK if observed.running else 1
    reached = 0
    for tokens, count in sorted((*observed.ended, *observed.longer_than), reverse=True):
        reached += count
        if reached >= least_at_risk:
            return tokens
    return 0


def _curve(observed: ObservedLengths, horizon: int) -> list[_Step]:
    """Return Kaplan and Meier's product up to the horizon."""
    at_risk = observed.finished + observed.running
    alive, censored = 1.0, 0
    steps: list[_Step] = []
    for tokens, count in observed.ended:
        if tokens > horizon:
            break
        while censored < len(observed.longer_than) and observed.longer_than[censored][0] < tokens:
            at_risk -= observed.longer_than[censored][1]
            censored += 1
        alive *= 1 - count / at_risk
        steps.append(_Step(tokens=tokens, at_risk=at_risk, ended=count, survival=alive))
        at_risk -= count
    return steps


def _beyond(fit: LogNormalFit, horizon: float, limit_tokens: int) -> _Beyond | None:
    """Return the tail of the cut log-normal beyond the horizon; None where it is empty."""

    def excess(mu: float, sigma: float, power: int = 1) -> float:
        shape = LogNormalCut(mu=mu, sigma=sigma, limit_tokens=limit_tokens)
        whole = moment_cut_at(shape, power, limit_tokens)
        outliving = survival(shape, horizon)
        return (whole - moment_cut_at(shape, power, horizon)) / outliving if outliving else 0.0

    shape = LogNormalCut(mu=fit.mu, sigma=fit.sigma, limit_tokens=limit_tokens)
    outliving = survival(shape, horizon)
    if outliving < 1e-9:
        return None
    return _Beyond(
        mean_tokens=excess(fit.mu, fit.sigma),
        squares=excess(fit.mu, fit.sigma, 2),
        at_limit_fraction=survival(shape, limit_tokens * (1 - 1e-12)) / outliving,
        mean_variance=_variance(fit, excess),
        lengths=tuple(
            _length_at(shape, horizon, (place + 0.5) / _TAIL_LENGTHS * outliving)
            for place in reversed(range(_TAIL_LENGTHS))
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Excess:
    """Tokens beyond a threshold, of the requests that reach it: exponential with this mean.

    Lengths of two kinds of answers are no log-normal, and one that is fitted to both has a far
    longer tail than either.
    """

    threshold: int
    mean_tokens: float
    ended: Counts
    longer_than: Counts

    @property
    def num_ended(self) -> int:
        return sum(count for _, count in self.ended)

    def is_likelier_than(self, fit: LogNormalFit) -> bool:
        """Return whether it explains these requests better, its one more parameter counted."""
        passed = math.fsum(
            count * (tokens - self.threshold) for tokens, count in (*self.ended, *self.longer_than)
        )
        own = -self.num_ended * math.log(self.mean_tokens) - passed / self.mean_tokens
        return own - math.log(self.num_ended) / 2 > self._log_likelihood(fit)

    def _log_likelihood(self, fit: LogNormalFit) -> float:
        def z(tokens: int) -> float:
            return (math.log(tokens) - fit.mu) / fit.sigma

        total = math.fsum(
            count * (-(z(tokens) ** 2) / 2 - math.log(math.sqrt(2 * math.pi) * fit.sigma * tokens))
            for tokens, count in self.ended
        )
        total += math.fsum(
            count * log_of_normal_cdf(-z(tokens)) for tokens, count in self.longer_than
        )
        reached = self.num_ended + sum(count for _, count in self.longer_than)
        return total - reached * log_of_normal_cdf(-z(self.threshold))

    def beyond(self, horizon: float, limit_tokens: int) -> _Beyond:
        """Return the tail: beyond the horizon the excess starts anew."""
        room, mean = limit_tokens - horizon, self.mean_tokens
        at_limit = math.exp(-room / mean)
        lengths = tuple(
            horizon - mean * math.log(max(1 - (place + 0.5) / _TAIL_LENGTHS, at_limit))
            for place in range(_TAIL_LENGTHS)
        )
        return _Beyond(
            mean_tokens=mean * (1 - at_limit),
            squares=math.fsum(length**2 for length in lengths) / len(lengths) - horizon**2,
            at_limit_fraction=at_limit,
            mean_variance=mean**2 / self.num_ended,
            lengths=lengths,
        )


def _excess_of_the_longest(observed: ObservedLengths, steps: Sequence[_Step]) -> _Excess | None:
    """Return the excess of the longest tenth; None where too few of them have ended."""
    threshold = next((step.tokens for step in steps if step.survival <= _LONGEST_SHARE), None)
    if threshold is None:
        return None
    ended = [(tokens, count) for tokens, count in observed.ended if tokens > threshold]
    longer = [(tokens, count) for tokens, count in observed.longer_than if tokens > threshold]
    num_ended = sum(count for _, count in ended)
    if num_ended < _LEAST_LONGEST:
        return None
    passed = math.fsum(count * (tokens - threshold) for tokens, count in (*ended, *longer))
    return _Excess(
        threshold=threshold, mean_tokens=passed / num_ended, ended=ended, longer_than=longer
    )


def _length_at(shape: LengthShape, horizon: float, outliving: float) -> float:
    """Return the length beyond the horizon that this share of all completions outlives."""
    low, high = horizon, float(shape.limit_tokens)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if survival(shape, middle) > outliving else (low, middle)
    return high


def _with_prior(beyond: _Beyond, prior: LengthShape, horizon: float) -> _Beyond:
    """Return the mean of this tail and the prior's, and the doubt between the two."""
    outliving = survival(prior, horizon)
    if outliving < 1e-9:
        return beyond
    lengths = tuple(
        _length_at(prior, horizon, (place + 0.5) / _TAIL_LENGTHS * outliving)
        for place in range(_TAIL_LENGTHS)
    )
    mean = mean_remaining(prior, horizon)
    squares = math.fsum(length**2 for length in lengths) / len(lengths) - horizon**2
    return _Beyond(
        mean_tokens=(beyond.mean_tokens + mean) / 2,
        squares=(beyond.squares + squares) / 2,
        at_limit_fraction=(beyond.at_limit_fraction + at_limit_fraction(prior) / outliving) / 2,
        mean_variance=beyond.mean_variance / 4 + ((beyond.mean_tokens - mean) / 2) ** 2,
        lengths=tuple(sorted((*beyond.lengths, *lengths))),
    )


def _as_long_again(horizon: float, limit_tokens: int) -> _Beyond:
    """Return the tail where no log-normal can be fitted: on average about half as long again."""
    room = max(limit_tokens - horizon, 0.0)
    lengths = tuple(horizon + min(part * horizon, room) for part in _AGAIN)
    mean = math.fsum(lengths) / len(lengths) - horizon
    return _Beyond(
        mean_tokens=mean,
        squares=math.fsum(length**2 for length in lengths) / len(lengths) - horizon**2,
        at_limit_fraction=sum(length >= limit_tokens for length in lengths) / len(lengths),
        mean_variance=mean**2,
        lengths=lengths,
    )


def _variance(fit: LogNormalFit, figure: Callable[[float, float], float]) -> float:
    """Return the variance of a function of mu and sigma, to first order in their errors."""
    by_mu = (figure(fit.mu + _NUDGE, fit.sigma) - figure(fit.mu - _NUDGE, fit.sigma)) / 2 / _NUDGE
    by_sigma = (figure(fit.mu, fit.sigma + _NUDGE) - figure(fit.mu, fit.sigma - _NUDGE)) / (
        2 * _NUDGE
    )
    first, cross, second = fit.covariance
    return by_mu**2 * first + 2 * by_mu * by_sigma * cross + by_sigma**2 * second


def _estimate(
    observed: ObservedLengths,
    steps: Sequence[_Step],
    horizon: float,
    outliving: float,
    beyond: _Beyond,
) -> LengthEstimate:
    """Return the area under curve and tail, with Greenwood's variance and that of the tail."""
    edges = [0.0, *(float(step.tokens) for step in steps), horizon]
    heights = [1.0, *(step.survival for step in steps)]
    pieces = [height * (edges[index + 1] - edges[index]) for index, height in enumerate(heights)]
    squares = math.fsum(
        height * (edges[index + 1] ** 2 - edges[index] ** 2) for index, height in enumerate(heights)
    )
    tail = outliving * beyond.mean_tokens
    mean = math.fsum(pieces) + tail
    # Area to the right of each step, summed from the last step backwards.
    right = list(accumulate([tail, *reversed(pieces[1:])]))[1:][::-1]
    # The more completions outlive the curve, the less is known about their lengths.
    tail_error = _TAIL_ERROR + (1 - _TAIL_ERROR) * outliving
    variance = outliving**2 * beyond.mean_variance + (tail_error * tail) ** 2
    for area, step in zip(right, steps, strict=True):
        if step.at_risk > step.ended:
            variance += area**2 * step.ended / (step.at_risk * (step.at_risk - step.ended))
    second = squares + outliving * beyond.squares
    return LengthEstimate(
        mean_tokens=mean,
        mean_relative_error=math.sqrt(variance) / mean if mean else 0.0,
        cv=math.sqrt(max(second / mean**2 - 1, 0.0)) if mean else 0.0,
        at_limit_fraction=outliving * beyond.at_limit_fraction,
        finished=observed.finished,
        running=observed.running,
        shape=_shape(observed.limit_tokens, steps, outliving, beyond),
        tail_share=outliving,
    )


def _shape(
    limit_tokens: int, steps: Sequence[_Step], outliving: float, beyond: _Beyond
) -> SampledLengths:
    """Return the curve as lengths with weights, its tail included."""
    heights = [1.0, *(step.survival for step in steps)]
    pairs = [
        (float(step.tokens), before - after)
        for step, (before, after) in zip(steps, pairwise(heights), strict=True)
    ]
    tail = beyond.lengths or (float(limit_tokens),)
    pairs += [(length, outliving / len(tail)) for length in tail]
    weighted = [(length, weight) for length, weight in pairs if weight > 0]
    return SampledLengths(
        bin_means=tuple(length for length, _ in weighted),
        weights=tuple(weight for _, weight in weighted),
        limit_tokens=limit_tokens,
    )
