"""Replicas that share one launch and one kind of card, and why their rate may be another."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One reason why a rate may be another. The same name in two groups is the same luck."""

    name: str
    value: str
    source: str
    measure: str
    log_sd: float
    """Of the logarithm of tokens/s."""
    heavy_tailed: bool = False
    """Student's t of 4 degrees of freedom, with this same standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateGroup:
    """Replicas of one launch on one kind of card."""

    name: str
    replicas: int
    gpus_per_replica: int
    tokens_per_s: float
    """Of one replica, prefill taken off."""
    running_requests: float
    """Of one replica."""
    small_step_s: float
    """Seconds a token, of a request that runs nearly alone: the tail's pace, MTP counted in."""
    load_s: float
    """Reading the weights, from storage to cards."""
    spreads: tuple[Spread, ...]
    elasticity_to_length: float = 0.0
    """Change of log tokens/s a change of log mean length: below 0 where KV limits the batch."""


def rate_of(groups: Iterable[RateGroup]) -> float:
    """Tokens/s of all groups: one queue feeds them, so that none waits for another."""
    return sum(group.replicas * group.tokens_per_s for group in groups)
