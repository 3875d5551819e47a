"""The time left is one figure: every output has the one that the driver noted."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import estimate, status
from pipeline.console.progress import ProgressMeter
from pipeline.dataset.run_record import read_history
from pipeline.report.status import run_status
from pipeline.store import lock
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import LIVE_FILE
from schemas.estimate import Band
from schemas.progress import Progress
from schemas.units import SECONDS_PER_DAY
from tests.fakes.example_run import write_example_run

LEFT = Band(p10=0.25, p50=0.5, p90=1.5)


def running(tmp_path: Path, days_left: Band | None) -> tuple[LocalFolder, Progress]:
    """Return a run that a living driver reports on."""
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder, num_parts=6)
    session = read_history(folder).sessions[-1]
    # Reported by a clock ahead, so that no time has passed since.
    ahead_s = time.time() + 3600.0
    now = Progress(
        session_id=session.session_id, updated_at_s=ahead_s, state="running", rows_total=100,
        rows_done=50, rows_failed=0, rows_error=0, completion_tokens=0, last_publish_s=None,
        leases_lost=0, workers=(), days_left=days_left,
    )  # fmt: skip
    folder.write_whole(LIVE_FILE, now.to_json().encode())
    lock.acquire(folder, lock.this_process(), lambda _: None)
    return folder, now


def test_all_outputs_have_the_figure_of_the_driver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, now = running(tmp_path, LEFT)
    text = "12 h (6.0-36)"
    assert run_status(folder, now_s=time.time()).days_left == LEFT
    assert ProgressMeter().figures(now, 0.0).time_left == text
    assert status.main([str(folder.root)]) == 0
    assert f"time left  {text}" in capsys.readouterr().out
    assert status.main([str(folder.root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["eta_s"] == told["days_left"]["p50"] * SECONDS_PER_DAY == 43_200
    assert estimate.main(["--update-from", str(folder.root)]) == 0
    assert f"time left  {text}" in capsys.readouterr().out
    assert estimate.main(["--update-from", str(folder.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["days_left"] == told["days_left"]


def test_unknown_time_left_is_null_and_not_known_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, now = running(tmp_path, None)
    assert ProgressMeter().figures(replace(now), 0.0).time_left == "not known yet"
    assert status.main([str(folder.root)]) == 0
    assert "time left  not known yet" in capsys.readouterr().out
    assert status.main([str(folder.root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["eta_s"], told["days_left"]) == (None, None)
