"""Page of a report: figures equal to status and parts, no requests, a layout that fits."""

import json
import re
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Browser

from jobs.report import main
from jobs.status import as_json as status_json
from pipeline.dataset.parts import publish
from pipeline.dataset.run_record import list_in_manifest, read_history, read_manifest
from pipeline.live.estimate import folder_update
from pipeline.planner.estimate.figures import duration
from pipeline.report.page import report_page
from pipeline.report.report import Report, report_json, run_report
from pipeline.report.rows.figures import RowFigures
from pipeline.report.spending import Spending
from pipeline.report.status import run_status
from pipeline.store import lock
from pipeline.store.folder import LocalFolder
from pipeline.store.journal import append_events, event_of
from pipeline.store.run_folder import READINGS_FILE, RUN_FILE_COPY
from schemas.completion import Completion
from schemas.estimate import Band
from schemas.manifest import EngineRun
from schemas.prompt import Message
from tests.fakes.browser import opened
from tests.fakes.example_run import BEGAN_AT_S, LIMIT, write_example_run
from tests.fakes.known import known
from tests.fakes.page_reading import Figure, parsed
from tests.fakes.staged_part import stage_part

PHONE, DESK = 390, 1280
HOSTILE = "</title><script>document.title = 'taken'</script><img src=x onerror=alert(1)>\"'&amp;"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> LocalFolder:
    folder = LocalFolder(tmp_path_factory.mktemp("run") / "out")
    write_example_run(folder)
    return folder


@pytest.fixture(scope="module")
def report(folder: LocalFolder) -> Report:
    return run_report(folder, now_s=BEGAN_AT_S + 7230, state="running")


def at(values: Any, path: str) -> Any:  # noqa: ANN401  # any JSON value
    for key in path.split("."):
        values = values[int(key)] if isinstance(values, list | tuple) else values[key]
    return values


def assert_figures_are_those_of(figures: Iterable[Figure], values: dict[str, Any]) -> None:
    """Compare each text with its value, to the digits that it shows, at least two."""
    shown = 0
    for figure in figures:
        value = at(values, figure.path)
        number = re.fullmatch(r"-?([\d,]*\.?\d+)( %)?", figure.text.strip())
        assert number, figure
        text = number[1]
        found = float(text.replace(",", "")) / (100 if number[2] else 1)
        decimals = len(text.partition(".")[2]) + (2 if number[2] else 0)
        two_digits = 0.05 * abs(value) if not number[2] else 0.0
        exact = isinstance(value, int)
        tolerance = 0.0 if exact else max(0.5 * 10**-decimals, two_digits)
        assert abs(found - value) <= tolerance * 1.000001, (figure, value)
        shown += 1
    assert shown > 50


def test_page_agrees_with_the_status_and_the_parts(folder: LocalFolder, report: Report) -> None:
    page = report_page(report)
    values = json.loads(json.dumps(report_json(report)))
    reading = parsed(page)
    assert_figures_are_those_of(reading.figures, values)
    status = run_status(folder, now_s=BEGAN_AT_S + 7230, state="running")
    for name, value in status_json(status).items():
        if name != "failed":
            assert values["status"][name] == json.loads(json.dumps(value)), name
    paths = {figure.path for figure in reading.figures}
    assert {"status.rows_done", "status.completion_tokens", "spending.usd_to_go.p90"} <= paths
    assert {"limit_tokens", "reasoning.p95_tokens", "flags.1.share", "plan.3.measured"} <= paths
    assert duration(report.figures.elapsed_s) in reading.text


def test_sums_are_those_of_the_published_rows(folder: LocalFolder, report: Report) -> None:
    rows = [row for f in folder.path("data").iterdir() for row in pq.read_table(f).to_pylist()]
    turns = [turn for row in rows for turn in row["turns"]]
    found = report.figures
    assert found.num_turns == len(turns)
    assert found.num_cut == sum(turn["finish_reason"] == "length" for turn in turns)
    mean = sum(turn["completion_tokens"] for turn in turns) / len(turns)
    assert found.completion.mean_tokens == pytest.approx(mean, rel=0.005)
    assert found.reasoning.most_tokens == pytest.approx(
        max(turn["reasoning_tokens"] for turn in turns), rel=0.005
    )
    took = sorted((row["finished_at"] - row["started_at"]).total_seconds() for row in rows)
    assert [row.duration_s for row in found.slowest] == took[::-1][:10]
    flagged = [flag for row in rows for flag in row["flags"]]
    assert {flag.name: flag.rows for flag in found.flags} == {
        name: flagged.count(name) for name in set(flagged)
    }
    assert report.categories is not None
    assert len(report.categories.views) == 3
    for view in report.categories.views:
        count = view.count
        mine = [row for row in rows if row["category"] == view.name]
        assert count.num_rows == len(mine)
        assert count.num_flagged == sum(bool(row["flags"]) for row in mine)
    for engine in found.engines:
        mine = [row for row in rows if row["worker_id"].partition("r")[0] == engine.name]
        assert engine.rows == len(mine)


