"""Hold refused rows back until it is known who is at fault, the row or the engine.

A refusal (HTTP 400) ends a row only while the same engine accepts others: an answer to a request
that was sent later proves it. Without such answers the engine is probed with a request that it
has answered before, or a short one. An engine that refuses that too is at fault, and leaves the run
by name with its rows undone, as does one that denies everything (HTTP 401, a redirect).

Invariant: without an answer in between, no more rows end in errors than the quality window has.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.worker.background import Background
from pipeline.worker.ports import Engine
from pipeline.worker.row import Row
from schemas.completion import Interruption, Outcome, Refusal
from schemas.prompt import Problem, Request

# Rows held back before the engine gets no others. assumed: as many tell an engine at fault, and
# cost seconds
MOST_HELD = 20
# assumed: most engines answer some request within it, which saves the probe
_PROBE_AFTER_S = 5.0
# A server refuses a request at once: one that works on it so long has accepted it.
_ACCEPTED_AFTER_S = 5.0
# Probes in a row that an engine refuses before it leaves: a server that restarts may do so briefly.
_MOST_REFUSED_PROBES = 3
_MEND = "mend the server, or drop these rows, then the same command resumes"

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _HeldRow:
    row: Row
    problem: Problem
    at_s: float


@dataclass(slots=True, kw_only=True)
class Refusals:
    """Refused rows of one engine. Pure: time arrives as `now_s`."""

    most_unproven: int
    """Rows that may end in errors on the word of probes alone."""
    drain_cause: str | None = None
    """Reason why the engine leaves the run."""
    accepted: Request | None = None
    """A request that the engine has answered."""
    _held: list[_HeldRow] = field(default_factory=list)
    _settled: list[_HeldRow] = field(default_factory=list)
    _since_s: float | None = None
    """Time of the first refusal or denial that nothing has explained yet, or of the last probe."""
    _num_refused_probes: int = 0
    _num_unproven: int = 0

    @property
    def num_held(self) -> int:
        return len(self._held) + len(self._settled)

    @property
    def is_full(self) -> bool:
        """Return whether no other row should be sent before a probe."""
        return len(self._held) >= MOST_HELD

    # -- what happens to requests

    def hold(self, row: Row, problem: Problem, *, now_s: float) -> None:
        self._held.append(_HeldRow(row, problem, now_s))
        self._begin(now_s)

    def note_denial(self, *, now_s: float) -> None:
        """Note an error that the server would give to any request."""
        self._begin(now_s)

    def note_answer(self, request: Request, *, sent_s: float) -> None:
        """Settle the rows that were refused before a request was sent that was answered."""
        self.accepted, self._num_unproven = request, 0
        self._settled += [held for held in self._held if held.at_s <= sent_s]
        self._held = [held for held in self._held if held.at_s > sent_s]
        if not self._held:
            self._forget_time()

    def clear(self) -> None:
        """Forget every row: their leases are given back."""
        self._held.clear()
        self._settled.clear()
        self._forget_time()

    # -- what follows

    def take_settled(self) -> list[tuple[Row, Problem]]:
        """Take the rows that are at fault themselves."""
        settled, self._settled = self._settled, []
        return [(held.row, held.problem) for held in settled]

    def is_probe_due(self, *, now_s: float, is_idle: bool) -> bool:
        if self._since_s is None or self.drain_cause is not None:
            return False
        is_first = not self._num_refused_probes
        waits_for_it = is_first and (is_idle or self.is_full)
        return waits_for_it or now_s - self._since_s >= _PROBE_AFTER_S

    def note_probe(self, outcome: Outcome | None, *, has_others: bool, now_s: float) -> None:
        """Settle the held rows, or give the engine up.

        `outcome` is None for a probe that the engine works on. `has_others` says that other engines
        run, which can have the rows.
        """
        match outcome:
            case Refusal(text=text) | Interruption(kind="denial", cause=text):
                self._num_refused_probes += 1
                self._since_s = now_s
                if self._num_refused_probes >= _MOST_REFUSED_PROBES:
                    self.drain_cause = f"it refuses every request: {text}; {_MEND}"
            case Interruption():
                # Busy or away, which its rows will show.
                self._since_s = now_s
            case _:
                self._note_accepted(has_others=has_others)

    def _note_accepted(self, *, has_others: bool) -> None:
        self._forget_time()
        if not self._held:
            return
        last = self._held[-1].problem.text
        num_rows = self._num_unproven + len(self._held)
        never_answered = self.accepted is None
        if num_rows > self.most_unproven or (never_answered and has_others):
            self.drain_cause = f"it refused {num_rows} rows in a row, the last: {last}; {_MEND}"
            return
        self._num_unproven = num_rows
        self._settled += self._held
        self._held = []

    def _forget_time(self) -> None:
        self._since_s, self._num_refused_probes = None, 0

    def _begin(self, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s


@dataclass(slots=True, kw_only=True)
class RefusalWatch:
    """Probes an engine whose refusals nothing explains."""

    refusals: Refusals
    engine: Engine
    worker_id: str
    clock: Clock
    finish: Callable[[Row, Problem], None]
    wake: Callable[[], None]
    log: Callable[[str], None]
    has_others: bool = False
    """Other engines run."""
    _probing: Background = field(default_factory=Background)

    @property
    def drain_cause(self) -> str | None:
        """Reason why the engine leaves the run, with its address."""
        cause = self.refusals.drain_cause
        return f"{self.engine.where}: {cause}" if cause is not None else None

    def attend(self, *, is_idle: bool) -> None:
        """Finish the rows that are at fault themselves, and probe the engine if that is due."""
        for row, problem in self.refusals.take_settled():
            self.finish(row, problem)
        due = self.refusals.is_probe_due(now_s=self.clock(), is_idle=is_idle)
        if due and not self._probing.is_running:
            self._probing.start(self._probe())

    def raise_fault(self) -> None:
        """Raise the error that ended the last probe, if any."""
        self._probing.raise_fault()

    async def cancel(self) -> None:
        await self._probing.cancel()

    async def _probe(self) -> None:
        outcome = await self.engine.probe(self.refusals.accepted, within_s=_ACCEPTED_AFTER_S)
        self.refusals.note_probe(outcome, has_others=self.has_others, now_s=self.clock())
        if (cause := self.refusals.drain_cause) is not None:
            self.log(
                f"event=engine_drained worker={self.worker_id} engine={self.engine.where} "
                f"cause={cause!r}"
            )
        self.wake()
