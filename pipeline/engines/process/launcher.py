"""Run a Python program with a key that no other user can read. Run as a script; stdlib only.

usage: launcher.py -m MODULE [ARG ...]
       launcher.py SCRIPT [ARG ...]

A command line is public, so the key in ENGINE_API_KEY is put among the program's arguments, as
`--api-key KEY`, inside this process. Everything else is as if Python had been given the words
itself, but that a module is not looked for in the working directory. The interpreter is the
engine's, so nothing of this project can be imported.
"""

import os
import runpy
import sys
from pathlib import Path


def main(words: list[str]) -> None:
    # Python 3.10 has no flag of that name.
    is_path_safe = getattr(sys.flags, "safe_path", bool(sys.flags.isolated))
    if not is_path_safe:
        # This file's folder, where the program's own belongs.
        del sys.path[0]
    is_module = words[0] == "-m"
    program = words[1:] if is_module else words
    sys.argv = with_key(program, os.environ.pop("ENGINE_API_KEY"))
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    if not is_path_safe:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
    runpy.run_path(program[0], run_name="__main__")


def with_key(words: list[str], key: str) -> list[str]:
    """Insert the key before the first flag: subcommands stay where they are."""
    flags_at = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    return [*words[:flags_at], "--api-key", key, *words[flags_at:]]


if __name__ == "__main__":
    main(sys.argv[1:])
