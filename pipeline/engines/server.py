"""Start the engine's process, see that it lives, stop it. The one place that starts a process.

Invariant: no engine outlives its worker. The process runs in a session of its own under
`guard.py`, which ends it with everything below it when the worker lets go of the leash or dies.
"""

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import EngineError

_GUARD = Path(__file__).with_name("guard.py")
_MAX_LOG_BYTES = 64 * 2**20
_STOP_GRACE_S = 1.0
# An engine holds nothing worth saving; the grace lets it unlink its shared memory.
_TAIL_LINES = 3


@dataclass(slots=True, kw_only=True)
class EngineProcess:
    """One engine under its guard.

    `env` is added to the environment, less PYTHONPATH, which would show our packages to an engine
    that runs in an interpreter of its own. `secret` is kept out of the log.
    """

    command: list[str]
    env: dict[str, str]
    log_path: Path
    secret: str
    _guard: "subprocess.Popen[bytes] | None" = field(default=None)

    def start(self) -> None:
        """Raises EngineError when the command is not there."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        arguments = [str(self.log_path), str(_MAX_LOG_BYTES), str(_STOP_GRACE_S), *self.command]
        if not Path(self.command[0]).exists():
            raise EngineError(f"the engine's interpreter {self.command[0]} is not there")
        self._guard = subprocess.Popen(  # noqa: S603 - the command is the run file's
            [sys.executable, "-I", str(_GUARD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.log_path.parent,
            env={**environment, **self.env, "GUARD_SECRET": self.secret},
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def how_it_ended(self) -> str:
        """Exit status and last lines of the log, in one line."""
        status = self._guard.poll() if self._guard else None
        lines = [line.strip() for line in self._log_tail() if line.strip()][-_TAIL_LINES:]
        said = f"; its last lines: {' | '.join(lines)}" if lines else ""
        return f"the engine ended with status {status}{said} (log: {self.log_path})"

    async def stop(self) -> None:
        """End the engine and everything below it; returns when they are gone."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        await asyncio.to_thread(self._guard.wait)
        self._guard = None

    def _log_tail(self) -> list[str]:
        if not self.log_path.exists():
            return []
        with self.log_path.open("rb") as file:
            file.seek(max(0, self.log_path.stat().st_size - 8192))
            return file.read().decode("utf-8", "replace").splitlines()


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
