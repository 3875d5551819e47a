"""Write a first run file, from the prompts as they are and the cards that are here or named.

usage: python -m jobs.init PROMPTS [--model M] [--gpu CARD:COUNT]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from jobs.hardware_options import counted_card
from jobs.terminal import tell, tell_error, write_text
from pipeline.console.commands import command, program
from pipeline.errors import ConfigError, PipelineError

if TYPE_CHECKING:
    from pipeline.planner.rate.search import HardwareOption

_EXAMPLES = """\
examples:
  python -m jobs.init prompts.jsonl
  python -m jobs.init prompts.parquet --model Qwen/Qwen3.6-27B --gpu rtx-pro-6000:4
  python -m jobs.init HuggingFaceH4/ultrachat_200k --endpoint http://127.0.0.1:30000/v1
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the run file and its schema; return 2 for an error that the user can fix."""
    options = argument_parser().parse_args(argv)
    try:
        tell(_written(options))
    except PipelineError as error:
        tell_error(f"init: {error}")
        return 2
    return 0


def argument_parser() -> argparse.ArgumentParser:
    """Return the command's own parser."""
    parser = argparse.ArgumentParser(
        prog=program("jobs.init"),
        description="Write a first run file: columns from the prompts, flags from the planner.",
        epilog=_EXAMPLES.replace("python -m jobs.init", program("jobs.init")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prompts", metavar="PROMPTS", help="a file, a folder, s3://bucket/path, or a hub name")
    add("--model", metavar="M", help="hub name or folder; default: a small model on the CPU")
    add("--gpu", metavar="CARD[:N]", help="cards to plan for; default: those of this machine")
    add("--endpoint", metavar="URL", help="ask a running server instead of starting engines")
    add("--sglang-python", metavar="PATH", help="interpreter of SGLang's environment; default: "
        "$SGLANG_PYTHON, if set")  # fmt: skip
    add(
        "--to",
        type=Path,
        default=Path("run.yaml"),
        metavar="FILE",
        help="the run file to write; default: run.yaml",
    )
    add("--output", metavar="FOLDER", help="output folder of the run; default: out/NAME")
    add("--force", action="store_true", help="replace the run file if it exists")
    return parser


def _written(options: argparse.Namespace) -> str:
    from pipeline.recipes.draft import DraftQuery, draft_run_file
    from pipeline.recipes.schema import SCHEMA_FILE, schema_text

    if options.to.exists() and not options.force:
        raise ConfigError(f"{options.to} exists; choose another with --to, or replace it: --force")
    if options.endpoint and options.gpu:
        raise ConfigError("--gpu: not with --endpoint, whose servers run already; leave out one")
    hardware = None if options.endpoint else _hardware(options.gpu)
    python = options.sglang_python or os.environ.get("SGLANG_PYTHON")
    draft = draft_run_file(
        DraftQuery(
            prompts=options.prompts,
            model=options.model,
            hardware=hardware,
            endpoint=options.endpoint,
            sglang_python=python,
            folder=options.output or f"out/{_name_of(options.prompts)}",
        ),
        today=datetime.now(UTC).date(),
    )
    write_text(options.to, draft.text)
    write_text(options.to.parent / SCHEMA_FILE, schema_text())
    lines = [draft.text, f"written to {options.to}", "", "assumed"]
    lines += [f"  {text}" for text in draft.assumptions]
    check = command("jobs.regenerate", str(options.to), "--dry-run")
    return "\n".join([*lines, "", "next", f"  {check}"])


def _hardware(text: str | None) -> "HardwareOption | None":
    """Return the cards that the option names, or else those of this machine."""
    from pipeline.engines.gpus import planned_card, visible_cards
    from pipeline.planner.cards import gpu_named
    from pipeline.planner.rate.search import HardwareOption

    if text is not None:
        name, count = counted_card(text)
        return HardwareOption(gpu=gpu_named(name), count=count or 1)
    cards = visible_cards()
    gpu = planned_card(cards)
    return HardwareOption(gpu=gpu, count=len(cards)) if gpu else None


def _name_of(prompts: str) -> str:
    """Return the name of the prompts without folders and endings."""
    return PurePosixPath(prompts.partition("?")[0]).name.partition(".")[0] or "prompts"


if __name__ == "__main__":
    sys.exit(main())
