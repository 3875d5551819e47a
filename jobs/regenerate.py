"""Regenerate the completions of a data set: prompts in, parquet out; the same command resumes.

usage: python -m jobs.regenerate RUN.yaml [--set key=value ...] [--dry-run]
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from jobs import canary as canary_findings
from jobs.dry_run_lines import dry_run_lines
from jobs.next_commands import canary_commands, next_commands, resume_command
from jobs.status import as_json as status_as_json
from jobs.status import failed_lines
from jobs.terminal import add_log_format, tell, tell_error
from pipeline.console.commands import help_examples, program
from pipeline.console.console import open_console
from pipeline.console.printable import on_one_line
from pipeline.errors import (
    ConfigError,
    PipelineError,
    RayLostError,
)
from pipeline.planner.estimate.figures import duration
from schemas.config.reader import read_run_file
from schemas.config.run_file import RunFile
from schemas.config.section import is_url
from schemas.session import Breach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jobs.next_commands import NextCommand
    from pipeline.console.console import LogConsole
    from pipeline.run.driver import SessionEnd
    from pipeline.run.session import Prepared
    from pipeline.store.folder import Folder
    from schemas.manifest import Part
    from schemas.progress import RunStatus


DONE, USER_CAN_FIX, WITH_ERRORS = 0, 2, 3
_NO_RESTART = "--no-restart"
# assumed: about what one screen shows, so that most answers are whole
_EXAMPLE_CHARACTERS = 1200


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit status: 0 done, 2 the user can fix it, 3 error rows or a bad canary."""
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = argument_parser().parse_args(words)
    except SystemExit:
        if _NO_RESTART in words:
            return DONE
        raise
    with open_console("driver", arguments.log_format) as console:
        try:
            status = _status(arguments, console)
        except RayLostError as error:
            _log_resume(console, arguments)
            console.report_error(error)
            return WITH_ERRORS
    if arguments.no_restart and status in (USER_CAN_FIX, WITH_ERRORS):
        tell_error(f"{_NO_RESTART}: exit 0 instead of {status}")
        return DONE
    return status


def _status(arguments: argparse.Namespace, console: "LogConsole") -> int:
    """Run or check the run file, and return the exit status. Raises RayLostError."""
    try:
        config = _resolved(read_run_file(arguments.run_file, arguments.set))
        if arguments.dry_run:
            return _dry_run(config, arguments, console)
        return _run(config, arguments, console)
    except RayLostError:
        raise
    except PipelineError as error:
        console.report_error(error)
        return USER_CAN_FIX


