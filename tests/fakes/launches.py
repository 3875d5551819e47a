"""Launch lines of catalogue models, resolved as SGLang resolves them."""

from dataclasses import replace
from functools import cache

from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.launch import ResolvedLaunch, resolve_launch
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.releases import rules_for
from pipeline.planner.sglang.settings import RefusedLaunch, resolved
from schemas.plan import ModelFacts, PlanSettings, Shard, TensorGroup

MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)

catalogue_model = cache(load_model)


def launch_of(
    model: str | ModelFacts, line: str = "", gpu: str = "h200", version: str = "0.5.23"
) -> ResolvedLaunch:
    """Resolve a launch that SGLang accepts."""
    facts = catalogue_model(model) if isinstance(model, str) else model
    flags = parse_launch_line(line.split())
    launch = resolve_launch(facts, gpu_named(gpu), flags, rules_for(version)[0])
    assert isinstance(launch, ResolvedLaunch), launch
    return launch


def with_one_group(name: str, shard: Shard, params: int) -> ModelFacts:
    """Return a model of the catalogue whose weights are one group of tensors."""
    module = {"expert": "mlp.experts", "mlp": "mlp.gate_proj"}.get(shard, shard)
    group = TensorGroup(
        names=(f"layers.#.{module}",), params=params, shard=shard, layers=1, quantizable=True
    )
    return replace(catalogue_model(name), tensors=(group,), rotary_bytes=0)


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
