"""The commands: `regenerate <name>`, or `python -m jobs.<name>` from the root of a checkout.

`pipeline` and `schemas` are common words: an installed package of the same name must not be
taken for ours, so the import is checked here, once for every job.
"""

import os
import sys
from pathlib import Path
from types import TracebackType


def _report_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback, but for Ctrl-C one line: it may come at any import."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("stopped by SIGINT", file=sys.stderr, flush=True)
    os._exit(130)


# `python -m` imports this package before it puts the module's path there.
if sys.argv and (sys.argv[0] == "-m" or Path(sys.argv[0]).name == "regenerate"):
    sys.excepthook = _report_error

import pipeline  # noqa: E402 - what follows takes time
import schemas  # noqa: E402

_ROOT = Path(__file__).resolve().parent.parent

for _package in (pipeline, schemas):
    _found = Path(str(_package.__file__)).resolve().parent.parent
    if _found != _ROOT:
        raise ImportError(
            f"package {_package.__name__!r} comes from {_found}, not from {_ROOT}; call "
            f"`regenerate <name>` instead of `python -m jobs.<name>`, or leave the folder that "
            f"has a package of that name"
        )
