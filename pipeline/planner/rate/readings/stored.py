"""The public readings that ship with the product, and what the fit made of them.

`data/readings.json` holds what was published: one reading a row, with its source and, where it is
known, its date. `data/effects.json` is written by `make estimate-fit`: for each of these readings
the logarithm of measured over predicted, the shares of its time by part, and its traits.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.planner.rate.readings.traits import Traits

_DATA = Path(__file__).with_name("data")
READINGS_FILE = _DATA / "readings.json"
EFFECTS_FILE = _DATA / "effects.json"

VENDOR, USUAL_VENDOR = "vendor", "nvidia"
# Parts of the time per token that have an error of their own.
PARTS = ("weights", "attention", "overhead", "communication", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A reading beside its prediction.

    `log_ratio` is the logarithm of measured over predicted tokens/s, to first order in the
    offsets of the parts; `shares` are the parts' shares of the time. A reading of `weight` below 1
    is an outlier among those near to it. `date` is None where it was not published.
    """

    traits: Traits
    log_ratio: float
    shares: tuple[float, ...]
    weight: float
    source: str
    date: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """The anchors, and the standard deviations by which their traits tell of other launches.

    `level_sds` are by level and part. `noise_sd` is of one reading among others of its setting;
    the band is that of effects `scale` times as wide, as readings of other pairs and models showed.
    """

    anchors: tuple[Anchor, ...]
    level_sds: dict[str, tuple[float, ...]]
    noise_sd: float
    scale: float

    def wide_sds(self, level: str) -> tuple[float, ...]:
        """Return the sds of a level, by part, that the band is drawn from."""
        # That of a vendor is assumed, and wide enough.
        scale = 1.0 if level == VENDOR else self.scale
        return tuple(scale * sd for sd in self.level_sds[level])


def readings() -> Iterator[dict[str, Any]]:
    """Yield each published reading by the names of its columns."""
    stored = json.loads(READINGS_FILE.read_text())
    for row in stored["rows"]:
        fields = dict(zip(stored["columns"], row, strict=True))
        fields["source"] = stored["sources"][fields["source"]]
        yield fields


@cache
def stored_effects() -> Effects:
    """Return the effects that the last fit wrote."""
    stored = json.loads(EFFECTS_FILE.read_text())
    published = {row["id"]: row for row in readings()}
    anchors = tuple(
        Anchor(
            traits=Traits(**{name: stored["traits"][name][at] for name, at in traits.items()}),
            log_ratio=log_ratio,
            shares=tuple(shares),
            weight=weight,
            source=published[row_id]["source"],
            date=published[row_id]["date"],
        )
        for row_id, traits, log_ratio, shares, weight in _rows(stored)
    )
    return Effects(
        anchors=anchors,
        level_sds={name: tuple(sds) for name, sds in stored["level_sds"].items()},
        noise_sd=stored["noise_sd"],
        scale=stored["scale"],
    )


def _rows(
    stored: dict[str, Any],
) -> Iterator[tuple[str, dict[str, int], float, list[float], float]]:
    names = tuple(stored["traits"])
    for row_id, places, log_ratio, shares, weight in stored["rows"]:
        yield row_id, dict(zip(names, places, strict=True)), log_ratio, shares, weight
