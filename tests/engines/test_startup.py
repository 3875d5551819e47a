"""A start of an engine: the command, the turn on the node, the wait for a first answer."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.engines import startup
from pipeline.engines.client import ChatClient
from pipeline.engines.process.server import EngineProcess
from pipeline.engines.startup import StartProbe, first_on_this_node, start_sglang
from pipeline.errors import EngineError
from schemas.config.engine import EngineConfig
from schemas.config.run_file import RunFile
from tests.fakes.scripted_server import Reply, ScriptedServer, completion_body, serving

pytestmark = [pytest.mark.engine]
T = TypeVar("T")


def run_file(folder: Path, **engine: object) -> RunFile:
    return RunFile.model_validate(
        {
            "prompts": {"path": "p"},
            "model": "Qwen/Qwen3-8B",
            "output": {"folder": str(folder)},
            "engine": {"kind": "sglang", "command": ["/bin/sh", "-c", "sleep 60"], **engine},
        }
    )


def started(folder: Path, script: str) -> EngineProcess:
    process = EngineProcess(
        command=["/bin/sh", "-c", script], env={}, log_path=folder / "log", secret=""
    )
    process.start()
    return process


def engine_config(kind: str, **values: object) -> EngineConfig:
    required = {"sglang": {"command": ["c"]}, "endpoint": {"base_urls": ["http://h/v1"]}}
    return EngineConfig.model_validate({"kind": kind, **required.get(kind, {}), **values})


def with_client(url: str, call: Callable[[ChatClient], Awaitable[T]]) -> T:
    async def once() -> T:
        client = ChatClient(
            base_url=url, api_key="k", model="m", template_kwargs={}, opens_in_prompt=False,
            return_token_ids=False, timeout_s=5.0,
        )  # fmt: skip
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(once())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_READY_POLL_S", "_NODE_POLL_S", "_LIFE_POLL_S"):
        monkeypatch.setattr(startup, name, 0.02)


# -- the command


def command_of(folder: Path, flags: list[str], **engine: object) -> list[str]:
    config = run_file(folder, **engine)
    process, address = start_sglang(config, flags, folder / "log")
    asyncio.run(process.stop())
    port = process.command[process.command.index("--port") + 1]
    assert address.base_url == f"http://127.0.0.1:{port}/v1"
    assert (
        address.api_key == process.secret == process.command[process.command.index("--api-key") + 1]
    )
    assert process.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    return process.command


def test_command_has_model_name_address_and_metrics(tmp_path: Path) -> None:
    words = command_of(tmp_path, ["--tp-size", "2"])
    assert words[:5] == ["/bin/sh", "-c", "sleep 60", "--model-path", "Qwen/Qwen3-8B"]
    assert words[words.index("--served-model-name") + 1] == "Qwen/Qwen3-8B"
    assert words[-3:] == ["--tp-size", "2", "--enable-metrics"]


def test_flags_of_the_run_file_replace_ours(tmp_path: Path) -> None:
    flags = ["--served-model-name=own", "--host", "0.0.0.0", "--enable-metrics"]
    words = command_of(tmp_path, flags, served_model_name="other")
    assert "--served-model-name" not in words
    assert [words.count(word) for word in ("--host", "--enable-metrics")] == [1, 1]
    assert "127.0.0.1" not in words


# -- the turn on the node


def test_engines_start_one_at_a_time_until_one_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config, running, most = run_file(tmp_path), 0, [0]

    async def start(*, fails: bool = False) -> None:
        nonlocal running
        async with first_on_this_node(config, print):
            running += 1
            most[0] = max(most[0], running)
            await asyncio.sleep(0.05)
            running -= 1
            if fails:
                raise EngineError("it did not come up")

    async def life() -> None:
        # A start that fails leaves the turn to the next, alone.
        await asyncio.gather(start(fails=True), start(), return_exceptions=True)
        assert most == [1]
        # One is up: the others find everything in the caches.
        await asyncio.gather(start(), start(), start())
        assert most == [3]

    asyncio.run(life())


def test_turn_that_does_not_come_is_reported_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, seconds in (("REPORT", 0.02), ("POLL", 0.01), ("PATIENCE", 0.2)):
        monkeypatch.setattr(f"pipeline.engines.startup._NODE_{name}_S", seconds)
    lines: list[str] = []

    async def life() -> None:
        config = run_file(tmp_path)
        async with (
            first_on_this_node(config, lines.append),
            first_on_this_node(config, lines.append),
        ):
            assert lines[0].startswith("event=start_waits waited_s=0 lock=")

    asyncio.run(life())


# -- the wait


def test_probe_waits_for_a_file_and_returns_its_text(tmp_path: Path) -> None:
    process = started(tmp_path, f"sleep 0.1; echo http://h > {tmp_path}/tmp; "
                      f"mv {tmp_path}/tmp {tmp_path}/address; sleep 60")  # fmt: skip
    probe = StartProbe(config=engine_config("embedded"), process=process)
    assert asyncio.run(probe.written(tmp_path / "address")) == "http://h\n"
    asyncio.run(process.stop())


def test_process_that_ends_is_told_with_its_status(tmp_path: Path) -> None:
    process = started(tmp_path, "echo out of luck; exit 5")
    probe = StartProbe(config=engine_config("embedded"), process=process)
    with pytest.raises(EngineError, match=r"ended with status 5; its last lines: .*out of luck"):
        asyncio.run(probe.written(tmp_path / "address"))
    asyncio.run(process.stop())


@pytest.mark.parametrize(("kind", "timeout_s"), [("embedded", 120), ("endpoint", 20)])
def test_start_is_late_after_the_time_of_its_kind(
    monkeypatch: pytest.MonkeyPatch, kind: str, timeout_s: float
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(startup, "monotonic", lambda: now_s[0])
    probe = StartProbe(config=engine_config(kind), process=None, _began_s=1000.0)
    now_s[0] += timeout_s
    probe.check("refused")
    now_s[0] += 1
    with pytest.raises(EngineError, match=f"not ready within {timeout_s} s: refused"):
        probe.check("refused")


def test_sglang_may_take_hours_where_no_time_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "monotonic", lambda: 9e5)
    StartProbe(config=engine_config("sglang"), process=None, _began_s=0.0).check("loading")
    limited = engine_config("sglang", ready_timeout_s=60)
    with pytest.raises(EngineError, match="not ready within 60 s"):
        StartProbe(config=limited, process=None, _began_s=0.0).check("loading")


@pytest.mark.parametrize(("kind", "has_silence_limit"), [("sglang", True), ("embedded", False)])
def test_silence_of_the_process_ends_the_start_of_sglang_alone(
    tmp_path: Path, kind: str, has_silence_limit: bool
) -> None:
    process = started(tmp_path, "sleep 60")
    probe = StartProbe(config=engine_config(kind, start_silence_s=0.2), process=process)
    silent = None
    deadline_s = time.monotonic() + (5 if has_silence_limit else 0.6)
    while silent is None and time.monotonic() < deadline_s:
        try:
            probe.check("it does not listen")
        except EngineError as error:
            silent = str(error)
        time.sleep(0.02)
    asyncio.run(process.stop())
    assert (silent is not None) == has_silence_limit
    assert silent is None or "no sign of life for 0 s at its start: it does not listen" in silent


def test_first_answer_is_asked_for_until_it_comes() -> None:
    def slow_to_warm(_: dict[str, Any], number: int) -> Reply:
        return Reply(status=503) if number < 3 else Reply(body=completion_body("Hello."))

    with serving(ScriptedServer(script=slow_to_warm)) as server:
        probe = StartProbe(config=engine_config("sglang"), process=None)
        turn = with_client(server.url, probe.first_turn)
    assert turn.answer_text == "Hello."
    assert turn.prompt_tokens == 5
    assert len(server.requests) == 3
    assert server.requests[0]["max_tokens"] == 2


def test_trial_that_is_refused_ends_the_start() -> None:
    script = ScriptedServer(script=lambda request, number: Reply(status=400))
    with serving(script) as server:
        probe = StartProbe(config=engine_config("sglang"), process=None)
        with pytest.raises(EngineError, match="refuses a trial request: HTTP 400"):
            with_client(server.url, probe.first_turn)


def test_process_that_dies_under_its_first_request_ends_the_start(tmp_path: Path) -> None:
    script = ScriptedServer(script=lambda request, number: Reply(delay_s=30))
    process = started(tmp_path, "sleep 0.3; exit 9")
    with serving(script) as server:
        probe = StartProbe(config=engine_config("sglang"), process=process)
        with pytest.raises(EngineError, match="status 9"):
            with_client(server.url, probe.first_turn)
    asyncio.run(process.stop())


def test_server_that_does_not_listen_yet_is_waited_for() -> None:
    probe = StartProbe(config=engine_config("endpoint", ready_timeout_s=0.2), process=None)
    with pytest.raises(EngineError, match=r"not ready within 0 s: .* does not answer"):
        with_client("http://127.0.0.1:9/v1", probe.context_length)
    with serving(ScriptedServer()) as server:
        fresh = StartProbe(config=engine_config("endpoint"), process=None)
        assert with_client(server.url, fresh.context_length) == 8192
