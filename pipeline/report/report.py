"""Report of a run, read from its folder alone and put together for one page.

Each figure on the page is a field here, under the path that the page names it by. Memory is that
of the manifest without ids (8 bytes per row), of counts, and of one part's columns.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from pipeline.dataset.run_record import RunHistory, read_run_file_copy
from pipeline.errors import ConfigError
from pipeline.live.log import LiveLog, read_live_log
from pipeline.planner.estimate.figures import duration
from pipeline.report.charts.axes import axis_ticks
from pipeline.report.charts.bars import BandBar, band_bar, bar_scale
from pipeline.report.charts.histogram import Histogram, histogram
from pipeline.report.charts.lines import (
    LineChart,
    Series,
    Shade,
    Stretch,
    shades,
    time_chart,
    time_unit,
)
from pipeline.report.comparison import Comparison, MeasureBars, comparison, measure_bars
from pipeline.report.course import series
from pipeline.report.course.engine_charts import EngineCharts, engine_charts
from pipeline.report.course.engines import EngineRow, engine_rows
from pipeline.report.course.lanes import Lane, lanes
from pipeline.report.course.pauses import work_time
from pipeline.report.course.records import RunRecords, published
from pipeline.report.course.worktime import Pause
from pipeline.report.planned import PlanRow, plan_rows, run_estimate
from pipeline.report.rows.categories import CategoryCount
from pipeline.report.rows.figures import RowFigures, SlowRow
from pipeline.report.rows.groups import ExampleGroup, example_groups
from pipeline.report.rows.lengths import LengthCounts
from pipeline.report.spending import NoSpending, Spending, spending
from pipeline.report.status import begun_history, status_of
from pipeline.store.folder import Folder
from pipeline.store.journal import RunEvent, read_events
from schemas.estimate import Band, LiveReading, RunUpdate
from schemas.progress import RunState, RunStatus
from schemas.units import SECONDS_PER_DAY

EVENTS_SHOWN = 40
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
    worked_s: float
    """Elapsed time without pauses."""
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
    comparison: Comparison
    slowest: tuple[SlowRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryView:
    """Rows that share a value of a kept column, and the bar of their lengths."""

    name: str
    count: CategoryCount
    bar: BandBar
    """Completion tokens of a row, p10 to p90, on the common scale of all values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryTable:
    """Rows by a kept column."""

    column: str
    views: tuple[CategoryView, ...]
    scale_tokens: float
    """Tokens at the right end of the bars."""


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
    pauses: tuple[Pause, ...]
    pause_shades: tuple[Shade, ...]
    lanes: tuple[Lane, ...]
    events: tuple[RunEvent, ...]
    histograms: tuple[tuple[str, str, Histogram], ...]
    """Name, path in the figures, and bars of each histogram."""
    categories: CategoryTable | None
    groups: tuple[ExampleGroup, ...]
    time_bars: MeasureBars
    usd_bars: MeasureBars | None
    num_sessions: int


def run_report(
    folder: Folder, *, now_s: float, rows: RowFigures | None = None, state: RunState | None = None
) -> Report:
    """Report on the run in this folder. Raises ConfigError for a folder without a run.

    A caller that keeps `rows` reads each part once. The driver passes the state that it knows.
    """
    run = _read_run(folder, now_s, rows or RowFigures(), state)
    config, pauses = run.config, _pause_stretches(run)
    estimate = run_estimate(folder, run)
    figures = _figures(run, estimate)
    return Report(
        model=config.model if config else "a model that the folder does not name",
        engine=config.engine.kind if config else "",
        began_at_s=run.began_at_s,
        now_s=now_s,
        span_s=run.span_s,
        figures=figures,
        rows_chart=_rows_chart(run, pauses),
        eta_chart=_eta_chart(run, pauses),
        engine_charts=engine_charts(run, pauses),
        by_readings=bool(run.readings),
        pauses=tuple(run.work.pauses),
        pause_shades=shades(pauses, run.span_s),
        lanes=lanes(run),
        events=tuple(run.events[-EVENTS_SHOWN:]),
        histograms=_histograms(run),
        categories=_categories(run),
        groups=example_groups(folder, run.rows, run.status.failed),
        time_bars=measure_bars(figures.comparison.seconds),
        usd_bars=measure_bars(figures.comparison.usd) if figures.comparison.usd else None,
        num_sessions=len(run.history.sessions),
    )


def report_json(report: Report) -> dict[str, object]:
    """Return the figures; the paths on the page are paths in here."""
    return asdict(report.figures)


# --- reading ------------------------------------------------------------------------------------


