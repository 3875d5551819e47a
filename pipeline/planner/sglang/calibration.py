"""Figures of an engine's launch log, which replace the planner's assumptions.

A log may be cut anywhere: what it lacks remains assumed. `readings` parses the text,
`calibration_of` keeps what later plans can use, `differences` compares a forecast with the log.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import PlanError
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import layout_name
from pipeline.untrusted.parsing import UnreadableError, json_object
from schemas.plan import Calibration, LaunchPlan
from schemas.units import GIB

_SIZES = ("free_before_load_bytes", "weights_bytes", "draft_weights_bytes", "graph_bytes")

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_BEGIN = re.compile(rf"Load weight begin\. avail mem={_NUMBER} GB")
_END = re.compile(rf"Load weight end\..*?avail mem={_NUMBER} GB(?:, mem usage={_NUMBER} GB)?")
_GRAPH = re.compile(rf"Capture .*?(?:CUDA|cuda) graph end\..*?mem usage={_NUMBER} GB")
_TOKENS = re.compile(r"max_total_num_tokens=(\d+)")
_KV_TOKENS = re.compile(r"KV Cache is allocated\..*?#tokens: (\d+)")
_SLOTS = re.compile(r"max_mamba_cache_size: (\d+)")
_REQUESTS = re.compile(r"max_running_requests=(\d+)")
_RANK = re.compile(r"\b(?:DP(\d+) )?(?:TP(\d+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReadings:
    """Figures of one log; None for those that it lacks."""

    free_before_load_gib: float | None
    weights_gib: float | None
    draft_weights_gib: float | None
    graphs_gib: float | None
    max_total_num_tokens: int | None
    state_slots: int | None
    max_running_requests: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A forecast and the log's own figure."""

    name: str
    forecast: float
    logged: float

    def percent(self) -> float:
        """Return the error of the forecast."""
        return (self.forecast / self.logged - 1) * 100 if self.logged else 0.0


def readings(log: str) -> LogReadings:
    """Return the figures of a launch log. Raises PlanError for a text without any."""
    ranks = _by_rank(log)
    begins = [_floats(_BEGIN, lines) for lines in ranks]
    ends = [_loads(lines) for lines in ranks]
    free = [values[0] for values in begins if values]
    weights = [loads[0] for loads in ends if loads]
    drafts = [loads[1] for loads in ends if len(loads) > 1]
    graphs = [sum(_floats(_GRAPH, lines)) for lines in ranks if _GRAPH.search(lines)]
    figures = LogReadings(
        # SGLang sizes its pools by the rank with the least free memory.
        free_before_load_gib=min(free, default=None),
        weights_gib=max(weights, default=None),
        draft_weights_gib=max(drafts, default=None),
        graphs_gib=max(graphs, default=None),
        max_total_num_tokens=_last(_TOKENS, log) or _first(_KV_TOKENS, log),
        state_slots=_first(_SLOTS, log),
        max_running_requests=_last(_REQUESTS, log),
    )
    if all(getattr(figures, name) is None for name in LogReadings.__slots__):
        raise PlanError("the log has no launch line of SGLang that the planner knows")
    return figures


def calibration_of(
    logged: LogReadings, *, model: str, gpu: str, release: str, layout: str | None = None
) -> Calibration:
    """Return the figures that later plans of the same model, card and release can use."""
    return Calibration(
        model=model,
        gpu=gpu,
        release=release,
        free_before_load_bytes=_bytes(logged.free_before_load_gib),
        weights_bytes=_bytes(logged.weights_gib),
        draft_weights_bytes=_bytes(logged.draft_weights_gib),
        graph_bytes=_bytes(logged.graphs_gib),
        layout=layout,
    )


