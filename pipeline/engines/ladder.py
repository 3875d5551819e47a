"""What to try after an engine failed: the next launch flags, the same again, or an end. Pure.

Invariants: no configuration that failed for itself is tried twice; the list of tries is bounded;
what the user alone can mend stops at once. A change is chosen by planning each candidate on the
figures that the failed launch printed, and taking the one that loses the least.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

from pipeline.engines.remedies import FRACTIONS_ALLOWED, SLACK_KINDS, usual_remedies
from pipeline.planner.memory.plan import ExpectedLengths, plan_launch
from pipeline.planner.sglang.failures import Cause
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import layout_name
from pipeline.planner.sglang.wordings import CauseKind
from schemas.plan import (
    Calibration,
    Gpu,
    LaunchPlan,
    LinearState,
    ModelFacts,
    Moe,
    NoSpeculation,
    PlanSettings,
)
from schemas.units import GIB, MIB

Changes = Mapping[str, str | None]
PlanPrice = Callable[[LaunchPlan], float]

MOST_STEPS = 8
"""Configurations tried after the first."""

_MOST_AGAIN: dict[CauseKind, int] = {
    # Repeats of one configuration, for causes that are not its own. assumed: a cause that comes
    # back so often in a row will not go away by itself
    "port": 5,
    "hub_unreachable": 6,
    "nccl": 2,
    "gpu_fault": 2,
    "host_memory": 1,
    "unbalanced": 1,
    "watchdog": 3,
    "killed": 5,
    "unknown": 1,
}
_WAIT_S: dict[CauseKind, float] = {
    "port": 0.0,
    "hub_unreachable": 20.0,
    "nccl": 5.0,
    "gpu_fault": 5.0,
    "host_memory": 10.0,
    # A process that ends hands the card's memory back within some seconds.
    "unbalanced": 15.0,
    "watchdog": 1.0,
    "killed": 1.0,
    "unknown": 2.0,
}
_MARGIN_BYTES = 256 * MIB
# assumed: what an allocation that failed is followed by
_ASK_GROWTH = 2
# The ask for memory grows so with each configuration that ran out all the same: three steps add
# 1 + 2 + 4 of the first ask, 1.75 GiB where nothing but the margin is known to be lacking. That is
# the planner's own error (memory_budget.py: 0.3 of the estimates and 400 MiB, 1.9 GiB for
# Qwen3.6-27B on an RTX PRO 6000) once more, and no more than twice what was really lacking.
_POOL_KINDS = ("pool", "state_pool", "unbalanced")
_MENDED_BY_FLAGS = (*_POOL_KINDS, *SLACK_KINDS, "weights", "draft_weights")
_FRACTION_STEPS = (0.0, 0.02, -0.02, 0.04, -0.04, 0.06, -0.06, 0.1, -0.1, 0.15, -0.15)
_RANKS = (2, 4, 8, 16)

_ADVICE: dict[CauseKind, str] = {
    "flag": "correct engine.flags",
    "model_missing": "correct model, or use an SGLang release that knows it",
    "hub_refused": "accept the model's terms and pass a token: engine.pass_env: [HF_TOKEN]",
    "kernel": "install an SGLang build and a driver for this card",
    "disk_full": "free space, or point the caches (HF_HOME, /dev/shm) at a larger disk",
}


def running_requests(plan: LaunchPlan) -> float:
    """The default price: requests of the expected length that one engine runs at once."""
    return plan.requests_at_expected_length * plan.settings.attention_dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderBasis:
    """What a ladder stands on. Without the model's facts or the card it steps blindly."""

    model: ModelFacts | None
    gpu: Gpu | None
    num_gpus: int
    """Cards that the engine may use."""
    version: str | None
    lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    least_context_tokens: int | None = None
    """The shortest context that all rows have room in; None: it stays as it is.

    A longer one is given up with the first step, since it serves no row; a shorter one is never
    taken.
    """
    may_change_state_dtype: bool = False
    users_flags: frozenset[str] = frozenset()
    """Flags of the run file; the others are the plan's own and may be left out."""
    refused_flags: frozenset[str] = frozenset()
    """Flags that the engine that is installed does not know, whatever its release is said to be."""
    rate: PlanPrice = running_requests
    rate_unit: str = "requests at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A configuration and what it ended of."""

    flags: LaunchFlags
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Another configuration, with what it changes and costs."""

    flags: LaunchFlags
    change: str
    price: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The same configuration: what it ended of was not its own."""

    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Nothing is left to try; `reason` is one line that says what to do."""

    reason: str


def next_step(
    tried: tuple[Tried, ...], setting: LadderBasis, calibration: Calibration | None = None
) -> Step | Again | Stop:
    """What follows on the last of `tried`, which is all that was tried so far, in order."""
    last = tried[-1]
    cause, setting = last.cause, _refusing(setting, tried)
    if cause.kind in _ADVICE:
        dropped = _without_own_flag(last, setting)
        if dropped is None:
            return Stop(reason=f"{cause.summary}; {_ADVICE[cause.kind]}")
        if dropped.flags.argv() not in {one.flags.argv() for one in tried}:
            return dropped
        # Without the refused flag it is what failed before: another way from there. All that the
        # refused line ended of is left aside, or "the same again" would mean that line.
        refused = {one.flags.argv() for one in tried if one.cause.kind == cause.kind}
        earlier = tuple(one for one in tried if one.flags.argv() not in refused)
        return next_step(earlier, setting, calibration)
    if cause.kind in _MOST_AGAIN:
        repeats = _repeats(tried)
        if repeats <= _MOST_AGAIN[cause.kind]:
            wait_s = _WAIT_S[cause.kind] * repeats
            return Again(wait_s=wait_s, reason=f"try {repeats + 1}: {cause.summary}")
    if len({one.flags.argv() for one in tried}) > MOST_STEPS:
        return Stop(reason=f"{cause.summary}; {MOST_STEPS} other configurations were tried")
    if cause.kind == "unbalanced" and cause.stage == "start":
        return _end(last)  # SGLang's own check: it looks at the card before any flag counts
    forecasts = _forecasts(last, setting, calibration)
    return _planned_step(tried, forecasts) or _blind_step(tried, forecasts) or _end(last)


def _refusing(setting: LadderBasis, tried: tuple[Tried, ...]) -> LadderBasis:
    """With the flags that an engine has refused, so that no later step brings one back."""
    refused = {
        one.cause.flag for one in tried if one.cause.kind in _ADVICE and one.cause.flag is not None
    }
    return replace(setting, refused_flags=setting.refused_flags | refused)


def _repeats(tried: tuple[Tried, ...]) -> int:
    """How often the last cause came of this configuration; of one that flags mend, of any.

    Others may lie between: causes that take turns must not go on for ever.
    """
    last = tried[-1]
    alike = [one for one in tried if one.cause.kind == last.cause.kind]
    if last.cause.kind in _MENDED_BY_FLAGS:
        return len(alike)
    return sum(one.flags.argv() == last.flags.argv() for one in alike)


def _end(last: Tried) -> Stop:
    kind = last.cause.kind
    if kind == "unbalanced":
        return Stop(reason=f"{last.cause.summary}; end that process, or use another card")
    if kind in ("weights", "draft_weights"):
        return Stop(reason=f"{last.cause.summary}; more cards per engine, or a smaller format")
    if kind in (*_POOL_KINDS, *SLACK_KINDS):
        return Stop(reason=f"{last.cause.summary}; no other flags fit this card")
    return Stop(reason=f"{last.cause.summary}; it came back every time")


def _without_own_flag(last: Tried, setting: LadderBasis) -> Step | None:
    """A flag of the plan's own that this release refuses is left out; the user's never is."""
    flag = last.cause.flag
    if flag is None or flag in setting.users_flags or not last.flags.has(flag):
        return None
    return Step(
        flags=last.flags.changed({flag: None}),
        change=f"--{flag} left out: this release refuses it",
        price="unknown",
    )


# -- forecasts


@dataclass(frozen=True, slots=True)
class _Forecasts:
    """Plans on the figures of the failed launch, each made once."""

    setting: LadderBasis
    calibration: Calibration | None
    layout: str
    """Of the launch that was measured: another layout is not."""
    _made: dict[tuple[str, ...], LaunchPlan | None] = field(default_factory=dict)

    def of(self, flags: LaunchFlags) -> LaunchPlan | None:
        """The forecast, or None where the model or card is unknown or SGLang would refuse."""
        line = flags.argv()
        if line not in self._made:
            self._made[line] = self._forecast(flags)
        return self._made[line]

    def _forecast(self, flags: LaunchFlags) -> LaunchPlan | None:
        setting = self.setting
        if setting.model is None or setting.gpu is None:
            return None
        plan = plan_launch(
            setting.model,
            setting.gpu,
            flags,
            version=setting.version,
            lengths=setting.lengths,
            calibration=self.calibration if layout_name(flags) == self.layout else None,
        )
        return plan if isinstance(plan, LaunchPlan) else None


def _forecasts(last: Tried, setting: LadderBasis, calibration: Calibration | None) -> _Forecasts:
    if calibration is not None:
        # Graphs of a launch that failed among them are not all of its graphs.
        calibration = replace(calibration, graph_bytes=None)
    return _Forecasts(setting, calibration, layout_name(last.flags))


# -- steps that the planner prices


@dataclass(frozen=True, slots=True)
class _Candidate:
    flags: LaunchFlags
    plan: LaunchPlan
    rate: float
    num_changes: int


def _planned_step(tried: tuple[Tried, ...], forecasts: _Forecasts) -> Step | None:
    """The candidate that loses least, on the failed launch's own figures."""
    last = tried[-1]
    here = forecasts.of(last.flags)
    if here is None or last.cause.kind not in _MENDED_BY_FLAGS:
        return None
    demands = _demands(tried)
    for candidates in _rounds(tried, here, forecasts):
        found = [one for one in candidates if _meets(one.plan, demands, forecasts)]
        if found:
            best = max(found, key=lambda one: (one.rate, -one.num_changes, _room(one.plan)))
            return _step(last.flags, here, best, forecasts.setting)
    plain = [replace(demand, growth=1) for demand in demands]
    for candidates in _rounds(tried, here, forecasts):
        found = [one for one in candidates if _meets(one.plan, plain, forecasts)]
        if found:
            # The ladder's end is near: what has the most room, whatever it costs.
            best = max(found, key=lambda one: (_room(one.plan), one.rate, -one.num_changes))
            return _step(last.flags, here, best, forecasts.setting)
    return None


