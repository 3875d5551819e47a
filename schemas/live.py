"""What workers report of their engines for the estimate, and the estimates noted over time."""

from dataclasses import dataclass
from typing import Literal

from schemas.estimate import Band

LengthCounts = tuple[tuple[int, int], ...]
"""Tokens, and how many requests."""

Counter = Literal["engine", "answers"]
"""By the engine's own counters, or by the answers that came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSpan:
    """One engine over one span of time. Rates are means over the span."""

    duration_s: float
    engine_age_s: float
    """At the span's start, since the engine as launched took its first request."""
    cap_requests: int
    running_requests: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    accept_length: float | None
    """None where MTP is off or the engine does not say."""
    counted_by: Counter
    finished: LengthCounts
    """Completions that ended in this span, by their tokens."""
    running: LengthCounts
    """Requests in flight at its end, by tokens so far: their age at the pace of a running request,
    for no answer tells before it is whole."""
    card: str | None = None
    """The catalogue's name of the engine's GPU, where the worker knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """The run's estimated time left, noted while it ran."""

    at_s: float
    """Since the job began."""
    days: Band
