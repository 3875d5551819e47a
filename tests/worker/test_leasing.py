"""Leases of one worker, against the real ledger."""

import asyncio
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from pipeline.dataset.partials import BegunRows, Partials
from pipeline.store.folder import LocalFolder
from pipeline.worker.leasing import Leases
from pipeline.worker.row import row_request
from schemas.begun import BegunRow
from schemas.config.run_file import RunFile
from schemas.partial import Continuation, PartialTurn, TokenIds
from schemas.prompt import Problem, Prompt
from schemas.shard import LeaseKey
from tests.fakes.desk import LocalBook, local_book, prompt, prompts_of
from tests.fakes.fake_engine import FakeEngine

RUN = RunFile.model_validate(
    {
        "prompts": {"path": "p"},
        "model": "m",
        "output": {"folder": "x"},
        "sampling": {"max_tokens": 50, "seed": 7},
    }
)


def leases_of(
    folder: Path, prompts: list[Prompt], *, samples: int = 1, context_length: int | None = None
) -> tuple[Leases, LocalBook]:
    book = local_book(LocalFolder(folder), len(prompts) * samples, shard_rows=3)
    leases = Leases(
        worker_id="w0",
        session_id="s",
        book=book,
        engine=FakeEngine(context_length=context_length),
        prompt_of=prompts.__getitem__,
        samples_per_prompt=samples,
        idle_poll_s=0.5,
        log=lambda line: None,
    )
    return leases, book


def test_rows_of_a_lease_come_with_prompt_sample_and_deaths(tmp_path: Path) -> None:
    leases, book = leases_of(tmp_path, prompts_of(2), samples=2)
    book.ledger.deaths[1] = 4
    rows = asyncio.run(leases.take())
    assert rows is not None
    assert [(row.prompt.row_id, row.sample_index, row.deaths) for row, _ in rows] == [
        ("q000", 0, 0),
        ("q000", 1, 4),
        ("q001", 0, 0),
    ]
    assert {row.key for row, _ in rows} == {LeaseKey(shard_id=0, attempt=1)}


def test_bad_rows_come_with_their_problem(tmp_path: Path) -> None:
    bad = Problem(kind="no_user_turn", text="none")
    # FakeEngine counts a token a character: "question 1.0" has twelve.
    leases, _ = leases_of(tmp_path, [prompt(0, problem=bad), prompt(1)], context_length=12)
    rows = asyncio.run(leases.take())
    assert rows is not None
    (_, first), (_, second) = rows
    assert first == bad
    assert second is not None
    assert second.kind == "over_context"
    assert second.text == "the prompt has at least 12 tokens; the engine's context is 12"


@pytest.mark.parametrize("context_length", [None, 13])
def test_prompt_within_the_context_has_no_problem(
    tmp_path: Path, context_length: int | None
) -> None:
    leases, _ = leases_of(tmp_path, prompts_of(1), context_length=context_length)
    rows = asyncio.run(leases.take())
    assert rows is not None
    assert [problem for _, problem in rows] == [None]


def test_worker_without_a_lease_polls_and_learns_whether_the_run_is_over(tmp_path: Path) -> None:
    leases, book = leases_of(tmp_path, prompts_of(1))
    assert leases.may_ask(monotonic())
    rows = asyncio.run(leases.take())
    assert rows is not None
    assert not leases.is_dry
    assert asyncio.run(leases.take()) is None
    assert leases.is_dry
    assert not leases.is_over
    now_s = monotonic()
    assert not leases.may_ask(now_s)
    assert leases.may_ask(now_s + 0.5)
    book.ledger.mark_done([(rows[0][0].key, 0)])
    assert asyncio.run(leases.take()) is None
    assert leases.is_over


def test_rows_that_are_given_back_are_open_and_others_lease_first(tmp_path: Path) -> None:
    leases, book = leases_of(tmp_path, prompts_of(3))
    rows = asyncio.run(leases.take())
    assert rows is not None
    asyncio.run(leases.give_back({rows[0][0].key: 1}))
    now_s = monotonic()
    assert not leases.may_ask(now_s + 0.9)
    assert leases.may_ask(now_s + 1.0)
    again = book.ledger.lease("w1", now_s=now_s)
    assert again is not None
    assert again.rows == (1, 2)


def test_released_rows_are_open_again(tmp_path: Path) -> None:
    leases, book = leases_of(tmp_path, prompts_of(3))
    asyncio.run(leases.take())
    asyncio.run(leases.release())
    again = book.ledger.lease("w1", now_s=monotonic())
    assert again is not None
    assert again.rows == (0, 1, 2)


def test_rows_that_have_begun_are_put_where_they_were_and_others_are_reported(
    tmp_path: Path,
) -> None:
    leases, book = leases_of(tmp_path, prompts_of(3))
    partials = Partials(folder=LocalFolder(tmp_path), run_id="r", settings="")
    lines: list[str] = []
    leases.partials, leases.log = partials, lines.append
    so_far = PartialTurn(
        prompt_token_ids=TokenIds("i", [1]), completion_token_ids=TokenIds("i", [2, 3]),
        reasoning_tokens=None, is_thinking=False, duration_s=1.0,
    )  # fmt: skip
    kept = BegunRow(
        row_id="q001", sample_index=0, content_hash="h1", started_at_s=5.0, so_far=so_far,
        interruptions=2, quality_retries=1,
    )  # fmt: skip
    changed = replace(kept, row_id="q002", content_hash="another prompt")
    partials.keep("before", "w0", [kept, changed])
    book.begun = BegunRows(
        partials=partials,
        by_number=lambda names: {int(row[1:]): value for (row, _), value in names.items()},
        is_open=book.ledger.is_open,
        log=lines.append,
    )
    book.begun.load()
    rows = asyncio.run(leases.take())
    assert rows is not None
    fresh, begun, anew = [row for row, _ in rows]
    assert (begun.so_far, begun.started_at_s) == (so_far, 5.0)
    assert (begun.interruptions, begun.quality_retries) == (2, 1)
    assert [row.has_begun for row in (fresh, begun, anew)] == [False, True, False]
    why = "the prompt has changed, or the line cannot be read"
    assert lines[1:] == [f"event=partials_dropped worker=w0 rows=1 why={why!r}"]
    request = row_request(begun, RUN, "w0")
    assert request.continues is not None
    assert request.continues.continued == (Continuation(at_token=2, worker_id="w0"),)
    assert request.sampling.seed != row_request(fresh, RUN, "w0").sampling.seed
