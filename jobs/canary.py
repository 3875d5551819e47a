"""What the canary of a run found, from its output folder alone: as a table or as JSON.

usage: python -m jobs.canary FOLDER [--json]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from jobs.terminal import RUN_FOLDER, about_a_run, tell
from pipeline.dataset.parts import rows_of
from pipeline.dataset.run_record import (
    check_has_begun,
    check_has_run,
    read_manifest,
    read_run_file_copy,
)
from pipeline.errors import ConfigError
from pipeline.quality.canary import MEAN_TOKENS, Excess, excesses, tally_of
from pipeline.quality.diagnosis import Diagnosis, Example, diagnosis
from pipeline.store.folder import Folder
from pipeline.store.run_folder import RUN_FILE_COPY
from schemas.config import RunFile

_BELOW = " " * 11
_COLUMNS = ("row_id", "messages", "turns", "flags", "status", "finish_reason", "error_text")
_OVER_LIMITS = 3


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 2 when the folder holds no canary, 3 when its rows are over the limits."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.canary", description="What the canary of a run found, from its files."
    )
    parser.add_argument("folder", help=RUN_FOLDER)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    return about_a_run(arguments.folder, lambda folder: _show(folder, in_json=arguments.json))


def _show(folder: Folder, *, in_json: bool) -> int:
    check_has_run(folder)
    manifest, config = read_manifest(folder), read_run_file_copy(folder)
    check_has_begun(folder, manifest)
    event = manifest.canary
    if event is None:
        raise ConfigError(
            f"{folder.where}: no canary has run here: quality.canary_rows says of how many rows"
        )
    if config is None:
        raise ConfigError(f"{folder.where}: the limits are not known: no readable {RUN_FILE_COPY}")
    found = findings(folder, config)
    is_over = event.verdict in ("begun", "failed") and bool(found.excesses)
    if in_json:
        tell(json.dumps({"verdict": event.verdict, **as_json(found)}, indent=1, ensure_ascii=False))
    else:
        tell(text(found) if is_over else f"canary     {event.verdict}, {found.num_rows:,} rows")
    return _OVER_LIMITS if is_over else 0


def findings(folder: Folder, config: RunFile, over: Sequence[Excess] = ()) -> Diagnosis:
    """Of the canary's published rows; `over` are its excesses, where they are known already."""
    parts = read_manifest(folder).canary_parts
    tally = tally_of(parts)
    over = over or excesses(tally, config, num_rows=tally.num_rows)
    return diagnosis(over, rows_of(folder, [part.name for part in parts], _COLUMNS), config)


def as_json(found: Diagnosis) -> dict[str, object]:
    return {"canary": asdict(found)}


def text(found: Diagnosis) -> str:
    lines = [f"canary     stopped the run after {found.num_rows:,} rows"]
    lines += [f"{_BELOW}{'limit':30} {'found':>10} {'allowed':>10}"]
    lines += [_row(excess) for excess in found.excesses]
    for name, examples in found.examples.items():
        for example in examples:
            lines += _example(name, example)
    lines += [f"likely     {cause}" for cause in found.causes]
    lines.append(
        "next       mend the cause, then: another output.folder for other settings; the same "
        "command with\n"
        f"{_BELOW}--retry-flagged where the engines alone were mended; --accept-canary to go on "
        "as it is"
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
