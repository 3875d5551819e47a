"""Learn how far an error of one reading tells of another launch: the sds of `readings.offsets`.

The marginal likelihood of all readings gives the standard deviation of each level and part. Then
one factor per level and per part is moved to what predicts a pair of model, card and engine best
when none of its own readings are known, and the scale of the band to what covers 80 % of the
readings of left-out pairs and of left-out models. The constants of the kernels count as unknown in
all of this, with their own prior, so that a left-out pair has no part in them either.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.planner.rate.readings.offsets import LEVELS, shared_effects
from pipeline.planner.rate.readings.stored import PARTS, Anchor, Effects
from pipeline.planner.rate.throughput import P90_DEVIATIONS

Vector = NDArray[np.floating[Any]]
Matrix = NDArray[np.floating[Any]]

# An effect of more than a quarter is the constants' to explain.
_START_SD, _LEAST_SD, _MOST_SD, _LEAST_NOISE_SD = 0.06, 0.002, 0.25, 0.02
# Prior of each sd: half-normal with this sd.
_USUAL_SD = 0.10
# assumed: ROCm's kernels differ from CUDA's by one factor, in `Kernels`, and by this much about it.
# Its seven readings are of experts, on one card.
VENDOR_SD = 0.30
# Degrees of freedom of the readings' noise.
_TAIL_DF = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What the other pairs say of each reading."""

    means: Vector
    sds: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Slopes of the log ratios to the logarithms of the kernels' constants.

    `shifts` are the logarithms of the fitted constants over the middles of their priors.
    """

    slopes: Matrix
    shifts: Vector
    prior_sds: Vector


class Readings:
    """Anchors as arrays, with the effects that each two of them share.

    With `constants`, the log ratios are those of the middles of the constants' priors.
    """

    def __init__(self, anchors: Sequence[Anchor], constants: Constants | None = None) -> None:
        self.anchors = tuple(anchors)
        self.shares = np.array([anchor.shares for anchor in anchors])
        self.log_ratios = np.array([anchor.log_ratio for anchor in anchors])
        self._of_constants: Matrix = np.zeros((len(self.anchors),) * 2)
        if constants is not None:
            self.log_ratios = self.log_ratios - constants.slopes @ constants.shifts
            scaled = constants.slopes * constants.prior_sds
            self._of_constants = scaled @ scaled.T
        self._same = {level: shared_effects(anchors, level) for level in LEVELS}
        self._products = [np.outer(column, column) for column in self.shares.T]

    def covariance(self, sds: Matrix) -> Matrix:
        """Return the covariance of the log ratios without noise; `sds` are by level and part."""
        total = self._of_constants.copy()
        for level, row in zip(LEVELS, sds, strict=True):
            total += self._same[level] * ((self.shares * row**2) @ self.shares.T)
        return total

    def slopes(self, gradient: Matrix, sds: Matrix) -> Matrix:
        """Return the slope of the log likelihood to the logarithm of each sd."""
        found = np.zeros_like(sds)
        for part, product in enumerate(self._products):
            weighted = gradient * product
            for at, level in enumerate(LEVELS):
                found[at, part] = sds[at, part] ** 2 * np.vdot(weighted, self._same[level])
        return found


def learned_effects(
    anchors: Sequence[Anchor], constants: Constants | None = None, *, sweeps: int = 2
) -> Effects:
    """Return the anchors with their weights, and the sds that predict other pairs best."""
    table = Readings(anchors, constants)
    sds, noise_sd, weights = _likeliest(table)
    blocks = pair_blocks(anchors)
    sds = _predictive(table, sds, noise_sd, weights, blocks, sweeps)
    groups = (blocks, model_blocks(anchors))
    outs = [predicted_without(table, sds, noise_sd, weights, group) for group in groups]
    effects = Effects(
        anchors=tuple(
            replace(anchor, weight=float(weight))
            for anchor, weight in zip(anchors, weights, strict=True)
        ),
        level_sds={
            level: tuple(float(sd) for sd in row) for level, row in zip(LEVELS, sds, strict=True)
        },
        noise_sd=noise_sd,
        scale=1.0,
    )
    return _covering(effects, [np.abs(table.log_ratios - out.means) for out in outs], groups)


def _covering(
    effects: Effects, errors: Sequence[Vector], groups: Sequence[Sequence[list[int]]]
) -> Effects:
    """Widen the effects until 80 % of the errors of left-out readings are inside the band.

    The band of an estimate knows nothing of the constants' errors, so the scale answers for them.
    """
    low, high = 0.5, 6.0
    for _ in range(12):
        tried = replace(effects, scale=(low + high) / 2)
        inside = [
            error <= P90_DEVIATIONS * band_sds(tried, group)
            for error, group in zip(errors, groups, strict=True)
        ]
        covered = np.concatenate(inside).mean()
        low, high = (tried.scale, high) if covered < 0.8 else (low, tried.scale)
    return replace(effects, scale=high)


def band_sds(effects: Effects, blocks: Sequence[list[int]]) -> Vector:
    """Return the sd of each reading's band where its block is left out."""
    weights = np.array([anchor.weight for anchor in effects.anchors])
    wide = np.array([effects.wide_sds(level) for level in LEVELS])
    table = Readings(effects.anchors)
    return predicted_without(table, wide, effects.noise_sd, weights, blocks).sds


