"""Joining a cluster: addresses that are none, that nobody answers at, and a token left open."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import grpc
import pytest

from pipeline.errors import ConfigError
from pipeline.run.connection.joined import await_address, check_token_file
from tests.fakes.running import free_port


@pytest.mark.parametrize(
    "address",
    ["nonsense", "host:port", "127.0.0.1:99999", "127.0.0.1:0", ":6379", "a b:1", "[::1:6379", ""],
)
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster.address: found .*, expected HOST:PORT"):
        await_address(address, patience_s=60)


def test_address_where_nothing_listens_is_abandoned() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"no Ray cluster answered at {address} within 0.1 s"):
        await_address(address, patience_s=0.1)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "localhost:{}"])
def test_address_where_a_server_as_rays_listens_is_tried(form: str) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        await_address(form.format(port), patience_s=5)
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (None, "it does not answer"),
        (b"", "something else than Ray listens there"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "something else than Ray listens there"),
    ],
)
def test_address_where_something_else_listens_is_abandoned(said: bytes | None, fault: str) -> None:
    with listening(said) as port, pytest.raises(ConfigError, match=f"within 1.5 s: {fault}"):
        await_address(f"127.0.0.1:{port}", patience_s=1.5)


@contextmanager
def listening(said: bytes | None) -> Iterator[int]:
    """Accept connections and say this to each; None says nothing, and keeps it open."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    held.append(connection)
                    if said is not None:
                        connection.recv(100)
                        connection.sendall(said)
                        connection.shutdown(socket.SHUT_WR)

        thread = Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("secret")
    return path


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_token_that_others_can_read_is_refused_with_the_remedy(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 {token_file}"):
        check_token_file()


def test_token_of_its_owner_alone_is_taken(token_file: Path) -> None:
    token_file.chmod(0o600)
    check_token_file()


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_TOKEN", "other"), ("RAY_AUTH_MODE", "disabled")]
)
def test_token_file_that_ray_does_not_read_is_not_looked_at(
    token_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    token_file.chmod(0o644)
    monkeypatch.setenv(name, value)
    check_token_file()


def test_token_path_of_the_environment_is_the_one_that_counts(
    token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file.chmod(0o600)
    other = tmp_path / "token"
    other.write_text("secret")
    other.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    with pytest.raises(ConfigError, match=f"chmod 600 {other}"):
        check_token_file()
