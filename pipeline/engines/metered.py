"""The worker's engine with a meter, which times and counts its requests.

The meter's spans go to the coordinator with the heartbeats. A metrics page that does not answer
costs readings and nothing else.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from pipeline.engines.served import ServedEngine
from pipeline.live.meter import Meter
from pipeline.planner.sglang.metrics import engine_counters
from schemas.completion import Outcome
from schemas.plan import EngineTrial
from schemas.progress import LiveSpan, Supply
from schemas.prompt import Message, Request

_READ_EVERY_S = 5.0
# assumed: a page that answers at all answers within this; a drain has two seconds for everything
_LAST_READ_TIMEOUT_S = 0.5


@dataclass(slots=True, kw_only=True)
class MeteredEngine:
    """A served engine and the meter of its requests."""

    served: ServedEngine
    meter: Meter = field(default_factory=Meter)
    trial: EngineTrial | None = None
    """Plans to try, and the one that its last start runs; None where nothing is tried."""
    _reading: "asyncio.Task[None] | None" = None
    _last: tuple[LiveSpan, float] | None = None

    @property
    def name(self) -> str:
        return self.served.name

    @property
    def where(self) -> str:
        return self.served.where

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
        self._stop_reading()
        self.meter.stopped()
        began_s = monotonic()
        await self.served.start()
        if self.served.trial is not None:
            self.trial = replace(self.served.trial, start_s=monotonic() - began_s)
        self.meter.card = self.served.card
        self.meter.started(self.served.max_running_requests)
        self._reading = asyncio.create_task(self._read_forever())

    async def generate(self, request: Request) -> Outcome:
        request = self.served.fitted(request)
        begun = request.continues.num_tokens if request.continues is not None else 0
        number, outcome = self.meter.note_request(monotonic(), begun_tokens=begun), None
        try:
            outcome = await self.served.generate(request)
            return outcome
        finally:
            self.meter.note_outcome(number, outcome, monotonic())

    async def probe(self, request: Request | None, *, within_s: float) -> Outcome | None:
        """Probe the engine; such requests are not metered."""
        return await self.served.probe(request, within_s=within_s)

    async def abort_all(self) -> bool:
        return await self.served.abort_all()

    async def is_alive(self) -> bool:
        return await self.served.is_alive()

    async def trouble(self, supply: Supply) -> str | None:
        return await self.served.trouble(supply)

    def prompt_tokens_at_least(self, messages: Sequence[Message]) -> int:
        return self.served.prompt_tokens_at_least(messages)

    def use_plan(self, words: Sequence[str]) -> None:
        self.served.use_plan(words)

    async def stop(self) -> None:
        self._stop_reading()
        try:
            if (span := await self._rest()) is not None:
                self._last = span, monotonic()
        finally:
            self.meter.stopped()
            await self.served.stop()

    def take_span(self) -> LiveSpan | None:
        """Return the span since the last one, once it is long enough."""
        return self.meter.take_span(monotonic())

    def last_span(self) -> tuple[LiveSpan, float] | None:
        """Return, once, the span that ended with the stop, and its age in seconds."""
        last, self._last = self._last, None
        return (last[0], monotonic() - last[1]) if last is not None else None

    async def idle_span(self) -> LiveSpan | None:
        """Return the rest of the span when nothing is in flight: the run may end at any moment."""
        return await self._rest() if self.meter.is_idle else None

    async def _rest(self) -> LiveSpan | None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._read(), _LAST_READ_TIMEOUT_S)
        return self.meter.take_last_span(monotonic())

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read_forever(self) -> None:
        while True:
            await self._read()
            await asyncio.sleep(_READ_EVERY_S)

    async def _read(self) -> None:
        page = await self.served.metrics_page()
        counters = engine_counters(page) if page else None
        if counters is not None:
            self.meter.note_counters(counters, monotonic())
