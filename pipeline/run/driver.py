"""The driver of one session: start the cluster, follow the run to its end, and drain it.

Invariant: a session ends in exactly one way, which the observer notes before the driver reports it.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

from pipeline.console.commands import command
from pipeline.console.progress import Display, Show
from pipeline.dataset.run_record import read_manifest
from pipeline.errors import DriverLostError, EngineError
from pipeline.live.eta import LiveEta
from pipeline.report.observer import Observer
from pipeline.report.webhook import webhook_of
from pipeline.run.cluster import Cluster, open_cluster
from pipeline.run.session import Prepared
from pipeline.run.signals import catch_signals
from pipeline.store.folder import Folder
from pipeline.store.run_folder import REPORT_FILE
from schemas.estimate import Band
from schemas.progress import Progress

Log = Callable[[str], None]
EndKind = Literal["done", "failed", "stopped", "canary_failed"]

_WORSE_THAN_LIMITS = "the first rows are worse than the limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """The end of a session."""

    kind: EndKind
    causes: tuple[str, ...] = ()
    """Reasons why engines were abandoned."""
    wall_s: float = 0.0
    """Time since the start; 0 when there was nothing to do."""
    signal: int = 0
    """Signal that stopped the session."""


class Driven(Protocol):
    """A running cluster, as `follow` sees it."""

    @property
    def causes(self) -> list[str]: ...
    @property
    def is_deserted(self) -> bool: ...
    @property
    def are_unfit(self) -> bool: ...
    def poll(self, days_left: Band | None) -> tuple[Progress, list[str]]: ...


# -- the session


def drive(
    folder: Folder, prepared: Prepared, is_lost: Callable[[], bool], display: Display, log: Log
) -> SessionEnd:
    """Run the session that is prepared, if anything is left to do.

    Raises DriverLostError when another driver took the folder over, and EngineError when no engine
    came up.
    """
    session, config = prepared.session, prepared.plan.config
    log(
        f"event=session rows={session.rows_total} done={session.rows_done} "
        f"folder={prepared.plan.root}"
    )
    if session.rows_error:
        log(
            f"event=error_rows rows={session.rows_error} --retry-errors generates them again; "
            "without it they stay as they are"
        )
    observer = Observer(
        folder=folder,
        run_id=prepared.plan.run_id,
        clock=time.time,
        log=log,
        webhook=webhook_of(config.events, log),
        rows=(session.rows_done, session.rows_total),
    )
    if prepared.excesses:
        observer.note_events([f"event=canary_failed rows={_num_canary_rows(folder)}"])
        observer.finish("failed", _WORSE_THAN_LIMITS)
        return SessionEnd(kind="canary_failed")
    if session.rows_done == session.rows_total:
        log("event=nothing_to_do every row of the input is published")
        observer.finish_without_work()
        return SessionEnd(kind="done")
    return _generate(folder, prepared, observer, is_lost, display, log)


def _generate(
    folder: Folder,
    prepared: Prepared,
    observer: Observer,
    is_lost: Callable[[], bool],
    display: Display,
    log: Log,
) -> SessionEnd:
    began_s, config = time.monotonic(), prepared.plan.config
    opened = open_cluster(prepared.plan, bytes(prepared.row_states), log)
    with observer.watching(config), opened as cluster:
        eta = LiveEta(
            folder=folder,
            config=config,
            today=datetime.now(UTC).date(),
            newer_log=cluster.newer_log,
            clock=time.monotonic,
        )
        _log_where_to_look(log, folder, cluster.dashboard)
        signals = catch_signals()
        cluster.hire_all()
        with display() as show, eta.working():
            kind = follow(cluster, signals, is_lost, _both(show, observer.see), eta)
        if kind in ("stopped", "canary_failed") or folder.is_remote:
            last_lines = cluster.drain(config.cluster.drain_timeout_s)
            observer.note_events(last_lines)
            for line in last_lines:
                log(line)
        final = cluster.close("stopped" if kind == "canary_failed" else kind)
        _note_end(observer, kind, cluster.causes)
    if kind == "stopped":
        _log_stop(log, signals[0], prepared, final, cluster)
    return SessionEnd(
        kind=kind,
        causes=tuple(cluster.causes),
        wall_s=time.monotonic() - began_s,
        signal=signals[0] if kind == "stopped" else 0,
    )


def follow(
    cluster: Driven,
    signals: list[int],
    is_lost: Callable[[], bool],
    show: Show,
    eta: LiveEta,
) -> EndKind:
    """Follow the run to its end. Raises DriverLostError, or EngineError when no engine ran."""
    ever_ran = False
    while True:
        progress, events = cluster.poll(eta.days_left)
        eta.follow(progress)
        show(progress, [*events, *eta.take_events()])
        ever_ran = ever_ran or any(w.state in ("running", "idle") for w in progress.workers)
        if progress.canary == "failed":
            return "canary_failed"
        if progress.rows_done + progress.rows_failed == progress.rows_total:
            return "done"
        if signals:
            return "stopped"
        if is_lost():
            raise DriverLostError("another driver has taken the output folder over; stopped")
        if cluster.are_unfit and not progress.completion_tokens:
            raise EngineError("\n".join(dict.fromkeys(cluster.causes)))
        if cluster.is_deserted and not ever_ran and not progress.completion_tokens:
            raise EngineError("\n".join(f"no engine came up: {c}" for c in set(cluster.causes)))
        if cluster.is_deserted:
            return "failed"


def _log_where_to_look(log: Log, folder: Folder, dashboard: str | None) -> None:
    status = command("jobs.status", folder.where, "--watch")
    address = dashboard or "none, because this Ray is the run's own"
    log(f"event=look report={folder.place(REPORT_FILE)!r} status={status!r} dashboard={address!r}")


def _both(first: Show, second: Show) -> Show:
    def show(progress: Progress, events: list[str]) -> None:
        first(progress, events)
        second(progress, events)

    return show


def _num_canary_rows(folder: Folder) -> int:
    return sum(part.num_rows for part in read_manifest(folder).canary_parts)


def _note_end(
    observer: Observer,
    kind: EndKind,
    causes: list[str],
) -> None:
    if kind == "canary_failed":
        observer.finish("failed", _WORSE_THAN_LIMITS)
    else:
        observer.finish(kind, "; ".join(dict.fromkeys(causes)) if kind == "failed" else "")


def _log_stop(
    log: Log, number: int, prepared: Prepared, final: Progress | None, cluster: Cluster
) -> None:
    known = final or cluster.progress
    rows_done = known.rows_done if known else prepared.session.rows_done
    name = signal.Signals(number).name
    log(f"event=stopped by={name} rows_done={rows_done} rows_total={prepared.session.rows_total}")
    if final is None:
        log(
            "event=unpublished the coordinator did not answer: rows finished since then may be "
            "lost; the same command resumes"
        )
    else:
        log("event=published every finished row is published; the same command resumes")
