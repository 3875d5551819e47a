"""What a worker sees of its engine, summed up span by span. Pure: time arrives as `now_s`.

The engine's own counters are used where they are read; else answers are counted, which says the
same in the long run and nothing before the first of them. Answers do not stream: what a running
request has written is its age at the pace of one request. The age holds its wait and its prefill
too, so that this is a little more than it has written.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from pipeline.planner.sglang.metrics import EngineCounters
from schemas.completion import Outcome, Turn
from schemas.live import LengthCounts, LiveSpan

_SHORTEST_SPAN_S, _LONGEST_SPAN_S = 2.0, 30.0
_SHORTEST_LAST_S = 0.5  # of what is left when an engine ends
_SPAN_PER_AGE = 0.5  # a young engine tells more often
_PACED_ANSWERS = 400  # the last so many give the pace of a request
_DIGITS = 3  # of a length: a run's completions are counted in some thousand classes


@dataclass(slots=True, kw_only=True)
class _Asked:
    since_s: float
    clock_tokens: float


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Of the span so far."""

    since_s: float
    request_s: float = 0.0
    answered_tokens: int = 0
    prompt_tokens: int = 0
    finished: Counter[int] = field(default_factory=Counter)
    # By the engine's counters, between the first look and the last.
    looked_s: float = 0.0
    seen_request_s: float = 0.0
    decoded_tokens: float = 0.0
    prefilled_tokens: float = 0.0


@dataclass(slots=True, kw_only=True)
class Meter:
    """One engine from one start to the next."""

    cap_requests: int = 0
    card: str | None = None
    _first_s: float | None = None
    """When the first request was asked; None before."""
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _sums: _Sums | None = None
    _last: tuple[float, EngineCounters] | None = None
    _accept_length: float | None = None
    _clock_tokens: float = 0.0
    """What a request that ran since the start would have written, by the engine's counters."""
    _seen_pace: float = 0.0
    """Tokens a second of one request, between the last two looks."""
    _paces: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PACED_ANSWERS))
    _changed_s: float = 0.0
    _number: int = 0

    def started(self, cap_requests: int) -> None:
        """The engine came up: nothing of an earlier one counts."""
        self.cap_requests = cap_requests
        self._first_s = self._sums = self._last = self._accept_length = None
        self._asked.clear()
        self._paces.clear()
        self._clock_tokens = self._seen_pace = 0.0

    def stopped(self) -> None:
        """The engine is down: time does not count until it is up again."""
        self.started(self.cap_requests)

    # -- what happens

    def asked(self, now_s: float) -> int:
        """A request goes out; the number names it."""
        if self._first_s is None or self._sums is None:
            self._first_s, self._sums = now_s, _Sums(since_s=now_s)
            # A look at the idle engine says nothing of how many ran between it and the next.
            self._changed_s, self._last = now_s, None
        self._integrate(now_s)
        self._number += 1
        self._asked[self._number] = _Asked(since_s=now_s, clock_tokens=self._clock(now_s))
        return self._number

    def note_outcome(self, number: int, outcome: Outcome | None, now_s: float) -> None:
        """The request is over; None where it was given up."""
        self._integrate(now_s)
        asked = self._asked.pop(number, None)
        if asked is None or self._sums is None or not isinstance(outcome, Turn):
            return
        tokens = outcome.completion_tokens
        if tokens is None:
            return
        self._sums.finished[rounded(tokens)] += 1
        self._sums.answered_tokens += tokens
        self._sums.prompt_tokens += outcome.prompt_tokens or 0
        self._paces.append((tokens, now_s - asked.since_s))

    def looked(self, counters: EngineCounters, now_s: float) -> None:
        """The engine's metrics page was read."""
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
        self._sums.looked_s += passed_s
        self._sums.seen_request_s += running_s
        self._sums.decoded_tokens += decoded
        self._sums.prefilled_tokens += prefilled or 0.0
        if running_s > 0:
            self._seen_pace = decoded / running_s
            self._clock_tokens += self._seen_pace * passed_s

    # -- what is told

    @property
    def is_idle(self) -> bool:
        return not self._asked

    def take_span(self, now_s: float) -> LiveSpan | None:
        """The span that ends here, once it is long enough; the next one begins."""
        if self._sums is None or self._first_s is None:
            return None
        age_s = self._sums.since_s - self._first_s
        least_s = min(max(_SHORTEST_SPAN_S, _SPAN_PER_AGE * age_s), _LONGEST_SPAN_S)
        if now_s - self._sums.since_s < least_s:
            return None
        return self._close_span(self._sums, age_s, now_s)

    def last_span(self, now_s: float) -> LiveSpan | None:
        """What is left when the engine ends, if it says anything.

        Between two looks at its counters the answers say too much: what ends there was written
        before.
        """
        if self._sums is None or self._first_s is None:
            return None
        is_between_looks = self._last is not None and not self._sums.looked_s
        is_between_looks = is_between_looks and self._sums.since_s > self._first_s
        if now_s - self._sums.since_s < _SHORTEST_LAST_S or is_between_looks:
            return None
        return self._close_span(self._sums, self._sums.since_s - self._first_s, now_s)

    def _close_span(self, sums: _Sums, age_s: float, now_s: float) -> LiveSpan:
        self._integrate(now_s)
        self._sums = _Sums(since_s=now_s)
        return self._told(sums, age_s, now_s)

    def _told(self, sums: _Sums, age_s: float, now_s: float) -> LiveSpan:
        by_engine = sums.looked_s > 0
        seconds = sums.looked_s if by_engine else now_s - sums.since_s
        request_s = sums.seen_request_s if by_engine else sums.request_s
        tokens = sums.decoded_tokens if by_engine else sums.answered_tokens
        # A release that does not count what it prefills leaves the answers' own word.
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
            running=self._running_lengths(now_s),
            card=self.card,
        )

    def _running_lengths(self, now_s: float) -> LengthCounts:
        """Tokens so far of what is in flight; all 0 before anything tells the pace."""
        counts: Counter[int] = Counter()
        pace = self._pace()
        for asked in self._asked.values():
            by_clock = max(self._clock(now_s) - asked.clock_tokens, 0.0)
            tokens = by_clock if self._last is not None else pace * (now_s - asked.since_s)
            counts[rounded(int(tokens))] += 1
        return tuple(sorted(counts.items()))

    def _clock(self, now_s: float) -> float:
        """Carried on at the last pace from the last look."""
        since_s = self._last[0] if self._last is not None else now_s
        return self._clock_tokens + self._seen_pace * (now_s - since_s)

    def _pace(self) -> float:
        """Tokens a second of one request, by the last answers."""
        seconds = sum(duration_s for _, duration_s in self._paces)
        return sum(tokens for tokens, _ in self._paces) / seconds if seconds > 0 else 0.0

    def _integrate(self, now_s: float) -> None:
        if self._sums is not None:
            since_s = max(self._changed_s, self._sums.since_s)
            self._sums.request_s += len(self._asked) * (now_s - since_s)
        self._changed_s = now_s


def rounded(tokens: int) -> int:
    """A length to three digits: what is kept of it."""
    surplus = len(str(tokens)) - _DIGITS
    return round(tokens, -surplus) if surplus > 0 else tokens


def _grown(before: float | None, after: float | None) -> float | None:
    """How far a counter has moved; one that fell was started anew in between."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after


def _counts_prefill(counters: EngineCounters) -> bool:
    return counters.prefilled_tokens is not None
