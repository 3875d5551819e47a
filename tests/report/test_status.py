"""Status of a run from its files: counts, rates, states, and the printed text."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import pyarrow as pa
import pytest

from jobs.status import main
from pipeline.dataset import parts as run_parts
from pipeline.dataset import run_record
from pipeline.dataset.done_rows import RowsToRedo, take_back
from pipeline.dataset.recovery import recover
from pipeline.errors import ConfigError
from pipeline.planner.estimate.figures import duration
from pipeline.report.status import run_status
from pipeline.store import lock
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import LIVE_FILE, LOCK_FILE
from schemas.completion import Completion
from schemas.estimate import Band
from schemas.manifest import FailedRow, RunIdentity, RunRecord, Session
from schemas.partial import Continuation
from schemas.progress import RunStatus
from tests.fakes.example_report import run_progress, worker_report
from tests.fakes.running import wait_until
from tests.fakes.staged_part import stage_part

Build = Callable[..., Completion]

ROOT = Path(__file__).resolve().parents[2]
RECORD = RunRecord(
    run_id="run-1", created_at_s=1000.0, identity=RunIdentity(settings={}), carried_schema=""
)
WORKER = worker_report(
    engine_release="1.2", in_flight=4, not_started=3, backing_off=2, unflushed=1, requests=50,
    restarts=1, timeouts=7, completion_tokens=500,
)  # fmt: skip
LIVE = run_progress(WORKER, session_id="s1", updated_at_s=1.0, rows_total=10)


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    run_record.write_run(folder, RECORD)
    return folder


def begin(
    folder: LocalFolder,
    *,
    session_id: str = "s1",
    started_at_s: float = 1000.0,
    rows_total: int = 10,
    rows_done: int = 0,
    rows_outside_input: int = 0,
) -> None:
    session = Session(
        session_id=session_id,
        started_at_s=started_at_s,
        rows_total=rows_total,
        rows_done=rows_done,
        rows_error=0,
        rows_outside_input=rows_outside_input,
    )
    run_record.list_in_manifest(folder, session)


def publish(folder: LocalFolder, name: str, rows: Sequence[Completion], *, now_s: float) -> None:
    part = stage_part(
        folder,
        f"{name}.parquet",
        rows,
        run_id="run-1",
        carried_schema=pa.schema([]),
        worker_id="w0",
    )
    run_parts.publish(folder, part, now_s=now_s)


def fail(
    folder: LocalFolder, row_id: str, *, sample_index: int = 0, cause: str = "HTTP 503"
) -> None:
    row = FailedRow(
        row_id=row_id, sample_index=sample_index, cause=cause, attempts=6, failed_at_s=1.0
    )
    run_record.list_in_manifest(folder, row)


def write_live(
    folder: LocalFolder,
    state: Literal["running", "done", "stopped", "failed"],
    *,
    session_id: str = "s1",
) -> None:
    live = replace(LIVE, session_id=session_id, state=state)
    folder.write_whole(LIVE_FILE, live.to_json().encode())


def status_at(folder: LocalFolder, now_s: float) -> RunStatus:
    return run_status(folder, now_s=now_s)


# -- counts


def test_rows_and_tokens_are_counted_over_sessions(folder: LocalFolder, completion: Build) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a"), completion("b", error=True)], now_s=1010.0)
    begin(folder, session_id="s2", started_at_s=2000.0, rows_done=2)
    publish(folder, "p2", [completion("c"), completion("d"), completion("e")], now_s=2010.0)
    status = status_at(folder, 2010.0)
    assert (status.rows_total, status.rows_done, status.rows_error) == (10, 5, 1)
    assert status.completion_tokens == 4 * 3
    assert (status.num_parts, status.last_publish_s, status.started_at_s) == (2, 2010.0, 2000.0)
    assert (status.rows_failed, status.rows_outside_input) == (0, 0)


def test_published_rows_outside_the_input_are_not_among_the_done(
    folder: LocalFolder, completion: Build
) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a"), completion("b")], now_s=1010.0)
    begin(folder, session_id="s2", rows_total=5, rows_done=1, rows_outside_input=1)
    status = status_at(folder, 1010.0)
    assert (status.rows_done, status.rows_outside_input, status.rows_total) == (1, 1, 5)


def test_session_without_a_part_has_no_rate(folder: LocalFolder) -> None:
    begin(folder)
    status = status_at(folder, 1100.0)
    assert (status.rows_done, status.num_parts, status.last_publish_s) == (0, 0, None)
    assert (status.tokens_per_s, status.eta_s) == (None, None)


def test_part_that_recovery_lists_again_counts_once(folder: LocalFolder, completion: Build) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a"), completion("b")], now_s=1010.0)
    publish(folder, "p2", [completion("c")], now_s=1011.0)
    data = folder.read("data/p2.parquet")
    folder.remove("data/p2.parquet")
    recover(folder, RECORD, now_s=1020.0)
    assert status_at(folder, 1020.0).rows_done == 2
    folder.write_whole("data/p2.parquet", data)
    recover(folder, RECORD, now_s=1030.0)
    assert status_at(folder, 1030.0).rows_done == 3


def test_error_rows_taken_back_count_no_more(folder: LocalFolder, completion: Build) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a"), completion("b", error=True)], now_s=1010.0)
    publish(folder, "p2", [completion("c", error=True)], now_s=1011.0)
    parts = recover(folder, RECORD, now_s=1020.0).parts
    row_ids = pa.array([row_id for part in parts for row_id in part.row_ids])
    take_back(folder, RECORD, parts, RowsToRedo(row_ids=row_ids), now_s=1020.0)
    status = status_at(folder, 1020.0)
    assert (status.rows_done, status.rows_error, status.completion_tokens) == (1, 0, 3)


def test_workers_are_told_by_node_with_their_gpus(
    folder: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder)
    placed = [("w0", "gpu-b", ("2", "3")), ("w1", "gpu-b", ("0", "1")), ("w2", "gpu-a", ("0",))]
    workers = [
        replace(WORKER, worker_id=worker_id, node=node, gpus=gpus)
        for worker_id, node, gpus in placed
    ]
    lock.acquire(folder, lock.this_process(), time.sleep)
    live = replace(LIVE, workers=tuple(workers))
    folder.write_whole(LIVE_FILE, live.to_json().encode())
    assert status_at(folder, 1001.0).workers == tuple(workers)
    assert main([str(folder.root)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("worker")]
    assert [line.partition(":")[0] for line in lines] == [
        "worker     w2 running on gpu-a GPU 0",
        "worker     w1 running on gpu-b GPU 0,1",
        "worker     w0 running on gpu-b GPU 2,3",
    ]


def test_starved_engine_is_told_with_what_it_is_short_of(
    folder: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder)
    short = "runs 8 of 32 requests: short of KV tokens (97% in use)"
    workers = (replace(WORKER, starved=short), replace(WORKER, worker_id="w1"))
    lock.acquire(folder, lock.this_process(), time.sleep)
    folder.write_whole(LIVE_FILE, replace(LIVE, workers=workers).to_json().encode())
    assert main([str(folder.root)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("starved")]
    assert lines == [f"starved    w0 {short}"]


# -- the time left


def test_time_left_is_that_of_the_readings_while_it_runs(
    folder: LocalFolder, completion: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a")], now_s=1010.0)
    lock.acquire(folder, lock.this_process(), time.sleep)
    band = Band(p10=1.31, p50=1.6, p90=2.1)
    live = replace(LIVE, days_left=band, updated_at_s=1010.0)
    folder.write_whole(LIVE_FILE, live.to_json().encode())
    status = status_at(folder, 1010.0)
    assert status.days_left == band
    assert status.eta_s == pytest.approx(1.6 * 86_400)
    assert main([str(folder.root)]) == 0
    assert "time left  1.6 days (1.3-2.1)" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("age_s", "left_s"),
    [(-60.0, 20.0), (0.0, 20.0), (3.0, 17.0), (10.0, 10.0), (9999.0, 10.0)],
    ids=["a clock behind", "just made", "three seconds ago", "the oldest", "long ago"],
)
def test_time_left_is_less_the_time_since_the_report(
    folder: LocalFolder, completion: Build, age_s: float, left_s: float
) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a")], now_s=1010.0)
    lock.acquire(folder, lock.this_process(), time.sleep)
    band = Band(p10=15.0, p50=20.0, p90=30.0).times(1 / 86_400)
    live = replace(LIVE, days_left=band, updated_at_s=1010.0)
    folder.write_whole(LIVE_FILE, live.to_json().encode())
    assert status_at(folder, 1010.0 + age_s).eta_s == pytest.approx(left_s)


def test_time_left_of_a_live_file_without_an_estimate_is_unknown(
    folder: LocalFolder, completion: Build
) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a")], now_s=1010.0)
    lock.acquire(folder, lock.this_process(), time.sleep)
    old = json.loads(LIVE.to_json())
    del old["days_left"]
    folder.write_whole(LIVE_FILE, json.dumps(old).encode())
    status = status_at(folder, 1010.0)
    assert status.state == "running"
    assert (status.days_left, status.eta_s) == (None, None)


# -- failed rows


def test_failed_rows_have_their_causes(folder: LocalFolder) -> None:
    begin(folder)
    fail(folder, "a", cause="HTTP 503: busy")
    fail(folder, "b", sample_index=1, cause="no answer within 60 s")
    status = status_at(folder, 1001.0)
    assert status.rows_failed == 2
    assert status.failed == (("a", 0, "HTTP 503: busy"), ("b", 1, "no answer within 60 s"))


def test_row_that_fails_twice_is_listed_with_its_last_cause(folder: LocalFolder) -> None:
    begin(folder)
    fail(folder, "a", cause="first")
    fail(folder, "a", cause="last")
    assert status_at(folder, 1001.0).failed == (("a", 0, "last"),)


def test_failed_row_that_is_done_after_all_is_not_listed(
    folder: LocalFolder, completion: Build
) -> None:
    begin(folder)
    fail(folder, "a")
    fail(folder, "a", sample_index=1)
    publish(folder, "p1", [completion("a")], now_s=1001.0)
    assert status_at(folder, 1001.0).failed == (("a", 1, "HTTP 503"),)


def test_failed_rows_of_an_earlier_session_are_tried_again(folder: LocalFolder) -> None:
    begin(folder)
    fail(folder, "a")
    begin(folder, session_id="s2")
    assert status_at(folder, 1001.0).rows_failed == 0


# -- rates


def test_rate_runs_from_the_start_to_the_last_publication(
    folder: LocalFolder, completion: Build
) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a"), completion("b")], now_s=1010.0)
    publish(folder, "p2", [completion("c"), completion("d")], now_s=1020.0)
    status = status_at(folder, 1025.0)
    # 4 rows of 3 tokens in 20 s.
    assert status.tokens_per_s == pytest.approx(0.6)


def test_rate_forgets_what_was_published_long_ago(folder: LocalFolder, completion: Build) -> None:
    begin(folder, rows_total=100)
    publish(folder, "p1", [completion(f"a{n}") for n in range(50)], now_s=1010.0)
    publish(folder, "p2", [completion(f"b{n}") for n in range(10)], now_s=2000.0)
    # 10 rows of 3 tokens since the worker's last part.
    status = status_at(folder, 2001.0)
    assert status.tokens_per_s == pytest.approx(30 / 990)


def test_run_that_stands_still_has_rate_zero_and_no_end(
    folder: LocalFolder, completion: Build
) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a")], now_s=1010.0)
    status = status_at(folder, 5000.0)
    assert (status.tokens_per_s, status.eta_s) == (0.0, None)


def test_rate_of_an_earlier_session_says_nothing(folder: LocalFolder, completion: Build) -> None:
    begin(folder)
    publish(folder, "p1", [completion("a")], now_s=1010.0)
    begin(folder, session_id="s2", started_at_s=1011.0, rows_done=1)
    status = status_at(folder, 1012.0)
    assert (status.tokens_per_s, status.eta_s) == (None, None)


@pytest.mark.parametrize("num_failed", [0, 1])
def test_finished_run_has_no_time_left(
    folder: LocalFolder, completion: Build, num_failed: int
) -> None:
    begin(folder, rows_total=2 + num_failed)
    if num_failed:
        fail(folder, "c")
    publish(folder, "p1", [completion("a"), completion("b")], now_s=1010.0)
    assert status_at(folder, 1020.0).eta_s == 0.0
    assert status_at(folder, 9000.0).eta_s == 0.0


# -- states


def test_run_with_a_live_driver_is_running(folder: LocalFolder) -> None:
    begin(folder)
    write_live(folder, "running")
    lock.acquire(folder, lock.this_process(), time.sleep)
    status = status_at(folder, 1001.0)
    assert status.state == "running"
    assert status.workers == (WORKER,)


def test_run_whose_driver_died_is_interrupted(folder: LocalFolder) -> None:
    begin(folder)
    write_live(folder, "running")
    assert status_at(folder, 1001.0).state == "interrupted"


def test_run_that_never_wrote_its_progress_is_interrupted(folder: LocalFolder) -> None:
    begin(folder)
    assert status_at(folder, 1001.0).state == "interrupted"


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_run_that_ended_early_says_how(
    folder: LocalFolder, state: Literal["stopped", "failed"]
) -> None:
    begin(folder)
    write_live(folder, state)
    assert status_at(folder, 1001.0).state == state


def test_word_of_an_earlier_session_says_nothing_of_this_one(folder: LocalFolder) -> None:
    begin(folder)
    write_live(folder, "stopped")
    begin(folder, session_id="s2")
    status = status_at(folder, 1001.0)
    assert status.state == "interrupted"
    assert status.workers == ()


@pytest.mark.parametrize("num_failed", [0, 2])
def test_run_with_every_row_done_or_failed_is_done(
    folder: LocalFolder, completion: Build, num_failed: int
) -> None:
    begin(folder, rows_total=1 + num_failed)
    for number in range(num_failed):
        fail(folder, f"f{number}")
    write_live(folder, "done")
    assert status_at(folder, 1001.0).state != "interrupted" or num_failed == 0
    publish(folder, "p1", [completion("a")], now_s=1001.0)
    assert status_at(folder, 1001.0).state == "done"


def test_run_that_another_machine_drives_is_unknown(folder: LocalFolder) -> None:
    begin(folder)
    holder = {"token": "t", "machine": "far", "pid": 1, "pid_started": "1", "beat": 3}
    folder.write_whole(LOCK_FILE, json.dumps(holder).encode())
    assert status_at(folder, 1001.0).state == "unknown"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"workers": 1}', b"\xff"])
def test_progress_that_cannot_be_read_is_left_out(folder: LocalFolder, text: bytes) -> None:
    begin(folder)
    folder.write_whole(LIVE_FILE, text)
    status = status_at(folder, 1001.0)
    assert (status.state, status.workers) == ("interrupted", ())


def test_run_that_has_read_no_prompts_yet_is_told(folder: LocalFolder) -> None:
    with pytest.raises(ConfigError, match="has not begun"):
        status_at(folder, 1001.0)


# -- the command


def test_json_has_the_names_that_machines_read(
    folder: LocalFolder, completion: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = time.time()
    begin(folder, started_at_s=now_s - 10, rows_total=4)
    fail(folder, "x", sample_index=2, cause="HTTP 503: größer")
    publish(folder, "p1", [completion("a"), completion("b", error=True)], now_s=now_s)
    write_live(folder, "stopped")
    assert main([str(folder.root), "--json"]) == 0
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    assert captured.err == ""
    assert values["folder"] == str(folder.root)
    assert values["state"] == "stopped"
    assert (values["rows_total"], values["rows_done"], values["rows_failed"]) == (4, 2, 1)
    assert (values["rows_error"], values["completion_tokens"], values["num_parts"]) == (1, 3, 1)
    assert values["tokens_per_s"] == pytest.approx(0.3)
    # It does not go on.
    assert values["eta_s"] is None
    assert values["last_publish_s"] == now_s
    assert values["failed"] == [{"row_id": "x", "sample_index": 2, "cause": "HTTP 503: größer"}]
    assert values["workers"] == []


def test_text_says_it_to_people(
    folder: LocalFolder, completion: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = time.time()
    begin(folder, started_at_s=now_s - 100, rows_total=2000, rows_done=1000, rows_outside_input=7)
    fail(folder, "x", cause="HTTP 503")
    fail(folder, "y", sample_index=2, cause="HTTP 500")
    rows = [completion(f"a{n}") for n in range(99)] + [completion("bad", error=True)]
    publish(folder, "p1", rows, now_s=now_s)
    left = Band(p10=13 / 1440, p50=15 / 1440, p90=18 / 1440)
    folder.write_whole(LIVE_FILE, replace(LIVE, days_left=left).to_json().encode())
    lock.acquire(folder, lock.this_process(), time.sleep)
    assert main([str(folder.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder.root}: running"
    assert lines[1].startswith("rows       1,100 of 2,000 done (55.0%), 1 of them error rows")
    assert lines[1].endswith("2 failed")
    assert lines[2] == "tokens     297 generated, 3 tokens/s"
    assert lines[3] == "time left  15 min (13-18)"
    assert lines[4] == "published  1 parts, the last 0 s ago"
    assert lines[5] == "outside    7 published rows, not in the input"
    assert lines[6].startswith("worker     w0 running: 4 in flight, 3 waiting, 2 backing off")
    assert "1 restarts, 7 of 50 requests timed out" in lines[6]
    assert lines[7:] == ["failed     x: HTTP 503", "failed     y sample 2: HTTP 500"]


def test_text_of_a_run_that_has_just_begun(
    folder: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder)
    assert main([str(folder.root)]) == 0
    out = capsys.readouterr().out
    assert "0 of 10 done (0.0%)" in out
    assert "no rate yet" in out
    assert "time left  not known yet" in out
    assert "0 parts, the last not yet" in out


def test_many_failed_rows_are_cut_short(
    folder: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder, rows_total=50)
    for number in range(25):
        fail(folder, f"f{number:02d}")
    assert main([str(folder.root)]) == 0
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed")]
    assert failed[-2:] == ["failed     f19: HTTP 503", "failed     and 5 more"]
    assert len(failed) == 21


@pytest.mark.parametrize(("name", "said"), [("absent", "no such folder"), (".", "no run here")])
def test_folder_without_a_run_is_the_users_to_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert main([str(tmp_path / name), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_folder_with_an_unreadable_run_is_the_users_to_mend(
    folder: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_whole("run.json", b"{")
    assert main([str(folder.root)]) == 2
    assert "not a run record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "not known yet"),
        (0.0, "0 s"),
        (89.0, "89 s"),
        (90.0, "2 min"),
        (3_600.0, "60 min"),
        (5_400.0, "1.5 h"),
        (86_400.0, "24.0 h"),
        (155_520.0, "1.8 days"),
    ],
)
def test_durations_are_rounded_for_people(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


# -- watching


def test_watch_tells_line_by_line_and_ends_with_the_run(
    folder: LocalFolder, completion: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder)
    holder = lock.this_process()
    lock.acquire(folder, holder, time.sleep)
    write_live(folder, "running")

    def end_the_run() -> None:
        time.sleep(0.2)
        publish(folder, "p1", [completion(f"r{n}") for n in range(10)], now_s=time.time())
        lock.release(folder, holder)

    ending = threading.Thread(target=end_the_run)
    ending.start()
    assert main([str(folder.root), "--watch", "--interval", "0.02"]) == 0
    ending.join()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert " running rows=1/10 " in lines[0]
    assert "engines=1/1 in_flight=4 restarts=1 timeouts=7" in lines[0]
    assert " done rows=10/10 " in lines[-1]
    assert not any("\x1b" in line for line in lines)


def test_watch_of_a_run_that_has_ended_looks_once(
    folder: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder)
    write_live(folder, "stopped")
    assert main([str(folder.root), "--watch", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["state"] == "stopped"


def test_watch_is_drawn_anew_on_a_terminal_and_left_by_ctrl_c(folder: LocalFolder) -> None:
    begin(folder)
    lock.acquire(folder, lock.this_process(), time.sleep)
    write_live(folder, "running")
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "jobs.status", str(folder.root), "--watch", "--interval", "60"]
    process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(terminal)
    drawn = b""
    while b"Ctrl-C to leave" not in drawn:
        readable, _, _ = select.select([controller], [], [], 30)
        assert readable, drawn
        drawn += os.read(controller, 4096)
    # A signal just before the sleep would be handled after it, in a minute.
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    os.close(controller)
    assert (process.returncode, said) == (130, b"")
    assert drawn.startswith(b"\x1b[H\x1b[2J")
    assert b"rows       1 of 10 done" in drawn


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_interval_is_a_number_above_zero(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["out", "--watch", f"--interval={interval}"])
    assert left.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"--interval: found {interval!r}; expected a number of seconds above 0")


def test_watch_of_a_folder_without_a_run_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--watch"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_tokens_that_planned_stops_did_not_cost_are_added_up(
    folder: LocalFolder, completion: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder)
    whole = completion("a")
    (turn,) = whole.turns
    places = tuple(Continuation(at_token=at, worker_id="w1") for at in (100, 250))
    continued = replace(completion("b"), turns=(replace(turn, continued=places),))
    publish(folder, "p0", [whole, continued], now_s=10.0)
    publish(folder, "p1", [replace(continued, row_id="c")], now_s=11.0)
    assert status_at(folder, 20.0).tokens_saved == 700
    assert main([str(folder.root)]) == 0
    assert "continued  700 tokens kept at planned stops" in capsys.readouterr().out
