"""Whether an engine that runs also works: its metrics over time → hung, starved, or neither. Pure.

An engine is hung when it has requests and no counter of tokens moves; its health page says nothing
of that. It is starved when it runs far fewer requests than it has room for, and then the metrics
tell what it is short of.
"""

from dataclasses import dataclass

from pipeline.planner.sglang.metrics import EngineLoad
from schemas.progress import Supply

_STARVED_FRACTION = 0.5
_FULL_FRACTION = 0.9
_STARVED_AFTER_S = 120.0
# assumed: long enough for a queue to fill after a start or a lease


@dataclass(slots=True, kw_only=True)
class StartWatch:
    """A start's signs of life: it may take any time, as long as something of it moves."""

    silence_s: float
    busy_silence_s: float
    """How long CPU alone may move: a compiler works so, and so does a rank that waits in vain."""
    _seen: tuple[int, int, int] | None = None
    _moved_s: float = 0.0
    _worked_s: float = 0.0

    def silence(
        self, *, now_s: float, log_bytes: int, io_bytes: int, cpu_ticks: int
    ) -> float | None:
        """Seconds of silence once they are too many, else None."""
        seen = (log_bytes, io_bytes, cpu_ticks)
        if self._seen is None or seen[:2] != self._seen[:2]:
            self._worked_s = now_s
        if seen != self._seen:
            self._moved_s = now_s
        self._seen = seen
        if now_s - self._moved_s > self.silence_s:
            return now_s - self._moved_s
        return now_s - self._worked_s if now_s - self._worked_s > self.busy_silence_s else None


@dataclass(slots=True, kw_only=True)
class Watch:
    """One engine's life between two starts, from readings in the order of time."""

    hang_timeout_s: float
    _progress: tuple[float, ...] = ()
    _answers: int = 0
    _moved_s: float | None = None
    _starving_since_s: float | None = None
    _retracted: float = 0.0
    _told: str | None = None
    shortage: str | None = None
    """What a starving engine is short of, for as long as it starves."""

    def observe_hang(
        self, *, now_s: float, metrics: EngineLoad | None, in_flight: int, answers: int
    ) -> str | None:
        """Why the engine counts as hung, or None.

        `metrics` is None where the page does not answer, which moves nothing; `answers` counts
        what came back, whatever the metrics say.
        """
        progress = metrics.progress if metrics else self._progress
        moved = progress != self._progress or answers != self._answers
        if moved or not in_flight or self._moved_s is None:
            self._moved_s = now_s
        self._progress, self._answers = progress, answers
        silent_s = now_s - self._moved_s
        if silent_s < self.hang_timeout_s:
            return None
        state = (
            f"running {metrics.running:g}, queued {metrics.queued:g}"
            if metrics
            else "its metrics do not answer"
        )
        return f"hung: no token for {silent_s:.0f} s with {in_flight} requests in flight ({state})"

    def observe_starvation(
        self, *, now_s: float, metrics: EngineLoad | None, supply: Supply, cap: int
    ) -> str | None:
        """What a starving engine is short of, told once for as long as it stays so.

        An engine is not starving because the last rows are in flight.
        """
        retracted, self._retracted = self._retracted, metrics.retracted if metrics else 0.0
        is_fed = supply.has_more or supply.in_flight >= _STARVED_FRACTION * cap
        if metrics is None or metrics.running >= _STARVED_FRACTION * cap or not is_fed:
            self._starving_since_s, self._told, self.shortage = None, None, None
            return None
        if self._starving_since_s is None:
            self._starving_since_s = now_s
        kind, reason = _shortage(metrics, supply, cap, has_retracted=metrics.retracted > retracted)
        if now_s - self._starving_since_s < _STARVED_AFTER_S:
            return None
        self.shortage = f"runs {metrics.running:g} of {cap} requests: {reason}"
        if kind == self._told:
            return None
        self._told = kind
        return self.shortage


def _shortage(
    metrics: EngineLoad, supply: Supply, cap: int, *, has_retracted: bool
) -> tuple[str, str]:
    """The kind of shortage, and how it stands with it."""
    if has_retracted:
        return "retraction", "retraction: running requests outgrow the KV pool"
    if metrics.state_usage >= _FULL_FRACTION:
        return "states", f"short of state slots ({metrics.state_usage:.0%} in use)"
    if metrics.token_usage >= _FULL_FRACTION:
        return "tokens", f"short of KV tokens ({metrics.token_usage:.0%} in use)"
    if metrics.queued:
        return "admission", (
            f"{metrics.queued:g} wait for admission: the scheduler reserves for long outputs "
            "(--schedule-conservativeness below 1 reserves less)"
        )
    if supply.in_flight < _STARVED_FRACTION * cap:
        why = _why_few(supply)
        return why, f"short of requests ({supply.in_flight} in flight): {why}"
    return "between", "requests are between the client and the scheduler"


def _why_few(supply: Supply) -> str:
    if supply.is_alone:
        return "a row at which engines have died is tried alone"
    if supply.held_s:
        return "it asked to be left alone"
    if supply.backing_off > supply.waiting:
        return "rows wait for their next try"
    return "rows wait to be sent" if supply.waiting else "its lease is not answered"
