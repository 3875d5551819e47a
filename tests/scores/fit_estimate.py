"""Fit the constants of the step time, and what readings say beyond them, to all readings.

`make estimate-fit` prints the constants for `pipeline/planner/rate/kernels.py` and writes
`data/effects.json` beside the readings. Each constant starts at its closed-form value and has a
prior of 40 % around it, so that constants which the readings do not determine stay there. The
readings of one model on one card err together: the covariance of their errors, which `fit_effects`
learns, says how much each of them counts. `ARGS=--folds` fits both without a fifth of the pairs,
five times, and prints the errors on those left out; it writes nothing.
"""

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from pipeline.planner.rate.errors import RATE_CLASSES
from pipeline.planner.rate.kernels import FITTED, Kernels
from pipeline.planner.rate.readings.offsets import LEVELS, NO_OFFSETS, Offsets, Posterior
from pipeline.planner.rate.readings.stored import EFFECTS_FILE, PARTS, Anchor, Effects
from pipeline.planner.rate.readings.traits import ENGINES, Traits
from pipeline.planner.rate.throughput import P90_DEVIATIONS
from tests.scores.fit_effects import (
    Constants,
    Matrix,
    Readings,
    Vector,
    learned_effects,
    level_sds,
)
from tests.scores.throughput_readings import Reading, median_percent, p90_percent, scored

_START = Kernels()
_NAMES = [field.name for field in fields(Kernels)]
# Shares of a peak: none is reached whole.
_CEILINGS = {
    "weight_stream": 0.90, "expert_stream": 0.90, "cache_stream": 0.86, "gemm": 0.90,
    "expert_gemm": 0.90, "attention_gemm": 0.90, "index_gemm": 0.90, "prefill_gemm": 0.90,
    "prefill_expert_gemm": 0.90, "prefill_gemm_low_peak": 0.90, "fp8": 1.0, "fp4": 1.0,
    "int4": 1.0, "fp8_experts": 1.0, "fp4_experts": 1.0, "int4_experts": 1.0,
    "fp8_prefill": 1.0, "fp4_prefill": 1.0, "int4_prefill": 1.0, "widened_prefill": 1.0,
    "state_vector": 0.90, "old_fp8_experts": 1.0, "widened_gemm": 1.0, "int4_gemm": 1.0,
    "routing": 1.0, "link": 0.90, "other_vendor": 1.0,
}  # fmt: skip
_PRIOR_LOG_SD = 0.4
# Streaming 16-bit weights is measured well: 0.83 to 0.89 of the bandwidth over 2,814 times per
# token that InferenceX published, and 0.82 for 26.7 tokens/s of Qwen3.6-27B on RTX PRO 6000. So is
# prefill there: 83 % of the peak on products alone.
_PRIOR_LOG_SDS = {"weight_stream": 0.01, "prefill_gemm_low_peak": 0.05}
_ROUNDS, _STEPS = 2, 4
_SETTLING_ROUNDS = 4
_LONGEST_STEP = 0.5
_NUDGE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Constants, and the effects that the readings show beyond them."""

    kernels: Kernels
    effects: Effects

    def of(self, items: Sequence[Reading]) -> list[Reading]:
        """The readings beside this fit."""
        posterior = Posterior(self.effects.anchors, self.effects)
        known: dict[Traits, Offsets] = {}
        for item in items:
            traits = item.traits()
            if traits not in known:
                known[traits] = posterior.offsets(traits)
        return [item.with_model(self.kernels, known[item.traits()]) for item in items]


def main() -> int:
    """Fit, print and write; with `--folds` print the errors on pairs left out."""
    items = scored()
    if "--folds" in sys.argv:
        print_errors("five folds of whole pairs, none of their readings known", folded(items))
        return 0
    fit = fitted(items)
    print("FITTED = Kernels(")
    for name in _NAMES:
        print(f"    {name}={_rounded(getattr(fit.kernels, name))!r},")
    print(")")
    rounded = Kernels(**{name: _rounded(getattr(fit.kernels, name)) for name in _NAMES})
    fit = _with_effects(items, rounded, fit.effects)
    EFFECTS_FILE.write_text(effects_text(items, fit.effects))
    print_errors("in sample", fit.of(items))
    return 0


def folded(items: Sequence[Reading]) -> list[Reading]:
    """Return each reading beside a fit without any reading of its pair."""
    found: list[Reading] = []
    for fold in range(5):
        fit = fitted([item for item in items if _fold(item) != fold], _START)
        found += fit.of([item for item in items if _fold(item) == fold])
    return found


def print_errors(title: str, items: Sequence[Reading]) -> None:
    """Print the errors by engine and by class."""
    print(f"{title:<58}{'n':>5}{'median %':>10}{'p90 %':>8}{'inside %':>10}")
    print(_errors_line("all", items))
    for engine in ENGINES:
        print(_errors_line(engine, [item for item in items if item.row["engine"] == engine]))
    for name in RATE_CLASSES:
        print(_errors_line(name, [item for item in items if item.rate_class() == name]))


def _errors_line(name: str, items: Sequence[Reading]) -> str:
    errors = [item.error() for item in items]
    inside = [abs(item.error()) <= P90_DEVIATIONS * item.log_sd() for item in items]
    return (
        f"  {name:<56}{len(items):>5}{median_percent(errors):>10.1f}{p90_percent(errors):>8.1f}"
        f"{100 * sum(inside) / len(inside):>10.0f}"
    )


# --- the fit ----------------------------------------------------------------------------------


def fitted(items: Sequence[Reading], start: Kernels = FITTED) -> Fit:
    """Fit constants and effects in turn, each given the other."""
    kernels = start
    plain = _anchors([item.with_model(kernels, NO_OFFSETS) for item in items])
    effects = learned_effects(plain, constants_of(items, kernels))
    for _ in range(_ROUNDS):
        kernels = _refitted(items, kernels, effects)
        effects = _with_effects(items, kernels, effects).effects
    return Fit(kernels=kernels, effects=effects)


def _with_effects(items: Sequence[Reading], kernels: Kernels, before: Effects) -> Fit:
    """Learn the effects, with the parts' shares of the time as the offsets before left them."""
    anchors = _anchors(Fit(kernels=kernels, effects=before).of(items))
    effects = learned_effects(anchors, constants_of(items, kernels))
    return settled(items, Fit(kernels=kernels, effects=effects))


