"""What people see of a run while it goes on: log lines, and how far it is. The door to tqdm."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from pipeline.planner.update_output import time_left
from schemas.progress import Progress

Show = Callable[[Progress, list[str]], None]

_PLAIN_PROGRESS_S = 10.0
_RATE_WINDOW_S = 60.0


def log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


@contextmanager
def display(rows_total: int, rows_done: int) -> Iterator[Show]:
    """A bar that counts published rows on a terminal, a plain line now and then elsewhere."""
    rates: deque[tuple[float, int]] = deque()
    if not sys.stderr.isatty():
        told_s = [time.monotonic()]

        def show_plain(progress: Progress, events: list[str]) -> None:
            for event in events:
                log(event)
            now_s = time.monotonic()
            _note_rate(rates, now_s, progress)
            if now_s - told_s[0] >= _PLAIN_PROGRESS_S:
                told_s[0] = now_s
                log(f"event=progress {_progress_text(progress, rates)}")

        yield show_plain
        return
    with tqdm(total=rows_total, initial=rows_done, unit="row", smoothing=0.05) as bar:

        def show_bar(progress: Progress, events: list[str]) -> None:
            for event in events:
                bar.write(event, file=sys.stderr)
            _note_rate(rates, time.monotonic(), progress)
            bar.set_postfix_str(_progress_text(progress, rates).partition(" ")[2], refresh=False)
            bar.update(progress.rows_done - bar.n)
            bar.refresh()

        yield show_bar


def _note_rate(rates: deque[tuple[float, int]], now_s: float, progress: Progress) -> None:
    rates.append((now_s, sum(worker.completion_tokens for worker in progress.workers)))
    while rates[0][0] < now_s - _RATE_WINDOW_S:
        rates.popleft()


def _progress_text(progress: Progress, rates: deque[tuple[float, int]]) -> str:
    (first_s, first_tokens), (last_s, last_tokens) = rates[0], rates[-1]
    tokens_per_s = max(0, last_tokens - first_tokens) / max(last_s - first_s, 1e-3)
    in_flight = sum(worker.in_flight for worker in progress.workers)
    return (
        f"rows={progress.rows_done}/{progress.rows_total} tokens_per_s={tokens_per_s:.0f} "
        f"in_flight={in_flight} errors={progress.rows_error} failed={progress.rows_failed}"
        + (f" time_left='{time_left(progress.days_left)}'" if progress.days_left else "")
    )