def test_starved_engine_is_shown_with_the_reason(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder)
    live = json.loads(folder.read("live.json"))
    live["workers"][1]["starved"] = "31 of 40 state slots are <taken>"
    folder.write_whole("live.json", json.dumps(live).encode())
    lock.acquire(folder, lock.this_process(), lambda _: None)
    report = run_report(folder, now_s=BEGAN_AT_S + 7230)
    reasons = [engine.starved for engine in report.figures.engines]
    assert reasons == [None, "31 of 40 state slots are <taken>", None]
    assert "starved: 31 of 40 state slots are &lt;taken&gt;" in report_page(report)


def test_requests_that_timed_out_are_counted_if_there_are_any(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder)
    assert "timed out" not in report_page(run_report(folder, now_s=BEGAN_AT_S + 7230))
    live = json.loads(folder.read("live.json"))
    live["workers"][0]["timeouts"], live["workers"][1]["timeouts"] = 1200, 34
    folder.write_whole("live.json", json.dumps(live).encode())
    lock.acquire(folder, lock.this_process(), lambda _: None)
    page = report_page(run_report(folder, now_s=BEGAN_AT_S + 7230))
    assert "; 1,234 requests timed out" in page


def test_bars_count_all_turns_and_the_limit_is_in_its_place(report: Report) -> None:
    (_, _, reasoning), (_, _, answer) = report.histograms
    for histogram in (reasoning, answer):
        assert sum(bar.count for bar in histogram.bars) == report.figures.num_turns
        assert histogram.num_beyond == 0
    assert (reasoning.limit and reasoning.limit.value) == LIMIT
    assert reasoning.limit is not None
    assert reasoning.limit.percent == pytest.approx(100 * LIMIT / (LIMIT + 1), abs=0.01)
    # The longest answer has far fewer tokens.
    assert (answer.limit, answer.limit_beyond) == (None, LIMIT)


def test_time_line_shows_restart_and_step_where_they_were(report: Report) -> None:
    lanes = {lane.name: [mark.left_percent for mark in lane.marks] for lane in report.lanes}
    assert lanes["engines lost or drained"] == [pytest.approx(49.8, abs=0.2)]
    assert lanes["stepped down"] == [pytest.approx(50.8, abs=0.2)]
    assert [lane.total for lane in report.lanes if lane.name == "engines came up"] == [4]
    second = report.figures.engines[1]
    assert (second.name, second.restarts, second.step_downs) == ("w1", 1, 1)
    assert second.cap_requests == 32
    assert second.running_requests is not None
    assert 0.9 * 32 < second.running_requests < 32


def test_dollars_are_gpu_hours_at_the_price(report: Report) -> None:
    spending = report.figures.spending
    assert isinstance(spending, Spending)
    # 7,230 s on 3 cards at $4.20: 6.025 GPU-hours.
    assert spending.gpu_hours == pytest.approx(7230 / 3600 * 3)
    assert spending.usd_so_far == pytest.approx(25.305)
    left = report.figures.time_left_s
    assert left is not None
    assert spending.usd_to_go is not None
    assert spending.usd_to_go.p50 == pytest.approx(left.p50 / 3600 * 3 * 4.2)


@pytest.mark.parametrize(
    ("hardware", "shown"),
    [
        ([{"gpu": "b200"}], "list price ("),
        ([], "w0 has not reported its card, and the run file's hardware names none"),
    ],
)
def test_page_says_whose_price_it_is_or_why_there_is_none(
    tmp_path: Path, hardware: list[dict[str, object]], shown: str
) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=6)
    config = json.loads(folder.read(RUN_FILE_COPY)) | {"hardware": hardware}
    folder.write_whole(RUN_FILE_COPY, json.dumps(config).encode())
    text = parsed(report_page(run_report(folder, now_s=now_s))).text
    assert shown in text
    assert "your own price" not in text


