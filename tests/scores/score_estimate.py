"""Score the estimate on published rates: errors, width of the bands, and running requests.

`make estimate-score` prints the tables and fails when a threshold is missed. The readings lie in
`tests/data/throughput`: `readings.jsonl` holds rates, `running.jsonl` running batches. Rows that a
machine did not measure are printed beside the others and decide nothing.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.live.offset import MeasuredRate, rate_offset
from pipeline.models.facts import model_facts
from pipeline.models.files import find_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.lengths.shapes import LogNormalCut
from pipeline.planner.memory.launch import ResolvedLaunch, resolve_launch
from pipeline.planner.memory.sizing import Sized, assess
from pipeline.planner.rate.errors import CLASS_ERRORS
from pipeline.planner.rate.kernels import FITTED
from pipeline.planner.rate.replica import replica_of_launch
from pipeline.planner.rate.running import Resident, resident
from pipeline.planner.rate.throughput import Workload
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.releases import rules_for
from schemas.plan import LinearState, Moe
from tests.scores.throughput_readings import (
    DATA,
    Reading,
    left_out,
    median_percent,
    readings,
    scored,
    split,
)

# The half of an 80 % band, in standard deviations.
BAND_DEVIATIONS = 1.084
ANCHOR_WITHIN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A figure and its bounds."""

    name: str
    value: float
    least: float
    most: float
    count: int

    @property
    def kept(self) -> bool:
        """Return whether the figure is within its bounds."""
        return self.least <= self.value <= self.most

    def line(self) -> str:
        """Format one row of the table."""
        bounds = f"{self.least:g} to {self.most:g}" if self.least else f"≤ {self.most:g}"
        mark = "ok" if self.kept else "MISSED"
        return f"  {self.name:<62}{self.value:>8.2f} {bounds:<9} n={self.count:<4} {mark}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An observed running batch and the planner's."""

    row: Mapping[str, Any]
    found: Resident

    def off_percent(self) -> float:
        """Return the relative error of the forecast batch."""
        observed = float(self.row["running_requests"])
        return abs(self.found.running_requests / observed - 1) * 100


def main() -> int:
    """Print the tables. Returns 1 if a threshold is missed."""
    measured = scored()
    _print_readings(measured)
    _print_errors(measured)
    _print_coverage(measured)
    _print_anchors(measured)
    cells = running_cells()
    _print_running(cells)
    thresholds = [*rate_thresholds(measured), *running_thresholds(cells)]
    print("\nthresholds")
    for threshold in thresholds:
        print(threshold.line())
    return 0 if all(threshold.kept for threshold in thresholds) else 1


# --- thresholds -------------------------------------------------------------------------------


def rate_thresholds(measured: Sequence[Reading]) -> Iterator[Threshold]:
    """List thresholds on errors, bands and anchors of the rates."""
    _, score = split(measured)
    for name, rows, most in (
        ("bf16 dense and hybrid, median error, %", _bf16(measured), 12),
        ("all measured, median error, %", measured, 18),
        ("score part, median error, %", score, 18),
    ):
        value = median_percent(_errors(rows))
        yield Threshold(name=name, value=value, least=0, most=most, count=len(rows))
    for name, rows in (("all measured", measured), ("score part", score)):
        yield Threshold(
            name=f"{name}, inside the 80 % band, %",
            value=coverage(rows), least=72, most=88, count=len(rows),
        )  # fmt: skip
    anchors = anchor_errors(measured, same_work=False)
    yield Threshold(
        name="anchored within twice the batch, median error, %",
        value=median_percent(anchors), least=0, most=6, count=len(anchors),
    )  # fmt: skip
    yield Threshold(
        name="anchored within twice the batch, p90 of the error, %",
        value=_p90_percent(anchors), least=0, most=25, count=len(anchors),
    )  # fmt: skip


def running_thresholds(cells: Sequence[Running]) -> Iterator[Threshold]:
    """Return the threshold on the worst running batch."""
    worst = max(cell.off_percent() for cell in cells)
    yield Threshold(
        name="running batch, cap times occupancy, worst cell, %",
        value=worst, least=0, most=35, count=len(cells),
    )  # fmt: skip


