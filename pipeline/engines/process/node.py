"""Let engines of one machine start in turn."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def node_lock(path: Path) -> Iterator[bool]:
    """Try to take a lock of this machine without waiting; yield whether it was free.

    The lock ends with its holder's process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A link there is not followed.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        is_held = _locked(file)
        try:
            yield is_held
        finally:
            if is_held:
                fcntl.flock(file, fcntl.LOCK_UN)


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
