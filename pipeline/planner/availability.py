"""The part of the time that an engine generates; restarts, hangs and retries take the rest."""

import math

from schemas.estimate import Band

# assumed, until a run shows its own: 0.95, and 0.88 to 0.98 in eight cases of ten. In the logit
# those three lie evenly: 1.99, 2.94, 3.89.
AVAILABILITY = Band(p10=0.88, p50=0.95, p90=0.98)
# assumed: what interrupts a run comes once in half a day or so; that long says as much as the band
_HOURS_OF_THE_PRIOR = 12.0
_P90 = 1.2816  # of a standard normal


def drawn_availability(normal: float, band: Band) -> float:
    """One draw whose p10, p50 and p90 are the band's, normal in the logit on either side."""
    if band.p10 == band.p90:
        return band.p50
    side = band.p10 if normal < 0 else band.p90
    width = abs(_logit(side) - _logit(band.p50)) / _P90
    return _fraction(_logit(band.p50) + width * normal)


def availability_seen(generating_s: float, passed_s: float, prior: Band = AVAILABILITY) -> Band:
    """The prior and what a run has shown: engines' generating time over the time that passed."""
    hours = passed_s / 3600
    if hours <= 0:
        return prior
    weight = hours / (hours + _HOURS_OF_THE_PRIOR)
    middle = (1 - weight) * prior.p50 + weight * min(generating_s / passed_s, 1.0)
    narrower = math.sqrt(1 - weight)
    low = narrower * (_logit(prior.p10) - _logit(prior.p50))
    high = narrower * (_logit(prior.p90) - _logit(prior.p50))
    return Band(
        p10=_fraction(_logit(middle) + low), p50=middle, p90=_fraction(_logit(middle) + high)
    )


def _logit(fraction: float) -> float:
    fraction = min(max(fraction, 1e-6), 1 - 1e-6)
    return math.log(fraction / (1 - fraction))


def _fraction(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))
