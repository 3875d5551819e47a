"""A plan as JSON (GiB) and as the table a person holds against a log.

The JSON keys are the interface of `python -m jobs.plan --json`; nothing is computed here.
"""

from typing import Any

from pipeline.planner.memory.plan import RefusedPlan
from schemas.plan import Advice, LaunchPlan
from schemas.units import GIB


def plan_json(plan: LaunchPlan | RefusedPlan) -> dict[str, Any]:
    """One plan. All figures are per GPU."""
    if isinstance(plan, RefusedPlan):
        return _refused_json(plan)
    settings, capacity = plan.settings, plan.capacity
    return {
        "verdict": plan.verdict,
        "stage": plan.stage,
        "message": plan.message,
        "model": plan.model,
        "gpu": plan.gpu,
        "gpu_total_gib": _gib(plan.budget.total_bytes),
        "free_before_load_gib": _gib(plan.free_before_load_bytes),
        "weights_gib": _gib(plan.weights_bytes),
        "draft_weights_gib": _gib(plan.draft_weights_bytes),
        "mem_fraction_static": round(settings.mem_fraction_static, 4),
        "kv_bytes_per_token": round(plan.kv_bytes_per_token, 2),
        "max_total_num_tokens": capacity.max_total_num_tokens,
        "kv_gib": _gib(plan.kv_bytes),
        "state_slots": capacity.state_slots,
        "state_gib": _gib(plan.state_bytes),
        "intermediate_state_gib": _gib(plan.intermediate_state_bytes),
        "max_running_requests": capacity.max_running_requests,
        "requests_at_expected_length": plan.requests_at_expected_length,
        "context_length": settings.context_length,
        "chunked_prefill_size": settings.chunked_prefill_size,
        "cuda_graph_max_bs": settings.decode_graph_max_bs,
        "slack_gib": _gib(plan.slack_bytes),
        "slack_charged_gib": {item.name: _gib(item.bytes) for item in plan.slack_items},
        "slack_left_gib": _gib(plan.slack_bytes - sum(item.bytes for item in plan.slack_items)),
        "limited_by": capacity.limited_by,
        "uncertainty": {
            "gib": _gib(plan.uncertainty_bytes),
            "tokens": plan.uncertainty_tokens,
        },
        "budget_gib": {row.name: _gib(row.bytes) for row in plan.budget.rows},
        "assumptions": list(plan.assumptions),
        "warnings": list(plan.warnings),
        "advice": [_advice_json(advice) for advice in plan.advice],
        "release_profile": plan.release_profile,
        "argv": list(plan.argv),
    }


def _refused_json(plan: RefusedPlan) -> dict[str, Any]:
    """A refusal has a message and no figures; the keys stay, so that a reader finds them.

    Where one flag mends it, figures, stage and a second line of the message say what would follow.
    """
    figures = dict.fromkeys(
        (
            "free_before_load_gib", "weights_gib", "draft_weights_gib", "mem_fraction_static",
            "kv_bytes_per_token", "max_total_num_tokens", "kv_gib", "state_slots", "state_gib",
            "intermediate_state_gib", "max_running_requests", "requests_at_expected_length",
            "context_length", "chunked_prefill_size", "cuda_graph_max_bs", "slack_gib",
            "slack_charged_gib", "slack_left_gib",
        )
    )  # fmt: skip
    warnings, advice = [], []
    message, stage = plan.message, None
    other = plan.with_tracked_states
    if other is not None:
        whole = plan_json(other)
        figures = {name: whole[name] for name in figures}
        warnings = [_tracked_note(other), *other.warnings]
        advice = [_advice_json(advice) for advice in (_TRACKED, *other.advice)]
        stage = other.stage
        message = "\n".join(filter(None, (plan.message, other.message)))
    return {
        "verdict": "does_not_fit",
        "stage": stage,
        "message": message,
        "model": plan.model,
        "gpu": plan.gpu.name,
        "gpu_total_gib": _gib(plan.gpu.total_bytes),
        **figures,
        "limited_by": "arguments",
        "uncertainty": {"gib": 0.0, "tokens": 0},
        "budget_gib": {},
        "assumptions": list(plan.assumptions),
        "warnings": warnings,
        "advice": advice,
        "release_profile": plan.release,
        "argv": list(plan.argv),
    }


_TRACKED = Advice(
    flag="--mamba-scheduler-strategy",
    value="extra_buffer",
    effect="is not refused",
    reason="the release needs tracked states, or --disable-radix-cache, beside speculation",
)


def _tracked_note(plan: LaunchPlan) -> str:
    end = plan.verdict.replace("_", " ") + (f" at {plan.stage}" if plan.stage else "")
    return (
        f"figures are those with --mamba-scheduler-strategy extra_buffer, where the launch {end}"
        f"{': ' + plan.message if plan.message else ''}"
    )


def _advice_json(advice: Advice) -> dict[str, str]:
    return {
        "flag": advice.flag,
        "value": advice.value,
        "effect": advice.effect,
        "reason": advice.reason,
    }


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
    return lines


def _advice_text(advice: Advice) -> str:
    return f"{advice.flag} {advice.value}: {advice.effect} ({advice.reason})"
