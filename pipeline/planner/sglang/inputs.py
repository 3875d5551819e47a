"""The inputs of SGLang's argument resolution: a launch line, on one card, in one release."""

from dataclasses import dataclass

from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import Parallel, parallel_of
from pipeline.planner.sglang.releases import ReleaseRules
from pipeline.planner.sglang.speculation import speculation_of
from schemas.plan import Gpu, ModelFacts, NoSpeculation, Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInputs:
    """A launch line with all that its defaults and refusals depend on."""

    flags: LaunchFlags
    model: ModelFacts
    gpu: Gpu
    rules: ReleaseRules
    ranks: Parallel
    speculation: NoSpeculation | Speculation


def launch_inputs(
    flags: LaunchFlags, model: ModelFacts, gpu: Gpu, rules: ReleaseRules
) -> LaunchInputs:
    """Return the inputs, with the layout and the speculation that the flags ask for."""
    return LaunchInputs(
        flags=flags,
        model=model,
        gpu=gpu,
        rules=rules,
        ranks=parallel_of(flags),
        speculation=speculation_of(flags, model),
    )
