"""A whole run that SIGTERM stops with rows in flight, and the run that continues them."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.fakes.running import Run, ended, new_run, questions, wait_until
from tests.fakes.word_tokenizer import write_word_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow]

STANDIN = Path(__file__).parents[1] / "fakes" / "standin_sglang.py"
NUM_ROWS = 20


def new_standin_run(folder: Path) -> Run:
    folder.mkdir()
    model = folder / "Qwen3.6-words"
    write_word_tokenizer(model)
    engine = {
        "kind": "sglang",
        "gpus": 0,
        "plan": "off",
        "max_running_requests": NUM_ROWS,
        "command": [sys.executable, "-I", str(STANDIN)],
        "env": {"STANDIN": json.dumps({"token_s": 0.1, "request_mib": 1.0})},
    }
    return new_run(folder, questions(NUM_ROWS), model=str(model), engine=engine)


def in_flight(run: Run) -> int:
    live = run.folder / "live.json"
    workers = json.loads(live.read_text())["workers"] if live.exists() else []
    return sum(worker["in_flight"] for worker in workers)


def test_run_that_is_stopped_with_rows_in_flight_loses_no_tokens(tmp_path: Path) -> None:
    run = new_standin_run(tmp_path / "stopped")
    process = run.start()
    wait_until(lambda: in_flight(run) == NUM_ROWS or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    stopped = ended(process)
    assert stopped.code == 128 + signal.SIGTERM, stopped.err
    assert f"event=partials_kept worker=w0 rows={NUM_ROWS} of={NUM_ROWS} " in stopped.err
    assert not run.ids()
    result = run.finish()
    assert result.code == 0, result.err
    assert "event=partials_found file=partials/begun-" in result.err
    rows = run.published().to_pylist()
    places = [place for row in rows for turn in row["turns"] for place in turn["continued"]]
    assert len(rows) == len(places) == NUM_ROWS
    assert run.status()["tokens_saved"] == sum(place["at_token"] for place in places) > 0
    assert not list((run.folder / "partials").iterdir())
    # That each row equals an undisturbed one is shown where workers do the same without Ray.
    assert all(turn["finish_reason"] == "stop" for row in rows for turn in row["turns"])