def argument_parser() -> argparse.ArgumentParser:
    """Return the command's own parser."""
    parser = argparse.ArgumentParser(
        prog=program("jobs.regenerate"),
        description="Regenerate the completions of a data set. The same command resumes.",
        epilog=help_examples(
            "jobs.regenerate",
            "run.yaml --dry-run",
            "run.yaml",
            "run.yaml --set prompts.limit=100 --set output.folder=out/pilot",
            "run.yaml --retry-errors",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_file", type=Path, metavar="RUN.yaml", help="the run file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the run file, for example sampling.max_tokens=512",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, count rows and prompt tokens, start nothing",
    )
    parser.add_argument(
        "--accept-drift",
        action="store_true",
        help="continue although settings that change rows, or the input, have changed",
    )
    parser.add_argument("--retry-errors", action="store_true", help="generate error rows again")
    parser.add_argument(
        "--accept-errors",
        action="store_true",
        help="exit with 0 when every row is done, even if some are error rows",
    )
    parser.add_argument(
        "--retry-flagged",
        action="store_true",
        help="generate rows again whose quality flags have another policy than keep",
    )
    parser.add_argument(
        "--accept-canary",
        action="store_true",
        help="continue with the shares that the first rows have; limits apply from there",
    )
    parser.add_argument(
        "--accept-missing-token-ids",
        action="store_true",
        help="continue with engines that return no token ids, although they are requested",
    )
    parser.add_argument(
        "--accept-engine-faults",
        action="store_true",
        help="continue with engines whose first answers are not what was requested: no token ids "
        "or end tokens, ids of another text, another chat template, thinking in the answer",
    )
    parser.add_argument(
        _NO_RESTART,
        action="store_true",
        help="exit with 0 instead of 2 and 3, where a restart would not help; for systems that "
        "restart every job that fails, such as KubeRay",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_log_format(parser)
    return parser


def _resolved(config: RunFile) -> RunFile:
    """Return the run file with what it leaves to this machine and to the model's own files."""
    from pipeline.run_file import with_model_sampling

    return with_model_sampling(_with_absolute_paths(config))


def _with_absolute_paths(config: RunFile) -> RunFile:
    """Make paths absolute: workers run elsewhere, where a relative path is another file."""
    engine = config.engine
    changes: dict[str, object] = {
        "prompts": config.prompts.model_copy(update={"path": _absolute(config.prompts.path)}),
        "output": config.output.model_copy(update={"folder": _absolute_folder(config)}),
        "engine": engine.model_copy(
            update={
                "model_file": engine.model_file and str(Path(engine.model_file).absolute()),
                "python": engine.python and str(Path(engine.python).absolute()),
                "command": [_absolute_program(word) for word in engine.command[:1]]
                + engine.command[1:],
            }
        ),
    }
    if Path(config.model).is_dir():
        changes["model"] = str(Path(config.model).absolute())
    return config.model_copy(update=changes)


def _absolute_program(word: str) -> str:
    """Make a path to a program absolute; a name without a slash is looked up on each node."""
    return str(Path(word).absolute()) if "/" in word else word


def _absolute_folder(config: RunFile) -> str:
    folder = config.output.folder
    return folder if is_url(folder) else str(Path(folder).absolute())


def _absolute(path: str) -> str:
    """Make a path absolute that exists, or that cannot be the name of a data set on the hub."""
    if is_url(path):
        return path
    from pipeline.dataset.sources.files import is_file_name

    try:
        exists = Path(path).exists()
    except OSError as error:
        raise ConfigError(f"prompts.path: cannot read {path}: {error.strerror}") from None
    return str(Path(path).absolute()) if exists or is_file_name(path) else path


# -- the run


def _run(config: RunFile, arguments: argparse.Namespace, console: "LogConsole") -> int:
    # Ray, datasets and openai need seconds to import; mistakes in the run file are reported before.
    from pipeline.engines.served import check_engine
    from pipeline.run.session import SessionOptions, prepare
    from pipeline.run.signals import exit_on_signals
    from pipeline.run.start_check import check_endpoints, seed_warning
    from pipeline.store import lock
    from pipeline.store.bucket import open_folder

    check_engine(config)
    _check_quality(config)
    log = console.log
    _check_events(config, log)
    _check_folders_apart(config)
    exit_on_signals(log)
    endpoints = check_endpoints(config)
    folder = open_folder(config.output.folder)
    _make_folder(folder, is_private=config.output.mode == "private")
    if "RAY_JOB_ID" in os.environ and "_ray_pkg_" in config.output.folder:
        log("event=warning output.folder is relative, so it is inside the job's copy of the code")
    holder = lock.this_process()
    with lock.holding(folder, holder, sleep=time.sleep, log=log) as is_lost:
        prepared = prepare(
            config,
            folder,
            SessionOptions(
                accept_drift=arguments.accept_drift,
                accept_canary=arguments.accept_canary,
                retry_errors=arguments.retry_errors,
                retry_flags=_flags_to_retry(config) if arguments.retry_flagged else frozenset(),
                accepted_breaches=_accepted_breaches(arguments),
            ),
            token=holder.token,
            now_s=time.time(),
            log=log,
        )
        for line in filter(None, (*endpoints.silent, seed_warning(config, endpoints))):
            log(f"event=warning {line}")
        from pipeline.run.driver import drive

        end = drive(folder, prepared, is_lost, console.display, log)
        if end.kind == "canary_failed":
            return _print_canary(folder, prepared, arguments)
        if end.kind == "stopped":
            _log_resume(console, arguments)
            return 128 + end.signal
        return _print_summary(folder, end, arguments)


def _check_quality(config: RunFile) -> None:
    from pipeline.quality.languages import check_language_detector

    if config.quality.wrong_language.enabled:
        check_language_detector()


def _accepted_breaches(arguments: argparse.Namespace) -> frozenset[Breach]:
    if arguments.accept_engine_faults:
        return frozenset(get_args(Breach))
    return frozenset({"missing_token_ids"} if arguments.accept_missing_token_ids else ())


def _check_events(config: RunFile, log: "Callable[[str], None]") -> None:
    from pipeline.report.webhook import webhook_of

    webhook_of(config.events, log)


def _flags_to_retry(config: RunFile) -> frozenset[str]:
    from pipeline.quality.flags import FLAGS

    return frozenset(flag for flag in FLAGS if config.quality.flag(flag).policy != "keep")


def _check_folders_apart(config: RunFile) -> None:
    """Raises ConfigError for an output inside the folder of prompts, which would grow by it."""
    prompts, output = config.prompts.path.partition("?")[0], config.output.folder.partition("?")[0]
    if is_url(prompts):
        is_within = f"{output.rstrip('/')}/".startswith(f"{prompts.rstrip('/')}/")
    else:
        path = Path(prompts).absolute()
        is_within = path.is_dir() and Path(output).is_relative_to(path)
    if is_within:
        raise ConfigError(
            f"output.folder: {output} is inside prompts.path {prompts}, whose files are all "
            f"read; use a folder next to it"
        )


def _make_folder(folder: "Folder", *, is_private: bool) -> None:
    from pipeline.store.layout import check_layout
    from pipeline.store.own_folder import keep_private, make_private

    try:
        if is_private:
            keep_private()
            make_private(Path(folder.where))
        folder.make()
    except OSError as error:
        raise ConfigError(
            f"output.folder: cannot create {folder.where}: {error.strerror}"
        ) from None
    check_layout(folder)


def _log_resume(console: "LogConsole", arguments: argparse.Namespace) -> None:
    console.log(f"event=next command={resume_command(arguments)!r} why='resume'")


def _print_canary(folder: "Folder", prepared: "Prepared", arguments: argparse.Namespace) -> int:
    """Print what the canary found. Its rows stay published."""
    found = canary_findings.findings(folder, prepared.plan.config, prepared.excesses)
    if arguments.json:
        tell(json.dumps(canary_findings.as_json(found), indent=1, ensure_ascii=False))
    else:
        tell(canary_findings.text(found))
        tell(*_next_lines(canary_commands(arguments, folder.where)))
    return WITH_ERRORS


# -- what people see


def _print_summary(folder: "Folder", end: "SessionEnd", arguments: argparse.Namespace) -> int:
    """Print the summary on stdout, and return the exit status."""
    from pipeline.dataset.parts import example_completion
    from pipeline.dataset.run_record import read_manifest
    from pipeline.report.status import run_status
    from pipeline.store.run_folder import REPORT_FILE

    status, manifest = run_status(folder, now_s=time.time()), read_manifest(folder)
    generated = sum(part.completion_tokens for part in manifest.session_parts)
    tokens_per_s = generated / end.wall_s if end.wall_s else None
    example = example_completion(folder)
    flags = _flag_counts(manifest.parts.values())
    report, commands = folder.place(REPORT_FILE), next_commands(status, arguments)
    if arguments.json:
        values = {**status_as_json(status), "wall_s": end.wall_s, "tokens_per_s": tokens_per_s}
        values |= {"data": folder.place("data"), "causes": end.causes, "example": example}
        values |= {"flags": flags, "report": report, "next": commands}
        tell(json.dumps(values, indent=1, default=str))
    else:
        tell(_summary(status, end.wall_s, tokens_per_s, folder.place("data")))
        if flags:
            tell("flags      " + ", ".join(f"{count:,} {name}" for name, count in flags.items()))
        tell(*failed_lines(status))
        if unfinished := _num_unfinished(status):
            tell(f"unfinished {unfinished:,} rows: no engine is left; the same command resumes")
            tell(*(f"cause      {on_one_line(cause)}" for cause in dict.fromkeys(end.causes)))
        tell(_example_text(example))
        tell(f"report     {report}")
        tell(*_next_lines(commands))
    return _exit_status(status, accept_errors=arguments.accept_errors)


def _exit_status(status: "RunStatus", *, accept_errors: bool) -> int:
    has_errors = status.rows_error and not accept_errors
    return WITH_ERRORS if has_errors or status.rows_failed or _num_unfinished(status) else DONE


def _num_unfinished(status: "RunStatus") -> int:
    return status.rows_total - status.rows_done - status.rows_failed


def _next_lines(commands: "Iterable[NextCommand]") -> "Iterator[str]":
    for each in commands:
        yield f"next       {each['command']}   # {each['why']}"


def _flag_counts(parts: "Iterable[Part]") -> dict[str, int]:
    """Count published rows by quality flag, most frequent first."""
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(dict(part.flag_counts))
    return dict(counts.most_common())


def _summary(status: "RunStatus", wall_s: float, tokens_per_s: float | None, data: str) -> str:
    rate = f", {tokens_per_s:,.0f} tokens/s over {duration(wall_s)}" if tokens_per_s else ""
    error_rows = f"{status.rows_error:,} of them error rows; {status.rows_failed:,} failed"
    lines = [
        f"rows       {status.rows_done:,} of {status.rows_total:,} done, {error_rows}",
        f"tokens     {status.completion_tokens:,} generated{rate}",
        f"data set   {data} ({status.num_parts:,} parts)",
    ]
    return "\n".join(lines)


def _example_text(example: dict[str, object] | None) -> str:
    if example is None:
        return "example    no completion yet"
    lines = [f"example    {on_one_line(example['row_id'])}"]
    for message in example["messages"]:  # type: ignore[attr-defined]
        if message["reasoning_content"]:
            lines.append(f"  thinking: {_cut(message['reasoning_content'])}")
        lines.append(f"  {message['role']}: {_cut(message['content'])}")
    return "\n".join(lines)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXAMPLE_CHARACTERS else line[: _EXAMPLE_CHARACTERS - 3] + "..."


# -- the dry run


def _dry_run(config: RunFile, arguments: argparse.Namespace, console: "LogConsole") -> int:
    """Read and check everything, count rows and prompt tokens; start and write nothing."""
    from pipeline.engines.served import check_engine
    from pipeline.run.dry_run import dry_run
    from pipeline.run.start_check import check_endpoints, check_writable, seed_warning
    from pipeline.store.bucket import open_folder

    check_engine(config)
    _check_quality(config)
    _check_events(config, console.log)
    _check_folders_apart(config)
    folder = open_folder(config.output.folder)
    check_writable(folder)
    endpoints = check_endpoints(config)
    if folder.is_remote:
        # This only checks that the bucket exists.
        _make_folder(folder, is_private=False)
    counts = dry_run(config, folder)
    seed = seed_warning(config, endpoints)
    if arguments.json:
        values = {**asdict(counts), "endpoints": asdict(endpoints), "seed_ignored": seed}
        tell(json.dumps(values, indent=1, ensure_ascii=False))
    else:
        engines = [f"endpoint   {line}; a run waits for it" for line in endpoints.silent]
        engines += [f"seed       {seed}"] if seed else []
        tell(*dry_run_lines(config, counts, engines))
    if counts.disk is not None and counts.disk.is_short:
        raise ConfigError(f"output.folder: {folder.where}: {counts.disk.text}; use another disk")
    if not counts.can_ask:
        raise ConfigError(f"prompts.path: no row of {config.prompts.path} can be generated")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
