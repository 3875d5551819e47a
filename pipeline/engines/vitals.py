"""Send requests to an engine that serves, and judge by them and in between whether it hangs.

An attempt that was not answered in time says nothing about its row if the engine answered no other
request meanwhile and does not answer a short one either.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from pipeline.engines.health import Deadline, Watch
from pipeline.engines.startup import Trial
from schemas.completion import Interruption, Outcome, Turn
from schemas.config.engine import EngineKind
from schemas.config.run_file import RunFile
from schemas.progress import Supply
from schemas.prompt import Request

if TYPE_CHECKING:
    from pipeline.engines.client import ChatClient

# assumed: an engine that works answers two tokens within it, however many requests it has
_TRIAL_TIMEOUT_S = 30.0


def vitals_of(config: RunFile, engine_number: int, log: Callable[[str], None]) -> "Vitals":
    """Return the vitals of an engine that is not up yet."""
    deadline = Deadline(
        base_s=config.request_timeout_s,
        most_tokens=config.most_completion_tokens,
        is_fixed=config.engine.request_timeout_s is not None,
    )
    return Vitals(
        kind=config.engine.kind,
        hang_timeout_s=config.engine.hang_timeout_s,
        engine_number=engine_number,
        log=log,
        deadline=deadline,
    )


@dataclass(slots=True, kw_only=True)
class Vitals:
    """Deadline, watch and trials of one engine, over all its starts."""

    kind: EngineKind
    hang_timeout_s: float
    engine_number: int
    log: Callable[[str], None]
    deadline: Deadline
    watch: Watch | None = None
    """Set while the engine is up."""
    is_hung: bool = False
    """An endpoint did not answer a trial; it counts as lost until it does."""
    _trial: Trial | None = None

    def begin(self, client: "ChatClient") -> None:
        """Watch an engine that has come up."""
        self.watch = Watch(hang_timeout_s=self.hang_timeout_s)
        self._trial = Trial(client)

    async def end(self) -> None:
        self.watch, trial, self._trial = None, self._trial, None
        if trial is not None:
            await trial.cancel()

    # -- requests

    async def send(self, client: "ChatClient", request: Request) -> Outcome:
        """Send a request with the deadline of this moment, and note what comes of it."""
        num_answers = self.watch.num_answers if self.watch is not None else 0
        limit_s = client.timeout_s = self.deadline.seconds
        outcome = await client.generate(request)
        match outcome:
            case Interruption(kind="timeout"):
                return await self._judged(outcome, limit_s, num_answers)
            case Interruption():
                return outcome
            case _:
                self._note_answer(outcome)
                return outcome

    def _note_answer(self, outcome: Outcome) -> None:
        self.is_hung, duration_s = False, 0.0
        if isinstance(outcome, Turn):
            duration_s = outcome.duration_s
            self.deadline.note_answer(outcome.completion_tokens, duration_s)
        if self.watch is not None:
            self.watch.note_answer(duration_s)

    async def _judged(
        self, outcome: Interruption, limit_s: float, num_answers: int
    ) -> Interruption:
        """Return a time-out as the row's, or as the engine's if that answers nothing at all."""
        self.deadline.note_late(limit_s)
        if (report := self.deadline.take_report()) is not None:
            self.log(f"event=mostly_timeouts engine={self.engine_number} {report}")
        watch, trial = self.watch, self._trial
        if watch is None or trial is None or watch.num_answers > num_answers:
            return outcome
        if await trial.is_answered(min(limit_s, _TRIAL_TIMEOUT_S)):
            return outcome
        # The others have counters of their own, and their requests may fill every place.
        self.is_hung = self.kind == "endpoint"
        return replace(outcome, is_engines=True)

    # -- between requests

    async def silence(self, supply: Supply) -> str | None:
        """Return why an endpoint is hung: it answers neither its requests nor a short one."""
        watch, trial = self.watch, self._trial
        if watch is None or trial is None:
            return None
        watch.observe_silence(now_s=monotonic(), in_flight=supply.in_flight)
        if watch.hang is None:
            return None
        if await trial.is_answered(min(self.deadline.seconds, _TRIAL_TIMEOUT_S)):
            watch.note_life(monotonic())
            return None
        self.is_hung = True
        return f"{watch.hang}, nor to a short one"

    def standstill(self, supply: Supply, *, cpu_ticks: int) -> str | None:
        """Return why an engine that only its CPU counter shows is hung."""
        if self.watch is None:
            return None
        self.watch.observe_hang(
            now_s=monotonic(), load=None, in_flight=supply.in_flight, cpu_ticks=cpu_ticks
        )
        return self.watch.hang
