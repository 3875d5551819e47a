"""Tasks that run beside a worker's main loop."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass


@dataclass(slots=True)
class Background:
    """A task at a time, whose error is raised when the main loop checks it."""

    _task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.create_task(work)

    def raise_fault(self) -> None:
        """Raise the error that ended the task, if any."""
        task = self._task
        if task is not None and task.done() and not task.cancelled():
            task.result()

    async def wait(self) -> None:
        """Wait for the task. Raises its error."""
        if self._task is not None:
            await self._task

    async def settle(self) -> None:
        """Wait for the task, whatever ends it."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await self.settle()


async def ends_before(work: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Return whether `work` ends before `stop` is set; cancel it otherwise. Raises its errors."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
