"""Damage inside a published part is found, whatever byte it is."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import status
from pipeline.dataset.verification import check_parts
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import DATA
from tests.fakes.example_run import write_example_run


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    folder = LocalFolder(tmp_path / "run")
    write_example_run(folder, num_parts=3)
    return folder


def parts_of(folder: LocalFolder) -> list[Path]:
    return sorted((folder.root / DATA).glob("*.parquet"))


def test_sound_parts_are_counted(folder: LocalFolder, capsys: pytest.CaptureFixture[str]) -> None:
    rows = sum(pq.read_metadata(part).num_rows for part in parts_of(folder))
    assert status.main([str(folder.root), "--verify"]) == 0
    assert capsys.readouterr().out == f"verified   3 parts, {rows} rows\n"


def test_zeroed_page_is_named_with_what_to_do(
    folder: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    part = parts_of(folder)[1]
    chunk = pq.read_metadata(part).row_group(0).column(0)
    data = bytearray(part.read_bytes())
    # A byte of the page's own data: behind its header, before the next page.
    data[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 0xFF
    part.write_bytes(data)
    assert status.main([str(folder.root), "--verify"]) == 2
    damaged, what_to_do = capsys.readouterr().out.splitlines()
    assert damaged.startswith(f"damaged    {part}: ")
    assert what_to_do.startswith("next       move them away; the next run generates their ")


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_cut_or_missing_part_is_damaged(folder: LocalFolder, damage: str) -> None:
    part = parts_of(folder)[0]
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:-40])
    else:
        part.unlink()
    bad = [checked for checked in check_parts(folder) if checked.damage is not None]
    assert [checked.path for checked in bad] == [f"{DATA}/{part.name}"]
