"""A worker's lease book behind Ray: what goes with a heartbeat, by a handle that calls at once."""

import asyncio
from pathlib import Path
from typing import Any

from pipeline.engines.metered import MeteredEngine
from pipeline.engines.served import ServedEngine
from pipeline.run.actors import RemoteBook
from pipeline.run.placement import Place
from schemas.config.run_file import RunFile
from schemas.plan import EngineTrial, PlanOption
from schemas.progress import Orders
from tests.fakes.example_report import worker_report


class Handle:
    """Notes each remote call, and answers heartbeats."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> "Method":
        return Method(self, name)


class Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self.handle, self.name = handle, name

    async def remote(self, *arguments: object) -> Orders | None:
        self.handle.calls.append((self.name, arguments[-1]))
        return Orders() if self.name == "heartbeat" else None


def test_plans_of_an_engine_are_reported_whenever_they_change(tmp_path: Path) -> None:
    config = RunFile.model_validate(
        {"prompts": {"path": "p"}, "model": "m", "output": {"folder": str(tmp_path)}}
    )
    served = ServedEngine(config=config, worker_number=0, log_path=tmp_path / "log")
    engine, handle = MeteredEngine(served=served), Handle()
    book = RemoteBook(handle, Place(node="n", node_id="1", gpus=()), engine)

    def beat() -> list[object]:
        handle.calls.clear()
        asyncio.run(book.heartbeat(worker_report()))
        return [value for name, value in handle.calls if name == "note_trial"]

    assert beat() == []
    option = PlanOption(words=("--a",), tokens_per_s=1.0, log_sd=0.1)
    trial = EngineTrial(
        card="B200", options=(option,), shared_log_sd=0.1, output_tokens_mean=1.0, running="--a"
    )
    engine.trial = trial
    assert beat() == [trial]
    assert beat() == []
    engine.trial = EngineTrial(
        card="B200", options=(option,), shared_log_sd=0.1, output_tokens_mean=1.0, running=None
    )
    assert beat() == [engine.trial]