def _read_run(folder: Folder, now_s: float, rows: RowFigures, state: RunState | None) -> RunRecords:
    history = begun_history(folder)
    status = status_of(folder, history, now_s=now_s, state=state)
    rows.read(folder, history.parts)
    began_at_s = history.sessions[0].started_at_s
    until_s = _until_s(status, history, now_s)
    log = _live_log(folder)
    events = read_events(folder)
    run = RunRecords(
        config=read_run_file_copy(folder),
        status=status,
        history=history,
        parts=published(history, began_at_s),
        log=log,
        readings=[_moved(reading, log.began_at_s - began_at_s) for reading in log.all_readings()],
        events=[event for event in events if 0 <= event.at_s <= until_s + _EVENT_GRACE_S],
        rows=rows,
        began_at_s=began_at_s,
        now_s=now_s,
        span_s=max(until_s - began_at_s, 1.0),
    )
    return replace(run, work=work_time(run))


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


def _figures(run: RunRecords, estimate: RunUpdate | None) -> Figures:
    rows, parts = run.rows, run.history.parts.values()
    left_s = _time_left(run.status)
    cost = spending(
        run.config,
        slots=sorted({part.worker for part in run.parts}),
        cards=run.log.cards,
        ran_s=run.session_s,
        left_s=left_s,
        today=datetime.fromtimestamp(run.now_s, UTC).date(),
    )
    return Figures(
        status=run.status,
        elapsed_s=run.span_s,
        worked_s=run.work.worked_s(0.0, run.span_s),
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
        plan=plan_rows(run, estimate),
        spending=cost,
        comparison=comparison(run, estimate, cost, left_s),
        slowest=tuple(rows.slowest),
    )


def _time_left(status: RunStatus) -> Band | None:
    if status.eta_s == 0:
        return Band(p10=0.0, p50=0.0, p90=0.0)
    return status.days_left.times(SECONDS_PER_DAY) if status.days_left else None


def _lengths(counts: LengthCounts) -> Lengths:
    return Lengths(
        turns=counts.turns,
        mean_tokens=counts.mean_tokens,
        p50_tokens=counts.quantile(0.5),
        p95_tokens=counts.quantile(0.95),
        most_tokens=counts.most_tokens,
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


# --- charts -------------------------------------------------------------------------------------


def _pause_stretches(run: RunRecords) -> list[Stretch]:
    return [
        (pause.start_s, pause.end_s, f"{pause.reason}, {duration(pause.length_s)}")
        for pause in run.work.pauses
    ]


def _rows_chart(run: RunRecords, pauses: Sequence[Stretch]) -> LineChart:
    rows = Series(name="rows", tone="t0", points=series.rows_over_time(run.parts, run.span_s))
    highest = run.status.rows_total if run.status.state == "done" else 0
    return time_chart([rows], run.span_s, highest=float(highest), shaded=pauses)


def _eta_chart(run: RunRecords, pauses: Sequence[Stretch]) -> LineChart | None:
    """Draw the estimated total duration in the unit of its own size."""
    offset_s = run.log.began_at_s - run.began_at_s
    etas = series.eta_points(run.log.times_left, offset_s, run.span_s)
    if not etas:
        return None
    unit_s, unit = time_unit(etas[-1].total_s.p50)
    middle = [(eta.at_s, eta.total_s.p50 / unit_s) for eta in etas]
    band = [(eta.at_s, eta.total_s.p10 / unit_s, eta.total_s.p90 / unit_s) for eta in etas]
    line = Series(name=unit, tone="t0", points=middle)
    return time_chart([line], run.span_s, band=band, shaded=pauses)


def _histograms(run: RunRecords) -> tuple[tuple[str, str, Histogram], ...]:
    """Draw reasoning and answers apart if any turn has reasoning, else whole completions."""
    rows, limit = run.rows, run.config.sampling.max_tokens if run.config else None
    if rows.reasoning.most_tokens:
        drawn = [("Reasoning", "reasoning", rows.reasoning), ("Answer", "answer", rows.answer)]
    else:
        drawn = [("Completion", "completion", rows.completion)]
    return tuple(
        (name, path, histogram(lengths.counts, limit))
        for name, path, lengths in drawn
        if lengths.turns
    )


def _categories(run: RunRecords) -> CategoryTable | None:
    if (shown := run.rows.categories.shown()) is None:
        return None
    column, counts = shown
    bands = {name: _band_of(count.lengths) for name, count in counts.items()}
    scale = max(axis_ticks(bar_scale(list(bands.values()))), key=lambda tick: tick.value).value
    views = tuple(
        CategoryView(name=name, count=count, bar=band_bar(bands[name], scale))
        for name, count in sorted(counts.items())
    )
    return CategoryTable(column=column, views=views, scale_tokens=scale)


def _band_of(lengths: LengthCounts) -> Band:
    p10, p50, p90 = (float(lengths.quantile(share)) for share in (0.1, 0.5, 0.9))
    return Band(p10=p10, p50=p50, p90=p90)
