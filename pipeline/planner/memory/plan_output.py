"""A plan as JSON, in GiB, and as the table that a person compares with a log.

The fields of `PlanDocument` and `PlanFigures` are the keys of `jobs.plan --json`. Nothing is
computed here.
"""

from dataclasses import asdict, dataclass
from typing import Any

from pipeline.planner.memory.plan import RefusedPlan
from pipeline.planner.sglang.flags import spelled_for
from pipeline.planner.sglang.releases import rules_for
from schemas.plan import Advice, LaunchPlan, Stage, Verdict
from schemas.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertainty:
    """Error that the forecast itself expects."""

    gib: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """Figures of a launch per GPU; None where it is refused before it has any."""

    free_before_load_gib: float | None = None
    weights_gib: float | None = None
    draft_weights_gib: float | None = None
    mem_fraction_static: float | None = None
    kv_bytes_per_token: float | None = None
    max_total_num_tokens: int | None = None
    kv_gib: float | None = None
    state_slots: int | None = None
    state_gib: float | None = None
    intermediate_state_gib: float | None = None
    max_running_requests: int | None = None
    requests_at_expected_length: int | None = None
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    cuda_graph_max_bs: int | None = None
    slack_gib: float | None = None
    slack_charged_gib: dict[str, float] | None = None
    slack_left_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """A plan as `jobs.plan --json` prints it, with its figures among the keys."""

    verdict: Verdict
    stage: Stage | None
    message: str
    model: str
    gpu: str
    gpu_total_gib: float
    figures: PlanFigures
    """Printed among the other keys."""
    limited_by: str
    uncertainty: Uncertainty
    budget_gib: dict[str, float]
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    advice: tuple[Advice, ...]
    release_profile: str
    argv: tuple[str, ...]


def plan_json(plan: LaunchPlan | RefusedPlan) -> dict[str, Any]:
    """Return one plan as plain values. All figures are per GPU."""
    document = asdict(_refusal(plan) if isinstance(plan, RefusedPlan) else _document(plan))
    keys = list(document)
    before = keys[: keys.index("figures")]
    figures = document.pop("figures")
    return {**{key: document.pop(key) for key in before}, **figures, **document}


def _document(plan: LaunchPlan) -> PlanDocument:
    return PlanDocument(
        verdict=plan.verdict,
        stage=plan.stage,
        message=plan.message,
        model=plan.model,
        gpu=plan.gpu,
        gpu_total_gib=_gib(plan.budget.total_bytes),
        limited_by=plan.capacity.limited_by,
        uncertainty=Uncertainty(gib=_gib(plan.uncertainty_bytes), tokens=plan.uncertainty_tokens),
        budget_gib={row.name: _gib(row.bytes) for row in plan.budget.rows},
        assumptions=plan.assumptions,
        warnings=plan.warnings,
        advice=plan.advice,
        release_profile=plan.release_profile,
        argv=plan.argv,
        figures=_figures(plan),
    )


def _figures(plan: LaunchPlan) -> PlanFigures:
    settings, capacity = plan.settings, plan.capacity
    return PlanFigures(
        free_before_load_gib=_gib(plan.free_before_load_bytes),
        weights_gib=_gib(plan.weights_bytes),
        draft_weights_gib=_gib(plan.draft_weights_bytes),
        mem_fraction_static=round(settings.mem_fraction_static, 4),
        kv_bytes_per_token=round(plan.kv_bytes_per_token, 2),
        max_total_num_tokens=capacity.max_total_num_tokens,
        kv_gib=_gib(plan.kv_bytes),
        state_slots=capacity.state_slots,
        state_gib=_gib(plan.state_bytes),
        intermediate_state_gib=_gib(plan.intermediate_state_bytes),
        max_running_requests=capacity.max_running_requests,
        requests_at_expected_length=plan.requests_at_expected_length,
        context_length=settings.context_length,
        chunked_prefill_size=settings.chunked_prefill_size,
        cuda_graph_max_bs=settings.decode_graph_max_bs,
        slack_gib=_gib(plan.headroom_bytes),
        slack_charged_gib={item.name: _gib(item.bytes) for item in plan.headroom_items},
        slack_left_gib=_gib(plan.headroom_bytes - sum(item.bytes for item in plan.headroom_items)),
    )


