"""Start an engine's process, watch that it runs, and stop it.

Invariant: no engine outlives its worker. The process runs in a session of its own under
`guard.py`, which kills it and everything below it when the worker closes the leash or dies.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.engines.process.counters import (
    Activity,
    cpu_ticks,
    io_bytes,
    kernel_kills,
    processes_below,
)
from pipeline.engines.process.environment import passed_environment
from pipeline.errors import EngineError
from pipeline.planner.sglang.failures import LAUNCH_MARK, last_launch

_GUARD = Path(__file__).with_name("guard.py")
_MAX_LOG_BYTES = 64 * 2**20
# An engine has nothing to save; the grace lets it unlink its shared memory.
_STOP_GRACE_S = 1.0
_TAIL_LINES = 3
_RELEASE_TIMEOUT_S = 30.0
_MOST_LOG_READ_BYTES = 4 * 2**20


@dataclass(slots=True, kw_only=True)
class EngineProcess:
    """An engine's process under its guard.

    `env` is added to the variables that are inherited. PYTHONPATH never is: it would show our
    packages to an engine that runs in an interpreter of its own. `secret` is the engine's key:
    it is passed as ENGINE_API_KEY, and masked in the log.
    """

    command: list[str]
    env: dict[str, str]
    log_path: Path
    secret: str
    inherited: Mapping[str, str] = field(
        default_factory=lambda: passed_environment(os.environ, None)
    )
    _guard: "subprocess.Popen[bytes] | None" = field(default=None)
    _kernel_kills: int = 0

    def start(self) -> None:
        """Start the process. Raises EngineError when the command does not exist."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        arguments = [str(self.log_path), str(_MAX_LOG_BYTES), str(_STOP_GRACE_S), *self.command]
        if shutil.which(self.command[0]) is None:
            raise EngineError(f"the engine's command {self.command[0]} does not exist")
        self._mark_log()
        self._kernel_kills = kernel_kills()
        self._guard = subprocess.Popen(  # noqa: S603 - the command is the run file's
            [sys.executable, "-I", str(_GUARD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.log_path.parent,
            env={**self.inherited, **self.env, "ENGINE_API_KEY": self.secret},
            start_new_session=True,
        )

    def _mark_log(self) -> None:
        """Write the line that begins a launch in the log: its command without its secret."""
        words = " ".join(word if word != self.secret else "***" for word in self.command)
        with self.log_path.open("a", encoding="utf-8") as log:
            log.write(f"{LAUNCH_MARK}{words}\n")

    @property
    def is_running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status, 128 + n for signal n; None while the process runs."""
        return self._guard.poll() if self._guard else None

    @property
    def kernel_kills(self) -> int:
        """Processes that the kernel killed for memory on this machine since the start."""
        return kernel_kills() - self._kernel_kills

    def processes(self) -> list[int]:
        """List the engine's processes."""
        return processes_below(self._guard.pid) if self._guard else []

    def activity(self) -> Activity:
        """Read counters that move while the engine does anything at all."""
        pids = self.processes()
        log_bytes = self.log_path.stat().st_size if self.log_path.exists() else 0
        return Activity(
            log_bytes=log_bytes,
            io_bytes=sum(map(io_bytes, pids)),
            cpu_ticks=sum(map(cpu_ticks, pids)),
        )

    def log_text(self) -> str:
        """Return the log of the present launch, or its last megabytes."""
        text = self._log_end(_MOST_LOG_READ_BYTES)
        older = self.log_path.with_name(self.log_path.name + ".1")
        if LAUNCH_MARK not in text and older.exists():
            text = older.read_bytes()[-_MOST_LOG_READ_BYTES:].decode("utf-8", "replace") + text
        return last_launch(text)

    def how_it_ended(self) -> str:
        """Return the exit status and the log's last lines, in one line."""
        status = self.status
        tail = self._log_end(8192).splitlines()
        lines = [line.strip() for line in tail if line.strip()][-_TAIL_LINES:]
        last_lines = f"; its last lines: {' | '.join(lines)}" if lines else ""
        return f"the engine ended with status {status}{last_lines} (log: {self.log_path})"

    async def stop(self) -> None:
        """Kill the engine and everything below it; return when they are gone."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        await asyncio.to_thread(self._guard.wait)
        self._guard = None

    def _log_end(self, num_bytes: int) -> str:
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(max(0, self.log_path.stat().st_size - num_bytes))
            return file.read().decode("utf-8", "replace")


def installed_release(python: str) -> str | None:
    """Return SGLang's release in an interpreter of its own; None where it cannot be read."""
    question = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter is the run file's
            [python, "-I", "-c", question],
            capture_output=True,
            text=True,
            timeout=_RELEASE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        # The start itself will show what is wrong.
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
