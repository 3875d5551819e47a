"""Regenerate the completions of a data set: prompts in, parquet out, resumed by the same command.

usage: python -m jobs.regenerate RUN.yaml [--set key=value ...] [--dry-run]
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jobs import canary as canary_findings
from jobs.status import as_json as status_as_json
from jobs.status import failed_lines
from jobs.terminal import Show, display, log
from pipeline.errors import (
    ConfigError,
    CoordinatorLostError,
    DriverLostError,
    EngineError,
    PipelineError,
)
from pipeline.planner.estimate.figures import duration
from schemas.config import RunFile, is_url, read_run_file

if TYPE_CHECKING:
    from pipeline.live.eta import LiveEta
    from pipeline.run.cluster import Cluster
    from pipeline.run.session import Prepared
    from pipeline.store.folder import Folder
    from pipeline.store.lock import Holder
    from schemas.manifest import Session
    from schemas.progress import Progress, RunStatus


DONE, USER_CAN_FIX, WITH_ERRORS = 0, 2, 3
_EXAMPLE_CHARACTERS = 240
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WORSE_THAN_LIMITS = "the first rows are worse than the limits"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 the user can fix it, 3 error or failed rows, or a bad canary."""
    arguments = _parser().parse_args(argv)
    try:
        config = _with_absolute_paths(read_run_file(arguments.run_file, arguments.set))
        if arguments.dry_run:
            return _dry_run(config, as_json=arguments.json)
        return _run(config, arguments)
    except CoordinatorLostError as error:
        print(error, file=sys.stderr)
        return WITH_ERRORS
    except PipelineError as error:
        print(error, file=sys.stderr)
        return USER_CAN_FIX


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.regenerate",
        description="Regenerate the completions of a data set. The same command resumes.",
    )
    parser.add_argument("run_file", type=Path, help="the run file, YAML")
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
        help="read and check everything, count rows and prompt tokens, start nothing",
    )
    parser.add_argument(
        "--accept-drift",
        action="store_true",
        help="go on although settings that alter rows, or the input, have changed",
    )
    parser.add_argument(
        "--retry-errors", action="store_true", help="ask again for rows that ended as error rows"
    )
    parser.add_argument(
        "--accept-errors",
        action="store_true",
        help="exit with 0 when every row is done, even if some ended as error rows",
    )
    parser.add_argument(
        "--retry-flagged",
        action="store_true",
        help="ask again for rows with a quality flag whose policy is not to keep them",
    )
    parser.add_argument(
        "--accept-canary",
        action="store_true",
        help="go on whatever the first rows look like; limits apply from there",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser


def _with_absolute_paths(config: RunFile) -> RunFile:
    """Workers run elsewhere, so that a relative path would mean another file to them."""
    engine = config.engine
    changes: dict[str, object] = {
        "prompts": config.prompts.model_copy(update={"path": _absolute(config.prompts.path)}),
        "output": config.output.model_copy(update={"folder": _absolute_folder(config)}),
        "engine": engine.model_copy(
            update={
                "model_file": engine.model_file and str(Path(engine.model_file).absolute()),
                "python": engine.python and str(Path(engine.python).absolute()),
            }
        ),
    }
    if Path(config.model).is_dir():
        changes["model"] = str(Path(config.model).absolute())
    return config.model_copy(update=changes)


def _absolute_folder(config: RunFile) -> str:
    folder = config.output.folder
    return folder if is_url(folder) else str(Path(folder).absolute())


def _absolute(path: str) -> str:
    """A path that is there, or that cannot be a hub name, made absolute."""
    if is_url(path):
        return path
    looks_local = Path(path).suffix in (".parquet", ".pq", ".jsonl", ".ndjson", ".json")
    return str(Path(path).absolute()) if looks_local or Path(path).exists() else path


# -- the run


def _run(config: RunFile, arguments: argparse.Namespace) -> int:
    # Ray, datasets and openai take seconds to import; a mistake in the run file is told before.
    from pipeline.engines.served import check_engine
    from pipeline.run.session import SessionOptions, prepare
    from pipeline.store import lock
    from pipeline.store.bucket import open_folder

    check_engine(config)
    _check_quality(config)
    _check_events(config)
    _check_folders_apart(config)
    _exit_on_signals()
    folder = open_folder(config.output.folder)
    _make_folder(folder)
    if "RAY_JOB_ID" in os.environ and "_ray_pkg_" in config.output.folder:
        log("event=warning output.folder is relative, so it lies in the job's own copy of the code")
    holder = lock.this_process()
    with _holding(folder, holder) as lost:
        prepared = prepare(
            config,
            folder,
            SessionOptions(
                accept_drift=arguments.accept_drift,
                accept_canary=arguments.accept_canary,
                retry_errors=arguments.retry_errors,
                retry_flags=_flags_to_retry(config) if arguments.retry_flagged else frozenset(),
            ),
            token=holder.token,
            now_s=time.time(),
            log=log,
        )
        return _generate(folder, prepared, lost, arguments)


def _check_quality(config: RunFile) -> None:
    from pipeline.quality.languages import check_language_detector

    if config.quality.wrong_language.enabled:
        check_language_detector()


def _check_events(config: RunFile) -> None:
    from pipeline.report.webhook import webhook_of

    webhook_of(config.events, log)


def _flags_to_retry(config: RunFile) -> frozenset[str]:
    from pipeline.quality.flags import FLAGS

    return frozenset(flag for flag in FLAGS if config.quality.flag(flag).policy != "keep")


def _check_folders_apart(config: RunFile) -> None:
    """A folder of prompts that holds the output would grow by it."""
    prompts, output = config.prompts.path.partition("?")[0], config.output.folder.partition("?")[0]
    if is_url(prompts):
        is_within = f"{output.rstrip('/')}/".startswith(f"{prompts.rstrip('/')}/")
    else:
        path = Path(prompts).absolute()
        is_within = path.is_dir() and Path(output).is_relative_to(path)
    if is_within:
        raise ConfigError(
            f"output.folder: {output} lies inside prompts.path {prompts}, whose files are all "
            f"read; use a folder beside it"
        )


def _make_folder(folder: "Folder") -> None:
    try:
        folder.make()
    except OSError as error:
        raise ConfigError(
            f"output.folder: cannot create {folder.where}: {error.strerror}"
        ) from None


@contextlib.contextmanager
def _holding(folder: "Folder", holder: "Holder") -> Iterator[Callable[[], bool]]:
    """Take the lock, raise its beat in the background, and remove it at the end.

    Yields whether the folder was taken over.
    """
    from pipeline.store import lock

    stop, lost = threading.Event(), threading.Event()

    def beat_until_stopped() -> None:
        current = holder
        while not stop.wait(lock.BEAT_INTERVAL_S):
            try:
                current = lock.beat(folder, current)
            except DriverLostError:
                lost.set()
                return
            except (OSError, ConfigError) as error:
                # The folder may come back; if it does not, the next publication says so.
                log(f"event=warning the driver's lock cannot be written: {error}")

    thread = threading.Thread(target=beat_until_stopped, name="driver-lock", daemon=True)
    may_be_ours = True
    try:
        try:
            # In here, since a signal may come as soon as the lock stands.
            lock.acquire(folder, holder, time.sleep)
        except PipelineError:
            may_be_ours = False
            raise
        thread.start()
        yield lost.is_set
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()
        try:
            if may_be_ours:
                lock.release(folder, holder)
        except (OSError, ConfigError) as error:
            # What ended the run is what is to be told; the lock of a process that is gone is taken.
            log(f"event=warning the driver's lock cannot be removed: {error}")


def _generate(
    folder: "Folder",
    prepared: "Prepared",
    lost: Callable[[], bool],
    arguments: argparse.Namespace,
) -> int:
    from pipeline.live.eta import LiveEta
    from pipeline.report.observer import Observer
    from pipeline.report.webhook import webhook_of
    from pipeline.run.cluster import open_cluster

    session, started_s = prepared.session, time.monotonic()
    log(
        f"event=session rows={session.rows_total} done={session.rows_done} "
        f"folder={prepared.plan.root}"
    )
    observer = Observer(
        folder=folder,
        run_id=prepared.plan.run_id,
        clock=time.time,
        log=log,
        webhook=webhook_of(prepared.plan.config.events, log),
        rows=(session.rows_done, session.rows_total),
    )
    if prepared.excesses:
        observer.note_events([f"event=canary_failed rows={_num_canary_rows(folder)}"])
        observer.finish("failed", _WORSE_THAN_LIMITS)
        return _stopped_by_canary(folder, prepared, as_json=arguments.json)
    if session.rows_done == session.rows_total:
        log("event=nothing_to_do every row of the input is published")
        observer.finish_without_work()
        return _finish(folder, session, arguments, wall_s=0.0, causes=[])
    eta = LiveEta(
        folder=folder,
        config=prepared.plan.config,
        today=datetime.now(UTC).date(),
    )
    watching = observer.watching(prepared.plan.config)
    held = open_cluster(prepared.plan, bytes(prepared.row_states))
    with watching, held as cluster, eta.working():
        caught = _caught_signals()
        cluster.hire_all()
        with display(session.rows_total, session.rows_done) as show:
            ending = _watch(cluster, caught, lost, _both(show, observer.see), eta)
        if ending in ("stopped", "bad_canary") or folder.is_remote:
            cluster.drain(prepared.plan.config.cluster.drain_timeout_s)
        final = cluster.close("stopped" if ending == "bad_canary" else ending)
        if ending == "bad_canary":
            observer.finish("failed", _WORSE_THAN_LIMITS)
        else:
            causes = dict.fromkeys(cluster.causes) if ending == "failed" else ()
            observer.finish(ending, "; ".join(causes))
    if ending == "bad_canary":
        return _stopped_by_canary(folder, prepared, as_json=arguments.json)
    if ending == "stopped":
        known = final or cluster.progress
        rows_done = known.rows_done if known else session.rows_done
        name = signal.Signals(caught[0]).name
        log(f"event=stopped by={name} rows_done={rows_done} rows_total={session.rows_total}")
        published = "every finished row is published"
        if final is None:
            published = "the coordinator did not answer: rows finished since then may be lost"
        log(f"{published}; the same command resumes")
        return 128 + caught[0]
    wall_s = time.monotonic() - started_s
    return _finish(folder, session, arguments, wall_s=wall_s, causes=cluster.causes)


def _both(first: Show, second: Show) -> Show:
    def show(progress: "Progress", events: list[str]) -> None:
        first(progress, events)
        second(progress, events)

    return show


def _num_canary_rows(folder: "Folder") -> int:
    from pipeline.dataset.run_record import read_manifest

    return sum(part.num_rows for part in read_manifest(folder).canary_parts)


def _stopped_by_canary(folder: "Folder", prepared: "Prepared", *, as_json: bool) -> int:
    """Print what the canary found; the rows that it wrote stay."""
    found = canary_findings.findings(folder, prepared.plan.config, prepared.excesses)
    if as_json:
        print(json.dumps(canary_findings.as_json(found), indent=1, ensure_ascii=False))
    else:
        print(canary_findings.text(found))
    return WITH_ERRORS


def _watch(
    cluster: "Cluster",
    caught: list[int],
    lost: Callable[[], bool],
    show: Callable[["Progress", list[str]], None],
    eta: "LiveEta",
) -> Literal["done", "stopped", "failed", "bad_canary"]:
    """Follow the run to its end. Raises DriverLostError, and EngineError when none ever ran."""
    ever_ran = False
    while True:
        progress, events = cluster.poll(eta.days_left)
        eta.follow(progress)
        show(progress, [*events, *eta.take_events()])
        ever_ran = ever_ran or any(w.state in ("running", "idle") for w in progress.workers)
        if progress.canary == "failed":
            return "bad_canary"
        if progress.rows_done + progress.rows_failed == progress.rows_total:
            return "done"
        if caught:
            return "stopped"
        if lost():
            raise DriverLostError("another driver has taken the output folder over; stopped")
        if cluster.is_deserted and not ever_ran and not progress.completion_tokens:
            raise EngineError("\n".join(f"no engine came up: {c}" for c in set(cluster.causes)))
        if cluster.is_deserted:
            return "failed"


def _exit_on_signals() -> None:
    """Until engines run there is nothing to drain: leave at once, and give the folder free."""

    def leave(received: int, _: object) -> None:
        log(f"event=stopped by={signal.Signals(received).name}; nothing was started")
        raise SystemExit(128 + received)

    for number in _STOP_SIGNALS:
        signal.signal(number, leave)


def _caught_signals() -> list[int]:
    """Signals caught from here on, in order; Ray has its own handlers until then."""
    caught: list[int] = []
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda received, _: caught.append(received))
    return caught


