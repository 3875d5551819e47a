"""From a model and hardware options to the flags that give the most.

`best_candidates` tries launches and returns the best of each shape that form 1 calls `fits`;
`best_plans` makes plans of the first. What "best" means is one function: running requests here,
tokens a second for each dollar where `rated_plans` asks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from pipeline.planner.memory.sizing import Sized, assess
from pipeline.planner.memory.verdict import judgement
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
_BETWEEN = (1.5, 0.75)  # tried around the best of them
_STEPS = (1, 2, 3)
# The longest request that the engine is asked to hold: this many standard deviations over the
# mean, or the model's own limit. assumed: lengths fall off about as a log-normal's do
_TAIL_DEVIATIONS = 6
# Room for the longest prompts beside the longest completion. assumed: four means, or this
_LONG_PROMPT_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOption:
    """Cards of one kind in one machine."""

    gpu: Gpu
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """What the search may touch. The last two change what the model writes."""

    mtp: bool = True
    prefix_cache: bool = True
    attention_dp: bool = True
    pipeline: bool = True
    kv_dtype: bool = False
    state_dtype: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A launch that fits, and how many copies of it the hardware holds.

    `requests_a_replica` run at once by memory and by the engine's limit, each of mean length.
    """

    hardware: HardwareOption
    launch: ResolvedLaunch
    sized: Sized
    replicas: int
    requests_a_replica: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """One answer of the search."""

    plan: LaunchPlan
    candidate: Candidate
    hardware: HardwareOption
    replicas: int
    requests_in_all: int


Rank = Callable[[Candidate], float]


def running_requests_in_all(candidate: Candidate) -> float:
    """Requests of the expected length that run at once, over all replicas."""
    return candidate.replicas * candidate.requests_a_replica


def best_plans(
    model: ModelFacts,
    options: tuple[HardwareOption, ...],
    lengths: ExpectedLengths,
    limits: SearchLimits,
    *,
    base: LaunchFlags,
    version: str | None = None,
    output_tokens_cv: float = 0.5,
    calibrations: Mapping[str, Calibration] | None = None,
    rank: Rank = running_requests_in_all,
    most: int = 10,
) -> tuple[FoundPlan, ...]:
    """The best launch of each shape that fits, best first."""
    found = best_candidates(
        model, options, lengths, limits, base=base, version=version,
        output_tokens_cv=output_tokens_cv, calibrations=calibrations, rank=rank,
    )  # fmt: skip
    plans = []
    for candidate in found:
        plan = planned(candidate, lengths, version)
        if plan is not None:
            plans.append(plan)
        if len(plans) == most:
            break
    return tuple(plans)


def best_candidates(
    model: ModelFacts,
    options: tuple[HardwareOption, ...],
    lengths: ExpectedLengths,
    limits: SearchLimits,
    *,
    base: LaunchFlags,
    version: str | None = None,
    output_tokens_cv: float = 0.5,
    calibrations: Mapping[str, Calibration] | None = None,
    rank: Rank = running_requests_in_all,
) -> tuple[Candidate, ...]:
    """The best of each shape that fits, best first; PlanError where none does."""
    if lengths.total_tokens() > model.context_length:
        raise PlanError(
            f"lengths: {lengths.prompt_tokens} prompt and {lengths.output_tokens} output tokens "
            f"are more than the {model.context_length} that {model.name} holds"
        )
    context = _context_length(model, lengths, output_tokens_cv)
    found: list[tuple[float, Candidate]] = []
    for option in options:
        measured = (calibrations or {}).get(option.gpu.name)
        for shape in _shapes(model, option, limits, base, version):
            is_alike = measured is not None and fits_layout(measured, base.changed(shape))
            calibration = measured if is_alike else None
            candidate = _best_of_shape(
                model, option, shape, lengths, base, context, version, calibration
            )
            if candidate is not None:
                found.append((rank(candidate), candidate))
    if not found:
        reasons = "; ".join(_why_not(model, option, lengths, base, version) for option in options)
        raise PlanError(f"no plan fits {model.name} on {reasons}")
    # Equal figures: the plan with fewer flags, then the one with more tokens to spare.
    found.sort(key=lambda pair: (-pair[0], len(pair[1].launch.flags.values), -_tokens(pair[1])))
    return tuple(candidate for _, candidate in found)


def _why_not(
    model: ModelFacts,
    option: HardwareOption,
    lengths: ExpectedLengths,
    base: LaunchFlags,
    version: str | None,
) -> str:
    """The option, and where its plainest launch on the most ranks ends."""
    ranks = max(tp for tp in tensor_ranks(model) if tp <= option.count)
    plain = {"tp-size": str(ranks), **fraction_change(_FRACTIONS[0])}
    line = base.changed({name: value for name, value in plain.items() if not base.has(name)})
    plan = plan_launch(model, option.gpu, line, version=version, lengths=lengths)
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


