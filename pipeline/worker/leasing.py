"""Lease rows from the coordinator, and give back those that others are to do."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from pipeline.dataset.prompts import history
from pipeline.worker.ports import Engine, LeaseBook
from pipeline.worker.row import Row, over_context, rows_of_lease
from schemas.prompt import Problem, Prompt
from schemas.shard import Lease, LeaseKey


@dataclass(slots=True, kw_only=True)
class Leases:
    """Leases of one worker: when it may ask for one, and the rows of each."""

    worker_id: str
    book: LeaseBook
    engine: Engine
    prompt_of: Callable[[int], Prompt]
    samples_per_prompt: int
    idle_poll_s: float
    is_over: bool = False
    """Set when no row is left for any worker."""
    is_dry: bool = False
    """Set while there is no row to lease."""
    _not_before_s: float = 0.0

    def may_ask(self, now_s: float) -> bool:
        return now_s >= self._not_before_s

    def hold_off(self, num_polls: int = 1) -> None:
        """Ask for no lease during `num_polls` polls of an idle worker."""
        self._not_before_s = monotonic() + num_polls * self.idle_poll_s

    async def take(self) -> list[tuple[Row, Problem | None]] | None:
        """Take a lease. Return its rows, bad ones with their problem; None without a lease."""
        reply = await self.book.lease(self.worker_id)
        self.is_dry = reply.lease is None
        if reply.lease is None:
            self.is_over = reply.is_over
            self.hold_off()
            return None
        return await asyncio.to_thread(self._rows_of, reply.lease)

    async def give_back(self, first_rows: Mapping[LeaseKey, int]) -> None:
        """Give back the rows of each lease, from the row that it is mapped to.

        This worker pauses leasing, so that idle workers get the rows rather than itself.
        """
        self.hold_off(num_polls=2)
        for key, first_row in first_rows.items():
            await self.book.give_back(key, first_row)

    async def release(self) -> None:
        """Give up whatever the coordinator still counts as this worker's."""
        await self.book.release(self.worker_id)

    def _rows_of(self, lease: Lease) -> list[tuple[Row, Problem | None]]:
        rows = rows_of_lease(lease, self.prompt_of, self.samples_per_prompt)
        return [(row, row.prompt.problem or self._over_context(row.prompt)) for row in rows]

    def _over_context(self, prompt: Prompt) -> Problem | None:
        if self.engine.context_length is None:
            return None
        num_tokens = self.engine.prompt_tokens_at_least(history(prompt.messages, []))
        return over_context(num_tokens, self.engine.context_length)
