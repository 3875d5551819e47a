"""CPU and memory of a command with everything that it starts.

usage: python -m tests.benchmarks.client.measure OUTPUT COMMAND...

Orphans become children of this process, so that the tree stays whole. CPU time is the sum of each
process's last reading: the raylet ignores SIGCHLD, so the kernel's own sum lacks Ray's workers.
Memory is the proportional set size (PSS) of the tree. Writes OUTPUT as JSON when no process of the
tree is left. SIGTERM kills the tree at once.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5
_POLLS_PER_MEMORY = 4
_ORPHANS_END_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a command used."""

    code: int
    wall_s: float
    cpu_s: float
    peak_pss_bytes: int


class Measured:
    """A command that runs under this module."""

    def __init__(self, command: list[str], output: Path, log: Path) -> None:
        self._output = output
        self.started_s = time.time()
        # As on a user's machine: without it, each of our processes compiles this project anew.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(output), *command],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the command and all that it started."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> Usage:
        self._process.wait()
        return Usage(**json.loads(self._output.read_text()))


def main(argv: list[str]) -> int:
    output, command = Path(argv[0]), argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began_s, readings = time.monotonic(), Readings()
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: _kill_tree())
    threading.Thread(target=readings.watch, daemon=True).start()
    code = process.wait()
    wall_s = time.monotonic() - began_s
    _reap_orphans()
    values = {
        "code": code,
        "wall_s": wall_s,
        "cpu_s": sum(readings.cpu_s.values()),
        "peak_pss_bytes": readings.peak_pss_bytes,
    }
    output.write_text(json.dumps(values))
    return 0


@dataclass(slots=True)
class Readings:
    """Readings of the processes below this one."""

    cpu_s: dict[tuple[int, float], float] = field(default_factory=dict)
    """Process, named by pid and start, to its CPU time at the last reading."""
    peak_pss_bytes: int = 0

    def watch(self) -> None:
        """Read for ever."""
        for number in itertools.count():
            children = psutil.Process().children(recursive=True)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = child.cpu_times()
                    self.cpu_s[child.pid, child.create_time()] = times.user + times.system
            if number % _POLLS_PER_MEMORY == 0:
                pss_bytes = sum(_pss_bytes(child.pid) for child in children)
                self.peak_pss_bytes = max(self.peak_pss_bytes, pss_bytes)
            time.sleep(_POLL_S)


def _reap_orphans() -> None:
    deadline_s = time.monotonic() + _ORPHANS_END_WITHIN_S
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            if time.monotonic() > deadline_s:
                _kill_tree()
            time.sleep(0.05)


def _kill_tree() -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        # It has ended meanwhile.
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
