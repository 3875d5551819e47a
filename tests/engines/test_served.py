"""A served engine over HTTP: its reports, and the reasons to restart it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.engines import served as served_module
from pipeline.engines.gpus import Card
from pipeline.engines.health import Watch
from pipeline.engines.served import (
    ServedEngine,
    _mapping,
    check_engine,
    endpoint_key,
)
from pipeline.engines.startup import TRIAL
from pipeline.errors import ConfigError, EngineError
from schemas.completion import Interruption, Turn
from schemas.config.run_file import RunFile
from schemas.progress import Supply
from schemas.prompt import Message
from tests.fakes.scripted_server import Reply, ScriptedServer, serving

T = TypeVar("T")


def run_file(folder: Path, engine: dict[str, Any], **values: object) -> RunFile:
    output = {"folder": str(folder)}
    return RunFile.model_validate(
        {"prompts": {"path": "p"}, "model": "m", "output": output, "engine": engine, **values}
    )


def endpoint(folder: Path, url: str, **engine: object) -> ServedEngine:
    config = run_file(folder, {"kind": "endpoint", "base_urls": [url], **engine})
    return ServedEngine(config=config, worker_number=0, log_path=folder / "log")


def during(engine: ServedEngine, call: Callable[[], Awaitable[T]]) -> T:
    async def life() -> T:
        await engine.start()
        try:
            return await call()
        finally:
            await engine.stop()

    return asyncio.run(life())


# -- an endpoint


def test_endpoint_is_named_and_has_the_context_that_it_reports(tmp_path: Path) -> None:
    with serving(ScriptedServer()) as server:
        engine = endpoint(tmp_path, f"{server.url}/")
        outcome = during(engine, lambda: engine.generate(TRIAL))
    assert isinstance(outcome, Turn)
    assert (engine.name, engine.context_length, engine.release) == ("endpoint", 8192, None)
    assert (engine.plan, engine.card, engine.starved) == (None, None, None)
    assert engine.max_running_requests == 16


def test_context_of_the_run_file_counts_for_an_endpoint(tmp_path: Path) -> None:
    with serving(ScriptedServer()) as server:
        engine = endpoint(tmp_path, server.url, context_length=4096)
        during(engine, engine.is_alive)
    assert engine.context_length == 4096


def test_endpoint_has_no_metrics_and_no_trouble_of_ours(tmp_path: Path) -> None:
    with serving(ScriptedServer()) as server:
        engine = endpoint(tmp_path, server.url)
        assert during(engine, engine.metrics_page) is None
        assert during(engine, lambda: engine.trouble(Supply(in_flight=1))) is None


def test_engine_is_alive_between_its_start_and_its_stop(tmp_path: Path) -> None:
    with serving(ScriptedServer()) as server:
        engine = endpoint(tmp_path, server.url)
        assert not asyncio.run(engine.is_alive())
        assert during(engine, engine.is_alive)
        assert not asyncio.run(engine.is_alive())
        server.models = Reply(status=500)
        late = endpoint(tmp_path, server.url, ready_timeout_s=0.2)

        async def start() -> None:
            with pytest.raises(EngineError, match="not ready within"):
                await late.start()
            assert not await late.is_alive()
            await late.stop()

        asyncio.run(start())


def test_engine_that_is_not_started_interrupts_its_requests(tmp_path: Path) -> None:
    outcome = asyncio.run(endpoint(tmp_path, "http://127.0.0.1:9/v1").generate(TRIAL))
    assert isinstance(outcome, Interruption)
    assert outcome.connection_failed


def test_start_closes_the_client_of_the_start_before(tmp_path: Path) -> None:
    with serving(ScriptedServer()) as server:
        engine = endpoint(tmp_path, server.url)

        async def start_again() -> None:
            first = engine._client
            assert first is not None
            assert first._pages._http is not None
            await engine.start()
            assert engine._client is not first
            assert first._pages._http is None

        during(engine, start_again)


@pytest.mark.parametrize("text", [None, "", "<html>", "[1]", "7"])
def test_page_that_is_no_json_object_has_no_figures(text: str | None) -> None:
    assert _mapping(text) == {}
    assert _mapping('{"version": "0.5.23"}') == {"version": "0.5.23"}


# -- an SGLang engine that is up


class Pages:
    """A client that serves metrics pages and one outcome."""

    def __init__(self, pages: list[str | None], outcome: object = None) -> None:
        self.pages, self.outcome = pages, outcome

    async def page(self, path: str) -> str | None:
        assert path == "/metrics"
        return self.pages.pop(0)

    async def generate(self, request: object) -> object:
        return self.outcome

    async def close(self) -> None:
        pass


def page(*, running: int, queued: int = 0, tokens: int = 0) -> str:
    return (
        f"sglang:num_running_reqs {running}\n"
        f"sglang:num_queue_reqs {queued}\n"
        f"sglang:generation_tokens_total {tokens}\n"
        "sglang:token_usage 0.97\n"
    )


def sglang_engine(folder: Path, pages: list[str | None], log: list[str]) -> ServedEngine:
    config = run_file(folder, {"kind": "sglang", "command": ["c"], "max_running_requests": 32})
    engine = ServedEngine(config=config, worker_number=3, log_path=folder / "log", log=log.append)
    engine._vitals.watch = Watch(hang_timeout_s=60)
    engine._client = Pages(pages)  # type: ignore[assignment]
    return engine


@pytest.fixture
def at_times(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_times(*times_s: float) -> None:
        left = list(times_s)
        monkeypatch.setattr(served_module, "monotonic", lambda: left.pop(0))

    return set_times


def troubles(engine: ServedEngine, supply: Supply, times: int) -> list[str | None]:
    return [asyncio.run(engine.trouble(supply)) for _ in range(times)]


def test_hung_engine_is_trouble_until_it_makes_tokens_again(
    tmp_path: Path, at_times: Callable[..., None]
) -> None:
    at_times(0.0, 61.0, 62.0)
    still = page(running=8, tokens=100)
    engine = sglang_engine(tmp_path, [still, still, page(running=8, tokens=101)], [])
    first, hung, moving = troubles(engine, Supply(in_flight=8), 3)
    assert (first, moving) == (None, None)
    assert hung == "hung: no token for 61 s with 8 requests in flight (running 8, queued 0)"


def test_answers_are_counted_as_progress_but_interruptions_are_not(
    tmp_path: Path, at_times: Callable[..., None]
) -> None:
    at_times(0.0, 61.0, 122.0)
    engine = sglang_engine(tmp_path, [None, None, None], [])
    client: Any = engine._client

    async def life() -> list[str | None]:
        found = [await engine.trouble(Supply(in_flight=1))]
        client.outcome = "an answer"
        await engine.generate(TRIAL)
        found.append(await engine.trouble(Supply(in_flight=1)))
        client.outcome = Interruption(cause="connection", connection_failed=True)
        await engine.generate(TRIAL)
        return [*found, await engine.trouble(Supply(in_flight=1))]

    first, answered, hung = asyncio.run(life())
    assert (first, answered) == (None, None)
    assert hung is not None
    assert "its metrics do not answer" in hung


def card(power_w: float | None, limit_w: float | None) -> Card:
    return Card(
        index=0, uuid="GPU-1", name="H100", total_mib=80_000, free_mib=80_000,
        compute_capability=90, power_w=power_w, power_limit_w=limit_w,
    )  # fmt: skip


def test_starved_engine_is_logged_once_with_the_power_of_its_cards(
    tmp_path: Path, at_times: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # (300 / 600 + 150 / 600) / 2: 38 %. A card without a reading does not count.
    cards = (card(300, 600), card(150, 600), card(None, 600), card(100, None))
    monkeypatch.setattr(served_module, "visible_cards", lambda: cards)
    at_times(0.0, 130.0, 140.0)
    pages: list[str | None] = [page(running=8, queued=4, tokens=n) for n in range(3)]
    log: list[str] = []
    engine = sglang_engine(tmp_path, pages, log)
    assert troubles(engine, Supply(in_flight=32, waiting=8), 3) == [None] * 3
    shortage = "runs 8 of 32 requests: short of KV tokens (97% in use)"
    assert engine.starved == shortage
    assert log == [f"event=starved engine=3 why={shortage!r} power=38%"]
    asyncio.run(engine.stop())
    assert engine.starved is None


def test_process_that_is_gone_is_trouble_and_nothing_is_read(tmp_path: Path) -> None:
    class Gone:
        is_running = False

        async def stop(self) -> None:
            pass

    engine = sglang_engine(tmp_path, [], [])
    engine._process = Gone()  # type: ignore[assignment]
    assert troubles(engine, Supply(in_flight=1), 1) == ["its process is gone"]
    assert not asyncio.run(engine.is_alive())
    asyncio.run(engine.stop())
    assert troubles(engine, Supply(in_flight=1), 1) == [None], "it is not up"


# -- prompts


class Words:
    is_exact = True

    def count_text(self, text: str) -> int:
        return len(text.split())


def test_tokens_are_counted_only_for_prompts_that_may_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = [Words()]
    monkeypatch.setattr(served_module, "token_counter", lambda config: counters.pop())
    engine = endpoint(tmp_path, "http://h/v1")
    long = [Message(role="user", content="one two three"), Message(role="user", content="four")]
    assert engine.prompt_tokens_at_least(long) == 0, "the context is unknown"
    engine.context_length = 1000
    assert engine.prompt_tokens_at_least(long) == 0, "its bytes fit"
    engine.context_length = 10
    # 3 + 1 words; the counter is made once.
    assert [engine.prompt_tokens_at_least(long) for _ in range(2)] == [4, 4]


def test_estimated_tokens_are_no_lower_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Estimate(Words):
        is_exact = False

    monkeypatch.setattr(served_module, "token_counter", lambda config: Estimate())
    engine = endpoint(tmp_path, "http://h/v1")
    engine.context_length = 10
    assert engine.prompt_tokens_at_least([Message(role="user", content="one " * 99)]) == 0


# -- the engine section


def test_deadline_of_a_request_holds_its_largest_budget(tmp_path: Path) -> None:
    engine = {"kind": "sglang", "command": ["c"], "min_tokens_per_s": 2.0}
    config = run_file(tmp_path, engine, sampling={"max_tokens": 1000})
    # 60 s, and 1,000 tokens at 2 tokens/s.
    assert config.request_timeout_s == 60 + 1000 / 2
    given = run_file(tmp_path, {**engine, "request_timeout_s": 7.0})
    assert given.request_timeout_s == 7.0


def test_key_of_an_endpoint_is_read_from_the_named_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"kind": "endpoint", "base_urls": ["http://h/v1"]}
    assert endpoint_key(run_file(tmp_path, values)) == "none"
    named = run_file(tmp_path, {**values, "api_key_env": "THE_KEY"})
    monkeypatch.setenv("THE_KEY", "k1")
    assert endpoint_key(named) == "k1"
    check_engine(named)
    for absent in ("", None):
        if absent is None:
            monkeypatch.delenv("THE_KEY")
        else:
            monkeypatch.setenv("THE_KEY", absent)
        with pytest.raises(ConfigError, match="no variable THE_KEY"):
            check_engine(named)


def test_interpreter_and_flags_of_sglang_are_checked_before_anything_starts(
    tmp_path: Path,
) -> None:
    values = {"kind": "sglang", "python": str(tmp_path / "absent")}
    with pytest.raises(ConfigError, match=r"engine\.python: no file"):
        check_engine(run_file(tmp_path, values))
    (tmp_path / "absent").touch(mode=0o600)
    with pytest.raises(ConfigError, match=r"engine\.python: .* is not executable"):
        check_engine(run_file(tmp_path, values))
    (tmp_path / "absent").chmod(0o700)
    check_engine(run_file(tmp_path, values))
    with pytest.raises(ConfigError, match="'stray', which belongs to no flag"):
        check_engine(run_file(tmp_path, {**values, "flags": ["--disable-radix-cache", "stray"]}))


def test_embedded_model_must_exist(tmp_path: Path) -> None:
    values = {"kind": "embedded", "model_file": str(tmp_path / "absent.gguf")}
    with pytest.raises(ConfigError, match=r"engine\.model_file: no file"):
        check_engine(run_file(tmp_path, values))
    check_engine(run_file(tmp_path, {"kind": "embedded"}))
