"""Crashes at every change of the disk: no row is lost, and none is visible twice."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import pytest

from pipeline.dataset import parts as run_parts
from pipeline.dataset import run_record
from pipeline.dataset.journal import JournalName, Journals
from pipeline.store.folder import Folder, LocalFolder
from pipeline.store.record_log import framed
from pipeline.store.run_folder import DATA, MANIFEST_FILE, STAGING
from schemas.completion import Completion
from schemas.manifest import FailedRow
from schemas.shard import LeaseKey
from tests.fakes.desk import journal_writer
from tests.fakes.output_folder import (
    RECORD,
    Build,
    assert_in_order,
    fresh,
    published,
    recovered,
    staged,
    taken_back,
    visible,
    visible_ids,
    write_foreign,
)


class CrashError(Exception):
    """The machine stops here."""


When = Literal["before", "half", "after"]


@dataclass(frozen=True, slots=True)
class CrashingFolder(LocalFolder):
    """Stops at its `crash_at`th change of the disk: before it, after it, or half-way through."""

    crash_at: int = 0
    when: When = "after"
    changes: list[str] = field(default_factory=list)

    def make(self, name: str = ".") -> None:
        self._change(f"make {name}", lambda: LocalFolder.make(self, name), lambda: None)

    def write_whole(self, name: str, data: bytes) -> None:
        temporary = self.path(name).with_name(f".{Path(name).name}.0a1b2c3d.tmp")
        self._change(
            f"write {name}",
            lambda: LocalFolder.write_whole(self, name, data),
            lambda: temporary.write_bytes(data[: len(data) // 2]),
        )

    def append_line(self, name: str, line: bytes) -> None:
        self._change(
            f"append {name}",
            lambda: LocalFolder.append_line(self, name, line),
            lambda: LocalFolder.append_line(self, name, line[: len(line) // 2]),
        )

    def append_record(self, name: str, record: bytes | memoryview) -> None:
        self._change(
            f"record {name}",
            lambda: LocalFolder.append_record(self, name, record),
            lambda: LocalFolder._append(self, name, framed(record)[: len(record) // 2]),
        )

    def remove_records(self, name: str) -> None:
        self._change(f"end {name}", lambda: LocalFolder.remove(self, name), lambda: None)

    def move(self, source: str, target: str) -> None:
        self._change(f"move {source}", lambda: LocalFolder.move(self, source, target), lambda: None)

    def remove(self, name: str) -> None:
        self._change(f"remove {name}", lambda: LocalFolder.remove(self, name), lambda: None)

    def _change(self, name: str, act: Callable[[], None], half: Callable[[], object]) -> None:
        self.changes.append(name)
        is_here = len(self.changes) == self.crash_at
        if is_here and self.when != "after":
            if self.when == "half":
                half()
            raise CrashError(name)
        act()
        if is_here:
            raise CrashError(name)


EXPECTED = [f"r{number:02d}" for number in range(12)]


FIRST_JOURNAL, SECOND_JOURNAL = (
    JournalName(session_id="s1", worker_id="w0", number=number, kind="rows") for number in (1, 2)
)


def journals(folder: Folder) -> Journals:
    return Journals(folder=folder, run_id=RECORD.run_id)


def journaled(
    folder: Folder, name: JournalName, rows: Sequence[Completion], first_row: int = 0
) -> None:
    writer = journal_writer(folder, RECORD.run_id)
    key = LeaseKey(shard_id=0, attempt=1)
    writer.append(name, rows, [(key, first_row + number) for number in range(len(rows))])


def before_publishing(folder: Folder, build: Build) -> None:
    published(folder, "p1", [build("r00"), build("r01", error=True)])


def publishing(folder: Folder, build: Build) -> None:
    """A worker and the coordinator at work: stage, publish, list."""
    published(folder, "p2", [build("r02"), build("r03")])
    staged(folder, "p3", [build("r04"), build("r05", error=True)])
    late = staged(folder, "p4", [build("r02")])
    run_parts.discard(folder, late)
    part = staged(folder, "p5", [build("r06")])
    run_parts.publish(folder, part, now_s=2.0)
    failed = FailedRow(row_id="r07", sample_index=0, cause="?", attempts=6, failed_at_s=2.0)
    run_record.list_in_manifest(folder, failed)


def journaling(folder: Folder, build: Build) -> None:
    """A worker commits rows, publishes one journal and begins another."""
    journaled(folder, FIRST_JOURNAL, [build("r02"), build("r03")])
    journaled(folder, FIRST_JOURNAL, [build("r04"), build("r05", error=True)], first_row=2)
    part = journals(folder).stage(FIRST_JOURNAL)
    assert part is not None
    run_parts.publish(folder, part, now_s=2.0)
    journals(folder).remove(FIRST_JOURNAL)
    journaled(folder, SECOND_JOURNAL, [build("r06")])


def before_recovering(folder: LocalFolder, build: Build) -> None:
    """Leave one of everything that crashes and people can leave in a folder."""
    before_publishing(folder, build)
    published(folder, "p2", [build("r02"), build("r03")])
    staged(folder, "p3", [build("r04"), build("r05", error=True)])
    folder.move(f"{STAGING}/p3.parquet", f"{DATA}/p3.parquet")
    staged(folder, "p4", [build("r06")])
    staged(folder, "p5", [build("r06"), build("r07")])
    staged(folder, "p6", [build("r08")])
    folder.path(f"{STAGING}/p6.parquet").write_bytes(b"PAR1")
    folder.path(f"{STAGING}/.p7.parquet.00000000.tmp").write_bytes(b"PAR1")
    published(folder, "p8", [build("r09")])
    folder.remove(f"{DATA}/p8.parquet")
    published(folder, "p9", [build("r10")])
    folder.path(f"{DATA}/p9.parquet").write_bytes(folder.read(f"{DATA}/p9.parquet")[:-9])
    shutil.copy(folder.path(f"{DATA}/p2.parquet"), folder.path(f"{DATA}/copy.parquet"))
    write_foreign(folder, f"{DATA}/foreign.parquet")
    journaled(folder, FIRST_JOURNAL, [build("r09"), build("r02"), build("r11")])
    journaled(folder, SECOND_JOURNAL, [build("r09")])
    folder.append_line(MANIFEST_FILE, b'{"event": "part", "name": "p')


def recovering(folder: Folder, build: Build) -> None:
    recovered(folder)


def before_taking_back(folder: Folder, build: Build) -> None:
    before_publishing(folder, build)
    published(folder, "p2", [build("r02", error=True), build("r03", error=True)])
    published(folder, "p3", [build("r04"), build("r05")])
    published(folder, "p4", [build("r06", error=True), build("r07"), build("r08")])


def taking_back(folder: Folder, build: Build) -> None:
    taken_back(folder)


Step = Callable[[LocalFolder, Build], None]
STEPS: dict[str, tuple[Step, Step, int]] = {
    "publish": (before_publishing, publishing, 10),
    "journal": (before_publishing, journaling, 7),
    "recover": (before_recovering, recovering, 24),
    "take back errors": (before_taking_back, taking_back, 13),
}
"""The folder before, the step that crashes, and the number of its changes of the disk."""


@pytest.mark.parametrize("act", STEPS)
def test_every_step_that_changes_the_disk_is_crashed(
    tmp_path: Path, completion: Build, act: str
) -> None:
    prepare, work, num_steps = STEPS[act]
    prepare(fresh(tmp_path), completion)
    folder = CrashingFolder(tmp_path)
    work(folder, completion)
    assert len(folder.changes) == num_steps, folder.changes


@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize(
    ("act", "step"), [(act, step + 1) for act in STEPS for step in range(STEPS[act][2])]
)
def test_crash_loses_nothing_and_doubles_nothing(
    tmp_path: Path, completion: Build, act: str, step: int, when: When
) -> None:
    prepare, work, _ = STEPS[act]
    prepare(fresh(tmp_path), completion)
    crashing = CrashingFolder(tmp_path, crash_at=step, when=when)
    safe = safe_rows(crashing, is_messy=act == "recover")
    with pytest.raises(CrashError):
        work(crashing, completion)
    folder = LocalFolder(tmp_path)
    if act != "recover":
        # Readers see this until recovery: complete parts, and each row once.
        ids = visible_ids(folder)
        assert len(set(ids)) == len(ids)
        assert safe <= {row["row_id"] for row in visible(folder) if row["status"] == "ok"}
    if act == "publish":
        assert set(run_record.read_manifest(folder).parts) <= set(folder.names(DATA))
    recovery = recovered(folder)
    assert_in_order(folder)
    assert sorted(row_id for part in recovery.parts for row_id in part.row_ids) == visible_ids(
        folder
    )
    assert safe <= {row["row_id"] for row in visible(folder) if row["status"] == "ok"}
    assert set(recovered(folder).parts) == set(recovery.parts), "a second look changes nothing"
    finish(folder, completion)
    assert_in_order(folder)
    assert visible_ids(folder) == EXPECTED
    assert {row["status"] for row in visible(folder)} == {"ok"}
    assert pq.read_table(folder.path(DATA)).num_rows == len(EXPECTED)


def safe_rows(folder: Folder, *, is_messy: bool) -> set[str]:
    """Rows with a completion that were published, or staged whole, before the crash."""
    if is_messy:
        return {"r00", "r02", "r03", "r04", "r06", "r09", "r11"}
    return {str(row["row_id"]) for row in visible(folder) if row["status"] == "ok"}


def finish(folder: Folder, build: Build) -> None:
    """Resume with `--retry-errors` and do all that is open."""
    done = {row_id for part in taken_back(folder) for row_id in part.row_ids}
    rows = [build(row_id) for row_id in EXPECTED if row_id not in done]
    published(folder, "last", rows)


def test_committed_row_outlives_a_crash_that_follows(tmp_path: Path, completion: Build) -> None:
    for step in range(1, STEPS["journal"][2] + 1):
        path = tmp_path / str(step)
        before_publishing(fresh(path), completion)
        crashing = CrashingFolder(path, crash_at=step, when="half")
        with pytest.raises(CrashError):
            journaling(crashing, completion)
        expected = {"r00"} | ({"r02", "r03"} if step > 1 else set())
        expected |= {"r04", "r05"} if step > 2 else set()
        recovered(LocalFolder(path))
        assert expected <= set(visible_ids(LocalFolder(path))), step
        assert LocalFolder(path).names(STAGING) == []


def test_published_row_outlives_a_crash_that_follows(tmp_path: Path, completion: Build) -> None:
    """Each part of `publishing` is published before the next step, which loses none."""
    for step in range(1, STEPS["publish"][2] + 1):
        path = tmp_path / str(step)
        before_publishing(fresh(path), completion)
        crashing = CrashingFolder(path, crash_at=step, when="before")
        with pytest.raises(CrashError):
            publishing(crashing, completion)
        expected = {"r00"} | ({"r02", "r03"} if step > 3 else set())
        expected |= {"r04"} if step > 4 else set()
        expected |= {"r06"} if step > 9 else set()
        recovered(LocalFolder(path))
        assert expected <= set(visible_ids(LocalFolder(path))), step