# -- what people see


def _finish(
    folder: "Folder",
    session: "Session",
    arguments: argparse.Namespace,
    *,
    wall_s: float,
    causes: list[str],
) -> int:
    """Print the summary on stdout; the exit status tells whether every row has its completion."""
    from pipeline.dataset.parts import example_completion
    from pipeline.dataset.run_record import read_manifest
    from pipeline.report.status import run_status

    status = run_status(folder, now_s=time.time())
    generated = sum(part.completion_tokens for part in read_manifest(folder).session_parts)
    tokens_per_s = generated / wall_s if wall_s else None
    example = example_completion(folder)
    flags = flag_counts(folder)
    unfinished = status.rows_total - status.rows_done - status.rows_failed
    if arguments.json:
        values = {**status_as_json(status), "wall_s": wall_s, "tokens_per_s": tokens_per_s}
        values |= {"data": folder.place("data"), "causes": causes, "example": example}
        values |= {"flags": flags}
        print(json.dumps(values, indent=1, default=str))
    else:
        print(_summary(status, wall_s, tokens_per_s, folder.place("data")))
        if flags:
            print("flags      " + ", ".join(f"{count:,} {name}" for name, count in flags.items()))
        print(*failed_lines(status), sep="\n", end="\n" if status.failed else "")
        if unfinished:
            print(f"unfinished {unfinished:,} rows: no engine is left; the same command resumes")
            print(*(f"cause      {cause}" for cause in dict.fromkeys(causes)), sep="\n")
        print(_example_text(example))
    has_errors = status.rows_error and not arguments.accept_errors
    return WITH_ERRORS if has_errors or status.rows_failed or unfinished else DONE


