"""The real SGLang on CPU, through the worker and the job: `make test-sglang`.

Runs only where SGLANG_PYTHON names an interpreter with SGLang, SGLANG_MODEL a folder with a tiny
model that writes a thinking part and an answer, and SGLANG_HYBRID_MODEL one with such a model of
linear attention and a draft head.
"""

import asyncio
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pipeline.dataset.frozen import FrozenPrompts
from pipeline.engines.served import ServedEngine
from pipeline.planner.sglang.failures import figures
from pipeline.planner.sglang.metrics import EngineCounters, engine_counters, engine_load
from pipeline.store.folder import LocalFolder
from pipeline.worker.intervals import Intervals
from pipeline.worker.worker import Worker
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.config.run_file import RunFile
from schemas.progress import Supply
from schemas.prompt import Message, Request, SamplingParams, TokenBias
from tests.fakes.desk import (
    LocalBook,
    each_once,
    frozen,
    local_book,
    prompts_of,
    published_rows,
    worker_at,
)
from tests.fakes.running import Run, below, new_run, questions

if TYPE_CHECKING:
    from subprocess import Popen

JOB_S = 600.0
# Two engines that start at once on two cores take a minute each.
PYTHON, MODEL = os.environ.get("SGLANG_PYTHON"), os.environ.get("SGLANG_MODEL")
HYBRID_MODEL = os.environ.get("SGLANG_HYBRID_MODEL")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not (PYTHON and MODEL and HYBRID_MODEL),
        reason="needs SGLANG_PYTHON, SGLANG_MODEL and SGLANG_HYBRID_MODEL",
    ),
]

ENGINE: dict[str, Any] = {
    "kind": "sglang",
    "gpus": 0,
    "python": PYTHON,
    "context_length": 4096,
    "max_running_requests": 16,
    "env": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    "flags": [
        *("--device", "cpu", "--mem-fraction-static", "0.2", "--max-total-tokens", "32768"),
        *("--reasoning-parser", "qwen3", "--attention-backend", "torch_native"),
        *("--skip-server-warmup", "--sleep-on-idle"),
    ],
}
STATE_SLOTS = 40
HYBRID_FLAGS = (
    *("--device", "cpu", "--mem-fraction-static", "0.2", "--max-total-tokens", "32768"),
    *("--reasoning-parser", "qwen3", "--skip-server-warmup", "--sleep-on-idle"),
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    *("--page-size", "1", "--decode-log-interval", "1"),
)
# What a hybrid model needs on a CPU, and a log line of every step.
MTP_FLAGS = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
)


def config(folder: Path, *, model: str | None = MODEL, **engine: object) -> RunFile:
    return RunFile.model_validate(
        {
            "prompts": {"path": "unused"},
            "model": model,
            "sampling": {"max_tokens": 200, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
            "output": {"folder": str(folder), "flush_interval_s": 0.5},
            "work": {"shard_rows": 16},
            "engine": {**ENGINE, **engine},
        }
    )


@pytest.fixture
def engine(tmp_path: Path) -> ServedEngine:
    events: list[str] = []
    return ServedEngine(
        config=config(tmp_path),
        worker_number=0,
        log_path=tmp_path / "logs" / "engine-0.log",
        log=events.append,
    )


def request(text: str, **sampling: object) -> Request:
    values: dict[str, Any] = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "presence_penalty": None,
        "repetition_penalty": None, "max_tokens": 200, "seed": None, **sampling,
    }  # fmt: skip
    messages = (Message(role="user", content=text),)
    return Request(
        row_id="r", sample_index=0, turn_index=0, messages=messages,
        sampling=SamplingParams(**values),
    )  # fmt: skip


def test_one_engine_from_its_launch_to_its_end(engine: ServedEngine) -> None:
    """Ready, the thinking apart, token ids, a refusal, an abort, no trouble, nothing left."""

    async def life() -> None:
        await engine.start()
        assert engine.release is not None
        assert engine.release.startswith("sglang 0.5.")
        assert engine.max_running_requests == 16
        assert engine.context_length == 4096
        turn = await engine.generate(request("hello"))
        assert isinstance(turn, Turn)
        assert turn.reasoning_text
        assert "<think>" not in turn.answer_text
        assert turn.prompt_token_ids
        assert turn.completion_token_ids is not None
        assert turn.completion_tokens == len(turn.completion_token_ids)
        overlong = await engine.generate(request("word " * 5000))
        assert isinstance(overlong, Refusal)
        assert "400" in overlong.text
        await aborted(engine)
        assert await engine.trouble(Supply(in_flight=0)) is None
        await engine.stop()

    asyncio.run(life())
    assert not engine_processes(engine.log_path.parent)