def _rounds(
    tried: tuple[Tried, ...], here: LaunchPlan, forecasts: _Forecasts
) -> Iterator[list[_Candidate]]:
    """What may be tried, in rounds: single changes before pairs, sure plans before doubtful."""
    last, known = tried[-1], {one.flags.argv() for one in tried}
    changes = list(_changes(here.settings, forecasts.setting))
    for width in (1, 2):
        for verdicts in (("fits",), ("fits", "marginal")):
            yield [
                candidate
                for candidate in _candidates(last, changes, width, forecasts)
                if candidate.flags.argv() not in known
                and not any(map(candidate.flags.has, forecasts.setting.refused_flags))
                and candidate.plan.verdict in verdicts
            ]


def _candidates(
    last: Tried, changes: list[Changes], width: int, forecasts: _Forecasts
) -> Iterator[_Candidate]:
    spare = _without_spare_context(last.flags, forecasts.setting)
    for group in combinations(changes, width):
        merged = {name: value for change in group for name, value in change.items()}
        if len(merged) < sum(len(change) for change in group):
            continue
        for fraction in _fractions(last.flags, forecasts):
            line = last.flags.changed({**spare, **merged, **fraction})
            plan = forecasts.of(line)
            if plan is not None and plan.requests_at_expected_length:
                count = len([change for change in group if change]) + len(fraction)
                yield _Candidate(line, plan, forecasts.setting.rate(plan), count)


