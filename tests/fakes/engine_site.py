"""A worker on a stand-in for SGLang, with the files that they leave behind."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.engines.served import ServedEngine
from pipeline.store.folder import LocalFolder
from pipeline.worker.intervals import Intervals
from pipeline.worker.worker import Worker
from schemas.config.run_file import RunFile
from schemas.prompt import Prompt
from tests.fakes.desk import LocalBook, frozen, local_book, worker_at

STANDIN = Path(__file__).with_name("standin_sglang.py")
MODEL = "Qwen/Qwen3.6-27B"
SHORT = Intervals(
    tick_s=0.05,
    heartbeat_s=0.05,
    idle_poll_s=0.05,
    engine_check_s=0.05,
    restart_backoff_s=(0.0, 0.05),
)


@dataclass(slots=True)
class Site:
    """An engine, a worker and the files that they leave behind."""

    folder: LocalFolder
    config: RunFile
    engine: ServedEngine
    worker: Worker
    book: LocalBook
    events: list[str] = field(default_factory=list)

    def run(self) -> None:
        asyncio.run(self.worker.run())

    def logged(self, event: str) -> list[str]:
        return [line for line in self.events if line.startswith(f"event={event} ")]

    def starts(self) -> list[str]:
        """The command lines that were started, in order."""
        return [line.partition(" ")[2] for line in self._starts()]

    def started_at_s(self) -> list[float]:
        return [float(line.partition(" ")[0]) for line in self._starts()]

    def _starts(self) -> list[str]:
        return (self.folder.root / "starts").read_text().splitlines()


MakeSite = Callable[..., Site]


def new_site(place: Path, prompts: list[Prompt], standin: dict[str, Any], **engine: object) -> Site:
    """Build a site whose stand-in is told `standin`, as `{"hang_after": 5}`."""
    folder = LocalFolder(place / "out")
    for name in ("data", "staging", "logs"):
        folder.make(name)
    told = {"starts": str(folder.root / "starts"), **standin}
    values: dict[str, Any] = {
        "prompts": {"path": "unused"},
        "model": MODEL,
        "output": {"folder": str(folder.root), "flush_interval_s": 0.2},
        "work": {"shard_rows": 8},
        "retry": {"backoff_initial_s": 0.001},
        "hardware": [{"gpu": "RTX PRO 6000"}],
        "planner": {"sglang_version": "0.5.23"},
        "engine": {
            "kind": "sglang",
            "gpus": 1,
            "command": [sys.executable, "-I", str(STANDIN)],
            "env": {"STANDIN": json.dumps(told)},
            **engine,
        },
    }
    config = RunFile.model_validate(values)
    events: list[str] = []
    served = ServedEngine(
        config=config,
        worker_number=0,
        log_path=folder.path("logs/engine-0.log"),
        log=events.append,
    )
    book = local_book(folder, len(prompts), shard_rows=8)
    worker = worker_at(
        book, frozen(folder, prompts), served, config, log=events.append, intervals=SHORT
    )
    return Site(folder, config, served, worker, book, events)
