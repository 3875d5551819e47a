"""Commands of this project as their user would type them."""

import shlex
import sys
from pathlib import Path


def command(module: str, *words: str) -> str:
    """Return a command line with the interpreter as this process was called."""
    called = sys.orig_argv[0]
    python = called if Path(called).name.startswith("python") else sys.executable
    return shlex.join([python, "-m", module, *words])
