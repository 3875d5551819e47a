"""Other launch flags that may be tried after a failure, and the choice among them. Pure.

Where the planner knows model and card, each candidate is planned on the figures that the failed
launch logged, and the one that loses least is chosen. Elsewhere the usual remedies are tried in
order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from pipeline.planner.memory.changes import (
    WITHOUT_PREFIX_CACHE,
    Changes,
    bf16_states,
    chunk_change,
    lazy_extra_buffer,
    more_tensor_ranks,
    nearby_fractions,
    shorter_drafts,
    without_prefix_cache,
    without_speculation,
)
from pipeline.planner.memory.plan import ExpectedLengths, plan_launch
from pipeline.planner.sglang.failures import Cause
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import layout_name
from pipeline.planner.sglang.wordings import CauseKind
from schemas.plan import Calibration, Gpu, LaunchPlan, ModelFacts, NoSpeculation, PlanSettings
from schemas.units import GIB, MIB

PlanPrice = Callable[[LaunchPlan], float]

POOL_KINDS = ("pool", "state_pool", "unbalanced")
HEADROOM_KINDS = ("graph_capture", "runtime")
# Crashes of a scheduler that serves: rare, so that an engine may work for hours in between
CRASH_KINDS: tuple[CauseKind, ...] = ("tokens_ran_out", "pool_leak", "speculation", "state_path")
MENDED_BY_FLAGS = (*POOL_KINDS, *HEADROOM_KINDS, "weights", "draft_weights")

# assumed: an allocation that failed is followed by others of this size
_MARGIN_BYTES = 256 * MIB
# The memory demanded grows by this factor with each configuration that ran out all the same: three
# steps add 1 + 2 + 4 times the first demand, 1.75 GiB where only the margin is known to be lacking.
# That is about the planner's own error (memory/verdict.py: 0.3 of the estimates and 400 MiB,
# 1.9 GiB for Qwen3.6-27B on an RTX PRO 6000), and at most twice what was really lacking.
_DEMAND_GROWTH = 2
_FRACTION_STEPS = (0.02, -0.02, 0.04, -0.04, 0.06, -0.06, 0.1, -0.1, 0.15, -0.15)
_DEFAULT_FRACTION = 0.85
_LEAST_CHUNK_TOKENS = 1024
_LEAST_GRAPH_BATCH = 8
_DEFAULT_REQUESTS = 64


def running_requests(plan: LaunchPlan) -> float:
    """Return the requests of the expected length that one engine runs at once."""
    return plan.requests_at_expected_length * plan.settings.attention_dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderBasis:
    """Facts about model, card and load. Without model or card no launch is planned."""

    model: ModelFacts | None
    gpu: Gpu | None
    num_gpus: int
    """Cards that the engine may use."""
    version: str | None
    lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    least_context_tokens: int | None = None
    """The shortest context that holds every row; None keeps the context as it is.

    The first step cuts a longer context to this, since the rest serves no row.
    """
    may_change_state_dtype: bool = False
    users_flags: frozenset[str] = frozenset()
    """Flags of the run file; the others are the plan's own and may be dropped."""
    refused_flags: frozenset[str] = frozenset()
    """Flags that the installed engine rejects, whatever release it claims to be."""
    price: PlanPrice = running_requests
    price_unit: str = "requests at once"


Configuration = frozenset[tuple[str, tuple[str, ...]]]


