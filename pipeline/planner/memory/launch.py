"""A launch whose flags are resolved: the record that sizing, rating and advice share."""

from dataclasses import dataclass, replace

from pipeline.planner.memory.changes import fraction_change
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import Parallel, parallel_of
from pipeline.planner.sglang.releases import ReleaseRules
from pipeline.planner.sglang.settings import RefusedLaunch, resolved
from schemas.plan import Calibration, Gpu, ModelFacts, PlanSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLaunch:
    """A model on a card under one launch line, with SGLang's defaults filled in."""

    model: ModelFacts
    gpu: Gpu
    flags: LaunchFlags
    ranks: Parallel
    rules: ReleaseRules
    settings: PlanSettings
    calibration: Calibration | None

    def at_fraction(self, fraction: float) -> "ResolvedLaunch":
        """Return this launch with another memory fraction, on which no other setting depends."""
        return replace(
            self,
            flags=self.flags.changed(fraction_change(fraction)),
            settings=replace(self.settings, mem_fraction_static=fraction, mem_fraction_given=True),
        )


def resolve_launch(
    model: ModelFacts,
    gpu: Gpu,
    flags: LaunchFlags,
    rules: ReleaseRules,
    calibration: Calibration | None = None,
) -> ResolvedLaunch | RefusedLaunch:
    """Resolve a launch line as SGLang does, or return SGLang's refusal."""
    settings = resolved(flags, model, gpu, rules)
    if isinstance(settings, RefusedLaunch):
        return settings
    return ResolvedLaunch(
        model=model,
        gpu=gpu,
        flags=flags,
        ranks=parallel_of(flags),
        rules=rules,
        settings=settings,
        calibration=calibration,
    )
