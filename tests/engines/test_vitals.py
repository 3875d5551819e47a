"""Requests to servers that hang, drip or are slow, over real HTTP."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.served import ServedEngine
from pipeline.engines.startup import TRIAL
from pipeline.errors import EngineError
from schemas.completion import Interruption, Outcome, Turn
from schemas.config.run_file import RunFile
from schemas.progress import Supply
from schemas.prompt import Message, Request
from tests.fakes.scripted_server import (
    Reply,
    Script,
    ScriptedServer,
    answer,
    completion_body,
    last_text,
    serving,
)

LONG = Request(
    row_id="long",
    sample_index=0,
    turn_index=0,
    messages=(Message(role="user", content="long"),),
    sampling=TRIAL.sampling,
)


@pytest.fixture
def engine_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[ServedEngine, list[str]]]:
    monkeypatch.setattr("pipeline.engines.vitals._TRIAL_TIMEOUT_S", 0.3)

    def make(url: str, **engine: object) -> tuple[ServedEngine, list[str]]:
        section = {"kind": "endpoint", "base_urls": [url], "request_timeout_s": 0.3, **engine}
        config = RunFile.model_validate(
            {"prompts": {"path": "p"}, "model": "m", "output": {"folder": "o"}, "engine": section}
        )
        log: list[str] = []
        served = ServedEngine(
            config=config, worker_number=0, log_path=tmp_path / "log", log=log.append
        )
        return served, log

    return make


def hangs(asked: dict[str, Any], number: int) -> Reply:
    return Reply(body=completion_body("late"), delay_s=3600.0)


def hangs_on_long(asked: dict[str, Any], number: int) -> Reply:
    return hangs(asked, number) if last_text(asked) == "long" else answer(asked, number)


def drips(asked: dict[str, Any], number: int) -> Reply:
    return Reply(body=completion_body("late"), drip_s=0.05)


async def asked_at(engine: ServedEngine, times: int = 1) -> list[Outcome]:
    await engine.start()
    try:
        return list(await asyncio.gather(*(engine.generate(LONG) for _ in range(times))))
    finally:
        await engine.stop()


@pytest.mark.parametrize("script", [hangs, drips])
def test_attempt_that_a_hung_server_never_answered_is_the_servers(
    engine_of: Callable[..., tuple[ServedEngine, list[str]]], script: Script
) -> None:
    with serving(ScriptedServer(script=script)) as server:
        engine, _ = engine_of(server.url)

        async def life() -> tuple[Outcome, bool]:
            await engine.start()
            try:
                return await engine.generate(LONG), await engine.is_alive()
            finally:
                await engine.stop()

        outcome, is_alive = asyncio.run(life())
        # Its models are listed all the while.
        assert not is_alive
        assert isinstance(outcome, Interruption)
        assert (outcome.kind, outcome.is_engines) == ("timeout", True)
        assert len(server.requests) == 2, "the request, and one trial"


def test_trials_of_many_requests_are_one(
    engine_of: Callable[..., tuple[ServedEngine, list[str]]],
) -> None:
    with serving(ScriptedServer(script=hangs)) as server:
        outcomes = asyncio.run(asked_at(engine_of(server.url)[0], times=9))
        assert all(isinstance(one, Interruption) and one.is_engines for one in outcomes)
        assert len(server.requests) == 9 + 1


def test_attempt_that_is_late_at_a_server_that_answers_others_is_the_rows(
    engine_of: Callable[..., tuple[ServedEngine, list[str]]],
) -> None:
    with serving(ScriptedServer(script=hangs_on_long)) as server:
        (outcome,) = asyncio.run(asked_at(engine_of(server.url)[0]))
    assert isinstance(outcome, Interruption)
    assert (outcome.kind, outcome.is_engines) == ("timeout", False)


def test_hung_server_is_ready_again_when_it_answers_and_not_when_it_lists_its_models(
    engine_of: Callable[..., tuple[ServedEngine, list[str]]],
) -> None:
    with serving(ScriptedServer(script=hangs)) as server:
        engine, _ = engine_of(server.url, ready_timeout_s=0.5)

        async def life() -> Outcome:
            await engine.start()
            await engine.generate(LONG)
            with pytest.raises(EngineError, match="not ready within"):
                await engine.start()
            server.script = answer
            await engine.start()
            try:
                assert await engine.is_alive()
                return await engine.generate(LONG)
            finally:
                await engine.stop()

        assert isinstance(asyncio.run(life()), Turn)


@pytest.mark.parametrize(("script", "is_hung"), [(hangs, True), (hangs_on_long, False)])
def test_silent_server_is_hung_if_it_does_not_answer_a_short_request_either(
    engine_of: Callable[..., tuple[ServedEngine, list[str]]], script: Script, is_hung: bool
) -> None:
    with serving(ScriptedServer(script=script)) as server:
        engine, _ = engine_of(server.url, hang_timeout_s=0.1, request_timeout_s=60.0)

        async def life() -> str | None:
            await engine.start()
            sent = asyncio.create_task(engine.generate(LONG))
            assert await engine.trouble(Supply(in_flight=1)) is None
            await asyncio.sleep(0.15)
            trouble = await engine.trouble(Supply(in_flight=1))
            sent.cancel()
            await engine.stop()
            return trouble

        trouble = asyncio.run(life())
    assert (trouble is not None) == is_hung
    if is_hung:
        assert "with 1 requests in flight, nor to a short one" in str(trouble)


def test_timeouts_beyond_the_answers_are_reported(
    engine_of: Callable[..., tuple[ServedEngine, list[str]]],
) -> None:
    with serving(ScriptedServer(script=hangs_on_long)) as server:
        engine, log = engine_of(server.url)
        asyncio.run(asked_at(engine, times=12))
    assert log == ["event=mostly_timeouts engine=0 timeouts=10 answers=0 deadline_s=0"]
