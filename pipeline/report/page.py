"""Page of a run's report: one HTML file without network, scripts or fonts of its own.

The template lays out, `charts` places marks. An element that shows a figure names it: `data-figure`
is its path in `report_json`. All text is escaped.
"""

from datetime import UTC, datetime

from pipeline.planner.estimate import figures
from pipeline.planner.estimate.figures import duration
from pipeline.planner.estimate.prices import OWN_PRICE
from pipeline.report.report import EVENTS_SHOWN, Report
from pipeline.report.rows.categories import MOST_VALUES
from pipeline.report.rows.examples import FIRST_MESSAGES
from pipeline.report.rows.groups import ExampleGroup
from pipeline.report.shell import template

_MOST_ENGINES_SHOWN = 40
# The page of a running run reloads itself, about as often as the run writes it. A reload folds the
# rows that somebody reads, so it is no more often.
REFRESH_S = 180
# A larger ratio is shown as a multiple rather than as percent.
_TIMES_FROM = 3.0
_TITLES = {
    "error": "Error rows",
    "failed": "Failed rows",
    "slowest": "Slowest rows",
    "random": "Random rows",
}


def report_page(report: Report) -> str:
    """Render the page."""
    return template("report.html.j2").render(
        report=report,
        run=report.figures,
        status=report.figures.status,
        engines=report.figures.engines[:_MOST_ENGINES_SHOWN],
        more_engines=max(0, len(report.figures.engines) - _MOST_ENGINES_SHOWN),
        own_price=OWN_PRICE,
        pauses_by_reason=_pauses_by_reason(report),
        events_shown=EVENTS_SHOWN,
        most_values=MOST_VALUES,
        refresh_s=REFRESH_S if report.figures.status.state == "running" else None,
        duration=duration,
        difference=_difference,
        group_title=_group_title,
        group_note=_group_note,
        first_messages=FIRST_MESSAGES,
        moment=_moment,
    )


def _pauses_by_reason(report: Report) -> dict[str, float]:
    """Add up the pauses by reason, the longest first."""
    seconds: dict[str, float] = {}
    for pause in report.pauses:
        seconds[pause.reason] = seconds.get(pause.reason, 0.0) + pause.length_s
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _difference(ratio: float) -> str:
    """Format how much more one figure is than another."""
    return (
        f"{figures.two_figures(ratio)} times"
        if ratio >= _TIMES_FROM
        else f"{100 * (ratio - 1):+.0f} %"
    )


def _group_title(group: ExampleGroup) -> str:
    return f"Flagged {group.flag}" if group.flag else _TITLES[group.kind]


def _group_note(group: ExampleGroup) -> str:
    shown, total = figures.count(len(group.examples)), figures.count(group.total)
    match group.kind:
        case "random":
            return f"{shown} of {total} rows without an error, drawn with a fixed seed"
        case "slowest":
            return "from the first request to the end"
        case "flag":
            return f"{shown} of {total}, drawn with a fixed seed"
        case "error" | "failed":
            left_out = (
                f", {figures.count(group.num_left_out)} left out" if group.num_left_out else ""
            )
            retried = "; a resume retries them" if group.kind == "failed" else ""
            return f"{shown} of {total}{left_out}{retried}"


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
