"""Charts of a run's engines over time: rates, running requests, accept lengths. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from pipeline.report.charts.lines import BandPoints, LineChart, Series, Stretch, time_chart
from pipeline.report.course import series
from pipeline.report.course.engines import by_number, caps_of_engines
from pipeline.report.course.records import RunRecords
from pipeline.report.course.series import TimeSeries
from schemas.estimate import LiveReading

# Engines that get a line of their own in a chart; more are drawn as a band.
_MOST_LINES = 8
_NUM_STEPS = 120
# Age of the first parts; later ones are cut less often.
_PART_AGE_S = 60.0
# Engines that get a line beside the band: they differ from the median by at least this, and are as
# far from the quartiles as Tukey's rule says.
_MOST_OUTLIERS = 3
_OUTLIER_FRACTION = 0.15
_FENCE_IN_QUARTILES = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCharts:
    """Charts over time of all engines and of each one."""

    total: LineChart
    each: LineChart | None
    running: LineChart | None
    accept: LineChart | None


def engine_charts(run: RunRecords, pauses: Sequence[Stretch]) -> EngineCharts:
    """Draw the engines by their readings, else by what was published."""
    flush_s = (run.config and run.config.output.flush_interval_s) or _PART_AGE_S
    width_s = series.step_s(run.span_s, flush_s)
    by_engine = run.readings_by_engine()
    rates = _by_readings(run, by_engine, width_s, "tokens_per_s") or _published_rates(run, width_s)
    if rates:
        total = series.added(list(rates.values()))
    else:
        total = series.rates(run.parts, run.span_s, width_s, run.work)
    accept = _by_readings(run, by_engine, width_s, "accept_length")
    return EngineCharts(
        total=time_chart(
            [Series(name="all engines", tone="t0", points=total)], run.span_s, shaded=pauses
        ),
        each=_chart_of_each(rates, run.span_s, pauses) if len(rates) > 1 else None,
        running=_running_chart(run, by_engine, width_s, pauses),
        accept=_chart_of_each(accept, run.span_s, pauses) if accept else None,
    )


def _by_readings(
    run: RunRecords, by_engine: Mapping[str, Sequence[LiveReading]], width_s: float, field: str
) -> dict[str, TimeSeries]:
    """Average a field of the readings of each engine that has it."""
    return {
        name: series.of_readings(readings, run.span_s, width_s, field, run.work)
        for name, readings in by_engine.items()
        if any(getattr(reading, field) is not None for reading in readings)
    }


def _published_rates(run: RunRecords, width_s: float) -> dict[str, TimeSeries]:
    workers = sorted({part.worker for part in run.parts}, key=by_number)
    return {
        worker: series.rates(
            [part for part in run.parts if part.worker == worker], run.span_s, width_s, run.work
        )
        for worker in workers
    }


# --- each engine, or a band of many -------------------------------------------------------------


def _chart_of_each(
    values: Mapping[str, TimeSeries], span_s: float, pauses: Sequence[Stretch]
) -> LineChart:
    """Draw a line per engine; of many, their band, its median and the engines that differ."""
    names = sorted(values, key=by_number)
    if len(names) <= _MOST_LINES:
        lines = [
            Series(name=name, tone=f"t{place}", points=values[name])
            for place, name in enumerate(names)
        ]
        return time_chart(lines, span_s, shaded=pauses)
    ranked = [
        (points[0][0], sorted(value for _, value in points if value is not None))
        for points in zip(*values.values(), strict=True)
    ]
    middle = [(at_s, _ranked(at_time, 0.5)) for at_s, at_time in ranked]
    band: BandPoints = [
        (at_s, _ranked(at_time, 0.1), _ranked(at_time, 0.9)) for at_s, at_time in ranked
    ]
    lines = [Series(name=f"median of {len(names)} engines", tone="t0", points=middle)]
    lines += _outliers(values, middle)
    return time_chart(
        lines, span_s, band=band, band_name="p10 to p90 of the engines", shaded=pauses
    )


def _ranked(values: Sequence[float], share: float) -> float | None:
    return values[round(share * (len(values) - 1))] if values else None


def _outliers(values: Mapping[str, TimeSeries], middle: TimeSeries) -> list[Series]:
    """Return the engines that differ most from the median, where any does by much."""
    known = {name: _ratio(points, middle) for name, points in values.items()}
    ratios = {name: ratio for name, ratio in known.items() if ratio is not None}
    if len(ratios) < 2:
        return []
    low, _, high = quantiles(ratios.values(), n=4)
    reach = _FENCE_IN_QUARTILES * (high - low)
    far = [
        name
        for name, ratio in ratios.items()
        if abs(ratio - 1) >= _OUTLIER_FRACTION and not low - reach <= ratio <= high + reach
    ]
    farthest = sorted(far, key=lambda name: (-_distance(ratios[name]), by_number(name)))
    return [
        Series(name=_outlier_name(name, ratios[name]), tone=f"t{place + 1}", points=values[name])
        for place, name in enumerate(farthest[:_MOST_OUTLIERS])
    ]


def _ratio(points: TimeSeries, middle: TimeSeries) -> float | None:
    """Return an engine's mean ratio to the median of all."""
    ratios = [
        value / usual
        for (_, value), (_, usual) in zip(points, middle, strict=True)
        if value is not None and usual
    ]
    return fmean(ratios) if ratios else None


def _distance(ratio: float) -> float:
    return abs(math.log(ratio)) if ratio > 0 else math.inf


def _outlier_name(name: str, ratio: float) -> str:
    return f"{name}, {100 * abs(ratio - 1):.0f} % {'below' if ratio < 1 else 'above'} the median"


# --- running requests ---------------------------------------------------------------------------


def _running_chart(
    run: RunRecords,
    by_engine: Mapping[str, Sequence[LiveReading]],
    width_s: float,
    pauses: Sequence[Stretch],
) -> LineChart | None:
    """Draw the running requests of all engines against their caps."""
    if by_engine:
        running, caps = (
            series.added(list(_by_readings(run, by_engine, width_s, field).values()))
            for field in ("running_requests", "cap_requests")
        )
    else:
        changes = [(at - run.began_at_s, float(n)) for at, n in run.rows.in_flight()]
        if not changes:
            return None
        times = [run.span_s * n / _NUM_STEPS for n in range(_NUM_STEPS + 1)]
        running = series.stepped(changes, times)
        cap = _cap_of_run(run)
        caps = [(at, cap) for at in times]
    lines = [Series(name="cap", tone="t7", points=caps)] if caps[0][1] or by_engine else []
    lines.append(Series(name="running", tone="t0", points=running))
    return time_chart(lines, run.span_s, shaded=pauses)


def _cap_of_run(run: RunRecords) -> float | None:
    """Add the caps of the engines that started; without any, derive the sum from the run file."""
    caps = caps_of_engines(run)
    if caps or run.config is None:
        return float(sum(caps)) if caps else None
    number = run.config.engine.num_workers or len({part.worker for part in run.parts})
    return float(number * run.config.engine.max_running_requests)
