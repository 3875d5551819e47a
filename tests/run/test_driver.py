"""The driver without Ray: how a session ends, and what stops it."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from pipeline.console.commands import command
from pipeline.console.console import LogConsole, open_console
from pipeline.errors import DriverLostError, EngineError
from pipeline.live.eta import LiveEta
from pipeline.live.log import LiveLog
from pipeline.quality.canary import Excess
from pipeline.run import driver
from pipeline.run.driver import SessionEnd, follow
from pipeline.run.session import SessionOptions, prepare
from pipeline.run.signals import catch_signals, exit_on_signals
from pipeline.store.event_line import EventLine, event_line
from pipeline.store.folder import LocalFolder
from pipeline.store.journal import read_events
from schemas.config.run_file import RunFile
from schemas.estimate import Band
from schemas.progress import Progress, WorkerState
from tests.fakes.example_report import run_progress, worker_report

BEGUN = run_progress(rows_total=10)


@dataclass(slots=True)
class ScriptedCluster:
    """Reports one progress after another, and is deserted from `deserted_from` polls on."""

    script: list[Progress]
    deserted_from: int = 99
    causes: list[str] = field(default_factory=list)
    are_unfit: bool = False
    polls: int = 0
    days_left: list[Band | None] = field(default_factory=list)

    @property
    def is_deserted(self) -> bool:
        return self.polls >= self.deserted_from

    def poll(self, days_left: Band | None) -> tuple[Progress, list[str]]:
        self.days_left.append(days_left)
        progress = self.script[min(self.polls, len(self.script) - 1)]
        self.polls += 1
        return progress, [f"event=poll number={self.polls}"]


@pytest.fixture
def eta(tmp_path: Path) -> LiveEta:
    config = RunFile.model_validate(
        {"prompts": {"path": "x"}, "model": "m", "output": {"folder": str(tmp_path)}}
    )
    return LiveEta(
        folder=LocalFolder(tmp_path), config=config, today=date(2026, 12, 1),
        newer_log=lambda seen: None, clock=lambda: 0.0,
    )  # fmt: skip


def never() -> bool:
    return False


def ignore(progress: Progress, events: list[str]) -> None:
    """Show nothing."""


def test_run_is_done_when_every_row_is_done_or_failed(
    eta: LiveEta, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Band(p10=1.0, p50=2.0, p90=3.0)
    monkeypatch.setattr(LiveEta, "days_left", left)
    almost = replace(BEGUN, rows_done=7, rows_failed=2)
    cluster = ScriptedCluster([BEGUN, almost, replace(almost, rows_done=8)])
    shown: list[tuple[int, list[str]]] = []
    ending = follow(
        cluster,
        [],
        never,
        lambda progress, events: shown.append((progress.rows_done, events)),
        eta,
    )
    assert ending == "done"
    assert shown == [(rows, [f"event=poll number={n}"]) for n, rows in ((1, 0), (2, 7), (3, 8))]
    assert cluster.days_left == [left] * 3


def test_run_that_is_done_is_not_stopped_by_a_late_signal(eta: LiveEta) -> None:
    done = replace(BEGUN, rows_done=10)
    assert follow(ScriptedCluster([done]), [signal.SIGTERM], never, ignore, eta) == "done"


def test_signal_stops_the_run(eta: LiveEta) -> None:
    cluster = ScriptedCluster([BEGUN])
    assert follow(cluster, [signal.SIGTERM], never, ignore, eta) == "stopped"
    assert cluster.polls == 1


def test_failed_canary_ends_the_run_even_with_every_row_done(eta: LiveEta) -> None:
    bad = replace(BEGUN, rows_done=10, canary="failed")
    assert follow(ScriptedCluster([bad]), [], never, ignore, eta) == "canary_failed"


def test_driver_that_lost_the_folder_stops(eta: LiveEta) -> None:
    with pytest.raises(DriverLostError, match="taken the output folder over"):
        follow(ScriptedCluster([BEGUN]), [], lambda: True, ignore, eta)


def test_run_without_any_engine_ever_is_an_error_with_each_cause_once(eta: LiveEta) -> None:
    starting = replace(BEGUN, workers=(worker_report(state="starting"),))
    cluster = ScriptedCluster([starting], deserted_from=2, causes=["no GPU", "no GPU"])
    with pytest.raises(EngineError) as error:
        follow(cluster, [], never, ignore, eta)
    assert str(error.value) == "no engine came up: no GPU"
    assert cluster.polls == 2


def test_run_whose_engines_all_break_the_contract_is_the_users_to_mend(eta: LiveEta) -> None:
    ran = replace(BEGUN, workers=(worker_report(state="running"),))
    cluster = ScriptedCluster([ran], deserted_from=1, causes=["a: no ids"] * 2, are_unfit=True)
    with pytest.raises(EngineError) as error:
        follow(cluster, [], never, ignore, eta)
    assert str(error.value) == "a: no ids"


def test_run_with_published_rows_ends_as_any_other_when_the_rest_break_the_contract(
    eta: LiveEta,
) -> None:
    published = replace(BEGUN, completion_tokens=1)
    cluster = ScriptedCluster([published], deserted_from=1, causes=["a: no ids"], are_unfit=True)
    assert follow(cluster, [], never, ignore, eta) == "failed"


@pytest.mark.parametrize("state", ["running", "idle"])
def test_run_whose_engines_are_gone_has_failed(eta: LiveEta, state: WorkerState) -> None:
    ran = replace(BEGUN, workers=(worker_report(state=state),))
    assert (
        follow(ScriptedCluster([ran, BEGUN], deserted_from=2), [], never, ignore, eta) == "failed"
    )


def test_published_tokens_show_that_an_engine_ran(eta: LiveEta) -> None:
    published = replace(BEGUN, completion_tokens=1)
    cluster = ScriptedCluster([published], deserted_from=1)
    assert follow(cluster, [], never, ignore, eta) == "failed"


# -- a session


@dataclass(slots=True)
class RecordedCluster(ScriptedCluster):
    """Keeps what the driver has it do."""

    calls: list[str] = field(default_factory=list)
    answers_at_end: bool = True
    dashboard: str | None = None

    @property
    def progress(self) -> Progress:
        return self.script[-1]

    def hire_all(self) -> None:
        self.calls.append("hire")

    def newer_log(self, num_seen: int) -> LiveLog | None:
        return None

    def drain(self, timeout_s: float) -> list[str]:
        self.calls.append(f"drain {timeout_s:g}")
        return ["event=partials_kept worker=w0 rows=3 of=3 tokens=9"]

    def close(self, state: str) -> Progress | None:
        self.calls.append(f"close {state}")
        return self.script[-1] if self.answers_at_end else None


@dataclass(slots=True)
class Driven:
    end: SessionEnd
    lines: list[str]
    endings: list[tuple[str, str]]


Drive = Callable[..., Driven]


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Drives a session of ten rows: `driven(cluster, rows_done=10)`."""

    def run(
        cluster: RecordedCluster,
        *,
        signals: tuple[int, ...] = (),
        console: LogConsole | None = None,
        **changes: Any,  # noqa: ANN401 - fields of Prepared
    ) -> Driven:
        prompts, folder = tmp_path / "p.jsonl", LocalFolder(tmp_path / "out")
        prompts.write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(10)))
        folder.make()
        config = RunFile.model_validate(
            {"prompts": {"path": str(prompts)}, "model": "m", "output": {"folder": folder.where}}
        )
        lines: list[str] = []
        prepared = prepare(config, folder, SessionOptions(), token="t", now_s=1.0, log=lines.append)
        session = replace(prepared.session, rows_done=changes.pop("rows_done", 0))
        prepared = replace(prepared, session=session, **changes)
        monkeypatch.setattr(driver, "open_cluster", lambda *_: nullcontext(cluster))
        monkeypatch.setattr(driver, "catch_signals", lambda: list(signals))
        display = console.display if console else lambda: nullcontext(ignore)
        log = console.log if console else lines.append
        end = driver.drive(folder, prepared, never, display, log)
        events = [event for event in read_events(folder) if event.kind.startswith("run_")]
        return Driven(end, lines, [(event.kind, event.text) for event in events])

    return run


