"""The commands that follow on a session, complete with the flags that they need."""

import argparse
from typing import TYPE_CHECKING

from pipeline.console.commands import command

if TYPE_CHECKING:
    from schemas.progress import RunStatus

NextCommand = dict[str, str]
"""`command` and `why`."""


def next_commands(status: "RunStatus", arguments: argparse.Namespace) -> list[NextCommand]:
    """Return what to run after a session that was not stopped, most useful first."""
    rows_open = status.rows_total - status.rows_done
    commands = []
    if rows_open:
        failed = f", {status.rows_failed:,} of them failed" if status.rows_failed else ""
        why = f"resume: {rows_open:,} rows are open{failed}"
        commands.append(_next(resume_command(arguments), why))
    if status.rows_error:
        why = f"generate the {status.rows_error:,} error rows again"
        commands.append(_next(resume_command(arguments, "--retry-errors"), why))
    export = command("jobs.export", status.folder, "--to", beside(status.folder, "-export"))
    if not rows_open:
        commands.append(_next(export, "write the data set for training"))
    return commands


def canary_commands(arguments: argparse.Namespace, folder: str) -> list[NextCommand]:
    """Return what to run after a canary that failed."""
    retry = resume_command(arguments, "--retry-flagged")
    accept = resume_command(arguments, "--accept-canary")
    return [
        _next(command("jobs.canary", folder), "show these findings again"),
        _next(retry, "only the engines were fixed: generate flagged rows again"),
        _next(accept, "go on as it is"),
    ]


def resume_command(arguments: argparse.Namespace, *more: str) -> str:
    """Return the command that resumes.

    Rows that this session took back are open already, and an accepted canary is recorded. Drift of
    the input has to be accepted each time.
    """
    words = [str(arguments.run_file)]
    for change in arguments.set:
        words += ["--set", change]
    flags = {
        "--accept-drift": arguments.accept_drift,
        "--accept-errors": arguments.accept_errors,
        "--accept-missing-token-ids": arguments.accept_missing_token_ids,
        "--accept-engine-faults": arguments.accept_engine_faults,
        "--json": arguments.json,
    }
    words += [flag for flag, is_given in flags.items() if is_given]
    if arguments.log_format != "auto":
        words += ["--log-format", arguments.log_format]
    return command("jobs.regenerate", *words, *more)


def beside(folder: str, suffix: str) -> str:
    """Return the path or URL of a folder next to a run's; options after `?` are kept."""
    path, mark, options = folder.partition("?")
    return f"{path.rstrip('/')}{suffix}{mark}{options}"


def _next(line: str, why: str) -> NextCommand:
    return {"command": line, "why": why}
