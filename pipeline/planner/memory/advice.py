"""Find flags that make a launch fit, by assessing the launch with each of them changed.

A failed pool needs a higher fraction, too little headroom a lower one, and some launches have no
working value, so every value is tried. Advice costs a few dozen assessments.
"""

from collections.abc import Iterator
from dataclasses import replace

from pipeline.models.formats import online_format
from pipeline.planner.memory.changes import (
    WITHOUT_PREFIX_CACHE,
    Changes,
    bf16_states,
    chunk_change,
    draft_change,
    fraction_change,
    lazy_extra_buffer,
    more_tensor_ranks,
    nearby_fractions,
    without_prefix_cache,
    without_speculation,
)
from pipeline.planner.memory.launch import ResolvedLaunch, resolve_launch
from pipeline.planner.memory.sizing import Sized, Stopped, assess
from pipeline.planner.memory.verdict import Judgement, judgement
from pipeline.planner.sglang.flags import spelled_for
from pipeline.planner.sglang.settings import RefusedLaunch
from schemas.plan import Advice, LinearState, NoSpeculation

_FRACTIONS = tuple(round(0.50 + 0.01 * step, 2) for step in range(48))  # 0.50 … 0.97
# Tried, nearest first, where a change fits only with another fraction.
_FRACTION_STEPS = (0.03, -0.03, 0.06, -0.06, 0.1, -0.1)


def advice_for(launch: ResolvedLaunch) -> tuple[Advice, ...]:
    """Find what would make the launch fit; for one that fits, what would run more requests."""
    outcome = assess(launch)
    judged = judgement(launch, outcome)
    if judged.verdict == "fits" or (judged.stage is None and judged.doubts):
        # No flag removes doubts about the model or the release.
        return tuple(_more_requests(launch, outcome))
    return (*_fraction_advice(launch, judged), *_other_advice(launch))


# --- the fraction -----------------------------------------------------------------------------


def _fraction_advice(launch: ResolvedLaunch, judged: Judgement) -> list[Advice]:
    working = [value for value in _FRACTIONS if _fits(launch, fraction_change(value))]
    current = launch.settings.mem_fraction_static
    if not working:
        return [
            Advice(
                flag="--mem-fraction-static",
                value="none",
                effect="no value works",
                reason=_no_fraction_reason(judged),
                argv=(),
            )
        ]
    value = min(working, key=lambda option: abs(option - current))
    direction = "raise" if value > current else "lower"
    kind = (
        "the pools need more memory"
        if direction == "raise"
        else "the headroom outside the fraction is too small"
    )
    return [
        Advice(
            flag="--mem-fraction-static",
            value=f"{value:g}",
            effect=f"fits from {working[0]:g} to {working[-1]:g}; "
            + _effect(launch, fraction_change(value)),
            reason=f"{direction} it: {kind}",
            argv=_changed_argv(launch, fraction_change(value)),
        )
    ]


def _no_fraction_reason(judged: Judgement) -> str:
    if judged.stage in ("weights", "draft_weights"):
        return "the weights do not fit on this card"
    return "high values leave too little headroom, low values too little for the pools"


# --- everything else --------------------------------------------------------------------------


def _other_advice(launch: ResolvedLaunch) -> Iterator[Advice]:
    for changes, reason in _candidates(launch):
        found = _best_fraction(launch, changes)
        if found is None:
            continue
        flag, value = next(iter(changes.items()))
        yield Advice(
            flag=f"--{flag}",
            value=_shown(value),
            effect=_effect(launch, found) + _fraction_note(found, changes),
            reason=reason,
            argv=_changed_argv(launch, found),
        )


Change = tuple[Changes, str]


def _candidates(launch: ResolvedLaunch) -> Iterator[Change]:
    yield from _request_changes(launch)
    yield from _state_changes(launch)
    if not isinstance(launch.settings.speculation, NoSpeculation):
        yield draft_change(steps=1), "fewer tokens to verify at once"
        yield without_speculation(launch.flags), "no draft and no verify states"
    yield from _headroom_changes(launch)
    for changes in more_tensor_ranks(launch.settings, launch.model):
        yield changes, "the weights are divided over more cards"
    if launch.model.format.base == "bf16" and not launch.flags.text("quantization"):
        yield {"quantization": "fp8"}, "half the weights; changes results"


