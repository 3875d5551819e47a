"""Commands of this project as their user would type them."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

CONSOLE_SCRIPT = "regenerate"
_NAMES = {"jobs.regenerate": "run"}


def command(module: str, *words: str) -> str:
    """Return a command line as this process was called: `regenerate plan` or `python -m …`."""
    if called_as_script():
        return shlex.join([CONSOLE_SCRIPT, subcommand(module), *words])
    called = sys.orig_argv[0]
    python = called if Path(called).name.startswith("python") else sys.executable
    return shlex.join([python, "-m", module, *words])


def split_launch_line(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split a command's own words from the launch line, which follows the first `--`."""
    if "--" not in words:
        return list(words), None
    cut = words.index("--")
    return list(words[:cut]), list(words[cut + 1 :])


def program(module: str) -> str:
    """Return the name of a command for its help, as this process was called."""
    if called_as_script():
        return f"{CONSOLE_SCRIPT} {subcommand(module)}"
    return f"python -m {module}"


def help_examples(module: str, *lines: str) -> str:
    """Return the examples at the end of a command's help; each line follows its name."""
    return "\n".join(["examples:", *(f"  {program(module)} {line}" for line in lines)])


def subcommand(module: str) -> str:
    """Return the word after `regenerate` that runs a module of `jobs`."""
    return _NAMES.get(module, module.rpartition(".")[2])


def called_as_script() -> bool:
    """Return whether this process was started by the console script."""
    return Path(sys.argv[0]).name in (CONSOLE_SCRIPT, f"{CONSOLE_SCRIPT}.exe")
