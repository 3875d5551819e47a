"""Figures of the progress line. Pure: the time is a number."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from pipeline.live.output import time_left
from schemas.progress import Progress, WorkerReport

Show = Callable[[Progress, list[str]], None]
"""Shows the progress and the log lines since the last time."""
Display = Callable[[], AbstractContextManager[Show]]
"""Opens a display."""

_RATE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressFigures:
    """Figures of one moment."""

    rows_done: int
    rows_total: int
    rows_error: int
    rows_failed: int
    tokens_per_s: float
    engines_up: int
    in_flight: int
    waiting: int
    """Rows that wait for their next attempt."""
    retries: int
    """Interrupted requests, each of which is sent again or was the row's last attempt."""
    timeouts: int
    refusals: int
    time_left: str


@dataclass(slots=True)
class ProgressMeter:
    """Turns the progress of successive moments into figures."""

    _tokens: deque[tuple[float, int]] = field(default_factory=deque)
    _workers: dict[str, WorkerReport] = field(default_factory=dict)
    """Last reports, those of ended workers included: their counts stay."""

    def figures(self, progress: Progress, now_s: float) -> ProgressFigures:
        """Note a moment and return its figures."""
        self._workers.update((worker.worker_id, worker) for worker in progress.workers)
        every = self._workers.values()
        return ProgressFigures(
            rows_done=progress.rows_finished,
            rows_total=progress.rows_total,
            rows_error=progress.rows_error,
            rows_failed=progress.rows_failed,
            tokens_per_s=self._rate(progress, now_s),
            engines_up=sum(worker.state in ("running", "idle") for worker in progress.workers),
            in_flight=sum(worker.in_flight for worker in progress.workers),
            waiting=sum(worker.backing_off for worker in progress.workers),
            retries=sum(worker.interruptions for worker in every),
            timeouts=sum(worker.timeouts for worker in every),
            refusals=sum(worker.refusals for worker in every),
            time_left=time_left(progress.days_left),
        )

    def _rate(self, progress: Progress, now_s: float) -> float:
        """Return the tokens/s of the last minute."""
        tokens = self._tokens
        tokens.append((now_s, sum(worker.completion_tokens for worker in progress.workers)))
        while tokens[0][0] < now_s - _RATE_WINDOW_S:
            tokens.popleft()
        (first_s, first), (last_s, last) = tokens[0], tokens[-1]
        # A worker that was replaced counts from 0.
        return max(0, last - first) / max(last_s - first_s, 1e-3)


def progress_line(figures: ProgressFigures) -> str:
    """Return the line for a log."""
    return (
        f"event=progress rows={figures.rows_done}/{figures.rows_total} "
        f"tokens_per_s={figures.tokens_per_s:.0f} in_flight={figures.in_flight} "
        f"errors={figures.rows_error} failed={figures.rows_failed} engines={figures.engines_up} "
        f"waiting={figures.waiting} retries={figures.retries} timeouts={figures.timeouts} "
        f"refusals={figures.refusals} time_left={figures.time_left!r}"
    )


def rows_text(figures: ProgressFigures) -> str:
    """Return the words beside the bar."""
    share = figures.rows_done / figures.rows_total if figures.rows_total else 1.0
    rows = f"{figures.rows_done:,}/{figures.rows_total:,} rows ({share:.0%})"
    is_over = figures.rows_done + figures.rows_failed == figures.rows_total
    return rows if is_over else f"{rows}, time left {figures.time_left}"


def counts_text(figures: ProgressFigures) -> str:
    """Return the words below the bar. What has not happened is left out."""
    rare = [
        (figures.rows_error, "error row", "error rows"),
        (figures.rows_failed, "failed row", "failed rows"),
        (figures.waiting, "waiting", "waiting"),
        (figures.retries, "retry", "retries"),
        (figures.timeouts, "timeout", "timeouts"),
        (figures.refusals, "refusal", "refusals"),
    ]
    words = [
        _counted(figures.engines_up, "engine", "engines"),
        f"{figures.tokens_per_s:,.0f} tokens/s",
        f"{figures.in_flight:,} in flight",
        *(_counted(count, one, many) for count, one, many in rare if count),
    ]
    return ", ".join(words)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
