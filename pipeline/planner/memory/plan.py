"""Model, card, launch line, release → `LaunchPlan`: the whole forecast of one launch.

`plan_launch` serves the search and the engines, `explain_launch` the launch line of `jobs.plan`.
Both only join the steps; each step's arithmetic is in its own module.
"""

from dataclasses import dataclass, replace

from pipeline.planner.memory.advice import advice_for
from pipeline.planner.memory.budget import memory_budget
from pipeline.planner.memory.launch import ResolvedLaunch, resolve_launch
from pipeline.planner.memory.notes import launch_warnings, log_lines
from pipeline.planner.memory.sizing import Sized, Stopped, assess
from pipeline.planner.memory.state_pool import StatePool
from pipeline.planner.memory.verdict import judgement, uncertainty_bytes
from pipeline.planner.sglang.effects import doubts_of_flags, refusal_of_unknown
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.releases import ReleaseRules, rules_for
from schemas.plan import Calibration, Capacity, Gpu, LaunchPlan, LinearState, ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLengths:
    """Lengths of the requests that the plan is for.

    `context_tokens` is the mean context of the running requests, where the spread of the lengths
    is known; `output_limit_tokens` the longest completion that is requested.
    """

    prompt_tokens: int = 512
    output_tokens: int = 7680
    output_tokens_cv: float = 0.5
    context_tokens: float | None = None
    output_limit_tokens: int | None = None

    def total_tokens(self) -> int:
        """Return the tokens in the cache at the end of the mean request."""
        return self.prompt_tokens + self.output_tokens

    def held_tokens(self) -> float:
        """Return the tokens planned for one running request: its mean, else those at its end."""
        return self.context_tokens or self.total_tokens()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPlan:
    """SGLang refuses the arguments.

    `with_tracked_states` is the same launch with the state strategy that the refusal asks for.
    """

    message: str
    model: str
    gpu: Gpu
    release: str
    argv: tuple[str, ...]
    assumptions: tuple[str, ...]
    with_tracked_states: LaunchPlan | None


def plan_launch(
    model: ModelFacts,
    gpu: Gpu,
    flags: LaunchFlags,
    *,
    version: str | None = None,
    lengths: ExpectedLengths | None = None,
    calibration: Calibration | None = None,
) -> LaunchPlan | RefusedPlan:
    """Forecast a launch, or return SGLang's refusal of its arguments. Gives no advice."""
    rules, notes = rules_for(version)
    launch = resolve_launch(model, gpu, flags, rules, calibration)
    if isinstance(launch, ResolvedLaunch):
        return _plan(launch, notes, lengths or ExpectedLengths())
    return _refused(launch.message, model, gpu, flags, rules, notes)


def _refused(
    message: str,
    model: ModelFacts,
    gpu: Gpu,
    flags: LaunchFlags,
    rules: ReleaseRules,
    notes: tuple[str, ...],
) -> RefusedPlan:
    return RefusedPlan(
        message=message,
        model=model.name,
        gpu=gpu,
        release=rules.label,
        argv=flags.argv(),
        assumptions=notes,
        with_tracked_states=None,
    )


def explain_launch(
    model: ModelFacts,
    gpu: Gpu,
    flags: LaunchFlags,
    *,
    version: str | None = None,
    lengths: ExpectedLengths | None = None,
    calibration: Calibration | None = None,
) -> LaunchPlan | RefusedPlan:
    """Forecast a launch with advice, which costs a few dozen forecasts more.

    A refusal for lack of tracked states comes with the plan of the launch that has them.
    """
    rules, notes = rules_for(version)
    if message := refusal_of_unknown(flags, rules):
        return _refused(message, model, gpu, flags, rules, notes)
    plan = plan_launch(model, gpu, flags, version=version, lengths=lengths, calibration=calibration)
    launch = resolve_launch(model, gpu, flags, rules, calibration)
    if isinstance(plan, LaunchPlan) and isinstance(launch, ResolvedLaunch):
        warnings = (*plan.warnings, *doubts_of_flags(flags, rules))
        return replace(plan, advice=advice_for(launch), warnings=warnings)
    if isinstance(plan, LaunchPlan) or not _lacks_tracked_states(model, flags):
        return plan
    tracked = flags.changed({"mamba-radix-cache-strategy": "extra_buffer"})
    other = explain_launch(
        model, gpu, tracked, version=version, lengths=lengths, calibration=calibration
    )
    return replace(plan, with_tracked_states=other if isinstance(other, LaunchPlan) else None)


