"""Verdict on a launch: fits, marginal or does not fit.

A verdict is sure if the launch ends the same way with better and with worse figures.
"""

from dataclasses import dataclass

from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.memory.sizing import (
    CAPTURE_MESSAGE,
    RUNTIME_MESSAGE,
    LoadFigures,
    Sized,
    Stopped,
    draft_load_message,
    pools_of,
)
from pipeline.planner.memory.state_pool import StatePool
from schemas.plan import Stage, Verdict
from schemas.units import GIB, MIB

# Error of the free memory before loading, fitted to public logs.
_CONTEXT_ERROR_BYTES = 410 * MIB
_CONTEXT_ERROR_RANKS_BYTES = 614 * MIB
# Weights from a config alone: within 1 % on logged cases, plus allocator rounding.
_WEIGHTS_ERROR_FRACTION = 0.01
_WEIGHTS_ROUNDING_BYTES = 256 * MIB
# A logged figure has only the log's own rounding error.
_CALIBRATED_ERROR_BYTES = 32 * MIB
# Error of the estimated graphs and activations: three tenths and the allocator's rounding. With it
# all scored failures but one are not reported as fitting.
_NEEDS_ERROR_FRACTION = 0.3
_NEEDS_ERROR_BYTES = 400 * MIB
# assumed: memory of a DGX Spark's system varies by this much between reruns of one launch
_UNIFIED_ERROR_BYTES = 4 * GIB
# assumed: releases from here on resemble 0.5.10 enough to be planned as it
_BARELY_KNOWN = (0, 4, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Verdict with its stage, the engine's message and the reasons for doubt."""

    verdict: Verdict
    stage: Stage | None
    message: str
    doubts: tuple[str, ...]


def uncertainty_bytes(launch: ResolvedLaunch, load: LoadFigures) -> int:
    """Return the error of the memory that is free for the pools."""
    known = launch.calibration
    context = _CONTEXT_ERROR_BYTES
    if launch.ranks.tp_size * launch.ranks.pp_size > 1:
        context = _CONTEXT_ERROR_RANKS_BYTES
    if launch.gpu.unified_memory:
        context = 2 * GIB
    weights = load.weights_bytes * _WEIGHTS_ERROR_FRACTION + _WEIGHTS_ROUNDING_BYTES
    if launch.model.checkpoint_bytes:
        weights = _WEIGHTS_ROUNDING_BYTES
    if known and known.free_before_load_bytes is not None:
        context = _CALIBRATED_ERROR_BYTES
    if known and known.weights_bytes is not None:
        weights = _CALIBRATED_ERROR_BYTES
    return int((context**2 + weights**2) ** 0.5)


def judgement(launch: ResolvedLaunch, expected: Stopped | Sized) -> Judgement:
    """Judge a launch by whether better and worse figures end the same way."""
    error = uncertainty_bytes(launch, expected.load)
    if isinstance(expected, Stopped):
        better = pools_of(launch, expected.load.with_more_free(error))
        if isinstance(better, Stopped):
            return _judged("does_not_fit", expected.stage, expected.message)
        reason = f"fails by less than the forecast's error of {error / GIB:.2f} GiB"
        return _judged("marginal", expected.stage, expected.message, reason)
    headroom = _headroom_judgement(launch, expected)
    if headroom.verdict == "does_not_fit":
        return headroom
    doubts = list(headroom.doubts)
    worse = pools_of(launch, expected.load.with_more_free(-error))
    if isinstance(worse, Stopped):
        doubts.append(f"{error / GIB:.2f} GiB less free memory would stop it: {worse.message}")
        return _judged("marginal", worse.stage, worse.message, *doubts)
    doubts += _doubts(launch, expected)
    if headroom.verdict == "marginal" or doubts:
        return _judged("marginal", headroom.stage, headroom.message, *doubts)
    return headroom


def fits(launch: ResolvedLaunch, expected: Sized) -> bool:
    """Tell if a launch is judged to fit; the search asks for no more of each."""
    if _headroom_judgement(launch, expected).verdict != "fits" or _doubts(launch, expected):
        return False
    error = uncertainty_bytes(launch, expected.load)
    return not isinstance(pools_of(launch, expected.load.with_more_free(-error)), Stopped)


def _judged(verdict: Verdict, stage: Stage | None, message: str, *doubts: str) -> Judgement:
    return Judgement(verdict=verdict, stage=stage, message=message, doubts=doubts)


def _headroom_judgement(launch: ResolvedLaunch, sized: Sized) -> Judgement:
    needs, headroom_bytes = sized.needs, sized.headroom_bytes
    total, captured = needs.total_bytes(), needs.before_capture_bytes()
    error = needs_error_bytes(needs.estimated_bytes())
    if launch.gpu.unified_memory:
        error += _UNIFIED_ERROR_BYTES
    late_draft_bytes = 0 if sized.load.draft_first else sized.load.draft_resident_bytes
    # A draft that loads after the pools adds its own error to the headroom's.
    error += late_draft_bytes // 10
    if late_draft_bytes and headroom_bytes + error < 0:
        message = draft_load_message(launch.gpu, -headroom_bytes)
        return _judged("does_not_fit", "draft_weights", message)
    if headroom_bytes + error < captured:
        return _judged("does_not_fit", "graph_capture", CAPTURE_MESSAGE)
    if headroom_bytes + error < total:
        return _judged("does_not_fit", "runtime", RUNTIME_MESSAGE)
    if headroom_bytes < total + error:
        stage: Stage = "graph_capture" if headroom_bytes < captured else "runtime"
        message = CAPTURE_MESSAGE if stage == "graph_capture" else RUNTIME_MESSAGE
        left = (headroom_bytes - total) / GIB
        reason = f"{left:.2f} GiB of headroom are left, with an error of ±{error / GIB:.2f}"
        return _judged("marginal", stage, message, reason)
    return _judged("fits", None, "")


def needs_error_bytes(needs_bytes: int) -> int:
    """Return the error of the estimated needs."""
    return int(needs_bytes * _NEEDS_ERROR_FRACTION) + _NEEDS_ERROR_BYTES


def _doubts(launch: ResolvedLaunch, sized: Sized) -> list[str]:
    """List reasons for doubt that are not arithmetic."""
    doubts = []
    if launch.model.nearest_family:
        doubts.append("planned as the nearest known family")
    reserve = _own_reserve_bytes(launch)
    if launch.rules.release < _BARELY_KNOWN and sized.headroom_bytes < reserve:
        doubts.append(
            f"release {launch.rules.label} is planned as a later one, and the headroom is "
            f"below the {reserve / GIB:.1f} GiB that later releases reserve for this launch"
        )
    if _no_spare_slot(launch, sized):
        doubts.append(
            "no state slot is spare beside the running requests: a prefill chunk can crash"
        )
    return doubts


def _no_spare_slot(launch: ResolvedLaunch, sized: Sized) -> bool:
    """Return whether the given slots are all in use: sglang#37066.

    With many requests some slot is freed in time; with one or two it is not.
    """
    states = sized.states
    if not isinstance(states, StatePool) or not launch.flags.has("max-mamba-cache-size"):
        return False
    per_request = states.slots_per_request
    return per_request > 1 and sized.running <= 2 and states.slots <= per_request * sized.running


def _own_reserve_bytes(launch: ResolvedLaunch) -> int:
    """Return SGLang's own reserve for activations and graphs: memory_hook.py, 0.5.23."""
    settings, ranks = launch.settings, launch.ranks
    tokens = max(settings.chunked_prefill_size * ranks.attention_dp_size, 2048)
    mib = 512 + 1.5 * tokens + 128 * ranks.tp_size + 2 * settings.decode_graph_max_bs
    if ranks.attention_dp_size > 1:
        each = 3 if settings.decode_graph_max_bs <= 300 else 4.5
        mib += each * settings.decode_graph_max_bs * ranks.attention_dp_size
    return int(mib * MIB)
