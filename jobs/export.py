"""Export a run's rows as a data set for training: one folder that `load_dataset` opens.

usage: python -m jobs.export FOLDER --to DEST [--format messages|specforge|tokens|...] ...
"""

import argparse
import hashlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from jobs.terminal import add_log_format, tell, tell_error
from pipeline.console.commands import help_examples, program
from pipeline.console.console import open_console
from pipeline.errors import ConfigError, PipelineError
from schemas.config.quality import QualityConfig
from schemas.export import (
    Compression,
    ExportFormat,
    ExportOptions,
    ExportRecord,
    FileType,
    ReasoningPlace,
)
from schemas.manifest import RunRecord
from schemas.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.export.export import Destination
    from pipeline.export.index import ExportSource
    from pipeline.export.rows import Decode
    from pipeline.store.folder import Folder

_REASONING_PLACES: dict[ExportFormat, tuple[ReasoningPlace, ...]] = {
    "messages": ("apart", "inline", "drop"),
    "conversations": ("inline", "drop"),
    "tokens": (),
    "rows": (),
    "specforge": ("apart", "inline", "drop"),
    "speculators": ("apart", "inline", "drop"),
}
# File types that the trainers' loaders open by name; the first is the default of the format.
_TRAINER_FILES: dict[ExportFormat, tuple[FileType, Compression]] = {
    "specforge": ("jsonl", "none"),
    "speculators": ("jsonl", "none"),
}
_PARQUET_MIB = 256


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, or 2 when the user can fix it."""
    try:
        arguments = argument_parser().parse_args(argv)
    except argparse.ArgumentError as error:
        tell_error(str(error).removeprefix("argument "))
        return 2
    with open_console("export", arguments.log_format) as console:
        try:
            record = _export(arguments, console.log)
        except PipelineError as error:
            console.report_error(error)
            return 2
        except OSError as error:
            # The disk is full or read-only; the same command resumes once that is fixed.
            console.report_error(ConfigError(f"--to {arguments.to}: {error}"))
            return 2
    tell(record.to_json() if arguments.json else _text(record, arguments.to))
    return 0


def argument_parser() -> argparse.ArgumentParser:
    """Return the command's own parser."""
    parser = argparse.ArgumentParser(
        prog=program("jobs.export"),
        description="Export a run's rows as a data set for training.",
        exit_on_error=False,
        epilog=help_examples(
            "jobs.export",
            "out/run --to out/train",
            "out/run --to out/train --format tokens --file-type jsonl",
            "out/run --to s3://bucket/train --split train=0.98 --split validation=0.02 --shuffle 7",
            "out/run --to out/short --max-tokens 8192 --cut --drop looping,cut_in_answer",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="the run's output.folder: a path, or s3://bucket/path")
    parser.add_argument("--to", required=True, metavar="DEST", help="a folder, or s3://bucket/path")
    parser.add_argument(
        "--format",
        choices=get_args(ExportFormat),
        default="messages",
        help="shape of the rows; default: messages; tokens alone is exact",
    )
    parser.add_argument(
        "--reasoning",
        choices=get_args(ReasoningPlace),
        help="apart (reasoning_content), inline (<think> in the text) or drop; default: as the "
        "format has it",
    )
    parser.add_argument(
        "--file-type",
        choices=get_args(FileType),
        help="default: jsonl for the trainers' formats, else parquet",
    )
    parser.add_argument(
        "--compress",
        choices=get_args(Compression),
        help="default: zstd for parquet, none for JSON lines",
    )
    parser.add_argument(
        "--file-mib",
        type=int,
        metavar="MIB",
        help=f"size of one file in MiB; default: {_PARQUET_MIB} for parquet, one file a split for "
        "JSON lines",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="leave longer rows out, in tokens of prompt and completion; default: none",
    )
    parser.add_argument(
        "--cut", action="store_true", help="cut longer rows at a turn's end where one fits"
    )
    parser.add_argument(
        "--dedup", action="store_true", help="keep only the first row with the same answers"
    )
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="order by this seed; default: the input's"
    )
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="NAME=SHARE",
        help="for example --split train=0.98 --split validation=0.02",
    )
    parser.add_argument(
        "--drop", metavar="FLAG,FLAG", help="flags to drop rows by; default: the run file's policy"
    )
    parser.add_argument("--partial", action="store_true", help="export an unfinished run")
    parser.add_argument("--tokenizer", metavar="T", help="folder or name; default: the run's model")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="local folder for sorting; default: in the run's folder",
    )
    parser.add_argument(
        "--push-to-hub", metavar="USER/NAME", help="also upload DEST, with the token in HF_TOKEN"
    )
    parser.add_argument("--json", action="store_true", help="print export.json")
    add_log_format(parser)
    return parser


