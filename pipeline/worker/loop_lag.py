"""Lag of the event loop: how late this process comes to its own work.

A starved client cannot tell a slow server from itself: what it asks times out, however well the
server is.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from time import monotonic

_EVERY_S = 0.25
# assumed: a healthy loop is late by milliseconds, and the page of a healthy server takes less
BUSY_S = 1.0


@dataclass(slots=True)
class LoopLag:
    """Delays of the last minute's timers that made the loop busy."""

    _busy: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=60))
    """End and length of each delay."""

    async def watch(self) -> None:
        """Measure for ever."""
        while True:
            due_s = monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            now_s = monotonic()
            if now_s - due_s >= BUSY_S:
                self._busy.append((now_s, now_s - due_s))

    def longest_since(self, since_s: float) -> float:
        """Return the longest delay that ended after `since_s`; 0 while the loop was not busy."""
        return max((lag_s for end_s, lag_s in self._busy if end_s >= since_s), default=0.0)
