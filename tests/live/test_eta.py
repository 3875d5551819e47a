"""The estimate that the driver makes while the job runs."""

from dataclasses import replace
from pathlib import Path

from pipeline.live.eta import LiveEta
from schemas.config import LengthsConfig
from schemas.progress import Progress
from tests.fakes.known import known
from tests.fakes.live_run import TODAY, filled_folder, run_file


def test_driver_takes_up_what_the_folder_says(tmp_path: Path) -> None:
    folder = filled_folder(tmp_path)
    config = run_file(tmp_path, engine={"kind": "embedded"}, sampling={"max_tokens": 200})
    config = config.model_copy(update={"lengths": LengthsConfig()})
    eta = LiveEta(folder=folder, config=config, today=TODAY)
    assert eta.estimate() is None
    progress = Progress(
        session_id="s", updated_at_s=1.0, state="running", rows_total=100, rows_done=30,
        rows_failed=0, rows_error=0, completion_tokens=0, last_publish_s=None, leases_lost=0,
        workers=(),
    )  # fmt: skip
    eta.follow(progress)
    first = eta.estimate()
    assert first is not None
    assert eta.days_left == first.days_left
    eta.follow(replace(progress, rows_done=90))
    later = eta.estimate()
    assert later is not None
    assert known(later.days_left).p50 < known(first.days_left).p50
    told = replace(progress, days_left=eta.days_left)
    assert Progress.from_json(told.to_json()) == told
    assert eta.take_events() == []
