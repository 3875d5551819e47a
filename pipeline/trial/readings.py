"""Steady rates of the plans that engines run, from the spans of their meters. Pure."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.progress import LiveSpan

# Noise of the rate over half a mean residence time, in which a batch becomes another one.
# assumed, as in pipeline.live.readings
_HALF_RESIDENCE_SD = 0.05
# What engines of one plan differ by, however long they run. assumed, as in `make trial-score`
_ENGINE_SD = 0.01
# Half residence times after which a rate is known to 2 %, well enough to decide.
_ENOUGH = 8.0
# A span counts if its engine ran this share of the most requests that it has run.
_FULL = 0.9


# Half an hour of the longest spans: a rate that drifts shows, and a decision looks at few.
_MOST_SPANS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Mean rate of one launch, and its error."""

    log_rate: float
    log_sd: float

    @property
    def weight(self) -> float:
        return self.log_sd**-2


@dataclass(slots=True, kw_only=True)
class LaunchMeter:
    """Spans of one launch of an engine, reduced to those of steady running."""

    plan: str
    output_tokens_mean: float
    since_s: float
    _spans: deque[tuple[float, float, float]] = field(
        default_factory=lambda: deque(maxlen=_MOST_SPANS)
    )
    """Running requests, tokens/s and duration of the latest spans that are old enough."""
    residence_s: float = math.inf
    """Mean duration of a request; infinite while unknown."""

    def note(self, span: LiveSpan) -> None:
        """Note a span, unless lengths have not mixed by then: within one mean residence time."""
        if span.tokens_per_s <= 0 or span.running_requests <= 0:
            return
        self.residence_s = self.output_tokens_mean * span.running_requests / span.tokens_per_s
        if span.engine_age_s >= self.residence_s:
            self._spans.append((span.running_requests, span.tokens_per_s, span.duration_s))

    @property
    def reading_s(self) -> float:
        """Time from the start until the rate is read well enough; infinite while unknown."""
        return self.residence_s * (1 + _ENOUGH / 2)

    @property
    def is_read(self) -> bool:
        return self._halves(self._steady()) >= _ENOUGH

    def reading(self) -> Reading | None:
        """Return the mean rate of steady running; None before any."""
        steady = self._steady()
        total_s = sum(duration_s for _, duration_s in steady)
        if total_s <= 0:
            return None
        tokens = sum(rate * duration_s for rate, duration_s in steady)
        noise = _HALF_RESIDENCE_SD / math.sqrt(self._halves(steady))
        return Reading(log_rate=math.log(tokens / total_s), log_sd=math.hypot(_ENGINE_SD, noise))

    def _steady(self) -> list[tuple[float, float]]:
        fullest = max((running for running, _, _ in self._spans), default=0.0)
        return [
            (rate, duration_s)
            for running, rate, duration_s in self._spans
            if running >= _FULL * fullest
        ]

    def _halves(self, steady: list[tuple[float, float]]) -> float:
        return sum(duration_s for _, duration_s in steady) / (self.residence_s / 2)


def joined(readings: Iterable[Reading]) -> Reading | None:
    """Return the mean of readings of one plan, weighted by their errors."""
    known = list(readings)
    if not known:
        return None
    weight = sum(one.weight for one in known)
    mean = sum(one.weight * one.log_rate for one in known) / weight
    return Reading(log_rate=mean, log_sd=weight**-0.5)
