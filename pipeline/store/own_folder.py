"""Folders that belong to this user alone: of temporary files, and of private prompts."""

import os
import stat
import tempfile
from pathlib import Path

from pipeline.errors import ConfigError


def own_temporary_folder() -> Path:
    """Make the folder `regenerate-UID` where temporary files belong, if it does not exist.

    Its name can be foreseen. Raises ConfigError where somebody else has taken it, as a link or as
    a folder of theirs, or where others may write into it.
    """
    path = Path(tempfile.gettempdir()) / f"regenerate-{os.getuid()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        _check_is_own(path)
    return path


def keep_private() -> None:
    """Have this process, and those that it starts, make files that only this user can read."""
    os.umask(0o077)


def make_private(folder: Path) -> None:
    """Make a folder, or take one from everybody else."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def is_private(folder: Path) -> bool:
    """Return whether only the owner can read a folder."""
    return folder.is_dir() and not folder.stat().st_mode & 0o077


def _check_is_own(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        found = "a link" if stat.S_ISLNK(status.st_mode) else "a file"
    elif status.st_uid != os.getuid():
        found = f"a folder of user {status.st_uid}"
    elif status.st_mode & 0o022:
        found = f"a folder that others may write into (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return
    raise ConfigError(
        f"{path}: found {found}; expected a folder of user {os.getuid()} alone; "
        "remove it, or set TMPDIR to a folder of your own"
    )
