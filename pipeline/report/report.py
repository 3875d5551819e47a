"""Report of a run, read from its folder alone and put together for one page.

Each figure on the page is a field here, under the path that the page names it by. Memory is that
of the manifest without ids (8 bytes per row), of counts, and of one part's columns.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise

from pipeline.dataset.run_record import RunHistory, read_history, read_run_file_copy
from pipeline.errors import ConfigError
from pipeline.live.log import LiveLog, read_live_log
from pipeline.report import charts, series
from pipeline.report.charts import Histogram, LineChart, Series, time_chart
from pipeline.report.engines import EngineCharts, EngineRow, engine_charts, engine_rows
from pipeline.report.planned import PlanRow, plan_rows
from pipeline.report.rows import CategoryCount, RowFigures, SlowRow, mean, quantile
from pipeline.report.series import RunRecords
from pipeline.report.spending import NoSpending, Spending, spending
from pipeline.report.status import run_status
from pipeline.store.folder import Folder
from pipeline.store.journal import RunEvent, read_events
from schemas.estimate import Band, LiveReading
from schemas.manifest import Session
from schemas.progress import RunState, RunStatus
from schemas.units import SECONDS_PER_DAY

_LOST = ("engine_lost", "engine_failed", "worker_silent", "node_lost", "given_up", "engine_drained")
_NOTED = ("canary_passed", "canary_failed", "node_joined")
_EVENTS_SHOWN = 40
# Events of the end of a session are written shortly after its last part.
_EVENT_GRACE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of one kind of turns."""

    turns: int
    mean_tokens: float
    p50_tokens: int
    p95_tokens: int
    most_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagShare:
    """A quality flag over all published rows."""

    name: str
    rows: int
    share: float
    max_share: float | None
    policy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of the page."""

    status: RunStatus
    elapsed_s: float
    """Time from the first session's start to the present, or to the last publication."""
    time_left_s: Band | None
    num_turns: int
    num_cut: int
    completion: Lengths
    reasoning: Lengths
    answer: Lengths
    limit_tokens: int | None
    prompt_tokens: int
    flags: tuple[FlagShare, ...]
    engines: tuple[EngineRow, ...]
    plan: tuple[PlanRow, ...]
    spending: Spending | NoSpending
    slowest: tuple[SlowRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of the time line."""

    name: str
    tone: str
    marks: tuple[tuple[float, str], ...]
    """Pairs of percent of the width and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures and charts of the page."""

    model: str
    engine: str
    began_at_s: float
    now_s: float
    span_s: float
    figures: Figures
    rows_chart: LineChart
    eta_chart: LineChart | None
    engine_charts: EngineCharts
    by_readings: bool
    """True if rates come from the engines' counters, false if from published parts."""
    lanes: tuple[Lane, ...]
    events: tuple[RunEvent, ...]
    histograms: tuple[tuple[str, str, Histogram], ...]
    """Name, path in the figures, and bars of each histogram."""
    category_column: str | None
    categories: tuple[tuple[str, CategoryCount], ...]
    num_sessions: int


def run_report(
    folder: Folder, *, now_s: float, rows: RowFigures | None = None, state: RunState | None = None
) -> Report:
    """Report on the run in this folder. Raises ConfigError for a folder without a run.

    A caller that keeps `rows` reads each part once. The driver passes the state that it knows.
    """
    run = _read_run(folder, now_s, rows or RowFigures(), state)
    rows, config = run.rows, run.config
    return Report(
        model=config.model if config else "a model that the folder does not name",
        engine=config.engine.kind if config else "",
        began_at_s=run.began_at_s,
        now_s=now_s,
        span_s=run.span_s,
        figures=_figures(folder, run),
        rows_chart=_rows_chart(run),
        eta_chart=_eta_chart(run),
        engine_charts=engine_charts(run),
        by_readings=bool(run.readings),
        lanes=_lanes(run),
        events=tuple(run.events[-_EVENTS_SHOWN:]),
        histograms=_histograms(run),
        category_column=rows.category_column if len(rows.categories) > 1 else None,
        categories=tuple(sorted(rows.categories.items())),
        num_sessions=len(run.history.sessions),
    )


def report_json(report: Report) -> dict[str, object]:
    """Return the figures; the paths on the page are paths in here."""
    return asdict(report.figures)


# --- reading ------------------------------------------------------------------------------------


def _read_run(folder: Folder, now_s: float, rows: RowFigures, state: RunState | None) -> RunRecords:
    status = run_status(folder, now_s=now_s, state=state)
    history = read_history(folder)
    rows.read(folder, history.parts)
    began_at_s = history.sessions[0].started_at_s
    until_s = _until_s(status, history, now_s)
    log = _live_log(folder)
    events = read_events(folder)
    return RunRecords(
        config=read_run_file_copy(folder),
        status=status,
        history=history,
        parts=series.published(history, began_at_s),
        log=log,
        readings=[_moved(reading, log.began_at_s - began_at_s) for reading in log.all_readings()],
        events=[event for event in events if 0 <= event.at_s <= until_s + _EVENT_GRACE_S],
        rows=rows,
        began_at_s=began_at_s,
        now_s=now_s,
        span_s=max(until_s - began_at_s, 1.0),
    )


def _until_s(status: RunStatus, history: RunHistory, now_s: float) -> float:
    if status.state in ("running", "unknown"):
        return now_s
    last = max((part.published_at_s for part in history.parts.values()), default=0.0)
    return max(last, history.sessions[-1].started_at_s)


def _live_log(folder: Folder) -> LiveLog:
    """Read the engines' readings; return an empty log if there are none that can be read."""
    try:
        log = read_live_log(folder)
    except ConfigError:
        # `jobs.estimate --update-from` reports the reason; the page has its other figures.
        log = None
    return log or LiveLog(began_at_s=0.0, run_file={})


def _moved(reading: LiveReading, offset_s: float) -> LiveReading:
    return replace(reading, start_s=reading.start_s + offset_s, end_s=reading.end_s + offset_s)


# --- figures ------------------------------------------------------------------------------------


def _figures(folder: Folder, run: RunRecords) -> Figures:
    rows, parts = run.rows, run.history.parts.values()
    left_s = _time_left(run.status)
    return Figures(
        status=run.status,
        elapsed_s=run.span_s,
        time_left_s=left_s,
        num_turns=rows.num_turns,
        num_cut=rows.num_cut,
        completion=_lengths(rows.completion),
        reasoning=_lengths(rows.reasoning),
        answer=_lengths(rows.answer),
        limit_tokens=run.config.sampling.max_tokens if run.config else None,
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        flags=_flags(run),
        engines=engine_rows(run),
        plan=plan_rows(folder, run),
        spending=spending(
            run.config,
            slots=sorted({part.worker for part in run.parts}),
            cards=run.log.cards,
            ran_s=_session_seconds(run),
            left_s=left_s,
            today=datetime.fromtimestamp(run.now_s, UTC).date(),
        ),
        slowest=tuple(rows.slowest),
    )


def _time_left(status: RunStatus) -> Band | None:
    if status.eta_s == 0:
        return Band(p10=0.0, p50=0.0, p90=0.0)
    return status.days_left.times(SECONDS_PER_DAY) if status.days_left else None


def _lengths(counts: Counter[int]) -> Lengths:
    return Lengths(
        turns=sum(counts.values()),
        mean_tokens=mean(counts),
        p50_tokens=quantile(counts, 0.5),
        p95_tokens=quantile(counts, 0.95),
        most_tokens=max(counts, default=0),
    )


def _flags(run: RunRecords) -> tuple[FlagShare, ...]:
    parts = run.history.parts.values()
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(dict(part.flag_counts))
    num_rows = sum(part.num_rows for part in parts)
    shares = []
    for name, count in counts.most_common():
        setting = run.config.quality.flag(name) if run.config else None
        shares.append(
            FlagShare(
                name=name,
                rows=count,
                share=count / num_rows,
                max_share=setting.max_share if setting else None,
                policy=setting.policy if setting else None,
            )
        )
    return tuple(shares)


def _session_seconds(run: RunRecords) -> float:
    """Add the sessions' times, each up to its last part, the last one up to the end of the span."""
    starts = [session.started_at_s - run.began_at_s for session in run.history.sessions]
    total_s = 0.0
    for start_s, next_s in pairwise([*starts, run.span_s]):
        inside = [part.at_s for part in run.parts if start_s <= part.at_s < next_s]
        is_last = next_s == run.span_s
        total_s += (next_s if is_last else max(inside, default=start_s)) - start_s
    return total_s


# --- charts -------------------------------------------------------------------------------------


def _rows_chart(run: RunRecords) -> LineChart:
    rows = Series(name="rows", tone="t0", points=series.rows_over_time(run.parts, run.span_s))
    highest = run.status.rows_total if run.status.state == "done" else 0
    return time_chart([rows], run.span_s, highest=float(highest))


def _eta_chart(run: RunRecords) -> LineChart | None:
    """Draw the estimated total duration in the unit of its own size."""
    offset_s = run.log.began_at_s - run.began_at_s
    etas = series.eta_points(run.log.times_left, offset_s, run.span_s)
    if not etas:
        return None
    unit_s, unit = charts.time_unit(etas[-1].total_s.p50)
    middle = [(eta.at_s, eta.total_s.p50 / unit_s) for eta in etas]
    band = [(eta.at_s, eta.total_s.p10 / unit_s, eta.total_s.p90 / unit_s) for eta in etas]
    return time_chart([Series(name=unit, tone="t0", points=middle)], run.span_s, band=band)


def _histograms(run: RunRecords) -> tuple[tuple[str, str, Histogram], ...]:
    """Draw reasoning and answers apart if any turn has reasoning, else whole completions."""
    rows, limit = run.rows, run.config.sampling.max_tokens if run.config else None
    if any(tokens for tokens, turns in rows.reasoning.items() if turns):
        drawn = [("Reasoning", "reasoning", rows.reasoning), ("Answer", "answer", rows.answer)]
    else:
        drawn = [("Completion", "completion", rows.completion)]
    return tuple(
        (name, path, charts.histogram(counts, limit)) for name, path, counts in drawn if counts
    )


def _lanes(run: RunRecords) -> tuple[Lane, ...]:
    sessions = [(session.started_at_s, _session_text(session)) for session in run.history.sessions]
    canaries = [(event.at_s, f"canary {event.verdict}") for event in run.history.canaries]
    starts = [(e.at_s, f"{e.worker}: ready") for e in run.events if e.kind == "engine_ready"]
    lost = [(e.at_s, _event_text(e)) for e in run.events if e.kind in _LOST]
    steps = [(e.at_s, _event_text(e)) for e in run.events if e.kind == "step_down"]
    noted = [(e.at_s, _event_text(e)) for e in run.events if e.kind in _NOTED]
    lanes = (
        ("sessions, canary, nodes", "t0", [*sessions, *canaries, *noted]),
        ("engines ready", "t1", starts),
        ("lost or drained", "bad", lost),
        ("stepped down", "t2", steps),
    )
    return tuple(
        Lane(
            name=name,
            tone=tone,
            marks=tuple(
                (charts.percent(at_s - run.began_at_s, run.span_s), text) for at_s, text in marks
            ),
        )
        for name, tone, marks in lanes
    )


def _session_text(session: Session) -> str:
    return f"session began with {session.rows_done:,} of {session.rows_total:,} rows done"


def _event_text(event: RunEvent) -> str:
    return f"{event.kind.replace('_', ' ')}: {event.text}"
