"""A destination on disk and in a store: files are whole or absent, and names are the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.export import main
from pipeline.errors import ConfigError
from pipeline.store import object_store
from pipeline.store.object_store import open_store
from schemas.completion import Completion
from tests.export.test_export import exported, finished_run, kept

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
    assert "contains another export" in capsys.readouterr().err


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
    from pipeline.export import export

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


@pytest.mark.parametrize(
    ("where", "opened"),
    [
        ("s3://b/x", "s3://b/x?allow_delayed_open=true"),
        ("s3://b/x?region=y", "s3://b/x?region=y&allow_delayed_open=true"),
        ("s3://b/x?allow_delayed_open=false", "s3://b/x?allow_delayed_open=false"),
        ("gs://b/x", "gs://b/x"),
    ],
)
def test_small_objects_go_up_in_one_request(where: str, opened: str) -> None:
    assert object_store._with_one_request_uploads(where) == opened


def test_refused_url_is_shown_without_its_options() -> None:
    with pytest.raises(ConfigError) as refused:
        open_store("s3://?region=secret")
    assert str(refused.value).startswith("s3://: not a store that can be opened")
    assert "secret" not in str(refused.value)


def test_request_is_retried_until_the_patience_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds

    class Away:
        def __getattr__(self, name: str) -> object:
            raise OSError("away")

    monkeypatch.setattr(object_store, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(object_store, "sleep", sleep)
    with pytest.raises(ConfigError, match="cannot be used: away"):
        object_store.Store("s3://b/x", Away(), "b/x", 8.0).read("a")
    # 0.5 + 1 + 2 + 4 = 7.5 s; the next pause of 8 s would exceed 8 s.
    assert slept == [0.5, 1.0, 2.0, 4.0]
    slept.clear()
    with pytest.raises(ConfigError):
        object_store.Store("s3://b/x", Away(), "b/x", 24.0).read("a")
    # 15.5 s and another pause of 8 s are 23.5 s.
    assert slept == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(ConfigError, match="found a file; expected a folder"):
        open_store(str(tmp_path / "f"))