async def aborted(engine: ServedEngine) -> None:
    """A request whose asker leaves is ended by the engine within seconds."""
    asking = asyncio.create_task(engine.generate(request("long", max_tokens=3000)))
    await asyncio.sleep(1.0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    deadline_s = time.monotonic() + 20
    while await running_requests(engine):
        assert time.monotonic() < deadline_s, "still running"
        await asyncio.sleep(0.5)


async def running_requests(engine: ServedEngine) -> float:
    assert engine._client is not None
    found = engine_load(await engine._client.page("/metrics") or "")
    assert found is not None
    return found.running


def desk_of(root: Path, num_rows: int) -> tuple[LocalBook, FrozenPrompts]:
    """The ledger and the frozen prompts that workers share."""
    folder = LocalFolder(root)
    return local_book(folder, num_rows, shard_rows=16), frozen(folder, prompts_of(num_rows))


def worker_of(
    number: int, served: ServedEngine, book: LocalBook, prompts: FrozenPrompts, log: list[str]
) -> Worker:
    return worker_at(
        book,
        prompts,
        served,
        served.config,
        worker_id=f"w{number}",
        log=log.append,
        intervals=Intervals(),
    )


def test_five_hundred_rows_with_two_engines_and_one_kill(tmp_path: Path) -> None:
    """A killed scheduler costs its requests in flight and nothing else."""
    book, prompts = desk_of(tmp_path, 500)
    events: list[str] = []
    wanted = config(tmp_path, count=2, max_running_requests=32)
    engines = [
        ServedEngine(
            config=wanted,
            worker_number=number,
            log_path=tmp_path / "logs" / f"engine-{number}.log",
            log=events.append,
        )
        for number in (0, 1)
    ]
    workers = [worker_of(n, one, book, prompts, events) for n, one in enumerate(engines)]

    async def run_and_kill() -> None:
        working = asyncio.gather(*(worker.run() for worker in workers))
        while not all(one.max_running_requests and one.plan for one in engines) or not book.ids():
            assert not working.done(), working.result()
            await asyncio.sleep(0.1)
        schedulers(tmp_path)[0].kill()
        await working

    asyncio.run(run_and_kill())
    each_once(book, 500)
    assert sum(worker.report().restarts for worker in workers) == 1
    assert all(row["status"] == "ok" for row in published_rows(book).values())
    assert {part.worker_id for part in book.parts} == {"w0", "w1"}
    assert not engine_processes(tmp_path)


def long_request(number: int, eos_id: int) -> Request:
    """A greedy request that never ends by itself, so that it can be stopped in the middle."""
    bias = (TokenBias(token_id=str(eos_id), bias=-100.0),)
    made = request(f"question {number}", temperature=0.0, max_tokens=200, logit_bias=bias)
    return replace(made, row_id=f"r{number}")


def test_requests_that_are_aborted_and_continued_equal_undisturbed_ones(
    engine: ServedEngine,
) -> None:
    assert_continued(engine, str(MODEL))


def test_requests_with_mtp_that_are_aborted_and_continued_equal_undisturbed_ones(
    tmp_path: Path,
) -> None:
    flags = ("--attention-backend", "intel_amx", *MTP_FLAGS)
    assert_continued(hybrid_engine(tmp_path, flags, []), str(HYBRID_MODEL))


def assert_continued(engine: ServedEngine, model: str) -> None:
    """A planned stop with 20 requests in flight costs the last step of each, and nothing else."""
    tokens = json.loads((Path(model) / "generation_config.json").read_text())
    requests = [long_request(number, tokens["eos_token_id"]) for number in range(20)]

    async def all_of(wanted: list[Request]) -> list[Outcome]:
        return await asyncio.gather(*map(engine.generate, wanted))

    async def stopped(wanted: list[Request], after_s: float) -> list[Request]:
        """Send the requests, abort them, and return the requests for what is left."""
        running = asyncio.create_task(all_of(wanted))
        await asyncio.sleep(after_s)
        while not running.done():
            assert await engine.abort_all()
            await asyncio.wait({running}, timeout=0.3)
        left = []
        for one, outcome in zip(wanted, running.result(), strict=True):
            assert isinstance(outcome, Interruption), outcome
            left.append(replace(one, continues=outcome.so_far or one.continues))
        return left

    async def life() -> tuple[list[Outcome], list[Request], list[Request], list[Outcome]]:
        await engine.start()
        try:
            whole = await all_of(requests)
            first = await stopped(requests, 1.0)
            # As another process would: the engine is a new one.
            await engine.stop()
            await engine.start()
            second = await stopped(first, 1.0)
            return whole, first, second, await all_of(second)
        finally:
            await engine.stop()

    whole, first, second, continued = asyncio.run(life())
    # Those that waited for a place have nothing.
    assert sum(one.continues is not None for one in first) == engine.max_running_requests < 20
    for before, after in zip(first, second, strict=True):
        if before.continues is not None:
            assert after.continues is not None
            assert after.continues.num_tokens >= before.continues.num_tokens
    for one, other in zip(whole, continued, strict=True):
        assert isinstance(one, Turn)
        assert isinstance(other, Turn)
        assert other.completion_token_ids == one.completion_token_ids
        assert replace(other, duration_s=one.duration_s, continued=None) == one
        assert one.completion_tokens == 200


def hybrid_engine(
    root: Path, flags: tuple[str, ...], log: list[str], state_slots: int = STATE_SLOTS
) -> ServedEngine:
    # What speculation compiles on a GPU would look for Triton's CPU back-end.
    env = {**ENGINE["env"], "TORCHDYNAMO_DISABLE": "1"}
    slots = ("--max-mamba-cache-size", str(state_slots))
    return ServedEngine(
        config=config(root, model=HYBRID_MODEL, env=env, flags=[*HYBRID_FLAGS, *slots, *flags]),
        worker_number=0,
        log_path=root / "logs" / "engine-0.log",
        log=log.append,
    )


def rows_and_readings(
    root: Path, flags: tuple[str, ...], num_rows: int, log: list[str]
) -> tuple[LocalBook, ServedEngine, list[EngineCounters]]:
    """Generate all rows with one worker, and read the engine's counters meanwhile."""
    book, prompts = desk_of(root, num_rows)
    engine = hybrid_engine(root, flags, log)
    readings = []

    async def run_and_read() -> None:
        working = asyncio.create_task(worker_of(0, engine, book, prompts, log).run())
        while not working.done():
            is_ready = any(line.startswith("event=engine_ready") for line in log)
            page = await engine.metrics_page() if is_ready else None
            if page and (counters := engine_counters(page)):
                readings.append(counters)
            await asyncio.sleep(0.1)
        await working

    asyncio.run(run_and_read())
    return book, engine, readings


def test_hybrid_model_runs_as_many_requests_as_it_has_state_slots_for(tmp_path: Path) -> None:
    log: list[str] = []
    flags = ("--attention-backend", "torch_native")
    book, engine, readings = rows_and_readings(tmp_path, flags, 200, log)
    each_once(book, 200)
    rows = list(published_rows(book).values())
    for row in rows:
        assert_hybrid_row(row)
    assert len({row["turns"][0]["completion_tokens"] for row in rows}) > 1, "drawn, not chosen"
    assert_slots_hold_requests_back(engine, readings, log)
    found = figures(engine.log_path.read_text())
    assert found is not None
    assert found.draft_weights_gib is None
    assert all(one.accept_length is None for one in readings)


def test_hybrid_model_with_mtp_keeps_the_drafts_that_are_right(tmp_path: Path) -> None:
    log: list[str] = []
    flags = ("--attention-backend", "intel_amx", *MTP_FLAGS)
    book, engine, readings = rows_and_readings(tmp_path, flags, 200, log)
    each_once(book, 200)
    for row in published_rows(book).values():
        assert_hybrid_row(row)
        # On a CPU a checked token is the likeliest one, whatever the temperature.
        assert row["turns"][0]["reasoning_text"] == " weighing it once more"
        assert row["turns"][0]["answer_text"] == "Yes indeed!"
        assert row["turns"][0]["completion_tokens"] == 11
    assert_slots_hold_requests_back(engine, readings, log)
    launch = engine.log_path.read_text()
    found = figures(launch)
    assert found is not None
    assert found.draft_weights_gib is not None
    accept_lengths = [one.accept_length for one in readings if one.accept_length is not None]
    assert 2 <= min(accept_lengths) <= max(accept_lengths) <= 3
    # The first of 11 tokens comes of the prompt. Then the draft errs behind " weighing" alone:
    # (" weighing" " it") (" once" " more" "</think>") ("\n\n" "Yes" " indeed") ("!" end, one cut).
    requests, tokens = verified(launch)
    assert requests >= 4 * 200
    assert tokens / requests == pytest.approx((2 + 3 + 3 + 3) / 4, abs=0.01)


def test_hybrid_engine_that_has_no_slot_to_run_on_steps_down_and_runs(tmp_path: Path) -> None:
    log: list[str] = []
    flags = ("--attention-backend", "torch_native")
    engine = hybrid_engine(tmp_path, flags, log, state_slots=2)

    async def life() -> None:
        await engine.start()
        assert isinstance(await engine.generate(request("hello")), Turn)
        await engine.stop()

    asyncio.run(life())
    (step,) = [line for line in log if line.startswith("event=step_down")]
    assert step.startswith("event=step_down cause=state_pool")
    assert "--disable-radix-cache off → on" in step
    assert engine.plan is not None
    assert engine.plan.endswith("--disable-radix-cache")
    assert engine.max_running_requests == 2


def assert_hybrid_row(row: dict[str, Any]) -> None:
    assert row["status"] == "ok"
    (turn,) = row["turns"]
    assert turn["finish_reason"] == "stop"
    assert turn["reasoning_text"].startswith(" weighing it ")
    assert turn["answer_text"].startswith("Yes indeed")
    assert len(turn["completion_token_ids"]) == turn["completion_tokens"]
    assert len(turn["prompt_token_ids"]) == turn["prompt_tokens"]


def assert_slots_hold_requests_back(
    engine: ServedEngine, readings: list[EngineCounters], log: list[str]
) -> None:
    cap = STATE_SLOTS // 3
    # A request ties up three slots where states have no buffer: kv_cache_configurator.py, 0.5.23.
    launch = engine.log_path.read_text()
    found = figures(launch)
    assert found is not None
    assert re.search(rf"max_running_requests .*\bto {cap}\b", launch)
    assert found.state_slots == STATE_SLOTS
    assert found.max_running_requests == cap
    assert engine.max_running_requests == cap
    assert f"event=requests_capped wanted=16 effective={cap}" in log
    assert 0 < max(one.running_requests for one in readings) <= cap


def verified(log: str) -> tuple[int, float]:
    """Sum over all steps the requests whose drafts were verified, and the tokens kept."""
    steps = re.findall(r"Decode batch, #running-req: (\d+),.*? accept len: ([\d.]+)", log)
    requests = [int(running) for running, _ in steps]
    return sum(requests), sum(int(running) * float(length) for running, length in steps)


def test_engine_that_is_told_to_end_answers_what_it_has(engine: ServedEngine) -> None:
    async def life() -> None:
        await engine.start()
        asking = [asyncio.create_task(engine.generate(request(f"q{n}"))) for n in range(8)]
        await asyncio.sleep(0.3)
        for process in engine_processes(engine.log_path.parent):
            if "launch_server" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGTERM)
        outcomes = await asyncio.gather(*asking)
        assert all(isinstance(outcome, Turn | Interruption) for outcome in outcomes)
        assert any(isinstance(outcome, Turn) for outcome in outcomes)
        await engine.stop()

    asyncio.run(life())


@pytest.mark.ray
def test_stopped_job_publishes_what_is_finished_and_ends_its_engines(tmp_path: Path) -> None:
    run = new_run(tmp_path, questions(400), model=MODEL, engine=ENGINE)
    process = run.start()
    wait_for_rows(run, 20, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=JOB_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert len(set(run.ids())) == len(run.ids()) >= 20
    time.sleep(3)  # a guard's grace, and a little
    assert not engine_processes(run.folder)


def wait_for_rows(run: Run, num_rows: int, process: "Popen[str]") -> None:
    deadline_s = time.monotonic() + JOB_S
    while len(run.ids()) < num_rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.5)


def engine_processes(folder: Path) -> list[psutil.Process]:
    """Everything below the guards that write their logs under this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(word.endswith("guard.py") for word in words) and str(folder) in " ".join(words):
            found += below(process.pid)
    return found


def schedulers(folder: Path) -> list[psutil.Process]:
    return [one for one in engine_processes(folder) if "scheduler" in " ".join(one.cmdline())]
