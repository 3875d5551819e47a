"""Lengths that change along the input, as in a sorted one: blocks of finished completions. Pure.

The mean over all completions so far does not hold for the rest of a sorted input. Blocks keep the
order in which completions ended; where the later ones differ from all, the rest goes on like that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.planner.lengths.lengths import LengthModel
from pipeline.planner.lengths.shapes import LogNormalCut

_MAX_BLOCKS = 16
_FIRST_BLOCK = 16
# assumed: while fewer completions per running one have ended, the later ones are the longer ones
_LEAST_PER_RUNNING = 3
_LEAST_COMPLETIONS = 100
# assumed: a difference below this, or within three standard errors, is chance
_LEAST_LOG_RATIO, _LEAST_DEVIATIONS = 0.05, 3.0
# assumed: a trend goes on at about two thirds, and at most so many times what it has done so far
_CONTINUED, _MOST_STEPS = 0.7, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBlock:
    """Completions that ended one after the other: their number, tokens and squares of tokens."""

    count: int = 0
    tokens: float = 0.0
    squares: float = 0.0

    def with_lengths(self, lengths: Sequence[tuple[int, int]]) -> "LengthBlock":
        """Add lengths with their counts."""
        return LengthBlock(
            count=self.count + sum(count for _, count in lengths),
            tokens=self.tokens + sum(tokens * count for tokens, count in lengths),
            squares=self.squares + sum(float(tokens) ** 2 * count for tokens, count in lengths),
        )

    def joined(self, other: "LengthBlock") -> "LengthBlock":
        """Return both blocks as one."""
        return LengthBlock(
            count=self.count + other.count,
            tokens=self.tokens + other.tokens,
            squares=self.squares + other.squares,
        )

    def mean(self) -> float:
        return self.tokens / self.count

    def relative_error(self) -> float:
        """Return the standard error of the mean over the mean."""
        mean = self.mean()
        variance = max(self.squares / self.count - mean**2, 0.0)
        return math.sqrt(variance / self.count) / mean if mean else math.inf


def with_span(
    blocks: Sequence[LengthBlock], lengths: Sequence[tuple[int, int]]
) -> list[LengthBlock]:
    """Add the completions of one span; blocks stay few, and about equally large."""
    if not lengths:
        return list(blocks)
    kept = list(blocks)
    size = max((block.count for block in kept[:-1]), default=_FIRST_BLOCK)
    if kept and kept[-1].count < size:
        kept[-1] = kept[-1].with_lengths(lengths)
    else:
        kept.append(LengthBlock().with_lengths(lengths))
    if len(kept) > _MAX_BLOCKS:
        kept = [
            kept[place].joined(kept[place + 1]) if place + 1 < len(kept) else kept[place]
            for place in range(0, len(kept), 2)
        ]
    return kept


def with_drift(
    lengths: LengthModel, blocks: Sequence[LengthBlock], *, running: int, share_done: float
) -> LengthModel:
    """Return the lengths to expect of the rest, where they drift along the input."""
    later = LengthBlock()
    total = sum(block.count for block in blocks)
    for block in reversed(blocks):
        if 2 * later.count >= total:
            break
        later = later.joined(block)
    enough = max(_LEAST_PER_RUNNING * running, _LEAST_COMPLETIONS)
    mean = lengths.summary.mean_tokens
    if later.count < enough or not later.tokens > 0 or not 0 < share_done < 1:
        return lengths
    log_ratio = math.log(later.mean() / mean)
    error = math.hypot(later.relative_error(), lengths.summary.mean_relative_error)
    if abs(log_ratio) < max(_LEAST_LOG_RATIO, _LEAST_DEVIATIONS * error):
        return lengths
    # From the middle of all to the middle of the later half is a quarter of what is done; from
    # there to the middle of the rest it is this many times as far.
    steps = min((2 - share_done) / share_done, _MOST_STEPS) * _CONTINUED
    return _scaled(lengths, (1 + steps) * log_ratio, abs(steps * log_ratio))


def _scaled(lengths: LengthModel, log_factor: float, log_sd: float) -> LengthModel:
    summary, limit = lengths.summary, float(lengths.summary.limit_tokens)
    factor = min(math.exp(log_factor), limit / summary.mean_tokens)
    shape = lengths.shape
    if isinstance(shape, LogNormalCut):
        shape = replace(shape, mu=shape.mu + math.log(factor))
    else:
        shape = replace(shape, bin_means=tuple(min(factor * m, limit) for m in shape.bin_means))
    return LengthModel(
        summary=replace(
            summary,
            mean_tokens=factor * summary.mean_tokens,
            mean_relative_error=math.hypot(summary.mean_relative_error, log_sd),
            source=f"{summary.source}; the later ones differ, so the rest is expected to as well",
        ),
        shape=shape,
    )