def constants_of(items: Sequence[Reading], kernels: Kernels) -> Constants:
    """Return how the errors depend on the constants, to first order about these."""
    shifts = _shifts(kernels)
    errors = _errors(items, shifts)
    return Constants(
        slopes=np.column_stack([_slope(items, shifts, at, errors) for at in range(len(_NAMES))]),
        shifts=shifts,
        prior_sds=np.array([_PRIOR_LOG_SDS.get(name, _PRIOR_LOG_SD) for name in _NAMES]),
    )


def _shifts(kernels: Kernels) -> Vector:
    return np.array([math.log(getattr(kernels, name) / getattr(_START, name)) for name in _NAMES])


def settled(items: Sequence[Reading], fit: Fit) -> Fit:
    """Take the readings' log ratios about the offsets that they themselves give."""
    for _ in range(_SETTLING_ROUNDS):
        weights = [anchor.weight for anchor in fit.effects.anchors]
        anchors = tuple(
            replace(anchor, weight=weight)
            for anchor, weight in zip(_anchors(fit.of(items)), weights, strict=True)
        )
        fit = replace(fit, effects=replace(fit.effects, anchors=anchors))
    return fit


def _anchors(items: Sequence[Reading]) -> list[Anchor]:
    return [_anchor(item) for item in items]


def _anchor(item: Reading) -> Anchor:
    """Return a reading's log ratio to first order about the offsets that it has."""
    error, shares = item.error_and_shares()
    offset = math.fsum(
        share * mean for share, mean in zip(shares, item.replica.offsets.means, strict=True)
    )
    return Anchor(
        traits=item.traits(),
        log_ratio=round(error + offset, 5),
        shares=tuple(round(share, 4) for share in shares),
        weight=1.0,
        source=item.row["source"],
        date=item.row["date"],
    )


