"""Show what the canary of a run found, from its output folder alone: as a table or as JSON.

usage: python -m jobs.canary FOLDER [--json]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from jobs.terminal import RUN_FOLDER, about_a_run, tell
from pipeline.console.commands import help_examples, program
from pipeline.dataset.parts import rows_of
from pipeline.dataset.run_record import (
    check_has_begun,
    check_has_run,
    read_manifest,
    read_run,
    read_run_file_copy,
)
from pipeline.errors import ConfigError
from pipeline.models.thinking import facts_by_name
from pipeline.quality.canary import MEAN_TOKENS, Excess, excesses, tally_of
from pipeline.quality.diagnosis import Diagnosis, Example, diagnosis
from pipeline.store.folder import Folder
from pipeline.store.run_folder import RUN_FILE_COPY
from schemas.config.run_file import RunFile

_BELOW = " " * 11
_COLUMNS = ("row_id", "messages", "turns", "flags", "status", "finish_reason", "error_text")
_STATUS_OVER_LIMITS = 3


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, 2 without a canary, 3 when its rows exceed the limits."""
    arguments = argument_parser().parse_args(argv)
    return about_a_run(arguments.folder, lambda folder: _show(folder, in_json=arguments.json))


def argument_parser() -> argparse.ArgumentParser:
    """Return the command's own parser."""
    parser = argparse.ArgumentParser(
        prog=program("jobs.canary"),
        description="Show what a run's canary found.",
        epilog=help_examples(
            "jobs.canary",
            "out/run",
            "out/run --json",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help=RUN_FOLDER)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _show(folder: Folder, *, in_json: bool) -> int:
    check_has_run(folder)
    manifest, config = read_manifest(folder), read_run_file_copy(folder)
    check_has_begun(folder, manifest)
    event = manifest.canary
    if event is None:
        raise ConfigError(
            f"{folder.where}: no canary has run here; quality.canary_rows sets its size"
        )
    if config is None:
        raise ConfigError(f"{folder.where}: the limits are not known: no readable {RUN_FILE_COPY}")
    result = findings(folder, config)
    is_over = event.verdict in ("begun", "failed") and bool(result.excesses)
    if in_json:
        tell(
            json.dumps({"verdict": event.verdict, **as_json(result)}, indent=1, ensure_ascii=False)
        )
    else:
        tell(text(result) if is_over else f"canary     {event.verdict}, {result.num_rows:,} rows")
    return _STATUS_OVER_LIMITS if is_over else 0


def findings(folder: Folder, config: RunFile, over: Sequence[Excess] = ()) -> Diagnosis:
    """Diagnose the canary's published rows; `over` has its excesses if they are known already."""
    parts = read_manifest(folder).canary_parts
    tally = tally_of(parts)
    over = over or excesses(tally, config, num_rows=tally.num_rows)
    record = read_run(folder)
    template = (record.template if record else None) or facts_by_name(config.model)
    rows = rows_of(folder, [part.name for part in parts], _COLUMNS)
    return diagnosis(over, rows, config, template)


def as_json(result: Diagnosis) -> dict[str, object]:
    return {"canary": asdict(result)}


def text(result: Diagnosis) -> str:
    lines = [f"canary     stopped the run after {result.num_rows:,} rows"]
    lines += [f"{_BELOW}{'limit':30} {'found':>10} {'allowed':>10}"]
    lines += [_row(excess) for excess in result.excesses]
    for name, examples in result.examples.items():
        for example in examples:
            lines += _example(name, example)
    lines += [f"likely     {cause}" for cause in result.causes]
    lines.append(
        "next       fix the cause, then use another output.folder for other settings; or the same "
        "command with\n"
        f"{_BELOW}--retry-flagged if only the engines were fixed; or --accept-canary to go on as "
        "it is"
    )
    return "\n".join(lines)


def _row(excess: Excess) -> str:
    if excess.name == MEAN_TOKENS:
        return f"{_BELOW}{excess.name:30} {excess.found:>10,.0f} {excess.limit:>10,.0f}"
    return f"{_BELOW}{excess.name:30} {excess.found:>10.1%} {excess.limit:>10.1%}"


def _example(name: str, example: Example) -> list[str]:
    return [
        f"example    {name}: {example.row_id}",
        f"{_BELOW}asked:    {example.question!r}",
        f"{_BELOW}thinking: {example.reasoning!r}",
        f"{_BELOW}answer:   {example.answer!r}",
    ]


if __name__ == "__main__":
    sys.exit(main())
