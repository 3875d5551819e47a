"""What a run's folder says of the run, put together for one page.

Reads the folder alone and writes nothing. Every figure that the page shows is a field here, under
the path that the page names it by. Memory is that of the manifest without ids (8 bytes a row), of
counts, and of one part's columns.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise

from pipeline.dataset.lengths import expected_lengths
from pipeline.dataset.run_record import RunHistory, read_history, read_run_file_copy
from pipeline.errors import ConfigError, PipelineError
from pipeline.live.estimate import config_of, expectation
from pipeline.live.log import LiveLog, read_live_log
from pipeline.live.update import RowCounts, run_update
from pipeline.report import charts as chart
from pipeline.report import series as series
from pipeline.report.engines import (
    EngineRow,
    ReportInput,
    caps_of_engines,
    engine_charts,
    engine_rows,
    mean_of,
)
from pipeline.report.rows import CategoryCount, RowFigures, SlowRow
from pipeline.report.spending import NoSpending, Spending, spending
from pipeline.report.status import run_status
from pipeline.store.folder import Folder
from pipeline.store.journal import RunEvent, read_events
from schemas.config import RunFile
from schemas.estimate import Band, GroupUpdate, LiveReading, RunUpdate
from schemas.manifest import Session
from schemas.progress import RunState, RunStatus
from schemas.units import SECONDS_PER_DAY

_LOST = ("engine_lost", "engine_failed", "worker_silent", "node_lost", "given_up", "engine_drained")
_STEPS = ("step_down",)
_NOTED = ("canary_passed", "canary_failed", "node_joined")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A figure that was expected, and what came of it."""

    name: str
    planned: float
    measured: float | None
    is_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of turns of one kind."""

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
    """All that is printed as a figure."""

    status: RunStatus
    elapsed_s: float
    """From the first session's start to the last thing that is known."""
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
    """One line of the time line."""

    name: str
    tone: str
    marks: tuple[tuple[float, str], ...]
    """Percent of the width, and what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The page's figures and charts."""

    model: str
    engine: str
    began_at_s: float
    now_s: float
    span_s: float
    figures: Figures
    rows_chart: chart.TimeChart
    eta_chart: chart.TimeChart | None
    rate_chart: chart.TimeChart
    engine_chart: chart.TimeChart | None
    running_chart: chart.TimeChart | None
    accept_chart: chart.TimeChart | None
    by_readings: bool
    """Whether rates are the engines' own counters, rather than what was published."""
    lanes: tuple[Lane, ...]
    events: tuple[RunEvent, ...]
    histograms: tuple[tuple[str, str, chart.Histogram], ...]
    """Name, its path in the figures, bars."""
    category_column: str | None
    categories: tuple[tuple[str, CategoryCount], ...]
    num_sessions: int


def run_report(
    folder: Folder, *, now_s: float, rows: RowFigures | None = None, state: RunState | None = None
) -> Report:
    """The report of the run in this folder. `rows` keeps what was read of parts for the next one.

    `state` is the driver's own word, where it is the driver that asks. Raises ConfigError for a
    folder that holds no run.
    """
    status = run_status(folder, now_s=now_s, state=state)
    history, rows = read_history(folder), rows or RowFigures()
    rows.read(folder, history.parts)
    return _assembled(folder, status, history, rows, now_s)


def report_json(report: Report) -> dict[str, object]:
    """The figures; paths on the page are paths in here."""
    return asdict(report.figures)