def test_card_that_the_readings_name_is_the_one_that_costs(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=6)
    first, *others = folder.read(READINGS_FILE).splitlines()
    run = json.loads(first) | {"cards": {"w0": "H200", "w1r1": "H200", "w2": "B200"}}
    folder.write_whole(READINGS_FILE, b"\n".join([json.dumps(run).encode(), *others]) + b"\n")
    report = run_report(folder, now_s=now_s)
    assert isinstance(report.figures.spending, Spending)
    bought = [(card.gpu, card.num_gpus) for card in report.figures.spending.cards]
    assert bought == [("B200", 1), ("H200", 2)]
    page = parsed(report_page(report))
    assert_figures_are_those_of(page.figures, json.loads(json.dumps(report_json(report))))


def test_page_has_the_time_left_of_the_status(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=6)
    live = json.loads(folder.read("live.json"))
    live["days_left"] = {"p10": 0.5, "p50": 1.0, "p90": 2.0}
    folder.write_whole("live.json", json.dumps(live).encode())
    figures = run_report(folder, now_s=now_s, state="running").figures
    assert figures.time_left_s == Band(p10=43_200, p50=86_400, p90=172_800)
    assert figures.status.eta_s == 86_400
    days = [row.measured for row in figures.plan if row.name == "time left from here"]
    assert days == [1.0]


def test_run_that_does_not_go_on_has_no_time_left(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=6)
    stopped = run_report(folder, now_s=now_s, state="stopped")
    assert (stopped.figures.status.eta_s, stopped.figures.time_left_s) == (None, None)
    assert "the run is not running" in report_page(stopped)
    folder.remove("live.json")
    begun = run_report(folder, now_s=now_s, state="running")
    assert begun.figures.time_left_s is None
    assert "no estimate yet" in report_page(begun)


def test_chart_of_the_duration_ends_with_the_run(report: Report) -> None:
    assert report.eta_chart is not None
    # 15,000 s, estimated rightly all along: 4.2 h, the band 10 % of the 7,800 s left.
    (line,) = report.eta_chart.lines
    assert line.name == "h"
    assert line.last == pytest.approx(15_000 / 3600)


def test_readings_that_cannot_be_read_leave_the_other_figures(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=6)
    folder.write_whole(READINGS_FILE, b"{]\n")
    spoilt = run_report(folder, now_s=now_s, state="running")
    assert (spoilt.by_readings, spoilt.eta_chart) == (False, None)
    assert spoilt.figures.status.rows_done == 48


def test_browser_shows_the_figures_and_runs_no_text(report: Report, browser: Browser) -> None:
    values = json.loads(json.dumps(report_json(report)))
    hostile = report_page(replace(report, model=HOSTILE))
    with opened(browser, report_page(report)) as shown, opened(browser, hostile) as attacked:
        for width in (PHONE, DESK):
            for page in (shown, attacked):
                page.show(width=width)
                assert page.width() == width
                assert_figures_are_those_of(page.figures(), values)
        assert attacked.page.title() == f"Run: {HOSTILE}"
        assert (attacked.requests, attacked.logged) == ([], [])


def test_long_plan_beside_them_leaves_headings_whole(report: Report, browser: Browser) -> None:
    plan = " ".join(["--mem-fraction-static 0.91"] * 12)
    engines = tuple(replace(engine, plan=plan) for engine in report.figures.engines)
    page = report_page(replace(report, figures=replace(report.figures, engines=engines)))
    with opened(browser, page) as shown:
        for width in (DESK, 760, PHONE):
            shown.show(width=width)
            assert not any(shown.faults().values()), shown.faults()


def test_cap_is_the_one_that_the_engines_reported(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder, num_parts=6)
    folder.remove(READINGS_FILE)
    for number, cap in enumerate((24, 20, 12)):
        list_in_manifest(folder, engine_run(f"w{number}", 99))
        list_in_manifest(folder, engine_run(f"w{number}r1", cap))
    found = run_report(folder, now_s=BEGAN_AT_S + 700, state="running")
    assert "cap 56 at the end" in parsed(report_page(found)).text
    (row,) = [row for row in found.figures.plan if row.name.startswith("requests in an engine")]
    assert row.planned == pytest.approx(56 / 3)


def engine_run(worker_id: str, cap: int) -> EngineRun:
    return EngineRun(
        worker_id=worker_id, engine="sglang", release="0.5.23", plan="--tp-size 1",
        max_running_requests=cap, ready_at_s=BEGAN_AT_S + 10,
    )  # fmt: skip


def test_texts_are_escaped_and_nothing_is_loaded(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=6)
    event = {"kind": HOSTILE, "at_s": now_s, "worker": HOSTILE, "text": HOSTILE}
    folder.append_line("events.jsonl", json.dumps(event).encode() + b"\n")
    reading = parsed(report_page(run_report(folder, now_s=now_s)))
    tags = {element.tag for element in reading.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "base"}
    assert reading.text.count("onerror=alert(1)") == 2
    asked = [
        e.attributes[a] for e in reading.elements for a in ("src", "href") if a in e.attributes
    ]
    assert asked == ["data:,"]


