"""The commands: `regenerate <name>`, or `python -m jobs.<name>` from the root of a checkout.

`pipeline` and `schemas` are common words: an installed package of the same name must not be
taken for ours, so the import is checked here, once for every job.
"""

from pathlib import Path

import pipeline
import schemas

_ROOT = Path(__file__).resolve().parent.parent

for _package in (pipeline, schemas):
    _found = Path(str(_package.__file__)).resolve().parent.parent
    if _found != _ROOT:
        raise ImportError(
            f"package {_package.__name__!r} comes from {_found}, not from {_ROOT}; call "
            f"`regenerate <name>` instead of `python -m jobs.<name>`, or leave the folder that "
            f"has a package of that name"
        )
