"""What a command prints as its answer, and as its one line where there is none."""

import os
import sys
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.storage import Folder

RUN_FOLDER = "the run's output.folder: a path, or s3://bucket/path"


def tell(text: str) -> None:
    """Print a text. A reader that has had enough of it, as `head` has, is no fault."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def about_a_run(where: str, answer: "Callable[[Folder], int]") -> int:
    """Open a run's folder and answer from it; what the user can mend is one line and exit 2."""
    from pipeline.store_folder import open_folder

    try:
        return answer(open_folder(where))
    except ConfigError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(unreadable(where, error), file=sys.stderr)
    return 2


def unreadable(where: str, error: OSError) -> str:
    """The line for a file of a run that the system does not hand out."""
    return f"{error.filename or where}: cannot be read: {error.strerror or error}"