def test_texts_of_rows_are_escaped_folded_and_bounded(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder, num_parts=6)
    messages = (
        Message(role="user", content=f"Question {HOSTILE}"),
        Message(role="assistant", content=HOSTILE * 9000, reasoning_content=f"Thought {HOSTILE}"),
    )
    rows = [
        completion(f"{HOSTILE}{n}", messages=messages, flags=("refusal",), worker_id=HOSTILE)
        for n in range(100)
    ]
    rows += [
        completion(f"bad{n}", messages=messages[:1], error=True, error_text=HOSTILE * 100)
        for n in range(60)
    ]
    kept = pa.schema([("category", pa.string())])
    part = stage_part(folder, "z.parquet", rows, run_id="r", carried_schema=kept, worker_id="w0")
    publish(folder, part, now_s=BEGAN_AT_S + 720)
    page = report_page(run_report(folder, now_s=BEGAN_AT_S + 730, state="running"))
    reading = parsed(page)
    assert not {e.tag for e in reading.elements} & {"script", "img", "iframe"}
    groups = [e.attributes["data-group"] for e in reading.elements if "data-group" in e.attributes]
    assert groups == [
        "error",
        "failed",
        "looping",
        "refusal",
        "slowest",
        "random",
    ]
    assert "40 of 60, 20 left out" in reading.text
    assert f"Question {HOSTILE}" in reading.text
    assert f"Thought {HOSTILE}" in reading.text
    assert "characters left out" in reading.text
    assert len(page.encode()) < 700_000
    folded = [e.attributes for e in reading.elements if e.tag == "details"]
    assert all("open" not in attributes for attributes in folded)
    assert sum(attributes.get("class") == "reasoning" for attributes in folded) >= 33


def test_folder_of_a_run_without_readings_events_and_run_file_has_a_report(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=12, state="stopped")
    for name in (READINGS_FILE, RUN_FILE_COPY, "events.jsonl", "live.json"):
        folder.remove(name)
    report = run_report(folder, now_s=now_s + 9e6)
    text = parsed(report_page(report)).text
    assert report.figures.status.state == "interrupted"
    # The run has stopped: its time ends with its last part.
    assert report.span_s == pytest.approx(12 * 120)
    assert "from published rows" in text
    assert "rows between first request and end" in text
    assert "the folder has no copy of the run file" in text


def test_report_of_many_rows_keeps_no_row_in_memory(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder, num_parts=8, rows_a_part=500)
    rows = RowFigures()
    # Most classes of lengths occur in the first half.
    rows.read(folder, folder.names("data")[:4])
    tracemalloc.start()
    rows.read(folder, folder.names("data"))
    history = read_history(folder)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows.num_rows == 4000
    assert sum(part.num_rows for part in history.parts.values()) == 4000
    # Ids and hashes alone would be 250 KB; counts of lengths are what is left.
    assert kept_bytes < 200_000


def test_history_counts_as_the_manifest_does(folder: LocalFolder) -> None:
    history, manifest = read_history(folder), read_manifest(folder)
    assert history.rows_gained == manifest.rows_gained
    assert history.failed == manifest.failed
    assert history.canary == manifest.canary
    assert [p.name for p in history.session_parts] == [p.name for p in manifest.session_parts]
    for name, part in manifest.parts.items():
        assert history.parts[name].num_rows == part.num_rows
    assert len(history.canaries) == 2


def test_rows_are_read_once(folder: LocalFolder) -> None:
    rows = RowFigures()
    first = run_report(folder, now_s=BEGAN_AT_S + 7230, rows=rows).figures
    assert run_report(folder, now_s=BEGAN_AT_S + 7230, rows=rows).figures == first


