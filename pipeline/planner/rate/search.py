"""Search for the flags under which a model runs best on some hardware.

`best_candidates` tries launches and returns the best of each shape whose verdict is `fits`;
`best_plans` plans the first of them. "Best" is a function of the caller: running requests by
default, tokens/s per dollar in `ranking`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from pipeline.errors import PlanError
from pipeline.planner.memory.changes import (
    BF16_STATES,
    EXTRA_BUFFER,
    LAZY_EXTRA_BUFFER,
    TENSOR_RANKS,
    WITHOUT_PREFIX_CACHE,
    Changes,
    draft_change,
    fraction_change,
    tensor_ranks,
)
from pipeline.planner.memory.launch import ResolvedLaunch, resolve_launch
from pipeline.planner.memory.plan import ExpectedLengths, plan_launch
from pipeline.planner.memory.sizing import Sized, Stopped, assess, assess_loaded, load_figures
from pipeline.planner.memory.verdict import fits
from pipeline.planner.rate.running import cap_of
from pipeline.planner.sglang.calibration import fits_layout
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.releases import rules_for, runs_in_stages
from pipeline.planner.sglang.settings import RefusedLaunch
from schemas.plan import BuiltInDraft, Calibration, Gpu, LaunchPlan, LinearState, ModelFacts, Moe

# Highest first: a higher fraction never gives fewer tokens, so the first that fits is the best.
_FRACTIONS = (0.95, 0.93, 0.91, 0.89, 0.87, 0.85, 0.82, 0.78, 0.72, 0.65)
_CHUNKS = ("8192", "4096")
_REQUESTS = (2048, 1024, 512, 256, 128, 64, 32, 16)
# Tried around the best of them.
_BETWEEN = (1.5, 0.75)
_STEPS = (1, 2, 3)
# Longest output to plan for: this many standard deviations above the mean, up to the model's limit.
# assumed: lengths are about log-normal
_TAIL_DEVIATIONS = 6
# Longest prompt to plan for beside the longest completion. assumed: four means, or this
_LONG_PROMPT_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOption:
    """Cards of one kind in one machine."""

    gpu: Gpu
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Flags that the search may change. The last two change the model's output."""

    mtp: bool = True
    prefix_cache: bool = True
    attention_dp: bool = True
    pipeline: bool = True
    kv_dtype: bool = False
    state_dtype: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A launch that fits, and the number of its copies on the hardware.

    `requests_a_replica` is the number of requests of mean length that one copy runs at once.
    """

    hardware: HardwareOption
    launch: ResolvedLaunch
    sized: Sized
    replicas: int
    requests_a_replica: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """Plan of a candidate."""

    plan: LaunchPlan
    candidate: Candidate
    hardware: HardwareOption
    replicas: int
    requests_in_all: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuery:
    """A model, the cards that it may run on, and the flags that every plan keeps.

    `calibrations` are by the name of the card; a launch of another layout ignores them.
    """

    model: ModelFacts
    options: tuple[HardwareOption, ...]
    limits: SearchLimits
    base: LaunchFlags
    version: str | None = None
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)


Rank = Callable[[Candidate], float]


def running_requests_in_all(candidate: Candidate) -> float:
    """Count the requests of expected length that run at once over all replicas."""
    return candidate.replicas * candidate.requests_a_replica


def best_plans(
    query: SearchQuery,
    lengths: ExpectedLengths,
    *,
    rank: Rank = running_requests_in_all,
    most: int = 10,
) -> tuple[FoundPlan, ...]:
    """Return the best launch of each shape that fits, best first. Raises PlanError for none."""
    plans = []
    for candidate in best_candidates(query, lengths, rank=rank):
        plan = planned(candidate, lengths, query.version)
        if plan is not None:
            plans.append(plan)
        if len(plans) == most:
            break
    return tuple(plans)


def best_candidates(
    query: SearchQuery, lengths: ExpectedLengths, *, rank: Rank = running_requests_in_all
) -> tuple[Candidate, ...]:
    """Return the best candidate of each shape that fits, best first. Raises PlanError for none."""
    model = query.model
    if lengths.total_tokens() > model.context_length:
        raise PlanError(
            f"lengths: {lengths.prompt_tokens} prompt and {lengths.output_tokens} output tokens "
            f"are more than the {model.context_length} that {model.name} holds"
        )
    ranked: list[tuple[float, Candidate]] = []
    for shape in _all_shapes(query, lengths):
        candidate = _best_of_shape(shape, near=ranked[-1][1] if ranked else None)
        if candidate is not None:
            ranked.append((rank(candidate), candidate))
    if not ranked:
        reasons = "; ".join(_why_not(query, option, lengths) for option in query.options)
        raise PlanError(f"no plan fits {model.name} on {reasons}")
    # Ties: fewer flags first, then more tokens.
    ranked.sort(key=lambda pair: (-pair[0], len(pair[1].launch.flags.values), -_tokens(pair[1])))
    return tuple(candidate for _, candidate in ranked)


def _why_not(query: SearchQuery, option: HardwareOption, lengths: ExpectedLengths) -> str:
    """Name the option, and where its plainest launch on the most ranks fails."""
    model, base = query.model, query.base
    ranks = max(tp for tp in tensor_ranks(model) if tp <= option.count)
    plain = {"tp-size": str(ranks), **fraction_change(_FRACTIONS[0])}
    line = base.changed({name: value for name, value in plain.items() if not base.has(name)})
    plan = plan_launch(model, option.gpu, line, version=query.version, lengths=lengths)
    name = f"{_named(option)} at TP {line.number('tp-size')}"
    if isinstance(plan, LaunchPlan) and plan.stage is not None:
        return f"{name}: {plan.stage.replace('_', ' ')}: {plan.message}"
    if not isinstance(plan, LaunchPlan):
        return f"{name}: {plan.message}"
    return f"{name}: not one request of {lengths.held_tokens():,.0f} tokens"


def _named(option: HardwareOption) -> str:
    return f"{option.count} x {option.gpu.name}"


def _tokens(candidate: Candidate) -> int:
    return candidate.sized.pool.tokens


# --- what is tried ----------------------------------------------------------------------------


def _shapes(
    model: ModelFacts,
    option: HardwareOption,
    limits: SearchLimits,
    base: LaunchFlags,
    version: str | None,
) -> Iterator[Changes]:
    """List all choices but the fraction, the chunk and the number of requests."""
    choices = (
        _parallel_choices(model, option, limits, base)
        + _pipeline_choices(model, option, limits, base, version),
        _draft_choices(model, limits, base),
        _cache_choices(model, limits, base),
        _dtype_choices(model, limits, base),
    )
    for parts in product(*choices):
        merged = {name: value for part in parts for name, value in part.items()}
        if not _refused_in_stages(merged):
            yield merged


def _parallel_choices(
    model: ModelFacts, option: HardwareOption, limits: SearchLimits, base: LaunchFlags
) -> list[Changes]:
    if base.has("dp-size") and not base.has("enable-dp-attention"):
        raise PlanError(
            "engine.flags: --dp-size multiplies the cards of a launch; leave it out, the search "
            "counts replicas"
        )
    stages = base.number("pp-size") or 1
    found: list[Changes] = []
    for tp in _tensor_ranks(model, base):
        if tp * stages > option.count:
            continue
        found.append({"tp-size": str(tp)})
        # Data-parallel attention pays off where every rank stores the whole latent anyway.
        if limits.attention_dp and model.uses_mla and tp > 1 and isinstance(model.ffn, Moe):
            found.append({"tp-size": str(tp), "dp-size": str(tp), "enable-dp-attention": ""})
    return found


def _tensor_ranks(model: ModelFacts, base: LaunchFlags) -> list[int]:
    given = base.number("tp-size")
    if given is None:
        return tensor_ranks(model)
    return [given] if model.heads % given == 0 else []


def _pipeline_choices(
    model: ModelFacts,
    option: HardwareOption,
    limits: SearchLimits,
    base: LaunchFlags,
    version: str | None,
) -> list[Changes]:
    """List pipeline layouts for cards on PCIe, where stages send less than tensor ranks.

    Given ranks fix the whole layout.
    """
    known = runs_in_stages(model.architecture, rules_for(version)[0])
    given = base.has("tp-size") or base.has("pp-size")
    if option.gpu.nvlink or given or not (limits.pipeline and known):
        return []
    return [
        {"tp-size": str(tp), "pp-size": str(stages)}
        for tp in _tensor_ranks(model, base)
        for stages in TENSOR_RANKS[1:]
        if tp * stages <= option.count and stages <= model.layers
    ]


def _refused_in_stages(shape: Changes) -> bool:
    """Return whether SGLang refuses the shape; refusals.py decides it too, but later."""
    lazy = shape.get("mamba-radix-cache-strategy") == "extra_buffer_lazy"
    return "pp-size" in shape and ("speculative-algorithm" in shape or lazy)


def _draft_choices(model: ModelFacts, limits: SearchLimits, base: LaunchFlags) -> list[Changes]:
    if base.has("speculative-algorithm") or not isinstance(model.draft, BuiltInDraft):
        return [{}]
    found: list[Changes] = [{}]
    if limits.mtp:
        found += [{"speculative-algorithm": "EAGLE", **draft_change(steps)} for steps in _STEPS]
    return found


def _cache_choices(model: ModelFacts, limits: SearchLimits, base: LaunchFlags) -> list[Changes]:
    if base.has("disable-radix-cache") or base.has("mamba-radix-cache-strategy"):
        return [{}]
    found: list[Changes] = [WITHOUT_PREFIX_CACHE]
    if limits.prefix_cache:
        found.append({})
        if isinstance(model.state, LinearState) and model.state.kind != "conv":
            found += [EXTRA_BUFFER, LAZY_EXTRA_BUFFER]
    return found


def _dtype_choices(model: ModelFacts, limits: SearchLimits, base: LaunchFlags) -> list[Changes]:
    kv: list[Changes] = [{}]
    if limits.kv_dtype and not base.has("kv-cache-dtype"):
        kv.append({"kv-cache-dtype": "fp8_e4m3"})
    state: list[Changes] = [{}]
    if limits.state_dtype and isinstance(model.state, LinearState):
        state.append(BF16_STATES)
    return [{**one, **other} for one, other in product(kv, state)]


# --- trying one shape -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A launch on one kind of card, but for the fraction, the chunk and the request limit."""

    query: SearchQuery
    lengths: ExpectedLengths
    option: HardwareOption
    changes: Changes
    calibration: Calibration | None