def differences(plan: LaunchPlan, logged: LogReadings) -> tuple[Difference, ...]:
    """Compare the forecast with every figure that the log has."""
    capacity = plan.capacity
    pairs: list[tuple[str, float, float | None]] = [
        ("free_before_load_gib", plan.free_before_load_bytes / GIB, logged.free_before_load_gib),
        ("weights_gib", plan.weights_bytes / GIB, logged.weights_gib),
        ("draft_weights_gib", plan.draft_weights_bytes / GIB, logged.draft_weights_gib),
        ("max_total_num_tokens", capacity.max_total_num_tokens, logged.max_total_num_tokens),
        ("state_slots", capacity.state_slots, logged.state_slots),
        ("max_running_requests", capacity.max_running_requests, logged.max_running_requests),
    ]
    return tuple(
        Difference(name=name, forecast=round(forecast, 3), logged=figure)
        for name, forecast, figure in pairs
        if figure is not None
    )


def calibration_json(calibration: Calibration) -> dict[str, str | int | None]:
    """Return the record as it is saved."""
    return {name: getattr(calibration, name) for name in Calibration.__slots__}


def calibration_from_text(text: str, where: str) -> Calibration:
    """Return the calibration in the text of a saved file. Raises PlanError, naming `where`."""
    try:
        values = json_object(text)
    except UnreadableError as error:
        raise PlanError(f"{where} is {error}") from None
    try:
        return calibration_from_json(values)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def fits_layout(calibration: Calibration, flags: LaunchFlags) -> bool:
    """Return True where the calibration was measured with the ranks and stages of these flags."""
    return calibration.layout in (None, layout_name(flags))


def check_calibration(calibration: Calibration, *, model: str, gpu: str, release: str) -> None:
    """Raise PlanError for a calibration that was measured on something else."""
    for name, measured, planned in (
        ("model", calibration.model, model),
        ("gpu", calibration.gpu, gpu),
        ("release", calibration.release, release),
    ):
        if measured != planned:
            raise PlanError(
                f"the calibration is for {name} {measured!r}, the launch for {planned!r}"
            )


def calibration_from_json(values: dict[str, object]) -> Calibration:
    """Return the record of a saved file. Raises PlanError for wrong keys or types."""
    unknown = set(values) - set(Calibration.__slots__)
    missing = {"model", "gpu", "release"} - set(values)
    if unknown or missing:
        raise PlanError(f"not a saved calibration: {', '.join(sorted(unknown | missing))}")
    sizes: dict[str, int | None] = {}
    for name in _SIZES:
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise PlanError(f"the saved calibration has {name} = {value!r}; it must be bytes")
        sizes[name] = value
    return Calibration(
        model=str(values["model"]),
        gpu=str(values["gpu"]),
        release=str(values["release"]),
        free_before_load_bytes=sizes["free_before_load_bytes"],
        weights_bytes=sizes["weights_bytes"],
        draft_weights_bytes=sizes["draft_weights_bytes"],
        graph_bytes=sizes["graph_bytes"],
        layout=None if values.get("layout") is None else str(values["layout"]),
    )


# --- reading lines ----------------------------------------------------------------------------


def _by_rank(log: str) -> list[str]:
    """Split the log by the rank that wrote each line; one part where no rank is named."""
    parts: dict[str, list[str]] = {}
    for line in log.splitlines():
        rank = _RANK.search(line[:80])
        parts.setdefault(rank[0] if rank else "", []).append(line)
    return ["\n".join(lines) for lines in parts.values()]


def _loads(lines: str) -> list[float]:
    """Return the GiB of each load: the line's own figure, or begin minus end."""
    return list(_load_sizes(_floats(_BEGIN, lines), lines))


def _load_sizes(begins: list[float], lines: str) -> Iterator[float]:
    for index, end in enumerate(_END.finditer(lines)):
        if end[2] is not None:
            yield float(end[2])
        elif index < len(begins):
            yield begins[index] - float(end[1])


def _floats(pattern: re.Pattern[str], text: str) -> list[float]:
    return [float(found[1]) for found in pattern.finditer(text)]


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(found[1]) if found else None


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)
