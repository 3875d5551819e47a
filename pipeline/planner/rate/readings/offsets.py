"""Offsets of the predicted time, learned from readings near to a launch.

The logarithm of measured over predicted tokens/s is a sum over the parts of the time, each by its
share. A part's offset is a sum of independent normal effects, one per level: an effect of the
engine, one of the card, one of the model's family on this card, and so on. Readings that share a
trait share its effect, so the offset of a launch is a weighted mean of the errors of its
neighbours, and what they leave open is the width of its band. `make estimate-fit` learns the
standard deviation of each level.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING

from pipeline.planner.rate.readings.stored import (
    PARTS,
    USUAL_VENDOR,
    Anchor,
    Effects,
    stored_effects,
)
from pipeline.planner.rate.readings.traits import Traits
from schemas.estimate import Support

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Variances = Mapping[str, NDArray[np.float64]]

# Level: the traits that two launches must share to share its effect.
LEVELS: dict[str, tuple[str, ...]] = {
    "engine": ("engine",),
    "card": ("card",),
    "kind": ("kind",),
    "format": ("format",),
    "family": ("family",),
    "kind by engine": ("engine", "kind"),
    "format by engine": ("engine", "format"),
    "format by card": ("card", "format"),
    "family by engine": ("engine", "family"),
    "family by card": ("card", "family"),
    "family by format": ("family", "format"),
    "model by engine": ("engine", "model"),
    "pair": ("engine", "card", "family", "format"),
    "vendor": ("vendor", "kind", "format"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """Correction of a launch by readings: per part the log of measured over predicted speed.

    `covariance` is what they leave open of it, and `noise_sd` the difference of two readings of
    one setting.
    """

    means: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    noise_sd: float
    support: tuple[Support, ...]
    time_factors: tuple[float, ...]
    """Factor on the time of each part, in the order of `PARTS`."""

    def log_sd(self, shares: Sequence[float]) -> float:
        """Return the error of log tokens/s where the parts have these shares of the time."""
        open_ = sum(
            mine * other * value
            for mine, row in zip(shares, self.covariance, strict=True)
            for other, value in zip(shares, row, strict=True)
        )
        return float((max(open_, 0.0) + self.noise_sd**2) ** 0.5)


NO_OFFSETS = Offsets(
    means=(0.0,) * len(PARTS),
    covariance=((0.0,) * len(PARTS),) * len(PARTS),
    noise_sd=0.0,
    support=(),
    time_factors=(1.0,) * len(PARTS),
)


@cache
def offsets_for(traits: Traits, own: tuple[Anchor, ...] = ()) -> Offsets:
    """Return the offsets of a launch, from the public readings and from one's own."""
    return _posterior(own).offsets(traits)


@cache
def _posterior(own: tuple[Anchor, ...]) -> "Posterior":
    effects = stored_effects()
    return Posterior(effects.anchors + own, effects)


class Posterior:
    """The normal distribution of all effects, given readings.

    The band is that of wider effects than those that the means are weighed by.
    """

    def __init__(self, anchors: Sequence[Anchor], effects: Effects) -> None:
        import numpy as np

        self._anchors, self._effects = tuple(anchors), effects
        self._shares = np.array([anchor.shares for anchor in anchors], dtype=float)
        self._variances = {name: np.square(effects.level_sds[name]) for name in LEVELS}
        self._wide = {name: np.square(effects.wide_sds(name)) for name in LEVELS}
        self._keys = {
            level: np.array([level_key(anchor.traits, level) or "" for anchor in anchors])
            for level in LEVELS
        }
        log_ratios = np.array([anchor.log_ratio for anchor in anchors])
        self._pull = self._inverse(self._variances) @ log_ratios
        self._wide_inverse = self._inverse(self._wide)

    def _inverse(self, variances: "Variances") -> "NDArray[np.float64]":
        """Return the inverse of the covariance of the readings."""
        import numpy as np

        noise = [self._effects.noise_sd**2 / anchor.weight for anchor in self._anchors]
        covariance = np.diag(noise)
        for level, of_parts in variances.items():
            same = shared_effects(self._anchors, level)
            covariance += same * ((self._shares * of_parts) @ self._shares.T)
        return np.linalg.inv(covariance)

    def offsets(self, traits: Traits) -> Offsets:
        """Return what the readings say of a launch with these traits."""
        import numpy as np

        means = tuple(float(mean) for mean in self._toward(traits, self._variances).T @ self._pull)
        toward = self._toward(traits, self._wide)
        prior = sum(
            variances
            for level, variances in self._wide.items()
            if level_key(traits, level) is not None
        )
        open_ = np.diag(prior) - toward.T @ self._wide_inverse @ toward
        return Offsets(
            means=means,
            covariance=tuple(tuple(float(value) for value in row) for row in open_),
            noise_sd=self._effects.noise_sd,
            support=support_of(traits, self._anchors),
            time_factors=tuple(math.exp(-mean) for mean in means),
        )

    def _toward(self, traits: Traits, variances: "Variances") -> "NDArray[np.float64]":
        """Return the covariance of each reading with each part of a launch."""
        import numpy as np

        toward = np.zeros_like(self._shares)
        for level, of_parts in variances.items():
            mine = level_key(traits, level)
            if mine is not None:
                toward += (self._keys[level] == mine)[:, None] * of_parts
        weighed: NDArray[np.float64] = toward * self._shares
        return weighed


def shared_effects(anchors: Sequence[Anchor], level: str) -> "NDArray[np.float64]":
    """Return 1 for each two readings that share their effect of a level, and 0 for others."""
    import numpy as np

    keys = [level_key(anchor.traits, level) for anchor in anchors]
    places = np.unique([key or "" for key in keys], return_inverse=True)[1]
    has = np.array([key is not None for key in keys])
    shared: NDArray[np.bool_] = (places[:, None] == places[None, :]) & has[:, None]
    return shared.astype(np.float64)


def level_key(traits: Traits, level: str) -> str | None:
    """Name the effect of a level that a launch has; None where it has none."""
    if level == "vendor" and traits.vendor == USUAL_VENDOR:
        # The kernels' constants are of its cards.
        return None
    return " | ".join(getattr(traits, name) for name in LEVELS[level])


# --- which readings ----------------------------------------------------------------------------

_RELATIONS: dict[str, tuple[str, ...]] = {
    "this model, card, format and engine": ("family", "card", "format", "engine"),
    "this model on this card in other formats or engines": ("family", "card"),
    "this model on other cards": ("family",),
    "models of this kind on this card": ("kind", "card"),
    "models of this kind on other cards": ("kind",),
}
# Farther readings are named only where nearer ones are fewer.
_ENOUGH_READINGS = 20


def support_of(traits: Traits, anchors: Sequence[Anchor]) -> tuple[Support, ...]:
    """Count the readings that a launch stands on, nearest first."""
    found: list[Support] = []
    left = list(anchors)
    for relation, names in _RELATIONS.items():
        if sum(each.readings for each in found) >= _ENOUGH_READINGS:
            break
        shared = attrgetter(*names)
        mine = shared(traits)
        near = [anchor for anchor in left if shared(anchor.traits) == mine]
        left = [anchor for anchor in left if shared(anchor.traits) != mine]
        if near:
            dates = sorted(anchor.date for anchor in near if anchor.date)
            found.append(
                Support(
                    relation=relation,
                    readings=len(near),
                    sources=tuple(dict.fromkeys(anchor.source for anchor in near)),
                    first_date=dates[0] if dates else None,
                    last_date=dates[-1] if dates else None,
                )
            )
    return tuple(found)
