"""A destination on disk and in a store: files are whole or absent, and names are the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.export import main
from pipeline.errors import ConfigError
from pipeline.store.object_store import open_store
from schemas.completion import Completion
from tests.dataset.test_export import exported, finished_run, kept

Build = Callable[..., Completion]


def test_export_to_an_object_store_is_the_one_to_a_folder(
    bucket: str, tmp_path: Path, completion: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, completion)
    exported(run, tmp_path / "d")
    assert main([str(run.root), "--to", bucket]) == 0
    store = open_store(bucket)
    on_disk = open_store(str(tmp_path / "d"))
    assert store.names() == on_disk.names()
    with store.open_input("data/train-00000.parquet") as stream:
        assert pq.read_table(stream)["row_id"].to_pylist() == kept()
    assert main([str(run.root), "--to", bucket]) == 0
    assert "event=nothing_to_do" in capsys.readouterr().err
    assert main([str(run.root), "--to", bucket, "--shuffle", "1"]) == 2
    assert "holds another export" in capsys.readouterr().err


def test_destination_whose_bucket_is_not_there_is_told_of_before_rows_are_read(
    bucket: str, tmp_path: Path, completion: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, completion)
    dest = bucket.replace("s3://sets/", "s3://nowhere/")
    assert main([str(run.root), "--to", dest]) == 2
    assert capsys.readouterr().err == f"--to {dest}: there is no bucket 'nowhere'\n"


def test_broken_off_export_to_an_object_store_goes_on(
    bucket: str, tmp_path: Path, completion: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.dataset import export

    def no_power(*_: object) -> None:
        raise KeyboardInterrupt

    run = finished_run(tmp_path, completion)
    with monkeypatch.context() as patch:
        patch.setattr(export, "commit", no_power)
        with pytest.raises(KeyboardInterrupt):
            main([str(run.root), "--to", bucket])
    store = open_store(bucket)
    assert store.size_bytes("export.json") is None
    store.write_whole("data/train-00099.parquet", b"half a file of an earlier try")
    assert main([str(run.root), "--to", bucket]) == 0
    assert json.loads(store.read("export.json"))["rows_exported"] == 118
    assert "data/train-00099.parquet" not in store.names()


def test_file_that_breaks_off_is_not_there(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "d"))
    breaking_off = store.writing("data/a.parquet")
    breaking_off.__enter__().write(b"half")
    assert breaking_off.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None) is not True
    assert store.names() == []
    store.write_whole("data/a.parquet", b"whole")
    assert (store.names(), store.read("data/a.parquet")) == (["data/a.parquet"], b"whole")


@pytest.mark.parametrize("where", ["gopher://x/y", "s3://"])
def test_url_of_no_store_is_refused_in_one_line(where: str) -> None:
    with pytest.raises(ConfigError, match="not a store that can be opened") as refused:
        open_store(where)
    assert "\n" not in str(refused.value)


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(ConfigError, match="found a file; expected a folder"):
        open_store(str(tmp_path / "f"))
