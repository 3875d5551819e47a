"""Streams of completions replayed: how well the mean length is known while requests still run.

`python -m tests.scores.replay_lengths` prints the table. An engine keeps b requests running, all
write a token a step, and a fresh one starts as another finishes.
"""

import heapq
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

from pipeline.planner.lengths.censored import length_estimate
from pipeline.planner.lengths.lengths import log_normal_cut
from pipeline.planner.lengths.shapes import LogNormalCut, moment, sampled_length
from pipeline.planner.lengths.survival import LengthEstimate

MEAN_TOKENS = 2500
Draw = Callable[[Random], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is seen of a stream at the moment when so many have finished."""

    finished: tuple[int, ...]
    running: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One stream's figures over the true mean."""

    estimate: float
    naive: float
    error: float
    """The stated standard error, relative."""

    def covers(self) -> bool:
        """Whether the 95 % band holds the truth."""
        return abs(self.estimate - 1) <= 1.96 * self.error * self.estimate


def stream(draw: Draw, running_requests: int, completions: int, seed: int) -> Moment:
    """The state just as the last of so many completions finishes."""
    random = Random(seed)
    ends: list[tuple[int, int]] = []  # when it ends, how long it is
    for _ in range(running_requests):
        length = draw(random)
        heapq.heappush(ends, (length, length))
    finished = []
    while True:
        now, length = heapq.heappop(ends)
        finished.append(length)
        if len(finished) == completions:
            break
        fresh = draw(random)
        heapq.heappush(ends, (now + fresh, fresh))
    running = [now - (end - length) for end, length in ends]
    return Moment(finished=tuple(finished), running=tuple(running))


def log_normal_draw(shape: LogNormalCut) -> Draw:
    """Whole tokens, one at least."""
    return lambda random: max(1, round(sampled_length(shape, random)))


def replayed(
    draw: Draw, true_mean: float, limit: int, running: int, completions: int, seeds: int
) -> list[Replayed]:
    """As many streams as seeds; one of which nothing can be said yet is left out."""
    figures = []
    for seed in range(seeds):
        seen = stream(draw, running, completions, seed)
        estimate = length_estimate(seen.finished, seen.running, limit)
        if estimate is not None:
            figures.append(_figures(seen, estimate, true_mean))
    return figures


def _figures(seen: Moment, estimate: LengthEstimate, true_mean: float) -> Replayed:
    return Replayed(
        estimate=estimate.mean_tokens / true_mean,
        naive=statistics.mean(seen.finished) / true_mean,
        error=estimate.mean_relative_error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table: many streams of one kind, each stopped after so many batches."""

    cv: float
    limit: int
    running: int
    batches: int

    def figures(self, seeds: int) -> list[Replayed]:
        """Of as many streams as seeds."""
        shape = log_normal_cut(MEAN_TOKENS, self.cv, self.limit)
        completions = self.batches * self.running
        return replayed(
            log_normal_draw(shape), moment(shape, 1), self.limit, self.running, completions, seeds
        )


def main() -> int:
    """Print the table, percent of the truth; 1 where the requirement is missed.

    With 80 requests or more running, half of all means lie within 10 % after three batches.
    """
    print("output length while requests run: error of the mean, % of the truth")
    print(f"{'':>34}{'--- estimate ---':>28}{'naive':>9}{'95 % band':>11}{'stated':>8}")
    print(
        f"{'CV':>4}{'limit':>8}{'running':>9}{'completions':>13}{'bias':>10}{'median':>9}{'p90':>9}"
        f"{'median':>9}{'holds':>11}{'error':>8}"
    )
    missed = 0
    for case in _cases():
        figures = case.figures(seeds=200)
        print(_line(case, figures))
        off = statistics.median(abs(figure.estimate - 1) for figure in figures)
        missed += case.running >= 80 and case.batches >= 3 and off > 0.10
    return 1 if missed else 0


def _cases() -> Iterator[Case]:
    for cv, limit in product((0.6, 0.9, 1.2, 1.6), (8192, 32_768)):
        if cv == 1.6 and limit == 8192:
            continue  # a mean of 2,500 leaves no such CV
        for running, batches in product((16, 80, 320), (1, 3)):
            yield Case(cv=cv, limit=limit, running=running, batches=batches)


def _line(case: Case, figures: list[Replayed]) -> str:
    errors = sorted(100 * abs(figure.estimate - 1) for figure in figures)
    bias = 100 * (statistics.mean(figure.estimate for figure in figures) - 1)
    naive = 100 * (statistics.median(figure.naive for figure in figures) - 1)
    held = 100 * sum(figure.covers() for figure in figures) / len(figures)
    stated = 100 * statistics.median(figure.error for figure in figures)
    p90 = errors[math.ceil(0.9 * len(errors)) - 1]
    return (
        f"{case.cv:>4}{case.limit:>8}{case.running:>9}{case.batches * case.running:>13}"
        f"{bias:>+10.1f}{statistics.median(errors):>9.1f}{p90:>9.1f}{naive:>+9.0f}{held:>11.0f}"
        f"{stated:>8.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
