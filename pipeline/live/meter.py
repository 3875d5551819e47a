"""A worker's readings of its engine, summed up span by span. Pure: time arrives as `now_s`.

The engine's own counters are used where it exports them. Otherwise completions are counted, which
agrees in the long run but says nothing before the first one. Responses do not stream: the tokens
so far of a running request are its age times the pace of one request. The age includes queueing and
prefill, so this is slightly too high.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.planner.sglang.metrics import EngineCounters
from schemas.completion import Interruption, Outcome, Turn
from schemas.progress import LengthCounts, LiveSpan

_SHORTEST_SPAN_S, _LONGEST_SPAN_S = 2.0, 30.0
# Shortest span over the mean duration of requests: those in flight are reported while they run.
_SPAN_PER_REQUEST = 0.1
# Shortest span when the engine ends.
_SHORTEST_LAST_S = 0.5
# Length of a span over the engine's age: a young engine reports more often.
_SPAN_PER_AGE = 0.5
# The pace of a request is the mean over the completions of the latest few times that all places
# were filled: the first ones may have waited for the engine to load.
_PACED_WAVES, _LEAST_PACED = 3, 32
# assumed: an answer that takes this many times as long as is usual has hung
_HUNG = 4.0
_LEAST_PACE = 1e-6
# Significant digits of a length: a few thousand classes for all completions of a run.
_DIGITS = 3


@dataclass(slots=True, kw_only=True)
class _InFlight:
    since_s: float
    clock_tokens: float
    begun_tokens: int = 0
    """Tokens that another start of an engine had generated of it."""


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Sums over the current span."""

    since_s: float
    request_s: float = 0.0
    answered_tokens: int = 0
    prompt_tokens: int = 0
    finished: Counter[int] = field(default_factory=Counter)
    interrupted: Counter[int] = field(default_factory=Counter)
    # By the engine's counters, between the first scrape and the last.
    scraped_s: float = 0.0
    counted_request_s: float = 0.0
    decoded_tokens: float = 0.0
    prefilled_tokens: float = 0.0


