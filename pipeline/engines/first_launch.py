"""Choose an engine's first launch flags from the run file and the node's cards.

The run file's flags are kept, and what they leave open is planned for the card that is there. For
a model or card that the planner does not know, the run file's flags are all there is.
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
    """The flags to begin with, and the reason if they were not planned."""

    flags: LaunchFlags
    unplanned: str | None = None


def ladder_basis(
    config: RunFile, cards: Sequence[Card], release: str | None, longest: Longest | None = None
) -> tuple[LadderBasis, str | None]:
    """Return what plans are based on, and the reason where none can be made."""
    reasons = []
    try:
        model: ModelFacts | None = run_model(config)
    except PlanError as error:
        model, reasons = None, [str(error)]
    gpu = _gpu(config, tuple(cards))
    if gpu is None:
        reasons.append("no card is known: neither NVML nor nvidia-smi nor `hardware` names one")
    price, price_unit = _price(config, model, gpu)
    basis = LadderBasis(
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
    return basis, "; ".join(reasons) or None


def first_launch(
    config: RunFile, basis: LadderBasis, unplanned: str | None, calibration: Calibration | None
) -> FirstLaunch:
    """Choose the best launch of one engine on its cards; the run file's where none fits."""
    given = users_flags(config)
    if config.engine.plan == "off" or unplanned or basis.model is None or basis.gpu is None:
        return FirstLaunch(flags=given, unplanned=unplanned)
    try:
        # A context chosen for its memory would refuse long rows.
        base = plan_base(config, basis.least_context_tokens or basis.model.context_length)
        if calibration is not None and not base.has("tp-size"):
            # Measured figures hold for one layout only.
            base = base.changed({"tp-size": str(tensor_ranks_of(base, basis.num_gpus))})
        found = best_plans(
            SearchQuery(
                model=basis.model,
                options=(HardwareOption(gpu=basis.gpu, count=basis.num_gpus),),
                limits=search_limits(config),
                base=base,
                version=basis.version,
                calibrations={basis.gpu.name: calibration} if calibration else {},
            ),
            basis.lengths,
            rank=partial(_rank_of_one_engine, load=run_load(config)),
            most=1,
        )
    except PlanError as error:
        bare = plan_base(config, basis.least_context_tokens)
        return FirstLaunch(flags=bare, unplanned=str(error))
    return FirstLaunch(flags=_as_planned(given, found[0].plan.argv))


def _rank_of_one_engine(candidate: Candidate, load: Load) -> float:
    """Rank by one engine, which uses all its cards; copies of it do not count."""
    if not speed_known(candidate.launch.gpu):
        return candidate.requests_a_replica
    return ranking_rate(candidate, load)


def _price(config: RunFile, model: ModelFacts | None, gpu: Gpu | None) -> tuple[PlanPrice, str]:
    """Return the price of a plan and its unit: tokens/s where the card's speed is known."""
    if model is None or gpu is None or not speed_known(gpu):
        return running_requests, "requests at once"
    rate = partial(plan_tokens_per_s, model=model, gpu=gpu, load=run_load(config))
    return rate, "tokens/s"


def _as_planned(given: LaunchFlags, argv: tuple[str, ...]) -> LaunchFlags:
    """Return the planned flags, with the run file's flags that the planner does not know."""
    planned = parse_launch_line(argv)
    return LaunchFlags(
        model_path=given.model_path,
        values=planned.values,
        env=given.env,
        set_aside=given.set_aside,
    )


def _gpu(config: RunFile, cards: tuple[Card, ...]) -> Gpu | None:
    """Return the card that the node reports, else the run file's if it lists one kind alone."""
    measured = planned_card(cards)
    if measured is not None or len(config.hardware) != 1:
        return measured
    entry = config.hardware[0]
    return gpu_of(entry.gpu, entry.memory_gib)
