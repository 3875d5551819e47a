"""Decide what follows on an engine's failure: other flags, the same again, or the end. Pure.

Invariants: no configuration that failed through its own fault is tried twice; the number of
attempts is bounded; a fault that only the user can fix stops at once. A configuration that ends too
often in some hours is left, whatever it finished in between.
"""

from dataclasses import dataclass, replace

from pipeline.engines.remedies import (
    CRASH_KINDS,
    HEADROOM_KINDS,
    MENDED_BY_FLAGS,
    POOL_KINDS,
    LadderBasis,
    Step,
    Tried,
    configuration,
    remedy,
)
from pipeline.planner.sglang.wordings import CauseKind
from schemas.plan import Calibration

# Configurations tried after the first.
MOST_STEPS = 8
# Ends of one configuration that are borne in this time, for any cause. assumed: a start takes ten
# minutes at most, so that a sixth of the time is lost; one crash in this time costs less than any
# step would
MOST_ENDS = 6
ENDS_WINDOW_S = 6 * 3600.0
# An engine that is killed from outside is not to blame, and no flag helps it.
_MOST_KILLS = 20

# Repeats of one configuration, for causes that are not its own. assumed: a cause that comes back
# this often in a row will not go away by itself
_MOST_AGAIN: dict[CauseKind, int] = {
    "port": 5,
    "hub_unreachable": 6,
    "nccl": 2,
    "gpu_fault": 2,
    "host_memory": 1,
    "unbalanced": 1,
    "watchdog": 3,
    "killed": 5,
    "unknown": 1,
    **dict.fromkeys(CRASH_KINDS, 1),
}
# assumed: waits that let the cause pass, per repeat
_WAIT_S: dict[CauseKind, float] = {
    "port": 0.0,
    "hub_unreachable": 20.0,
    "nccl": 5.0,
    "gpu_fault": 5.0,
    "host_memory": 10.0,
    # A process that ends frees the card's memory within seconds.
    "unbalanced": 15.0,
    "watchdog": 1.0,
    "killed": 1.0,
    "unknown": 2.0,
    **dict.fromkeys(CRASH_KINDS, 2.0),
}
_USERS_FIX: dict[CauseKind, str] = {
    "flag": "correct engine.flags",
    "model_missing": "correct model, or use an SGLang release that knows it",
    "hub_refused": "accept the model's terms and pass a token: engine.pass_env: [HF_TOKEN]",
    "kernel": "install an SGLang build and a driver for this card",
    "disk_full": "free space, or point the caches (HF_HOME, /dev/shm) at a larger disk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Start the same configuration again: the failure was not its own."""

    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Give up; `reason` is one line that says what to do."""

    reason: str


def next_step(
    tried: tuple[Tried, ...],
    basis: LadderBasis,
    calibration: Calibration | None = None,
    *,
    ends_too_often: bool = False,
) -> Step | Again | Stop:
    """Decide what follows on the last of `tried`, which lists all attempts in order."""
    last = tried[-1]
    kind, summary = last.cause.kind, last.cause.summary
    basis = replace(basis, refused_flags=basis.refused_flags | _refused_flags(tried))
    if kind in _USERS_FIX:
        return _without_refused_flag(tried, basis, calibration)
    if kind in _MOST_AGAIN and not ends_too_often:
        repeats = _num_repeats(tried)
        if repeats <= _MOST_AGAIN[kind]:
            return Again(wait_s=_WAIT_S[kind] * repeats, reason=f"try {repeats + 1}: {summary}")
    if len({one.configuration for one in tried}) > MOST_STEPS:
        return Stop(reason=f"{summary}; {MOST_STEPS} other configurations were tried")
    if kind == "unbalanced" and last.cause.stage == "start":
        # SGLang's own check, which looks at the card before any flag counts.
        return _stop(last)
    if kind == "killed" and ends_too_often:
        return Stop(reason=f"{summary}; {_MOST_KILLS} times in {ENDS_WINDOW_S / 3600:g} hours")
    step = remedy(tried, basis, calibration, ends_too_often=ends_too_often)
    return step or _stop(last)


def has_ended_too_often(ends: tuple[Tried, ...], *, now_s: float) -> bool:
    """Return whether the last configuration has ended too often of late, kills counted apart."""
    last = ends[-1]
    was_killed = last.cause.kind == "killed"
    recent = [
        one
        for one in ends
        if one.configuration == last.configuration
        and (one.cause.kind == "killed") == was_killed
        and now_s - one.ended_s <= ENDS_WINDOW_S
    ]
    return len(recent) > (_MOST_KILLS if was_killed else MOST_ENDS)


def _refused_flags(tried: tuple[Tried, ...]) -> frozenset[str]:
    """Return the flags that an engine has rejected, so that no later step brings one back."""
    return frozenset(
        one.cause.flag for one in tried if one.cause.kind in _USERS_FIX and one.cause.flag
    )


def _without_refused_flag(
    tried: tuple[Tried, ...], basis: LadderBasis, calibration: Calibration | None
) -> Step | Again | Stop:
    """Drop a flag of the plan's own that this release rejects; the user's flags stay."""
    last = tried[-1]
    kind, flag = last.cause.kind, last.cause.flag
    if flag is None or flag in basis.users_flags or not last.flags.has(flag):
        return Stop(reason=f"{last.cause.summary}; {_USERS_FIX[kind]}")
    flags = last.flags.changed({flag: None})
    if configuration(flags) not in {one.configuration for one in tried}:
        change = f"--{flag} left out: this release refuses it"
        return Step(flags=flags, change=change, price="unknown")
    # Without the refused flag this is the configuration that failed before: find another way from
    # there. Every failure of the refused line is skipped, or "again" would mean that line.
    refused = {one.configuration for one in tried if one.cause.kind == kind}
    earlier = tuple(one for one in tried if one.configuration not in refused)
    return next_step(earlier, basis, calibration)


def _num_repeats(tried: tuple[Tried, ...]) -> int:
    """Count failures by the last cause: of this configuration, or of any if flags can mend it.

    Others may lie between: causes that alternate must not go on forever.
    """
    last = tried[-1]
    same_cause = [one for one in tried if one.cause.kind == last.cause.kind]
    if last.cause.kind in (*MENDED_BY_FLAGS, *CRASH_KINDS):
        return len(same_cause)
    return sum(one.configuration == last.configuration for one in same_cause)


def _stop(last: Tried) -> Stop:
    kind = last.cause.kind
    if kind == "unbalanced":
        return Stop(reason=f"{last.cause.summary}; end that process, or use another card")
    if kind in ("weights", "draft_weights"):
        return Stop(reason=f"{last.cause.summary}; more cards per engine, or a smaller format")
    if kind in (*POOL_KINDS, *HEADROOM_KINDS):
        return Stop(reason=f"{last.cause.summary}; no other flags fit this card")
    if kind in CRASH_KINDS:
        return Stop(reason=f"{last.cause.summary}; other flags did not help: use another release")
    return Stop(reason=f"{last.cause.summary}; it came back every time")
