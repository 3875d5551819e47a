"""A planned stop with requests in flight: what was generated is kept, and continued elsewhere."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.dataset.partials import BegunRows, Partials
from pipeline.engines.metered import MeteredEngine
from pipeline.engines.served import ServedEngine
from pipeline.store.folder import LocalFolder
from pipeline.worker.worker import Worker
from schemas.config.run_file import RunFile
from schemas.progress import Orders
from tests.fakes.desk import (
    QUICK,
    LocalBook,
    each_once,
    frozen,
    local_book,
    prompts_of,
    published_rows,
    worker_at,
)
from tests.fakes.word_tokenizer import write_word_tokenizer

pytestmark = [pytest.mark.engine]

STANDIN = Path(__file__).parents[1] / "fakes" / "standin_sglang.py"
NUM_ROWS = 20
FAST: dict[str, object] = {"token_s": 0.001, "together": 0}


@dataclass(slots=True)
class Site:
    """A run's folder and ledger, whose workers come one after the other."""

    root: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the run file."""
    events: list[str] = field(default_factory=list)
    book: LocalBook = field(init=False)

    def __post_init__(self) -> None:
        write_word_tokenizer(self.root / "Qwen3.6-words")
        folder = LocalFolder(self.root / "out")
        self.book = local_book(folder, NUM_ROWS, shard_rows=8)
        self.book.begun = BegunRows(
            partials=self.partials(),
            by_number=lambda names: {int(row[1:]): value for (row, _), value in names.items()},
            is_open=self.book.ledger.is_open,
            log=self.events.append,
        )

    def partials(self, settings: str = "same") -> Partials:
        return Partials(folder=LocalFolder(self.root / "out"), run_id="r", settings=settings)

    def worker(self, worker_id: str, **standin: object) -> Worker:
        told = {"token_s": 0.05, "together": NUM_ROWS, "request_mib": 1.0, **standin}
        values: dict[str, Any] = {
            "prompts": {"path": "unused"},
            "model": str(self.root / "Qwen3.6-words"),
            "output": {"folder": str(self.root / "out"), "flush_interval_s": 0.05},
            "work": {"shard_rows": 8},
            "sampling": {"max_tokens": 200},
            "engine": {
                "kind": "sglang",
                "plan": "off",
                "max_running_requests": NUM_ROWS,
                "command": [sys.executable, "-I", str(STANDIN)],
                "env": {"STANDIN": json.dumps(told)},
            },
        }
        config = RunFile.model_validate(values | self.settings)
        engine = MeteredEngine(
            served=ServedEngine(
                config=config,
                worker_number=0,
                log_path=self.book.folder.path(f"logs/{worker_id}.log"),
                log=self.events.append,
            )
        )
        prompts = frozen(self.book.folder, prompts_of(NUM_ROWS))
        return worker_at(
            self.book, prompts, engine, config, worker_id=worker_id, log=self.events.append,
            intervals=QUICK, partials=self.partials(),
        )  # fmt: skip

    def stop_in_flight(self, worker: Worker, *, after_s: float) -> None:
        """Run a worker, and stop it when all rows have been in flight for a while."""

        async def life() -> None:
            running = asyncio.create_task(worker.run())
            while worker.report().in_flight < NUM_ROWS:
                await asyncio.sleep(0.005)
                assert not running.done(), self.events
            await asyncio.sleep(after_s)
            worker.stop()
            await running

        asyncio.run(life())
        self.book.ledger.worker_left(worker.worker_id)

    def kill_in_flight(self, worker: Worker, *, after_s: float) -> None:
        """Have a worker end without a word, as if it were killed."""

        async def life() -> None:
            running = asyncio.create_task(worker.run())
            while worker.report().in_flight < NUM_ROWS:
                await asyncio.sleep(0.005)
                assert not running.done(), self.events
            await asyncio.sleep(after_s)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        asyncio.run(life())
        self.book.ledger.worker_lost(worker.worker_id)

    def finish(self, worker: Worker) -> dict[str, dict[str, Any]]:
        assert self.book.begun is not None
        self.book.ledger.put_first(self.book.begun.load())
        asyncio.run(worker.run())
        each_once(self.book, NUM_ROWS)
        return published_rows(self.book)

    def logged(self, event: str) -> list[str]:
        return [line for line in self.events if line.startswith(f"event={event} ")]


MakeSite = Callable[..., Site]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeSite]:
    def make(**settings: object) -> Site:
        return Site(tmp_path_factory.mktemp("site"), dict(settings))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.engines.startup._READY_POLL_S", 0.02)
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("temporary")))
        yield make


def written(rows: dict[str, dict[str, Any]]) -> dict[str, object]:
    """All of the rows' turns but their times and places of continuation."""
    timed = ("duration_s", "continued")
    return {
        row_id: [{k: v for k, v in turn.items() if k not in timed} for turn in row["turns"]]
        for row_id, row in rows.items()
    }


