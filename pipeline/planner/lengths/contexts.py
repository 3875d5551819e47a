"""Contexts of running requests: prompt and tokens so far, at a random moment.

A long completion runs longer, so a random moment shows more of the long ones than a list of
completions does: the mean context follows from the length bias, not from half the mean length.
"""

import math

from pipeline.planner.lengths.shapes import LengthShape, moment

# 99 % quantile of a standard normal.
_P99 = 2.3263


def retraction_risk(
    pool_tokens: float, running_requests: float, shape: LengthShape, prompt_mean_tokens: float
) -> bool:
    """Return True if the KV pool overflows more than 1 % of the time.

    SGLang then retracts requests. How often depends on what the engine reserves before it admits
    one, by a factor of ten and more, so the lengths alone give no rate.
    """
    return p99_of_summed_contexts(running_requests, shape, prompt_mean_tokens) > pool_tokens


def p99_of_summed_contexts(
    running_requests: float, shape: LengthShape, prompt_mean_tokens: float
) -> float:
    """Return the 99 % quantile over time of the tokens that the running requests hold together.

    It is above what CV / sqrt(b) gives: tokens so far have a longer tail than the lengths, and are
    skewed (first term of Cornish and Fisher's expansion).
    """
    # Tokens so far at a random moment have the moments E[o^(k+1)] / ((k+1) E[o]).
    first, second, third = (
        moment(shape, power + 1) / ((power + 1) * moment(shape, 1)) for power in (1, 2, 3)
    )
    mean = running_requests * (prompt_mean_tokens + first)
    variance = running_requests * max(second - first**2, 0.0)
    central_third = running_requests * (third - 3 * first * second + 2 * first**3)
    if variance <= 0:
        return mean
    width = math.sqrt(variance)
    skew = central_third / width**3
    return mean + width * (_P99 + skew * (_P99**2 - 1) / 6)
