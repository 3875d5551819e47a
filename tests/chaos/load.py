"""Loads of runs: engines of each kind, and the text that each of their rows must have."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.chaos.processes import TAG
from tests.fakes import standin_sglang
from tests.fakes.running import ROOT, Run, free_port, is_listening, new_run, questions, wait_until
from tests.fakes.scripted_model import write_scripted_model
from tests.fakes.standin_sglang import WordModel
from tests.fakes.word_tokenizer import write_word_tokenizer

EngineKind = Literal["endpoint", "sglang", "embedded"]
KINDS: tuple[EngineKind, ...] = ("endpoint", "sglang", "embedded")
NUM_ENGINES = 2
# Rows of a run: some minutes of work between kills, on two cores.
NUM_ROWS: Mapping[EngineKind, int] = {"endpoint": 900, "sglang": 600, "embedded": 6000}

Row = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Endpoints:
    """Endpoint processes on fixed ports; a dead one starts again at the next `mend`."""

    tag: str
    log: Path
    ports: tuple[int, ...]
    seed: int
    processes: dict[int, "subprocess.Popen[bytes]"]

    def mend(self, environment: Mapping[str, str]) -> None:
        for port in self.ports:
            process = self.processes.get(port)
            if process is None or process.poll() is not None:
                self.seed += 1
                arguments = [str(port), str(self.seed), str(self.log)]
                self.processes[port] = subprocess.Popen(
                    [sys.executable, "-m", "tests.chaos.endpoint", *arguments],
                    cwd=ROOT,
                    env={**environment, TAG: self.tag},
                )

    def num_repeated(self) -> tuple[int, int]:
        """Return how many answers were sent, and how many of them to questions answered before."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return len(lines), len(lines) - len(Counter(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A run to be harmed; `is_right` judges the text of one of its rows."""

    kind: EngineKind
    run: Run
    rows: list[dict[str, Any]]
    is_right: Callable[[Row], bool]
    endpoints: Endpoints | None = None


@contextmanager
def load_of(
    kind: EngineKind, folder: Path, *, seed: int, environment: Mapping[str, str]
) -> Iterator[Load]:
    rows = questions(NUM_ROWS[kind])
    if kind == "endpoint":
        with _endpoints(folder, seed, environment) as endpoints:
            urls = [f"http://127.0.0.1:{port}/v1" for port in endpoints.ports]
            engine = {"kind": kind, "base_urls": urls, "max_running_requests": 8}
            run = new_run(folder, rows, engine=engine, retry={"backoff_initial_s": 0.1})
            yield Load(kind=kind, run=run, rows=rows, is_right=_is_echo, endpoints=endpoints)
        return
    if kind == "embedded":
        model_file = folder / "scripted.gguf"
        write_scripted_model(model_file)
        engine = {"kind": kind, "count": NUM_ENGINES, "model_file": str(model_file), "threads": 1}
        run = new_run(folder, rows, engine=engine, sampling={"max_tokens": 512})
        yield Load(kind=kind, run=run, rows=rows, is_right=_is_of_script)
        return
    model = folder / "Qwen3.6-words"
    write_word_tokenizer(model)
    engine = {
        "kind": kind,
        "count": NUM_ENGINES,
        "gpus": 0,
        "plan": "off",
        "max_running_requests": 8,
        "command": [sys.executable, "-I", str(Path(standin_sglang.__file__))],
        "env": {"STANDIN": json.dumps({"token_s": 0.01, "request_mib": 1.0})},
    }
    run = new_run(folder, rows, model=str(model), engine=engine)
    words = WordModel(str(model))
    yield Load(kind=kind, run=run, rows=rows, is_right=lambda row: _is_of_words(words, row))


@contextmanager
def _endpoints(folder: Path, seed: int, environment: Mapping[str, str]) -> Iterator[Endpoints]:
    endpoints = Endpoints(
        tag=f"{folder}/endpoints",
        log=folder / "answers.log",
        ports=tuple(free_port() for _ in range(NUM_ENGINES)),
        seed=seed,
        processes={},
    )
    endpoints.mend(environment)
    try:
        wait_until(lambda: all(map(is_listening, endpoints.ports)))
        yield endpoints
    finally:
        for process in endpoints.processes.values():
            process.kill()
            process.wait()


def _question(row: Row) -> str:
    return str(row["messages"][0]["content"])


def _is_echo(row: Row) -> bool:
    turn = row["turns"][0]
    texts = turn["reasoning_text"], turn["answer_text"]
    return texts == ("thinking", f"answer to {_question(row)}")


def _is_of_script(row: Row) -> bool:
    turn = row["turns"][0]
    is_whole = turn["finish_reason"] == "stop"
    return not is_whole or (
        turn["reasoning_text"].startswith("First we") and turn["answer_text"].startswith("It comes")
    )


def _is_of_words(model: WordModel, row: Row) -> bool:
    ids = model.prompt_ids([{"content": _question(row)}])
    generated: list[int] = []
    while not generated or model.word[generated[-1]] != "<eos>":
        generated.append(model.next_token(ids + generated))
    before, _, after = model.text(generated).partition("</think>")
    turn = row["turns"][0]
    return (turn["reasoning_text"].split(), turn["answer_text"].split()) == (
        before.split(),
        after.split(),
    )
