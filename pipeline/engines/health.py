"""Judge from metrics over time whether an engine that runs also works. Pure.

An engine is hung when it has requests and no token counter moves; its health page does not show
that. It starves when it runs far fewer requests than it has room for; the metrics show what it is
short of.
"""

from dataclasses import dataclass

from pipeline.planner.sglang.metrics import EngineLoad
from schemas.progress import Supply

_STARVED_FRACTION = 0.5
_FULL_FRACTION = 0.9
# assumed: long enough for a queue to fill after a start or a lease
_STARVED_AFTER_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Counters of an engine and everything below it; any difference is a sign of life."""

    log_bytes: int
    io_bytes: int
    cpu_ticks: int


@dataclass(slots=True, kw_only=True)
class StartWatch:
    """Signs of life during a start, which may take any time as long as some counter moves."""

    silence_s: float
    busy_silence_s: float
    """Silence allowed while the CPU alone works, as it does for compilers and for lost ranks."""
    _last: Activity | None = None
    _moved_s: float = 0.0
    _wrote_s: float = 0.0

    def silence(self, activity: Activity, now_s: float) -> float | None:
        """Take a reading; return the seconds of silence once they exceed what is allowed."""
        last, self._last = self._last, activity
        if last is None or activity != last:
            self._moved_s = now_s
        if last is None or (activity.log_bytes, activity.io_bytes) != (
            last.log_bytes,
            last.io_bytes,
        ):
            self._wrote_s = now_s
        if now_s - self._moved_s > self.silence_s:
            return now_s - self._moved_s
        return now_s - self._wrote_s if now_s - self._wrote_s > self.busy_silence_s else None


@dataclass(slots=True, kw_only=True)
class Watch:
    """Health of an engine from its first answer to its end, from readings in order of time."""

    hang_timeout_s: float
    num_answers: int = 0
    """Requests that the engine has answered since it came up."""
    hang: str | None = None
    """Evidence that the engine hung at the last reading, or None."""
    shortage: str | None = None
    """Shortage of a starving engine, for as long as it starves."""
    _progress: tuple[float, ...] = ()
    _answers_before: int = 0
    _moved_s: float | None = None
    _starving_since_s: float | None = None
    _retracted: float = 0.0
    _reported_kind: str | None = None

    def note_answer(self) -> None:
        self.num_answers += 1

    def observe_hang(self, *, now_s: float, load: EngineLoad | None, in_flight: int) -> None:
        """Note progress, and set `hang` when there was none for too long.

        `load` is None where the metrics page does not answer. Answers count as progress whatever
        the metrics say.
        """
        progress = load.progress if load else self._progress
        has_moved = progress != self._progress or self.num_answers != self._answers_before
        if has_moved or not in_flight or self._moved_s is None:
            self._moved_s = now_s
        self._progress, self._answers_before = progress, self.num_answers
        silent_s = now_s - self._moved_s
        if silent_s < self.hang_timeout_s:
            self.hang = None
            return
        state = "its metrics do not answer"
        if load is not None:
            state = f"running {load.running:g}, queued {load.queued:g}"
        self.hang = (
            f"hung: no token for {silent_s:.0f} s with {in_flight} requests in flight ({state})"
        )

    def observe_starvation(
        self, *, now_s: float, load: EngineLoad | None, supply: Supply, cap: int
    ) -> str | None:
        """Return what a starving engine is short of, once per kind of shortage.

        An engine that runs only the last rows is not starving.
        """
        retracted, self._retracted = self._retracted, load.retracted if load else 0.0
        is_fed = supply.has_more or supply.in_flight >= _STARVED_FRACTION * cap
        if load is None or load.running >= _STARVED_FRACTION * cap or not is_fed:
            self._starving_since_s, self._reported_kind, self.shortage = None, None, None
            return None
        if self._starving_since_s is None:
            self._starving_since_s = now_s
        if now_s - self._starving_since_s < _STARVED_AFTER_S:
            return None
        has_retracted = load.retracted > retracted
        kind, reason = _shortage(load, supply, cap, has_retracted=has_retracted)
        self.shortage = f"runs {load.running:g} of {cap} requests: {reason}"
        if kind == self._reported_kind:
            return None
        self._reported_kind = kind
        return self.shortage


def _shortage(
    load: EngineLoad, supply: Supply, cap: int, *, has_retracted: bool
) -> tuple[str, str]:
    """Return the kind of shortage, and its reason with figures."""
    if has_retracted:
        return "retraction", "the KV pool overflows, so SGLang retracts requests"
    if load.state_usage >= _FULL_FRACTION:
        return "states", f"short of state slots ({load.state_usage:.0%} in use)"
    if load.token_usage >= _FULL_FRACTION:
        return "tokens", f"short of KV tokens ({load.token_usage:.0%} in use)"
    if load.queued:
        return "admission", (
            f"{load.queued:g} wait for admission: the scheduler reserves for long outputs "
            "(--schedule-conservativeness below 1 reserves less)"
        )
    if supply.in_flight < _STARVED_FRACTION * cap:
        why = _why_few(supply)
        return why, f"short of requests ({supply.in_flight} in flight): {why}"
    return "between", "requests are on their way between client and scheduler"


def _why_few(supply: Supply) -> str:
    if supply.is_alone:
        return "a row that may have killed engines runs alone"
    if supply.held_s:
        return "the engine asked to wait (Retry-After)"
    if supply.backing_off > supply.waiting:
        return "rows wait for their next attempt"
    return (
        "rows wait to be sent"
        if supply.waiting
        else "the coordinator has not answered its lease request"
    )
