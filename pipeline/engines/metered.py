"""An engine seen through a meter: the worker's engine, with its requests timed and counted.

What the meter tells goes to the coordinator with the heartbeats. A metrics page that does not
answer costs readings and nothing else.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from pipeline.engines.served import ServedEngine
from pipeline.live.meter import Meter
from pipeline.planner.sglang.metrics import engine_counters
from schemas.completion import Outcome
from schemas.live import LiveSpan
from schemas.progress import Supply
from schemas.prompt import Message, Request

_LOOK_S = 5.0
_LAST_LOOK_S = 0.5
# assumed: a page that answers at all answers in so long; a drain has two seconds for everything


@dataclass(slots=True, kw_only=True)
class MeteredEngine:
    """The served engine, and what is seen of it."""

    served: ServedEngine
    meter: Meter = field(default_factory=Meter)
    _looking: "asyncio.Task[None] | None" = None
    _last: tuple[LiveSpan, float] | None = None

    @property
    def name(self) -> str:
        return self.served.name

    @property
    def release(self) -> str | None:
        return self.served.release

    @property
    def max_running_requests(self) -> int:
        return self.served.max_running_requests

    @property
    def context_length(self) -> int | None:
        return self.served.context_length

    @property
    def plan(self) -> str | None:
        return self.served.plan

    @property
    def starved(self) -> str | None:
        return self.served.starved

    async def start(self) -> None:
        self._stop_looking()
        self.meter.stopped()
        await self.served.start()
        self.meter.card = self.served.card
        self.meter.started(self.served.max_running_requests)
        self._looking = asyncio.create_task(self._look_forever())

    async def generate(self, request: Request) -> Outcome:
        number, outcome = self.meter.note_request(monotonic()), None
        try:
            outcome = await self.served.generate(request)
            return outcome
        finally:
            self.meter.note_outcome(number, outcome, monotonic())

    async def is_alive(self) -> bool:
        return await self.served.is_alive()

    async def trouble(self, supply: Supply) -> str | None:
        return await self.served.trouble(supply)

    def prompt_tokens_at_least(self, messages: Sequence[Message]) -> int:
        return self.served.prompt_tokens_at_least(messages)

    async def stop(self) -> None:
        self._stop_looking()
        try:
            if (span := await self._rest()) is not None:
                self._last = span, monotonic()
        finally:
            self.meter.stopped()
            await self.served.stop()

    def take_span(self) -> LiveSpan | None:
        """What there is to tell since the last time."""
        return self.meter.take_span(monotonic())

    def last_span(self) -> tuple[LiveSpan, float] | None:
        """What was left to tell when the engine was stopped, with how long ago that was; once."""
        last, self._last = self._last, None
        return (last[0], monotonic() - last[1]) if last is not None else None

    async def idle_span(self) -> LiveSpan | None:
        """What is left to tell when nothing is in flight: the run may end at any moment."""
        return await self._rest() if self.meter.is_idle else None

    async def _rest(self) -> LiveSpan | None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._look(), _LAST_LOOK_S)
        return self.meter.take_last_span(monotonic())

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look_forever(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        page = await self.served.metrics_page()
        counters = engine_counters(page) if page else None
        if counters is not None:
            self.meter.note_counters(counters, monotonic())
