"""Lengths of completions: stated by the user, by a prior, or from a sample.

Mean and CV are always those of the completions as generated, cut at the limit. What a length costs
is in `contexts` and `job_time`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.errors import PlanError
from pipeline.planner.lengths.shapes import (
    LengthShape,
    LogNormalCut,
    at_limit_fraction,
    binned,
    cv_of,
    moment,
)
from schemas.estimate import OutputLengths

# Mean and CV before the cut at the limit, where none is stated. assumed: with thinking about what
# the first benchmark of this project implies (2,529 tokens); without thinking about a page
_PRIOR_THINKING = (2500.0, 1.2)
_PRIOR_PLAIN = (500.0, 1.0)
# assumed: models and prompts of one kind differ from the prior by a third either way
PRIOR_MEAN_ERROR = 0.35
# assumed: a stated mean comes from a run on similar prompts
STATED_MEAN_ERROR = 0.10
# Fewer lengths than this do not determine their own spread: the error of their mean assumes at
# least the CV of the plain prior.
_FEW_LENGTHS = 30
# Wider than this, nearly all lengths are either one token or at the limit.
_MAX_SIGMA = 5.0
# Standard deviations from the mean to the longest of many completions.
_LONGEST_SDS = 6
_BISECTIONS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """The figures that are printed, and the distribution that calculations use."""

    summary: OutputLengths
    shape: LengthShape


def output_lengths(
    mean_tokens: float,
    cv: float,
    limit_tokens: int,
    source: str,
    *,
    mean_relative_error: float = STATED_MEAN_ERROR,
) -> LengthModel:
    """Return the lengths of a stated mean and CV."""
    shape = log_normal_cut(mean_tokens, cv, limit_tokens)
    # A mean cannot exceed the limit.
    most = limit_tokens / mean_tokens - 1
    return _model(shape, min(mean_relative_error, most), source)


def configured_lengths(
    mean_tokens: float | None, cv: float | None, *, thinking: bool, limit_tokens: int, source: str
) -> LengthModel:
    """Return the lengths that a run file states, with the prior for what it omits."""
    if mean_tokens is None and cv is None:
        return prior_lengths(thinking=thinking, limit_tokens=limit_tokens)
    usual_mean, usual_cv = _PRIOR_THINKING if thinking else _PRIOR_PLAIN
    return output_lengths(
        usual_mean if mean_tokens is None else mean_tokens,
        usual_cv if cv is None else cv,
        limit_tokens,
        source,
    )


def longest_output(
    mean_tokens: float | None, cv: float | None, max_tokens: int, *, max_tokens_given: bool
) -> int:
    """Return the limit to plan for: a default of `max_tokens` must not cut the stated lengths."""
    if mean_tokens is None or max_tokens_given:
        return max_tokens
    spread = _PRIOR_THINKING[1] if cv is None else cv
    return max(max_tokens, round(mean_tokens * (1 + _LONGEST_SDS * spread)))


def prior_lengths(*, thinking: bool, limit_tokens: int) -> LengthModel:
    """Return the lengths where none are stated: the prior, cut at the limit."""
    _check_limit(limit_tokens)
    mean, cv = _PRIOR_THINKING if thinking else _PRIOR_PLAIN
    variance = math.log1p(cv * cv)
    shape = LogNormalCut(
        mu=math.log(mean) - variance / 2, sigma=math.sqrt(variance), limit_tokens=limit_tokens
    )
    mode = "thinking" if thinking else "not thinking"
    source = f"assumed: {mode}, mean {mean:,.0f} and CV {cv:g} before the limit cuts them"
    # Completions at the limit keep their length if the prior is wrong.
    ended = limit_tokens * at_limit_fraction(shape) / moment(shape, 1)
    return _model(shape, PRIOR_MEAN_ERROR * max(1 - ended, 0.0), source)


def lengths_from_sample(lengths: Iterable[int], limit_tokens: int, source: str) -> LengthModel:
    """Return the lengths of a pilot or a column; the limit cuts the longer ones."""
    _check_limit(limit_tokens)
    cut = sorted(min(length, limit_tokens) for length in lengths)
    if len(cut) < 2:
        raise PlanError(f"{source}: {len(cut)} completion lengths found, at least 2 expected")
    if cut[0] < 0:
        raise PlanError(f"{source}: a completion of {cut[0]} tokens found, 0 or more expected")
    mean = sum(cut) / len(cut)
    if mean == 0:
        raise PlanError(f"{source}: {len(cut)} completions of 0 tokens found, some text expected")
    variance = math.fsum((length - mean) ** 2 for length in cut) / (len(cut) - 1)
    cv = math.sqrt(variance) / mean
    least_cv = _PRIOR_PLAIN[1] if len(cut) < _FEW_LENGTHS else 0.0
    summary = OutputLengths(
        mean_tokens=mean,
        cv=cv,
        limit_tokens=limit_tokens,
        at_limit_fraction=cut.count(limit_tokens) / len(cut),
        mean_relative_error=max(cv, least_cv) / math.sqrt(len(cut)),
        source=source,
    )
    return LengthModel(summary=summary, shape=binned(cut, limit_tokens))


def _model(shape: LogNormalCut, mean_relative_error: float, source: str) -> LengthModel:
    summary = OutputLengths(
        mean_tokens=moment(shape, 1),
        cv=cv_of(shape),
        limit_tokens=shape.limit_tokens,
        at_limit_fraction=at_limit_fraction(shape),
        mean_relative_error=mean_relative_error,
        source=source,
    )
    return LengthModel(summary=summary, shape=shape)


# --- the log-normal of a stated mean and CV ----------------------------------------------------


def log_normal_cut(mean_tokens: float, cv: float, limit_tokens: int) -> LogNormalCut:
    """Return the log-normal that has this mean and CV after the cut. Raises PlanError."""
    _check_limit(limit_tokens)
    if not 0 < mean_tokens <= limit_tokens:
        raise PlanError(
            f"output lengths: a mean of {mean_tokens:,.0f} tokens found, more than 0 and at most "
            f"the limit of {limit_tokens:,} expected"
        )
    if not cv >= 0:
        raise PlanError(f"output lengths: a CV of {cv:g} found, 0 or more expected")
    if cv == 0:
        return LogNormalCut(mu=math.log(mean_tokens), sigma=0.0, limit_tokens=limit_tokens)
    widest = _widest_cv(mean_tokens, limit_tokens)
    if cv > widest:
        raise PlanError(
            f"output lengths: a CV of {cv:g} found; a mean of {mean_tokens:,.0f} under a limit of "
            f"{limit_tokens:,} tokens leaves at most {widest:.2f}"
        )

    def cv_at(sigma: float) -> float:
        return cv_of(_with_mean(mean_tokens, sigma, limit_tokens))

    return _with_mean(mean_tokens, _root(cv_at, cv, 1e-6, _MAX_SIGMA), limit_tokens)


def nearest_log_normal_cut(mean_tokens: float, cv: float, limit_tokens: int) -> LogNormalCut:
    """Return the log-normal of a measured mean, with the CV lowered where none has both."""
    widest = _widest_cv(mean_tokens, limit_tokens)
    return log_normal_cut(mean_tokens, min(cv, widest), limit_tokens)


def _check_limit(limit_tokens: int) -> None:
    if limit_tokens < 1:
        raise PlanError(
            f"output lengths: a limit of {limit_tokens} found, 1 token or more expected"
        )


def _widest_cv(mean_tokens: float, limit_tokens: int) -> float:
    """Return the largest CV under the limit: the nearer the mean is to it, the smaller."""
    if mean_tokens >= limit_tokens:
        return 0.0
    return cv_of(_with_mean(mean_tokens, _MAX_SIGMA, limit_tokens))


def _with_mean(mean_tokens: float, sigma: float, limit_tokens: int) -> LogNormalCut:
    """Return the log-normal of this width that has this mean after the cut."""

    def shape(mu: float) -> LogNormalCut:
        return LogNormalCut(mu=mu, sigma=sigma, limit_tokens=limit_tokens)

    # The cut only shortens, so mu is at least that of an uncut mean. Nine sigma above the limit,
    # all but nothing is at the limit.
    lowest = math.log(mean_tokens) - sigma * sigma / 2 - 1e-9
    highest = math.log(limit_tokens) + 9 * sigma
    return shape(_root(lambda mu: moment(shape(mu), 1), mean_tokens, lowest, highest))


def _root(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return the point where a rising function reaches the target, by bisection."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2