def coverage(rows: Sequence[Reading]) -> float:
    """Return the percentage of rows inside their own 80 % band."""
    inside = [abs(row.error()) <= BAND_DEVIATIONS * row.rate().log_sd for row in rows]
    return 100 * sum(inside) / len(inside)


def _errors(rows: Sequence[Reading]) -> list[float]:
    return [row.error() for row in rows]


def _bf16(rows: Sequence[Reading]) -> list[Reading]:
    """Select dense models, and models with linear attention whatever their feed-forward layers."""
    return [row for row in rows if row.rate_class().startswith("bf16") and _dense_or_hybrid(row)]


def _dense_or_hybrid(row: Reading) -> bool:
    model = row.replica.model
    return isinstance(model.state, LinearState) or not isinstance(model.ffn, Moe)


def _p90_percent(errors: Sequence[float]) -> float:
    deciles = statistics.quantiles([abs(error) for error in errors], n=10, method="inclusive")
    return 100 * math.expm1(deciles[-1])


# --- anchors ----------------------------------------------------------------------------------

_SETTING = (
    "model", "gpu", "num_gpus", "tp_size", "dp_size", "dtype", "engine", "attention_backend", "mtp",
)  # fmt: skip
_WORK = ("version", "input_tokens", "output_tokens")


def anchor_errors(rows: Sequence[Reading], *, same_work: bool) -> list[float]:
    """Return the errors left with another reading of the same setting known, near in batch.

    A run's own readings are of its own prompts and its own release: `same_work`.
    """
    names = (*_SETTING, *_WORK) if same_work else _SETTING
    settings: dict[tuple[Any, ...], list[Reading]] = defaultdict(list)
    for row in rows:
        settings[tuple(row.row[name] for name in names)].append(row)
    return [
        _anchored_error(anchor, target)
        for members in settings.values()
        for anchor in members
        for target in members
        if anchor is not target and _near(anchor, target)
    ]


def _near(anchor: Reading, target: Reading) -> bool:
    ratio = anchor.running_requests / target.running_requests
    return 1 / ANCHOR_WITHIN <= ratio <= ANCHOR_WITHIN


def _anchored_error(anchor: Reading, target: Reading) -> float:
    known = MeasuredRate(
        running_requests=anchor.running_requests,
        tokens_per_s=anchor.row["tokens_per_s_per_gpu"],
        predicted_tokens_per_s=anchor.predicted(),
    )
    prior_sd = anchor.rate().log_sd
    offset = rate_offset([known], target.running_requests, prior_sd=prior_sd, reading_sd=0.0)
    return target.error() - offset.mean


# --- running batches --------------------------------------------------------------------------


def running_cells() -> list[Running]:
    """Compare the rows of running.jsonl with the plans of their launches."""
    lines = (DATA / "running.jsonl").read_text().splitlines()
    return [Running(row=row, found=_resident(row)) for row in map(json.loads, lines)]


def _resident(row: Mapping[str, Any]) -> Resident:
    launch = _launch(row)
    sized = assess(launch)
    assert isinstance(sized, Sized), row["id"]
    length = row["output_tokens"]
    work = Workload(
        prompt_tokens_mean=row["input_tokens"], output_tokens_mean=length, output_tokens_cv=0.0
    )
    equal = LogNormalCut(mu=math.log(length), sigma=0.0, limit_tokens=length)
    return resident(
        sized, replica_of_launch(launch, FITTED), work, equal, accept_length=row["accept_length"]
    )


def _launch(row: Mapping[str, Any]) -> ResolvedLaunch:
    gpu = gpu_named(row["gpu"])
    rules, _ = rules_for(row["version"])
    flags = parse_launch_line(row["argv"])
    files = find_model(row["model"])
    model = model_facts(
        row["model"], files.config, hf_quant=files.hf_quant, weights_format=row["weights_format"]
    )
    launch = resolve_launch(model, gpu, flags, rules)
    assert isinstance(launch, ResolvedLaunch), row["id"]
    return launch


# --- printing ---------------------------------------------------------------------------------


