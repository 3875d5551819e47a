"""The report served on loopback: fresh on each load, read-only, errors as one line."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.report import main
from pipeline.errors import ConfigError
from pipeline.report.serve import LivePage, PageServer
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import MANIFEST_FILE
from tests.fakes.example_run import write_example_run
from tests.fakes.page_reading import parsed


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path / "out")


@contextmanager
def served(render: Callable[[], str], log: list[str]) -> Iterator[PageServer]:
    with PageServer(render, port=0, log=log.append) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def answer_of(
    server: PageServer, method: str = "GET", path: str = "/", host: str | None = None
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        headers = {} if host is None else {"Host": host}
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def rows_done(page: str) -> str:
    (text,) = (f.text for f in parsed(page).figures if f.path == "status.rows_done")
    return text


def test_each_load_shows_the_folder_as_it_is(folder: LocalFolder, tmp_path: Path) -> None:
    now_s = write_example_run(folder, num_parts=6)
    later = LocalFolder(tmp_path / "later")
    write_example_run(later, num_parts=9)
    page = LivePage(folder, lambda: now_s)
    with served(page.render, []) as server:
        status, first = answer_of(server)
        assert (status, rows_done(first)) == (200, "48")
        shutil.copytree(later.root, folder.root, dirs_exist_ok=True)
        assert rows_done(answer_of(server)[1]) == "72"


def test_replaced_run_is_counted_from_its_own_rows(folder: LocalFolder) -> None:
    now_s = write_example_run(folder, num_parts=6)
    page = LivePage(folder, lambda: now_s)
    assert figure(page.render(), "num_turns") == "48"
    shutil.rmtree(folder.root)
    write_example_run(folder, num_parts=2)
    assert figure(page.render(), "num_turns") == "16"


def test_part_that_could_not_be_read_is_tried_on_the_next_load(folder: LocalFolder) -> None:
    now_s = write_example_run(folder, num_parts=6)
    part = sorted(folder.path("data").iterdir())[0]
    moved = part.rename(folder.root / "away")
    page = LivePage(folder, lambda: now_s)
    assert figure(page.render(), "num_turns") == "40"
    moved.rename(part)
    assert figure(page.render(), "num_turns") == "48"


def figure(page: str, path: str) -> str:
    return next(f.text for f in parsed(page).figures if f.path == path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/index.html", "/?a", "/../etc/passwd", "/manifest.jsonl")),
        *((method, "/") for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "ANY")),
    ],
)  # fmt: skip
def test_anything_but_the_page_is_not_found(method: str, path: str) -> None:
    with served(lambda: pytest.fail("rendered"), []) as server:
        assert answer_of(server, method, path)[0] == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9", 200), ("127.0.0.1", 200),
        ("evil.example", 404), ("127.0.0.1.evil.example:80", 404), ("", 404),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(host: str, status: int) -> None:
    with served(lambda: "page", []) as server:
        assert answer_of(server, host=host)[0] == status


def test_requests_change_nothing(folder: LocalFolder) -> None:
    now_s = write_example_run(folder, num_parts=2)
    before = contents(folder.root)
    with served(LivePage(folder, lambda: now_s).render, []) as server:
        for method in ("GET", "POST", "DELETE"):
            answer_of(server, method)
    assert contents(folder.root) == before


def contents(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in root.rglob("*") if f.is_file()}


def test_listens_on_loopback_alone() -> None:
    with PageServer(lambda: "", port=0, log=print) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_fault_of_the_folder_is_one_line_until_it_is_mended(
    folder: LocalFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    now_s = write_example_run(folder, num_parts=2)
    away = folder.root.with_name("<away>")
    log: list[str] = []
    with served(LivePage(folder, lambda: now_s).render, log) as server:
        folder.root.rename(away)
        status, page = answer_of(server)
        assert status == 503
        assert parsed(page).text.removeprefix("Report of a run ") == log[0]
        assert str(folder.root) in log[0]
        away.rename(folder.root)
        assert answer_of(server)[0] == 200
    assert len(log) == 1
    assert "\n" not in log[0]
    assert capfd.readouterr() == ("", "")


def test_text_of_a_fault_is_escaped() -> None:
    def render() -> str:
        raise ConfigError("<b>first</b>\nsecond")

    log: list[str] = []
    with served(render, log) as server:
        page = answer_of(server)[1]
    assert "&lt;b&gt;first&lt;/b&gt; second" in page
    assert log == ["<b>first</b> second"]


def test_unreadable_file_is_named(folder: LocalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = write_example_run(folder, num_parts=2)

    def refuse(_: LocalFolder, name: str) -> Iterator[bytes]:
        raise PermissionError(13, "Permission denied", f"/mnt/out/{name}")

    monkeypatch.setattr(LocalFolder, "read_lines", refuse)
    with pytest.raises(ConfigError, match=f"^/mnt/out/{MANIFEST_FILE}: cannot be read: Permission"):
        LivePage(folder, lambda: now_s).render()


def test_browser_that_leaves_early_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    is_rendering, has_left = threading.Event(), threading.Event()

    def render() -> str:
        is_rendering.set()
        assert has_left.wait(10)
        return "x" * 50_000_000

    with served(render, []) as server:
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert is_rendering.wait(10)
            linger = b"\1\0\0\0\0\0\0\0"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        has_left.set()
        # Another request is answered: the thread of the first is not waited for.
        assert answer_of(server)[0] == 200
    assert capfd.readouterr().err == ""


def test_command_prints_the_address_and_ends_with_130_on_ctrl_c(folder: LocalFolder) -> None:
    write_example_run(folder, num_parts=2)
    command = [sys.executable, "-m", "jobs.report", str(folder.root), "--serve"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline()
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(20) == 130
        finally:
            process.kill()
        assert process.stderr.read() == ""


def test_command_refuses_a_folder_without_a_run_and_a_port_in_use(
    folder: LocalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--serve"]) == 2
    assert "no run here" in capsys.readouterr().err
    write_example_run(folder, num_parts=1)
    with PageServer(lambda: "", port=0, log=print) as server:
        assert main([str(folder.root), "--serve", "--port", str(server.server_port)]) == 2
        refused = capsys.readouterr().err
    assert refused == (
        f"--port: cannot listen on 127.0.0.1:{server.server_port}: Address already in use\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "80"], "--port is used with --serve alone"),
        (["--serve", "--json"], "--serve cannot be combined"),
        (["--serve", "--html", "x"], "--serve cannot be combined"),
        (["--serve", "--port", "0"], "expected a port from 1 to 65535"),
        (["--serve", "--port", "65536"], "expected a port from 1 to 65535"),
    ],
)
def test_command_refuses_options_that_do_not_go_together(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["folder", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
