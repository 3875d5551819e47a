"""Generate the turns of a row with one engine, and count what that costs."""

import asyncio
from dataclasses import dataclass
from functools import partial
from time import monotonic

from pipeline.errors import EngineUnfitError
from pipeline.quality.flags import LanguageOf
from pipeline.worker.ports import Engine
from pipeline.worker.refusals import Refusals
from pipeline.worker.retries import Attempts
from pipeline.worker.row import Row, add_or_retry_turn, keep_flagged_turn, row_request
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.config.run_file import RunFile
from schemas.prompt import Problem

# The checks of a turn of this size hold up the event loop, and so the heartbeat, for a millisecond.
_LONG_CHARACTERS = 8_000
# assumed: a fault that has nothing to do with the first part is over by then
_MOST_ATTEMPTS_TO_CONTINUE = 2


@dataclass(slots=True, kw_only=True)
class Generator:
    """Sends rows to one engine, turn by turn."""

    engine: Engine
    config: RunFile
    attempts: Attempts
    refusals: Refusals
    language_of: LanguageOf | None
    worker_id: str
    num_requests: int = 0
    num_timeouts: int = 0
    num_refusals: int = 0
    """Requests that the server answered with an HTTP error."""
    num_interruptions: int = 0
    completion_tokens: int = 0

    async def generate(self, row: Row) -> Problem | Interruption | None:
        """Generate the row's open turns in order. Return what kept it from its end, if anything.

        Raises EngineUnfitError for an engine that does not answer as requested.
        """
        while row.has_open_turns:
            row.attempts_at_turn += 1
            self.num_requests += 1
            request, sent_s = row_request(row, self.config, self.worker_id), monotonic()
            outcome = await self.engine.generate(request)
            self._count(outcome)
            if isinstance(outcome, Interruption):
                self.num_interruptions += 1
                if outcome.kind == "breach":
                    raise EngineUnfitError(f"{self.engine.where}: {outcome.cause}")
                _note_part(row, outcome)
                return outcome
            self.attempts.note_answer()
            if isinstance(outcome, Turn):
                self.refusals.note_answer(request, sent_s=sent_s)
                await self._take(row, outcome)
            elif row.so_far is not None:
                # It may be the ids that are refused.
                row.so_far = None
            elif not keep_flagged_turn(row):
                return _problem(outcome)
        return None

    def _count(self, outcome: Outcome) -> None:
        match outcome:
            case Interruption(kind="timeout"):
                self.num_timeouts += 1
            case Interruption(kind="refusal" | "denial") | Refusal(kind="refused_by_engine"):
                self.num_refusals += 1
            case _:
                pass

    async def _take(self, row: Row, turn: Turn) -> None:
        self.completion_tokens += turn.completion_tokens or 0
        take = partial(
            add_or_retry_turn,
            row,
            turn,
            self.config,
            context_length=self.engine.context_length,
            language_of=self.language_of,
        )
        if len(turn.answer_text) + len(turn.reasoning_text or "") > _LONG_CHARACTERS:
            await asyncio.to_thread(take)
        else:
            take()


def _note_part(row: Row, outcome: Interruption) -> None:
    """Keep what the engine returned of the turn; begin a turn anew that cannot be continued."""
    if outcome.so_far is not None:
        row.so_far = outcome.so_far
    elif row.attempts_at_turn > _MOST_ATTEMPTS_TO_CONTINUE:
        row.so_far = None


def _problem(refusal: Refusal) -> Problem:
    return Problem(kind=refusal.kind, text=refusal.text)