@dataclass(slots=True, kw_only=True)
class Meter:
    """Meter of one engine, restarted with each of its launches."""

    cap_requests: int = 0
    card: str | None = None
    _first_s: float | None = None
    """Time of the first request; None before."""
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _sums: _Sums | None = None
    _last: tuple[float, EngineCounters] | None = None
    _accept_length: float | None = None
    _clock_tokens: float = 0.0
    """Tokens of a request that has run since the start, by the engine's counters."""
    _counted_pace: float = 0.0
    """Tokens/s of one request between the last two scrapes."""
    _paces: deque[tuple[int, float]] = field(default_factory=deque)
    """Tokens and duration of the latest attempts."""
    _paced_tokens: int = 0
    """Sum of their tokens."""
    _paced_s: float = 0.0
    """Sum of their durations."""
    _changed_s: float = 0.0
    _number: int = 0

    def started(self, cap_requests: int) -> None:
        """Start over: the engine has come up."""
        self.cap_requests = cap_requests
        self._first_s = self._sums = self._last = self._accept_length = None
        self._in_flight.clear()
        self._paces.clear()
        self._paced_tokens = 0
        self._clock_tokens = self._counted_pace = self._paced_s = 0.0

    def stopped(self) -> None:
        """Stop counting until the engine is up again."""
        self.started(self.cap_requests)

    # -- events

    def note_request(self, now_s: float, *, begun_tokens: int = 0) -> int:
        """Note that a request is sent, or the rest of one that has begun; return its number."""
        if self._first_s is None or self._sums is None:
            self._first_s, self._sums = now_s, _Sums(since_s=now_s)
            # How many ran between a scrape of the idle engine and the next one is unknown.
            self._changed_s, self._last = now_s, None
        self._integrate(now_s)
        self._number += 1
        self._in_flight[self._number] = _InFlight(
            since_s=now_s, clock_tokens=self._clock(now_s), begun_tokens=begun_tokens
        )
        return self._number

    def note_outcome(self, number: int, outcome: Outcome | None, now_s: float) -> None:
        """Note that the request has ended; the outcome is None if it was abandoned."""
        self._integrate(now_s)
        request = self._in_flight.pop(number, None)
        if request is None or self._sums is None:
            return
        tokens = outcome.completion_tokens if isinstance(outcome, Turn) else 0
        if tokens is None:
            return
        duration_s = now_s - request.since_s
        # The rest of a turn was generated here; its length is the whole's.
        written = max(0, tokens - request.begun_tokens)
        is_kept = isinstance(outcome, Interruption) and outcome.so_far is not None
        if is_kept:
            return
        if isinstance(outcome, Interruption) or self._has_hung(written, duration_s):
            # It says nothing about the pace of those that write.
            (tokens_so_far,) = self._tokens_so_far([request], now_s)
            self._sums.interrupted[rounded(tokens_so_far)] += 1
        elif isinstance(outcome, Turn):
            self._note_pace(written, duration_s)
        if not isinstance(outcome, Turn):
            return
        self._sums.finished[rounded(tokens)] += 1
        self._sums.answered_tokens += written
        self._sums.prompt_tokens += (outcome.prompt_tokens or 0) + request.begun_tokens

    def _has_hung(self, tokens: int, duration_s: float) -> bool:
        """Return whether an answer came far later than others, and than its length explains."""
        if len(self._paces) < _LEAST_PACED:
            return False
        usual_s = max(self._paced_s / len(self._paces), tokens / max(self._pace(), _LEAST_PACE))
        return duration_s > _HUNG * usual_s

    def _note_pace(self, tokens: int, duration_s: float) -> None:
        self._paces.append((tokens, duration_s))
        self._paced_tokens += tokens
        self._paced_s += duration_s
        most = max(_PACED_WAVES * (len(self._in_flight) + 1), _LEAST_PACED)
        while len(self._paces) > most:
            old_tokens, old_s = self._paces.popleft()
            self._paced_tokens -= old_tokens
            self._paced_s -= old_s

    def note_counters(self, counters: EngineCounters, now_s: float) -> None:
        """Note the counters of the engine's metrics page."""
        last, self._last = self._last, (now_s, counters)
        self._accept_length = counters.accept_length
        if last is None or self._sums is None:
            return
        passed_s = now_s - last[0]
        decoded = _grown(last[1].decoded_tokens, counters.decoded_tokens)
        if decoded is None:
            decoded = counters.tokens_per_s * passed_s
        prefilled = _grown(last[1].prefilled_tokens, counters.prefilled_tokens)
        running_s = passed_s * (last[1].running_requests + counters.running_requests) / 2
        self._sums.scraped_s += passed_s
        self._sums.counted_request_s += running_s
        self._sums.decoded_tokens += decoded
        self._sums.prefilled_tokens += prefilled or 0.0
        if running_s > 0:
            if not self._clock_tokens:
                self._backdate(decoded / running_s, last[0])
            self._counted_pace = decoded / running_s
            self._clock_tokens += self._counted_pace * passed_s

    # -- spans

    def _backdate(self, pace: float, first_s: float) -> None:
        """Count what requests wrote before the counters were first read, at the first pace."""
        for request in self._in_flight.values():
            request.clock_tokens -= pace * max(first_s - request.since_s, 0.0)

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    def take_span(self, now_s: float) -> LiveSpan | None:
        """End the span once it is long enough, and return it."""
        if self._sums is None or self._first_s is None:
            return None
        age_s = self._sums.since_s - self._first_s
        if now_s - self._sums.since_s < self._least_span_s(age_s):
            return None
        return self._close_span(self._sums, age_s, now_s)

    def _least_span_s(self, age_s: float) -> float:
        longest_s = _LONGEST_SPAN_S
        if self._paces:
            mean_s = self._paced_s / len(self._paces)
            longest_s = min(max(_SPAN_PER_REQUEST * mean_s, _SHORTEST_SPAN_S), _LONGEST_SPAN_S)
        return min(max(_SHORTEST_SPAN_S, _SPAN_PER_AGE * age_s), longest_s)

    def take_last_span(self, now_s: float) -> LiveSpan | None:
        """End the last span when the engine ends, and return it if it is long enough.

        A span between two scrapes of the counters is dropped: by its completions, which were
        mostly generated earlier, the rate would be too high.
        """
        if self._sums is None or self._first_s is None:
            return None
        is_first = self._sums.since_s == self._first_s
        is_between_scrapes = self._last is not None and not self._sums.scraped_s and not is_first
        if now_s - self._sums.since_s < _SHORTEST_LAST_S or is_between_scrapes:
            return None
        return self._close_span(self._sums, self._sums.since_s - self._first_s, now_s)

    def _close_span(self, sums: _Sums, age_s: float, now_s: float) -> LiveSpan:
        self._integrate(now_s)
        self._sums = _Sums(since_s=now_s)
        return self._span(sums, age_s, now_s)

    def _span(self, sums: _Sums, age_s: float, now_s: float) -> LiveSpan:
        by_engine = sums.scraped_s > 0
        seconds = sums.scraped_s if by_engine else now_s - sums.since_s
        request_s = sums.counted_request_s if by_engine else sums.request_s
        tokens = sums.decoded_tokens if by_engine else self._pace() * request_s
        # A release that does not count prefilled tokens leaves the prompts of the completions.
        counts_prefill = by_engine and self._last is not None and _counts_prefill(self._last[1])
        prompt_tokens_per_s = (
            sums.prefilled_tokens / seconds
            if counts_prefill
            else sums.prompt_tokens / (now_s - sums.since_s)
        )
        return LiveSpan(
            duration_s=now_s - sums.since_s,
            engine_age_s=age_s,
            cap_requests=self.cap_requests,
            running_requests=request_s / seconds,
            tokens_per_s=tokens / seconds,
            prompt_tokens_per_s=prompt_tokens_per_s,
            accept_length=self._accept_length if by_engine else None,
            counted_by="engine" if by_engine else "answers",
            finished=tuple(sorted(sums.finished.items())),
            interrupted=tuple(sorted(sums.interrupted.items())),
            running=self._running_lengths(now_s),
            card=self.card,
        )

    def _running_lengths(self, now_s: float) -> LengthCounts:
        """Return the tokens so far of the requests in flight; 0 while the pace is unknown."""
        requests = list(self._in_flight.values())
        counts = Counter(map(rounded, self._tokens_so_far(requests, now_s)))
        return tuple(sorted(counts.items()))

    def _tokens_so_far(self, requests: Sequence[_InFlight], now_s: float) -> list[int]:
        if self._last is not None:
            clock = self._clock(now_s)
            written = [max(clock - request.clock_tokens, 0.0) for request in requests]
        else:
            pace = self._pace()
            written = [pace * (now_s - request.since_s) for request in requests]
        return [
            request.begun_tokens + int(tokens)
            for request, tokens in zip(requests, written, strict=True)
        ]

    def _clock(self, now_s: float) -> float:
        """Return the clock, extrapolated from the last scrape at the last pace."""
        since_s = self._last[0] if self._last is not None else now_s
        return self._clock_tokens + self._counted_pace * (now_s - since_s)

    def _pace(self) -> float:
        """Return tokens/s of one request, by the latest completions.

        A request that runs far longer than any of them counts by its age: it may be a long one, or
        slower, or stuck.
        """
        return self._paced_tokens / self._paced_s if self._paced_s > 0 else 0.0

    def _integrate(self, now_s: float) -> None:
        if self._sums is not None:
            since_s = max(self._changed_s, self._sums.since_s)
            self._sums.request_s += len(self._in_flight) * (now_s - since_s)
        self._changed_s = now_s


def rounded(tokens: int) -> int:
    """Round a length to three significant digits."""
    surplus = len(str(tokens)) - _DIGITS
    return round(tokens, -surplus) if surplus > 0 else tokens


def _grown(before: float | None, after: float | None) -> float | None:
    """Return the increase of a counter; one that fell has been reset to 0 in between."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after


def _counts_prefill(counters: EngineCounters) -> bool:
    return counters.prefilled_tokens is not None
