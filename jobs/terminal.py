"""Output of a command: its answer, or one line of error.

Heavy imports load inside the functions, so that --help stays quick.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pipeline.console.console import LogFormat
from pipeline.console.printable import printable
from pipeline.errors import ConfigError, PlanError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pipeline.store.folder import Folder

RUN_FOLDER = "the run's output.folder: a path, or s3://bucket/path"


def add_log_format(parser: "argparse.ArgumentParser") -> None:
    """Add the option that chooses the form of the log."""
    parser.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default="auto",
        help="log on stderr: sentences on a terminal and event=… key=value lines elsewhere "
        "(auto, the default), always lines, or JSON lines",
    )


def tell(*texts: str) -> None:
    """Print an answer. It is no error when the reader, such as `head`, closes the pipe."""
    try:
        for text in texts:
            print(printable(text), flush=True)
    except BrokenPipeError:
        # Python flushes the rest at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell_error(*lines: object) -> None:
    """Print why a command failed, on standard error."""
    for line in lines:
        print(printable(line), file=sys.stderr, flush=True)


def about_a_run(where: str, answer: "Callable[[Folder], int]") -> int:
    """Open a run's folder and answer from it. Errors that the user can fix: one line, exit 2."""

    from pipeline.store.bucket import open_folder

    try:
        return answer(open_folder(where))
    except ConfigError as error:
        tell_error(error)
    except OSError as error:
        tell_error(unreadable(where, error))
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
