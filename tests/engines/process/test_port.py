"""The port of an engine: who listens on it, and that nobody else is taken for the engine."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.engines.process import port as port_module
from pipeline.engines.process.port import (
    EnginePort,
    ListeningSocket,
    free_port,
    listening_sockets,
)
from pipeline.engines.process.server import EngineProcess
from pipeline.errors import PortTakenError

LISTEN = "import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"


@contextmanager
def listener(host: str, port: int = 0, family: int = socket.AF_INET) -> Iterator[socket.socket]:
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen()
        yield server


def port_of(*pids: int, number: int, accepts_user: bool = False) -> EnginePort:
    return EnginePort(number=number, processes=lambda: pids, accepts_user=accepts_user)


def is_held_soon(port: EnginePort) -> bool:
    deadline_s = time.monotonic() + 10
    while not (is_held := port.is_held()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return is_held


def test_free_port_is_free() -> None:
    number = free_port()
    assert 1024 <= number < 65536
    assert listening_sockets(number) == ()


@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("127.0.0.1", socket.AF_INET),
        ("0.0.0.0", socket.AF_INET),
        ("::", socket.AF_INET6),
        ("::ffff:127.0.0.1", socket.AF_INET6),
    ],
)
def test_every_socket_that_answers_at_loopback_is_found(host: str, family: int) -> None:
    with listener(host, family=family) as server:
        (found,) = listening_sockets(server.getsockname()[1])
        assert found.inode == os.fstat(server.fileno()).st_ino
        assert found.user == os.getuid()


def test_socket_that_does_not_answer_at_loopback_is_another_port() -> None:
    with listener("::1", family=socket.AF_INET6) as server:
        assert listening_sockets(server.getsockname()[1]) == ()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert listening_sockets(bound.getsockname()[1]) == (), "it does not listen yet"


def test_engine_holds_its_port_once_one_of_its_processes_listens(tmp_path: Path) -> None:
    number = free_port()
    # The listener is a child of the engine's own process.
    script = f'{sys.executable} -c "$0"; sleep 60'
    process = EngineProcess(
        command=["/bin/sh", "-c", script, LISTEN.format(port=number)],
        env={}, log_path=tmp_path / "log", secret="k",
    )  # fmt: skip
    port = EnginePort(number=number, processes=process.processes)
    assert not port.is_held()
    process.start()
    try:
        assert is_held_soon(port)
        asyncio.run(port.check())
    finally:
        asyncio.run(process.stop())
    with pytest.raises(PortTakenError, match=f"nothing listens on port {number}"):
        asyncio.run(port.check())


def test_another_process_that_listens_first_is_named() -> None:
    with listener("127.0.0.1") as server:
        number = server.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {number} is taken by another process"):
            port_of(os.getppid(), number=number).is_held()
        assert port_of(os.getpid(), number=number).is_held()


def test_another_process_that_takes_the_port_later_is_named() -> None:
    with listener("127.0.0.1") as server:
        number, pids = server.getsockname()[1], [os.getpid()]
        port = EnginePort(number=number, processes=lambda: pids)
        assert port.is_held()
    pids.clear()
    with listener("127.0.0.1", number), pytest.raises(PortTakenError, match="another process"):
        asyncio.run(port.check())


def test_listener_of_a_container_may_be_of_this_user_or_root_and_of_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [ListeningSocket(inode=7, user=0)]
    monkeypatch.setattr(port_module, "listening_sockets", lambda port: tuple(found))
    port = port_of(number=4711, accepts_user=True)
    assert port.is_held()
    found[0] = ListeningSocket(inode=8, user=os.getuid())
    assert port.is_held()
    found.append(ListeningSocket(inode=9, user=os.getuid() + 1))
    with pytest.raises(PortTakenError, match=rf"of user {os.getuid() + 1}\)"):
        port.is_held()


def test_concurrent_checks_share_one_that_began_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began: list[int] = []

    def slow(port: int) -> tuple[ListeningSocket, ...]:
        began.append(port)
        time.sleep(0.05)
        return (ListeningSocket(inode=7, user=os.getuid()),)

    monkeypatch.setattr(port_module, "listening_sockets", slow)
    port = port_of(number=4711, accepts_user=True)

    async def many() -> None:
        first = asyncio.create_task(port.check())
        await asyncio.sleep(0.01)
        assert len(began) == 1
        await asyncio.gather(first, *(port.check() for _ in range(50)))

    asyncio.run(many())
    assert len(began) == 2
