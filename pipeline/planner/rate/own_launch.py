"""The user's own launch line on an option's cards, rated as the search rates its plans."""

from collections.abc import Mapping
from dataclasses import replace

from pipeline.errors import PlanError
from pipeline.planner.memory.launch import resolve_launch
from pipeline.planner.memory.plan import plan_launch
from pipeline.planner.memory.sizing import Stopped, assess
from pipeline.planner.rate.ranking import Load, RatedPlan, rated_plan
from pipeline.planner.rate.search import Candidate, FoundPlan, HardwareOption, candidate_of
from pipeline.planner.sglang.calibration import fits_layout
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import cards_of, copies_of
from pipeline.planner.sglang.releases import rules_for
from pipeline.planner.sglang.settings import RefusedLaunch
from schemas.plan import Calibration, LaunchPlan, ModelFacts


def rated_launch(
    model: ModelFacts,
    option: HardwareOption,
    flags: LaunchFlags,
    load: Load,
    *,
    version: str | None = None,
    calibrations: Mapping[str, Calibration] | None = None,
) -> RatedPlan:
    """Rate a launch line, started as often as the cards hold it.

    Raises PlanError where it does not start, or runs no request.
    """
    replicas = _replicas(option, flags)
    # Each data-parallel rank is an engine of its own, unless they share attention.
    if not flags.has("enable-dp-attention"):
        flags = flags.changed({"dp-size": None})
    measured = (calibrations or {}).get(option.gpu.name)
    calibration = measured if measured is not None and fits_layout(measured, flags) else None
    plan = plan_launch(
        model, option.gpu, flags, version=version, lengths=load.expected(), calibration=calibration
    )
    if not isinstance(plan, LaunchPlan) or plan.verdict == "does_not_fit":
        stage = "" if not isinstance(plan, LaunchPlan) or plan.stage is None else plan.stage
        raise PlanError(": ".join(filter(None, (stage.replace("_", " "), plan.message))))
    candidate = _candidate(model, option, flags, load, version, calibration)
    found = FoundPlan(
        plan=plan,
        candidate=replace(candidate, replicas=replicas),
        hardware=option,
        replicas=replicas,
        requests_in_all=replicas * candidate.requests_a_replica,
    )
    return rated_plan(found, load, {}, limit_is_memory=not flags.has("max-running-requests"))


def _replicas(option: HardwareOption, flags: LaunchFlags) -> int:
    """Count the engines: launches that the cards hold, and the data-parallel ranks of each."""
    cards = cards_of(flags)
    if cards > option.count:
        raise PlanError(f"one launch needs {cards} cards, and there are {option.count}")
    return option.count // cards * copies_of(flags)


def _candidate(
    model: ModelFacts,
    option: HardwareOption,
    flags: LaunchFlags,
    load: Load,
    version: str | None,
    calibration: Calibration | None,
) -> Candidate:
    launch = resolve_launch(model, option.gpu, flags, rules_for(version)[0], calibration)
    if isinstance(launch, RefusedLaunch):
        raise PlanError(launch.message)
    sized = assess(launch)
    if isinstance(sized, Stopped):
        raise PlanError(f"{sized.stage.replace('_', ' ')}: {sized.message}")
    lengths = load.expected()
    candidate = candidate_of(option, launch, sized, lengths)
    if candidate is None:
        raise PlanError(f"not one request of {lengths.held_tokens():,.0f} tokens fits")
    return candidate