def test_command_writes_the_page_and_refuses_a_folder_without_a_run(
    folder: LocalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    assert main([str(folder.root), "--html", str(target)]) == 0
    assert parsed(target.read_text()).figures
    assert main([str(folder.root), "--json"]) == 0
    printed = capsys.readouterr().out.removeprefix(f"{target}\n")
    assert json.loads(printed)["status"]["rows_done"] == 480
    assert main([str(tmp_path)]) == 2
    assert "no run here" in capsys.readouterr().err
    assert main([str(folder.root), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_many_engines_are_drawn_as_their_band(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=6)
    (first, second, *_, last) = list(folder.read_lines(READINGS_FILE))
    lines = [first, second]
    for number in range(50):
        values = json.loads(last) | {"engine": f"w{number}", "tokens_per_s": 100.0 + number}
        lines.append(json.dumps(values).encode())
    folder.write_whole(READINGS_FILE, b"\n".join(lines) + b"\n")
    report = run_report(folder, now_s=now_s)
    assert report.engine_charts.each is not None
    drawn = {line.name: line.last for line in report.engine_charts.each.lines}
    assert drawn == {"median of 50 engines": 124.0}
    assert len(report.engine_charts.each.bands) == 1
    assert report.engine_charts.total.lines[0].last == sum(range(100, 150))
    assert "and 10 more" in parsed(report_page(report)).text


def test_first_start_of_a_later_session_is_no_restart(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=6)
    session = replace(read_manifest(folder).sessions[0], session_id="s2", started_at_s=now_s + 100)
    list_in_manifest(folder, session)
    lines = [f"event=engine_ready worker=w{n}" for n in range(3)]
    events = [event_of(line, now_s=now_s + 110) for line in lines]
    append_events(folder, [event for event in events if event is not None])
    found = run_report(folder, now_s=now_s + 200, state="running").figures
    assert [engine.restarts for engine in found.engines] == [0, 1, 0]


def test_plan_table_compares_the_planned_rates_with_the_readings(
    report: Report, folder: LocalFolder, tmp_path: Path
) -> None:
    planned = {row.name: row for row in report.figures.plan}
    update = folder_update(folder, today=date(2026, 9, 21))
    (group,) = update.groups
    assert group.expected_tokens_per_s is not None
    rate = planned[f"tokens/s, {group.name}"]
    assert rate.planned == pytest.approx(group.expected_tokens_per_s.p50)
    # 45 + 30 + 45 requests at 25.5 tokens/s each, and one engine down for a time.
    assert rate.measured == pytest.approx(known(group.tokens_per_s).p50)
    assert 3000 < known(group.tokens_per_s).p50 < 3900
    assert {"time left from here", f"running requests in an engine, {group.name}"} <= planned.keys()
    spoilt = LocalFolder(tmp_path / "out")
    now_s = write_example_run(spoilt, num_parts=6)
    spoilt.write_whole(READINGS_FILE, b'{"record": "run", "began_at_s": 1.0, "run_file": {}}\n')
    names = {row.name for row in run_report(spoilt, now_s=now_s).figures.plan}
    assert "output tokens a turn" in names
    assert not any(name.startswith("tokens/s") for name in names)


def test_cap_without_a_report_of_the_engines_is_that_of_the_run_file(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder, num_parts=6)
    folder.remove(READINGS_FILE)
    report = run_report(folder, now_s=BEGAN_AT_S + 700, state="running")
    # 3 engines of 48 requests.
    assert report.engine_charts.running is not None
    cap, _ = report.engine_charts.running.lines
    assert (cap.name, cap.last) == ("cap", 144)


def test_page_reloads_itself_only_while_the_run_is_running(folder: LocalFolder) -> None:
    now_s = BEGAN_AT_S + 7230
    running, done = (run_report(folder, now_s=now_s, state=state) for state in ("running", "done"))
    assert '<meta http-equiv="refresh" content="180">' in report_page(running)
    assert "refresh" not in report_page(done)
    # The axis of a run that is done ends at all of its rows.
    assert running.rows_chart.axes.y_ticks[-1].value == 500
    assert done.rows_chart.axes.y_ticks[-1].value == 1000


def test_planned_figures_are_those_of_the_run_file(report: Report, folder: LocalFolder) -> None:
    planned = {row.name: (row.planned, row.measured) for row in report.figures.plan}
    parts = read_history(folder).parts.values()
    tokens = sum(part.prompt_tokens for part in parts)
    assert planned["prompt tokens a turn"] == (90, tokens / report.figures.num_turns)
    assert planned["output tokens a turn"][1] == report.figures.completion.mean_tokens
    assert planned["turns that reach the limit"][1] == (
        report.figures.num_cut / report.figures.num_turns
    )
    assert planned["accept length"][0] == 2.6
    assert planned["requests in an engine, of at most"][0] == 48


def test_cost_counts_each_session_up_to_its_last_part(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    write_example_run(folder, num_parts=6)
    session = replace(
        read_manifest(folder).sessions[0], session_id="s2", started_at_s=BEGAN_AT_S + 1000
    )
    list_in_manifest(folder, session)
    spending = run_report(folder, now_s=BEGAN_AT_S + 1180, state="running").figures.spending
    assert isinstance(spending, Spending)
    # Six parts up to second 720, then 180 s: 900 s on 3 cards.
    assert spending.gpu_hours == pytest.approx(900 / 3600 * 3)