def _all_shapes(query: SearchQuery, lengths: ExpectedLengths) -> Iterator[_Shape]:
    for option in query.options:
        measured = query.calibrations.get(option.gpu.name)
        for changes in _shapes(query.model, option, query.limits, query.base, query.version):
            is_alike = measured is not None and fits_layout(measured, query.base.changed(changes))
            yield _Shape(
                query=query,
                lengths=lengths,
                option=option,
                changes=changes,
                calibration=measured if is_alike else None,
            )


def _best_of_shape(shape: _Shape, near: Candidate | None) -> Candidate | None:
    """Find the chunk, request limit and fraction with which the shape runs the most requests.

    `near` is the best of a similar shape: its limit is tried first.
    """
    limits = _request_limits(shape)
    chunks = _CHUNKS[:1] if shape.query.base.has("chunked-prefill-size") else _CHUNKS
    best: Candidate | None = None
    for chunk in chunks:
        best = _better(best, _best_of_chunk(shape, chunk, limits, best, near=best or near))
    return best if best is None or len(limits) == 1 else _with_finer_limit(shape, best)


def _best_of_chunk(
    shape: _Shape,
    chunk: str,
    limits: tuple[int, ...],
    best: Candidate | None,
    near: Candidate | None,
) -> Candidate | None:
    """Return the candidate that runs the most requests with a chunk, if more than `best`.

    A limit reserves memory. So where fewer requests run than a limit allows, no higher limit runs
    more, and what does not fit with the lowest limit fits with none.
    """
    start = next((n for n, limit in enumerate(limits) if near and limit <= _limit_of(near)), 0)
    here = _with_limits(shape, chunk, limits[start])
    if here is None and (start + 1 == len(limits) or not _with_limits(shape, chunk, limits[-1])):
        return None
    for limit in reversed(limits[:start]):
        if here is None or not _is_full(here):
            break
        higher = _with_limits(shape, chunk, limit)
        if higher is None or higher.requests_a_replica < here.requests_a_replica:
            break
        here = higher
    best = _better(best, here)
    for limit in limits[start + 1 :]:
        if best is not None and _allowed(best, limit) <= best.requests_a_replica:
            break
        best = _better(best, _with_limits(shape, chunk, limit))
    return best


