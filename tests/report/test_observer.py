"""Observer of a running run: posts to a real server, the events file, the report."""

import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.dataset.run_record import read_run_file_copy
from pipeline.errors import ConfigError, DriverLostError, EngineError
from pipeline.report.observer import Observer
from pipeline.report.webhook import Notice, Webhook, webhook_of
from pipeline.store.folder import LocalFolder
from pipeline.store.journal import append_events, event_of, read_events, trim_events
from pipeline.store.run_folder import EVENTS_FILE, REPORT_FILE
from schemas.config.running import EventsConfig
from schemas.estimate import Band
from schemas.progress import Progress
from tests.fakes.example_report import run_progress
from tests.fakes.example_run import BEGAN_AT_S, run_file, write_example_run
from tests.fakes.page_reading import parsed
from tests.fakes.running import free_port, wait_until
from tests.fakes.webhook_receiver import Receiver, receiving

NOTICE = Notice(
    event="run_done", run="r", folder="/f", at_s=1.0, text="", rows_done=1, rows_total=1
)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


def hook(url: str, log: list[str]) -> Webhook:
    return Webhook(url=url, log=log.append, backoff_first_s=0.02)


def progress(rows_done: int = 3) -> Progress:
    return run_progress(rows_total=10, rows_done=rows_done)


# -- the webhook


def test_post_that_fails_is_retried_until_it_succeeds(receiver: Receiver) -> None:
    log: list[str] = []
    receiver.codes = [503, 500, 429]
    webhook = hook(receiver.url, log)
    webhook.post(NOTICE)
    webhook.close(5.0)
    assert receiver.refused == 3
    assert receiver.got == [
        {"event": "run_done", "run": "r", "folder": "/f", "at_s": 1.0, "text": "", "rows_done": 1,
         "rows_total": 1, "worker": None, "eta_s": None},
    ]  # fmt: skip
    assert log == []


def test_post_that_is_refused_for_good_is_not_retried(receiver: Receiver) -> None:
    log: list[str] = []
    receiver.codes = [410]
    webhook = hook(receiver.url, log)
    webhook.post(NOTICE)
    webhook.close(5.0)
    assert (receiver.refused, receiver.got, webhook.num_lost) == (1, [], 1)
    assert log == ["event=webhook_lost notice=run_done why='HTTP 410'"]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirect_is_a_failure_and_is_not_followed(receiver: Receiver, code: int) -> None:
    log: list[str] = []
    receiver.codes = [code]
    webhook = hook(receiver.url, log)
    webhook.post(NOTICE)
    webhook.close(5.0)
    assert (receiver.got, receiver.followed, webhook.num_lost) == ([], 0, 1)
    assert log == [f"event=webhook_lost notice=run_done why='HTTP {code}'"]


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_post_that_always_fails_is_dropped_after_six_attempts(
    receiver: Receiver, code: int
) -> None:
    log: list[str] = []
    receiver.codes = [code] * 6
    webhook = Webhook(url=receiver.url, log=log.append, backoff_first_s=0.001)
    webhook.post(NOTICE)
    webhook.post(NOTICE)
    webhook.close(5.0)
    assert (receiver.refused, len(receiver.got), webhook.num_lost) == (6, 1, 1)
    assert log == [f"event=webhook_lost notice=run_done why='HTTP {code}'"]


def test_notices_come_in_order(receiver: Receiver) -> None:
    webhook = hook(receiver.url, [])
    receiver.codes = [503]
    for number in range(5):
        webhook.post(Notice(**{**notice_values(), "rows_done": number}))  # type: ignore[arg-type]
    webhook.close(5.0)
    assert [notice["rows_done"] for notice in receiver.got] == [0, 1, 2, 3, 4]


def notice_values() -> dict[str, object]:
    return {name: getattr(NOTICE, name) for name in NOTICE.__slots__}


def test_server_that_is_silent_or_gone_holds_the_end_up_for_the_bound_alone(
    receiver: Receiver,
) -> None:
    receiver.hold.clear()
    for url in (receiver.url, f"http://127.0.0.1:{free_port()}/"):
        log: list[str] = []
        webhook = Webhook(url=url, log=log.append)
        webhook.post(NOTICE)
        began_s = time.monotonic()
        webhook.close(0.3)
        assert 0.25 < time.monotonic() - began_s < 1.5
        assert log == ["event=webhook_given_up after_s=0.3"]
        assert "secret" not in "".join(log)