def places(rows: dict[str, dict[str, Any]]) -> set[tuple[str, ...]]:
    """Workers that continued each row, in order."""
    return {
        tuple(place["worker_id"] for place in turn["continued"] or ())
        for row in rows.values()
        for turn in row["turns"]
    }


@pytest.fixture(scope="module")
def whole(site: MakeSite) -> dict[str, object]:
    """The rows of a run that nothing stops."""
    at = site()
    return written(at.finish(at.worker("w0", **FAST)))


def test_rows_that_were_stopped_in_flight_are_continued_and_equal_to_whole_ones(
    site: MakeSite, whole: dict[str, object]
) -> None:
    at = site()
    at.stop_in_flight(at.worker("w0"), after_s=0.5)
    (kept,) = at.logged("partials_kept")
    assert f"rows={NUM_ROWS} of={NUM_ROWS} " in kept
    rows = at.finish(at.worker("w1", **FAST))
    assert written(rows) == whole
    assert places(rows) == {("w1",)}
    for row in rows.values():
        (turn,) = row["turns"]
        (place,) = turn["continued"]
        assert 0 < place["at_token"] < turn["completion_tokens"]
        assert turn["generation_boundary"] == len(turn["prompt_token_ids"]) == turn["prompt_tokens"]
        # Wherever they were generated.
        assert turn["duration_s"] >= 0.05 * place["at_token"]
    at_tokens = [row["turns"][0]["continued"][0]["at_token"] for row in rows.values()]
    assert f"tokens={sum(at_tokens)}" in kept
    assert sum(part.tokens_saved for part in at.book.parts) == sum(at_tokens)


def test_rows_are_continued_after_each_of_several_stops_and_kills(
    site: MakeSite, whole: dict[str, object]
) -> None:
    at = site()
    at.stop_in_flight(at.worker("w0"), after_s=0.5)
    assert at.book.begun is not None
    at.book.ledger.put_first(at.book.begun.load())
    at.stop_in_flight(at.worker("w1"), after_s=0.5)
    at.book.begun.load()
    # A kill: nothing is kept of what this one adds, and what it had is not lost.
    at.kill_in_flight(at.worker("w2"), after_s=0.3)
    rows = at.finish(at.worker("w3", **FAST))
    assert written(rows) == whole
    # The last one may find a row that had only its end to come.
    assert all(places(rows))
    assert {place for one in places(rows) for place in one} <= {"w1", "w2", "w3"}
    for row in rows.values():
        at_tokens = [place["at_token"] for place in row["turns"][0]["continued"] or ()]
        assert at_tokens == sorted(at_tokens)


def test_tokens_of_the_last_step_are_generated_again(
    site: MakeSite, whole: dict[str, object]
) -> None:
    # SGLang does not check them, so the end of an answer may be among them.
    at = site()
    at.stop_in_flight(at.worker("w0", token_s=0.003, runs_on=True), after_s=1.0)
    assert written(at.finish(at.worker("w1", **FAST))) == whole


