"""Metrics: the dashboard asks for names that are exported, and counters count what happened."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.util.metrics import Counter, Gauge

from pipeline.dataset.run_record import read_history
from pipeline.report.status import run_status
from pipeline.run.metrics import EXPORTED, METRICS, RunMetrics
from pipeline.store import lock
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import LIVE_FILE
from schemas.estimate import Band
from schemas.manifest import Part
from schemas.progress import Progress, WorkerReport
from tests.fakes.example_report import run_progress, worker_report
from tests.fakes.example_run import write_example_run

DASHBOARD = Path(__file__).resolve().parents[2] / "jobs" / "deploy" / "grafana-dashboard.json"
Told = list[tuple[str, float, dict[str, str]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Records what Ray gets, in order: a counter's step or a gauge's value."""
    found: Told = []

    def note(metric: Any, value: float, tags: dict[str, str]) -> None:  # noqa: ANN401
        found.append((metric.info["name"].removeprefix("regenerate_"), value, tags))

    monkeypatch.setattr(Counter, "inc", note)
    monkeypatch.setattr(Gauge, "set", note)
    return found


def progress(rows_done: int, *workers: WorkerReport) -> Progress:
    return run_progress(*workers, rows_done=rows_done, rows_failed=10, last_publish_s=90.0)


def values_of(told: Told, name: str) -> list[float]:
    return [value for found, value, _ in told if found == name]


def test_dashboard_asks_for_exported_names_alone() -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    names = {name for query in asked for name in re.findall(r"\bray_\w+", query)}
    assert names <= EXPORTED
    # Each is looked at somewhere.
    assert names == EXPORTED
    tags = {metric.exported: metric.tag for metric in METRICS}
    for query in asked:
        for tag in re.findall(r"\bby \((\w+)\)", query):
            assert {tags[name] for name in re.findall(r"\bray_\w+", query)} >= {tag}, query


def test_dashboards_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_part_is_counted_by_status_and_flag(told: Told) -> None:
    part = Part(
        name="p", size_bytes=0, row_ids=("a", "b", "c"), sample_indexes=(0, 0, 0),
        content_hashes=("", "", ""), num_errors=1, prompt_tokens=9, completion_tokens=70,
        worker_id="w0", flag_counts=(("looping", 2),),
    )  # fmt: skip
    RunMetrics(run_id="r").count_part(part)
    assert told == [
        ("rows", 2, {"status": "ok"}),
        ("rows", 1, {"status": "error"}),
        ("completion_tokens", 70, {}),
        ("prompt_tokens", 9, {}),
        ("flags", 2, {"flag": "looping"}),
    ]


def test_totals_of_workers_become_steps_and_one_that_left_has_none_in_flight(told: Told) -> None:
    metrics = RunMetrics(run_id="r")
    metrics.note_line("event=step_down cause=pool change='x' worker=w1")
    metrics.note_line("event=engine_ready worker=w1")
    metrics.update(
        progress(0, worker_report("w0", interruptions=3), worker_report("w1", restarts=1)),
        now_s=100.0,
    )
    metrics.update(progress(0, worker_report("w0", interruptions=5, in_flight=7)), now_s=102.0)
    assert values_of(told, "retries") == [3, 2]
    assert values_of(told, "restarts") == [1]
    assert [v for n, v, t in told if n == "ladder_step" and t == {"worker": "w1"}] == [1]
    assert told.count(("in_flight", 0, {"worker": "w1"})) == 2
    assert ("in_flight", 7, {"worker": "w0"}) in told
    assert values_of(told, "publish_lag_seconds") == [10.0, 12.0]


def test_eta_is_the_one_that_status_tells_once_engines_have_readings(
    told: Told, tmp_path: Path
) -> None:
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder, num_parts=6)
    began = read_history(folder).sessions[-1]
    left = Band(p10=0.25, p50=0.5, p90=1.5)
    reported_s = began.started_at_s + 100
    now = replace(
        progress(50), session_id=began.session_id, days_left=left, updated_at_s=reported_s
    )
    folder.write_whole(LIVE_FILE, now.to_json().encode())
    # A driver that lives: what it said last counts.
    lock.acquire(folder, lock.this_process(), lambda _: None)
    RunMetrics(run_id="r").update(now, now_s=100.0)
    status = run_status(folder, now_s=reported_s)
    assert values_of(told, "eta_seconds") == [0.5 * 86_400] == [status.eta_s]
    RunMetrics(run_id="r").update(replace(now, rows_done=90, state="done"), now_s=101.0)
    assert values_of(told, "eta_seconds")[-1] == 0.0


def test_eta_is_unknown_before_there_is_an_estimate_and_none_at_the_end(told: Told) -> None:
    metrics = RunMetrics(run_id="r")
    metrics.update(progress(20), now_s=100.0)
    assert values_of(told, "eta_seconds") == []
    metrics.update(replace(progress(90), rows_failed=10), now_s=1101.0)
    assert values_of(told, "eta_seconds") == [0.0]
