"""The console script `regenerate`: each of its commands is a module of this folder.

usage: regenerate COMMAND [options]
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from jobs.terminal import tell_error
from pipeline.console.commands import CONSOLE_SCRIPT, subcommand

_WHAT_IT_DOES = {
    "jobs.init": "write a first run file from your prompts",
    "jobs.regenerate": "regenerate the completions of a data set; the same command resumes",
    "jobs.plan": "forecast an SGLang launch, or search for the best one",
    "jobs.estimate": "tokens/s, days and dollars of a run on each hardware option",
    "jobs.status": "print the status of a run, once or until it ends",
    "jobs.report": "write or serve the report of a run as a page",
    "jobs.export": "write a run's rows as a data set for training",
    "jobs.canary": "show what a run's first rows looked like",
}
_MODULES = {subcommand(module): module for module in _WHAT_IT_DOES}
_SHELLS = ("bash", "zsh", "tcsh")
_EXAMPLES = """\
examples:
  regenerate init prompts.jsonl          write run.yaml
  regenerate run run.yaml --dry-run      check a run file and its prompts, start nothing
  regenerate run run.yaml                run, or resume
  regenerate status out/run --watch      follow a run from another terminal
  regenerate COMMAND --help              all options of a command
  regenerate completion bash             print the completion script of a shell
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 for one that does not exist."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _MODULES:
        return int(_module(words[0]).main(words[1:]))
    if words and words[0] != "completion" and not words[0].startswith("-"):
        tell_error(_unknown(words[0]))
        return 2
    arguments = _parser().parse_args(words)
    if arguments.command is None:
        _parser().print_help()
        return 0
    print(_completion(arguments.shell))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=CONSOLE_SCRIPT,
        description="Regenerate completions with a thinking-mode model on SGLang, as a Ray job.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"{CONSOLE_SCRIPT} {version(CONSOLE_SCRIPT)}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in _MODULES.items():
        commands.add_parser(name, help=_WHAT_IT_DOES[module], add_help=False)
    completion = commands.add_parser("completion", help="print the completion script of a shell")
    completion.add_argument("shell", choices=_SHELLS)
    return parser


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, _MODULES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_MODULES)}"
    return f"{CONSOLE_SCRIPT}: there is no command {word!r}; {hint}"


def _completion(shell: str) -> str:
    import shtab

    parser = argparse.ArgumentParser(prog=CONSOLE_SCRIPT)
    commands = parser.add_subparsers(dest="command")
    for name, module in _MODULES.items():
        own = _module(name).argument_parser()
        commands.add_parser(
            name,
            help=_WHAT_IT_DOES[module],
            parents=[own],
            add_help=False,
            conflict_handler="resolve",
        )
    return shtab.complete(parser, shell=shell)


def _module(name: str) -> Any:  # noqa: ANN401 - a module
    return import_module(_MODULES[name])


if __name__ == "__main__":
    sys.exit(main())
