"""What running requests hold: prompt and what is written so far, seen at a random moment.

A long completion runs longer, so a moment sees more of the long ones than a list of completions
does: the mean context follows from the length bias, not from half the mean length.
"""

import math
from collections.abc import Iterable

from pipeline.errors import PlanError
from pipeline.planner.lengths.shapes import LengthShape, mean_emitted, moment

_P99 = 2.3263  # of a standard normal


def mean_context_tokens(prompt_mean_tokens: float, shape: LengthShape) -> float:
    """E[p] + E[o] (1 + CV^2) / 2, where prompts and completions vary apart from each other."""
    return prompt_mean_tokens + mean_emitted(shape)


def mean_context_of_pairs(pairs: Iterable[tuple[int, int]]) -> float:
    """E[p o] / E[o] + E[o^2] / 2 E[o], of (prompt, completion) tokens that belong together.

    A long prompt that gets a long answer weighs more than its number says.
    """
    both = outputs = squares = 0
    for prompt_tokens, output_tokens in pairs:
        both += prompt_tokens * output_tokens
        outputs += output_tokens
        squares += output_tokens**2
    if outputs <= 0:
        raise PlanError("lengths: pairs of prompt and completion with no completion token found")
    return (both + squares / 2) / outputs


def p99_of_summed_contexts(
    running_requests: float,
    shape: LengthShape,
    prompt_mean_tokens: float,
    prompt_cv: float = 0.0,
) -> float:
    """Tokens that so many running requests hold together, in the fullest of 100 moments.

    Wider than CV / sqrt(b) says: what a moment sees of the lengths is itself longer-tailed than
    the lengths, and skewed (Cornish-Fisher's first term).
    """
    mean, variance, third = _summed(running_requests, shape, prompt_mean_tokens, prompt_cv)
    if variance <= 0:
        return mean
    width = math.sqrt(variance)
    skew = third / width**3
    return mean + width * (_P99 + skew * (_P99**2 - 1) / 6)


def retraction_risk(
    pool_tokens: float,
    running_requests: float,
    shape: LengthShape,
    prompt_mean_tokens: float,
    prompt_cv: float = 0.0,
) -> bool:
    """Whether the KV pool runs out in more than one of 100 moments.

    How often a request is then given up hangs on what the engine reserves before it admits one,
    by a factor of ten and more: no rate is told from the lengths alone.
    """
    held = p99_of_summed_contexts(running_requests, shape, prompt_mean_tokens, prompt_cv)
    return held > pool_tokens


def _summed(
    running_requests: float, shape: LengthShape, prompt_mean_tokens: float, prompt_cv: float
) -> tuple[float, float, float]:
    """Mean, variance and third central moment of the sum over independent running requests."""
    # What a moment sees written has moments E[o^(k+1)] / ((k+1) E[o]).
    first, second, third = (
        moment(shape, power + 1) / ((power + 1) * moment(shape, 1)) for power in (1, 2, 3)
    )
    variance = max(second - first**2, 0.0)
    central_third = third - 3 * first * second + 2 * first**3
    prompt_variance = (prompt_mean_tokens * prompt_cv) ** 2
    return (
        running_requests * (prompt_mean_tokens + first),
        running_requests * (variance + prompt_variance),
        running_requests * central_third,
    )