def _refusal(plan: RefusedPlan) -> PlanDocument:
    """Return a refusal: a message and no figures.

    Where one flag lifts it, the figures, the stage and a second line of the message are those of
    the launch with that flag.
    """
    other = plan.with_tracked_states
    return PlanDocument(
        verdict="does_not_fit",
        stage=other.stage if other else None,
        message="\n".join(filter(None, (plan.message, other.message if other else ""))),
        model=plan.model,
        gpu=plan.gpu.name,
        gpu_total_gib=_gib(plan.gpu.total_bytes),
        limited_by="arguments",
        uncertainty=Uncertainty(gib=0.0, tokens=0),
        budget_gib={},
        assumptions=plan.assumptions,
        warnings=(_tracked_note(other), *other.warnings) if other else (),
        advice=(tracked_advice(other), *other.advice) if other else (),
        release_profile=plan.release,
        argv=plan.argv,
        figures=_figures(other) if other else PlanFigures(),
    )


def tracked_advice(plan: LaunchPlan) -> Advice:
    """Return the flag that lifts a refusal, given the plan of the launch with it."""
    return Advice(
        flag="--mamba-scheduler-strategy",
        value="extra_buffer",
        effect="is not refused",
        reason="the release needs tracked states, or --disable-radix-cache, beside speculation",
        argv=spelled_for(plan.argv, rules_for(plan.release_profile)[0].release),
    )


def _tracked_note(plan: LaunchPlan) -> str:
    end = plan.verdict.replace("_", " ") + (f" at {plan.stage}" if plan.stage else "")
    return (
        f"figures are those with --mamba-scheduler-strategy extra_buffer, where the launch {end}"
        f"{': ' + plan.message if plan.message else ''}"
    )


def _gib(size: float) -> float:
    return round(size / GIB, 3)


# --- text -------------------------------------------------------------------------------------


def plan_text(plan: LaunchPlan | RefusedPlan) -> str:
    """The budget row by row, then verdict, limit, advice and the log lines to expect."""
    if isinstance(plan, RefusedPlan):
        text = (
            f"{plan.model} on {plan.gpu.name}, SGLang {plan.release}\n\n"
            f"refused before loading\n  {plan.message}"
        )
        if plan.with_tracked_states is None:
            return text
        tracked = plan_text(plan.with_tracked_states)
        return f"{text}\n\nwith --mamba-scheduler-strategy extra_buffer\n\n{tracked}"
    settings = plan.settings
    stages = f" x PP {settings.pp_size}" if settings.pp_size > 1 else ""
    head = (
        f"{plan.model} on {plan.gpu}, SGLang {plan.release_profile}, TP {settings.tp_size}"
        f"{stages}, mem_fraction_static {settings.mem_fraction_static:.3f}"
        f"{'' if settings.mem_fraction_given else ' (default)'}"
    )
    parts = [head, "", *_budget_lines(plan), "", *_verdict_lines(plan)]
    for title, lines in (
        ("advice", [_advice_text(advice) for advice in plan.advice]),
        ("note", list(plan.warnings)),
        ("assumed", list(plan.assumptions)),
        ("expect in the log", list(plan.log_lines)),
    ):
        if lines:
            parts += ["", title, *(f"  {line}" for line in lines)]
    return "\n".join(parts)


def _budget_lines(plan: LaunchPlan) -> list[str]:
    rows = [f"  {row.name:<46}{row.bytes / GIB:>9.2f}  {row.note}" for row in plan.budget.rows]
    total = f"  {'card':<46}{plan.budget.total_bytes / GIB:>9.2f}  GiB"
    return [*rows, f"  {'':<46}{'-' * 9}", total]


def _verdict_lines(plan: LaunchPlan) -> list[str]:
    verdict = plan.verdict.replace("_", " ")
    lines = [f"{verdict}{f' at {plan.stage}' if plan.stage else ''}"]
    if plan.message:
        lines.append(f"  {plan.message}")
    capacity = plan.capacity
    if capacity.max_total_num_tokens:
        lines.append(
            f"  {capacity.max_total_num_tokens:,} KV tokens "
            f"(± {plan.uncertainty_tokens:,}), {capacity.state_slots} state slots, "
            f"{capacity.max_running_requests} running requests, limited by {capacity.limited_by}"
        )
        lines.append(f"  {plan.requests_at_expected_length} requests at the expected length")
    if plan.verdict == "marginal":
        lines.append(
            "  start it once, then plan again with --calibrate-from LOG: the engine's own figures "
            "decide"
        )
    return lines


def _advice_text(advice: Advice) -> str:
    return f"{advice.flag} {advice.value}: {advice.effect} ({advice.reason})"
