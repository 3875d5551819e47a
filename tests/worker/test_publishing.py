"""Finished rows: durable at once, and published in parts of a size or an age."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.dataset.journal import JournalName, LeasedRow
from pipeline.dataset.recovery import recover
from pipeline.store.folder import LocalFolder
from pipeline.worker import publishing
from pipeline.worker.publishing import Publisher
from pipeline.worker.row import Row
from schemas.completion import Completion, QualityFlag
from schemas.config.run_file import RunFile
from schemas.prompt import Problem
from schemas.shard import LeaseKey
from tests.fakes.desk import LocalBook, journal_writer, local_book, prompt
from tests.fakes.example_completion import TURN
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.output_folder import RECORD

NO_ANSWER = Problem(kind="no_user_turn", text="none")
Setting = Callable[..., tuple[Publisher, LocalBook, list[str]]]


@pytest.fixture
def publisher(tmp_path: Path) -> Setting:
    """Builds a publisher of leased rows: `publisher(8, flush_interval_s=60, window_rows=2)`."""

    def build(
        num_rows: int = 8,
        *,
        flush_interval_s: float | None = None,
        window_rows: int = 200,
        commit_interval_s: float = 0.0,
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
        made = Publisher(
            worker_id="w0",
            session_id="s",
            config=config,
            engine=FakeEngine(plan="--tp 2"),
            book=book,
            writer=journal_writer(book.folder, RECORD.run_id),
            log=lines.append,
            commit_interval_s=commit_interval_s,
        )
        return made, book, lines

    return build


def finished(
    publisher: Publisher,
    number: int,
    flags: tuple[QualityFlag, ...] = (),
    *,
    attempt: int = 1,
    is_canary: bool = False,
    problem: Problem | None = None,
) -> None:
    row = Row(
        key=LeaseKey(shard_id=0, attempt=attempt),
        number=number,
        prompt=prompt(number),
        sample_index=0,
        is_canary=is_canary,
        turns=[TURN],
        flags=set(flags),
    )
    publisher.finish(row, problem)


async def looked_at(
    publisher: Publisher, *, is_idle: bool = False, is_canary_done: bool = False
) -> None:
    """Look twice, as a worker does in two steps, and wait for what that starts."""
    for _ in range(2):
        publisher.flush_if_due(is_idle=is_idle, is_canary_done=is_canary_done)
        await publisher._committing.settle()
        await publisher._publishing.settle()
        publisher.raise_fault()


def durable(book: LocalBook) -> list[str]:
    """Row ids that a session after a crash at this moment would find."""
    return [
        row_id for part in recover(book.folder, RECORD, now_s=3.0).parts for row_id in part.row_ids
    ]


def test_finished_row_is_durable_at_once_and_published_later(publisher: Setting) -> None:
    async def committed() -> None:
        rows, book, _ = publisher()
        finished(rows, 0)
        await looked_at(rows)
        assert (book.ids(), rows.num_unflushed) == ([], 1)
        assert durable(book) == ["q000"]

    asyncio.run(committed())


def test_commits_are_an_interval_apart_unless_the_worker_is_idle(publisher: Setting) -> None:
    async def committed() -> None:
        rows, book, _ = publisher(commit_interval_s=60.0)
        finished(rows, 0)
        await looked_at(rows)
        journal = book.folder.path("staging/journal-s-w0-000001-rows")
        size = journal.stat().st_size
        finished(rows, 1)
        await looked_at(rows)
        assert journal.stat().st_size == size
        await looked_at(rows, is_idle=True)
        assert sorted(book.ids()) == ["q000", "q001"]
        assert not journal.exists()
        assert rows.num_unflushed == 0

    asyncio.run(committed())


def test_part_is_cut_at_the_interval_of_the_run_file(publisher: Setting) -> None:
    async def flushed() -> None:
        rows, book, _ = publisher(flush_interval_s=0.2)
        finished(rows, 0)
        await looked_at(rows)
        assert book.ids() == []
        await asyncio.sleep(0.2)
        finished(rows, 1)
        await looked_at(rows)
        assert book.ids() == ["q000", "q001"]

    asyncio.run(flushed())


def test_age_of_parts_grows_from_a_minute_to_an_hour(
    publisher: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(publishing, "monotonic", lambda: now_s[0])

    async def flushed() -> list[float]:
        rows, book, _ = publisher(20)
        ages = []
        for number in range(9):
            finished(rows, number)
            await looked_at(rows)
            began_s = now_s[0]
            while len(book.parts) == number:
                now_s[0] += 10.0
                await looked_at(rows)
            ages.append(now_s[0] - began_s)
        return ages

    assert asyncio.run(flushed()) == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_full_journal_is_cut_before_its_age(
    publisher: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flushed() -> None:
        rows, book, _ = publisher()
        finished(rows, 0)
        await looked_at(rows)
        assert book.ids() == []
        monkeypatch.setattr(publishing, "_FULL_BYTES", rows._open["rows"].size_bytes + 1)
        finished(rows, 1)
        await looked_at(rows)
        assert book.ids() == ["q000", "q001"]

    asyncio.run(flushed())


def test_canary_rows_are_published_by_themselves_once_the_last_is_done(publisher: Setting) -> None:
    async def flushed() -> None:
        rows, book, _ = publisher()
        finished(rows, 0, is_canary=True)
        finished(rows, 1)
        assert rows.has_canary_rows
        await looked_at(rows)
        assert book.ids() == []
        await looked_at(rows, is_canary_done=True)
        assert book.ids() == ["q000"]
        assert not rows.has_canary_rows
        await rows.flush_all()
        assert book.ids() == ["q000", "q001"]

    asyncio.run(flushed())


def test_nothing_finished_is_no_part(publisher: Setting) -> None:
    async def flushed() -> None:
        rows, book, _ = publisher()
        await looked_at(rows, is_idle=True)
        assert not rows.is_flushing
        await rows.flush_all()
        assert (book.parts, book.folder.names("staging")) == ([], [])

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
        await looked_at(rows)
        finished(rows, 1)
        finished(rows, 2, ("looping",))
        rows.drop_flagged()
        await rows.flush_all()
        return book.ids()

    assert asyncio.run(flushed()) == ["q001"]


def test_cleared_rows_are_not_published(publisher: Setting) -> None:
    async def flushed() -> list[str]:
        rows, book, _ = publisher()
        finished(rows, 0)
        await looked_at(rows)
        finished(rows, 1)
        rows.clear()
        assert rows.num_unflushed == 0
        await rows.flush_all()
        return book.ids()

    assert asyncio.run(flushed()) == []


def test_journal_that_the_coordinator_took_over_is_left_to_it(publisher: Setting) -> None:
    # Taken for dead, a worker goes on until it hears of it.
    async def flushed() -> list[str]:
        rows, book, lines = publisher()
        finished(rows, 0)
        await looked_at(rows)
        book.folder.remove("staging/journal-s-w0-000001-rows")
        await rows.flush_all()
        assert lines == ["event=stale_rows worker=w0 rows=1"]
        finished(rows, 1)
        await looked_at(rows)
        book.folder.remove("staging/journal-s-w0-000002-rows")
        finished(rows, 2)
        await rows.flush_all()
        assert lines[1:] == ["event=stale_rows worker=w0 rows=2"]
        assert rows.num_unflushed == 0
        return book.ids()

    assert asyncio.run(flushed()) == []


def test_window_counts_the_last_good_rows_outside_the_canary(publisher: Setting) -> None:
    rows, _, _ = publisher(window_rows=2)
    finished(rows, 0, ("empty_answer",))
    finished(rows, 1)
    assert list(rows.window) == [("empty_answer",), ()]
    finished(rows, 2, ("looping",))
    assert list(rows.window) == [(), ("looping",)]
    finished(rows, 3, problem=NO_ANSWER)
    finished(rows, 4, is_canary=True)
    assert list(rows.window) == [(), ("looping",)]
    assert rows.num_unflushed == 5


def test_window_of_no_rows_stays_empty(publisher: Setting) -> None:
    rows, _, _ = publisher(window_rows=0)
    finished(rows, 0, ("empty_answer",))
    assert list(rows.window) == []


def test_error_of_a_commit_reaches_the_worker(publisher: Setting) -> None:
    class BrokenWriter:
        def append(
            self, name: JournalName, completions: Sequence[Completion], leased: Sequence[LeasedRow]
        ) -> int:
            raise OSError(name)

    async def flushed() -> None:
        rows, _, _ = publisher()
        rows.writer = BrokenWriter()  # type: ignore[assignment]
        finished(rows, 0)
        await looked_at(rows)

    with pytest.raises(OSError, match="journal-s-w0-000001"):
        asyncio.run(flushed())
