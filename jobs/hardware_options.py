"""Hardware options and prices as they are given on the command line: `--hardware` and `--price`."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.errors import PlanError

if TYPE_CHECKING:
    from pipeline.planner.estimate.estimate import PricedGroup

# More than anyone rents for one job: a larger count is a typing mistake.
MAX_CARDS = 100_000
# As `hardware.count` of a run file allows.
MAX_CARDS_OF_ONE_RUN = 64


def counted_card(text: str) -> tuple[str, int | None]:
    """Split `CARD[:COUNT]`; the count is None where it is left out. Raises PlanError."""
    name, colon, count = text.rpartition(":")
    if not colon:
        return text, None
    if not name or not count.isdecimal() or not 1 <= int(count) <= MAX_CARDS_OF_ONE_RUN:
        raise PlanError(f"--gpu {text}: expected CARD or CARD:COUNT, for example b200:8")
    return name, int(count)


def groups_of(
    text: str, prices: Mapping[str, tuple[float | None, float | None]]
) -> "tuple[PricedGroup, ...]":
    """Parse `GPU:COUNT[+GPU:COUNT]`, with own prices by card. Raises PlanError."""
    return tuple(_group(part, text, prices) for part in text.split("+"))


def _group(
    part: str, text: str, prices: Mapping[str, tuple[float | None, float | None]]
) -> "PricedGroup":
    from pipeline.planner.cards import gpu_named
    from pipeline.planner.estimate.estimate import PricedGroup
    from pipeline.planner.rate.search import HardwareOption

    name, _, count = part.strip().rpartition(":")
    if not name or set(":,") & set(name) or not count.isdecimal() or int(count) < 1:
        raise PlanError(f"--hardware {text}: expected GPU:COUNT, for example b200:7")
    if int(count) > MAX_CARDS:
        raise PlanError(f"--hardware {text}: found {count} cards; expected at most {MAX_CARDS}")
    gpu = gpu_named(name)
    usd, spot_usd = prices.get(gpu.name, (None, None))
    hardware = HardwareOption(gpu=gpu, count=int(count))
    return PricedGroup(hardware=hardware, own_usd=usd, own_spot_usd=spot_usd)


def own_prices(texts: Sequence[str]) -> dict[str, tuple[float | None, float | None]]:
    """Parse every `GPU=USD[/SPOT]` into prices by card, on demand and spot. Raises PlanError."""
    prices: dict[str, tuple[float | None, float | None]] = {}
    for text in texts:
        name, figures = own_price(text)
        if name in prices:
            raise PlanError(f"--price {text}: {name} is priced twice")
        prices[name] = figures
    return prices


def own_price(text: str) -> tuple[str, tuple[float | None, float | None]]:
    """Parse `GPU=USD[/SPOT]` into the card's name and its two prices. Raises PlanError."""
    from pipeline.planner.cards import gpu_named

    name, equals, figures = text.partition("=")
    on_demand, _, spot = figures.partition("/")
    try:
        usd = float(on_demand) if on_demand else None
        spot_usd = float(spot) if spot else None
    except ValueError:
        usd = spot_usd = None
    known = [figure for figure in (usd, spot_usd) if figure is not None]
    if not equals or not known or not all(0 <= figure < math.inf for figure in known):
        raise PlanError(f"--price {text}: expected GPU=USD or GPU=USD/SPOT, for example b200=4.89")
    return gpu_named(name).name, (usd, spot_usd)
