"""Processes of one run, found by a variable that they inherit, and what is done to them.

Invariant: only processes with the run's own tag are touched, whatever else runs on the machine.
"""

import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Literal

import psutil

TAG = "REGENERATE_CHAOS"

Role = Literal[
    "driver", "gcs", "raylet", "coordinator", "worker", "guard", "engine", "endpoint", "other"
]
Harm = Literal["kill", "stop", "starve"]
HARMS: dict[Harm, float] = {"kill": 0.7, "stop": 0.2, "starve": 0.1}

# A stopped process lives on afterwards; the longest of them outlasts short timeouts.
_STOP_S = (0.5, 12.0)
# A starved process runs for a tenth of the time.
_STARVE_S, _SLICE_S, _RUNNING_SHARE = 6.0, 0.2, 0.1


@dataclass(slots=True, kw_only=True)
class Family:
    """The processes of one session: those that inherited its tag, and all that these start.

    A worker of Ray writes its title over its environment, so those that were seen are remembered.
    """

    tag: str
    seen: set[psutil.Process] = field(default_factory=set)

    def living(self) -> list[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(TAG) == self.tag:
                    self.seen.add(process)
        for process in list(self.seen):
            with contextlib.suppress(psutil.Error):
                self.seen.update(process.children(recursive=True))
        self.seen = {process for process in self.seen if _lives(process)}
        return list(self.seen)

    def by_role(self) -> dict[Role, list[psutil.Process]]:
        """Sort the living by their roles; others, such as Ray's agents, are left out."""
        found: dict[Role, list[psutil.Process]] = {}
        for process in self.living():
            with contextlib.suppress(psutil.Error):
                if (role := role_of(process)) != "other":
                    found.setdefault(role, []).append(process)
        return found

    def remains(self, patience_s: float) -> list[str]:
        """Wait until nobody is left; kill those that stay and return their command lines."""
        deadline_s = time.monotonic() + patience_s
        while (left := self.living()) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        lines = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                lines.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
                process.kill()
        return lines


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def role_of(process: psutil.Process) -> Role:
    """Tell what a process is to the run; raises psutil.Error when it has gone."""
    words = " ".join(process.cmdline())
    marks: tuple[tuple[str, Role], ...] = (
        ("jobs.regenerate", "driver"),
        ("/gcs_server", "gcs"),
        ("/raylet/raylet", "raylet"),
        ("ray::Coordinator", "coordinator"),
        ("ray::WorkerActor", "worker"),
        ("guard.py", "guard"),
        ("tests.chaos.endpoint", "endpoint"),
    )
    role = next((role for mark, role in marks if mark in words), None)
    if role is not None:
        return role
    parent = process.parent()
    is_engine = parent is not None and "guard.py" in " ".join(parent.cmdline())
    return "engine" if is_engine else "other"


@dataclass(slots=True)
class Injuries:
    """Harm that is done to processes, part of it in the background."""

    chance: random.Random
    threads: list[threading.Thread] = field(default_factory=list)

    def do(self, harm: Harm, victim: psutil.Process) -> None:
        if harm == "kill":
            with contextlib.suppress(psutil.Error):
                victim.kill()
            return
        pauses = (
            [self.chance.uniform(*_STOP_S)]
            if harm == "stop"
            else [_SLICE_S * (1 - _RUNNING_SHARE)] * int(_STARVE_S / _SLICE_S)
        )
        thread = threading.Thread(target=_pause, args=(victim, pauses))
        thread.start()
        self.threads.append(thread)

    def end(self) -> None:
        """Wait until every stopped process goes on."""
        for thread in self.threads:
            thread.join()
        self.threads.clear()


def _pause(victim: psutil.Process, pauses: list[float]) -> None:
    with contextlib.suppress(psutil.Error):
        for pause_s in pauses:
            victim.suspend()
            try:
                time.sleep(pause_s)
            finally:
                victim.resume()
            time.sleep(_SLICE_S * _RUNNING_SHARE)
