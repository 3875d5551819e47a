"""One driver per output folder.

The lock is a file with a random token and a beat that its holder raises every few seconds. On the
holder's own machine its process is looked up, so a dead holder is replaced at once; from another
machine the beat is watched, by the watcher's own clock, until it stands still for
`STALE_AFTER_S`. A holder that was taken over finds another token and stops: the token is read
again before each publication.
"""

import json
import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.errors import DriverLostError, ResumeError
from pipeline.store.folder import CLAIMS, Folder
from pipeline.store.run_folder import LOCK_FILE

BEAT_INTERVAL_S = 4.0
STALE_AFTER_S = 30.0
"""Seven missed beats; with the settling time below, a take-over takes well under a minute."""
_WATCH_INTERVAL_S = 1.0
_TRIES_TO_CREATE = 3
# Two that create the lock at once may each make way for the other, where the folder is a store.


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    token: str
    machine: str
    """Host, boot and process namespace: a process id means something only within all three."""
    pid: int
    pid_started: str
    beat: int = 0


def this_process() -> Holder:
    return Holder(
        token=uuid.uuid4().hex,
        machine=_machine(),
        pid=os.getpid(),
        pid_started=_process_start(os.getpid()) or "",
    )


def acquire(folder: Folder, holder: Holder, sleep: Callable[[float], None]) -> None:
    """Take the folder, waiting out a dead holder. Raises ResumeError while another one lives."""
    for _ in range(_TRIES_TO_CREATE):
        if folder.create(LOCK_FILE, _encoded(holder)):
            return
        if folder.exists(LOCK_FILE):
            break
        # A pause of its own for each, drawn from its token, so that they come apart.
        sleep(folder.settle_s * int(holder.token[:4], 16) / 0xFFFF)
    standing = _holder(folder)
    if standing is not None:
        _wait_until_dead(folder, standing, sleep)
    folder.write_whole(LOCK_FILE, _encoded(holder))
    # Two that take over at once both write; after this pause the later one's token stands alone.
    sleep(folder.settle_s)
    winner = _holder(folder)
    if winner is None or winner.token != holder.token:
        raise ResumeError(f"another driver took {folder.where} over at the same moment")
    # Of the dead: while the lock stands, a claim of the living wins nothing either.
    folder.remove_folder(f"{LOCK_FILE}.{CLAIMS}")


def beat(folder: Folder, holder: Holder) -> Holder:
    """Raise the beat. Raises DriverLostError when the folder was taken over."""
    check_held(folder, holder.token)
    raised = replace(holder, beat=holder.beat + 1)
    folder.write_whole(LOCK_FILE, _encoded(raised))
    return raised


def check_held(folder: Folder, token: str) -> None:
    """Raises DriverLostError unless the lock still bears `token`."""
    standing = _holder(folder)
    if standing is None or standing.token != token:
        raise DriverLostError(f"another driver has taken {folder.where} over")


def release(folder: Folder, holder: Holder) -> None:
    standing = _holder(folder)
    if standing is not None and standing.token == holder.token:
        folder.remove(LOCK_FILE)


def is_driven(folder: Folder) -> bool | None:
    """Whether a driver holds the folder; None when another machine's does and cannot be seen."""
    standing = _holder(folder)
    if standing is None:
        return False
    return _is_alive(standing) if standing.machine == _machine() else None


def _wait_until_dead(folder: Folder, standing: Holder, sleep: Callable[[float], None]) -> None:
    if standing.machine == _machine():
        if _is_alive(standing):
            raise _refused(folder, standing)
        return
    waited_s = 0.0
    while waited_s < STALE_AFTER_S:
        sleep(_WATCH_INTERVAL_S)
        waited_s += _WATCH_INTERVAL_S
        seen = _holder(folder)
        if seen is None:
            return
        if seen != standing:
            raise _refused(folder, seen)


def _refused(folder: Folder, holder: Holder) -> ResumeError:
    host = holder.machine.partition(" ")[0]
    return ResumeError(
        f"output.folder: {folder.where} is being written by another driver (process {holder.pid} "
        f"on {host}); stop it first, or use another folder"
    )


def _holder(folder: Folder) -> Holder | None:
    try:
        return Holder(**json.loads(folder.read(LOCK_FILE)))
    except (FileNotFoundError, ValueError, TypeError):
        # Gone, or not one of ours: it holds nothing.
        return None


def _encoded(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _is_alive(holder: Holder) -> bool:
    return _process_start(holder.pid) == holder.pid_started


def _process_start(pid: int) -> str | None:
    """The kernel's start time of a process, which a recycled process id does not share."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return f"{socket.gethostname()} {boot} {namespace}"