def _assembled(
    folder: Folder, status: RunStatus, history: RunHistory, rows: RowFigures, now_s: float
) -> Report:
    config = read_run_file_copy(folder)
    began_at_s = history.sessions[0].started_at_s
    until_s = _until_s(status, history, now_s)
    span_s = max(until_s - began_at_s, 1.0)
    parts = series.published(history, began_at_s)
    log = _live_log(folder)
    offset_s = log.began_at_s - began_at_s
    moved = [_on_our_clock(reading, offset_s) for reading in log.all_readings()]
    events = [event for event in read_events(folder) if 0 <= event.at_s <= until_s + 60]
    left = _time_left(status)
    seen = ReportInput(
        config=config, history=history, parts=parts, readings=moved, events=events, rows=rows,
        began_at_s=began_at_s, span_s=span_s,
    )  # fmt: skip
    charts = engine_charts(seen)
    reasoning, answer = rows.reasoning, rows.answer
    has_thinking = sum(n for tokens, n in reasoning.items() if tokens) > 0
    kinds = [("Reasoning", "reasoning", reasoning), ("Answer", "answer", answer)]
    drawn = kinds if has_thinking else [("Completion", "completion", rows.completion)]
    limit = config.sampling.max_tokens if config else None
    return Report(
        model=config.model if config else "a model that the folder does not name",
        engine=config.engine.kind if config else "",
        began_at_s=began_at_s,
        now_s=now_s,
        span_s=span_s,
        figures=Figures(
            status=status,
            elapsed_s=span_s,
            time_left_s=left,
            num_turns=rows.num_turns,
            num_cut=rows.num_cut,
            completion=_lengths(rows.completion),
            reasoning=_lengths(reasoning),
            answer=_lengths(answer),
            limit_tokens=limit,
            prompt_tokens=sum(part.prompt_tokens for part in history.parts.values()),
            flags=_flags(history, config),
            engines=engine_rows(seen, status),
            plan=(*_plan(seen), *dry_run_rows(folder, log, status, history, now_s=now_s)),
            spending=_spending(log, seen, status, left, now_s),
            slowest=tuple(rows.slowest),
        ),
        rows_chart=chart.time_chart(
            [chart.NamedLine(name="rows", tone="t0", points=series.rows_over_time(parts, span_s))],
            span_s,
            highest=float(status.rows_total if status.state == "done" else 0),
        ),
        eta_chart=_eta_chart(series.eta_points(log.times_left, offset_s, span_s), span_s),
        rate_chart=charts.in_all,
        engine_chart=charts.each,
        running_chart=charts.running,
        accept_chart=charts.accept,
        by_readings=bool(moved),
        lanes=_lanes(seen),
        events=tuple(events[-40:]),
        histograms=tuple(
            (name, path, chart.histogram(counts, limit)) for name, path, counts in drawn if counts
        ),
        category_column=rows.category_column if len(rows.categories) > 1 else None,
        categories=tuple(sorted(rows.categories.items())),
        num_sessions=len(history.sessions),
    )


def _until_s(status: RunStatus, history: RunHistory, now_s: float) -> float:
    if status.state in ("running", "unknown"):
        return now_s
    last = max((part.published_at_s for part in history.parts.values()), default=0.0)
    return max(last, history.sessions[-1].started_at_s)


def _on_our_clock(reading: LiveReading, offset_s: float) -> LiveReading:
    return replace(reading, start_s=reading.start_s + offset_s, end_s=reading.end_s + offset_s)


def _live_log(folder: Folder) -> LiveLog:
    """Return the engines' readings; an empty log where there are none that can be read."""
    try:
        log = read_live_log(folder)
    except ConfigError:
        # `jobs.estimate --update-from` says why; the report has its other rows.
        log = None
    return log or LiveLog(began_at_s=0.0, run_file={})


def _time_left(status: RunStatus) -> Band | None:
    if status.eta_s == 0:
        return Band(p10=0.0, p50=0.0, p90=0.0)
    return status.days_left.times(SECONDS_PER_DAY) if status.days_left else None


def _eta_chart(etas: Sequence[series.EtaPoint], span_s: float) -> chart.TimeChart | None:
    """The projected length of the run, in the unit of its own size."""
    if not etas:
        return None
    size_s, unit = chart.time_unit(etas[-1].total_s.p50)
    middle = [(point.at_s, point.total_s.p50 / size_s) for point in etas]
    band = [(p.at_s, p.total_s.p10 / size_s, p.total_s.p90 / size_s) for p in etas]
    line = chart.NamedLine(name=unit, tone="t0", points=middle)
    return chart.time_chart([line], span_s, band=band)


# --- the rest -----------------------------------------------------------------------------------


def _lengths(counts: Counter[int]) -> Lengths:
    return Lengths(
        turns=sum(counts.values()),
        mean_tokens=chart.mean(counts),
        p50_tokens=chart.quantile(counts, 0.5),
        p95_tokens=chart.quantile(counts, 0.95),
        most_tokens=max(counts, default=0),
    )


def _flags(history: RunHistory, config: RunFile | None) -> tuple[FlagShare, ...]:
    counts: Counter[str] = Counter()
    for part in history.parts.values():
        counts.update(dict(part.flag_counts))
    num_rows = sum(part.num_rows for part in history.parts.values())
    found = []
    for name, number in counts.most_common():
        setting = config.quality.flag(name) if config else None
        found.append(
            FlagShare(
                name=name,
                rows=number,
                share=number / num_rows,
                max_share=setting.max_share if setting else None,
                policy=setting.policy if setting else None,
            )
        )
    return tuple(found)


def _plan(seen: ReportInput) -> tuple[PlanRow, ...]:
    """What the run file expects of lengths and requests, beside what came."""
    config, rows = seen.config, seen.rows
    if config is None:
        return ()
    found = []
    if config.lengths.output_tokens_column is None and rows.completion:
        expected = expected_lengths(config).summary
        measured_mean = chart.mean(rows.completion)
        found += [
            PlanRow(
                name="output tokens a turn", planned=expected.mean_tokens, measured=measured_mean
            ),
            PlanRow(
                name="turns that reach the limit",
                planned=expected.at_limit_fraction,
                measured=rows.num_cut / rows.num_turns if rows.num_turns else None,
                is_share=True,
            ),
        ]
    if config.lengths.prompt_tokens_mean is not None and rows.num_turns:
        tokens = sum(part.prompt_tokens for part in seen.history.parts.values())
        found.append(
            PlanRow(
                name="prompt tokens a turn",
                planned=config.lengths.prompt_tokens_mean,
                measured=tokens / rows.num_turns,
            )
        )
    running = mean_of(seen.readings, "running_requests")
    caps = caps_of_engines(seen) or [config.engine.max_running_requests]
    cap = sum(caps) / len(caps)
    found.append(PlanRow(name="requests in an engine, of at most", planned=cap, measured=running))
    if config.estimate.accept_length is not None:
        accept = mean_of(seen.readings, "accept_length")
        found.append(
            PlanRow(name="accept length", planned=config.estimate.accept_length, measured=accept)
        )
    return tuple(found)


