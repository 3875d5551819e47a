"""Leaving in time when Ray's head process is gone."""

import socket
from threading import Event

import pytest

from pipeline.run.connection import head_watch
from pipeline.run.connection.head_watch import watch_head
from tests.fakes.running import free_port


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_watch, "_INTERVAL_S", 0.02)


def test_head_that_is_gone_is_left_with_a_line() -> None:
    said: list[str] = []
    has_left = Event()

    def leave(line: str) -> None:
        said.append(line)
        has_left.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        watch_head(f"127.0.0.1:{server.getsockname()[1]}", leave)
        assert not has_left.wait(0.2)
    assert has_left.wait(10)
    assert said[0].endswith("the same command resumes")


def test_watch_that_is_over_leaves_nobody() -> None:
    has_left = Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_over = watch_head(f"127.0.0.1:{server.getsockname()[1]}", lambda _: has_left.set())
    is_over.set()
    assert not has_left.wait(1.0)


def test_address_that_this_process_cannot_reach_is_not_watched() -> None:
    has_left = Event()
    watch_head(f"127.0.0.1:{free_port()}", lambda _: has_left.set())
    assert not has_left.wait(1.0)
