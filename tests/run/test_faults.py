"""Whole runs against servers that refuse, hang, drip, go away or are busy: `make test-faults`.

Each fault is met with a healthy neighbour and without. No row fails or ends as an error, whatever
the server does; a run whose only server refuses everything ends, and the same command resumes it.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.ray_head import Head
from tests.fakes.running import Ended, Run, free_port, new_run, questions
from tests.fakes.scripted_server import (
    Reply,
    Script,
    ScriptedServer,
    answer,
    completion_body,
    serving,
)

pytestmark = [pytest.mark.ray, pytest.mark.faults]

NUM_ROWS = 200
# The fault begins after this many answers, those of the canary among them, and lasts so long.
GOOD_ANSWERS = 40
FAULT_S = 8.0
ENDLESS_S = 10**6


def faulty(fault: Reply, lasts_s: float) -> Script:
    """Answer well at first, then with the fault for a while, then well again."""
    began_s: list[float] = []

    def script(asked: dict[str, Any], number: int) -> Reply:
        if number <= GOOD_ANSWERS:
            return slowly(asked, number)
        began_s.append(time.monotonic())
        is_over = time.monotonic() - began_s[0] > lasts_s
        return slowly(asked, number) if is_over else fault

    return script


def slowly(asked: dict[str, Any], number: int) -> Reply:
    return Reply(body=answer(asked, number).body, delay_s=0.05)


REFUSES = Reply(status=400, body=b'{"error": {"message": "unknown field top_k"}}')
DENIES = Reply(status=401, body=b'{"error": {"message": "the key has expired"}}')
HANGS = Reply(body=completion_body("late"), delay_s=3600.0)
DRIPS = Reply(body=completion_body("late"), drip_s=0.5)
BUSY = Reply(status=429, headers=(("retry-after", "1"),))
OVERLOADED = Reply(status=503)
FAULTS = {
    "refuses": REFUSES,
    "denies": DENIES,
    "hangs": HANGS,
    "drips": DRIPS,
    "busy": BUSY,
    "overloaded": OVERLOADED,
}


def run_on(tmp_path: Path, head: Head, *urls: str) -> Run:
    return new_run(
        tmp_path,
        questions(NUM_ROWS),
        head.address,
        engine={
            "kind": "endpoint",
            "base_urls": list(urls),
            "served_model_name": "m",
            "max_running_requests": 8,
            "request_timeout_s": 2.0,
            "ready_timeout_s": 2.0,
        },
        quality={"canary_rows": 20, "window_rows": 50},
        retry={"max_attempts": 2, "backoff_initial_s": 0.1},
        work={"shard_rows": 10},
    )


def all_rows_are_good(run: Run, ended: Ended) -> None:
    assert ended.code == 0, ended.err
    assert sorted(run.ids()) == [row["id"] for row in questions(NUM_ROWS)]
    status = run.status()
    assert (status["rows_error"], status["rows_failed"]) == (0, 0)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_rows_of_a_faulty_server_are_done_by_its_neighbour(
    tmp_path: Path, head: Head, fault: Reply
) -> None:
    bad = ScriptedServer(script=faulty(fault, ENDLESS_S))
    with serving(bad), serving(ScriptedServer(script=slowly)) as good:
        run = run_on(tmp_path, head, bad.url, good.url)
        ended = run.finish()
    all_rows_are_good(run, ended)
    if fault in (REFUSES, DENIES):
        assert f"event=engine_drained worker=w0 engine={bad.url}" in ended.err


@pytest.mark.parametrize("name", ["hangs", "drips", "busy", "overloaded"])
def test_only_server_is_waited_for(tmp_path: Path, head: Head, name: str) -> None:
    fault = FAULTS[name]
    with serving(ScriptedServer(script=faulty(fault, FAULT_S))) as server:
        run = run_on(tmp_path, head, server.url)
        ended = run.finish()
    all_rows_are_good(run, ended)
    if fault in (HANGS, DRIPS):
        assert "event=waiting_for_engines worker=w0" in ended.err


@pytest.mark.parametrize(
    ("name", "words"),
    [("refuses", "HTTP 400: unknown field top_k"), ("denies", "HTTP 401: the key has expired")],
)
def test_only_server_that_refuses_everything_ends_the_run_which_resumes(
    tmp_path: Path, head: Head, name: str, words: str
) -> None:
    with serving(ScriptedServer(script=faulty(FAULTS[name], ENDLESS_S))) as server:
        run = run_on(tmp_path, head, server.url)
        ended = run.finish()
        assert ended.code == 3, ended.err
        assert f"{server.url}: it refuses every request: {words}" in ended.out + ended.err
        assert "the same command resumes" in ended.out + ended.err
        status = run.status()
        assert (status["rows_error"], status["rows_failed"]) == (0, 0)
        assert status["rows_done"] >= GOOD_ANSWERS
        server.script = slowly
        all_rows_are_good(run, run.finish())


@contextlib.contextmanager
def away_for_a_while(server: ScriptedServer) -> Iterator[None]:
    """Close the server after its good answers, and open it again later."""
    port, is_over = free_port(), threading.Event()

    def life() -> None:
        with serving(server, port):
            ready.set()
            while server.num_requests < GOOD_ANSWERS and not is_over.wait(0.02):
                pass
        is_over.wait(FAULT_S)
        with serving(server, port):
            is_over.wait()

    ready = threading.Event()
    thread = threading.Thread(target=life)
    thread.start()
    assert ready.wait(10.0)
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_only_server_that_is_away_is_waited_for(tmp_path: Path, head: Head) -> None:
    server = ScriptedServer(script=slowly)
    with away_for_a_while(server):
        run = run_on(tmp_path, head, server.url)
        ended = run.finish()
    all_rows_are_good(run, ended)
    assert "event=waiting_for_engines worker=w0" in ended.err


def test_rows_of_a_server_that_is_away_are_done_by_its_neighbour(
    tmp_path: Path, head: Head
) -> None:
    server = ScriptedServer(script=slowly)
    with away_for_a_while(server), serving(ScriptedServer(script=slowly)) as good:
        run = run_on(tmp_path, head, server.url, good.url)
        ended = run.finish()
    all_rows_are_good(run, ended)
