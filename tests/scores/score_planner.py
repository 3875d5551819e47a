"""Score the planner on launches that are known to have run or failed.

`make planner-score` prints the tables and fails when a threshold is missed. The cases lie in
`tests/data/planner`: `memory.jsonl` holds launches with logged figures, `cells.jsonl` launches
of which only the outcome is known. Nothing here treats one case apart from the others.
"""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.models.facts import model_facts
from pipeline.models.files import ModelFiles, catalogue_files
from pipeline.planner.cards import gpu_named, gpu_of_memory
from pipeline.planner.memory.plan import RefusedPlan, plan_launch
from pipeline.planner.sglang.flags import parse_launch_line
from schemas.plan import Calibration, LaunchPlan, ModelFacts
from schemas.units import GIB

DATA = Path(__file__).parents[1] / "data" / "planner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A case and its forecast."""

    case: dict[str, Any]
    plan: LaunchPlan | RefusedPlan

    @property
    def verdict(self) -> str:
        """Return the verdict; a refused launch does not run."""
        return "does_not_fit" if isinstance(self.plan, RefusedPlan) else self.plan.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A figure and its bound."""

    name: str
    value: float
    bound: float
    at_least: bool
    count: int

    @property
    def kept(self) -> bool:
        """Return whether the figure is within its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        """Format one row of the table."""
        sign = "≥" if self.at_least else "≤"
        mark = "ok" if self.kept else "MISSED"

        figures = f"{self.value:>8.2f} {sign} {self.bound:<6g} n={self.count:<4}"
        return f"  {self.name:<62}{figures} {mark}"


def main() -> int:
    """Print both tables. Returns 1 if a threshold is missed."""
    memory = list(scored_memory())
    cells = list(scored_cells())
    print("launches with logged figures (memory.jsonl)")
    for case in memory:
        print(_memory_line(case))
    print("\nleft out")
    for row in _rows("memory.jsonl"):
        if "left_out" in row:
            print(f"  {row['id']:<26} {row['left_out']}")
    print("\nlaunches known to run or to fail (cells.jsonl)")
    _print_matrix(cells)
    for case in cells:
        if _wrong(case):
            outcome = "runs " if case.case["runs"] else "fails"
            print(f"  {case.verdict:<13} {outcome} {case.case['id']}")
    thresholds = [*memory_thresholds(memory), *cell_thresholds(cells)]
    print("\nthresholds")
    for threshold in thresholds:
        print(threshold.line())
    return 0 if all(threshold.kept for threshold in thresholds) else 1


# --- running the cases ------------------------------------------------------------------------


def scored_memory() -> Iterator[Scored]:
    """Yield the launches of memory.jsonl that have the facts for a forecast."""
    for row in _rows("memory.jsonl"):
        if "left_out" not in row:
            yield Scored(case=row, plan=forecast(row, _calibration(row["given"])))


def scored_cells() -> Iterator[Scored]:
    """Yield the launches of cells.jsonl."""
    for row in _rows("cells.jsonl"):
        yield Scored(case=row, plan=forecast(row, None))


def forecast(row: dict[str, Any], calibration: Calibration | None) -> LaunchPlan | RefusedPlan:
    """Plan one case."""
    gpu = gpu_named(row["gpu"]) if row["gpu"] else gpu_of_memory(row["gpu_memory_gib"])
    flags = parse_launch_line([*row["argv"], "--model-path", row["model"]])
    return plan_launch(
        case_model(row), gpu, flags, version=row["version"], calibration=calibration,
    )  # fmt: skip


def case_model(row: dict[str, Any]) -> ModelFacts:
    """Return the case's model: a catalogue entry by name, or its own config."""
    config = row["config"]
    files = (
        catalogue_files(config)
        if isinstance(config, str)
        else ModelFiles(config=config, hf_quant=None, checkpoint_bytes=0)
    )
    return model_facts(
        row["model"],
        files.config,
        hf_quant=files.hf_quant,
        weights_format=row["weights_format"],
    )


def _rows(name: str) -> Iterator[dict[str, Any]]:
    for line in (DATA / name).read_text().splitlines():
        yield json.loads(line)


def _calibration(given: dict[str, float]) -> Calibration | None:
    if not given:
        return None

    def size(key: str) -> int | None:
        return int(given[key] * GIB) if key in given else None

    return Calibration(
        model="",
        gpu="",
        release="",
        free_before_load_bytes=size("free_gib"),
        weights_bytes=size("weights_gib"),
        draft_weights_bytes=size("draft_gib"),
        graph_bytes=None,
    )


# --- thresholds -------------------------------------------------------------------------------


