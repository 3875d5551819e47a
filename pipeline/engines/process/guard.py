"""Keep an engine's process from outliving its worker. Run as a script; stdlib only.

usage: guard.py LOG_PATH MAX_LOG_BYTES GRACE_S COMMAND [ARG ...]

Standard input is the leash: when its other end closes, because the worker closed it or died, the
command's process group and every process below it are killed. The command's output goes to the
log, which is rotated when full; the engine's key, in ENGINE_API_KEY, is masked there. The exit
status is the command's.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_POLL_S = 0.2
_READ_BYTES = 65_536


class BoundedLog:
    """A log file that is renamed to `<name>.1` when full, so at most two files are kept."""

    def __init__(self, path: Path, max_bytes: int, secret: bytes) -> None:
        self._path, self._max_bytes, self._secret = path, max_bytes, secret
        self._file: BinaryIO = path.open("ab")
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Write whole lines, so that a secret cut in two by a read is still masked."""
        lines, feed, self._rest = (self._rest + data).rpartition(b"\n")
        self._write(lines + feed)
        if len(self._rest) > _READ_BYTES:
            self.close_line()

    def close_line(self) -> None:
        self._write(self._rest)
        self._rest = b""

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._file.write(data.replace(self._secret, b"***") if self._secret else data)
        self._file.flush()
        if self._file.tell() > self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab")


def main(argv: list[str]) -> int:
    log_path, max_log_bytes, grace_s, *command = argv
    # Orphans of the engine's processes become children of this one, so that it can kill them.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    secret = os.environ.get("ENGINE_API_KEY", "").encode()
    log = BoundedLog(Path(log_path), int(max_log_bytes), secret)
    stopping = [False]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopping.__setitem__(0, True))
    child = subprocess.Popen(  # noqa: S603 - the command is the run file's
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    _pump(child, log, stopping)
    _end_all(child, float(grace_s))
    log.close_line()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _pump(child: "subprocess.Popen[bytes]", log: BoundedLog, stopping: list[bool]) -> None:
    """Copy output to the log until the child ends, the leash closes or a signal arrives."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(child.stdout, selectors.EVENT_READ)
        while child.poll() is None and not stopping[0]:
            for key, _ in selector.select(_POLL_S):
                data = os.read(key.fd, _READ_BYTES)
                if key.fd == 0 and not data:
                    return
                if key.fd != 0 and data:
                    log.feed(data)
                elif key.fd != 0:
                    selector.unregister(child.stdout)
        os.set_blocking(child.stdout.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(child.stdout.fileno(), _READ_BYTES):
                log.feed(data)


def _end_all(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Send SIGTERM to the group, SIGKILL after the grace, then SIGKILL to every process below."""
    _signal_group(child.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while child.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    _signal_group(child.pid, signal.SIGKILL)
    for pid in _processes_below(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _processes_below(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found, frontier = [], [root]
    while frontier:
        parent = frontier.pop()
        below = [pid for pid, its_parent in parents.items() if its_parent == parent]
        found += below
        frontier += below
    return found


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