def _lacks_tracked_states(model: ModelFacts, flags: LaunchFlags) -> bool:
    """Return whether older releases refuse the launch: speculation beside a prefix cache."""
    strategy = flags.text("mamba-radix-cache-strategy", "auto")
    return (
        isinstance(model.state, LinearState)
        and flags.has("speculative-algorithm")
        and not strategy.startswith("extra_buffer")
    )


def _plan(launch: ResolvedLaunch, notes: tuple[str, ...], lengths: ExpectedLengths) -> LaunchPlan:
    outcome = assess(launch)
    judged = judgement(launch, outcome)
    load = outcome.load
    error = uncertainty_bytes(launch, load)
    sized = outcome if isinstance(outcome, Sized) else None
    states = sized.states if sized and isinstance(sized.states, StatePool) else None
    per_token = sized.cost.priced_bytes if sized else 0.0
    return LaunchPlan(
        verdict=judged.verdict,
        stage=judged.stage,
        message=judged.message,
        model=launch.model.name,
        gpu=launch.gpu.name,
        release_profile=launch.rules.label,
        argv=launch.flags.argv(),
        settings=launch.settings,
        budget=memory_budget(launch, outcome),
        capacity=_capacity(outcome),
        free_before_load_bytes=load.free_before_bytes,
        weights_bytes=load.weights_bytes,
        draft_weights_bytes=load.draft_resident_bytes + load.draft_freed_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes=sized.pool.bytes if sized else 0,
        state_bytes=states.state_bytes if states else 0,
        intermediate_state_bytes=_intermediate_bytes(outcome),
        headroom_bytes=sized.headroom_bytes if sized else 0,
        headroom_items=sized.needs.items() if sized else (),
        requests_at_expected_length=requests_at(outcome, lengths),
        uncertainty_bytes=error,
        uncertainty_tokens=int(error / per_token) if per_token else 0,
        assumptions=_assumptions(launch, notes, lengths),
        warnings=(*judged.doubts, *launch_warnings(launch, outcome)),
        advice=(),
        log_lines=log_lines(launch, outcome, judged.message),
    )


def requests_at(outcome: Stopped | Sized, lengths: ExpectedLengths) -> int:
    """Count the requests of the expected length that one data-parallel rank runs at once."""
    if isinstance(outcome, Stopped):
        return 0
    return min(outcome.at_once, int(outcome.pool.tokens // max(lengths.held_tokens(), 1)))


def _capacity(outcome: Stopped | Sized) -> Capacity:
    if isinstance(outcome, Stopped):
        return Capacity(
            max_total_num_tokens=0,
            swa_tokens=0,
            state_slots=max(outcome.slots, 0),
            max_running_requests=0,
            limited_by=outcome.stage,
        )
    slots = outcome.states.slots if isinstance(outcome.states, StatePool) else 0
    return Capacity(
        max_total_num_tokens=outcome.pool.tokens,
        swa_tokens=outcome.pool.swa_tokens,
        state_slots=slots,
        max_running_requests=outcome.running,
        limited_by=outcome.limited_by,
    )


def _intermediate_bytes(outcome: Stopped | Sized) -> int:
    if isinstance(outcome, Stopped):
        return outcome.intermediate_bytes
    return outcome.states.intermediate_bytes if isinstance(outcome.states, StatePool) else 0


def _assumptions(
    launch: ResolvedLaunch, notes: tuple[str, ...], lengths: ExpectedLengths
) -> tuple[str, ...]:
    lines = [*notes, *launch.model.assumptions, *launch.settings.assumptions]
    if launch.calibration is None:
        lines.append("free memory before loading is assumed from the card and the number of ranks")
    if not launch.model.checkpoint_bytes:
        lines.append(f"weights are computed from the config ({launch.model.format.source})")
    lines.append(
        f"a request ends with {lengths.prompt_tokens} prompt and "
        f"{lengths.output_tokens} output tokens"
        if lengths.context_tokens is None
        else f"a running request has {lengths.context_tokens:,.0f} tokens of context on average"
    )
    return tuple(lines)
