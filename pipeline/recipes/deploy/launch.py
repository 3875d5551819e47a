"""The launch that a run's files are written for: a search's best plan, or a launch line."""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pipeline.errors import PlanError
from pipeline.planner.memory.plan import RefusedPlan
from pipeline.planner.rate.ranking import RatedPlan
from pipeline.planner.rate.search import HardwareOption
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import cards_of, copies_of, parallel_of
from schemas.plan import Gpu, LaunchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLaunch:
    """A launch that fits, and its copies on the hardware.

    `tokens_per_s` is of all copies; None for a launch that was not rated.
    """

    plan: LaunchPlan
    flags: LaunchFlags
    hardware: HardwareOption
    engines: int
    requests_per_engine: int
    tokens_per_s: float | None
    gives_context: bool
    """True if the context is the user's own, and not what the prompts need."""


def launch_of_plan(best: RatedPlan, *, gives_context: bool) -> PlannedLaunch:
    """Return the launch of a search's plan."""
    return PlannedLaunch(
        plan=best.found.plan,
        flags=best.found.candidate.launch.flags,
        hardware=best.found.hardware,
        engines=best.found.replicas,
        requests_per_engine=best.found.candidate.requests_a_replica,
        tokens_per_s=best.tokens_per_s,
        gives_context=gives_context,
    )


def launch_of_line(
    plan: LaunchPlan | RefusedPlan, flags: LaunchFlags, gpu: Gpu, count: int | None
) -> PlannedLaunch:
    """Return the launch of a line, as often as `count` cards hold it; once where that is None.

    Raises PlanError for a launch that does not fit.
    """
    if isinstance(plan, RefusedPlan) or plan.verdict == "does_not_fit":
        raise PlanError(f"--write: the launch does not fit, so nothing is written: {plan.message}")
    gpus = cards_of(flags)
    if count is not None and count < gpus:
        raise PlanError(f"--gpu: found {count} x {gpu.name}; one launch of this line needs {gpus}")
    engines = (count or gpus) // gpus
    return PlannedLaunch(
        plan=plan,
        flags=flags,
        hardware=HardwareOption(gpu=gpu, count=engines * gpus),
        engines=engines,
        requests_per_engine=plan.capacity.max_running_requests
        * parallel_of(flags).attention_dp_size
        * copies_of(flags),
        tokens_per_s=None,
        gives_context=True,
    )


def values_of_line(flags: LaunchFlags, model: str, config_path: str | None) -> dict[str, Any]:
    """Return the least run file around a launch line, with paths to edit."""
    values: dict[str, Any] = {
        "prompts": {"path": "prompts.parquet"},
        "model": model,
        "output": {"folder": PurePosixPath(model).name},
    }
    if flags.env:
        values["engine"] = {"env": dict(flags.env)}
    if config_path is not None:
        values["planner"] = {"model_config_path": config_path}
    return values
