"""An engine without a server, which answers by a script."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.errors import EngineError
from schemas.completion import Interruption, Outcome, Turn
from schemas.progress import Supply
from schemas.prompt import Message, Request
from tests.fakes.example_completion import SAMPLING


def echo(request: Request) -> Outcome:
    """Answer with the last user text."""
    last = request.messages[-1].content
    return Turn(
        reasoning_text=f"thinking of {last}",
        answer_text=f"answer to {last}",
        finish_reason="stop",
        prompt_tokens=len(last),
        completion_tokens=2,
        reasoning_tokens=1,
        prompt_token_ids=None,
        completion_token_ids=None,
        generation_boundary=len(last),
        duration_s=0.0,
    )


PROBE = Request(
    row_id="probe",
    sample_index=0,
    turn_index=0,
    messages=(Message(role="user", content="probe"),),
    sampling=SAMPLING,
)


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """Answer each request by `script`; die after `dies_after` requests, until started again."""

    script: Callable[[Request], Outcome] = echo
    max_running_requests: int = 4
    context_length: int | None = None
    name: str = "fake"
    where: str = "http://fake/v1"
    release: str | None = "fake 1"
    dies_after: int | None = None
    starts_that_fail: int = 0
    plan: str | None = None
    starved: str | None = None
    hangs: str | None = None
    """Trouble that the engine's metrics show, until the next start."""
    requests: list[Request] = field(default_factory=list)
    probes: list[Request | None] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    starts: int = 0
    alive: bool = False
    plans: list[tuple[str, ...]] = field(default_factory=list)
    """Launch flags that it was to use."""

    async def start(self) -> None:
        self.starts += 1
        if self.starts_that_fail:
            self.starts_that_fail -= 1
            raise EngineError("the fake engine was told to fail at its start")
        self.alive, self.hangs = True, None

    async def trouble(self, supply: Supply) -> str | None:
        return self.hangs if supply.in_flight else None

    async def generate(self, request: Request) -> Outcome:
        self.requests.append(request)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            if self.dies_after is not None and len(self.requests) >= self.dies_after:
                self.alive, self.dies_after = False, None
            if not self.alive:
                return Interruption(cause="connection: refused", connection_failed=True)
            return self.script(request)
        finally:
            self.in_flight -= 1

    async def probe(self, request: Request | None, *, within_s: float) -> Outcome | None:
        """Answer as any request, but outside the counts; our own short one is PROBE."""
        self.probes.append(request)
        if not self.alive:
            return Interruption(cause="connection: refused", connection_failed=True)
        return self.script(request or PROBE)

    async def abort_all(self) -> bool:
        return False

    async def is_alive(self) -> bool:
        return self.alive

    def prompt_tokens_at_least(self, messages: Sequence[Message]) -> int:
        return sum(len(message.content) for message in messages)

    def use_plan(self, words: Sequence[str]) -> None:
        assert not self.alive
        self.plans.append(tuple(words))

    async def stop(self) -> None:
        self.alive = False