def test_finished_session_is_closed_as_done_and_not_drained(driven: Drive) -> None:
    cluster = RecordedCluster([BEGUN, replace(BEGUN, rows_done=10)])
    found = driven(cluster)
    assert found.end.kind == "done"
    assert found.end.wall_s > 0
    assert cluster.calls == ["hire", "close done"]
    assert found.endings == [("run_done", "")]
    assert any(line.startswith("event=session rows=10 done=0 folder=") for line in found.lines)


@pytest.mark.parametrize(
    ("dashboard", "shown"),
    [
        ("http://10.0.0.1:8265", "http://10.0.0.1:8265"),
        (None, "none, because this Ray is the run's own"),
    ],
)
def test_start_logs_where_report_status_and_dashboard_are(
    driven: Drive, dashboard: str | None, shown: str
) -> None:
    cluster = RecordedCluster([replace(BEGUN, rows_done=10)], dashboard=dashboard)
    lines = driven(cluster).lines
    folder = lines[-2].rpartition("folder=")[2]
    assert event_line(lines[-1]) == EventLine(
        kind="look",
        fields={
            "report": f"{folder}/report.html",
            "status": command("jobs.status", folder, "--watch"),
            "dashboard": shown,
        },
    )


def test_without_a_terminal_every_line_has_time_level_component_and_event(
    driven: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = RecordedCluster([replace(BEGUN, rows_done=4)])
    with open_console("driver", "lines") as console:
        driven(cluster, signals=(signal.SIGTERM,), console=console)
    lines = capsys.readouterr().err.splitlines()
    form = re.compile(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d (INFO|WARNING) "
        r"(?:driver|worker) event=(\w+)( .*)?"
    )
    kinds = [found[2] for line in lines if (found := form.fullmatch(line))]
    assert kinds == ["session", "look", "poll", "partials_kept", "stopped", "published"]
    assert len(lines) == len(kinds)


def test_in_json_the_same_session_is_one_object_per_line(
    driven: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = RecordedCluster([replace(BEGUN, rows_done=4)])
    with open_console("driver", "json") as console:
        driven(cluster, signals=(signal.SIGTERM,), console=console)
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [each["event"] for each in records] == [
        "session",
        "look",
        "poll",
        "partials_kept",
        "stopped",
        "published",
    ]
    stopped = records[4]
    assert (stopped["by"], stopped["rows_done"], stopped["rows_total"]) == ("SIGTERM", 4, 10)
    assert (stopped["level"], stopped["component"]) == ("warning", "driver")


def test_stopped_session_is_drained_and_says_how_to_resume(driven: Drive) -> None:
    cluster = RecordedCluster([replace(BEGUN, rows_done=4)])
    found = driven(cluster, signals=(signal.SIGTERM, signal.SIGINT))
    assert (found.end.kind, found.end.signal) == ("stopped", signal.SIGTERM)
    assert cluster.calls == ["hire", "drain 2", "close stopped"]
    assert found.lines[-3:] == [
        "event=partials_kept worker=w0 rows=3 of=3 tokens=9",
        "event=stopped by=SIGTERM rows_done=4 rows_total=10",
        "event=published every finished row is published; the same command resumes",
    ]
    assert found.endings == [("run_stopped", "")]


def test_stop_without_the_coordinators_answer_warns_of_lost_rows(driven: Drive) -> None:
    cluster = RecordedCluster([replace(BEGUN, rows_done=4)], answers_at_end=False)
    found = driven(cluster, signals=(signal.SIGTERM,))
    assert "rows_done=4" in found.lines[-2]
    assert "rows finished since then may be lost" in found.lines[-1]


def test_failed_canary_is_drained_closed_as_stopped_and_noted_as_failed(driven: Drive) -> None:
    cluster = RecordedCluster([replace(BEGUN, canary="failed")])
    found = driven(cluster)
    assert found.end.kind == "canary_failed"
    assert cluster.calls == ["hire", "drain 2", "close stopped"]
    assert found.endings == [("run_failed", "the first rows are worse than the limits")]


def test_failed_session_names_each_cause_once(driven: Drive) -> None:
    ran = replace(BEGUN, completion_tokens=1)
    cluster = RecordedCluster([ran], deserted_from=1, causes=["a", "b", "a"])
    found = driven(cluster)
    assert (found.end.kind, found.end.causes) == ("failed", ("a", "b", "a"))
    assert cluster.calls == ["hire", "close failed"]
    assert found.endings == [("run_failed", "a; b")]


def test_session_without_open_rows_starts_nothing(driven: Drive) -> None:
    cluster = RecordedCluster([BEGUN])
    found = driven(cluster, rows_done=10)
    assert (found.end.kind, found.end.wall_s, cluster.calls) == ("done", 0.0, [])
    assert found.endings == [("run_done", "every row was done already")]


def test_canary_that_failed_before_starts_nothing(driven: Drive) -> None:
    cluster = RecordedCluster([BEGUN])
    over = (Excess(name="looping", found=0.5, limit=0.1, num_rows=5),)
    found = driven(cluster, excesses=over)
    assert (found.end.kind, cluster.calls) == ("canary_failed", [])
    assert found.endings == [("run_failed", "the first rows are worse than the limits")]


# -- signals


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of this process back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_before_engines_run_exits_at_once(number: signal.Signals) -> None:
    lines: list[str] = []
    exit_on_signals(lines.append)
    with pytest.raises(SystemExit) as left:
        os.kill(os.getpid(), number)
    assert left.value.code == 128 + number
    assert lines == [f"event=stopped by={number.name} nothing was started"]


@pytest.mark.usefixtures("handlers")
def test_signals_while_engines_run_are_noted_in_order() -> None:
    caught = catch_signals()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert caught == [signal.SIGINT, signal.SIGTERM]
