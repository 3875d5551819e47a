"""A run with readings: its run file, the spans of its workers, its folder."""

from datetime import date
from pathlib import Path

from pipeline.dataset.run_record import list_in_manifest, write_run
from pipeline.live.log import LogKeeper
from pipeline.store.folder import LocalFolder
from schemas.config.run_file import RunFile
from schemas.manifest import RunIdentity, RunRecord, Session
from schemas.progress import LiveSpan

TODAY = date(2026, 11, 30)


def run_file(folder: Path, **changes: object) -> RunFile:
    values: dict[str, object] = {
        "prompts": {"path": "prompts.jsonl"},
        "model": "Qwen/Qwen3.6-27B",
        "output": {"folder": str(folder)},
        "sampling": {"max_tokens": 32_768},
        "engine": {"kind": "sglang", "python": "python", "count": 2},
        "hardware": [{"gpu": "rtx-pro-6000", "count": 2, "usd_per_gpu_hour": 2.0}],
        "lengths": {
            "prompt_tokens_mean": 512.0, "output_tokens_mean": 2500.0, "output_tokens_cv": 1.2,
        },
    }  # fmt: skip
    return RunFile.model_validate(values | changes)


def span(**changes: object) -> LiveSpan:
    given: dict[str, object] = {
        "duration_s": 30.0, "engine_age_s": 0.0, "cap_requests": 8, "running_requests": 8.0,
        "tokens_per_s": 100.0, "prompt_tokens_per_s": 10.0, "accept_length": None,
        "counted_by": "answers", "finished": ((100, 2),), "running": ((50, 8),), **changes,
    }  # fmt: skip
    return LiveSpan(**given)  # type: ignore[arg-type]


def filled_folder(tmp_path: Path) -> LocalFolder:
    """A folder as a stopped run leaves it, 30 of 100 rows done."""
    folder = LocalFolder(tmp_path)
    limits = {"sampling": {"max_tokens": 200}, "lengths": {}}
    config = run_file(tmp_path, engine={"kind": "embedded"}, **limits)
    record = RunRecord(
        run_id="r", created_at_s=0, identity=RunIdentity(settings={}), carried_schema=""
    )
    write_run(folder, record)
    session = Session(
        session_id="s", started_at_s=1000.0, rows_total=100, rows_done=30, rows_error=0,
        rows_outside_input=0,
    )  # fmt: skip
    list_in_manifest(folder, session)
    keeper = LogKeeper.opened(folder, config, now_s=1000.0)
    for number in range(10):
        told = span(engine_age_s=30.0 * number, finished=((60, 1), (90, 1), (120, 1)))
        keeper.log.add("w0", told, now_s=1030.0 + 30.0 * number)
    keeper.write()
    return folder
