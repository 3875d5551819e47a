"""The door to rich: log records and the progress on standard error.

On a terminal short sentences appear above a bar; elsewhere, and on demand, there is one line per
record. rich and the modules of the estimate load inside the functions, so that --help stays quick.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Literal

from pipeline.console.lines import (
    LOGGER,
    JsonFormat,
    LineFormat,
    SentenceFormat,
    ZonedFormatter,
    line_logger,
)
from pipeline.console.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pipeline.console.progress import ProgressFigures, Show
    from schemas.progress import Progress

LogFormat = Literal["auto", "lines", "json"]

_LINE_INTERVAL_S = 10.0
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConsole:
    """An open console."""

    log: Callable[[str], None]
    log_format: LogFormat
    terminal: "Console | None"
    """The terminal; None where lines are printed."""

    def display(self) -> "AbstractContextManager[Show]":
        """Show the progress: a bar on a terminal, a log line at intervals elsewhere."""
        return _lines(self.log) if self.terminal is None else _bar(self.log, self.terminal)

    def report_error(self, error: Exception) -> None:
        """Print an error that ends the command on a line of its own; JSON has it as a record."""
        if self.log_format == "json":
            self.log(f"event=error {error}")
        else:
            print(printable(error), file=sys.stderr)


@contextmanager
def open_console(command: str, log_format: LogFormat = "auto") -> Iterator[LogConsole]:
    """Send log records to standard error until the block ends.

    `command` is the component of lines that are no other component's.
    """
    terminal = None
    if log_format == "auto" and is_terminal(os.environ):
        terminal = terminal_console(os.environ)
    handler: logging.Handler = _LineHandler() if terminal is None else _TerminalHandler(terminal)
    handler.setFormatter(formatter(log_format, on_terminal=terminal is not None))
    ours, root = logging.getLogger(LOGGER), logging.getLogger()
    level_before = ours.level
    ours.setLevel(logging.INFO)
    # Warnings of other libraries have the form of the log too, and leave the bar alone.
    handler.addFilter(_is_ours_or_warns)
    root.addHandler(handler)
    try:
        yield LogConsole(log=line_logger(command), log_format=log_format, terminal=terminal)
    finally:
        root.removeHandler(handler)
        ours.setLevel(level_before)


def is_terminal(environment: Mapping[str, str]) -> bool:
    """Return whether standard error is a terminal that can redraw a line."""
    return sys.stderr.isatty() and environment.get("TERM") != "dumb"


def terminal_console(environment: Mapping[str, str]) -> "Console":
    """Open standard error as a terminal, without colour if `NO_COLOR` is set."""
    from rich.console import Console

    return Console(
        stderr=True,
        force_terminal=True,
        color_system=None if environment.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def formatter(log_format: LogFormat, *, on_terminal: bool) -> ZonedFormatter:
    """Return the format of the log records."""
    if log_format == "json":
        return JsonFormat()
    return SentenceFormat() if on_terminal else LineFormat()


def _is_ours_or_warns(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.startswith(f"{LOGGER}.")


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except OSError:
            # The reader of the log is gone; the run goes on.
            self.handleError(record)


class _TerminalHandler(logging.Handler):
    def __init__(self, terminal: "Console") -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        from rich.text import Text

        text = Text()
        for line in self.format(record).splitlines(keepends=True):
            time, space, words = line.partition(" ")
            text.append(time + space, "dim").append(words, _STYLES.get(record.levelno, ""))
        self._terminal.print(text, soft_wrap=True)


@contextmanager
def _lines(log: Callable[[str], None]) -> "Iterator[Show]":
    from pipeline.console.progress import ProgressMeter, progress_line

    meter, last_line_s = ProgressMeter(), monotonic()

    def show(progress: "Progress", events: list[str]) -> None:
        nonlocal last_line_s
        for event in events:
            log(event)
        now_s = monotonic()
        figures = meter.figures(progress, now_s)
        if now_s - last_line_s >= _LINE_INTERVAL_S:
            last_line_s = now_s
            log(progress_line(figures))

    yield show


@contextmanager
def _bar(log: Callable[[str], None], terminal: "Console") -> "Iterator[Show]":
    from rich.live import Live

    from pipeline.console.progress import ProgressMeter

    meter = ProgressMeter()
    # What other code prints, such as Ray on either stream, appears above the bar.
    with Live(console=terminal, auto_refresh=False) as live:

        def show(progress: "Progress", events: list[str]) -> None:
            for event in events:
                log(event)
            live.update(_bar_lines(meter.figures(progress, monotonic())), refresh=True)

        yield show


def _bar_lines(figures: "ProgressFigures") -> "RenderableType":
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from pipeline.console.progress import counts_text, rows_text

    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(
        ProgressBar(total=max(1, figures.rows_total), completed=figures.rows_done),
        rows_text(figures),
    )
    return Group(line, Text(counts_text(figures), "dim", no_wrap=True, overflow="ellipsis"))
