"""Watch Ray's head process (gcs), without which Ray ends the driver's process from within.

Ray's library terminates a process that has not reached the gcs for 60 s, with exit status 1, and
calls to it block until then. Before that, the driver leaves with the status that tells a supervisor
that the same command resumes. What it started ends as it does when Ray terminates the driver.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable

import ray
import ray.util.client

from schemas.config.running import host_and_port

_INTERVAL_S = 2.0
# Half of Ray's own limit (RAY_gcs_rpc_server_reconnect_timeout_s, 60 s in Ray 2.60).
_MOST_REFUSALS = 15
# As `jobs` has it: the same command resumes.
_RAY_LOST = 3


def watch_ray() -> threading.Event:
    """Watch the gcs that this process is connected to; one behind `ray://` is out of its reach."""
    if ray.util.client.ray.is_connected():  # type: ignore[no-untyped-call]
        return threading.Event()
    return watch_head(ray.get_runtime_context().gcs_address)


def watch_head(address: str, leave: Callable[[str], None] | None = None) -> threading.Event:
    """Leave the process once nothing listens at the gcs's address; the event ends the watch."""
    is_over = threading.Event()
    place = host_and_port(address)
    if place is not None and _listens(place):
        watch = (place, is_over, leave or _leave)
        threading.Thread(target=_watch, args=watch, name="head-watch", daemon=True).start()
    return is_over


def _watch(place: tuple[str, int], is_over: threading.Event, leave: Callable[[str], None]) -> None:
    refusals = 0
    while refusals < _MOST_REFUSALS:
        if is_over.wait(_INTERVAL_S):
            return
        refusals = 0 if _listens(place) else refusals + 1
    leave("Ray's head process (gcs) is gone; published rows are kept, and the same command resumes")


def _listens(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=_INTERVAL_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        # A busy machine or network: Ray itself decides.
        return True
    return True


def _leave(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    # No handler may run: each would wait for the gcs.
    os._exit(_RAY_LOST)
