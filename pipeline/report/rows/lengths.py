"""Lengths counted in classes of three digits: some thousand counts for any number of rows. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class LengthCounts:
    """Lengths in tokens: their exact sum and maximum, and all others in classes."""

    turns: int = 0
    total_tokens: int = 0
    most_tokens: int = 0
    _classes: Counter[int] = field(default_factory=Counter)

    def add(self, counts: Mapping[int, int]) -> None:
        """Add lengths, each with its number of turns."""
        for tokens, turns in counts.items():
            self.turns += turns
            self.total_tokens += tokens * turns
            self.most_tokens = max(self.most_tokens, tokens)
            self._classes[_to_three_digits(tokens)] += turns

    @property
    def counts(self) -> dict[int, int]:
        """Return turns by length; no class exceeds the greatest length."""
        counts: Counter[int] = Counter()
        for tokens, turns in self._classes.items():
            counts[min(tokens, self.most_tokens)] += turns
        return dict(counts)

    @property
    def mean_tokens(self) -> float:
        """Average length; 0 without any."""
        return self.total_tokens / self.turns if self.turns else 0.0

    def quantile(self, share: float) -> int:
        """Return the length that this share of the turns does not exceed; 0 without any."""
        return quantile(self.counts, share)


def quantile(counts: Mapping[int, int], share: float) -> int:
    """Return the least value that this share of the counts does not exceed; 0 for none."""
    left = share * sum(counts.values())
    for value, count in sorted(counts.items()):
        left -= count
        if left <= 1e-9:
            return value
    return max(counts, default=0)


def _to_three_digits(tokens: int) -> int:
    if tokens < 1_000:
        return tokens
    surplus = len(str(tokens)) - 3
    return round(tokens, -surplus)