def _context_length(model: ModelFacts, lengths: ExpectedLengths, cv: float) -> int:
    tail = lengths.output_tokens * (1 + _TAIL_DEVIATIONS * cv)
    prompt = 2 * lengths.prompt_tokens
    if lengths.output_limit_tokens is not None:
        tail = lengths.output_limit_tokens
        prompt = max(2 * prompt, _LONG_PROMPT_TOKENS)
    wanted = int(prompt + tail)
    rounded = -(-wanted // 1024) * 1024
    return min(max(rounded, 4096), model.context_length)


# --- what is tried ----------------------------------------------------------------------------


def _shapes(
    model: ModelFacts,
    option: HardwareOption,
    limits: SearchLimits,
    base: LaunchFlags,
    version: str | None,
) -> Iterator[Changes]:
    """Every choice but the fraction, the chunk and the number of requests."""
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
        # Whole attention on every rank pays where the latent is stored whole anyway.
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
    """Stages hand over little where tensor-parallel ranks add up much: over PCIe.

    Ranks that are given stand for the whole layout.
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
    """refusals.py tells of them too: they are left out here to spare the time."""
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


def _best_of_shape(
    model: ModelFacts,
    option: HardwareOption,
    shape: Changes,
    lengths: ExpectedLengths,
    base: LaunchFlags,
    context: int,
    version: str | None,
    calibration: Calibration | None,
) -> Candidate | None:
    """The most requests that this shape runs, over chunks, requests and fractions."""

    def tried(chunk: str, requests: int) -> Candidate | None:
        wanted: Changes = {
            "context-length": str(context),
            "chunked-prefill-size": chunk,
            "max-running-requests": str(requests),
        }
        kept = {name: value for name, value in wanted.items() if not base.has(name)}
        line = base.changed({**kept, **shape})
        return _highest_fraction(model, option, line, lengths, version, calibration)

    limits = _request_limits(base, shape, model)
    chunks = _CHUNKS[:1] if base.has("chunked-prefill-size") else _CHUNKS
    found = [(tried(chunk, limit), limit) for chunk in chunks for limit in limits]
    fitting = [(candidate, limit) for candidate, limit in found if candidate is not None]
    if not fitting:
        return None
    best, limit = max(fitting, key=lambda pair: pair[0].requests_a_replica)
    if len(limits) == 1:
        return best
    chunk = best.launch.flags.text("chunked-prefill-size")
    for factor in _BETWEEN:
        other = tried(chunk, int(limit * factor))
        if other is not None and other.requests_a_replica > best.requests_a_replica:
            best, limit = other, int(limit * factor)
    # Memory set aside for more requests than run is missing to those that do: halve the gap.
    while limit - best.requests_a_replica > max(1, limit // 50):
        limit = (limit + best.requests_a_replica) // 2
        other = tried(chunk, limit)
        if other is None or other.requests_a_replica <= best.requests_a_replica:
            break
        best = other
    return best


def _request_limits(base: LaunchFlags, shape: Changes, model: ModelFacts) -> tuple[int, ...]:
    """The limit only matters where states are reserved for it."""
    reserving = ("disable-radix-cache", "speculative-algorithm")
    reserved = isinstance(model.state, LinearState) and any(
        flag in shape or base.has(flag) for flag in reserving
    )
    if base.has("max-running-requests") or not reserved:
        return _REQUESTS[:1]
    return _REQUESTS


def _highest_fraction(
    model: ModelFacts,
    option: HardwareOption,
    flags: LaunchFlags,
    lengths: ExpectedLengths,
    version: str | None,
    calibration: Calibration | None,
) -> Candidate | None:
    fractions = (None,) if flags.has("mem-fraction-static") else _FRACTIONS
    for fraction in fractions:
        line = flags if fraction is None else flags.changed(fraction_change(fraction))
        launch = _launch(model, option, line, version, calibration)
        if launch is None:
            return None
        sized = assess(launch)
        if not isinstance(sized, Sized) or judgement(launch, sized).verdict != "fits":
            continue
        return _candidate(option, launch, sized, lengths)
    return None


def _candidate(
    option: HardwareOption, launch: ResolvedLaunch, sized: Sized, lengths: ExpectedLengths
) -> Candidate | None:
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


def _launch(
    model: ModelFacts,
    option: HardwareOption,
    flags: LaunchFlags,
    version: str | None,
    calibration: Calibration | None,
) -> ResolvedLaunch | None:
    rules, _ = rules_for(version)
    launch = resolve_launch(model, option.gpu, flags, rules, calibration)
    return None if isinstance(launch, RefusedLaunch) else launch


def planned(
    candidate: Candidate, lengths: ExpectedLengths, version: str | None
) -> FoundPlan | None:
    """The candidate as form 1 sees it, with the request limit that the lengths bear."""
    launch = candidate.launch
    flags = launch.flags.changed({"max-running-requests": str(candidate.requests_a_replica)})
    for line in (flags, launch.flags):
        plan = plan_launch(
            launch.model, launch.gpu, line, version=version, lengths=lengths,
            calibration=launch.calibration,
        )  # fmt: skip
        if not isinstance(plan, LaunchPlan) or plan.verdict != "fits":
            continue
        held = _held(candidate, line, lengths, version)
        if held is not None:
            return FoundPlan(
                plan=plan,
                candidate=held,
                hardware=candidate.hardware,
                replicas=candidate.replicas,
                requests_in_all=candidate.replicas * held.requests_a_replica,
            )
    return None


def _held(
    candidate: Candidate, flags: LaunchFlags, lengths: ExpectedLengths, version: str | None
) -> Candidate | None:
    """The candidate again under other flags."""
    launch = _launch(
        candidate.launch.model, candidate.hardware, flags, version, candidate.launch.calibration
    )
    sized = assess(launch) if launch else None
    if launch is None or not isinstance(sized, Sized):
        return None
    return _candidate(candidate.hardware, launch, sized, lengths)
