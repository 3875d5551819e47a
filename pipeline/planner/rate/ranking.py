"""Search by speed: launches that fit, ranked by tokens/s per dollar, or by tokens/s.

Launches with and without MTP are each rated at the batch that their memory allows, so the requests
lost to verify states count against the accepted drafts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import PlanError
from pipeline.planner.lengths.lengths import LengthModel
from pipeline.planner.memory.plan import ExpectedLengths
from pipeline.planner.rate.errors import PIPELINE_SD
from pipeline.planner.rate.kernels import FITTED
from pipeline.planner.rate.replica import Replica, replica_of, replica_of_launch
from pipeline.planner.rate.running import Resident, occupancy, resident
from pipeline.planner.rate.search import (
    Candidate,
    FoundPlan,
    SearchQuery,
    best_candidates,
    planned,
)
from pipeline.planner.rate.throughput import Workload, chained_accept_length, rate_at
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.layout import parallel_of, requests_at_once
from schemas.estimate import RateCurve, RatePoint
from schemas.plan import Gpu, LaunchPlan, ModelFacts, NoSpeculation

_HIGHEST_BREAK_EVEN = 4096
# Stages must win by one standard deviation of their own error.
UNBACKED_SHARE = math.exp(-PIPELINE_SD)
_CURVE_POINTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Lengths of the requests; `accept_odds` of one drafted token where they are measured."""

    prompt_tokens_mean: float
    lengths: LengthModel
    accept_odds: float | None = None

    def workload(self) -> Workload:
        """Return the lengths that the steady state depends on."""
        summary = self.lengths.summary
        return Workload(
            prompt_tokens_mean=self.prompt_tokens_mean,
            output_tokens_mean=summary.mean_tokens,
            output_tokens_cv=summary.cv,
        )

    def expected(self) -> ExpectedLengths:
        """Return the lengths that the memory plan depends on."""
        return ExpectedLengths(
            prompt_tokens=round(self.prompt_tokens_mean),
            output_tokens=max(round(self.lengths.summary.mean_tokens), 1),
            output_tokens_cv=self.lengths.summary.cv,
            context_tokens=self.workload().context_tokens(),
            output_limit_tokens=self.lengths.summary.limit_tokens,
        )

    def accept_length(self, replica: Replica) -> float | None:
        """Return the tokens kept per verify step; None where that is not measured."""
        speculation = replica.settings.speculation
        if isinstance(speculation, NoSpeculation) or self.accept_odds is None:
            return None
        return chained_accept_length(self.accept_odds, speculation.num_draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedPlan:
    """A plan and its rate over all replicas.

    The price counts every card of the option, in use or not.
    """

    found: FoundPlan
    replica: Replica
    resident: Resident
    tokens_per_s: float
    usd_per_million_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedSearch:
    """Plans, and the comparison of MTP with no MTP."""

    plans: tuple[RatedPlan, ...]
    curves: tuple[RateCurve, ...]
    break_even_requests: int | None


def rated_search(
    query: SearchQuery,
    load: Load,
    *,
    usd_per_gpu_hour: Mapping[str, float] | None = None,
    most: int = 10,
) -> RatedSearch:
    """Rank the fastest plan of each shape, per dollar where every option has a price.

    Raises PlanError where no plan fits.
    """
    prices = usd_per_gpu_hour or {}
    priced = all(prices.get(option.gpu.name) for option in query.options)

    def rank(candidate: Candidate) -> float:
        option = candidate.hardware
        rate = candidate.replicas * ranking_rate(candidate, load)
        return rate / (option.count * prices[option.gpu.name]) if priced else rate

    lengths = load.expected()
    candidates = best_candidates(query, lengths, rank=rank)
    plans: list[RatedPlan] = []
    for candidate in candidates:
        found = planned(candidate, lengths, query.version)
        if found is not None:
            searched = not query.base.has("max-running-requests")
            plans.append(rated_plan(found, load, prices, limit_is_memory=searched))
        if len(plans) == most:
            break
    if not plans:
        raise PlanError(f"no plan fits {query.model.name} once its requests are held to what runs")
    curves, break_even = _mtp_comparison(candidates, plans[0], load)
    return RatedSearch(plans=tuple(plans), curves=curves, break_even_requests=break_even)


def ranking_rate(candidate: Candidate, load: Load) -> float:
    """Return tokens/s of one replica for ranking.

    No reading has pipeline stages, so their rate is lowered by their own error.
    """
    rate = _resident(candidate, load).rate.tokens_per_s
    return rate * UNBACKED_SHARE if candidate.launch.ranks.pp_size > 1 else rate


def rated_plan(
    found: FoundPlan, load: Load, prices: Mapping[str, float], *, limit_is_memory: bool
) -> RatedPlan:
    """Rate a plan at the requests that run; `prices` are by the name of the card."""
    replica = replica_of_launch(found.candidate.launch, FITTED)
    standing = _resident(found.candidate, load, limit_is_memory=limit_is_memory)
    rate = found.replicas * standing.rate.tokens_per_s
    price = prices.get(found.hardware.gpu.name)
    usd = None if price is None else price * found.hardware.count / (rate * 3600) * 1e6
    return RatedPlan(
        found=found,
        replica=replica,
        resident=standing,
        tokens_per_s=rate,
        usd_per_million_tokens=usd,
    )


def _resident(candidate: Candidate, load: Load, *, limit_is_memory: bool = False) -> Resident:
    replica = replica_of_launch(candidate.launch, FITTED)
    return resident(
        candidate.sized,
        replica,
        load.workload(),
        load.lengths.shape,
        accept_length=load.accept_length(replica),
        limit_is_memory=limit_is_memory,
    )


# --- MTP or none ------------------------------------------------------------------------------


def _mtp_comparison(
    candidates: tuple[Candidate, ...], best: RatedPlan, load: Load
) -> tuple[tuple[RateCurve, ...], int | None]:
    """Return tokens/s by running requests with MTP and without, on the best plan's ranks."""
    hardware, ranks = best.found.hardware, best.found.candidate.launch.ranks
    alike = [c for c in candidates if c.hardware == hardware and c.launch.ranks == ranks]
    off = next((c for c in alike if not _drafts(c)), None)
    on = next((c for c in alike if _drafts(c)), None)
    curves = tuple(_curve(c, load) for c in (off, on) if c is not None)
    if off is None or on is None:
        return curves, None
    return curves, _break_even(
        replica_of_launch(off.launch, FITTED), replica_of_launch(on.launch, FITTED), load
    )


def _drafts(candidate: Candidate) -> bool:
    return not isinstance(candidate.launch.settings.speculation, NoSpeculation)


def _curve(candidate: Candidate, load: Load) -> RateCurve:
    replica = replica_of_launch(candidate.launch, FITTED)
    cap = candidate.requests_a_replica
    steps = {round(cap ** (place / (_CURVE_POINTS - 1))) for place in range(_CURVE_POINTS)}
    return RateCurve(
        mtp=_drafts(candidate),
        cap_requests=cap,
        points=tuple(
            RatePoint(running_requests=count, tokens_per_s=_rate(replica, count, load))
            for count in sorted(steps)
        ),
    )


def _break_even(off: Replica, on: Replica, load: Load) -> int | None:
    """Find the running requests from which MTP is no faster, at equal batch."""

    def pays(count: int) -> bool:
        return _rate(on, count, load) > _rate(off, count, load)

    if not pays(1):
        return 1
    low, high = 1, 2
    while pays(high):
        low, high = high, 2 * high
        if high > _HIGHEST_BREAK_EVEN:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high


def _rate(replica: Replica, count: float, load: Load) -> float:
    rate = rate_at(replica, count, load.workload(), accept_length=load.accept_length(replica))
    return rate.tokens_per_s


def plan_tokens_per_s(plan: LaunchPlan, model: ModelFacts, gpu: Gpu, load: Load) -> float:
    """Rate a plan at its own cap; 0 where it runs no request.

    Raises PlanError for a card of unknown speed.
    """
    flags = parse_launch_line(plan.argv)
    ranks = parallel_of(flags)
    work = load.workload()
    held = int(plan.capacity.max_total_num_tokens / max(work.context_tokens(), 1.0))
    at_once = requests_at_once(
        plan.capacity.max_running_requests, ranks.pp_size, ranks.micro_batches,
        ranks.largest_micro_batch,
    )  # fmt: skip
    cap = min(at_once, held) * ranks.attention_dp_size
    if cap < 1:
        return 0.0
    replica = replica_of(model, plan.settings, gpu, flags, FITTED)
    accept = load.accept_length(replica)
    full = rate_at(replica, cap, work, accept_length=accept)
    running = cap * occupancy(full.prefill_share)
    return rate_at(replica, running, work, accept_length=accept).tokens_per_s
