"""Limits on the quality of a run's output, for the canary and for each engine. Pure.

The canary's rows are drawn at random from all open rows, because inputs are often sorted by kind
and length. A share exceeds its limit when a run exactly at the limit would have as many flagged
rows with a probability below 1 %. Unfinished rows count as good, because short rows finish first,
and empty ones before all others.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.quality.flags import FLAGS
from schemas.config.quality import QualityConfig
from schemas.config.run_file import RunFile
from schemas.manifest import Part, RunIdentity
from schemas.progress import WorkerReport
from schemas.session import Tally

ERROR_ROWS, MEAN_TOKENS = "error_rows", "mean_tokens"

# assumed: of a hundred healthy runs exactly at their limit, one is stopped for inspection.
_RISK = 0.01
# assumed: a run of a million rows on a few engines has some thousand distinct windows of 200 rows,
# so there is one false alarm in a hundred runs.
_WINDOW_RISK = 1e-6
_FLEET_RISK = 1e-3
_MIN_ROWS_TO_COMPARE = 20
_MIN_TURNS_FOR_A_MEAN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A limit that is exceeded."""

    name: str
    """A flag, `error_rows` or `mean_tokens`."""
    found: float
    limit: float
    num_rows: int
    """Rows that count against the limit; for the mean, all rows."""


# -- counts


def settings_fingerprint(identity: RunIdentity) -> str:
    """Hash the settings that alter rows: with other settings, another canary is due."""
    text = json.dumps(identity.settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def tally_of(parts: Iterable[Part], start: Tally | None = None) -> Tally:
    """Add the counts of published parts to `start`."""
    total = start or Tally()
    for part in parts:
        flags = Counter(total.flag_counts)
        flags.update(dict(part.flag_counts))
        total = Tally(
            num_rows=total.num_rows + part.num_rows,
            num_errors=total.num_errors + part.num_errors,
            num_turns=total.num_turns + part.num_turns,
            completion_tokens=total.completion_tokens + part.completion_tokens,
            flag_counts=dict(flags),
        )
    return total


# -- limits


def excesses(tally: Tally, config: RunFile, *, num_rows: int) -> tuple[Excess, ...]:
    """List the limits that are exceeded even if all unfinished rows of `num_rows` are good."""
    quality = config.quality
    exceeded = []
    limits = {ERROR_ROWS: quality.max_error_share, **_limits(quality, {})}
    counts = {ERROR_ROWS: tally.num_errors, **tally.flag_counts}
    for name, limit in limits.items():
        count = counts.get(name, 0)
        if limit is not None and chance_of_as_many(count, num_rows, limit) < _RISK:
            share = count / max(1, tally.num_rows)
            exceeded.append(Excess(name=name, found=share, limit=limit, num_rows=count))
    if tally.num_rows >= num_rows:
        exceeded += _mean_excess(tally, config)
    return tuple(exceeded)


def _mean_excess(tally: Tally, config: RunFile) -> list[Excess]:
    """Compare the mean length with the one that the run file expects, if it states one."""
    quality, expected = config.quality, config.lengths.output_tokens_mean
    if expected is None or tally.num_turns < _MIN_TURNS_FOR_A_MEAN:
        return []
    if not tally.completion_tokens:
        return []
    mean = tally.completion_tokens / tally.num_turns
    low, high = expected * quality.min_length_ratio, expected * quality.max_length_ratio
    if low <= mean <= high:
        return []
    limit = low if mean < low else high
    return [Excess(name=MEAN_TOKENS, found=mean, limit=limit, num_rows=tally.num_rows)]


def _limits(quality: QualityConfig, accepted: Mapping[str, float]) -> dict[str, float | None]:
    limits: dict[str, float | None] = {}
    for flag in FLAGS:
        limit = quality.flag(flag).max_share
        limits[flag] = limit if limit is None else min(0.99, max(limit, accepted.get(flag, 0.0)))
    return limits


def chance_of_as_many(count: int, num_rows: int, share: float) -> float:
    """Probability of `count` or more flagged rows among `num_rows`, each flagged with `share`."""
    if count <= num_rows * share:
        return 1.0
    if share <= 0:
        return 0.0
    log_term = (
        math.lgamma(num_rows + 1)
        - math.lgamma(count + 1)
        - math.lgamma(num_rows - count + 1)
        + count * math.log(share)
        + (num_rows - count) * math.log1p(-share)
    )
    term = total = math.exp(log_term)
    # Above the mean each term is smaller than the one before.
    for number in range(count, num_rows):
        term *= (num_rows - number) / (number + 1) * share / (1 - share)
        total += term
        if term < total * 1e-12:
            break
    return min(1.0, total)


# -- engines


def turned_bad(
    worker_id: str,
    reports: Mapping[str, WorkerReport],
    quality: QualityConfig,
    accepted: Mapping[str, float],
) -> str | None:
    """Give the reason to drain this worker's engine; None while there is none.

    An engine is compared with the others: where all of them exceed the limit too, the rows or the
    model are at fault. A single engine needs a full window.
    """
    own = reports[worker_id]
    others = [
        other
        for other in reports.values()
        if other.worker_id != worker_id and other.window_rows >= _MIN_ROWS_TO_COMPARE
    ]
    for flag, limit in _limits_of_engine(quality, accepted).items():
        if limit is None or _chance(own, flag, limit) >= _WINDOW_RISK:
            continue
        another_keeps_it = any(_chance(other, flag, limit) >= _FLEET_RISK for other in others)
        if another_keeps_it or (not others and own.window_rows >= quality.window_rows):
            count = own.window_flags.get(flag, 0)
            return f"{flag} in {count} of its last {own.window_rows} rows (limit {limit:.0%})"
    return None


def _limits_of_engine(
    quality: QualityConfig, accepted: Mapping[str, float]
) -> dict[str, float | None]:
    """Return the limits of flags, and of refused rows, which count in the window too."""
    return {ERROR_ROWS: quality.max_error_share, **_limits(quality, accepted)}


def broken_by_all(
    reports: Mapping[str, WorkerReport], quality: QualityConfig, accepted: Mapping[str, float]
) -> dict[str, float]:
    """Map each flag whose limit every engine exceeds to its share; empty for a single engine.

    The rows or the model are at fault, so no engine is drained.
    """
    judged = [one for one in reports.values() if one.window_rows >= _MIN_ROWS_TO_COMPARE]
    if len(judged) < 2:
        return {}
    broken = {}
    for flag, limit in _limits(quality, accepted).items():
        if limit is not None and all(_chance(one, flag, limit) < _FLEET_RISK for one in judged):
            count = sum(one.window_flags.get(flag, 0) for one in judged)
            broken[flag] = count / sum(one.window_rows for one in judged)
    return broken


def _chance(report: WorkerReport, flag: str, limit: float) -> float:
    return chance_of_as_many(report.window_flags.get(flag, 0), report.window_rows, limit)
