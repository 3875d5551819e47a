"""Finished rows: when they are flushed, under which names, and which are dropped."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.dataset.parts import stage_part
from pipeline.store.folder import LocalFolder
from pipeline.worker import publishing
from pipeline.worker.publishing import Publisher
from pipeline.worker.row import Row
from schemas.completion import QualityFlag
from schemas.config.run_file import RunFile
from schemas.manifest import Part
from schemas.prompt import Problem
from schemas.shard import LeaseKey
from tests.fakes.desk import LocalBook, local_book, prompt
from tests.fakes.example_completion import TURN
from tests.fakes.fake_engine import FakeEngine

NO_ANSWER = Problem(kind="no_user_turn", text="none")
Setting = Callable[..., tuple[Publisher, LocalBook, list[str]]]


@pytest.fixture
def publisher(tmp_path: Path) -> Setting:
    """Builds a publisher of leased rows: `publisher(8, flush_interval_s=60, window_rows=2)`."""

    def build(
        num_rows: int = 8, *, flush_interval_s: float = 60.0, window_rows: int = 200
    ) -> tuple[Publisher, LocalBook, list[str]]:
        config = RunFile.model_validate(
            {
                "prompts": {"path": "unused"},
                "model": "m",
                "output": {"folder": str(tmp_path), "flush_interval_s": flush_interval_s},
                "quality": {"window_rows": window_rows},
            }
        )
        lines: list[str] = []
        book = local_book(LocalFolder(tmp_path), num_rows, shard_rows=num_rows)
        book.ledger.lease("w0", now_s=0.0)
        stage = partial(
            stage_part, book.folder, run_id="r", carried_schema=pa.schema([]), worker_id="w0"
        )
        made = Publisher(
            worker_id="w0",
            session_id="s",
            config=config,
            engine=FakeEngine(plan="--tp 2"),
            book=book,
            stage=stage,
            log=lines.append,
        )
        made.start_interval()
        return made, book, lines

    return build


def finished(
    publisher: Publisher, number: int, flags: tuple[QualityFlag, ...] = (), *, attempt: int = 1
) -> None:
    row = Row(
        key=LeaseKey(shard_id=0, attempt=attempt),
        number=number,
        prompt=prompt(number),
        sample_index=0,
        turns=[TURN],
        flags=set(flags),
    )
    publisher.finish(row, None, is_canary=False)


def test_rows_wait_for_the_interval_unless_the_worker_is_idle(publisher: Setting) -> None:
    async def flushed() -> None:
        rows, book, _ = publisher()
        finished(rows, 0)
        rows.flush_if_due(is_idle=False)
        assert not rows.is_flushing
        assert rows.num_unflushed == 1
        rows.flush_if_due(is_idle=True)
        assert rows.is_flushing
        await rows.flush_all()
        assert not rows.is_flushing
        assert rows.num_unflushed == 0
        assert book.ids() == ["q000"]

    asyncio.run(flushed())


def test_interval_counts_from_the_last_flush(publisher: Setting) -> None:
    async def flushed() -> None:
        rows, book, _ = publisher(flush_interval_s=0.2)
        finished(rows, 0)
        rows.flush_if_due(is_idle=False)
        assert not rows.is_flushing
        await asyncio.sleep(0.2)
        rows.flush_if_due(is_idle=False)
        assert rows.is_flushing
        await rows.flush_all()
        finished(rows, 1)
        rows.flush_if_due(is_idle=False)
        assert not rows.is_flushing
        assert book.ids() == ["q000"]

    asyncio.run(flushed())


def test_many_rows_are_flushed_before_the_interval(
    publisher: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_MAX_UNFLUSHED_ROWS", 3)

    async def flushed() -> None:
        rows, _, _ = publisher()
        for number in range(3):
            rows.flush_if_due(is_idle=False)
            assert not rows.is_flushing
            finished(rows, number)
        rows.flush_if_due(is_idle=False)
        assert rows.is_flushing
        await rows.flush_all()

    asyncio.run(flushed())


def test_nothing_finished_is_no_part(publisher: Setting) -> None:
    async def flushed() -> None:
        rows, book, _ = publisher()
        rows.flush_if_due(is_idle=True)
        assert not rows.is_flushing
        await rows.flush_all()
        assert book.parts == []

    asyncio.run(flushed())


def test_parts_are_named_by_session_worker_and_number(publisher: Setting) -> None:
    async def flushed() -> list[str]:
        rows, book, _ = publisher()
        for number in range(2):
            finished(rows, number)
            await rows.flush_all()
        return [part.name for part in book.parts]

    assert asyncio.run(flushed()) == ["part-s-w0-000001.parquet", "part-s-w0-000002.parquet"]


def test_rows_of_a_lost_lease_are_dropped_and_the_others_published(publisher: Setting) -> None:
    async def flushed() -> None:
        rows, book, lines = publisher()
        finished(rows, 0)
        finished(rows, 1, attempt=7)
        await rows.flush_all()
        assert book.ids() == ["q000"]
        assert lines == ["event=stale_rows worker=w0 rows=1"]
        assert book.folder.names("staging") == []

    asyncio.run(flushed())


def test_flagged_rows_can_be_dropped_before_they_are_published(publisher: Setting) -> None:
    async def flushed() -> list[str]:
        rows, book, _ = publisher()
        finished(rows, 0, ("empty_answer",))
        finished(rows, 1)
        rows.drop_flagged()
        await rows.flush_all()
        return book.ids()

    assert asyncio.run(flushed()) == ["q001"]


def test_cleared_rows_are_not_published(publisher: Setting) -> None:
    async def flushed() -> list[str]:
        rows, book, _ = publisher()
        finished(rows, 0)
        rows.clear()
        await rows.flush_all()
        return book.ids()

    assert asyncio.run(flushed()) == []


def test_window_counts_the_last_good_rows_outside_the_canary(publisher: Setting) -> None:
    rows, _, _ = publisher(window_rows=2)
    finished(rows, 0, ("empty_answer",))
    finished(rows, 1)
    assert list(rows.window) == [("empty_answer",), ()]
    finished(rows, 2, ("looping",))
    assert list(rows.window) == [(), ("looping",)]
    row = Row(key=LeaseKey(shard_id=0, attempt=1), number=3, prompt=prompt(3), sample_index=0)
    rows.finish(row, NO_ANSWER, is_canary=False)
    rows.finish(row, None, is_canary=True)
    assert list(rows.window) == [(), ("looping",)]
    assert rows.num_unflushed == 5


def test_window_of_no_rows_stays_empty(publisher: Setting) -> None:
    rows, _, _ = publisher(window_rows=0)
    finished(rows, 0, ("empty_answer",))
    assert list(rows.window) == []


def test_error_of_a_flush_reaches_the_worker(publisher: Setting) -> None:
    def broken(name: str, completions: object) -> Part:
        raise OSError(name)

    async def flushed() -> None:
        rows, _, _ = publisher()
        rows.stage = broken
        finished(rows, 0)
        rows.raise_fault()
        rows.flush_if_due(is_idle=True)
        rows.raise_fault()
        await rows._flushing.settle()
        rows.raise_fault()

    with pytest.raises(OSError, match="part-s-w0-000001"):
        asyncio.run(flushed())
