"""The coordinator without Ray: when rows are handed out, who is asked back, what a crowd costs."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.dataset.done_rows import DoneRows
from pipeline.dataset.journal import JournalKind, JournalName, Journals
from pipeline.dataset.partials import Partials
from pipeline.dataset.recovery import recover
from pipeline.dataset.run_record import read_manifest, write_run
from pipeline.live.log import read_live_log
from pipeline.run.coordinator import Coordinator
from pipeline.store import lock
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import LIVE_FILE, TRIALS_FILE
from schemas.begun import BegunRow
from schemas.chat_template import TemplateFacts
from schemas.completion import QualityFlag
from schemas.config.run_file import RunFile
from schemas.estimate import Band
from schemas.manifest import Part, RunIdentity, RunRecord
from schemas.partial import PartialTurn, TokenIds
from schemas.plan import EngineTrial, PlanOption, results_from_text
from schemas.progress import LiveSpan, Progress
from schemas.session import CanaryPlan, SessionPlan, Tally
from schemas.shard import Lease
from tests.fakes.desk import frozen, journal_writer, prompts_of
from tests.fakes.example_completion import COMPLETION
from tests.fakes.example_report import worker_report

Build = Callable[..., Coordinator]


@pytest.fixture
def coordinator(tmp_path: Path) -> Build:
    """Builds the coordinator of a fresh run: `coordinator(100, engines=4, min_engines=2)`."""

    def build(
        num_rows: int,
        *,
        engines: int,
        min_engines: int = 1,
        canary_rows: int = 0,
        **engine: object,
    ) -> Coordinator:
        config = RunFile.model_validate(
            {
                "prompts": {"path": "p.jsonl"},
                "model": "m",
                "engine": {"count": engines, **engine},
                "cluster": {"min_engines": min_engines},
                "output": {"folder": str(tmp_path)},
            }
        )
        folder, holder = LocalFolder(tmp_path), lock.this_process()
        lock.acquire(folder, holder, time.sleep)
        identity = RunIdentity(settings={})
        write_run(
            folder, RunRecord(run_id="r", created_at_s=0, identity=identity, carried_schema="")
        )
        plan = SessionPlan(
            root=str(tmp_path),
            config=config,
            run_id="r",
            session_id="s",
            token=holder.token,
            frozen_name="f",
            carried_schema="",
            own_schema="",
            rows_error=0,
            template=TemplateFacts(source="test"),
            canary=CanaryPlan(rows_left=canary_rows, tally=Tally(), settings="")
            if canary_rows
            else None,
        )
        folder.make("data")
        return Coordinator(plan, bytes(num_rows))

    return build


def test_rows_are_handed_out_once_enough_engines_are_ready(coordinator: Build) -> None:
    book = coordinator(1000, engines=3, min_engines=2)
    assert book.poll()[0].engines_awaited == 2
    assert book.lease("w0").lease is None
    assert book.lease("w0").lease is None
    assert book.poll()[0].engines_awaited == 1
    assert book.lease("w1").lease is not None
    assert book.lease("w0").lease is not None
    assert book.poll()[0].engines_awaited == 0


def test_engine_that_ended_is_awaited_again_until_rows_are_handed_out(coordinator: Build) -> None:
    book = coordinator(1000, engines=3, min_engines=2)
    book.lease("w0")
    book.worker_ended("w0", None)
    assert book.lease("w1").lease is None
    assert book.lease("w2").lease is not None
    book.worker_ended("w2", "its process died")
    assert book.lease("w1").lease is not None


def test_fullest_engine_is_asked_for_half_of_what_it_has_not_started(coordinator: Build) -> None:
    book = coordinator(128, engines=3)
    book.lease("w0")
    book.lease("w1")
    book.heartbeat(worker_report("w0", not_started=11))
    book.heartbeat(worker_report("w1", not_started=40))
    assert book.lease("w2").lease is None
    assert book.heartbeat(worker_report("w0", not_started=11)).give_back_rows == 0
    assert book.heartbeat(worker_report("w1", not_started=40)).give_back_rows == 20
    book.heartbeat(worker_report("w1", not_started=0))
    book.lease("w2")
    assert book.heartbeat(worker_report("w1", not_started=0)).give_back_rows == 0
    assert book.heartbeat(worker_report("w0", not_started=11)).give_back_rows == 6
    book.worker_ended("w0", "lost")
    book.lease("w2")
    assert book.heartbeat(worker_report("w1", not_started=0)).give_back_rows == 0


def test_late_part_of_an_engine_taken_for_dead_is_dropped(coordinator: Build) -> None:
    book = coordinator(64, engines=2)
    late = book.lease("w0").lease
    assert late is not None
    book.engine_lost("w0", "its node was cut off")
    again = book.lease("w1").lease
    assert again is not None
    assert again.rows == late.rows
    staged = LocalFolder(Path(book._plan.root))
    for name, lease, published in (("late", late, False), ("good", again, True)):
        staged.write_whole(f"staging/{name}", b"")
        stale = book.publish(part(name, 64), [(lease.key, row) for row in lease.rows])
        assert bool(stale) is not published
    assert staged.names("data") == ["good"]
    assert staged.names("staging") == []


# -- what a worker has finished


def folder_of(book: Coordinator) -> LocalFolder:
    return LocalFolder(Path(book._plan.root))


def commit(
    book: Coordinator,
    worker_id: str,
    lease: Lease,
    rows: Sequence[int],
    *,
    number: int = 1,
    kind: JournalKind = "rows",
    flags: tuple[QualityFlag, ...] = (),
) -> JournalName:
    """Append rows of a lease to a worker's journal."""
    name = JournalName(session_id="s", worker_id=worker_id, number=number, kind=kind)
    completions = [replace(COMPLETION, row_id=f"q{row}", flags=flags) for row in rows]
    leased = [(lease.key, row) for row in rows]
    journal_writer(folder_of(book), "r").append(name, completions, leased)
    return name