def _with_finer_limit(shape: _Shape, best: Candidate) -> Candidate:
    """Try request limits around the best one, then halve the gap to what runs.

    Memory reserved for requests that never run is taken from those that do.
    """
    chunk = best.launch.flags.text("chunked-prefill-size")
    for factor in _BETWEEN:
        limit = int(_limit_of(best) * factor)
        is_lower = factor < 1 and _allowed(best, limit) > best.requests_a_replica
        if is_lower or (factor > 1 and _is_full(best)):
            best = _better(best, _with_limits(shape, chunk, limit)) or best
    limit = _limit_of(best)
    while limit - best.requests_a_replica > max(1, limit // 50):
        limit = (limit + best.requests_a_replica) // 2
        other = _with_limits(shape, chunk, limit)
        if other is None or other.requests_a_replica <= best.requests_a_replica:
            break
        best = other
    return best


def _limit_of(candidate: Candidate) -> int:
    return candidate.launch.settings.max_running_requests or 0


def _allowed(candidate: Candidate, limit: int) -> int:
    """Return the most requests that run at a limit: each attention rank runs one at least."""
    return max(limit, candidate.launch.ranks.attention_dp_size)


def _is_full(candidate: Candidate) -> bool:
    """Return whether as many requests run as the limit allows."""
    each = max(_limit_of(candidate) // candidate.launch.ranks.attention_dp_size, 1)
    return candidate.requests_a_replica >= each * candidate.launch.ranks.attention_dp_size


def _better(best: Candidate | None, other: Candidate | None) -> Candidate | None:
    if best is None or other is None:
        return best or other
    return other if other.requests_a_replica > best.requests_a_replica else best


def _request_limits(shape: _Shape) -> tuple[int, ...]:
    """List the limits to try: one, unless state memory is reserved by the limit."""
    base, model = shape.query.base, shape.query.model
    reserving = ("disable-radix-cache", "speculative-algorithm")
    reserved = isinstance(model.state, LinearState) and any(
        flag in shape.changes or base.has(flag) for flag in reserving
    )
    if base.has("max-running-requests") or not reserved:
        return _REQUESTS[:1]
    return _REQUESTS


def _with_limits(shape: _Shape, chunk: str, requests: int) -> Candidate | None:
    base = shape.query.base
    wanted: Changes = {
        "context-length": str(_context_length(shape.query.model, shape.lengths)),
        "chunked-prefill-size": chunk,
        "max-running-requests": str(requests),
    }
    open_flags = {name: value for name, value in wanted.items() if not base.has(name)}
    return _highest_fraction(shape, base.changed({**open_flags, **shape.changes}))


def _context_length(model: ModelFacts, lengths: ExpectedLengths) -> int:
    """Return the longest request to plan for, in whole KiB of tokens."""
    tail = lengths.output_tokens * (1 + _TAIL_DEVIATIONS * lengths.output_tokens_cv)
    prompt = 2 * lengths.prompt_tokens
    if lengths.output_limit_tokens is not None:
        tail = lengths.output_limit_tokens
        prompt = max(2 * prompt, _LONG_PROMPT_TOKENS)
    rounded = -(-int(prompt + tail) // 1024) * 1024
    return min(max(rounded, 4096), model.context_length)


def _highest_fraction(shape: _Shape, flags: LaunchFlags) -> Candidate | None:
    rules, _ = rules_for(shape.query.version)
    is_given = flags.has("mem-fraction-static")
    line = flags if is_given else flags.changed(fraction_change(_FRACTIONS[0]))
    first = resolve_launch(shape.query.model, shape.option.gpu, line, rules, shape.calibration)
    if isinstance(first, RefusedLaunch):
        return None
    load = load_figures(first)
    for launch in (first,) if is_given else map(first.at_fraction, _FRACTIONS):
        sized = assess_loaded(launch, load)
        if isinstance(sized, Stopped):
            # A lower fraction leaves the pools less.
            return None
        if fits(launch, sized):
            return candidate_of(shape.option, launch, sized, shape.lengths)
    return None


def candidate_of(
    option: HardwareOption, launch: ResolvedLaunch, sized: Sized, lengths: ExpectedLengths
) -> Candidate | None:
    """Return a launch that was sized as a candidate; None if it runs no request of mean length."""
    each, _ = cap_of(sized, launch.model, lengths.held_tokens())
    if each < 1:
        return None
    return Candidate(
        hardware=option,
        launch=launch,
        sized=sized,
        replicas=option.count // (launch.ranks.tp_size * launch.ranks.pp_size),
        requests_a_replica=each * launch.ranks.attention_dp_size,
    )


def planned(
    candidate: Candidate, lengths: ExpectedLengths, version: str | None
) -> FoundPlan | None:
    """Plan the candidate with the request limit that its memory allows, if that fits."""
    launch = candidate.launch
    flags = launch.flags.changed({"max-running-requests": str(candidate.requests_a_replica)})
    for line in (flags, launch.flags):
        plan = plan_launch(
            launch.model, launch.gpu, line, version=version, lengths=lengths,
            calibration=launch.calibration,
        )  # fmt: skip
        if not isinstance(plan, LaunchPlan) or plan.verdict != "fits":
            continue
        limited = _with_flags(candidate, line, lengths)
        if limited is not None:
            return FoundPlan(
                plan=plan,
                candidate=limited,
                hardware=candidate.hardware,
                replicas=candidate.replicas,
                requests_in_all=candidate.replicas * limited.requests_a_replica,
            )
    return None


def _with_flags(
    candidate: Candidate, flags: LaunchFlags, lengths: ExpectedLengths
) -> Candidate | None:
    old = candidate.launch
    launch = resolve_launch(old.model, old.gpu, flags, old.rules, old.calibration)
    sized = assess(launch) if isinstance(launch, ResolvedLaunch) else None
    if isinstance(launch, RefusedLaunch) or not isinstance(sized, Sized):
        return None
    return candidate_of(candidate.hardware, launch, sized, lengths)