def _export(arguments: argparse.Namespace, log: "Callable[[str], None]") -> ExportRecord:
    # Check the options before the imports below, which need a second.
    options = _options(arguments)
    from pipeline.dataset.frozen import schema_from_text
    from pipeline.dataset.run_record import check_columns, check_has_run, read_manifest
    from pipeline.export.card import card, row_facts
    from pipeline.export.export import RECORD_FILE, commit, export
    from pipeline.export.hub import check_push, push
    from pipeline.export.index import ExportSource
    from pipeline.export.rows import form_of
    from pipeline.store.bucket import open_folder
    from pipeline.store.own_folder import is_private, keep_private

    folder = open_folder(arguments.folder)
    if not folder.is_remote and is_private(Path(folder.where)):
        # What is made of private rows is private.
        keep_private()
    run = check_has_run(folder)
    check_columns(run)
    _check_finished(folder, is_partial=options.is_partial)
    manifest = read_manifest(folder)
    options = _with_policy(options, arguments.drop, run)
    carried = schema_from_text(run.carried_schema).names
    source = ExportSource(
        folder=folder,
        run=run,
        parts=tuple(manifest.parts.values()),
        form=form_of(options, run.columns, carried, _decoder(options, run, log)),
    )
    source = _with_run_facts(source)
    _warn_of_trainers(options, log)
    destination = _destination(arguments, folder)
    if arguments.push_to_hub:
        check_push(destination.store, arguments.push_to_hub)
    record = export(source, options, destination, log)
    if destination.store.size_bytes(RECORD_FILE) is None:
        text = card(run, record, options, row_facts(source), manifest.engines)
        commit(record, text, destination)
    if arguments.push_to_hub:
        push(destination.store, arguments.push_to_hub, log=log)
    return record


def _with_run_facts(source: "ExportSource") -> "ExportSource":
    """Shape the rows by what the run has: several samples, tools, gpt-oss."""
    from pipeline.export.chats import harmony_effort

    form = source.form
    effort = None
    if form.format == "specforge":
        effort = harmony_effort(source.run.identity.settings)
    if effort is not None and form.chat.reasoning == "inline":
        raise ConfigError(
            "--reasoning inline: SpecForge reads the reasoning of gpt-oss in a channel of its own; "
            "expected apart or drop"
        )
    chat = replace(
        form.chat,
        has_samples=any(max(part.sample_indexes, default=0) > 0 for part in source.parts),
        has_tools=source.has_any("tools", "tool_calls", "messages.list.element.tool_calls"),
        harmony_effort=effort,
    )
    return replace(source, form=replace(form, chat=chat))


def _warn_of_trainers(options: ExportOptions, log: "Callable[[str], None]") -> None:
    opened = _TRAINER_FILES.get(options.format)
    if opened not in (None, (options.file_type, options.compression)):
        log(
            f"event=warning {options.format} opens JSON lines without compression; convert the "
            f"files before the training"
        )


def _decoder(
    options: ExportOptions, run: RunRecord, log: "Callable[[str], None]"
) -> "Decode | None":
    """Find the tokenizer that checks token rows; None for other formats, and without one."""
    from pipeline.models.tokenizer import model_text_decoder

    if options.format != "tokens":
        return None
    decode = model_text_decoder(options.tokenizer or str(run.identity.settings["model"]))
    if decode is None and options.tokenizer is not None:
        raise ConfigError(
            f"--tokenizer {options.tokenizer}: found no tokenizer.json there, nor in the hub's "
            f"cache on this machine"
        )
    if decode is None:
        log("event=warning found no tokenizer: token ids are not compared with the text")
    return decode


