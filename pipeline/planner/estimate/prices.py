"""Prices per GPU-hour: the catalogue's listings, or the user's own.

A price quotes one listing, the one nearest to the median; its range covers all listings. The
caller passes today's date.
"""

from collections.abc import Sequence
from datetime import date
from statistics import median

from pipeline.errors import PlanError
from pipeline.planner.cards import Listing, listed_prices
from pipeline.planner.estimate.cost import is_stale
from schemas.estimate import Price
from schemas.plan import Gpu

OWN_PRICE = "your own price"
_UNDATED = "date not known"


def prices_of(
    gpu: Gpu, today: date, *, own_usd: float | None = None, own_spot_usd: float | None = None
) -> tuple[Price, ...]:
    """Return the prices on demand, then on spot, where known. Own prices replace both."""
    if own_usd is not None or own_spot_usd is not None:
        own = (("own", own_usd), ("spot", own_spot_usd))
        return tuple(
            _own_price("own" if kind == "own" else "spot", usd, today)
            for kind, usd in own
            if usd is not None
        )
    listings = listed_prices(gpu)
    found = []
    for kind in ("on_demand", "spot"):
        of_kind = [listing for listing in listings if listing.kind == kind]
        if of_kind:
            found.append(_quoted(of_kind, today))
    return tuple(found)


def _own_price(kind: str, usd: float, today: date) -> Price:
    if not usd >= 0:
        raise PlanError(f"price: found {usd:g} USD per GPU-hour; it must be 0 or more")
    return Price(
        kind="own" if kind == "own" else "spot",
        low_usd_per_gpu_hour=usd,
        usd_per_gpu_hour=usd,
        high_usd_per_gpu_hour=usd,
        source=OWN_PRICE,
        date=today.isoformat(),
        stale=False,
    )


def _quoted(listings: Sequence[Listing], today: date) -> Price:
    middle = median(_middle(listing) for listing in listings)
    # Of two listings equally near the median, quote the newer one.
    quoted = min(
        sorted(listings, key=lambda listing: listing.date, reverse=True),
        key=lambda listing: abs(_middle(listing) - middle),
    )
    return Price(
        kind=quoted.kind,
        low_usd_per_gpu_hour=min(listing.low_usd_per_gpu_hour for listing in listings),
        usd_per_gpu_hour=_middle(quoted),
        high_usd_per_gpu_hour=max(listing.high_usd_per_gpu_hour for listing in listings),
        source=quoted.source,
        date=quoted.date or _UNDATED,
        stale=is_stale(quoted.date, today),
    )


def _middle(listing: Listing) -> float:
    return (listing.low_usd_per_gpu_hour + listing.high_usd_per_gpu_hour) / 2