def publish_journal(book: Coordinator, name: JournalName) -> None:
    """Publish a journal as its worker does."""
    journals = Journals(folder=folder_of(book), run_id="r")
    staged, leased = journals.stage(name), journals.leased_rows(name)
    assert staged is not None
    assert not book.publish(staged, leased)
    journals.remove(name)


def published(book: Coordinator) -> list[str]:
    parts = read_manifest(folder_of(book)).parts.values()
    return sorted(row_id for part in parts for row_id in part.row_ids)


def taken(book: Coordinator, worker_id: str) -> Lease:
    lease = book.lease(worker_id).lease
    assert lease is not None
    return lease


def test_committed_rows_of_a_worker_that_died_are_published_and_only_the_rest_is_open(
    coordinator: Build,
) -> None:
    book = coordinator(10, engines=2)
    lease = taken(book, "w0")
    commit(book, "w0", lease, [0, 1, 2])
    commit(book, "w0", lease, [3])
    commit(book, "w0", lease, [5], number=2)
    book.worker_ended("w0", "its process died")
    assert published(book) == ["q0", "q1", "q2", "q3", "q5"]
    assert folder_of(book).names("staging") == []
    assert taken(book, "w1").rows == (4, 6, 7, 8, 9)
    assert "event=journal_published worker=w0 rows=4" in book.poll()[1]


def test_journals_of_other_workers_stay_theirs(coordinator: Build) -> None:
    book = coordinator(128, engines=2)
    commit(book, "w1", taken(book, "w1"), [0])
    commit(book, "w10", taken(book, "w10"), [64])
    book.worker_ended("w1", "its process died")
    assert published(book) == ["q0"]
    assert folder_of(book).names("staging") == ["journal-s-w10-000001-rows"]


def test_committed_rows_of_a_silent_worker_are_published_once(coordinator: Build) -> None:
    book = coordinator(4, engines=2)
    lease = taken(book, "w0")
    name = commit(book, "w0", lease, [0, 1])
    staged = Journals(folder=folder_of(book), run_id="r").stage(name)
    assert staged is not None
    book._ledger.lease_ttl_s = -1.0
    book.poll()
    assert published(book) == ["q0", "q1"]
    # The worker comes back in the middle of its own publication.
    rows = [(lease.key, 0), (lease.key, 1)]
    assert book.publish(staged, rows) == set(rows)
    assert published(book) == ["q0", "q1"]
    assert taken(book, "w1").rows == (2, 3)


def test_rows_of_a_lease_that_is_lost_are_not_published_from_its_journal(
    coordinator: Build,
) -> None:
    book = coordinator(4, engines=2)
    lost = taken(book, "w0")
    book.engine_lost("w0", "gone")
    again = taken(book, "w0")
    commit(book, "w0", lost, [0, 1])
    commit(book, "w0", again, [1, 2])
    book.worker_ended("w0", "its process died")
    assert published(book) == ["q1", "q2"]
    assert taken(book, "w1").rows == (0, 3)


