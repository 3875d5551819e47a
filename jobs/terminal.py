"""Output of a command on the terminal: the answer, one line of error, the log and the progress.

The door to tqdm. Heavy imports load inside the functions, so that --help stays quick.
"""

import os
import sys
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pipeline.run.driver import Show
    from pipeline.store.folder import Folder
    from schemas.progress import Progress

RUN_FOLDER = "the run's output.folder: a path, or s3://bucket/path"

_PLAIN_PROGRESS_S = 10.0
_RATE_WINDOW_S = 60.0


def log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def display(rows_total: int, rows_done: int) -> "AbstractContextManager[Show]":
    """Show a bar of published rows on a terminal, a log line at intervals elsewhere."""
    return _bar(rows_total, rows_done) if sys.stderr.isatty() else _lines()


@contextmanager
def _lines() -> "Iterator[Show]":
    rates: deque[tuple[float, int]] = deque()
    last_line_s = time.monotonic()

    def show(progress: "Progress", events: list[str]) -> None:
        nonlocal last_line_s
        for event in events:
            log(event)
        now_s = time.monotonic()
        _note_rate(rates, now_s, progress)
        if now_s - last_line_s >= _PLAIN_PROGRESS_S:
            last_line_s = now_s
            log(f"event=progress {_progress_text(progress, rates)}")

    yield show


@contextmanager
def _bar(rows_total: int, rows_done: int) -> "Iterator[Show]":
    from tqdm import tqdm

    rates: deque[tuple[float, int]] = deque()
    with tqdm(total=rows_total, initial=rows_done, unit="row", smoothing=0.05) as bar:

        def show(progress: "Progress", events: list[str]) -> None:
            for event in events:
                bar.write(event, file=sys.stderr)
            _note_rate(rates, time.monotonic(), progress)
            bar.set_postfix_str(_progress_text(progress, rates).partition(" ")[2], refresh=False)
            bar.update(progress.rows_done - bar.n)
            bar.refresh()

        yield show


def _note_rate(rates: deque[tuple[float, int]], now_s: float, progress: "Progress") -> None:
    rates.append((now_s, sum(worker.completion_tokens for worker in progress.workers)))
    while rates[0][0] < now_s - _RATE_WINDOW_S:
        rates.popleft()


def _progress_text(progress: "Progress", rates: deque[tuple[float, int]]) -> str:
    from pipeline.live.output import time_left

    (first_s, first_tokens), (last_s, last_tokens) = rates[0], rates[-1]
    tokens_per_s = max(0, last_tokens - first_tokens) / max(last_s - first_s, 1e-3)
    in_flight = sum(worker.in_flight for worker in progress.workers)
    return (
        f"rows={progress.rows_done}/{progress.rows_total} tokens_per_s={tokens_per_s:.0f} "
        f"in_flight={in_flight} errors={progress.rows_error} failed={progress.rows_failed}"
        + (f" time_left='{time_left(progress.days_left)}'" if progress.days_left else "")
    )


def tell(text: str) -> None:
    """Print an answer. It is no error when the reader, such as `head`, closes the pipe."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes the rest at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def about_a_run(where: str, answer: "Callable[[Folder], int]") -> int:
    """Open a run's folder and answer from it. Errors that the user can fix: one line, exit 2."""

    from pipeline.store.bucket import open_folder

    try:
        return answer(open_folder(where))
    except ConfigError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(unreadable(where, error), file=sys.stderr)
    return 2


def unreadable(where: str, error: OSError) -> str:
    """Return the message for a file of a run that cannot be read."""
    return f"{error.filename or where}: cannot be read: {error.strerror or error}"


def read_text(path: Path) -> str:
    """Return the text of a file that an option names. Raises PlanError."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file that an option names. Raises PlanError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from error
