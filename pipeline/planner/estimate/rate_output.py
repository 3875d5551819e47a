"""Rates as JSON and as text: one point, and the plans that a search ranks by speed.

The JSON keys are the interface of `jobs.estimate --point --json` and `jobs.plan RUN.yaml --json`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.planner.estimate.figures import milliseconds, span, step_parts, support, two_figures
from pipeline.planner.memory.plan_output import plan_json, plan_text
from pipeline.planner.rate.ranking import UNBACKED_SHARE, Load, RatedPlan, RatedSearch
from pipeline.planner.rate.throughput import Rate
from schemas.estimate import StepParts, Support
from schemas.plan import LaunchPlan
from schemas.units import GIB

_SEARCH_HEAD = (
    f"  {'usd/M':>7}  {'tokens/s':>9}  {'by rate':>7}  {'running':>8}  {'replicas':>8}  "
    f"{'left GiB':>8}  hardware and flags"
)


def step_json(step: StepParts) -> dict[str, float]:
    """Return the parts of a step by name, in seconds."""
    return {name.removesuffix("_s"): seconds for name, seconds in asdict(step).items()}


# --- one point --------------------------------------------------------------------------------


def point_json(rate: Rate) -> dict[str, Any]:
    """Return the rate at one point as plain values."""
    return {
        "running_requests_per_replica": rate.running_requests,
        "step_s": rate.step.step_s(),
        "step_parts_s": step_json(rate.step),
        "accept_length": rate.accept_length,
        "prefill_share": rate.prefill_share,
        "tokens_per_s_per_replica": rate.tokens_per_s,
        "tokens_per_s_per_gpu": asdict(rate.tokens_per_s_per_gpu),
        "rate_class": rate.rate_class,
        "log_sd": rate.log_sd,
        "readings": [asdict(support) for support in rate.support],
    }


def point_text(rate: Rate) -> str:
    """Return the rate at one point, its step, prefill and band, a line each."""
    band = rate.tokens_per_s_per_gpu
    parts = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in step_parts(rate.step))
    return "\n".join(
        (
            f"tokens/s per GPU  {two_figures(band.p50)} ({span(band)}, p10-p90)",
            f"step              {milliseconds(rate.step.step_s())}: {parts}",
            f"prefill           {rate.prefill_share:.0%} of device time",
            f"band              {rate.rate_class}, log sd {rate.log_sd:.2f}",
            *readings_lines(rate.support),
        )
    )


def readings_lines(readings: Sequence[Support]) -> Iterator[str]:
    """Yield the public readings that a rate stands on, a line per relation, nearest first."""
    if not readings:
        yield "readings          none of this model or of models of this kind"
    for at, each in enumerate(readings):
        yield f"{'' if at else 'readings':<16}  {support(each)}"


# --- a search ---------------------------------------------------------------------------------


def search_json(search: RatedSearch) -> list[dict[str, Any]]:
    """Return the ranked plans, best first, each with its rate and its place by rate."""
    return [
        {
            **plan_json(plan.found.plan),
            "gpu_count": plan.found.hardware.count,
            "replicas": plan.found.replicas,
            "requests_in_all": plan.found.requests_in_all,
            "running_requests": _running_in_all(plan),
            "limited_by": plan.resident.limited_by,
            "retraction_risk": plan.resident.retraction_risk,
            "tokens_per_s": plan.tokens_per_s,
            "tokens_per_s_rank": rank,
            "usd_per_million_tokens": plan.usd_per_million_tokens,
            "mtp_break_even_requests": search.break_even_requests,
        }
        for rank, plan in zip(_ranks_by_rate(search), search.plans, strict=True)
    ]


def search_text(
    model_name: str, load: Load, search: RatedSearch, *, context_is_assumed: bool
) -> str:
    """Return the ranked plans as a table, MTP on against off, then the best plan in full."""
    lengths = load.lengths.summary
    best = search.plans[0].found.plan
    context = f"context {best.settings.context_length:,}"
    if context_is_assumed:
        context += ", assumed: the prompts are not here; a run uses what its longest prompt needs"
    head = (
        f"{model_name}: {load.prompt_tokens_mean:,.0f} prompt tokens; output mean "
        f"{lengths.mean_tokens:,.0f}, CV {lengths.cv:.2g}, limit {lengths.limit_tokens:,}"
    )
    rows = zip(_ranks_by_rate(search), search.plans, strict=True)
    return "\n".join(
        (
            head,
            context,
            "",
            _SEARCH_HEAD,
            *(_search_row(rank, plan) for rank, plan in rows),
            *_stages_lines(search),
            "",
            _break_even_text(search),
            "",
            "the best, in full",
            "",
            plan_text(best),
        )
    )


def _search_row(rank: int, plan: RatedPlan) -> str:
    usd, found = plan.usd_per_million_tokens, plan.found
    return (
        f"  {'-' if usd is None else f'{usd:.3f}':>7}  {plan.tokens_per_s:>9,.0f}  "
        f"{rank:>7}  {_running_in_all(plan):>8,.0f}  "
        f"{found.replicas:>8}  {_left_gib(found.plan):>8.1f}  "
        f"{found.hardware.count} x {found.hardware.gpu.name}: {' '.join(found.plan.argv[2:])}"
    )


def _ranks_by_rate(search: RatedSearch) -> list[int]:
    """Return each plan's place by tokens/s, 1 for the fastest."""
    rates = sorted((plan.tokens_per_s for plan in search.plans), reverse=True)
    return [1 + rates.index(plan.tokens_per_s) for plan in search.plans]


def _running_in_all(plan: RatedPlan) -> float:
    return plan.resident.running_requests * plan.found.replicas


def _left_gib(plan: LaunchPlan) -> float:
    return (plan.headroom_bytes - sum(item.bytes for item in plan.headroom_items)) / GIB


def _stages_lines(search: RatedSearch) -> list[str]:
    """Explain why plans with pipeline stages rank below their figures."""
    if all(plan.replica.ranks.pp_size == 1 for plan in search.plans):
        return []
    lower = f"{1 - UNBACKED_SHARE:.0%}"
    return ["", f"--pp-size: no published reading backs these rates, so they rank {lower} lower"]


def _break_even_text(search: RatedSearch) -> str:
    caps = {curve.mtp: curve.cap_requests for curve in search.curves}
    if True not in caps or False not in caps:
        return "MTP: only one setting fits or is allowed, so there is nothing to compare"
    if search.break_even_requests is None:
        where = "MTP is faster at every batch size"
    elif search.break_even_requests <= 1:
        where = "MTP is slower at every batch size"
    else:
        where = f"MTP is faster below {search.break_even_requests} running requests per replica"
    return f"{where}; memory holds {caps[True]} per replica with it and {caps[False]} without"