@pytest.mark.parametrize("text", [b"\x15\x03\x01\x00\x02\x02\x50\r\n", b"220 mail\r\n", b""])
def test_other_end_that_speaks_no_http_costs_the_notice_and_not_the_next(text: bytes) -> None:
    lines: list[str] = []
    with speaking(text) as port:
        webhook = Webhook(
            url=f"http://127.0.0.1:{port}/secret", log=lines.append, backoff_first_s=0.001
        )
        webhook.post(NOTICE)
        webhook.post(NOTICE)
        webhook.close(5.0)
    assert (webhook.num_lost, len(lines)) == (2, 2)
    assert all(line.startswith("event=webhook_lost notice=run_done why=") for line in lines)
    assert "secret" not in "".join(lines)


@contextmanager
def speaking(text: bytes) -> Iterator[int]:
    """Yield the port of a server that answers every request with `text`."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            self.request.sendall(text)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_line_feed_behind_the_url_is_no_part_of_it(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", f"{receiver.url}\n")
    webhook = webhook_of(EventsConfig(webhook_env="HOOK"), print)
    assert webhook is not None
    assert webhook.url == receiver.url


def test_queue_is_bounded_and_posting_never_waits(receiver: Receiver) -> None:
    receiver.hold.clear()
    log: list[str] = []
    webhook = hook(receiver.url, log)
    began_s = time.monotonic()
    for _ in range(500):
        webhook.post(NOTICE)
    assert time.monotonic() - began_s < 1.0
    assert 290 <= webhook.num_lost <= 300
    webhook.close(0.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the environment variable HOOK is not set; set it to the URL"),
        ("", "the environment variable HOOK is not set; set it to the URL"),
        ("ftp://secret/", "HOOK contains no valid URL; expected http"),
        ("http://[secret", "HOOK contains no valid URL; expected http"),
    ],
)
def test_variable_without_a_url_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str | None, message: str
) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("HOOK", value)
    with pytest.raises(ConfigError, match=message) as refused:
        webhook_of(EventsConfig(webhook_env="HOOK"), print)
    assert "secret" not in str(refused.value)
    assert webhook_of(EventsConfig(), print) is None


# -- the observer


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder, num_parts=6)
    folder.remove(EVENTS_FILE)
    return folder


def observer(folder: LocalFolder, log: list[str], webhook: Webhook | None = None) -> Observer:
    return Observer(
        folder=folder, run_id="run-1", clock=lambda: BEGAN_AT_S + 800, log=log.append,
        webhook=webhook, report_interval_s=0.05, first_report_s=0.01, rows=(2, 10),
    )  # fmt: skip


def test_events_are_stored_posted_and_drawn(folder: LocalFolder, receiver: Receiver) -> None:
    log: list[str] = []
    watched = observer(folder, log, hook(receiver.url, log))
    with watched.watching(run_file(folder.root)):
        watched.see(progress(), ["event=engine_ready worker=w0", "no event"])
        watched.see(progress(4), ["event=step_down cause=pool change='a b' worker=w1"])
        watched.see(progress(5), ["event=engine_drained worker=w2 cause='it\\'s bad'"])
        watched.finish("done")
    assert log == []
    kinds = ["engine_ready", "step_down", "engine_drained", "run_done"]
    assert [event.kind for event in read_events(folder)] == kinds
    posted = [(n["event"], n["worker"], n["rows_done"]) for n in receiver.got]
    assert posted == [
        ("engine_stepped_down", "w1", 4), ("engine_drained", "w2", 5), ("run_done", None, 5)
    ]  # fmt: skip
    page = parsed(folder.read(REPORT_FILE).decode()).text
    assert "Qwen/Qwen3.6-27Bdone" in page
    assert read_run_file_copy(folder) == run_file(folder.root)


def test_report_is_written_while_the_run_goes_on(folder: LocalFolder) -> None:
    log: list[str] = []
    watched = observer(folder, log)
    with watched.watching(run_file(folder.root)):
        wait_until(lambda: folder.exists(REPORT_FILE))
        assert 'class="state running"' in folder.read(REPORT_FILE).decode()
    assert 'class="state failed"' in folder.read(REPORT_FILE).decode()
    assert log == []


def test_run_that_ends_by_an_error_is_reported_as_failed(
    folder: LocalFolder, receiver: Receiver
) -> None:
    watched = observer(folder, [], hook(receiver.url, []))
    with pytest.raises(RuntimeError, match="broken"), watched.watching(run_file(folder.root)):
        raise RuntimeError("broken")
    assert [notice["event"] for notice in receiver.got] == ["run_failed"]


def test_cause_of_a_failed_run_is_one_line(folder: LocalFolder, receiver: Receiver) -> None:
    watched = observer(folder, [], hook(receiver.url, []))
    cause = "no engine came up: SGLang refuses a flag\nno engine came up: " + 500 * "x"
    with pytest.raises(EngineError), watched.watching(run_file(folder.root)):
        raise EngineError(cause)
    (notice,) = receiver.got
    assert notice["text"] == cause.replace("\n", " ")[:400]


def test_folder_that_another_driver_took_is_left_alone(
    folder: LocalFolder, receiver: Receiver
) -> None:
    watched = observer(folder, [], hook(receiver.url, []))
    watched.first_report_s = 60.0
    with pytest.raises(DriverLostError), watched.watching(run_file(folder.root)):
        raise DriverLostError("taken over")
    assert [name for name in (EVENTS_FILE, REPORT_FILE) if folder.exists(name)] == []
    assert [notice["event"] for notice in receiver.got] == ["run_failed"]


def test_what_cannot_be_written_is_logged_and_the_run_goes_on(tmp_path: Path) -> None:
    log: list[str] = []
    watched = observer(LocalFolder(tmp_path / "not there"), log)
    with watched.watching(run_file(tmp_path)):
        watched.see(progress(), ["event=engine_ready worker=w0"])
        watched.finish("done")
    whats = [line.partition(" was not written")[0].rpartition("the ")[2] for line in log]
    assert {"run file", "events file", "report"} <= set(whats)
    assert all(line.startswith("event=warning") for line in log)


# -- the events file


def test_events_file_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    for number in range(30):
        event = event_of(f"event=engine_lost worker=w{number}", now_s=float(number))
        assert event is not None
        append_events(folder, [event])
    trim_events(folder, max_events=20)
    assert [event.at_s for event in read_events(folder)] == [float(n) for n in range(20, 30)]
    trim_events(folder, max_events=20)
    assert len(read_events(folder)) == 10


def test_spoilt_lines_of_the_events_file_are_left_out(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    no_time = b'{"kind": "a", "at_s": "x", "worker": null, "text": ""}'
    lines = [b'{"kind": 1}', no_time, b"not json", b"\xff", b"[]", b'{"cut']
    folder.write_whole(EVENTS_FILE, b"\n".join(lines))
    assert read_events(folder) == []


def test_quoted_values_hold_blanks_and_other_keys() -> None:
    event = event_of("event=x worker=w3 cause='worker=w9 \\'is\\' out'", now_s=1.0)
    assert event is not None
    assert (event.kind, event.worker) == ("x", "w3")
    assert event_of("12:00 event=x", now_s=1.0) is None


# -- the end of a session without work


def test_session_without_work_reports_the_end_only_once(folder: LocalFolder) -> None:
    for _ in range(2):
        observer(folder, []).finish_without_work()
    (event,) = read_events(folder)
    assert (event.kind, event.text) == ("run_done", "every row was done already")


def test_session_without_work_after_a_stop_reports_the_end(folder: LocalFolder) -> None:
    observer(folder, []).finish_without_work()
    observer(folder, []).finish("stopped")
    observer(folder, []).finish_without_work()
    kinds = [event.kind for event in read_events(folder)]
    assert kinds == ["run_done", "run_stopped", "run_done"]


def test_end_of_a_session_is_reported_once(folder: LocalFolder) -> None:
    watched = observer(folder, [])
    watched.finish("failed", "first")
    watched.finish("done")
    assert [(event.kind, event.text) for event in read_events(folder)] == [("run_failed", "first")]


def test_notices_have_the_time_left_of_the_status(folder: LocalFolder, receiver: Receiver) -> None:
    watched = observer(folder, [], hook(receiver.url, []))
    drained = ["event=engine_drained worker=w0 engine=e cause='looping'"]
    watched.see(progress(3), drained)
    left = Band(p10=0.25, p50=0.5, p90=1.5)
    watched.see(replace(progress(5), days_left=left), drained)
    watched.finish("done")
    assert [notice["eta_s"] for notice in receiver.got] == [None, 43_200, 0.0]


def test_progress_reaches_the_notices(folder: LocalFolder, receiver: Receiver) -> None:
    watched = observer(folder, [], hook(receiver.url, []))
    watched.see(progress(7), [])
    watched.finish("done")
    (notice,) = receiver.got
    assert (notice["rows_done"], notice["rows_total"], notice["run"]) == (7, 10, "run-1")
    assert notice["at_s"] == BEGAN_AT_S + 800