def memory_thresholds(cases: Sequence[Scored]) -> Iterator[Threshold]:
    """Compare verdicts, tokens, slots, requests and weights with the logs."""
    right = [_verdict_right(case) for case in cases]
    yield _share("verdict right (a marginal one is not wrong), %", right, 95, at_least=True)
    told_fits = [case.verdict == "fits" for case in cases if case.case["failed"]]
    yield _share("told to fit among those that failed, %", told_fits, 0, at_least=False)
    given = [case for case in cases if case.case["given"]]
    blind = [case for case in cases if not case.case["given"]]
    errors = _errors(given, "tokens")
    yield _median("tokens, median error, weights or free memory logged, %", errors, 2)
    within = [error <= 10 for error in errors]
    yield _share("tokens within 10 %, weights or free memory logged, %", within, 90, at_least=True)
    yield _median("tokens, median error, nothing logged, %", _errors(blind, "tokens"), 5)
    exact = [*_slots_exact(cases), *_requests_exact(cases)]
    yield _share("state slots and running requests exact, %", exact, 90, at_least=True)
    yield _median("weights, median error, %", _weight_errors(cases), 2)


def cell_thresholds(cases: Sequence[Scored]) -> Iterator[Threshold]:
    """Count wrong verdicts and marginal ones."""
    runs = [case.verdict == "does_not_fit" for case in cases if case.case["runs"]]
    yield _share("told not to fit among those that run, %", runs, 2, at_least=False)
    fails = [case.verdict == "fits" for case in cases if not case.case["runs"]]
    yield _share("told to fit among those that fail, %", fails, 10, at_least=False)
    marginal = [case.verdict == "marginal" for case in cases]
    yield _share("marginal, %", marginal, 15, at_least=False)


def _verdict_right(case: Scored) -> bool:
    return case.verdict != ("fits" if case.case["failed"] else "does_not_fit")


def _errors(cases: Sequence[Scored], key: str) -> list[float]:
    """Return the error against a logged token count in percent."""
    return [
        abs(case.plan.capacity.max_total_num_tokens / case.case["logged"][key] - 1) * 100
        for case in cases
        if key in case.case["logged"] and isinstance(case.plan, LaunchPlan)
    ]


def _slots_exact(cases: Sequence[Scored]) -> list[bool]:
    """Return whether the free memory is logged or the flags give the pool's size.

    A log prints GiB with two decimals, so a large pool is exact within a thousandth.
    """
    exact = []
    for case in cases:
        logged = case.case["logged"].get("slots")
        known = "free_gib" in case.case["given"] or "--max-mamba-cache-size" in case.case["argv"]
        if logged and known and isinstance(case.plan, LaunchPlan):
            slots = case.plan.capacity.state_slots
            exact.append(abs(slots - logged) <= logged // 500)
    return exact


def _requests_exact(cases: Sequence[Scored]) -> list[bool]:
    return [
        case.plan.capacity.max_running_requests == case.case["logged"]["max_running_requests"]
        for case in cases
        if "max_running_requests" in case.case["logged"] and isinstance(case.plan, LaunchPlan)
    ]


def _weight_errors(cases: Sequence[Scored]) -> list[float]:
    """Compare weights computed without the log with those it prints."""
    errors = []
    for case in cases:
        logged = case.case["logged"].get("weights_gib") or case.case["given"].get("weights_gib")
        blind = forecast(case.case, None)
        if logged and isinstance(blind, LaunchPlan):
            errors.append(abs(blind.weights_bytes / GIB / logged - 1) * 100)
    return errors


def _share(name: str, hits: Sequence[bool], bound: float, *, at_least: bool) -> Threshold:
    value = 100 * sum(hits) / len(hits) if hits else 100.0 * at_least
    return Threshold(name=name, value=value, bound=bound, at_least=at_least, count=len(hits))


def _median(name: str, errors: Sequence[float], bound: float) -> Threshold:
    value = statistics.median(errors) if errors else 0.0
    return Threshold(name=name, value=value, bound=bound, at_least=False, count=len(errors))


# --- printing ---------------------------------------------------------------------------------


def _memory_line(case: Scored) -> str:
    row, plan = case.case, case.plan
    outcome = row["failed"] or "ran"
    parts = [f"  {row['id']:<26} {outcome:<18} {case.verdict:<13}"]
    if isinstance(plan, LaunchPlan):
        logged, capacity = row["logged"], plan.capacity
        if "tokens" in logged:
            error = (capacity.max_total_num_tokens / logged["tokens"] - 1) * 100
            parts.append(f"tokens {capacity.max_total_num_tokens:,} ({error:+.1f} %)")
        if "slots" in logged:
            parts.append(f"slots {capacity.state_slots}/{logged['slots']}")
        if "max_running_requests" in logged:
            asked = logged["max_running_requests"]
            parts.append(f"requests {capacity.max_running_requests}/{asked}")
        if "weights_gib" in logged:
            parts.append(f"weights {plan.weights_bytes / GIB:.2f}/{logged['weights_gib']} GiB")
    return " ".join(parts)


def _print_matrix(cases: Sequence[Scored]) -> None:
    counts = Counter((case.case["runs"], case.verdict) for case in cases)
    print(f"  {'':<8}{'fits':>8}{'marginal':>10}{'does_not_fit':>14}")
    for runs in (True, False):
        row = [counts[runs, verdict] for verdict in ("fits", "marginal", "does_not_fit")]
        print(f"  {'runs' if runs else 'fails':<8}{row[0]:>8}{row[1]:>10}{row[2]:>14}")


def _wrong(case: Scored) -> bool:
    return case.verdict == ("does_not_fit" if case.case["runs"] else "fits")


if __name__ == "__main__":
    sys.exit(main())