def _destination(arguments: argparse.Namespace, folder: "Folder") -> "Destination":
    from pipeline.export.export import Destination
    from pipeline.store.object_store import open_store

    store = open_store(arguments.to)
    if not (store.is_local or store.has_bucket()):
        raise ConfigError(f"--to {store.where}: there is no bucket {store.bucket!r}")
    name = hashlib.sha256(arguments.to.encode()).hexdigest()[:12]
    scratch = folder.local_file(f".export-{name}")
    if arguments.scratch is not None:
        scratch = arguments.scratch / scratch.name
    return Destination(store=store, scratch=scratch)


def _check_finished(folder: "Folder", *, is_partial: bool) -> None:
    from pipeline.report.status import run_status

    status = run_status(folder, now_s=time.time())
    rows_open = status.rows_total - status.rows_done
    if is_partial or (not rows_open and status.state != "running"):
        return
    state = "is still running" if status.state == "running" else "is not finished"
    raise ConfigError(
        f"{folder.where}: the run {state}: {rows_open:,} of {status.rows_total:,} rows are open, "
        f"{status.rows_failed:,} of them failed; resume it, or export what it has with --partial"
    )


# -- options


def _options(arguments: argparse.Namespace) -> ExportOptions:
    for name in ("file_mib", "max_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: found {value}; expected 1 or more")
    if arguments.cut and arguments.max_tokens is None:
        raise ConfigError("--cut: give --max-tokens too, to which longer rows are cut")
    places = _REASONING_PLACES[arguments.format]
    if arguments.reasoning is not None and arguments.reasoning not in places:
        raise ConfigError(
            f"--reasoning {arguments.reasoning}: does not go with --format {arguments.format}; "
            f"expected {' or '.join(places) or 'none'}"
        )
    usual_type, _ = _TRAINER_FILES.get(arguments.format, ("parquet", "zstd"))
    file_type: FileType = arguments.file_type or usual_type
    file_mib = arguments.file_mib or (_PARQUET_MIB if file_type == "parquet" else None)
    return ExportOptions(
        format=arguments.format,
        reasoning=arguments.reasoning,
        file_bytes=file_mib and file_mib * MIB,
        file_type=file_type,
        compression=arguments.compress or ("zstd" if file_type == "parquet" else "none"),
        max_tokens=arguments.max_tokens,
        is_cut=arguments.cut,
        is_deduplicated=arguments.dedup,
        shuffle_seed=arguments.shuffle,
        splits=_splits(arguments.split),
        is_partial=arguments.partial,
        tokenizer=arguments.tokenizer,
    )


def _splits(given: list[str]) -> tuple[tuple[str, float], ...]:
    if not given:
        return (("train", 1.0),)
    splits: dict[str, float] = {}
    for text in given:
        name, equals, share = text.partition("=")
        if not equals or not name.isidentifier() or not _is_share(share) or name in splits:
            raise ConfigError(
                f"--split {text}: expected a new NAME=SHARE, for example validation=0.02"
            )
        splits[name] = float(share)
    if abs(sum(splits.values()) - 1.0) > 1e-6:
        raise ConfigError(f"--split: the shares sum to {sum(splits.values()):g}; expected 1")
    return tuple(splits.items())


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _with_policy(options: ExportOptions, drop: str | None, run: RunRecord) -> ExportOptions:
    """Set the flags to drop rows by: those given, else all that the run file does not keep."""
    from pipeline.quality.flags import FLAGS

    if drop is None:
        quality = QualityConfig.model_validate(run.quality)
        flags: list[str] = [name for name in FLAGS if quality.flag(name).policy != "keep"]
    else:
        flags = [name for name in drop.split(",") if name]
        unknown = [name for name in flags if name not in FLAGS]
        if unknown:
            raise ConfigError(f"--drop: unknown flag {unknown[0]!r}; known: {', '.join(FLAGS)}")
    return replace(options, drop_flags=tuple(flags))


# -- output


def _text(record: ExportRecord, where: str) -> str:
    size = sum(file.size_bytes for file in record.files)
    dropped = sum(record.dropped.values())
    lines = [
        (
            f"exported   {record.rows_exported:,} of {record.rows_published:,} rows as "
            f"{record.format}, {dropped:,} dropped"
        ),
        *(f"dropped    {count:,} {reason}" for reason, count in sorted(record.dropped.items())),
        *([f"cut        {record.rows_cut:,} rows at a turn's end"] if record.rows_cut else []),
        f"data set   {where} ({len(record.files)} files, {size / MIB:,.0f} MiB)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
