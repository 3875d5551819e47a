"""Keep an engine's key off its command line, which every user of the machine can read."""

import re
from collections.abc import Sequence
from pathlib import Path

_LAUNCHER = Path(__file__).with_name("launcher.py")
_PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]*(\.exe)?")
# Options of Python that are followed by a value.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
# Code as a word, standard input, or a module's `-m` behind other letters.
_TAKES_THE_REST = re.compile(r"-([A-VY-Za-z]*[cm].*)?$")


def through_launcher(command: Sequence[str], program_at: int) -> list[str]:
    """Return a command line of Python whose program gets the key within its process."""
    return [*command[:program_at], str(_LAUNCHER), *command[program_at:]]


def start_of_program(command: Sequence[str]) -> int | None:
    """Find the script, or the `-m` of a module, that an interpreter is to run; None if neither."""
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    at = 1
    while at < len(command):
        word = command[at]
        if word == "-m" or not word.startswith("-"):
            return at
        if _TAKES_THE_REST.match(word):
            return None
        at += 2 if word in _WITH_VALUE else 1
    return None
