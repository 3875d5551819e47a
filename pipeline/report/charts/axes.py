"""Axes of charts: round values, and positions on them."""

import math
from dataclasses import dataclass

_LOG_STEPS = (1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A value on an axis."""

    value: float
    percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Axes that start at zero."""

    x_end: float
    """Value at the right edge."""
    x_ticks: tuple[Tick, ...]
    x_unit: str = ""
    """Unit of the ticks' values."""
    y_ticks: tuple[Tick, ...]

    def left_percent(self, x: float) -> float:
        return percent(x, self.x_end)

    def bottom_percent(self, y: float) -> float:
        return percent(y, self.y_ticks[-1].value)

    def svg_point(self, x: float, y: float) -> str:
        """Format a point for the `points` of an SVG shape in a box of 100 x 100."""
        return f"{self.left_percent(x):g},{round(100 - self.bottom_percent(y), 2):g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An axis from one value to another, even or logarithmic."""

    low: float
    high: float
    is_log: bool = False

    def percent(self, value: float) -> float:
        """Return the position of a value; one beyond an end is at the end."""
        if self.is_log:
            span = math.log(self.high / self.low)
            return percent(math.log(max(value, self.low) / self.low), span)
        return percent(value - self.low, self.high - self.low)

    def value(self, share: float) -> float:
        """Return the value at this share of the axis, 0 to 1."""
        if self.is_log:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + share * (self.high - self.low)

    def ticks(self, *, most: int = 5) -> tuple[Tick, ...]:
        """Return the round values on the axis."""
        values = self._log_values(most) if self.is_log else self._even_values(most)
        return tuple(Tick(value=value, percent=self.percent(value)) for value in values)

    def _even_values(self, most: int) -> list[float]:
        step = round_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _log_values(self, most: int) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        fine = [10.0**power * step for power in powers for step in _LOG_STEPS]
        inside = [value for value in fine if self.low * 0.999 <= value <= self.high * 1.001]
        if len(inside) <= most + 2:
            return inside
        # Powers of ten alone, thinned from the lowest.
        whole = [value for value in inside if f"{value:e}".startswith("1.0000")]
        return whole[:: math.ceil(len(whole) / (most + 2))] or inside[:1]


def axis_ticks(highest: float, *, most: int = 5) -> tuple[Tick, ...]:
    """Return round values from zero to the first one not below the highest, the axis's end."""
    if highest <= 0:
        return (Tick(value=0.0, percent=0.0),)
    step = round_step(highest / most)
    number = math.ceil(highest / step - 1e-9)
    return tuple(Tick(value=i * step, percent=percent(i, number)) for i in range(number + 1))


def round_step(rough: float) -> float:
    """Return the least round number that is not below a rough step."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)


def percent(part: float, whole: float) -> float:
    """Return a percentage from 0 to 100 with two decimals, finer than any screen."""
    return round(min(max(part / whole, 0.0), 1.0) * 100, 2) if whole > 0 else 0.0
