"""The driver's lock: a live holder is refused, and a dead one replaced."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier, Thread
from time import monotonic, sleep
from typing import ClassVar

import pytest

from pipeline.errors import DriverLostError, ResumeError
from pipeline.store import lock
from pipeline.store.folder import LocalFolder
from pipeline.store.lock import STALE_AFTER_S, Holder
from pipeline.store.run_folder import LOCK_FILE

ROOT = Path(__file__).resolve().parents[2]

HOLD = """
import sys, time
from pathlib import Path
from pipeline.store import lock
from pipeline.store.folder import LocalFolder

lock.acquire(LocalFolder(Path(sys.argv[1])), lock.this_process(), time.sleep)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A real process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def no_sleep(_: float) -> None:
    """Time stands still: nothing else happens meanwhile."""


def write_lock(folder: LocalFolder, holder: Holder) -> None:
    folder.write_whole(LOCK_FILE, json.dumps(dataclasses.asdict(holder)).encode())


def holder_of(folder: LocalFolder) -> Holder:
    return Holder(**json.loads(folder.read(LOCK_FILE)))


def elsewhere(beat: int = 5) -> Holder:
    """A driver on another machine, whose process cannot be looked up."""
    return Holder(token="theirs", machine="far boot pid", pid=1, pid_started="1", beat=beat)


@dataclasses.dataclass(slots=True)
class Clock:
    """Sleeping advances it, and lets the rest of the world act."""

    meanwhile: Callable[[float], object] = lambda now_s: None
    now_s: float = 0.0

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.meanwhile(self.now_s)


# -- on the holder's own machine


def test_free_folder_is_taken_at_once(tmp_path: Path) -> None:
    folder, clock, holder = LocalFolder(tmp_path), Clock(), lock.this_process()
    lock.acquire(folder, holder, clock.sleep)
    assert holder_of(folder) == holder
    assert clock.now_s == 0.0


def test_second_driver_is_refused_while_the_first_lives(
    tmp_path: Path, driver: subprocess.Popen[str]
) -> None:
    folder = LocalFolder(tmp_path)
    before = folder.read(LOCK_FILE)
    refusal = rf"output\.folder: .* another driver \(process {driver.pid} on "
    with pytest.raises(ResumeError, match=refusal):
        lock.acquire(folder, lock.this_process(), no_sleep)
    assert folder.read(LOCK_FILE) == before
    assert lock.is_driven(folder) is True


def test_killed_driver_is_replaced_at_once(tmp_path: Path, driver: subprocess.Popen[str]) -> None:
    folder, clock, holder = LocalFolder(tmp_path), Clock(), lock.this_process()
    driver.kill()
    driver.wait()
    assert lock.is_driven(folder) is False
    lock.acquire(folder, holder, clock.sleep)
    assert holder_of(folder) == holder
    assert clock.now_s < STALE_AFTER_S / 10


def test_killed_driver_that_nobody_waited_for_is_dead(
    tmp_path: Path, driver: subprocess.Popen[str]
) -> None:
    folder = LocalFolder(tmp_path)
    driver.kill()
    until_s = monotonic() + 5
    while lock.is_driven(folder) and monotonic() < until_s:
        sleep(0.005)
    # A zombie until it is waited for: the process id is still in the table.
    assert Path(f"/proc/{driver.pid}/stat").exists()
    lock.acquire(folder, lock.this_process(), no_sleep)


def test_recycled_process_id_is_not_the_driver(
    tmp_path: Path, driver: subprocess.Popen[str]
) -> None:
    folder, holder = LocalFolder(tmp_path), lock.this_process()
    write_lock(folder, dataclasses.replace(holder_of(folder), pid_started="1"))
    assert lock.is_driven(folder) is False
    lock.acquire(folder, holder, no_sleep)
    assert holder_of(folder).token == holder.token


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"token": "x"}', b"\xff"])
def test_lock_file_that_is_none_of_ours_holds_nothing(tmp_path: Path, text: bytes) -> None:
    folder, holder = LocalFolder(tmp_path), lock.this_process()
    folder.write_whole(LOCK_FILE, text)
    assert lock.is_driven(folder) is False
    lock.acquire(folder, holder, no_sleep)
    assert holder_of(folder) == holder


