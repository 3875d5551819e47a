"""What a command prints as its answer, and as its one line where there is none."""

import os
import sys


def tell(text: str) -> None:
    """Print a text. A reader that has had enough of it, as `head` has, is no fault."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def unreadable(where: str, error: OSError) -> str:
    """The line for a file of a run that the system does not hand out."""
    return f"{error.filename or where}: cannot be read: {error.strerror or error}"
