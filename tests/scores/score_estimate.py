"""Score the estimate on published rates: errors, width of the bands, and running requests.

`make estimate-score` prints the tables and fails when a threshold is missed. Every published
reading is an anchor of the estimate, so each row is predicted twice without what it says itself:
from the other pairs of model, card and engine alone, and from all other rows. What is left out has
no part in the kernels' constants either, to first order. The spreads alone are learned from all
rows; `make estimate-fit ARGS=--folds` learns everything anew without a fifth of the pairs. Rows
that no fit uses are apart: those of MTP whose accept length was not published, and what another
program answers. `tests/data/throughput/running.jsonl` holds running batches.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pipeline.live.offset import MeasuredRate, rate_offset
from pipeline.models.facts import model_facts
from pipeline.models.files import find_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.lengths.shapes import LogNormalCut
from pipeline.planner.memory.launch import ResolvedLaunch, resolve_launch
from pipeline.planner.memory.sizing import Sized, assess
from pipeline.planner.rate.errors import RATE_CLASSES
from pipeline.planner.rate.kernels import FITTED
from pipeline.planner.rate.readings.stored import stored_effects
from pipeline.planner.rate.replica import replica_of_launch
from pipeline.planner.rate.running import Resident, resident
from pipeline.planner.rate.throughput import P90_DEVIATIONS, Workload
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.releases import rules_for
from tests.scores.fit_effects import (
    Constants,
    Readings,
    band_sds,
    level_sds,
    pair_blocks,
    predicted_without,
)
from tests.scores.fit_estimate import constants_of
from tests.scores.throughput_readings import (
    DATA,
    Reading,
    left_out,
    median_percent,
    p90_percent,
    readings,
    scored,
)

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
    _print_others()
    _print_anchors(measured)
    cells = running_cells()
    _print_running(cells)
    thresholds = [*rate_thresholds(measured), *running_thresholds(cells)]
    print("\nthresholds")
    for threshold in thresholds:
        print(threshold.line())
    return 0 if all(threshold.kept for threshold in thresholds) else 1


# --- rows beside a model that does not know them -----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A measured row, and its error and band where the readings near to it are not known."""

    reading: Reading
    error: float
    log_sd: float

    def inside(self) -> bool:
        """Return whether the 80 % band contains the row."""
        return abs(self.error) <= P90_DEVIATIONS * self.log_sd


def without_their_pair(measured: Sequence[Reading]) -> list[Unseen]:
    """Predict each row from the readings of other pairs of model, card and engine."""
    return _unseen(measured, pair_blocks(stored_effects().anchors))


def without_themselves(measured: Sequence[Reading]) -> list[Unseen]:
    """Predict each row from all other rows, those of its own pair among them."""
    return _unseen(measured, [[at] for at in range(len(measured))])


def _unseen(measured: Sequence[Reading], blocks: Sequence[list[int]]) -> list[Unseen]:
    """Predict each block from the rest, constants of the kernels included, to first order."""
    effects = stored_effects()
    spreads = level_sds(effects)
    weights = np.array([anchor.weight for anchor in effects.anchors])
    table = Readings(effects.anchors, _constants())
    out = predicted_without(table, spreads, effects.noise_sd, weights, blocks)
    sds = band_sds(effects, blocks)
    return [
        Unseen(reading=reading, error=float(error), log_sd=float(sd))
        for reading, error, sd in zip(measured, table.log_ratios - out.means, sds, strict=True)
    ]


@cache
def _constants() -> Constants:
    return constants_of(scored(), FITTED)


# --- thresholds -------------------------------------------------------------------------------


def rate_thresholds(measured: Sequence[Reading]) -> Iterator[Threshold]:
    """List thresholds on errors, bands and anchors of the rates."""
    other, known = without_their_pair(measured), without_themselves(measured)
    for name, rows, median, p90 in (
        ("pairs without readings", other, 13, 48),
        ("pairs without readings, SGLang", _of_engine(other, "sglang"), 13, 64),
        ("pairs with readings", known, 6, 20),
        ("pairs with readings, SGLang", _of_engine(known, "sglang"), 6, 24),
    ):
        errors = [row.error for row in rows]
        yield Threshold(
            name=f"{name}, median error, %",
            value=median_percent(errors), least=0, most=median, count=len(rows),
        )  # fmt: skip
        yield Threshold(
            name=f"{name}, p90 of the error, %",
            value=p90_percent(errors), least=0, most=p90, count=len(rows),
        )  # fmt: skip
        yield Threshold(
            name=f"{name}, inside the 80 % band, %",
            value=coverage(rows), least=73, most=90, count=len(rows),
        )  # fmt: skip
    anchors = anchor_errors(other, same_work=False)
    yield Threshold(
        name="anchored within twice the batch, median error, %",
        value=median_percent(anchors), least=0, most=7, count=len(anchors),
    )  # fmt: skip
    yield Threshold(
        name="anchored within twice the batch, p90 of the error, %",
        value=p90_percent(anchors), least=0, most=28, count=len(anchors),
    )  # fmt: skip


