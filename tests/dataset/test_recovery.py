"""Recovery: `data/` has complete, listed parts of this run and nothing else."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from pipeline.dataset import run_record
from pipeline.dataset.recovery import Recovery
from pipeline.store.run_folder import DATA, MANIFEST_FILE, QUARANTINE, STAGING
from tests.fakes.output_folder import (
    Build,
    assert_in_order,
    fresh,
    published,
    recovered,
    staged,
    visible,
    visible_ids,
    write_foreign,
)


def test_clean_folder_is_left_as_it_is(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    parts = (published(folder, "p1", [completion("a")]), published(folder, "p2", [completion("b")]))
    before = folder.read(MANIFEST_FILE)
    assert recovered(folder) == Recovery(parts=parts, reports=())
    assert folder.read(MANIFEST_FILE) == before


def test_staged_part_of_a_dead_worker_is_published(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    staged(folder, "p1", [completion("a")])
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a",)]
    assert recovery.reports == ()
    assert_in_order(folder)


def test_part_that_was_moved_and_not_listed_is_listed(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    part = staged(folder, "p1", [completion("a"), completion("b", sample_index=3)])
    folder.move(f"{STAGING}/p1.parquet", f"{DATA}/p1.parquet")
    assert recovered(folder).parts == (dataclasses.replace(part, published_at_s=3.0),)
    assert_in_order(folder)


def test_cut_off_manifest_line_is_reported_and_its_part_listed_again(
    tmp_path: Path, completion: Build
) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    published(folder, "p2", [completion("b")])
    folder.path(MANIFEST_FILE).write_bytes(folder.read(MANIFEST_FILE)[:-20])
    assert list(run_record.read_manifest(folder).parts) == ["p1.parquet"]
    recovery = recovered(folder)
    assert recovery.reports == ("manifest.jsonl line 3 cannot be read and is left out",)
    assert_in_order(folder)
    published(folder, "p3", [completion("c")])
    assert visible_ids(folder) == ["a", "b", "c"]
    assert_in_order(folder)


def test_manifest_cut_off_at_its_line_feed_loses_nothing(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    part = published(folder, "p1", [completion("a")])
    folder.path(MANIFEST_FILE).write_bytes(folder.read(MANIFEST_FILE)[:-1])
    assert recovered(folder) == Recovery(parts=(part,), reports=())


@pytest.mark.parametrize(
    "line",
    [b"\x00\x00\x00", b"[1]", b"7", b"{}", b'{"event": "dance"}', b'{"event": "part"}', b"\xff"],
)
def test_unreadable_line_in_the_middle_is_left_out(
    tmp_path: Path, completion: Build, line: bytes
) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    folder.append_line(MANIFEST_FILE, line + b"\n")
    published(folder, "p2", [completion("b")])
    recovery = recovered(folder)
    assert [part.name for part in recovery.parts] == ["p1.parquet", "p2.parquet"]
    assert recovery.reports == ("manifest.jsonl line 3 cannot be read and is left out",)


def test_lost_manifest_is_written_again_from_the_parts(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("b")])
    published(folder, "p2", [completion("c", error=True)])
    folder.remove(MANIFEST_FILE)
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a", "b"), ("c",)]
    assert_in_order(folder)


def test_deleted_part_is_reported_and_its_rows_are_open(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("b")])
    published(folder, "p2", [completion("c")])
    folder.remove(f"{DATA}/p1.parquet")
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("c",)]
    assert recovery.reports == ("data/p1.parquet is listed but gone; its 2 rows are done again",)
    assert recovered(folder).reports == (), "it is told once"
    assert_in_order(folder)


@pytest.mark.parametrize("size", [0, 3, 100, -1])
def test_truncated_part_is_set_aside_and_its_rows_are_open(
    tmp_path: Path, completion: Build, size: int
) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("b")])
    published(folder, "p2", [completion("c")])
    data = folder.read(f"{DATA}/p1.parquet")
    folder.path(f"{DATA}/p1.parquet").write_bytes(data[:size])
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("c",)]
    report = "data/p1.parquet is truncated or not a parquet file; moved to quarantine/p1.parquet"
    assert recovery.reports == (f"{report}; its 2 rows are done again",)
    assert folder.read(f"{QUARANTINE}/p1.parquet") == data[:size]
    assert_in_order(folder)


@pytest.mark.parametrize(
    "footer",
    [b"{", b"[]", b"7", b"{}", b'{"run_id": "run-1"}', b'{"run_id": "run-1", "name": "x.parquet"}'],
)
def test_footer_that_is_none_of_ours_is_not_fatal(tmp_path: Path, footer: bytes) -> None:
    folder = fresh(tmp_path)
    write_foreign(folder, f"{DATA}/x.parquet", {b"regenerate.part": footer})
    write_foreign(folder, f"{STAGING}/x.parquet", {b"regenerate.part": footer})
    recovery = recovered(folder)
    assert recovery.parts == ()
    assert len(recovery.reports) == 2
    assert folder.names(QUARANTINE) == ["x.parquet", "x.parquet.1"]


def test_foreign_parquet_is_set_aside(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    write_foreign(folder, f"{DATA}/x.parquet")
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a",)]
    assert recovery.reports == (
        "data/x.parquet is not a part of this run; moved to quarantine/x.parquet",
    )
    assert_in_order(folder)


def test_foreign_text_and_folder_are_set_aside(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    folder.path(f"{DATA}/README.md").write_text("hello")
    folder.make(f"{DATA}/.cache/inner")
    folder.path(f"{STAGING}/notes.txt").write_text("hello")
    assert len(recovered(folder).reports) == 3
    assert folder.names(QUARANTINE) == [".cache", "README.md", "notes.txt"]
    assert_in_order(folder)


def test_part_of_another_run_is_set_aside(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    staged(folder, "p2", [completion("b")], run_id="run-2")
    staged(folder, "p3", [completion("c")], run_id="run-2")
    folder.move(f"{STAGING}/p3.parquet", f"{DATA}/p3.parquet")
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a",)]
    assert recovery.reports == (
        "data/p3.parquet belongs to another run; moved to quarantine/p3.parquet",
        "staging/p2.parquet belongs to another run; moved to quarantine/p2.parquet",
    )
    assert_in_order(folder)


@pytest.mark.parametrize("copy", ["a-copy.parquet", "p1 (1).parquet"])
def test_copy_under_another_name_is_set_aside(tmp_path: Path, completion: Build, copy: str) -> None:
    folder = fresh(tmp_path)
    part = published(folder, "p1", [completion("a")])
    shutil.copy(folder.path(f"{DATA}/p1.parquet"), folder.path(f"{DATA}/{copy}"))
    recovery = recovered(folder)
    assert recovery.parts == (part,)
    assert recovery.reports == (f"data/{copy} is a copy of p1.parquet; moved to quarantine/{copy}",)
    assert_in_order(folder)


def test_listed_part_stays_where_an_unlisted_one_has_its_rows(
    tmp_path: Path, completion: Build
) -> None:
    folder = fresh(tmp_path)
    part = published(folder, "p1", [completion("a"), completion("b")])
    staged(folder, "earlier-in-order", [completion("b"), completion("c")])
    folder.move(f"{STAGING}/earlier-in-order.parquet", f"{DATA}/earlier-in-order.parquet")
    recovery = recovered(folder)
    assert recovery.parts == (part,)
    assert "contains rows that another part has" in recovery.reports[0]
    assert_in_order(folder)


def test_things_set_aside_do_not_replace_each_other(tmp_path: Path) -> None:
    folder = fresh(tmp_path)
    for text in ("one", "two", "three"):
        folder.path(f"{DATA}/notes.txt").write_text(text)
        recovered(folder)
    texts = [folder.read(f"{QUARANTINE}/{name}") for name in folder.names(QUARANTINE)]
    assert texts == [b"one", b"two", b"three"]


def test_staged_leftovers_are_published_dropped_or_set_aside(
    tmp_path: Path, completion: Build
) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("b")])
    staged(folder, "p2", [completion("c"), completion("d")])
    staged(folder, "p3", [completion("e"), completion("b")])
    staged(folder, "p4", [completion("d"), completion("f")])
    staged(folder, "p5", [completion("g")])
    data = folder.read(f"{STAGING}/p5.parquet")
    folder.path(f"{STAGING}/p5.parquet").write_bytes(data[: len(data) // 2])
    folder.path(f"{STAGING}/.p6.parquet.0a1b2c3d.tmp").write_bytes(data[:10])
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a", "b"), ("c", "d")]
    assert recovery.reports == (
        "staging/p5.parquet is truncated or not a parquet file; moved to quarantine/p5.parquet",
    )
    assert folder.names(QUARANTINE) == ["p5.parquet"]
    assert_in_order(folder)


def test_part_that_holds_a_row_twice_is_set_aside(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("a")])
    recovery = recovered(folder)
    assert recovery.parts == ()
    assert "contains rows that another part has" in recovery.reports[0]
    assert visible(folder) == []


def test_samples_of_one_prompt_are_rows_of_their_own(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("a", sample_index=1)])
    staged(folder, "p2", [completion("a", sample_index=2), completion("b", sample_index=2)])
    staged(folder, "p3", [completion("b", sample_index=2)])
    recovery = recovered(folder)
    assert [part.sample_indexes for part in recovery.parts] == [(0, 1), (2, 2)]
    assert recovery.reports == ()
    assert_in_order(folder)


@pytest.mark.parametrize("place", ["data", "staging"])
@pytest.mark.parametrize("kind", ["link to nothing", "link to itself", "pipe"])
def test_link_or_pipe_in_place_of_a_part_is_set_aside(
    tmp_path: Path, place: str, kind: str
) -> None:
    folder = fresh(tmp_path)
    path = folder.path(f"{place}/x.parquet")
    match kind:
        case "link to nothing":
            path.symlink_to("nowhere")
        case "link to itself":
            path.symlink_to(path.name)
        case "pipe":
            os.mkfifo(path)
    recovery = recovered(folder)
    assert recovery.parts == ()
    assert [report.partition(";")[0] for report in recovery.reports] == [
        f"{place}/x.parquet is truncated or not a parquet file"
    ]
    assert folder.names("quarantine") == ["x.parquet"]


def test_folder_in_place_of_a_journal_is_left_there(tmp_path: Path) -> None:
    folder = fresh(tmp_path)
    folder.make("staging/journal-s-w0-000000-rows")
    reports = recovered(folder).reports
    assert reports == ("staging/journal-s-w0-000000-rows is a folder; it is left there",)
