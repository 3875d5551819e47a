"""Readings of running engines, and the time left that was estimated from them."""

from dataclasses import dataclass
from typing import Literal

from schemas.estimate import Band

LengthCounts = tuple[tuple[int, int], ...]
"""Pairs of tokens and number of requests."""

Counter = Literal["engine", "answers"]
"""Source of a rate: the engine's own counters, or the answers received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSpan:
    """Readings of an engine over one span of time. Rates are means over the span."""

    duration_s: float
    engine_age_s: float
    """Time from the launched engine's first request to the span's start."""
    cap_requests: int
    running_requests: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    accept_length: float | None
    """Mean tokens kept per step; None if MTP is off or the engine does not report it."""
    counted_by: Counter
    finished: LengthCounts
    """Completions that ended in this span, by tokens."""
    running: LengthCounts
    """Requests in flight at the span's end, by tokens so far: estimated from age and rate, because
    an answer comes whole."""
    card: str | None = None
    """Catalogue name of the engine's GPU, if the worker knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Estimated time left of the run, noted while it ran."""

    at_s: float
    """Time since the job began."""
    days: Band
