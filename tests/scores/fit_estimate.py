"""Fit the constants of the step time to the calibration part of the readings.

`make estimate-fit` prints them for `pipeline/planner/rate/kernels.py`, and the errors on both parts
and over five folds of whole pairs. Each constant starts at its closed-form value and has a prior of
40 % around it, so that constants which the readings do not determine stay there.
"""

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from statistics import quantiles

from pipeline.planner.rate.errors import CLASS_ERRORS
from pipeline.planner.rate.kernels import Kernels
from tests.scores.throughput_readings import Reading, median_percent, scored, split

_START = Kernels()
_NAMES = [field.name for field in fields(Kernels)]
# Shares of a peak: none is reached whole.
_CEILINGS = {
    "weight_stream": 0.90, "expert_stream": 0.90, "cache_stream": 0.86, "gemm": 0.90,
    "expert_gemm": 0.90, "attention_gemm": 0.90, "prefill_gemm": 0.90, "fp8": 1.0, "fp4": 1.0,
    "int4": 1.0, "state_vector": 0.90, "old_fp8_experts": 1.0, "widened_gemm": 1.0,
    "int4_gemm": 1.0, "routing": 1.0, "link": 0.90, "other_vendor": 1.0,
}  # fmt: skip
_PRIOR_LOG_SD = 0.4
# Streaming 16-bit weights is measured well: 0.83 to 0.89 of the bandwidth over 2,814 times per
# token that InferenceX published, and 0.82 for 26.7 tokens/s of Qwen3.6-27B on RTX PRO 6000.
_PRIOR_LOG_SDS = {"weight_stream": 0.01}
_PRIOR_WEIGHT = 0.002
_TAIL = 0.15  # beyond it an error counts by its size, not by its square


def main() -> int:
    """Fit the constants and print them with their errors on other readings."""
    calibrate, score = split(scored())
    kernels = fitted(calibrate)
    print("FITTED = Kernels(")
    for name in _NAMES:
        print(f"    {name}={_rounded(getattr(kernels, name))!r},")
    print(")")
    print("FITTED_PAIRS = frozenset((")
    for pair in sorted({item.pair() for item in calibrate}):
        print(f"    {tuple(pair.split(' on ', 1))!r},")
    print("))")
    for title, part in (("calibrate", calibrate), ("score", score)):
        before = median_percent([item.error(_START) for item in part])
        after = median_percent([item.error(kernels) for item in part])
        print(f"{title:>10} n={len(part):<4} starting {before:5.1f} %   fitted {after:5.1f} %")
    if "--folds" in sys.argv:
        _print_folds(scored())
    return 0


def folded_errors(items: Sequence[Reading]) -> list[tuple[Reading, float]]:
    """Return the error of each reading under constants fitted without its pair."""
    errors = []
    for fold in range(5):
        inside = [item for item in items if _fold(item) == fold]
        if inside:
            kernels = fitted([item for item in items if _fold(item) != fold])
            errors += [(item, item.error(kernels)) for item in inside]
    return errors


def _print_folds(items: Sequence[Reading]) -> None:
    """Print the figures behind `errors.CLASS_ERRORS`."""
    errors_by_reading = folded_errors(items)
    every = [error for _, error in errors_by_reading]
    print(f"five folds of whole pairs, n={len(every)}: median {median_percent(every):.1f} %")
    for name in CLASS_ERRORS:
        errors = [abs(error) for item, error in errors_by_reading if item.rate_class() == name]
        p80 = quantiles(errors, n=10, method="inclusive")[7]
        print(f"  {name:<14} n={len(errors):<4} p80 of the log {p80:.3f}")


def fitted(items: Sequence[Reading], sweeps: int = 60) -> Kernels:
    """Fit by coordinate descent on the logarithms of the constants."""
    counts = Counter(item.pair() for item in items)
    weights = [1 / math.sqrt(counts[item.pair()]) for item in items]
    felt = {name: _feeling(items, name) for name in _NAMES}
    shifts = dict.fromkeys(_NAMES, 0.0)
    steps = dict.fromkeys(_NAMES, 0.2)
    losses = [_huber(item.error(_START)) for item in items]
    for _ in range(sweeps):
        for name in _NAMES:
            better = _better(items, weights, felt[name], shifts, name, steps[name], losses)
            steps[name] *= 0.6 if better is None else 1.4
            shifts, losses = better or (shifts, losses)
        if max(steps.values()) < 0.005:
            break
    return _kernels(shifts)


def _feeling(items: Sequence[Reading], name: str) -> list[int]:
    """Return the indices of the readings that a constant affects."""
    less = _kernels({**dict.fromkeys(_NAMES, 0.0), name: -0.2})
    return [at for at, item in enumerate(items) if item.error(less) != item.error(_START)]


def _better(
    items: Sequence[Reading],
    weights: Sequence[float],
    felt: Sequence[int],
    shifts: dict[str, float],
    name: str,
    step: float,
    losses: list[float],
) -> tuple[dict[str, float], list[float]] | None:
    best = _loss(weights, losses, shifts)
    for sign in (1, -1):
        moved = {**shifts, name: shifts[name] + sign * step}
        kernels = _kernels(moved)
        tried = list(losses)
        for at in felt:
            tried[at] = _huber(items[at].error(kernels))
        if _loss(weights, tried, moved) < best - 1e-9:
            return moved, tried
    return None


def _loss(weights: Sequence[float], losses: Sequence[float], shifts: dict[str, float]) -> float:
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    prior = sum(
        (shift / _PRIOR_LOG_SDS.get(name, _PRIOR_LOG_SD)) ** 2 for name, shift in shifts.items()
    )
    return total / sum(weights) + _PRIOR_WEIGHT * prior / len(shifts)


def _huber(error: float) -> float:
    size = abs(error)
    return size * size / 2 if size < _TAIL else _TAIL * (size - _TAIL / 2)


def _kernels(shifts: dict[str, float]) -> Kernels:
    values = {name: getattr(_START, name) * math.exp(shifts[name]) for name in _NAMES}
    return Kernels(
        **{name: min(value, _CEILINGS.get(name, math.inf)) for name, value in values.items()}
    )


def _fold(item: Reading) -> int:
    return int(hashlib.sha256(item.pair().encode()).hexdigest(), 16) % 5


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    sys.exit(main())
