"""Judge over time whether an engine that runs also works, and how long its answers take. Pure.

An engine is hung when it has requests and nothing moves: no token counter of SGLang, no CPU counter
of an engine of ours, no answer of a server elsewhere. Its health page does not show that. It
starves when it runs far fewer requests than it has room for; the metrics show what it is short of.
"""

from collections import deque
from dataclasses import dataclass, field

from pipeline.engines.process.counters import Activity
from pipeline.planner.sglang.metrics import EngineLoad
from schemas.progress import Supply

_STARVED_FRACTION = 0.5
_FULL_FRACTION = 0.9
# assumed: long enough for a queue to fill after a start or a lease
_STARVED_AFTER_S = 120.0
# A server without counters is not hung before it is silent for so many of its longest answers.
_LONGEST_ANSWERS = 2.0
# assumed: time for a short answer under load, beside the tokens' own
_DEADLINE_BASE_S = 60.0
# Answers whose rates count, and the least tokens of one: shorter ones show the queue.
_RATES_KEPT = 64
_LEAST_TOKENS = 16
# assumed: one request in ten is slower than the deadline is made for, by less than half
_SLOW_SHARE = 0.1
_SLOWER_YET = 0.5
# Bounds what a hung server and a queue can make of the deadline
_MOST_GROWTH = 16.0
_LEAST_LATE_TO_REPORT = 10


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
class Deadline:
    """Time limit of one request, from the rate that the engine shows."""

    base_s: float
    most_tokens: int
    is_fixed: bool = False
    """The run file gives the limit itself."""
    num_kept: int = 0
    num_late: int = 0
    """Requests that ran into the limit."""
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RATES_KEPT))
    _growth: float = 1.0
    _reported_late: int = 0

    @property
    def seconds(self) -> float:
        if self.is_fixed:
            return self.base_s
        longest_s = self.base_s * _MOST_GROWTH
        by_rate_s = 0.0
        if self._rates:
            slow = sorted(self._rates)[int(len(self._rates) * _SLOW_SHARE)]
            by_rate_s = _DEADLINE_BASE_S + self.most_tokens / (slow * _SLOWER_YET)
        return min(longest_s, max(self.base_s * self._growth, by_rate_s))

    def note_answer(self, tokens: int | None, duration_s: float) -> None:
        self.num_kept += 1
        if tokens is not None and tokens >= _LEAST_TOKENS and duration_s > 0:
            self._rates.append(tokens / duration_s)

    def note_late(self, limit_s: float) -> None:
        """Note a request that ran into this limit; the next ones have twice as long."""
        self.num_late += 1
        if limit_s >= self.base_s * self._growth:
            # Others that were sent with it may be late too, and count once.
            self._growth = min(_MOST_GROWTH, 2 * limit_s / self.base_s)

    def take_report(self) -> str | None:
        """Return, once per doubling, that more requests are thrown away than kept."""
        least = max(_LEAST_LATE_TO_REPORT, 2 * self._reported_late)
        if self.num_late < least or self.num_late <= self.num_kept:
            return None
        self._reported_late = self.num_late
        return f"timeouts={self.num_late} answers={self.num_kept} deadline_s={self.seconds:.0f}"


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
    longest_answer_s: float = 0.0
    _progress: tuple[float, ...] = ()
    _answers_before: int = 0
    _moved_s: float | None = None
    _starving_since_s: float | None = None
    _retracted: float = 0.0
    _reported_kind: str | None = None

    def note_answer(self, duration_s: float = 0.0) -> None:
        self.num_answers += 1
        self.longest_answer_s = max(self.longest_answer_s, duration_s)

    def note_life(self, now_s: float) -> None:
        """Note another sign of life than an answer."""
        self._moved_s, self.hang = now_s, None

    def observe_hang(
        self,
        *,
        now_s: float,
        load: EngineLoad | None,
        in_flight: int,
        cpu_ticks: int | None = None,
    ) -> None:
        """Note progress, and set `hang` when there was none for too long.

        `load` is None where the metrics page does not answer; `cpu_ticks` are those of an engine
        without one. Answers count as progress whatever the metrics say.
        """
        progress = load.progress if load else self._progress
        progress = progress if cpu_ticks is None else (cpu_ticks,)
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

    def observe_silence(self, *, now_s: float, in_flight: int) -> None:
        """Set `hang` for a server without counters that has answered nothing for too long."""
        self.observe_hang(now_s=now_s, load=None, in_flight=in_flight)
        silent_s = now_s - (now_s if self._moved_s is None else self._moved_s)
        if silent_s < _LONGEST_ANSWERS * self.longest_answer_s:
            self.hang = None
        if self.hang is not None:
            self.hang = f"hung: no answer for {silent_s:.0f} s with {in_flight} requests in flight"

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