def configuration(flags: LaunchFlags) -> Configuration:
    """Return the flags regardless of their order, which makes no difference to SGLang."""
    return frozenset(flags.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A configuration and the cause of its failure."""

    flags: LaunchFlags
    cause: Cause
    ended_s: float = 0.0

    @property
    def configuration(self) -> Configuration:
        return configuration(self.flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Another configuration, with what it changes and costs."""

    flags: LaunchFlags
    change: str
    price: str


def remedy(
    tried: tuple[Tried, ...],
    basis: LadderBasis,
    calibration: Calibration | None,
    *,
    ends_too_often: bool = False,
) -> Step | None:
    """Choose the next configuration after the last of `tried`, or None where nothing is left."""
    forecasts = _Forecasts(basis, calibration, layout_name(tried[-1].flags))
    step = _planned_step(tried, forecasts) or _usual_step(tried, forecasts)
    if step is None and (ends_too_often or tried[-1].cause.kind in CRASH_KINDS):
        return _first_new(_crash_remedies(tried, forecasts), tried, forecasts)
    return step


def _change_text(before: LaunchFlags, after: LaunchFlags) -> str:
    """Print the flags that differ, as `--name old → new`."""
    names = dict.fromkeys([name for name, _ in (*before.values, *after.values)])
    shown = {name: (_shown(before, name), _shown(after, name)) for name in names}
    return ", ".join(
        f"--{name} {was} → {will}" for name, (was, will) in shown.items() if was != will
    )


def _shown(flags: LaunchFlags, name: str) -> str:
    return (flags.text(name) or "on") if flags.has(name) else "off"


# --- forecasts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Forecasts:
    """Plans on the figures of the failed launch, each made once."""

    basis: LadderBasis
    calibration: Calibration | None
    layout: str
    """Layout of the measured launch; plans of another layout are not calibrated."""
    _plans: dict[tuple[str, ...], LaunchPlan | None] = field(default_factory=dict)

    def plan(self, flags: LaunchFlags) -> LaunchPlan | None:
        """Plan a launch; None where the model or card is unknown or SGLang would refuse it."""
        line = flags.argv()
        if line not in self._plans:
            self._plans[line] = self._new_plan(flags)
        return self._plans[line]

    def _new_plan(self, flags: LaunchFlags) -> LaunchPlan | None:
        basis = self.basis
        if basis.model is None or basis.gpu is None:
            return None
        plan = plan_launch(
            basis.model,
            basis.gpu,
            flags,
            version=basis.version,
            lengths=basis.lengths,
            calibration=self.calibration if layout_name(flags) == self.layout else None,
        )
        return plan if isinstance(plan, LaunchPlan) else None


# --- the best planned candidate -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    flags: LaunchFlags
    plan: LaunchPlan
    price: float
    num_changes: int

    @property
    def by_price(self) -> tuple[float, int, int]:
        return self.price, -self.num_changes, _spare_bytes(self.plan)

    @property
    def by_memory(self) -> tuple[int, float, int]:
        return _spare_bytes(self.plan), self.price, -self.num_changes


def _planned_step(tried: tuple[Tried, ...], forecasts: _Forecasts) -> Step | None:
    last = tried[-1]
    failed_plan = forecasts.plan(last.flags)
    if failed_plan is None or last.cause.kind not in MENDED_BY_FLAGS:
        return None
    best = _best_candidate(tried, failed_plan, forecasts)
    if best is None:
        return None
    return Step(
        flags=best.flags,
        change=_change_text(last.flags, best.flags),
        price=_price_text(failed_plan, best.price, forecasts.basis),
    )


def _price_text(failed_plan: LaunchPlan, price: float, basis: LadderBasis) -> str:
    before = basis.price(failed_plan)
    lost = f" ({(price / before - 1) * 100:+.0f} %)" if before else ""
    return f"{before:,.0f} → {price:,.0f} {basis.price_unit}{lost}, as planned"


def _best_candidate(
    tried: tuple[Tried, ...], failed_plan: LaunchPlan, forecasts: _Forecasts
) -> _Candidate | None:
    """Choose the candidate that loses least, or the roomiest one where none meets all demands."""
    demands = _demands(tried)
    for candidates in _rounds(tried, failed_plan, forecasts):
        good = [one for one in candidates if _meets(one.plan, demands, forecasts)]
        if good:
            return max(good, key=lambda one: one.by_price)
    first_demands = [replace(demand, growth=1) for demand in demands]
    for candidates in _rounds(tried, failed_plan, forecasts):
        good = [one for one in candidates if _meets(one.plan, first_demands, forecasts)]
        if good:
            return max(good, key=lambda one: one.by_memory)
    return None


def _rounds(
    tried: tuple[Tried, ...], failed_plan: LaunchPlan, forecasts: _Forecasts
) -> Iterator[list[_Candidate]]:
    """List candidates in rounds: single changes before pairs, `fits` before `marginal`."""
    last, known = tried[-1], {one.configuration for one in tried}
    changes = list(_changes(failed_plan.settings, last.flags, forecasts.basis))
    for num_together in (1, 2):
        for verdicts in (("fits",), ("fits", "marginal")):
            yield [
                candidate
                for candidate in _candidates(last, changes, num_together, forecasts)
                if configuration(candidate.flags) not in known
                and not any(map(candidate.flags.has, forecasts.basis.refused_flags))
                and candidate.plan.verdict in verdicts
            ]


def _candidates(
    last: Tried, changes: list[Changes], num_together: int, forecasts: _Forecasts
) -> Iterator[_Candidate]:
    spare = _without_spare_context(last.flags, forecasts.basis)
    for group in combinations(changes, num_together):
        merged = {name: value for change in group for name, value in change.items()}
        if len(merged) < sum(len(change) for change in group):
            # Two changes of one flag.
            continue
        for fraction in _fractions(last.flags, forecasts):
            line = last.flags.changed({**spare, **merged, **fraction})
            plan = forecasts.plan(line)
            if plan is not None and plan.requests_at_expected_length:
                count = len([change for change in group if change]) + len(fraction)
                yield _Candidate(line, plan, forecasts.basis.price(plan), count)


def _without_spare_context(flags: LaunchFlags, basis: LadderBasis) -> Changes:
    """Cut a context that is longer than any row needs, which costs nothing."""
    least, whole = basis.least_context_tokens, basis.model and basis.model.context_length
    given = flags.number("context-length") or whole
    return {"context-length": str(least)} if least and given and least < given else {}


def _fractions(flags: LaunchFlags, forecasts: _Forecasts) -> Iterator[Changes]:
    """List the fraction as it is and others on both sides: the plans decide which side helps."""
    yield {}
    plan = forecasts.plan(flags)
    current = flags.fraction("mem-fraction-static")
    if current is None and plan is not None:
        current = plan.settings.mem_fraction_static
    yield from nearby_fractions(current or _DEFAULT_FRACTION, _FRACTION_STEPS)


def _changes(settings: PlanSettings, flags: LaunchFlags, basis: LadderBasis) -> Iterator[Changes]:
    """List what may change besides the fraction; the first entry changes nothing."""
    yield {}
    yield from shorter_drafts(settings)
    if not isinstance(settings.speculation, NoSpeculation):
        yield without_speculation(flags)
    yield from _request_changes(settings)
    if settings.decode_graph_max_bs > _LEAST_GRAPH_BATCH:
        for divisor in (2, 8):
            batch = max(_LEAST_GRAPH_BATCH, settings.decode_graph_max_bs // divisor)
            yield {"cuda-graph-max-bs-decode": str(batch)}
    for divisor in (2, 4):
        change = chunk_change(settings, divisor)
        if int(change["chunked-prefill-size"] or 0) >= _LEAST_CHUNK_TOKENS:
            yield change
    yield from without_prefix_cache(settings)
    yield from lazy_extra_buffer(settings)
    if basis.model is None:
        return
    if basis.may_change_state_dtype:
        yield from bf16_states(flags, basis.model)
    yield from more_tensor_ranks(settings, basis.model, basis.num_gpus)


def _request_changes(settings: PlanSettings) -> Iterator[Changes]:
    requests = settings.max_running_requests
    limits = (
        (256, 64, 16) if requests is None else (requests * 3 // 4, requests // 2, requests // 4)
    )
    yield from ({"max-running-requests": str(limit)} for limit in limits if limit >= 1)


# --- demands on a candidate ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """More of what a failed configuration ran out of: `growth` times what was lacking."""

    failed: Tried
    growth: int


def _demands(tried: tuple[Tried, ...]) -> list[_Demand]:
    """Return one demand per failed configuration; later ones of the same kind demand more.

    A restart costs minutes, so many small steps cost more than one that is too long.
    """
    demands: list[_Demand] = []
    ran_out: set[tuple[bool, Configuration]] = set()
    for one in tried:
        in_headroom = one.cause.kind in HEADROOM_KINDS
        growth = 1
        if in_headroom or one.cause.kind in POOL_KINDS:
            earlier = {other for where, other in ran_out if where == in_headroom}
            growth = _DEMAND_GROWTH ** len(earlier - {one.configuration})
            ran_out.add((in_headroom, one.configuration))
        demands.append(_Demand(failed=one, growth=growth))
    return demands


def _meets(plan: LaunchPlan, demands: list[_Demand], forecasts: _Forecasts) -> bool:
    return all(_is_better(plan, demand, forecasts) for demand in demands)


def _is_better(plan: LaunchPlan, demand: _Demand, forecasts: _Forecasts) -> bool:
    """Check that a plan has as much more of what ran out as is demanded.

    A forecast that accepted the failed configuration is wrong by an unknown amount there, so the
    verdict alone is not enough.
    """
    failed, growth = demand.failed, demand.growth
    failed_plan = forecasts.plan(failed.flags)
    if failed_plan is None:
        return True
    kind = failed.cause.kind
    if kind in HEADROOM_KINDS:
        demanded_bytes = growth * _lacking_bytes(failed.cause)
        return _headroom_bytes(plan) >= _headroom_bytes(failed_plan) + demanded_bytes
    if kind in POOL_KINDS and failed_plan.verdict != "does_not_fit":
        more_slots = plan.capacity.state_slots > failed_plan.capacity.state_slots
        return (kind == "state_pool" and more_slots) or (
            plan.kv_bytes >= failed_plan.kv_bytes + growth * _MARGIN_BYTES
        )
    if kind == "weights":
        return plan.weights_bytes < failed_plan.weights_bytes
    if kind == "draft_weights":
        return _loaded_bytes(plan) < _loaded_bytes(failed_plan)
    return True


def _headroom_bytes(plan: LaunchPlan) -> int:
    return plan.headroom_bytes - sum(item.bytes for item in plan.headroom_items)


def _loaded_bytes(plan: LaunchPlan) -> int:
    return plan.weights_bytes + plan.draft_weights_bytes


def _spare_bytes(plan: LaunchPlan) -> int:
    return min(_headroom_bytes(plan), plan.kv_bytes)


def _lacking_bytes(cause: Cause) -> int:
    """Return what the failed allocation lacked, with a margin for the next one."""
    oom = cause.oom
    if oom is None or oom.tried_gib is None:
        return 2 * _MARGIN_BYTES
    lacking_gib = max(0.0, oom.tried_gib - (oom.free_gib or 0.0))
    return int(lacking_gib * GIB) + _MARGIN_BYTES


# --- usual remedies -----------------------------------------------------------------------------


def _usual_step(tried: tuple[Tried, ...], forecasts: _Forecasts) -> Step | None:
    """Take the first usual remedy where no plan can be made or a plan cannot see the cause."""
    last = tried[-1]
    if last.cause.kind in MENDED_BY_FLAGS and forecasts.plan(last.flags) is not None:
        return None
    return _first_new(_usual_remedies(last.flags, last.cause.kind), tried, forecasts)


def _first_new(
    remedies: Iterator[Changes], tried: tuple[Tried, ...], forecasts: _Forecasts
) -> Step | None:
    """Take the first changes that give a configuration that has not failed."""
    last, basis = tried[-1].flags, forecasts.basis
    known = {one.configuration for one in tried}
    spare = _without_spare_context(last, basis)
    for changes in remedies:
        flags = last.changed({**spare, **changes})
        if configuration(flags) in known or any(map(flags.has, basis.refused_flags)):
            continue
        before, after = forecasts.plan(last), forecasts.plan(flags)
        price = "unknown"
        if before is not None and after is not None:
            price = _price_text(before, basis.price(after), basis)
        elif before is not None:
            # SGLang would refuse these flags.
            continue
        return Step(flags=flags, change=_change_text(last, flags), price=price)
    return None


# --- remedies of crashes ------------------------------------------------------------------------


def _crash_remedies(tried: tuple[Tried, ...], forecasts: _Forecasts) -> Iterator[Changes]:
    """List what keeps a scheduler off the code that crashed, likeliest first, each change once."""
    kind, flags = tried[-1].cause.kind, tried[-1].flags
    fewer = list(_fewer_requests(flags, forecasts.plan(flags)))
    has_fewer = len({one.flags.number("max-running-requests") for one in tried}) > 1
    first = [] if has_fewer else fewer
    mtp = [without_speculation(flags)] if flags.has("speculative-algorithm") else []
    cache = [] if flags.has("disable-radix-cache") else [WITHOUT_PREFIX_CACHE]
    order = {
        "speculation": (mtp, first, cache),
        "state_path": (cache, mtp, first),
    }.get(kind, (first, mtp, cache))
    for changes in order:
        yield from changes
    yield from fewer


def _fewer_requests(flags: LaunchFlags, plan: LaunchPlan | None) -> Iterator[Changes]:
    planned = int(running_requests(plan)) if plan is not None else 0
    requests = flags.number("max-running-requests") or planned or _DEFAULT_REQUESTS
    if requests > 1:
        yield {"max-running-requests": str(requests // 2)}


def _usual_remedies(flags: LaunchFlags, kind: CauseKind) -> Iterator[Changes]:
    if kind == "nccl":
        yield {"disable-custom-all-reduce": ""}
    if kind == "host_memory" and flags.has("enable-hierarchical-cache"):
        yield dict.fromkeys(("enable-hierarchical-cache", "hicache-ratio", "hicache-size"))
    current = flags.fraction("mem-fraction-static") or _DEFAULT_FRACTION
    if kind in ("pool", "state_pool"):
        yield from nearby_fractions(current, (0.03,))
    if kind in HEADROOM_KINDS:
        yield from nearby_fractions(current, (-0.04,))
    if kind in ("draft_weights", "state_pool", *HEADROOM_KINDS) and flags.has(
        "speculative-algorithm"
    ):
        yield without_speculation(flags)
    if kind in HEADROOM_KINDS:
        yield {"cuda-graph-max-bs-decode": "16"}
        yield {"chunked-prefill-size": "2048"}
    if kind == "state_pool":
        yield WITHOUT_PREFIX_CACHE
    if kind in (*HEADROOM_KINDS, "state_pool"):
        yield from _fewer_requests(flags, None)