def flag_counts(folder: "Folder") -> dict[str, int]:
    """Quality flag → published rows that bear it, most frequent first."""
    from pipeline.dataset.run_record import read_manifest

    counts: Counter[str] = Counter()
    for part in read_manifest(folder).parts.values():
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
    lines = [f"example    {example['row_id']}"]
    for message in example["messages"]:  # type: ignore[attr-defined]
        if message["reasoning_content"]:
            lines.append(f"  thinking: {_cut(message['reasoning_content'])}")
        lines.append(f"  {message['role']}: {_cut(message['content'])}")
    return "\n".join(lines)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXAMPLE_CHARACTERS else line[: _EXAMPLE_CHARACTERS - 3] + "..."


# -- the dry run


def _dry_run(config: RunFile, *, as_json: bool) -> int:
    """Read and check everything, count rows and prompt tokens; start and write nothing."""
    from pipeline.engines.served import check_engine
    from pipeline.run.dry_run import dry_run
    from pipeline.store.bucket import open_folder

    check_engine(config)
    _check_quality(config)
    _check_events(config)
    folder = open_folder(config.output.folder)
    if folder.is_remote:
        # Of a store it is only looked up whether there is such a bucket.
        _make_folder(folder)
    found = dry_run(config, folder)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return DONE
    print(f"prompts    {config.prompts.path}: column {found.column!r}, read as {found.shape}")
    print(f"rows       {found.rows_total:,} to generate, {found.rows_done:,} of them done")
    print(f"turns      {found.turns:,} assistant turns")
    print(f"tokens     {found.prompt_tokens:,} in prompts ({found.token_method})")
    if found.prompts_without_room:
        print(
            f"no room    {found.prompts_without_room:,} prompts and sampling.max_tokens are more "
            f"than the context of {found.context_tokens:,}: an engine refuses them"
        )
    for kind, (count, example) in found.problems.items():
        print(f"bad rows   {count:,} {kind}: they end as error rows, e.g. {example}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