def test_journal_that_vanishes_was_published_by_its_worker(
    coordinator: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = coordinator(4, engines=2)
    commit(book, "w0", taken(book, "w0"), [0])

    def gone(self: LocalFolder, name: str) -> Iterator[bytes]:
        raise FileNotFoundError(name)

    monkeypatch.setattr(LocalFolder, "read_records", gone)
    book.worker_ended("w0", "its process died")
    assert taken(book, "w1").rows == (0, 1, 2, 3)


def test_truncated_commit_costs_its_own_rows_alone(coordinator: Build) -> None:
    book = coordinator(4, engines=2)
    lease = taken(book, "w0")
    commit(book, "w0", lease, [0])
    path = folder_of(book).path(commit(book, "w0", lease, [1, 2]).path)
    path.write_bytes(path.read_bytes()[:-1])
    book.worker_ended("w0", "its process died")
    assert published(book) == ["q0"]
    assert taken(book, "w1").rows == (1, 2, 3)


# -- the canary


def leases_of_all(book: Coordinator) -> tuple[list[Lease], list[Lease]]:
    """Lease everything: the canary's leases, and the later ones."""
    leases = []
    while (lease := book.lease("w0").lease) is not None:
        leases.append(lease)
    return [one for one in leases if one.is_canary], [one for one in leases if not one.is_canary]


def test_rows_beyond_the_canary_are_done_beside_it_and_published_once_it_passed(
    coordinator: Build,
) -> None:
    book = coordinator(200, engines=1, canary_rows=20)
    canary, later = leases_of_all(book)
    assert sum(len(lease.rows) for lease in canary) == 20
    name = commit(book, "w0", later[0], later[0].rows, number=1)
    publish_journal(book, name)
    assert published(book) == []
    assert folder_of(book).names("data") == []
    assert book.poll()[0].rows_done == len(later[0].rows)
    for number, lease in enumerate(canary, start=2):
        publish_journal(book, commit(book, "w0", lease, lease.rows, number=number, kind="canary"))
    assert book.poll()[0].canary == "passed"
    assert len(published(book)) == 20 + len(later[0].rows)
    assert folder_of(book).names("staging") == []


def test_rows_beyond_a_canary_that_fails_are_never_visible(coordinator: Build) -> None:
    book = coordinator(200, engines=1, canary_rows=20)
    canary, later = leases_of_all(book)
    publish_journal(book, commit(book, "w0", later[0], later[0].rows, number=1))
    lease = canary[0]
    bad = commit(book, "w0", lease, lease.rows, number=2, kind="canary", flags=("looping",))
    publish_journal(book, bad)
    assert book.poll()[0].canary == "failed"
    publish_journal(book, commit(book, "w0", later[1], later[1].rows, number=3))
    assert published(book) == sorted(f"q{row}" for row in lease.rows)
    assert folder_of(book).names("staging") == []
    # One more that its worker had no time to publish.
    commit(book, "w0", later[2], later[2].rows, number=4)
    recovery = recover(
        folder_of(book),
        RunRecord(run_id="r", created_at_s=0, identity=RunIdentity(settings={}), carried_schema=""),
        now_s=1.0,
    )
    assert published(book) == sorted(f"q{row}" for row in lease.rows)
    assert "rows beyond a canary that failed; discarded" in recovery.reports[0]
    assert folder_of(book).names("staging") == []


def test_rows_beyond_a_canary_survive_a_crash_before_its_verdict(coordinator: Build) -> None:
    book = coordinator(200, engines=1, canary_rows=20)
    canary, later = leases_of_all(book)
    publish_journal(book, commit(book, "w0", later[0], later[0].rows, number=1))
    commit(book, "w0", later[1], later[1].rows, number=2)
    commit(book, "w0", canary[0], canary[0].rows, number=3, kind="canary")
    rows = {*later[0].rows, *later[1].rows, *canary[0].rows}
    record = RunRecord(
        run_id="r", created_at_s=0, identity=RunIdentity(settings={}), carried_schema=""
    )
    recover(folder_of(book), record, now_s=1.0)
    assert published(book) == sorted(f"q{row}" for row in rows)


def part(name: str, num_rows: int) -> Part:
    return Part(
        name=name,
        size_bytes=0,
        row_ids=tuple(str(row) for row in range(num_rows)),
        sample_indexes=(0,) * num_rows,
        content_hashes=("",) * num_rows,
        num_errors=0,
        prompt_tokens=0,
        completion_tokens=0,
        worker_id="w0",
    )


def test_thousand_engines_that_ask_in_vain_do_not_hold_each_other_up(coordinator: Build) -> None:
    book = coordinator(500 * 64, engines=1000)
    for number in range(500):
        book.lease(f"w{number}")
        book.heartbeat(worker_report(f"w{number}", not_started=30))
    began_s = time.perf_counter()
    for number in range(2000):
        assert book.lease(f"w{500 + number % 500}").lease is None
    # What a thousand idle engines ask in one second; it takes 0.02 s on one core.
    assert time.perf_counter() - began_s < 1.0


def test_finding_what_is_done_takes_one_pass_over_the_input() -> None:
    num_rows, batch_rows = 200_000, 250
    ids = [f"row-{row:07d}" for row in range(num_rows)]
    published = pa.array(ids[: num_rows // 2])
    done = DoneRows(
        row_ids=published,
        sample_indexes=pa.array([0] * len(published), pa.int32()),
        content_hashes=published,
    )
    arrays = [pa.array(ids[start : start + batch_rows]) for start in range(0, num_rows, batch_rows)]
    states = bytearray(num_rows)
    began_s = time.perf_counter()
    marked = done.mark(((array, array) for array in arrays), states, samples=1, done=1)
    assert marked == (num_rows // 2, None)
    assert states == b"\1" * (num_rows // 2) + b"\0" * (num_rows // 2)
    # One look-up for each of the 800 batches takes 10 s and more; this takes 0.05 s.
    assert time.perf_counter() - began_s < 2.0


def test_time_in_which_the_folder_did_not_answer_is_no_silence_of_the_workers(
    coordinator: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = coordinator(64, engines=2)
    clock_s = [1000.0]
    monkeypatch.setattr("pipeline.run.coordinator.monotonic", lambda: clock_s[0])
    lease = book.lease("w0").lease
    assert lease is not None
    book.heartbeat(worker_report("w0", not_started=0))

    def long(*_: object, **__: object) -> None:
        clock_s[0] += 500.0

    book._folder.write_whole("staging/p", b"")
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.run.coordinator.publish", long)
        book.publish(part("p", 64), [(lease.key, row) for row in lease.rows[:1]])
    book.poll()
    assert book.heartbeat(worker_report("w0", not_started=0)).leases_are_lost is False
    clock_s[0] += 61.0
    book.poll()
    assert book.heartbeat(worker_report("w0", not_started=0)).leases_are_lost is True, (
        "a worker that is silent"
    )


def test_time_left_goes_into_live_json_and_is_noted_beside_the_readings(
    coordinator: Build, tmp_path: Path
) -> None:
    book = coordinator(100, engines=1)
    left = Band(p10=0.5, p50=1.0, p90=2.0)
    span = LiveSpan(
        duration_s=2.0, engine_age_s=0.0, cap_requests=4, running_requests=4.0, tokens_per_s=9.0,
        prompt_tokens_per_s=1.0, accept_length=None, counted_by="answers", finished=(), running=(),
    )  # fmt: skip
    book.note_span("w0", span)
    assert book.poll(None)[0].days_left is None
    assert book.poll(left)[0].days_left == left
    assert book.close("stopped").days_left is None, "nothing is going on any more"
    log = read_live_log(LocalFolder(tmp_path))
    assert log is not None
    assert [noted.days for noted in log.times_left] == [left]
    live = Progress.from_json(LocalFolder(tmp_path).read(LIVE_FILE).decode())
    assert (live.state, live.days_left) == ("stopped", None)


def begun_row(number: int) -> BegunRow:
    so_far = PartialTurn(
        prompt_token_ids=TokenIds("i", [1]),
        completion_token_ids=TokenIds("i", [1, 2, 3]),
        reasoning_tokens=None,
        is_thinking=False,
        duration_s=1.0,
    )
    return BegunRow(
        row_id=f"q{number:03d}", sample_index=0, content_hash="h", started_at_s=1.0, so_far=so_far
    )


def test_rows_that_a_planned_stop_interrupted_are_leased_first_with_what_they_have(
    coordinator: Build, tmp_path: Path
) -> None:
    frozen(LocalFolder(tmp_path), prompts_of(300), name="f")
    partials = Partials(folder=LocalFolder(tmp_path), run_id="r", settings="")
    partials.keep("before", "w0", [begun_row(150)])
    book = coordinator(300, engines=2)
    lease = book.lease("w0").lease
    assert lease is not None
    assert (lease.rows[0], lease.begun) == (128, ((150, "begun-before-w0-000.jsonl"),))
    second = book.lease("w1").lease
    assert second is not None
    assert (second.rows[0], second.begun) == (0, ())
    # A worker that is called back: its rows, and what they have, go to the next one.
    partials.keep("s", "w1", [begun_row(5)])
    book.worker_ended("w1", None)
    third = book.lease("w2").lease
    assert third is not None
    assert (third.rows[0], third.begun) == (0, ((5, "begun-s-w1-000.jsonl"),))


def test_rows_of_an_engine_that_restarts_on_purpose_are_continued_first_and_by_whoever_is_up(
    coordinator: Build, tmp_path: Path
) -> None:
    frozen(LocalFolder(tmp_path), prompts_of(300), name="f")
    book = coordinator(300, engines=2)
    book.lease("w0")
    second = book.lease("w0").lease
    assert second is not None
    partials = Partials(folder=LocalFolder(tmp_path), run_id="r", settings="")
    partials.keep("s", "w0", [begun_row(second.rows[5])])
    book.hand_over("w0")
    lease = book.lease("w1").lease
    assert lease is not None
    assert lease.begun == ((second.rows[5], "begun-s-w0-000.jsonl"),)
    # It restarts and lives: its leases are given back, and none is lost.
    assert book.poll()[0].leases_lost == 0
    # The files of its next restart have names of their own.
    partials.keep("s", "w0", [begun_row(7)])
    assert partials.names() == ["begun-s-w0-000.jsonl", "begun-s-w0-001.jsonl"]


def test_engine_of_a_worker_tries_a_plan_once_its_rate_is_read_and_results_are_kept(
    coordinator: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.trial.tuning._DECIDE_EVERY_S", 0.0)
    book = coordinator(1000, engines=1, kind="sglang", command=["c"], trial="auto")
    options = tuple(
        PlanOption(words=(name,), tokens_per_s=rate, log_sd=0.2)
        for name, rate in (("--a", 1000.0), ("--b", 990.0))
    )
    trial = EngineTrial(
        card="B200", options=options, shared_log_sd=0.2, output_tokens_mean=100.0, running="--a",
        start_s=10.0,
    )  # fmt: skip
    days = Band(p10=5.0, p50=5.0, p90=5.0)
    running = worker_report("w0", state="running")
    book.note_trial("w0", trial)
    book.poll(days)
    # Nothing is read yet.
    assert book.heartbeat(running).relaunch is None
    for age in range(10):
        span = LiveSpan(
            duration_s=60.0, engine_age_s=60.0 * age, cap_requests=16, running_requests=10.0,
            tokens_per_s=1000.0, prompt_tokens_per_s=0.0, accept_length=None, counted_by="engine",
            finished=(), running=(),
        )  # fmt: skip
        book.note_span("w0", span)
    _, lines = book.poll(days)
    assert any(
        line.startswith("event=trial_change to='try' card='B200' worker=w0 ") for line in lines
    )
    # While it starts it could not tell one order from another.
    assert book.heartbeat(worker_report("w0", state="restarting")).relaunch is None
    assert book.heartbeat(running).relaunch == ("--b",)
    assert book.heartbeat(running).relaunch is None
    (kept,) = results_from_text((tmp_path / TRIALS_FILE).read_text())
    assert (kept.card, kept.best) == ("B200", "--a")
    book.worker_ended("w0", None)
    assert book.heartbeat(running).relaunch is None


def test_partials_go_when_the_run_is_done(coordinator: Build, tmp_path: Path) -> None:
    frozen(LocalFolder(tmp_path), prompts_of(1), name="f")
    partials = Partials(folder=LocalFolder(tmp_path), run_id="r", settings="")
    partials.keep("before", "w0", [begun_row(0)])
    book = coordinator(1, engines=1)
    lease = book.lease("w0").lease
    assert lease is not None
    book._ledger.mark_done([(lease.key, 0)])
    book.close("done")
    assert not partials.names()
