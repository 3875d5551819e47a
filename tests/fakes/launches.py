"""Launch lines of catalogue models, resolved as SGLang resolves them."""

from functools import cache

from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.releases import rules_for
from pipeline.planner.sglang.settings import RefusedLaunch, resolved
from schemas.plan import ModelFacts, PlanSettings

catalogue_model = cache(load_model)


def resolution(
    model: str | ModelFacts, line: str = "", gpu: str = "h200", version: str = "0.5.23"
) -> PlanSettings | RefusedLaunch:
    """Return the settings of a launch, or its refusal."""
    facts = catalogue_model(model) if isinstance(model, str) else model
    return resolved(parse_launch_line(line.split()), facts, gpu_named(gpu), rules_for(version)[0])


def settings_of(
    model: str | ModelFacts, line: str = "", gpu: str = "h200", version: str = "0.5.23"
) -> PlanSettings:
    """Return the settings of a launch that SGLang accepts."""
    found = resolution(model, line, gpu, version)
    assert isinstance(found, PlanSettings), found
    return found


def refusal_of(
    model: str | ModelFacts, line: str = "", gpu: str = "h200", version: str = "0.5.23"
) -> str:
    """Return the message of a launch that SGLang refuses."""
    found = resolution(model, line, gpu, version)
    assert isinstance(found, RefusedLaunch), found
    return found.message
