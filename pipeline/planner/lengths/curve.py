"""Survival of requests on a grid of tokens: one look-up per question, for thousands of requests."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.planner.lengths.shapes import LengthShape, SampledLengths, survival

_GRID = 300
# Fraction of all requests below which a curve says nothing.
_NOTHING = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalCurve:
    """Fraction of requests that are longer than each length, and the area below it so far."""

    tokens: Sequence[float]
    survivals: Sequence[float]
    areas: Sequence[float]
    second_areas: Sequence[float]

    @classmethod
    def of(cls, shape: LengthShape) -> "SurvivalCurve":
        """Return the curve of lengths; a step where many have one length stays a step."""
        limit = float(shape.limit_tokens)
        points = {limit * (step / _GRID) ** 2 for step in range(_GRID + 1)}
        # All that is cut ends in one step at the limit.
        points.add(limit * (1 - 1e-6))
        if not isinstance(shape, SampledLengths):
            if shape.sigma == 0:
                points |= {math.exp(shape.mu) * (1 - 1e-6), math.exp(shape.mu)}
            return cls.on(points, lambda point: survival(shape, point) if point < limit else 0.0)
        means, heights = shape.bin_means, [1.0]
        for weight in shape.weights:
            heights.append(max(heights[-1] - weight, 0.0))
        points |= {edge for mean in means for edge in (mean * (1 - 1e-6), mean)}
        return cls.on(
            points, lambda point: heights[bisect_right(means, point)] if point < limit else 0.0
        )

    @classmethod
    def on(cls, points: Iterable[float], alive: Callable[[float], float]) -> "SurvivalCurve":
        """Return the curve through these points."""
        tokens = sorted(points)
        survivals = [alive(point) for point in tokens]
        areas, seconds = [0.0], [0.0]
        for (low, high), (before, after) in zip(pairwise(tokens), pairwise(survivals), strict=True):
            area = (high - low) * (before + after) / 2
            areas.append(areas[-1] + area)
            seconds.append(seconds[-1] + area * (low + high) / 2)
        return cls(tokens=tokens, survivals=survivals, areas=areas, second_areas=seconds)

    @property
    def longest(self) -> float:
        return self.tokens[-1]

    @property
    def mean(self) -> float:
        return self.areas[-1]

    @property
    def mean_steady_left(self) -> float:
        """Mean tokens left of a running request in a long run: E[o^2] / 2 E[o]."""
        return self.second_areas[-1] / self.areas[-1] if self.areas[-1] else 0.0

    def survival(self, tokens: float) -> float:
        return _interpolated(self.tokens, self.survivals, tokens)

    def area(self, tokens: float) -> float:
        return _interpolated(self.tokens, self.areas, tokens)

    def is_beyond(self, so_far: float) -> bool:
        """Return whether a request with `so_far` tokens has outlived all that is known."""
        return self.survival(so_far) < _NOTHING

    def outlives(self, so_far: float, more: float) -> float:
        """Return the chance that a request with `so_far` tokens writes more than `more` others.

        If it has outlived all that is known, as long again is as likely as not.
        """
        alive = self.survival(so_far)
        if alive < _NOTHING:
            return so_far / (so_far + more) if so_far + more < self.longest else 0.0
        return self.survival(so_far + more) / alive

    def mean_left(self, so_far: float) -> float:
        alive = self.survival(so_far)
        if alive < _NOTHING:
            return min(so_far, max(self.longest - so_far, 0.0))
        return (self.areas[-1] - self.area(so_far)) / alive


def _interpolated(points: Sequence[float], values: Sequence[float], at: float) -> float:
    if at <= points[0]:
        return values[0]
    if at >= points[-1]:
        return values[-1]
    place = bisect_left(points, at)
    low, high = points[place - 1], points[place]
    return values[place - 1] + (at - low) / (high - low) * (values[place] - values[place - 1])