def _request_changes(launch: ResolvedLaunch) -> Iterator[Change]:
    requests = launch.settings.max_running_requests
    speculative = not isinstance(launch.settings.speculation, NoSpeculation)
    if speculative and isinstance(launch.model.state, LinearState) and requests and requests > 1:
        for fewer in sorted({requests // 2, requests // 4, requests // 8} - {0}, reverse=True):
            yield {"max-running-requests": str(fewer)}, "fewer requests keep fewer verify states"
    elif requests is None or requests > 64:
        yield {"max-running-requests": "64"}, "a smaller request table and smaller graphs"


def _state_changes(launch: ResolvedLaunch) -> Iterator[Change]:
    if not isinstance(launch.model.state, LinearState):
        return
    has_draft = not isinstance(launch.settings.speculation, NoSpeculation)
    for changes, reason in _smaller_states(launch):
        if not (has_draft and changes is WITHOUT_PREFIX_CACHE):
            yield changes, reason


def _smaller_states(launch: ResolvedLaunch) -> Iterator[Change]:
    for changes in bf16_states(launch.flags, launch.model):
        yield changes, "half the state of each request; changes results"
    for changes in lazy_extra_buffer(launch.settings):
        yield changes, "4 slots a request, not 5"
    for changes in without_prefix_cache(launch.settings):
        yield changes, "1 state slot a request"


def _headroom_changes(launch: ResolvedLaunch) -> Iterator[Change]:
    settings = launch.settings
    if settings.chunked_prefill_size > 2048:
        yield chunk_change(settings, divisor=2), "half the activations and indexer scratch"
    if settings.context_length > 65536:
        yield {"context-length": "32768"}, "a smaller request table and graph indices"
    if settings.decode_graph_max_bs > 32:
        yield {"cuda-graph-max-bs-decode": "16"}, "fewer and smaller graphs"


def _more_requests(launch: ResolvedLaunch, outcome: Stopped | Sized) -> Iterator[Advice]:
    """Find changes that run at least a quarter more requests, for a launch that fits."""
    if isinstance(outcome, Stopped) or outcome.limited_by != "state slots":
        return
    for changes, reason in _state_candidates(launch):
        better = _assessed(launch, changes)
        if isinstance(better, Sized) and better.running >= outcome.running * 1.25:
            flag, value = next(iter(changes.items()))
            yield Advice(
                flag=f"--{flag}",
                value=_shown(value),
                effect=_described(better),
                reason=reason,
                argv=_changed_argv(launch, changes),
            )


def _state_candidates(launch: ResolvedLaunch) -> Iterator[Change]:
    ratio = launch.flags.fraction("mamba-full-memory-ratio") or 0.9
    more = f"{ratio * 2:g}"
    yield {"mamba-full-memory-ratio": more}, "more of the pool for states, less for KV"
    yield from _smaller_states(launch)


def _changed_argv(launch: ResolvedLaunch, changes: Changes) -> tuple[str, ...]:
    """Return the whole launch line with the changes, under the names that its release knows."""
    return spelled_for(launch.flags.changed(changes).argv(), launch.rules.release)


def _shown(value: str | None) -> str:
    """A flag's value; a switch has none, and a flag to take away is off."""
    return "off" if value is None else value


# --- trying -----------------------------------------------------------------------------------


def changed_launch(launch: ResolvedLaunch, changes: Changes) -> ResolvedLaunch | None:
    """Resolve the launch with other flags; None where SGLang refuses them."""
    flags = launch.flags.changed(changes)
    model = launch.model
    if "quantization" in changes:
        model = replace(model, format=online_format(model.format, flags.text("quantization")))
    # Weights measured under one layout do not hold for another.
    same_layout = {"tp-size", "quantization"}.isdisjoint(changes)
    calibration = launch.calibration if same_layout else None
    changed = resolve_launch(model, launch.gpu, flags, launch.rules, calibration)
    return None if isinstance(changed, RefusedLaunch) else changed


def _assessed(launch: ResolvedLaunch, changes: Changes) -> Stopped | Sized | None:
    other = changed_launch(launch, changes)
    return None if other is None else assess(other)


def _fits(launch: ResolvedLaunch, changes: Changes) -> bool:
    other = changed_launch(launch, changes)
    return other is not None and judgement(other, assess(other)).verdict == "fits"


def _best_fraction(launch: ResolvedLaunch, changes: Changes) -> Changes | None:
    """Return the change as it is, or with the nearest fraction that makes it fit."""
    if _fits(launch, changes):
        return changes
    for fraction in nearby_fractions(launch.settings.mem_fraction_static, _FRACTION_STEPS):
        both = {**changes, **fraction}
        if _fits(launch, both):
            return both
    return None


def _fraction_note(found: Changes, changes: Changes) -> str:
    if "mem-fraction-static" in found and "mem-fraction-static" not in changes:
        return f" (with --mem-fraction-static {found['mem-fraction-static']})"
    return ""


def _effect(launch: ResolvedLaunch, changes: Changes) -> str:
    outcome = _assessed(launch, changes)
    return _described(outcome) if isinstance(outcome, Sized) else "fits"


def _described(outcome: Sized) -> str:
    return f"{outcome.running} requests, {outcome.pool.tokens:,} tokens"
