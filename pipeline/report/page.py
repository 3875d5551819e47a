"""Page of a run's report: one HTML file without network, scripts or fonts of its own.

The template lays out, `charts` places marks. An element that shows a figure names it: `data-figure`
is its path in `report_json`. All text is escaped.
"""

from datetime import UTC, datetime
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from pipeline.planner.estimate import figures
from pipeline.planner.estimate.figures import duration
from pipeline.planner.estimate.prices import OWN_PRICE
from pipeline.report.report import Report

_MOST_ENGINES_SHOWN = 40
# The page of a running run reloads itself.
REFRESH_S = 60


def report_page(report: Report) -> str:
    """Render the page."""
    return _template().render(
        report=report,
        run=report.figures,
        status=report.figures.status,
        engines=report.figures.engines[:_MOST_ENGINES_SHOWN],
        more_engines=max(0, len(report.figures.engines) - _MOST_ENGINES_SHOWN),
        own_price=OWN_PRICE,
        refresh_s=REFRESH_S if report.figures.status.state == "running" else None,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("pipeline.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(figures=figures, duration=duration)
    environment.filters["moment"] = _moment
    return environment.get_template("report.html.j2")


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
