"""Run file and cards of the node → what an engine is launched with, before any was.

Flags of the run file stand; what they leave open is planned for the card that is really there. A
model or card that the planner does not know leaves the launch as the run file has it, and says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pipeline.engines.gpus import Card, planned_card
from pipeline.engines.remedies import LadderBasis, PlanPrice, running_requests
from pipeline.errors import PlanError
from pipeline.planner.cards import gpu_of, speed_known
from pipeline.planner.rate.ranking import Load, plan_tokens_per_s, ranking_rate
from pipeline.planner.rate.search import Candidate, HardwareOption, SearchQuery, best_plans
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from pipeline.planner.sglang.layout import tensor_ranks_of
from pipeline.run_file import (
    needed_context_tokens,
    plan_base,
    run_load,
    run_model,
    search_limits,
    users_flags,
)
from schemas.config import RunFile
from schemas.plan import Calibration, Gpu, ModelFacts
from schemas.prompt import Longest


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLaunch:
    """The flags to begin with, and why they were not planned if they were not."""

    flags: LaunchFlags
    setting: LadderBasis
    unplanned: str | None


def launch_setting(
    config: RunFile, cards: Sequence[Card], release: str | None, longest: Longest | None = None
) -> tuple[LadderBasis, str | None]:
    """What plans stand on, and why there can be none."""
    reasons = []
    try:
        model: ModelFacts | None = run_model(config)
    except PlanError as error:
        model, reasons = None, [str(error)]
    gpu = _gpu(config, tuple(cards))
    if gpu is None:
        reasons.append("no card is known: neither NVML nor nvidia-smi nor `hardware` tells one")
    price, price_unit = _price(config, model, gpu)
    setting = LadderBasis(
        model=model,
        gpu=gpu,
        num_gpus=max(1, config.engine.gpus_per_worker or len(cards)),
        version=release or config.planner.sglang_version,
        lengths=run_load(config).expected(),
        least_context_tokens=needed_context_tokens(config, model, longest),
        may_change_state_dtype=config.planner.allow_state_dtype,
        users_flags=frozenset(name for name, _ in users_flags(config).values),
        price=price,
        price_unit=price_unit,
    )
    return setting, "; ".join(reasons) or None


def first_launch(
    config: RunFile, setting: LadderBasis, unplanned: str | None, calibration: Calibration | None
) -> FirstLaunch:
    """The best launch of one engine on its cards; the run file's own where none can be planned."""
    given = users_flags(config)
    if config.engine.plan == "off" or unplanned or setting.model is None or setting.gpu is None:
        return FirstLaunch(flags=given, setting=setting, unplanned=unplanned)
    try:
        # A context that is chosen for its memory would refuse long rows.
        base = plan_base(config, setting.least_context_tokens or setting.model.context_length)
        if calibration is not None and not base.has("tp-size"):
            # What was measured holds for one layout alone.
            base = base.changed({"tp-size": str(tensor_ranks_of(base, setting.num_gpus))})
        found = best_plans(
            SearchQuery(
                model=setting.model,
                options=(HardwareOption(gpu=setting.gpu, count=setting.num_gpus),),
                limits=search_limits(config),
                base=base,
                version=setting.version,
                calibrations={setting.gpu.name: calibration} if calibration else {},
            ),
            setting.lengths,
            rank=partial(_of_one_engine, load=run_load(config)),
            most=1,
        )
    except PlanError as error:
        bare = plan_base(config, setting.least_context_tokens)
        return FirstLaunch(flags=bare, setting=setting, unplanned=str(error))
    return FirstLaunch(
        flags=_as_planned(given, found[0].plan.argv), setting=setting, unplanned=None
    )


def _of_one_engine(candidate: Candidate, load: Load) -> float:
    """One engine takes all cards that it is given: copies of it do not count."""
    if not speed_known(candidate.launch.gpu):
        return candidate.requests_a_replica
    return ranking_rate(candidate, load)


def _price(config: RunFile, model: ModelFacts | None, gpu: Gpu | None) -> tuple[PlanPrice, str]:
    """What plans are priced by: tokens/s where the card's speed is known."""
    if model is None or gpu is None or not speed_known(gpu):
        return running_requests, "requests at once"
    rate = partial(plan_tokens_per_s, model=model, gpu=gpu, load=run_load(config))
    return rate, "tokens/s"


def _as_planned(given: LaunchFlags, argv: tuple[str, ...]) -> LaunchFlags:
    """The planned flags, with what only SGLang knows of the run file's line."""
    planned = parse_launch_line(argv)
    return LaunchFlags(
        model_path=given.model_path,
        values=planned.values,
        env=given.env,
        set_aside=given.set_aside,
    )


def _gpu(config: RunFile, cards: tuple[Card, ...]) -> Gpu | None:
    """The card as the node tells it, else as the run file does, if that names one kind alone."""
    measured = planned_card(cards)
    if measured is not None or len(config.hardware) != 1:
        return measured
    entry = config.hardware[0]
    return gpu_of(entry.gpu, entry.memory_gib)