def running_thresholds(cells: Sequence[Running]) -> Iterator[Threshold]:
    """Return the threshold on the worst running batch."""
    worst = max(cell.off_percent() for cell in cells)
    yield Threshold(
        name="running batch, cap times occupancy, worst cell, %",
        value=worst, least=0, most=35, count=len(cells),
    )  # fmt: skip


def coverage(rows: Sequence[Unseen]) -> float:
    """Return the percentage of rows inside their own 80 % band."""
    return 100 * sum(row.inside() for row in rows) / len(rows)


def _of_engine(rows: Sequence[Unseen], engine: str) -> list[Unseen]:
    return [row for row in rows if row.reading.row["engine"] == engine]


# --- anchors ----------------------------------------------------------------------------------

_SETTING = (
    "model", "gpu", "num_gpus", "tp_size", "dp_size", "dtype", "engine", "attention_backend", "mtp",
)  # fmt: skip
_WORK = ("version", "input_tokens", "output_tokens")


def anchor_errors(rows: Sequence[Unseen], *, same_work: bool) -> list[float]:
    """Return the errors left with another reading of the same setting known, near in batch.

    A run's own readings are of its own prompts and its own release: `same_work`.
    """
    names = (*_SETTING, *_WORK) if same_work else _SETTING
    settings: dict[tuple[Any, ...], list[Unseen]] = defaultdict(list)
    for row in rows:
        settings[tuple(row.reading.row[name] for name in names)].append(row)
    return [
        _anchored_error(anchor, target)
        for members in settings.values()
        for anchor in members
        for target in members
        if anchor is not target and _near(anchor.reading, target.reading)
    ]


def _near(anchor: Reading, target: Reading) -> bool:
    ratio = anchor.running_requests / target.running_requests
    return 1 / ANCHOR_WITHIN <= ratio <= ANCHOR_WITHIN


def _anchored_error(anchor: Unseen, target: Unseen) -> float:
    measured = anchor.reading.row["tokens_per_s_per_gpu"]
    known = MeasuredRate(
        running_requests=anchor.reading.running_requests,
        tokens_per_s=measured,
        predicted_tokens_per_s=measured / math.exp(anchor.error),
    )
    offset = rate_offset(
        [known], target.reading.running_requests, prior_sd=anchor.log_sd, reading_sd=0.0
    )
    return target.error - offset.mean


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
    """Print the rows of the fit, each predicted without its pair and without itself."""
    other, known = without_their_pair(measured), without_themselves(measured)
    print("\nrows of the fit: error, and share of them inside the 80 % band")
    print(f"{'':<30}{'':>5}{'pair left out':^32}{'reading left out':^32}")
    heads = f"{'median %':>10}{'p90 %':>7}{'bias %':>8}{'in %':>6} "
    print(f"{'':<30}{'n':>5}{heads}{heads}")
    for name, belongs in _groups(measured):
        places = [at for at, row in enumerate(measured) if belongs(row)]
        if len(places) > 1:
            figures = "".join(_figures([rows[at] for at in places]) for rows in (other, known))
            print(f"  {name:<28}{len(places):>5}{figures}")


def _figures(rows: Sequence[Unseen]) -> str:
    errors = [row.error for row in rows]
    bias = 100 * math.expm1(statistics.median(errors))
    return (
        f"{median_percent(errors):>10.1f}{p90_percent(errors):>7.1f}{bias:>+8.1f}"
        f"{coverage(rows):>6.0f} "
    )


def _groups(measured: Sequence[Reading]) -> Iterator[tuple[str, Callable[[Reading], bool]]]:
    yield "all", lambda row: True
    yield "bf16, dense and hybrid", lambda row: row.is_bf16_dense_or_hybrid()
    engines = sorted({row.row["engine"] for row in measured})
    for engine in engines:
        yield engine, lambda row, engine=engine: row.row["engine"] == engine  # type: ignore[misc]
        for name in RATE_CLASSES:
            yield (
                f"  {name}",
                lambda row, name=name, engine=engine: (
                    (row.rate_class(), row.row["engine"])  # type: ignore[misc]
                    == (name, engine)
                ),
            )
    for card in sorted({row.replica.gpu for row in measured}):
        yield card, lambda row, card=card: row.replica.gpu == card  # type: ignore[misc]


def _print_others() -> None:
    """Print rows that the fit does not use, beside the whole model."""
    print(f"\nrows that no fit uses{'':<14}{'n':>5}{'median %':>10}{'p90 %':>8}")
    modelled = [row for row in readings() if not row.measured()]
    for name, rows in (
        ("MTP, accept length assumed", _accept_unknown()),
        ("modelled by another program", modelled),
    ):
        errors = [row.error() for row in rows]
        print(
            f"  {name:<33}{len(rows):>5}{median_percent(errors):>10.1f}{p90_percent(errors):>8.1f}"
        )


def _print_anchors(measured: Sequence[Reading]) -> None:
    print("\none anchor of the same setting within twice the batch, no other reading of its pair")
    rows = without_their_pair(measured)
    for name, same_work in (("same release and lengths", True), ("any release and length", False)):
        errors = anchor_errors(rows, same_work=same_work)
        figures = f"median {median_percent(errors):>4.1f} %, p90 {p90_percent(errors):>4.1f} %"
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
