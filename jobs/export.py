"""Bring a run's rows into the form that a trainer reads: one folder that `load_dataset` opens.

usage: python -m jobs.export FOLDER --to DEST [--format messages|conversations|tokens|rows] ...
"""

import argparse
import hashlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from jobs.terminal import tell
from pipeline.errors import ConfigError, PipelineError
from schemas.export import ExportFormat, ExportOptions, ExportRecord, ReasoningPlace
from schemas.manifest import RunRecord
from schemas.quality_config import QualityConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.store.folder import Folder

_MIB = 2**20
_REASONING_PLACES: dict[ExportFormat, tuple[ReasoningPlace, ...]] = {
    "messages": ("apart", "inline", "drop"),
    "conversations": ("inline", "drop"),
    "tokens": (),
    "rows": (),
}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the user can fix it."""
    arguments = _parser().parse_args(argv)
    try:
        record = _export(arguments)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        # A disk that is full or may not be written to; the same command goes on once it can.
        print(f"--to {arguments.to}: {error}", file=sys.stderr)
        return 2
    tell(record.to_json() if arguments.json else _text(record, arguments.to))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.export", description="A run's rows as a data set for training."
    )
    parser.add_argument("folder", help="the run's output.folder: a path, or s3://bucket/path")
    parser.add_argument("--to", required=True, metavar="DEST", help="a folder, or s3://bucket/path")
    parser.add_argument("--format", choices=get_args(ExportFormat), default="messages")
    parser.add_argument(
        "--reasoning",
        choices=get_args(ReasoningPlace),
        help="apart (reasoning_content), inline (<think> in the text) or drop",
    )
    parser.add_argument("--file-mib", type=int, default=256, help="size of one file")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="default: the input's order")
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
    parser.add_argument("--partial", action="store_true", help="of a run that is not finished")
    parser.add_argument("--tokenizer", help="folder or name; default: the run's model")
    parser.add_argument(
        "--scratch", type=Path, help="on disk, for sorting; default: in the run's folder"
    )
    parser.add_argument(
        "--push-to-hub", metavar="USER/NAME", help="upload DEST as well; the token is HF_TOKEN"
    )
    parser.add_argument("--json", action="store_true", help="print export.json")
    return parser


def _export(arguments: argparse.Namespace) -> ExportRecord:
    # The libraries below take a second to import; a wrong option is told before.
    options = _options(arguments)
    from pipeline.dataset.export import commit, export
    from pipeline.dataset.export_card import card, row_facts
    from pipeline.dataset.export_rows import form_of
    from pipeline.dataset.frozen import schema_from_text
    from pipeline.dataset.hub import check_push, push
    from pipeline.dataset.run_record import check_columns, check_has_run, read_manifest
    from pipeline.models.tokenizer import model_text_decoder
    from pipeline.store.bucket import open_folder
    from pipeline.store.object_store import open_store

    folder, store = open_folder(arguments.folder), open_store(arguments.to)
    run = check_has_run(folder)
    check_columns(run)
    _check_finished(folder, is_partial=options.is_partial)
    manifest = read_manifest(folder)
    parts = tuple(manifest.parts.values())
    options = _with_policy(options, arguments.drop, run)
    decode = None
    if options.format == "tokens":
        decode = model_text_decoder(options.tokenizer or str(run.identity.settings["model"]))
        if decode is None and options.tokenizer is not None:
            raise ConfigError(
                f"--tokenizer {options.tokenizer}: found no tokenizer.json there, nor in the hub's "
                f"cache on this machine"
            )
        if decode is None:
            _log("event=warning no tokenizer is at hand: token ids are not held against the text")
    if not (store.is_local or store.has_bucket()):
        raise ConfigError(f"--to {store.where}: there is no bucket {store.bucket!r}")
    if arguments.push_to_hub:
        check_push(store, arguments.push_to_hub)
    name = hashlib.sha256(arguments.to.encode()).hexdigest()[:12]
    scratch = folder.local_file(f".export-{name}")
    if arguments.scratch is not None:
        scratch = arguments.scratch / scratch.name
    carried = schema_from_text(run.carried_schema).names
    record = export(
        folder,
        parts,
        _input_ids(folder),
        run_id=run.run_id,
        form=form_of(options.format, options.reasoning, carried, decode),
        options=options,
        store=store,
        scratch=scratch,
        log=_log,
    )
    if store.size_bytes("export.json") is None:
        facts = row_facts(folder, parts)
        commit(store, record, card(run, record, options, facts, manifest.engines), scratch)
    if arguments.push_to_hub:
        push(store, arguments.push_to_hub, log=_log)
    return record


def _check_finished(folder: "Folder", *, is_partial: bool) -> None:
    from pipeline.report.status import run_status

    status = run_status(folder, now_s=time.time())
    rows_open = status.rows_total - status.rows_done
    if is_partial or (not rows_open and status.state != "running"):
        return
    state = "is still running" if status.state == "running" else "is not finished"
    raise ConfigError(
        f"{folder.where}: the run {state}: {rows_open:,} of {status.rows_total:,} rows are open, "
        f"{status.rows_failed:,} of them failed; resume it, or export what there is with --partial"
    )


def _input_ids(folder: "Folder") -> "Iterator[Any]":
    """The frozen input's row ids in order; none where the set is gone."""
    from pipeline.dataset.frozen import frozen_in

    frozen = frozen_in(folder)
    return iter(()) if frozen is None else (row_ids for row_ids, _ in frozen.ids())


# -- options


def _options(arguments: argparse.Namespace) -> ExportOptions:
    if arguments.file_mib < 1:
        raise ConfigError(f"--file-mib: found {arguments.file_mib}; expected 1 or more")
    places = _REASONING_PLACES[arguments.format]
    if arguments.reasoning is not None and arguments.reasoning not in places:
        raise ConfigError(
            f"--reasoning {arguments.reasoning}: does not go with --format {arguments.format}; "
            f"expected {' or '.join(places) or 'none'}"
        )
    return ExportOptions(
        format=arguments.format,
        reasoning=arguments.reasoning,
        file_bytes=arguments.file_mib * _MIB,
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
    """The flags to drop rows by: as given, else those that the run file does not keep."""
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


# -- what people see


def _log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _text(record: ExportRecord, where: str) -> str:
    size = sum(file.size_bytes for file in record.files)
    dropped = sum(record.dropped.values())
    lines = [
        (
            f"exported   {record.rows_exported:,} of {record.rows_published:,} rows as "
            f"{record.format}, {dropped:,} dropped"
        ),
        *(f"dropped    {count:,} {reason}" for reason, count in sorted(record.dropped.items())),
        f"data set   {where} ({len(record.files)} files, {size / _MIB:,.0f} MiB)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
