"""The shell of all pages: templates whose text is escaped, and what each of them may call."""

import shlex
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from pipeline.planner.estimate import figures

# A narrower segment of a stacked bar has its name only in the legend; on a phone, a wider one too.
_LABEL_FROM_PERCENT, _WIDE_FROM_PERCENT = 14.0, 24.0
# Budget rows with a colour of their own; all others share one.
_SEGMENT_COLOURS = {
    "weights": "weights",
    "draft weights": "draft",
    "state pool": "states",
    "verify states": "verify",
    "KV pool": "kv",
    "left over": "free",
    "kept free by mem_fraction_static": "free",
}


@cache
def template(name: str) -> Template:
    """Return a template of `templates/`."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pipeline.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        figures=figures,
        label_from_percent=_LABEL_FROM_PERCENT,
        wide_from_percent=_WIDE_FROM_PERCENT,
    )
    environment.filters["quoted"] = shlex.quote
    environment.filters["segment_colour"] = lambda name: _SEGMENT_COLOURS.get(name, "other")
    return environment
