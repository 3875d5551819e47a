"""A run's own records: the run record and the manifest."""

import dataclasses
from pathlib import Path

import pytest

from pipeline.dataset import run_record
from pipeline.errors import ResumeError
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import RUN_FILE
from schemas.manifest import EngineRun, RunIdentity
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