def _spending(
    log: LiveLog, seen: ReportInput, status: RunStatus, left: Band | None, now_s: float
) -> Spending | NoSpending:
    return spending(
        seen.config,
        slots=sorted({part.worker for part in seen.parts}),
        cards=log.cards,
        ran_s=_session_seconds(seen, status),
        left_s=left,
        today=datetime.fromtimestamp(now_s, UTC).date(),
    )


def _session_seconds(seen: ReportInput, status: RunStatus) -> float:
    """From each session's start to its last part; to the present for one that runs."""
    starts = [session.started_at_s - seen.began_at_s for session in seen.history.sessions]
    total_s = 0.0
    for start_s, next_s in pairwise([*starts, seen.span_s]):
        inside = [part.at_s for part in seen.parts if start_s <= part.at_s < next_s]
        is_last = next_s == seen.span_s
        total_s += (next_s if is_last else max(inside, default=start_s)) - start_s
    return total_s


def _lanes(seen: ReportInput) -> tuple[Lane, ...]:
    sessions = [(session.started_at_s, _session_text(session)) for session in seen.history.sessions]
    canaries = [(event.at_s, f"canary {event.verdict}") for event in seen.history.canaries]
    starts = [(e.at_s, f"{e.worker}: ready") for e in seen.events if e.kind == "engine_ready"]
    lost = [(e.at_s, _event_text(e)) for e in seen.events if e.kind in _LOST]
    steps = [(e.at_s, _event_text(e)) for e in seen.events if e.kind in _STEPS]
    noted = [(e.at_s, _event_text(e)) for e in seen.events if e.kind in _NOTED]
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
                (chart.percent(at_s - seen.began_at_s, seen.span_s), text) for at_s, text in marks
            ),
        )
        for name, tone, marks in lanes
    )


def _session_text(session: Session) -> str:
    return f"session began with {session.rows_done:,} of {session.rows_total:,} rows done"


def _event_text(event: RunEvent) -> str:
    return f"{event.kind.replace('_', ' ')}: {event.text}"


def dry_run_rows(
    folder: Folder, log: LiveLog, status: RunStatus, history: RunHistory, *, now_s: float
) -> tuple[PlanRow, ...]:
    """Rates, requests and days by the planner for the launch that came up, beside the readings.

    None where there are no readings, or nothing was planned that they could be held against.
    """
    if not log.readings:
        return ()
    try:
        found = _updated(folder, log, status, history, now_s)
    except PipelineError:
        # `jobs.estimate --update-from` says why; the report has its other rows.
        return ()
    rows = [row for group in found.groups for row in _of_group(group)]
    if found.expected_days_left is not None and found.days_left.p50 > 0:
        measured = status.days_left or found.days_left
        planned = found.expected_days_left.p50
        rows.append(PlanRow(name="days left from here", planned=planned, measured=measured.p50))
    return tuple(rows)


def _updated(
    folder: Folder, log: LiveLog, status: RunStatus, history: RunHistory, now_s: float
) -> RunUpdate:
    config = config_of(folder, log)
    launched = history.engines[-1].plan if history.engines else None
    today = datetime.fromtimestamp(now_s, UTC).date()
    counts = RowCounts(
        rows_total=status.rows_total, rows_done=status.rows_done, rows_failed=status.rows_failed
    )
    expected = expectation(folder, config, today=today, launched=launched)
    return run_update(log, config, counts, expected)


def _of_group(group: GroupUpdate) -> list[PlanRow]:
    rows = []
    if group.expected_tokens_per_s is not None:
        rows.append(
            PlanRow(
                name=f"tokens/s, {group.name}",
                planned=group.expected_tokens_per_s.p50,
                measured=group.tokens_per_s.p50,
            )
        )
    if group.expected_running_requests is not None:
        rows.append(
            PlanRow(
                name=f"running requests in an engine, {group.name}",
                planned=group.expected_running_requests,
                measured=group.running_requests,
            )
        )
    if group.expected_accept_length is not None and group.accept_length is not None:
        rows.append(
            PlanRow(
                name=f"accept length, {group.name}",
                planned=group.expected_accept_length,
                measured=group.accept_length,
            )
        )
    return rows