def _without_spare_context(flags: LaunchFlags, setting: LadderBasis) -> Changes:
    """A context that is longer than any row needs is cut to the need: that costs nothing."""
    least, whole = setting.least_context_tokens, setting.model and setting.model.context_length
    given = flags.number("context-length") or whole
    return {"context-length": str(least)} if least and given and least < given else {}


def _fractions(flags: LaunchFlags, forecasts: _Forecasts) -> Iterator[Changes]:
    """The fraction as it is, and others on both sides: a plan tells which side is right."""
    plan = forecasts.of(flags)
    current = flags.fraction("mem-fraction-static")
    if current is None and plan is not None:
        current = plan.settings.mem_fraction_static
    for step in _FRACTION_STEPS:
        if not step:
            yield {}
            continue
        value = round((current or 0.85) + step, 2)
        if FRACTIONS_ALLOWED[0] <= value <= FRACTIONS_ALLOWED[1]:
            yield {"mem-fraction-static": f"{value:g}"}


def _changes(settings: PlanSettings, setting: LadderBasis) -> Iterator[Changes]:
    """What may be changed beside the fraction; the first changes nothing else."""
    yield {}
    yield from _speculation_changes(settings)
    yield from _request_changes(settings)
    if settings.decode_graph_max_bs > 8:
        yield {"cuda-graph-max-bs-decode": str(max(8, settings.decode_graph_max_bs // 2))}
        yield {"cuda-graph-max-bs-decode": str(max(8, settings.decode_graph_max_bs // 8))}
    chunk = settings.chunked_prefill_size * settings.attention_dp_size
    yield from ({"chunked-prefill-size": str(part)} for part in (chunk // 2, chunk // 4)
                if part >= 1024)  # fmt: skip
    yield from _cache_changes(settings, setting)
    yield from _rank_changes(settings, setting)


def _speculation_changes(settings: PlanSettings) -> Iterator[Changes]:
    speculation = settings.speculation
    if isinstance(speculation, NoSpeculation):
        return
    if speculation.algorithm in ("EAGLE", "EAGLE3", "NEXTN"):
        for steps in range(speculation.steps - 1, 0, -1):
            yield {
                "speculative-num-steps": str(steps),
                "speculative-num-draft-tokens": str(steps + 1),
                "speculative-eagle-topk": "1",
            }
    yield dict.fromkeys(
        (
            "speculative-algorithm", "speculative-num-steps", "speculative-eagle-topk",
            "speculative-num-draft-tokens", "speculative-draft-model-path",
        )
    )  # fmt: skip


def _request_changes(settings: PlanSettings) -> Iterator[Changes]:
    requests = settings.max_running_requests
    tried = (256, 64, 16) if requests is None else (requests * 3 // 4, requests // 2, requests // 4)
    yield from ({"max-running-requests": str(fewer)} for fewer in tried if fewer >= 1)


def _cache_changes(settings: PlanSettings, setting: LadderBasis) -> Iterator[Changes]:
    hybrid = setting.model is not None and isinstance(setting.model.state, LinearState)
    if not settings.disable_radix_cache:
        yield {"disable-radix-cache": "", "mamba-radix-cache-strategy": None}
    if hybrid and settings.mamba_strategy == "extra_buffer" and not settings.disable_radix_cache:
        yield {"mamba-radix-cache-strategy": "extra_buffer_lazy"}
    if hybrid and setting.may_change_state_dtype:
        yield {"mamba-ssm-dtype": "bfloat16"}


def _rank_changes(settings: PlanSettings, setting: LadderBasis) -> Iterator[Changes]:
    model = setting.model
    for ranks in _RANKS:
        at_most = setting.num_gpus // settings.pp_size
        if model is None or not settings.tp_size < ranks <= at_most:
            continue
        if model.heads % ranks == 0 and (
            not isinstance(model.ffn, Moe) or model.ffn.experts % ranks == 0
        ):
            yield {"tp-size": str(ranks)}


# -- better than what failed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """More of what a failed configuration ran out of, by `growth` times what it lacked."""

    failed: Tried
    growth: int


def _demands(tried: tuple[Tried, ...]) -> list[_Demand]:
    """Every failed configuration's; the ask grows with each that ran out of the same before it.

    A restart costs minutes, so that many small steps cost more than one that is too long.
    """
    demands, seen = [], list[tuple[bool, tuple[str, ...]]]()
    for one in tried:
        kind = (one.cause.kind in SLACK_KINDS, one.flags.argv())
        is_of_memory = one.cause.kind in (*SLACK_KINDS, *_POOL_KINDS)
        before = {line for in_slack, line in seen if in_slack == kind[0]} - {kind[1]}
        growth = _ASK_GROWTH ** len(before) if is_of_memory else 1
        demands.append(_Demand(failed=one, growth=growth))
        seen += [kind] if is_of_memory else []
    return demands


def _meets(plan: LaunchPlan, demands: list[_Demand], forecasts: _Forecasts) -> bool:
    return all(_is_better(plan, demand, forecasts) for demand in demands)


def _is_better(plan: LaunchPlan, demand: _Demand, forecasts: _Forecasts) -> bool:
    """Whether a plan has as much more of what a failed configuration ran out of as is demanded.

    A forecast that had called the failed one good is wrong by an unknown amount in that place, so
    the verdict alone is not enough.
    """
    failed, growth = demand.failed, demand.growth
    there = forecasts.of(failed.flags)
    if there is None:
        return True
    kind = failed.cause.kind
    if kind in SLACK_KINDS:
        return _headroom(plan) >= _headroom(there) + growth * _lacking_bytes(failed.cause)
    if kind in _POOL_KINDS and there.verdict != "does_not_fit":
        more_slots = plan.capacity.state_slots > there.capacity.state_slots
        return (kind == "state_pool" and more_slots) or (
            plan.kv_bytes >= there.kv_bytes + growth * _MARGIN_BYTES
        )
    if kind == "weights":
        return plan.weights_bytes < there.weights_bytes
    if kind == "draft_weights":
        return _loaded_bytes(plan) < _loaded_bytes(there)
    return True


def _headroom(plan: LaunchPlan) -> int:
    return plan.headroom_bytes - sum(item.bytes for item in plan.headroom_items)


def _loaded_bytes(plan: LaunchPlan) -> int:
    return plan.weights_bytes + plan.draft_weights_bytes


def _room(plan: LaunchPlan) -> int:
    return min(_headroom(plan), plan.kv_bytes)


def _lacking_bytes(cause: Cause) -> int:
    """What the failed allocation lacked, and a margin for the next one."""
    oom = cause.oom
    if oom is None or oom.tried_gib is None:
        return 2 * _MARGIN_BYTES
    lacking_gib = max(0.0, oom.tried_gib - (oom.free_gib or 0.0))
    return int(lacking_gib * GIB) + _MARGIN_BYTES


# -- steps without a plan


def _blind_step(tried: tuple[Tried, ...], forecasts: _Forecasts) -> Step | None:
    """Usual remedies in order, where no plan can be made or a plan knows nothing of the cause."""
    last = tried[-1]
    known = {one.flags.argv() for one in tried}
    if last.cause.kind in _MENDED_BY_FLAGS and forecasts.of(last.flags) is not None:
        return None
    for changes in usual_remedies(last.flags, last.cause.kind):
        spare = _without_spare_context(last.flags, forecasts.setting)
        flags = last.flags.changed({**spare, **changes})
        refused = any(map(flags.has, forecasts.setting.refused_flags))
        if flags.argv() not in known and not refused:
            return Step(flags=flags, change=_change_text(last.flags, flags), price="unknown")
    return None


# -- words


def _step(before: LaunchFlags, here: LaunchPlan, best: _Candidate, setting: LadderBasis) -> Step:
    was, will = setting.rate(here), best.rate
    lost = f" ({(will / was - 1) * 100:+.0f} %)" if was else ""
    return Step(
        flags=best.flags,
        change=_change_text(before, best.flags),
        price=f"{was:,.0f} → {will:,.0f} {setting.rate_unit}{lost}, as planned",
    )


def _change_text(before: LaunchFlags, after: LaunchFlags) -> str:
    names = dict.fromkeys([name for name, _ in (*before.values, *after.values)])
    changed = []
    for name in names:
        was, will = _shown(before, name), _shown(after, name)
        if was != will:
            changed.append(f"--{name} {was} → {will}")
    return ", ".join(changed)


def _shown(flags: LaunchFlags, name: str) -> str:
    return (flags.text(name) or "on") if flags.has(name) else "off"
