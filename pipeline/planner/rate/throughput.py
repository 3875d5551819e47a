"""Tokens/s of one replica at a number of running requests, with its error.

Prefill uses device time that decoding loses: with b requests running, each needs one prefill and
its share of the decode steps, so

    requests per second = 1 / (prefill_s + output_tokens * step_s / (b * accept_length))

With pipeline stages a prompt costs less than its time through them: see `stages`. `running`
decides how many requests run.
"""

import math
from dataclasses import dataclass
from functools import cache

from pipeline.planner.rate.errors import RateClass, RateEvidence, rate_spreads
from pipeline.planner.rate.replica import Replica
from pipeline.planner.rate.stages import prefill_taken_s
from pipeline.planner.rate.step_time import decode_step, prefill_s, turns
from schemas.estimate import Band, StepParts, Support
from schemas.plan import NoSpeculation

# assumed: a chain of 4 draft tokens in thinking mode at temperature 1 keeps 2.6 per step (2.2 to
# 3.0). Random prompts on GB300 measure 3.2 (SGLang cookbook, 2026-08).
ASSUMED_ACCEPT_LENGTH = 2.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths in tokens that the steady state depends on."""

    prompt_tokens_mean: float
    output_tokens_mean: float
    output_tokens_cv: float

    def context_tokens(self) -> float:
        """Return the mean context of a running request.

        Long requests are overrepresented: E[p] + E[o] (1 + CV^2) / 2 for independent lengths.
        """
        grown = self.output_tokens_mean * (1 + self.output_tokens_cv**2) / 2
        return self.prompt_tokens_mean + grown


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Steady state of one replica.

    `prefill_share` is of the device time; `log_sd` is the error of log tokens/s at this number of
    running requests; `support` are the readings that the rate stands on.
    """

    running_requests: float
    step: StepParts
    accept_length: float
    prefill_share: float
    tokens_per_s: float
    tokens_per_s_per_gpu: Band
    log_sd: float
    model_log_sd: float
    """The part of `log_sd` that is the rate model's own."""
    rate_class: RateClass
    support: tuple[Support, ...]


def rate_at(
    replica: Replica,
    running_requests: float,
    workload: Workload,
    *,
    accept_length: float | None = None,
    release_measured: bool = True,
) -> Rate:
    """Find the steady state with N requests running on one replica."""
    speculative = not isinstance(replica.settings.speculation, NoSpeculation)
    kept = accept_length or (assumed_accept_length(replica) if speculative else 1.0)
    step = decode_step(replica, running_requests, workload.context_tokens())
    decode = workload.output_tokens_mean * step.step_s() / (running_requests * kept)
    prefill = prompt_cost_s(replica, running_requests, workload, step.step_s(), kept)
    tokens_per_s = workload.output_tokens_mean / (prefill + decode)
    gpus = replica.ranks.tp_size * replica.ranks.pp_size
    model_log_sd = replica.offsets.log_sd(time_shares(step, prefill / (prefill + decode)))
    evidence = RateEvidence(
        model_log_sd=model_log_sd,
        support=replica.offsets.support,
        cap_logged=True,
        accept_length=kept if speculative else None,
        accept_measured=accept_length is not None,
        release=replica.settings.release,
        release_measured=release_measured,
        stages=replica.ranks.pp_size,
    )
    sd = math.sqrt(sum(spread.log_sd**2 for spread in rate_spreads(evidence)))
    return Rate(
        running_requests=running_requests,
        step=step,
        accept_length=kept,
        prefill_share=prefill / (prefill + decode),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=log_band(tokens_per_s / gpus, sd),
        log_sd=sd,
        model_log_sd=model_log_sd,
        rate_class=replica.rate_class,
        support=replica.offsets.support,
    )


def time_shares(step: StepParts, prefill_share: float) -> tuple[float, ...]:
    """Return the shares of the time of `PARTS`: weights, attention, …, prefill."""
    # Stages that wait do so in proportion to the other parts.
    part = (1 - prefill_share) / (step.step_s() - step.idle_s)
    return (
        part * (step.dense_s + step.experts_s + step.draft_s),
        part * step.attention_s,
        part * step.overhead_s,
        part * (step.communication_s + step.hand_over_s),
        prefill_share,
    )


def prompt_cost_s(
    replica: Replica, running_requests: float, workload: Workload, step_s: float, kept: float
) -> float:
    """Return the seconds of the replica's decoding that one prompt costs."""
    chunk = replica.settings.chunked_prefill_size
    if replica.ranks.pp_size == 1:
        ending = running_requests * kept / workload.output_tokens_mean
        return prefill_s(replica, workload.prompt_tokens_mean, _together(replica, workload, ending))
    alone_s = prefill_s(replica, workload.prompt_tokens_mean)
    micro_batches = turns(replica, running_requests)
    return prefill_taken_s(
        alone_s=alone_s,
        chunks=math.ceil(workload.prompt_tokens_mean / chunk) if chunk > 0 else 1,
        stages=replica.ranks.pp_size,
        micro_batches=micro_batches,
        step_s=step_s,
        ending=running_requests * kept / (micro_batches * workload.output_tokens_mean),
    )


def _together(replica: Replica, workload: Workload, ending: float) -> float:
    """Return how many prompts are prefilled at once where `ending` requests end in a step."""
    chunk = replica.settings.chunked_prefill_size * replica.ranks.attention_dp_size
    if chunk > 0 and workload.prompt_tokens_mean > 0:
        ending = min(ending, chunk / workload.prompt_tokens_mean)
    return max(ending, 1.0)


def assumed_accept_length(replica: Replica) -> float:
    """Return the assumed number of tokens kept per verify step."""
    if isinstance(replica.settings.speculation, NoSpeculation):
        return 1.0
    odds = accept_odds(ASSUMED_ACCEPT_LENGTH, 4)
    return chained_accept_length(odds, replica.settings.speculation.num_draft_tokens)


def chained_accept_length(odds: float, num_draft_tokens: int) -> float:
    """Return the tokens kept per step if each drafted token is kept with the same odds."""
    return sum(odds**place for place in range(num_draft_tokens))


@cache
def accept_odds(accept_length: float, num_draft_tokens: int) -> float:
    """Solve for the odds with which a chain keeps `accept_length` tokens per step."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        kept = chained_accept_length(middle, num_draft_tokens)
        low, high = (middle, high) if kept < accept_length else (low, middle)
    return (low + high) / 2


# --- how sure ---------------------------------------------------------------------------------

# The p90 of a Student t with 4 degrees of freedom, scaled to a standard deviation of 1:
# 1.533 / sqrt(4 / (4 - 2)). Errors have heavier tails than a normal's.
P90_DEVIATIONS = 1.084


def log_band(middle: float, log_sd: float) -> Band:
    """Return the 80 % band around a median whose logarithm has this error."""
    factor = math.exp(P90_DEVIATIONS * log_sd)
    return Band(p10=middle / factor, p50=middle, p90=middle * factor)
