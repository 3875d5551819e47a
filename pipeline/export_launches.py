"""The engines that made a data set, as a table of its card: what was launched, and its rows. Pure.

A launch is told by its engine, release and plan: by the rows that bear them, and by the manifest's
list of engines that came up. What neither tells stays open.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.errors import PlanError
from pipeline.planner.launch_flags import LaunchFlags, parse_launch_line
from schemas.manifest import EngineRun

_MOST_LAUNCHES = 20
"""In the table; a run that steps down often has a long tail of launches with few rows."""
_OPEN = "not told"
_COLUMNS = (
    "Launch", "engine", "release", "tp", "pp", "dp", "mem_fraction_static", "requests at once",
    "MTP", "starts", "rows",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What an engine was launched with; engines that were launched alike are one."""

    engine: str
    release: str | None
    plan: str | None


def launch_lines(model: str, rows: Counter[Launch], engines: Iterable[EngineRun]) -> list[str]:
    """A section of the card: a line a launch, most rows first, then its flags."""
    starts: dict[Launch, list[EngineRun]] = {}
    for run in engines:
        launch = Launch(engine=run.engine, release=run.release, plan=run.plan)
        starts.setdefault(launch, []).append(run)
    launches = sorted({*rows, *starts}, key=lambda one: (-rows[one], repr(one)))
    if not launches:
        return []
    told, rest = launches[:_MOST_LAUNCHES], launches[_MOST_LAUNCHES:]
    numbered = list(enumerate(told, start=1))
    return [
        f"## Launches of {model}",
        "",
        _cells(_COLUMNS),
        _cells(["---"] * len(_COLUMNS)),
        *(_row(number, one, starts.get(one, []), rows[one]) for number, one in numbered),
        "",
        *(f"- launch {number}: `{one.plan}`" for number, one in numbered if one.plan),
        *([_rest(rest, rows)] if rest else []),
        "",
    ]


def _rest(rest: Sequence[Launch], rows: Counter[Launch]) -> str:
    return f"- {len(rest):,} other launches: {sum(rows[one] for one in rest):,} rows"


def _row(number: int, launch: Launch, starts: Sequence[EngineRun], num_rows: int) -> str:
    cells = [
        f"{number}",
        launch.engine,
        launch.release or _OPEN,
        *_settings(launch.plan, starts),
        f"{len(starts):,}" if starts else _OPEN,
        f"{num_rows:,}",
    ]
    return _cells(cells)


def _cells(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _settings(plan: str | None, starts: Sequence[EngineRun]) -> tuple[str, ...]:
    flags = _flags(plan)
    at_once = _at_once(flags, starts)
    if flags is None:
        return (_OPEN, _OPEN, _OPEN, _OPEN, at_once, _OPEN)
    return (
        flags.text("tp-size", "1"),
        flags.text("pp-size", "1"),
        flags.text("dp-size", "1"),
        flags.text("mem-fraction-static", "SGLang's own"),
        at_once,
        _mtp(flags),
    )


def _flags(plan: str | None) -> LaunchFlags | None:
    """None where there is no plan, and where it is one that cannot be read."""
    if plan is None:
        return None
    try:
        return parse_launch_line(plan.split())
    except PlanError:
        return None


def _at_once(flags: LaunchFlags | None, starts: Sequence[EngineRun]) -> str:
    """As the engines told when they came up, else as they were asked to."""
    found = sorted({run.max_running_requests for run in starts})
    if not found:
        return flags.text("max-running-requests", _OPEN) if flags else _OPEN
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def _mtp(flags: LaunchFlags) -> str:
    algorithm = flags.text("speculative-algorithm")
    if not algorithm:
        return "off"
    drafts = flags.text("speculative-num-draft-tokens")
    return f"{algorithm}, {drafts} drafts" if drafts else algorithm
