"""Error of the estimated mean length while requests are still running, on replayed streams.

`python -m tests.scores.replay_lengths` prints the table. An engine keeps b requests running, each
generates one token per step, and a new one starts as another finishes.
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
from pipeline.planner.lengths.shapes import LogNormalCut, moment
from pipeline.planner.lengths.survival import LengthEstimate
from tests.fakes.drawn_lengths import sampled_length

MEAN_TOKENS = 2500
Draw = Callable[[Random], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Finished and running lengths of a stream at one moment."""

    finished: tuple[int, ...]
    running: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Estimates from one stream, relative to the true mean."""

    estimate: float
    naive: float
    error: float
    """Stated standard error, relative."""

    def covers(self) -> bool:
        """Return True if the 95 % band contains the truth."""
        return abs(self.estimate - 1) <= 1.96 * self.error * self.estimate


def stream(draw: Draw, running_requests: int, completions: int, seed: int) -> Moment:
    """Return the state just after the given number of completions has finished."""
    random = Random(seed)
    # Step at which each running request ends, and its length.
    ends: list[tuple[int, int]] = []
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
    """Return a function that draws lengths of whole tokens, at least one."""
    return lambda random: max(1, round(sampled_length(shape, random)))


def replayed(
    draw: Draw, true_mean: float, limit: int, running: int, completions: int, seeds: int
) -> list[Replayed]:
    """Replay one stream per seed, without those that allow no estimate yet."""
    figures = []
    for seed in range(seeds):
        state = stream(draw, running, completions, seed)
        estimate = length_estimate(state.finished, state.running, limit)
        if estimate is not None:
            figures.append(_figures(state, estimate, true_mean))
    return figures


def _figures(state: Moment, estimate: LengthEstimate, true_mean: float) -> Replayed:
    return Replayed(
        estimate=estimate.mean_tokens / true_mean,
        naive=statistics.mean(state.finished) / true_mean,
        error=estimate.mean_relative_error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the table: streams of one kind, each stopped after this many batches."""

    cv: float
    limit: int
    running: int
    batches: int

    def figures(self, seeds: int) -> list[Replayed]:
        """Return the figures of one stream per seed."""
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
        error = statistics.median(abs(figure.estimate - 1) for figure in figures)
        missed += case.running >= 80 and case.batches >= 3 and error > 0.10
    return 1 if missed else 0


def _cases() -> Iterator[Case]:
    for cv, limit in product((0.6, 0.9, 1.2, 1.6), (8192, 32_768)):
        if cv == 1.6 and limit == 8192:
            # No lengths of mean 2,500 under this limit have such a CV.
            continue
        for running, batches in product((16, 80, 320), (1, 3)):
            yield Case(cv=cv, limit=limit, running=running, batches=batches)


def _line(case: Case, figures: list[Replayed]) -> str:
    errors = sorted(100 * abs(figure.estimate - 1) for figure in figures)
    bias = 100 * (statistics.mean(figure.estimate for figure in figures) - 1)
    naive = 100 * (statistics.median(figure.naive for figure in figures) - 1)
    covered = 100 * sum(figure.covers() for figure in figures) / len(figures)
    stated = 100 * statistics.median(figure.error for figure in figures)
    p90 = errors[math.ceil(0.9 * len(errors)) - 1]
    return (
        f"{case.cv:>4}{case.limit:>8}{case.running:>9}{case.batches * case.running:>13}"
        f"{bias:>+10.1f}{statistics.median(errors):>9.1f}{p90:>9.1f}{naive:>+9.0f}{covered:>11.0f}"
        f"{stated:>8.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
