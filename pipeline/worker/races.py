"""Two things awaited at once: work that may take long, and the word to stop."""

import asyncio
from collections.abc import Coroutine


async def ends_before(work: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Whether the work ends before `stop` is set; else it is cancelled. Its errors are raised."""
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