def _print_readings(measured: Sequence[Reading]) -> None:
    every = readings()
    modelled = sum(not row.measured() for row in every)
    unknown = len(_accept_unknown())
    print(f"{len(measured)} measured readings with every fact that the model needs")
    print(f"{unknown} measured with MTP, accept length not published: apart, below")
    print(f"{modelled} modelled by another program: for comparison alone, below")
    print("left out")
    for reason, count in left_out().most_common():
        print(f"  {count:>4}  {reason}")


def _accept_unknown() -> list[Reading]:
    return [row for row in readings() if row.measured() and not row.accept_known]


def _print_errors(measured: Sequence[Reading]) -> None:
    print(f"\nerror of the rate{'':<29}{'n':>5}{'median %':>10}{'bias %':>9}{'p90 %':>8}")
    for name, rows in _groups(measured):
        if len(rows) > 1:
            errors = _errors(rows)
            bias = 100 * math.expm1(statistics.median(errors))
            figures = f"{median_percent(errors):>10.1f}{bias:>+9.1f}{_p90_percent(errors):>8.1f}"
            print(f"  {name:<44}{len(rows):>5}{figures}")


def _groups(measured: Sequence[Reading]) -> Iterator[tuple[str, Sequence[Reading]]]:
    calibrate, score = split(measured)
    old = [row for row in measured if "older pages" in row.row["source"]]
    yield "all measured", measured
    yield "  without the cookbook's older pages", [row for row in measured if row not in old]
    yield "  the cookbook's older pages", old
    yield "calibrate part", calibrate
    yield "score part", score
    yield "bf16, dense and hybrid", _bf16(measured)
    for name in CLASS_ERRORS:
        for title, part in (("calibrate", calibrate), ("score", score)):
            yield f"{name}, {title}", [row for row in part if row.rate_class() == name]
    yield from _by("engine", measured, lambda row: str(row.row["engine"]))
    yield from _by("card", measured, lambda row: row.replica.gpu)
    yield "MTP, accept length assumed", _accept_unknown()
    yield "modelled by another program", [row for row in readings() if not row.measured()]


def _by(
    title: str, rows: Sequence[Reading], key: Callable[[Reading], str]
) -> Iterator[tuple[str, Sequence[Reading]]]:
    for value in sorted({key(row) for row in rows}):
        yield f"{title} {value}", [row for row in rows if key(row) == value]


def _print_coverage(measured: Sequence[Reading]) -> None:
    calibrate, score = split(measured)
    print(f"\ninside the 80 % band, %{'':<9}{'log sd':>7}{'all':>12}{'calibrate':>12}{'score':>12}")
    for name, error in CLASS_ERRORS.items():
        parts = [
            [row for row in part if row.rate_class() == name]
            for part in (measured, calibrate, score)
        ]
        print(f"  {name:<30}{error.log_sd:>7.2f}{''.join(_share(part) for part in parts)}")
    print(f"  {'all':<37}{''.join(_share(part) for part in (measured, calibrate, score))}")


def _share(rows: Sequence[Reading]) -> str:
    return f"{coverage(rows):.0f} of {len(rows)}".rjust(12) if rows else f"{'-':>12}"


def _print_anchors(measured: Sequence[Reading]) -> None:
    print("\none anchor of the same setting within twice the batch")
    for name, same_work in (("same release and lengths", True), ("any release and length", False)):
        errors = anchor_errors(measured, same_work=same_work)
        figures = f"median {median_percent(errors):>4.1f} %, p90 {_p90_percent(errors):>4.1f} %"
        print(f"  {name:<30}{figures}, n={len(errors)}")


def _print_running(cells: Sequence[Running]) -> None:
    print(
        f"\nrunning batch{'':<21}{'cap':>5}{'running':>9}{'observed':>10}{'ratio':>7}   limited by"
    )
    for cell in cells:
        observed, found = cell.row["running_requests"], cell.found
        ratio = found.running_requests / observed
        figures = f"{found.running_requests:>9.1f}{observed:>10.1f}{ratio:>7.2f}"
        print(f"  {cell.row['id']:<32}{found.cap_requests:>5}{figures}   {found.limited_by}")


if __name__ == "__main__":
    sys.exit(main())
