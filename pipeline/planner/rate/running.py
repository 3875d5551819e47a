"""Requests that one replica runs: the cap set by memory, and the part of it that decodes.

The cap is the smallest of three: the engine's own limit, the requests with state slots, and the
requests of mean context that fit in the KV pool. It affects the rate more than any kernel does.
"""

from dataclasses import dataclass

from pipeline.planner.lengths.contexts import retraction_risk
from pipeline.planner.lengths.shapes import LengthShape
from pipeline.planner.memory.sizing import Sized
from pipeline.planner.rate.replica import Replica
from pipeline.planner.rate.throughput import Rate, Workload, rate_at
from schemas.plan import LinearState, ModelFacts, SlidingCache

# Share of the cap that decodes at once, by prefill's share of device time: requests in prefill
# occupy a place and produce no token. measured: 0.68-0.81 on ten SGLang cells of 8,192 / 1,024
# tokens, where prefill uses about half of the time; 0.91 on one of short prompts
# (SGLang cookbook, 0.5.15-0.5.16 and 2026-08)
_FULL = 0.95
_LOST_A_PREFILL_SHARE = 0.40


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Requests of one replica in the steady state, and their rate."""

    cap_requests: int
    running_requests: float
    limited_by: str
    retraction_risk: bool
    rate: Rate


def cap_of(sized: Sized, model: ModelFacts, context_tokens: float) -> tuple[int, str]:
    """Return the requests that one attention rank runs, and what limits them."""
    context = max(context_tokens, 1.0)
    limits = [(sized.at_once, sized.limited_by), (int(sized.pool.tokens / context), "KV pool")]
    if isinstance(model.cache, SlidingCache) and sized.pool.swa_tokens:
        window = min(context, model.cache.window_tokens)
        limits.append((int(sized.pool.swa_tokens / max(window, 1.0)), "window pool"))
    return min(limits, key=lambda limit: limit[0])


def resident(
    sized: Sized,
    replica: Replica,
    workload: Workload,
    shape: LengthShape,
    *,
    accept_length: float | None = None,
    limit_is_memory: bool = False,
) -> Resident:
    """Find the steady state of a replica with these pools. At least one request must fit.

    With `limit_is_memory` the engine's limit was set to what fits in memory.
    """
    ranks = replica.ranks.attention_dp_size
    each, limited_by = cap_of(sized, replica.model, workload.context_tokens())
    if limit_is_memory and limited_by == "max_running_requests":
        linear = isinstance(replica.model.state, LinearState)
        limited_by = "state slots and KV pool" if linear else "KV pool"
    cap = each * ranks
    full = rate_at(replica, cap, workload, accept_length=accept_length)
    running = max(cap * occupancy(full.prefill_share), min(cap, 1.0))
    return Resident(
        cap_requests=cap,
        running_requests=running,
        limited_by=limited_by,
        retraction_risk=retraction_risk(
            sized.pool.tokens, running / ranks, shape, workload.prompt_tokens_mean
        ),
        rate=rate_at(replica, running, workload, accept_length=accept_length),
    )


def occupancy(prefill_share: float) -> float:
    """Return the share of the cap that decodes, by prefill's share of device time."""
    return _FULL - _LOST_A_PREFILL_SHARE * prefill_share
