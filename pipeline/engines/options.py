"""Launch plans that one engine may try, and the one that an earlier session found to be best."""

import math
from collections.abc import Sequence

from pipeline.engines.remedies import LadderBasis
from pipeline.planner.rate.errors import ACCEPT_LENGTH_SD, PIPELINE_SD
from pipeline.planner.rate.ranking import Load
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from pipeline.store.folder import Folder
from pipeline.store.run_folder import TRIALS_FILE
from pipeline.untrusted.parsing import UNREADABLE
from schemas.plan import CardResult, EngineTrial, LaunchPlan, PlanOption, results_from_text

# Errors that plans on one card share, and that are each plan's own. assumed, as in
# `make trial-score`
_SHARED_SD, _OWN_SD = 0.2, 0.1


def engine_trial(basis: LadderBasis, plans: Sequence[LaunchPlan], load: Load) -> EngineTrial | None:
    """Return what an engine may try; None without a choice, or for a card of unknown speed."""
    if basis.model is None or basis.gpu is None or basis.price_unit != "tokens/s":
        return None
    options = tuple(
        PlanOption(
            words=tuple(plan.argv),
            tokens_per_s=basis.price(plan),
            log_sd=_own_log_sd(parse_launch_line(plan.argv), load),
        )
        for plan in plans
    )
    rated = tuple(option for option in options if option.tokens_per_s > 0)
    if len(rated) < 2 or rated[0] != options[0]:
        return None
    return EngineTrial(
        card=basis.gpu.name,
        options=rated,
        shared_log_sd=_SHARED_SD,
        output_tokens_mean=load.lengths.summary.mean_tokens,
        running=rated[0].name,
    )


def _own_log_sd(flags: LaunchFlags, load: Load) -> float:
    drafts = flags.has("speculative-algorithm") and load.accept_odds is None
    stages = (flags.number("pp-size") or 1) > 1
    return math.hypot(_OWN_SD, ACCEPT_LENGTH_SD * drafts, PIPELINE_SD * stages)


def best_option(folder: Folder, trial: EngineTrial) -> PlanOption | None:
    """Return the plan that engines on this card ended on in an earlier session, if any."""
    best = {result.best for result in earlier_results(folder) if result.card == trial.card}
    return next((option for option in trial.options if option.name in best), None)


def earlier_results(folder: Folder) -> tuple[CardResult, ...]:
    """Return what earlier sessions have measured of launch plans."""
    if not folder.exists(TRIALS_FILE):
        return ()
    try:
        return results_from_text(folder.read(TRIALS_FILE).decode())
    except UNREADABLE:
        # Of another release: the forecast's first is as good a start as any.
        return ()