def test_rows_under_other_settings_are_not_continued(
    site: MakeSite, whole: dict[str, object]
) -> None:
    at = site()
    at.stop_in_flight(at.worker("w0"), after_s=0.5)
    assert at.book.begun is not None
    at.book.begun.partials = at.partials("others")
    rows = at.finish(at.worker("w1", **FAST))
    assert written(rows) == whole
    assert places(rows) == {()}
    assert len(at.logged("partials_dropped")) == 1
    assert not at.partials().names()


def test_release_that_does_not_know_input_ids_begins_the_rows_anew(
    site: MakeSite, whole: dict[str, object]
) -> None:
    at = site()
    at.stop_in_flight(at.worker("w0"), after_s=0.5)
    rows = at.finish(at.worker("w1", **FAST, ignores_ids=True))
    assert written(rows) == whole
    assert places(rows) == {()}


def test_rows_of_a_model_whose_tokenizer_is_not_at_hand_are_not_kept(site: MakeSite) -> None:
    at = site()
    at.settings["model"] = "Qwen/Qwen3.6-27B"
    at.stop_in_flight(at.worker("w0", tokenizer=str(at.root / "Qwen3.6-words")), after_s=0.5)
    assert not at.partials().names()


# -- a restart on purpose, under other flags

OTHER_PLAN = ("--chunked-prefill-size", "4096")


def relaunch_in_flight(at: Site, worker: Worker, plan: tuple[str, ...]) -> None:
    """Run a worker to its end, and order the other plan once all rows are in flight."""

    async def life() -> None:
        running = asyncio.create_task(worker.run())
        while worker.report().in_flight < NUM_ROWS:
            await asyncio.sleep(0.005)
            assert not running.done(), at.events
        await asyncio.sleep(0.2)
        at.book.orders.append(Orders(relaunch=plan))
        await running

    asyncio.run(life())


def test_engine_that_restarts_under_another_plan_continues_its_rows(
    site: MakeSite, whole: dict[str, object]
) -> None:
    at = site()
    worker = at.worker("w0", token_s=0.01)
    relaunch_in_flight(at, worker, OTHER_PLAN)
    each_once(at.book, NUM_ROWS)
    rows = published_rows(at.book)
    assert (written(rows), places(rows)) == (whole, {("w0",)})
    assert {row["plan"] for row in rows.values()} == {" ".join(OTHER_PLAN)}
    assert (worker.report().restarts, at.book.lost) == (1, [])
    assert not at.book.ledger.deaths


@pytest.mark.slow
def test_plan_that_does_not_start_costs_no_row_and_the_former_one_comes_back(
    site: MakeSite, whole: dict[str, object]
) -> None:
    at = site()
    # The draft head does not fit beside the weights.
    worker = at.worker("w0", token_s=0.01, draft_gib=99.0)
    relaunch_in_flight(at, worker, ("--speculative-algorithm", "EAGLE"))
    each_once(at.book, NUM_ROWS)
    rows = published_rows(at.book)
    assert (written(rows), places(rows)) == (whole, {("w0",)})
    assert {row["plan"] for row in rows.values()} == {f"--max-running-requests {NUM_ROWS}"}
    (failed,) = at.logged("trial_failed")
    assert "the draft's weights do not fit" in failed
    assert not at.logged("given_up")


@pytest.mark.slow
def test_worker_that_is_killed_while_its_engine_restarts_loses_and_doubles_no_row(
    site: MakeSite, whole: dict[str, object]
) -> None:
    at = site()
    worker = at.worker("w0", token_s=0.01)

    async def life() -> None:
        running = asyncio.create_task(worker.run())
        while worker.report().in_flight < NUM_ROWS:
            await asyncio.sleep(0.005)
            assert not running.done(), at.events
        await asyncio.sleep(0.2)
        at.book.orders.append(Orders(relaunch=OTHER_PLAN))
        # Rows are kept in a thread of their own, before or after the next start begins.
        while not (at.logged("trial_start") and at.logged("partials_kept")):
            await asyncio.sleep(0.001)
            assert not running.done(), at.events
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(life())
    at.book.ledger.worker_lost("w0")
    rows = at.finish(at.worker("w1", **FAST))
    assert (written(rows), places(rows)) == (whole, {("w1",)})