def pair_blocks(anchors: Sequence[Anchor]) -> list[list[int]]:
    """Return the places of the readings of each pair of model, card and engine."""
    blocks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at, anchor in enumerate(anchors):
        traits = anchor.traits
        blocks[traits.family, traits.card, traits.engine].append(at)
    return list(blocks.values())


def model_blocks(anchors: Sequence[Anchor]) -> list[list[int]]:
    """Return the places of the readings of each family of models."""
    blocks: dict[str, list[int]] = defaultdict(list)
    for at, anchor in enumerate(anchors):
        blocks[anchor.traits.family].append(at)
    return list(blocks.values())


def predicted_without(
    table: Readings, sds: Matrix, noise_sd: float, weights: Vector, blocks: Sequence[list[int]]
) -> LeftOut:
    """Predict each block of readings from the others, in closed form."""
    noise = noise_sd**2 / weights
    inverse = np.linalg.inv(table.covariance(sds) + np.diag(noise))
    pull = inverse @ table.log_ratios
    means, variances = np.empty(len(noise)), np.empty(len(noise))
    for block in blocks:
        inside = np.linalg.inv(inverse[np.ix_(block, block)])
        means[block] = table.log_ratios[block] - inside @ pull[block]
        variances[block] = np.diag(inside) - noise[block] + noise_sd**2
    return LeftOut(means=means, sds=np.sqrt(variances))


def level_sds(effects: Effects) -> Matrix:
    """Return the sds by level and part."""
    return np.array([effects.level_sds[level] for level in LEVELS])


def _likeliest(table: Readings, steps: int = 80) -> tuple[Matrix, float, Vector]:
    """Climb the marginal likelihood by Adam on the logarithms of the sds; weigh outliers down."""
    count = len(table.anchors)
    sds, noise_sd, weights = (
        np.full((len(LEVELS), len(PARTS)), _START_SD),
        _START_SD,
        np.ones(count),
    )
    first, second = np.zeros(sds.size + 1), np.zeros(sds.size + 1)
    for step in range(1, steps + 1):
        sds[list(LEVELS).index("vendor")] = VENDOR_SD
        noise = noise_sd**2 / weights
        inverse = np.linalg.inv(table.covariance(sds) + np.diag(noise))
        pull = inverse @ table.log_ratios
        gradient = np.outer(pull, pull) - inverse
        slopes = table.slopes(gradient, sds) - (sds / _USUAL_SD) ** 2
        every = np.append(slopes.ravel(), np.diag(gradient) @ noise)
        first, second = 0.9 * first + 0.1 * every, 0.99 * second + 0.01 * every**2
        move = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.99**step)) + 1e-9)
        sds = np.clip(sds * np.exp(0.1 * move[:-1].reshape(sds.shape)), _LEAST_SD, _MOST_SD)
        noise_sd = max(noise_sd * math.exp(0.1 * move[-1]), _LEAST_NOISE_SD)
        if step % 5 == 0:
            residuals = noise * pull
            weights = (_TAIL_DF + 1) / (_TAIL_DF + (residuals / noise_sd) ** 2)
    sds[list(LEVELS).index("vendor")] = VENDOR_SD
    return sds, noise_sd, weights


def _predictive(
    table: Readings,
    sds: Matrix,
    noise_sd: float,
    weights: Vector,
    blocks: Sequence[list[int]],
    sweeps: int,
) -> Matrix:
    """Move one factor per level, and one per part, to the best prediction of left-out pairs."""
    sizes = np.empty(len(weights))
    for block in blocks:
        sizes[block] = len(block)

    def loss(tried: Matrix) -> float:
        out = predicted_without(table, tried, noise_sd, weights, blocks)
        ratios = (table.log_ratios - out.means) / out.sds
        # A Student's t: one wild reading decides nothing.
        each = np.log(out.sds) + (_TAIL_DF + 1) / 2 * np.log1p(ratios**2 / _TAIL_DF)
        return float(np.average(each, weights=1 / np.sqrt(sizes)))

    best = loss(sds)
    selections: list[tuple[slice | int, slice | int]] = [
        (at, slice(None)) for at, level in enumerate(LEVELS) if level != "vendor"
    ]
    selections += [(slice(0, len(LEVELS) - 1), part) for part in range(len(PARTS))]
    for _ in range(sweeps):
        for selection in selections:
            for factor in (1.3, 1 / 1.3):
                tried = sds.copy()
                tried[selection] = np.clip(tried[selection] * factor, _LEAST_SD, _MOST_SD)
                value = loss(tried)
                if value < best - 1e-5:
                    sds, best = tried, value
                    break
    return sds
