"""The driver's lock: one driver per output folder.

Invariant: only the driver whose token is in `driver.json` publishes; the token is read again before
each publication, so a holder that was taken over stops.

The holder increments a beat in the file every few seconds. On the holder's own machine its process
is looked up, so a dead holder is replaced at once. From another machine the beat is watched, by the
watcher's own clock, until it has not changed for `STALE_AFTER_S`.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.errors import ConfigError, DriverLostError, PipelineError, ResumeError
from pipeline.store.folder import CLAIMS, Folder
from pipeline.store.run_folder import LOCK_FILE
from pipeline.untrusted.parsing import UNREADABLE

BEAT_INTERVAL_S = 4.0
# Seven missed beats; with the pause after writing, a take-over needs well under a minute.
STALE_AFTER_S = 30.0
_WATCH_INTERVAL_S = 1.0
# Several times what a small file needs on a busy network file system.
TAKE_OVER_PAUSE_S = 2.0
_TAKE_OVER_ATTEMPTS = 3
# In a store, two drivers that create the lock at once may each give way to the other.
_CREATE_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The driver that holds a folder, as written in the lock."""

    token: str
    machine: str
    """Host, boot and process namespace: process ids are unique only within all three."""
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
    """Take the lock, waiting until a dead holder is stale. Raises ResumeError for a live one."""
    for _ in range(_TAKE_OVER_ATTEMPTS):
        if _acquired(folder, holder, sleep):
            return
    raise ResumeError(
        f"the lock in {folder.where} needs more than {TAKE_OVER_PAUSE_S:g} s to be written, in "
        "which another driver may take it; try again when the file system answers faster"
    )


def _acquired(folder: Folder, holder: Holder, sleep: Callable[[float], None]) -> bool:
    """Take the lock; False when this driver stalled, so that another may have taken it."""
    for _ in range(_CREATE_ATTEMPTS):
        if folder.create(LOCK_FILE, _encoded(holder)):
            return True
        if folder.exists(LOCK_FILE):
            break
        # Each driver pauses for a time drawn from its token, so that they do not collide again.
        sleep(folder.settle_s * int(holder.token[:4], 16) / 0xFFFF)
    current = _holder(folder)
    if current is not None:
        current = _wait_until_dead(folder, current, sleep)
    if not _has_taken_over(folder, holder, current, sleep):
        return False
    # Claims of dead drivers; a live driver's claim wins nothing either while the lock exists.
    folder.remove_folder(f"{LOCK_FILE}.{CLAIMS}")
    return True


def _has_taken_over(
    folder: Folder, holder: Holder, dead: Holder | None, sleep: Callable[[float], None]
) -> bool:
    """Replace a dead holder. Raises ResumeError when another driver does so at the same time.

    No two drivers succeed. Each looks for the dead holder, writes, pauses and looks for itself. Of
    two that wrote, the earlier one finds the later one's token, unless the later one stalled
    between its look and its write for longer than the pause. That one knows by its clock: it
    removes its lock and returns False, and a driver that it overwrote stops.
    """
    pause_s = max(folder.settle_s, TAKE_OVER_PAUSE_S)
    began_s = time.monotonic()
    if _holder(folder) != dead:
        raise _overtaken(folder)
    folder.write_whole(LOCK_FILE, _encoded(holder))
    if time.monotonic() - began_s >= pause_s:
        release(folder, holder)
        return False
    sleep(pause_s)
    winner = _holder(folder)
    if winner is None or winner.token != holder.token:
        raise _overtaken(folder)
    return True


def _overtaken(folder: Folder) -> ResumeError:
    return ResumeError(f"another driver took over {folder.where} at the same moment")


def beat(folder: Folder, holder: Holder) -> Holder:
    """Increment the beat. Raises DriverLostError when the folder was taken over."""
    check_held(folder, holder.token)
    raised = replace(holder, beat=holder.beat + 1)
    folder.write_whole(LOCK_FILE, _encoded(raised))
    return raised


def check_held(folder: Folder, token: str) -> None:
    """Raise DriverLostError unless the lock still has `token`."""
    current = _holder(folder)
    if current is None or current.token != token:
        raise DriverLostError(f"another driver has taken over {folder.where}")


def release(folder: Folder, holder: Holder) -> None:
    """Remove the lock if it is still this holder's."""
    current = _holder(folder)
    if current is not None and current.token == holder.token:
        folder.remove(LOCK_FILE)


@contextlib.contextmanager
def holding(
    folder: Folder,
    holder: Holder,
    *,
    sleep: Callable[[float], None],
    log: Callable[[str], None],
) -> Iterator[Callable[[], bool]]:
    """Hold the lock for the length of a block, and beat in the background.

    Yields a function that returns whether the folder was taken over.
    """
    stop, lost = threading.Event(), threading.Event()

    def beat_until_stopped() -> None:
        current = holder
        while not stop.wait(BEAT_INTERVAL_S):
            try:
                current = beat(folder, current)
            except DriverLostError:
                lost.set()
                return
            except (OSError, ConfigError) as error:
                # The folder may come back; if it does not, the next publication says so.
                log(f"event=warning the driver's lock cannot be written: {error}")

    thread = threading.Thread(target=beat_until_stopped, name="driver-lock", daemon=True)
    may_be_ours = True
    try:
        try:
            # Inside the outer block: a signal may come as soon as the lock is written.
            acquire(folder, holder, sleep)
        except PipelineError:
            may_be_ours = False
            raise
        thread.start()
        yield lost.is_set
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()
        try:
            if may_be_ours:
                release(folder, holder)
        except (OSError, ConfigError) as error:
            # It must not hide what ended the run; the next driver replaces a dead holder.
            log(f"event=warning the driver's lock cannot be removed: {error}")


def is_driven(folder: Folder) -> bool | None:
    """Tell if a live driver holds the folder; None for a holder on another machine."""
    current = _holder(folder)
    if current is None:
        return False
    return _is_alive(current) if current.machine == _machine() else None


def _wait_until_dead(
    folder: Folder, holder: Holder, sleep: Callable[[float], None]
) -> Holder | None:
    """Return the dead holder as the lock still has it; None when it released the folder."""
    if holder.machine == _machine():
        if _is_alive(holder):
            raise _refused(folder, holder)
        return holder
    waited_s = 0.0
    while waited_s < STALE_AFTER_S:
        sleep(_WATCH_INTERVAL_S)
        waited_s += _WATCH_INTERVAL_S
        current = _holder(folder)
        if current is None:
            return None
        if current != holder:
            raise _refused(folder, current)
    return holder


def _refused(folder: Folder, holder: Holder) -> ResumeError:
    host = holder.machine.partition(" ")[0]
    return ResumeError(
        f"output.folder: {folder.where} is being written by another driver (process {holder.pid} "
        f"on {host}); stop it first, or use another folder"
    )


def _holder(folder: Folder) -> Holder | None:
    try:
        return Holder(**json.loads(folder.read(LOCK_FILE)))
    except (FileNotFoundError, *UNREADABLE):
        # Removed, or not a lock of ours: nobody holds the folder.
        return None


def _encoded(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _is_alive(holder: Holder) -> bool:
    return _process_start(holder.pid) == holder.pid_started


def _process_start(pid: int) -> str | None:
    """Return the kernel's start time of a process, which tells recycled process ids apart."""
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