# -- on another machine


def test_driver_elsewhere_whose_beat_moves_is_refused(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write_lock(folder, elsewhere())

    def beat_once_late(now_s: float) -> None:
        if now_s >= STALE_AFTER_S - 2:
            write_lock(folder, elsewhere(beat=6))

    clock = Clock(beat_once_late)
    with pytest.raises(ResumeError, match="process 1 on far"):
        lock.acquire(folder, lock.this_process(), clock.sleep)
    assert holder_of(folder) == elsewhere(beat=6)


def test_driver_elsewhere_whose_beat_stands_still_is_replaced(tmp_path: Path) -> None:
    folder, clock, holder = LocalFolder(tmp_path), Clock(), lock.this_process()
    write_lock(folder, elsewhere())
    lock.acquire(folder, holder, clock.sleep)
    assert holder_of(folder) == holder
    assert STALE_AFTER_S <= clock.now_s < 60


def test_live_driver_has_many_beats_before_it_is_taken_for_dead() -> None:
    assert STALE_AFTER_S >= 5 * lock.BEAT_INTERVAL_S


def test_driver_elsewhere_that_releases_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    folder, holder = LocalFolder(tmp_path), lock.this_process()
    write_lock(folder, elsewhere())
    clock = Clock(lambda now_s: folder.remove(LOCK_FILE) if now_s == 3.0 else None)
    lock.acquire(folder, holder, clock.sleep)
    assert holder_of(folder) == holder
    assert clock.now_s < STALE_AFTER_S


def test_another_that_takes_over_meanwhile_is_left_alone(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write_lock(folder, elsewhere())
    third = dataclasses.replace(elsewhere(), token="third", machine="third boot pid")
    clock = Clock(lambda _: write_lock(folder, third))
    with pytest.raises(ResumeError, match="on third"):
        lock.acquire(folder, lock.this_process(), clock.sleep)
    assert holder_of(folder) == third


# -- two at once


def test_of_two_that_take_over_at_once_the_later_writer_wins(tmp_path: Path) -> None:
    folder, ours = LocalFolder(tmp_path), lock.this_process()
    write_lock(folder, dataclasses.replace(ours, token="dead", pid_started="1"))
    rival = dataclasses.replace(ours, token="rival")
    clock = Clock(lambda _: write_lock(folder, rival))
    with pytest.raises(ResumeError, match="at the same moment"):
        lock.acquire(folder, ours, clock.sleep)
    assert holder_of(folder) == rival


@pytest.mark.parametrize("has_dead_holder", [True, False])
def test_of_many_that_take_the_folder_at_once_one_wins(
    tmp_path: Path, has_dead_holder: bool
) -> None:
    folder, together = LocalFolder(tmp_path), Barrier(6)
    holders = [lock.this_process() for _ in range(6)]
    if has_dead_holder:
        write_lock(folder, dataclasses.replace(holders[0], token="dead", pid_started="1"))
    won: list[str] = []

    def take(holder: Holder) -> None:
        together.wait()
        try:
            lock.acquire(folder, holder, sleep)
        except ResumeError:
            return
        won.append(holder.token)

    threads = [Thread(target=take, args=(holder,)) for holder in holders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [holder_of(folder).token]


class StallingFolder(LocalFolder):
    """Another driver takes the lock, and time passes, while this one is about to write it."""

    stalls: ClassVar[int]

    def write_whole(self, name: str, data: bytes) -> None:
        if StallingFolder.stalls:
            StallingFolder.stalls -= 1
            write_lock(LocalFolder(self.root), elsewhere())
            sleep(0.06)
        LocalFolder(self.root).write_whole(name, data)


@pytest.fixture
def stalling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StallingFolder:
    """Folder of a dead driver, with a pause that a stall outlasts."""
    monkeypatch.setattr(lock, "TAKE_OVER_PAUSE_S", 0.05)
    monkeypatch.setattr(LocalFolder, "settle_s", 0.05)
    dead = dataclasses.replace(lock.this_process(), token="dead", pid_started="1")
    write_lock(LocalFolder(tmp_path), dead)
    return StallingFolder(tmp_path)


def test_driver_that_stalls_before_its_write_begins_anew(stalling: StallingFolder) -> None:
    StallingFolder.stalls = 1
    ours = lock.this_process()
    lock.acquire(stalling, ours, no_sleep)
    assert holder_of(stalling) == ours
    with pytest.raises(DriverLostError):
        lock.check_held(stalling, elsewhere().token)


def test_driver_whose_every_write_stalls_is_no_holder(
    stalling: StallingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    StallingFolder.stalls = 9
    monkeypatch.setattr(StallingFolder, "create", lambda *_: False)
    with pytest.raises(ResumeError, match="another driver may take it"):
        lock.acquire(stalling, lock.this_process(), no_sleep)
    assert not stalling.exists(LOCK_FILE)


def test_driver_that_stalls_before_its_last_look_writes_nothing(tmp_path: Path) -> None:
    folder, ours = LocalFolder(tmp_path), lock.this_process()
    write_lock(folder, elsewhere())
    third = dataclasses.replace(elsewhere(), token="third")

    def stall(now_s: float) -> None:
        if now_s >= STALE_AFTER_S:
            write_lock(folder, third)

    with pytest.raises(ResumeError):
        lock.acquire(folder, ours, Clock(stall).sleep)
    assert holder_of(folder) == third


# -- while it is held


def test_beat_rises_and_is_written(tmp_path: Path) -> None:
    folder, holder = LocalFolder(tmp_path), lock.this_process()
    lock.acquire(folder, holder, no_sleep)
    raised = lock.beat(folder, lock.beat(folder, holder))
    assert raised == dataclasses.replace(holder, beat=2)
    assert holder_of(folder) == raised
    lock.check_held(folder, holder.token)


def test_holder_that_was_taken_over_stops(tmp_path: Path) -> None:
    folder, holder = LocalFolder(tmp_path), lock.this_process()
    lock.acquire(folder, holder, no_sleep)
    write_lock(folder, elsewhere())
    with pytest.raises(DriverLostError, match="has taken over"):
        lock.beat(folder, holder)
    with pytest.raises(DriverLostError):
        lock.check_held(folder, holder.token)
    assert holder_of(folder) == elsewhere(), "the other's lock stands"


def test_holder_whose_lock_is_gone_stops(tmp_path: Path) -> None:
    folder, holder = LocalFolder(tmp_path), lock.this_process()
    lock.acquire(folder, holder, no_sleep)
    folder.remove(LOCK_FILE)
    with pytest.raises(DriverLostError):
        lock.beat(folder, holder)
    assert not folder.exists(LOCK_FILE)


def test_released_folder_is_free(tmp_path: Path) -> None:
    folder, holder = LocalFolder(tmp_path), lock.this_process()
    lock.acquire(folder, holder, no_sleep)
    raised = lock.beat(folder, holder)
    assert raised.beat == 1
    lock.release(folder, holder)
    assert not folder.exists(LOCK_FILE)
    assert lock.is_driven(folder) is False
    lock.release(folder, holder)
    lock.acquire(folder, lock.this_process(), no_sleep)


def test_release_leaves_anothers_lock_alone(tmp_path: Path) -> None:
    folder, holder = LocalFolder(tmp_path), lock.this_process()
    lock.acquire(folder, holder, no_sleep)
    write_lock(folder, elsewhere())
    lock.release(folder, holder)
    assert holder_of(folder) == elsewhere()


def test_folder_held_elsewhere_cannot_be_seen(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    assert lock.is_driven(folder) is False
    write_lock(folder, elsewhere())
    assert lock.is_driven(folder) is None
    write_lock(folder, lock.this_process())
    assert lock.is_driven(folder) is True
