"""Join the Ray cluster at `cluster.address`, or say in one line why that cannot be."""

import logging
import os
import socket
import stat
import time
from pathlib import Path

import ray

from pipeline.errors import ConfigError
from schemas.config.running import host_and_port

_PATIENCE_S = 60.0
_RETRY_S = 1.0
# assumed: a busy machine that answers does so within it
_LEAST_WAIT_S = 1.0
# RFC 9113, 3.4 and 4.1: the preface with empty settings; length, type, flags and stream of a frame.
_SETTINGS, _FRAME_HEADER_BYTES = 4, 9
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


def join_ray(address: str) -> str | None:
    """Join the cluster. Return the address of its dashboard. Raises ConfigError."""
    check_token_file()
    if address != "auto":
        await_address(address, patience_s=_PATIENCE_S)
    try:
        joined = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # noqa: BLE001  # Ray documents no list of them
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        has_mode = os.environ.get("RAY_AUTH_MODE")
        hint = "" if has_mode else "; a cluster with tokens needs RAY_AUTH_MODE=token"
        raise ConfigError(
            f"cluster.address: cannot join the Ray cluster at {address}: {reason}{hint}"
        ) from None
    return f"http://{joined.dashboard_url}" if joined.dashboard_url else None


def await_address(address: str, *, patience_s: float) -> None:
    """Wait until a server of Ray answers there: Ray itself would wait for many minutes.

    Raises ConfigError for what is no address, and when none answers for `patience_s`.
    """
    host, port = _host_and_port(address)
    gives_up_s = time.monotonic() + patience_s
    while (
        fault := _fault(host, port, max(gives_up_s - time.monotonic(), _LEAST_WAIT_S))
    ) is not None:
        if time.monotonic() + _RETRY_S >= gives_up_s:
            raise ConfigError(
                f"cluster.address: no Ray cluster answered at {address} within "
                f"{patience_s:g} s: {fault}"
            )
        time.sleep(_RETRY_S)


def _fault(host: str, port: int, patience_s: float) -> str | None:
    """Explain why no server of Ray answers; None where one does.

    Its servers speak HTTP/2, which both sides begin with their settings.
    """
    try:
        with socket.create_connection((host, port), timeout=patience_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return None
            connection.sendall(_HTTP2_GREETING)
            connection.settimeout(patience_s)
            answer = connection.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
    except TimeoutError:
        return "it does not answer"
    except OSError as error:
        return error.strerror or str(error)
    is_settings = len(answer) == _FRAME_HEADER_BYTES and answer[3] == _SETTINGS
    return None if is_settings else "something else than Ray listens there"


def _host_and_port(address: str) -> tuple[str, int]:
    place = host_and_port(address)
    if place is None:
        raise ConfigError(
            f"cluster.address: found {address!r}, expected HOST:PORT, ray://HOST:PORT or auto"
        )
    return place


def check_token_file() -> None:
    """Refuse a token of Ray that others can read: it is the right to run code as this user."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_MODE") == "disabled":
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    # A file that this user cannot change, as a mounted secret, is its owner's to protect.
    if mode & 0o077 and os.access(path, os.W_OK):
        raise ConfigError(
            f"{path}: other users can read Ray's token (mode {mode:04o}); "
            f"run `chmod 600 {path}`, or better make a new token"
        )
