"""Rates of launch plans as far as they are known: forecasts are the prior, readings the evidence.

The logarithms of the rates are jointly normal. An error that all forecasts share, such as that of
the card's bandwidth, says nothing about which plan is faster, so a reading of one plan moves the
others along.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForecast:
    """Predicted tokens/s of one engine, and the error that is the plan's own."""

    name: str
    tokens_per_s: float
    log_sd: float
    """Standard deviation of the logarithm, beside the error that all plans share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Means and covariances of the logarithms of the plans' tokens/s."""

    means: tuple[float, ...]
    covariances: tuple[tuple[float, ...], ...]

    @property
    def best(self) -> int:
        """Plan with the highest mean."""
        return max(range(len(self.means)), key=self.means.__getitem__)

    def after_reading(self, plan: int, tokens_per_s: float, log_sd: float) -> "Beliefs":
        """Return the beliefs after a reading of one plan with an error of its own."""
        row = self.covariances[plan]
        total = row[plan] + log_sd**2
        surprise = math.log(tokens_per_s) - self.means[plan]
        means = tuple(mean + row[other] / total * surprise for other, mean in enumerate(self.means))
        covariances = tuple(
            tuple(value - row[first] * row[second] / total for second, value in enumerate(values))
            for first, values in enumerate(self.covariances)
        )
        return Beliefs(means=means, covariances=covariances)

    def lead(self, plan: int, over: int) -> NormalDist:
        """Return the logarithm of how many times as fast one plan is as another."""
        rows = self.covariances
        variance = rows[plan][plan] + rows[over][over] - 2 * rows[plan][over]
        # At least a rounding error, so that it remains a distribution.
        return NormalDist(self.means[plan] - self.means[over], math.sqrt(max(variance, 1e-12)))

    def chance_to_beat(self, plan: int, over: int) -> float:
        return 1.0 - self.lead(plan, over).cdf(0.0)


def prior_beliefs(plans: Sequence[PlanForecast], shared_log_sd: float) -> Beliefs:
    """Return what the forecasts say before any reading."""
    shared = shared_log_sd**2
    return Beliefs(
        means=tuple(math.log(plan.tokens_per_s) for plan in plans),
        covariances=tuple(
            tuple(shared + (one.log_sd**2 if one is other else 0.0) for other in plans)
            for one in plans
        ),
    )
