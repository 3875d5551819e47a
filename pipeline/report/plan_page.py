"""Page of a plan: the memory of one card, the speed, and the launch lines with what each would run.

Every command is a block that one click selects. All text is escaped.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.planner.estimate import figures
from pipeline.planner.memory.plan import RefusedPlan
from pipeline.planner.memory.plan_output import tracked_advice
from pipeline.planner.rate.ranking import RatedPlan, RatedSearch
from pipeline.planner.sglang.flags import spelled_for
from pipeline.planner.sglang.releases import rules_for
from pipeline.report.charts import bars, rates
from pipeline.report.shell import template
from schemas.plan import Advice, BudgetRow, LaunchPlan, NoSpeculation
from schemas.units import GIB

_SERVER = ("python", "-m", "sglang.launch_server")
# Row of the memory table -> when it is taken; rows of the headroom are told by their names.
_WHEN = {
    "context, drivers, communicators": "before loading",
    "weights": "loading",
    "draft weights": "loading",
    "state pool": "setting up the pools",
    "verify states": "setting up the pools",
    "KV pool": "setting up the pools",
    "kept free by mem_fraction_static": "kept free",
    "left over": "never",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """A row of the memory table, and what is left of the card after it."""

    row: BudgetRow
    when: str
    left_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedLaunch:
    """A launch line that was tried, and what it would run."""

    title: str
    runs: str
    reason: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFacts:
    """Facts of the launch that its rate chart marks."""

    mtp: bool
    running_requests: float
    break_even_requests: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateView:
    """The rate chart of a search."""

    chart: rates.RateChart
    average: rates.Mark | None
    plan: RateFacts
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPage:
    """Contents of the page, as its template shows them."""

    model: str
    gpu: str
    release: str
    layout: str
    verdict: str
    stage: str | None
    messages: tuple[str, ...]
    command: tuple[str, ...]
    total_bytes: int
    segments: tuple[bars.Segment, ...]
    memory: tuple[MemoryItem, ...]
    capacity: tuple[str, ...]
    rate: RateView | None
    tried: tuple[TriedLaunch, ...]
    tried_note: str
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]


def launch_page(
    plan: LaunchPlan | RefusedPlan,
    environment: Mapping[str, str],
    search: RatedSearch | None,
    own: RatedPlan | None,
) -> str:
    """Render the page of one launch line.

    `own` is its speed, and `search` that of launches like it with MTP and without; each is None
    where it is not known.
    """
    advice = plan.advice if isinstance(plan, LaunchPlan) else _advice_of_refusal(plan)
    tried = tuple(_tried_advice(item, environment) for item in advice)
    rate = _rate_view(search, own) if search else None
    note = "changes to this one, and what each would run"
    return _rendered(plan, environment, rate, tried, note)


def search_page(search: RatedSearch, environment: Mapping[str, str]) -> str:
    """Render the page of a search: its best plan in full, then all plans."""
    tried = tuple(_tried_plan(plan, environment) for plan in search.plans)
    note = "the best of each kind, most tokens per dollar first, or most tokens without a price"
    best = search.plans[0]
    return _rendered(best.found.plan, environment, _rate_view(search, best), tried, note)


def _rendered(
    plan: LaunchPlan | RefusedPlan,
    environment: Mapping[str, str],
    rate: RateView | None,
    tried: tuple[TriedLaunch, ...],
    tried_note: str,
) -> str:
    shown = plan if isinstance(plan, LaunchPlan) else plan.with_tracked_states
    rows = shown.budget.rows if shown else ()
    page = PlanPage(
        model=plan.model,
        gpu=plan.gpu.name if isinstance(plan, RefusedPlan) else plan.gpu,
        release=plan.release if isinstance(plan, RefusedPlan) else plan.release_profile,
        layout=_layout(shown) if shown else "",
        verdict="does_not_fit" if isinstance(plan, RefusedPlan) else plan.verdict,
        stage=None if isinstance(plan, RefusedPlan) else plan.stage,
        messages=tuple(_messages(plan)),
        command=_command(plan.argv, environment, _release_of(plan)),
        total_bytes=shown.budget.total_bytes if shown else 0,
        segments=bars.stacked_segments(rows),
        memory=tuple(_memory(shown)) if shown else (),
        capacity=tuple(_capacity(shown)) if shown else (),
        rate=rate,
        tried=tried,
        tried_note=tried_note,
        warnings=shown.warnings if shown else (),
        assumptions=plan.assumptions,
    )
    return template("plan.html.j2").render(page=page)


# --- the launch -------------------------------------------------------------------------------


def _layout(plan: LaunchPlan) -> str:
    settings = plan.settings
    stages = f" x PP {settings.pp_size}" if settings.pp_size > 1 else ""
    default = "" if settings.mem_fraction_given else " (default)"
    fraction = f"static fraction {settings.mem_fraction_static:.3f}{default}"
    return f"TP {settings.tp_size}{stages}, {fraction}"


def _messages(plan: LaunchPlan | RefusedPlan) -> Iterator[str]:
    if plan.message:
        yield plan.message
    if isinstance(plan, RefusedPlan) and plan.with_tracked_states is not None:
        yield "Refused before loading. Below is the launch with the flag that lifts the refusal."


def _release_of(plan: LaunchPlan | RefusedPlan) -> tuple[int, int, int]:
    name = plan.release if isinstance(plan, RefusedPlan) else plan.release_profile
    return rules_for(name)[0].release


def _command(
    argv: Sequence[str], environment: Mapping[str, str], release: tuple[int, int, int]
) -> tuple[str, ...]:
    """Return the words of a whole command, quoted for a shell, as the release spells its flags."""
    assigned = (f"{name}={shlex.quote(value)}" for name, value in environment.items())
    return (*assigned, *map(shlex.quote, (*_SERVER, *spelled_for(argv, release))))


# --- memory -----------------------------------------------------------------------------------


def _memory(plan: LaunchPlan) -> Iterator[MemoryItem]:
    left = plan.budget.total_bytes
    for row in plan.budget.rows:
        is_rest = row.name == "left over"
        left -= 0 if is_rest else row.bytes
        yield MemoryItem(row=row, when=_when(row), left_bytes=left)


def _when(row: BudgetRow) -> str:
    if row.name in _WHEN:
        return _WHEN[row.name]
    return "capturing graphs" if "graphs" in row.name else "running"


def _capacity(plan: LaunchPlan) -> Iterator[str]:
    capacity = plan.capacity
    if capacity.max_total_num_tokens:
        yield (
            f"{capacity.max_total_num_tokens:,} KV tokens (± {plan.uncertainty_tokens:,}), "
            f"{capacity.state_slots:,} state slots, {capacity.max_running_requests:,} running "
            f"requests, limited by {capacity.limited_by}; "
            f"{plan.requests_at_expected_length:,} requests at the expected length"
        )


# --- speed ------------------------------------------------------------------------------------


def _rate_view(search: RatedSearch, own: RatedPlan | None) -> RateView | None:
    """Draw the search's curves, and mark the average of the page's own launch on its curve."""
    if not search.curves:
        return None
    chart = rates.rate_chart(search.curves, search.break_even_requests)
    marked = own or search.plans[0]
    mtp = not isinstance(marked.found.plan.settings.speculation, NoSpeculation)
    curve = next((curve for curve in search.curves if curve.mtp == mtp and curve.points), None)
    running = marked.resident.running_requests
    return RateView(
        chart=chart,
        average=rates.mark(curve, running, chart.axes) if own and curve else None,
        plan=RateFacts(
            mtp=mtp, running_requests=running, break_even_requests=search.break_even_requests
        ),
        note=_rate_note(search),
    )


def _rate_note(search: RatedSearch) -> str:
    ranks = search.plans[0].found.candidate.launch.ranks
    stages = f", PP {ranks.pp_size}" if ranks.pp_size > 1 else ""
    return (
        f"Both settings at TP {ranks.tp_size}{stages}, each with the memory fraction and limits "
        "that run the most requests, up to the number that its memory holds."
    )


# --- launch lines -----------------------------------------------------------------------------


def _tried_advice(advice: Advice, environment: Mapping[str, str]) -> TriedLaunch:
    # Advice spells its flags for the release already.
    words = (*_SERVER, *advice.argv) if advice.argv else ()
    assigned = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return TriedLaunch(
        title=f"{advice.flag} {advice.value}".strip(),
        runs=advice.effect,
        reason=advice.reason,
        command=(*assigned, *map(shlex.quote, words)) if words else (),
    )


def _advice_of_refusal(plan: RefusedPlan) -> tuple[Advice, ...]:
    other = plan.with_tracked_states
    return (tracked_advice(other), *other.advice) if other else ()


def _tried_plan(rated: RatedPlan, environment: Mapping[str, str]) -> TriedLaunch:
    found, plan = rated.found, rated.found.plan
    engines = f"{found.replicas} engine{'' if found.replicas == 1 else 's'}"
    left = plan.headroom_bytes - sum(item.bytes for item in plan.headroom_items)
    usd = rated.usd_per_million_tokens
    price = "" if usd is None else f", {figures.usd(usd)} per million tokens"
    running = figures.average(rated.resident.running_requests)
    return TriedLaunch(
        title=f"{found.hardware.count} x {found.hardware.gpu.name}: {engines}, {_layout(plan)}",
        runs=f"{figures.tokens_per_s(rated.tokens_per_s)} in all{price}; {running} of at most "
        f"{rated.resident.cap_requests:,} requests in each; {left / GIB:.1f} GiB left",
        reason=f"limited by {rated.resident.limited_by}",
        command=_command(plan.argv, environment, _release_of(plan)),
    )
