"""Start the private Ray of a run, and nothing beside what the run uses.

A plain `ray.init` also starts a dashboard server, an autoscaler monitor, a log monitor, an agent
for metrics and one for runtime environments. They cost 5 CPU-seconds a start, and a run has no use
for them (measured: Ray 2.60, 2 cores, 2026-12). Ray has no setting that leaves them out, so this
module changes Ray's own start while it runs. A release of Ray that starts them otherwise starts
them as usual, and `start_ray` returns what it lacks: nothing but the address depends on it.

Invariant: only processes that know the run's own token can use this Ray; with Ray 2.60, only those
of this machine can reach it.
"""

import logging
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
import ray._private.node
import ray._private.ray_constants
import ray._private.services

# Ray carries leases and reports only; its default is a third of the machine's memory.
_OBJECT_STORE_BYTES = 128 * 2**20
_UNUSED_SERVICES = ("start_api_server", "start_monitor", "start_log_monitor")
# Option of the raylet: the files in which it awaits the agent's ports (Ray 2.60, services.py).
_UNUSED_AGENTS = {
    "--dashboard_agent_command": (
        "metrics_agent_port",
        "metrics_export_port",
        "dashboard_agent_listen_port",
    ),
    "--runtime_env_agent_command": ("runtime_env_agent_port",),
}
_IDLE_AGENT = Path(__file__).with_name("idle_agent.py")


def start_ray(*, num_cpus: int | None) -> tuple[str, ...]:
    """Start a Ray and connect to it; `ray.shutdown` ends it. Return what this Ray's start lacks.

    It has `num_cpus`, which its workers reserve, or those of the machine when that is None.
    """
    if os.environ.get("RAY_AUTH_MODE") != "disabled":
        # Ray's own default is a file in the home, which other runs and nodes share.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    with as_bare_as_possible() as missing:
        ray.init(
            address="local",
            num_cpus=num_cpus or os.cpu_count() or 1,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # Else Ray starts a process for each CPU: a minute of CPU time on a large node.
            _system_config={} if num_cpus else {"prestart_worker_first_driver": False},
        )
    return missing


@contextmanager
def as_bare_as_possible() -> Iterator[tuple[str, ...]]:
    """Change Ray's start within the block; yield the names that this release of Ray lacks."""
    node, services = ray._private.node.Node, ray._private.services  # noqa: SLF001
    constants = ray._private.ray_constants  # noqa: SLF001
    start_process = getattr(services, "start_ray_process", _start_nothing)
    changes: list[tuple[Any, str, object]] = [
        *((node, name, _start_nothing) for name in _UNUSED_SERVICES),
        (services, "start_ray_process", _with_idle_agents(start_process)),
        # Then Ray binds every port to 127.0.0.1, as it does where it supports no clusters.
        (constants, "ENABLE_RAY_CLUSTER", False),
    ]
    with ExitStack() as stack:
        for owner, name, value in changes:
            if hasattr(owner, name):
                stack.enter_context(_replaced(owner, name, value))
        yield tuple(name for owner, name, _ in changes if not hasattr(owner, name))


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:  # noqa: ANN401 - modules and classes of Ray
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _start_nothing(*_: object, **__: object) -> None:
    """Stand in for a method of Ray's node that starts a service."""


def _with_idle_agents(start_process: Callable[..., Any]) -> Callable[..., Any]:
    """Return Ray's function with other agents in the command of the raylet."""

    def start(command: list[str], *arguments: object, **options: object) -> Any:  # noqa: ANN401 - Ray's record of a process
        return start_process(with_idle_agents(command), *arguments, **options)

    return start


def with_idle_agents(command: list[str]) -> list[str]:
    """Replace the agents in the command of a raylet; other commands stay as they are."""
    given = dict(word.partition("=")[::2] for word in map(str, command))
    session_dir = given.get("--session_dir")
    if session_dir is None:
        return command
    idle = [sys.executable, "-I", "-S", str(_IDLE_AGENT), session_dir]
    return [
        f"{option}={shlex.join([*idle, *_UNUSED_AGENTS[option]])}"
        if (option := str(word).partition("=")[0]) in _UNUSED_AGENTS
        else word
        for word in command
    ]
