"""Other users of the machine get neither the engine's key, nor a prompt, nor a forged row."""

import asyncio
import os
from pathlib import Path

import pytest

from pipeline.engines.process.counters import processes_below
from pipeline.engines.process.port import free_port
from tests.fakes.desk import each_once, prompts_of
from tests.fakes.engine_site import MakeSite
from tests.fakes.impostor import Impostor

pytestmark = [pytest.mark.engine]

WAIT_S = 10.0


@pytest.fixture
def first_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Fix the port of the first start, which others can foresee once it is visible in `ps`."""
    first = free_port()
    ports = iter([first])
    monkeypatch.setattr(
        "pipeline.engines.startup.free_port", lambda: next(ports, None) or free_port()
    )
    return first


def test_port_that_is_taken_before_the_engine_listens_gets_no_word(
    site: MakeSite, first_port: int
) -> None:
    with Impostor(first_port) as impostor:
        assert impostor.listens.wait(WAIT_S)
        at = site(prompts_of(5), {})
        at.run()
    each_once(at.book, 5)
    assert impostor.received == []
    assert at.logged("start_again")[0].startswith("event=start_again cause=port")
    assert f"--port {first_port} " not in at.starts()[-1]


def test_key_is_on_no_command_line(site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    def token_hex(num_bytes: int) -> str:
        keys.append("k3y" * 16)
        return keys[-1]

    monkeypatch.setattr("pipeline.engines.startup.secrets.token_hex", token_hex)
    at = site(prompts_of(1), {})

    async def command_lines() -> list[str]:
        await at.engine.start()
        try:
            found = [Path(f"/proc/{pid}/cmdline") for pid in processes_below(os.getpid())]
            return [path.read_text() for path in found if path.exists()]
        finally:
            await at.engine.stop()

    lines = asyncio.run(command_lines())
    assert any("standin_sglang" in line for line in lines)
    assert keys
    assert not [line for line in lines if keys[0] in line]