def _refitted(items: Sequence[Reading], kernels: Kernels, effects: Effects) -> Kernels:
    """Take Gauss-Newton steps on the logarithms of the constants, by generalised least squares."""
    table = Readings(effects.anchors)
    noise = [effects.noise_sd**2 / anchor.weight for anchor in effects.anchors]
    precision: Matrix = np.linalg.inv(table.covariance(level_sds(effects)) + np.diag(noise))
    shifts = _shifts(kernels)
    prior: Matrix = np.diag([_PRIOR_LOG_SDS.get(name, _PRIOR_LOG_SD) ** -2.0 for name in _NAMES])
    for _ in range(_STEPS):
        errors = _errors(items, shifts)
        slopes = np.column_stack([_slope(items, shifts, at, errors) for at in range(len(_NAMES))])
        curvature = slopes.T @ precision @ slopes + prior
        step = np.linalg.solve(curvature, -slopes.T @ precision @ errors - prior @ shifts)
        shifts = _improved(items, shifts, step, precision, prior, errors)
    return _kernels(shifts)


def _improved(
    items: Sequence[Reading],
    shifts: Vector,
    step: Vector,
    precision: Matrix,
    prior: Matrix,
    errors: Vector,
) -> Vector:
    """Take as much of a step as lowers the loss."""
    loss = errors @ precision @ errors + shifts @ prior @ shifts
    for part in (1.0, 0.5, 0.25, 0.1):
        moved = _capped(shifts + np.clip(part * step, -_LONGEST_STEP, _LONGEST_STEP))
        after = _errors(items, moved)
        if after @ precision @ after + moved @ prior @ moved < loss:
            return moved
    return shifts


def _slope(items: Sequence[Reading], shifts: Vector, at: int, errors: Vector) -> Vector:
    nudged = shifts.copy()
    nudged[at] -= _NUDGE
    return (errors - _errors(items, nudged)) / _NUDGE


def _errors(items: Sequence[Reading], shifts: Vector) -> Vector:
    kernels = _kernels(shifts)
    return np.array([item.with_model(kernels, NO_OFFSETS).error() for item in items])


def _capped(shifts: Vector) -> Vector:
    most = [
        math.log(_CEILINGS[name] / getattr(_START, name)) if name in _CEILINGS else math.inf
        for name in _NAMES
    ]
    return np.minimum(shifts, most)


def _kernels(shifts: Vector) -> Kernels:
    values = zip(_NAMES, shifts, strict=True)
    return Kernels(**{name: getattr(_START, name) * math.exp(shift) for name, shift in values})


def _fold(item: Reading) -> int:
    return int(hashlib.sha256(item.pair().encode()).hexdigest(), 16) % 5


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


# --- the file ---------------------------------------------------------------------------------


def effects_text(items: Sequence[Reading], effects: Effects) -> str:
    """Return the effects as they ship: one reading a line, traits by their place in a list."""
    names = [field.name for field in fields(Traits)]
    traits = {
        name: list(dict.fromkeys(getattr(a.traits, name) for a in effects.anchors))
        for name in names
    }
    rows = [
        [
            item.row["id"],
            [traits[name].index(getattr(anchor.traits, name)) for name in names],
            anchor.log_ratio,
            list(anchor.shares),
            round(anchor.weight, 3),
        ]
        for item, anchor in zip(items, effects.anchors, strict=True)
    ]
    sds = {level: [_rounded(sd) for sd in effects.level_sds[level]] for level in LEVELS}
    return "".join(
        (
            "{\n",
            f'"parts": {json.dumps(PARTS)},\n',
            f'"noise_sd": {_rounded(effects.noise_sd)}, "scale": {_rounded(effects.scale)},\n',
            '"level_sds": {\n',
            ",\n".join(f"{json.dumps(level)}: {json.dumps(row)}" for level, row in sds.items()),
            '\n},\n"traits": {\n',
            ",\n".join(
                f"{json.dumps(name)}: {json.dumps(values)}" for name, values in traits.items()
            ),
            '\n},\n"rows": [\n',
            ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows),
            "\n]\n}\n",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
