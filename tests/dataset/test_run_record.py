"""A run's own records: the run record and the manifest."""

import dataclasses
import json
from pathlib import Path

import pytest

from pipeline.dataset import run_record
from pipeline.errors import ResumeError
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import RUN_FILE
from schemas.manifest import EngineRun, RunIdentity, RunManifest
from tests.fakes.output_folder import (
    RECORD,
    fresh,
)


def test_run_record_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    assert run_record.read_run(folder) is None
    record = dataclasses.replace(
        RECORD,
        identity=RunIdentity(settings={"model": "m", "sampling.seed": None, "kept": ["ä"]}),
        accepted_drift=("model: …",),
    )
    run_record.write_run(folder, record)
    assert run_record.read_run(folder) == record


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"identity": 1}', "\xff"])
def test_run_record_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    folder = LocalFolder(tmp_path)
    folder.write_whole(RUN_FILE, text.encode("latin-1"))
    with pytest.raises(ResumeError, match="not a run record"):
        run_record.read_run(folder)


def test_engines_that_ran_are_listed_in_the_manifest(tmp_path: Path) -> None:
    folder = fresh(tmp_path)
    ran = EngineRun(
        worker_id="w0",
        engine="sglang",
        release="sglang 0.5.23",
        plan="--mem-fraction-static 0.86",
        max_running_requests=31,
        ready_at_s=5.0,
    )
    run_record.list_in_manifest(folder, ran)
    manifest = run_record.read_manifest(folder)
    assert manifest.engines == [ran]
    assert not manifest.unreadable_lines


@pytest.mark.parametrize(
    ("name", "is_part"),
    [
        ("x.parquet", True), ("../x.parquet", False), ("/etc/x.parquet", False),
        ("a/b.parquet", False), ("..", False), ("", False),
    ],
)  # fmt: skip
def test_part_outside_the_folder_is_no_part(name: str, is_part: bool) -> None:
    line = {
        "event": "part", "name": name, "size_bytes": 1, "row_ids": [], "content_hashes": [],
        "num_errors": 0, "prompt_tokens": 0, "completion_tokens": 0, "worker_id": "w0",
    }  # fmt: skip
    manifest = RunManifest()
    manifest.fold_lines([json.dumps(line).encode()])
    assert list(manifest.parts) == ([name] if is_part else [])
    assert manifest.unreadable_lines == ([] if is_part else [1])


def test_line_that_is_nested_too_deep_is_unreadable() -> None:
    manifest = RunManifest()
    manifest.fold_lines([b"[" * 200_000])
    assert manifest.unreadable_lines == [1]
