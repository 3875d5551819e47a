"""The coordinator and the workers as Ray actors, and the driver's hold on them. The door to Ray.

Invariant: the coordinator alone publishes, and only while its driver holds the output folder. It
owns no rows: what it knows is rebuilt from the folder at every start. A worker that ends, dies or
falls silent gives its leases up; a worker whose process died, or whose node did, is started again
where there is a place.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import monotonic, time
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from pipeline import checkpoint, driver_lock
from pipeline.canary import excesses, hold_all_but_canary, tally_of, turned_bad
from pipeline.engines.assembly import ServedEngine
from pipeline.errors import ConfigError, CoordinatorLostError, EngineError, PipelineError
from pipeline.intake import frozen_prompts, schema_from_text
from pipeline.languages import language_detector
from pipeline.metrics import RunMetrics
from pipeline.placement import (
    Hold,
    Node,
    Place,
    alive_nodes,
    free_resources,
    hold,
    num_places,
    on_this_node,
    this_place,
)
from pipeline.shards import Ledger
from pipeline.status import LIVE_FILE
from pipeline.storage import Folder
from pipeline.worker import Worker
from schemas.config import RunFile
from schemas.manifest import CanaryEvent, FailedRow, Part
from schemas.progress import CanaryState, LeaseReply, Orders, Progress, WorkerReport
from schemas.session import SessionPlan, Tally
from schemas.shard import LeaseKey

_LIVE_INTERVAL_S = 2.0
_POLL_S = 0.5
_MOST_WORKER_CRASHES = 5
_WAITING_AFTER_S = 30.0
_LOOK_AT_NODES_S = 5.0
_LOCAL_OBJECT_STORE_BYTES = 128 * 2**20
# Leases and reports are all that Ray carries; its default takes a third of the memory.


class Coordinator:
    """Hands out leases and publishes parts. One method runs at a time."""

    def __init__(self, plan: SessionPlan, row_states: bytes) -> None:
        work = plan.config.work
        self._plan = plan
        self._folder = Folder(plan.root)
        states, canary = bytearray(row_states), plan.canary
        self._canary: CanaryState = "none" if canary is None else "running"
        self._canary_tally = canary.tally if canary is not None else Tally()
        self._canary_rows = self._canary_tally.num_rows
        if canary is not None:
            seed = plan.config.sampling.seed
            self._canary_rows += hold_all_but_canary(states, canary.rows_left, seed)
        self._ledger = Ledger(
            row_states=states,
            shard_rows=work.shard_rows,
            lease_ttl_s=work.lease_ttl_s,
            max_shard_losses=work.max_shard_losses,
        )
        self._metrics = RunMetrics(run_id=plan.run_id)
        self._reports: dict[str, WorkerReport] = {}
        self._with_spare_rows: set[str] = set()
        self._asked_back: dict[str, int] = {}
        self._taken_for_dead: set[str] = set()
        self._ready: set[str] = set()
        self._has_begun = False
        self._events: list[str] = []
        self._rows_error = plan.rows_error
        self._completion_tokens = 0
        self._last_publish_s: float | None = None
        self._live_written_s = 0.0

    # -- for workers

    def lease(self, worker_id: str) -> LeaseReply:
        if worker_id in self._taken_for_dead or self._canary == "failed":
            # It has yet to hear that its leases are lost; a new one would be dropped with them.
            return LeaseReply(lease=None, is_over=False)
        self._ready.add(worker_id)
        if not self._are_enough:
            return LeaseReply(lease=None, is_over=False)
        lease = self._ledger.lease(worker_id, now_s=monotonic())
        if lease is None and not self._ledger.is_over:
            self._ask_back(worker_id)
        is_canary = self._canary == "running"
        return LeaseReply(lease=lease, is_over=self._ledger.is_over, is_canary=is_canary)

    def publish(self, part: Part, rows: list[tuple[LeaseKey, int]]) -> set[tuple[LeaseKey, int]]:
        """The rows that are stale: then nothing is published, and the rest is to come again."""
        driver_lock.check_held(self._folder, self._plan.token)
        if stale := self._ledger.stale_rows(rows):
            checkpoint.discard(self._folder, part)
            return stale
        checkpoint.publish(self._folder, part, now_s=time())
        self._ledger.mark_done(rows)
        self._metrics.published(part)
        self._rows_error += part.num_errors
        self._completion_tokens += part.completion_tokens
        self._last_publish_s = time()
        if self._canary == "running":
            self._canary_tally = tally_of([part], self._canary_tally)
        self._judge_canary()
        return set()

    def set_aside(self, key: LeaseKey, row: int, failed: FailedRow) -> None:
        if self._ledger.set_aside(key, row):
            checkpoint.list_failed(self._folder, failed)
            self._judge_canary()

    def give_back(self, key: LeaseKey, first_row: int) -> None:
        self._ledger.give_back(key, first_row)

    def release(self, worker_id: str) -> None:
        """The worker holds nothing: what the ledger still leases to it is open again."""
        self._ledger.worker_left(worker_id)

    def engine_lost(self, worker_id: str, cause: str) -> None:
        self._give_up(self._ledger.worker_lost(worker_id), cause)

    def heartbeat(self, report: WorkerReport) -> Orders:
        self._ledger.renew(report.worker_id, now_s=monotonic())
        self._reports[report.worker_id] = report
        has_spare_rows = report.state == "running" and report.not_started > 0
        (self._with_spare_rows.add if has_spare_rows else self._with_spare_rows.discard)(
            report.worker_id
        )
        if report.worker_id in self._taken_for_dead:
            self._taken_for_dead.discard(report.worker_id)
            return Orders(leases_are_lost=True)
        quality, accepted = self._plan.config.quality, self._plan.accepted_shares
        if cause := turned_bad(report.worker_id, self._reports, quality, accepted):
            self.log(
                f"event=engine_drained worker={report.worker_id} engine={report.engine} "
                f"cause={cause!r}"
            )
            return Orders(drain_cause=cause)
        return Orders(give_back_rows=self._asked_back.pop(report.worker_id, 0))

    def log(self, line: str) -> None:
        self._metrics.logged(line)
        self._events.append(line)

    # -- for the driver

    def worker_ended(self, worker_id: str, cause: str | None) -> None:
        """A worker ended by itself (`cause` None) or died; what it held is open again."""
        self._ready.discard(worker_id)
        if cause is None:
            self._ledger.worker_left(worker_id)
        else:
            self._give_up(self._ledger.worker_lost(worker_id), cause)
        self._reports.pop(worker_id, None)
        self._with_spare_rows.discard(worker_id)

    def poll(self) -> tuple[Progress, list[str]]:
        """How far it is, and the log lines since the last poll."""
        for worker_id in self._ledger.silent_workers(now_s=monotonic()):
            self._taken_for_dead.add(worker_id)
            self.log(f"event=worker_silent worker={worker_id}")
            self._give_up(self._ledger.worker_lost(worker_id), "its worker fell silent")
        progress = self._progress("running")
        if monotonic() - self._live_written_s >= _LIVE_INTERVAL_S:
            self._write_live(progress)
        events, self._events = self._events, []
        return progress, events

    def close(self, state: Literal["done", "stopped", "failed"]) -> Progress:
        """The final word in `live.json`."""
        progress = self._progress(state)
        self._write_live(progress)
        return progress

    # -- inside

    @property
    def _are_enough(self) -> bool:
        """Whether `min_engines` were ready at one time: from then on rows are handed out."""
        self._has_begun = self._has_begun or not self._engines_awaited
        return self._has_begun

    @property
    def _engines_awaited(self) -> int:
        if self._has_begun:
            return 0
        return max(0, self._plan.config.cluster.min_engines - len(self._ready))

    def _judge_canary(self) -> None:
        """End the canary as soon as its verdict is certain; once it has passed, open the rest."""
        if self._canary != "running":
            return
        is_complete = not self._ledger.has_open_rows
        num_rows = self._canary_tally.num_rows if is_complete else self._canary_rows
        found = excesses(self._canary_tally, self._plan.config, num_rows=num_rows)
        if not found and not is_complete:
            return
        self._canary = "failed" if found else "passed"
        assert self._plan.canary is not None
        event = CanaryEvent(
            session_id=self._plan.session_id,
            verdict=self._canary,
            settings=self._plan.canary.settings,
            shares={excess.name: excess.found for excess in found},
            at_s=time(),
        )
        checkpoint.list_canary(self._folder, event)
        self.log(f"event=canary_{self._canary} rows={self._canary_tally.num_rows}")
        if not found:
            self._ledger.open_held()

    def _ask_back(self, hungry: str) -> None:
        """An idle worker takes over half of the rows that the fullest one has not started.

        A worker that was asked already is not asked again before it has answered.
        """
        spare = {
            worker_id: self._reports[worker_id].not_started
            for worker_id in self._with_spare_rows - self._asked_back.keys() - {hungry}
        }
        fullest = max(spare, key=lambda worker_id: spare[worker_id], default=None)
        if fullest is not None:
            self._asked_back[fullest] = math.ceil(spare[fullest] / 2)

    def _give_up(self, rows: list[int], cause: str) -> None:
        """List rows whose shard lost its worker too often."""
        if not rows:
            return
        self._judge_canary()
        frozen = frozen_prompts(self._folder, self._plan.frozen_name)
        assert frozen is not None
        for row in rows:
            number, sample_index = divmod(row, self._plan.config.samples_per_prompt)
            failed = FailedRow(
                row_id=frozen.prompt(number).row_id,
                sample_index=sample_index,
                cause=f"its engine or worker was lost too often, the last time by: {cause}",
                attempts=self._plan.config.work.max_shard_losses,
                failed_at_s=time(),
            )
            checkpoint.list_failed(self._folder, failed)

    def _progress(self, state: Literal["running", "done", "stopped", "failed"]) -> Progress:
        counts = self._ledger.counts()
        return Progress(
            session_id=self._plan.session_id,
            updated_at_s=time(),
            state=state,
            rows_total=counts.rows_total,
            rows_done=counts.rows_done,
            rows_failed=counts.rows_failed,
            rows_error=self._rows_error,
            completion_tokens=self._completion_tokens,
            last_publish_s=self._last_publish_s,
            leases_lost=counts.leases_lost,
            workers=tuple(self._reports.values()),
            engines_awaited=self._engines_awaited,
            canary=self._canary,
        )

    def _write_live(self, progress: Progress) -> None:
        self._folder.write_whole(LIVE_FILE, progress.to_json().encode())
        self._metrics.tell(progress, now_s=time())
        self._live_written_s = monotonic()


@dataclass(frozen=True, slots=True)
class RemoteBook:
    """The coordinator behind Ray, as the worker's LeaseBook."""

    coordinator: Any
    place: Place

    async def lease(self, worker_id: str) -> LeaseReply:
        return await self.coordinator.lease.remote(worker_id)  # type: ignore[no-any-return]

    async def publish(
        self, part: Part, rows: list[tuple[LeaseKey, int]]
    ) -> set[tuple[LeaseKey, int]]:
        return await self.coordinator.publish.remote(part, rows)  # type: ignore[no-any-return]

    async def set_aside(self, key: LeaseKey, row: int, failed: FailedRow) -> None:
        await self.coordinator.set_aside.remote(key, row, failed)

    async def give_back(self, key: LeaseKey, first_row: int) -> None:
        await self.coordinator.give_back.remote(key, first_row)

    async def release(self, worker_id: str) -> None:
        await self.coordinator.release.remote(worker_id)

    async def engine_lost(self, worker_id: str, cause: str) -> None:
        await self.coordinator.engine_lost.remote(worker_id, cause)

    async def heartbeat(self, report: WorkerReport) -> Orders:
        place = self.place
        placed = replace(report, node=place.node, node_id=place.node_id, gpus=place.gpus)
        return await self.coordinator.heartbeat.remote(placed)  # type: ignore[no-any-return]


class WorkerActor:
    """One worker and its engine in a process of their own."""

    def __init__(self, plan: SessionPlan, worker_number: int, worker_id: str, book: Any) -> None:  # noqa: ANN401 - Ray types no handle
        # Engines on this machine are never asked through a proxy.
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        folder = Folder(plan.root)
        frozen = frozen_prompts(folder, plan.frozen_name)
        assert frozen is not None
        self._worker = Worker(
            worker_id=worker_id,
            session_id=plan.session_id,
            run_id=plan.run_id,
            config=plan.config,
            engine=ServedEngine(
                config=plan.config,
                worker_number=worker_number,
                log_path=folder.path(f"{checkpoint.LOGS}/engine-{worker_number}.log"),
            ),
            book=RemoteBook(book, this_place()),
            folder=folder,
            frozen=frozen,
            carried_schema=schema_from_text(plan.carried_schema),
            log=lambda line: book.log.remote(line),
            language_of=(
                language_detector() if plan.config.quality.wrong_language.enabled else None
            ),
        )

    async def run(self) -> None:
        await self._worker.run()

    async def stop(self) -> None:
        self._worker.stop()


# -- the driver's side


@dataclass(slots=True)
class _Hired:
    number: int
    worker_id: str
    hold: Hold
    actor: Any
    running: Any


@dataclass(slots=True, kw_only=True)
class Cluster:
    """The run's actors, as the driver holds them."""

    plan: SessionPlan
    coordinator: Any
    hired: dict[int, _Hired] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    """Why engines were given up, one line each."""
    _crashes: dict[int, list[str | None]] = field(default_factory=dict)
    """The nodes on which each worker has died."""
    _node_ids: dict[str, str | None] = field(default_factory=dict)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _looked_at_nodes_s: float = -math.inf
    _num_let_go: int = 0
    _engines_awaited: int = 0
    _started_s: float = field(default_factory=monotonic)
    _told_waiting: bool = False

    def hire_all(self) -> None:
        """Hire whom the run file asks for, or by the cluster's places as they are at present.

        Ray starts each worker when there is a place for it; none waits for another.
        """
        num_workers = self.plan.config.engine.num_workers
        if num_workers is None:
            # At least `min_engines`, so that a cluster that grows on demand sees the demand.
            self._nodes = self._nodes or alive_nodes()
            places = num_places(self._nodes.values(), self.plan.config.engine)
            num_workers = max(self.plan.config.cluster.min_engines, places)
        while len(self.hired) + self._num_let_go < num_workers:
            number = len(self.hired) + self._num_let_go
            self._hire(number, hold(self.plan.config.engine))

    def poll(self) -> tuple[Progress, list[str]]:
        """Wait a moment, look after the workers, and tell how far the run is.

        Raises DriverLostError when the folder was taken over, CoordinatorLostError when the
        coordinator is gone, ConfigError when the folder cannot be written, and whatever a worker
        raised by a fault of ours.
        """
        events = self._look_after_workers()
        with _told_in_one_line():
            progress, lines = ray.get(self.coordinator.poll.remote())
        self._node_ids = {report.worker_id: report.node_id for report in progress.workers}
        self._engines_awaited = progress.engines_awaited
        return progress, [*lines, *events, *self._look_at_nodes(), *self._waiting(progress)]

    @property
    def is_deserted(self) -> bool:
        """Whether too few workers are left to go on, or to begin."""
        least = self.plan.config.cluster.min_engines if self._engines_awaited else 1
        return len(self.hired) < least

    def drain(self, timeout_s: float) -> None:
        """Have every worker flush and end its engine; wait no longer than `timeout_s`."""
        for hired in self.hired.values():
            hired.actor.stop.remote()
        running = [hired.running for hired in self.hired.values()]
        if running:
            ray.wait(running, num_returns=len(running), timeout=timeout_s)

    def close(self, state: Literal["done", "stopped", "failed"]) -> Progress | None:
        """Write the final word; None when the coordinator is gone."""
        try:
            return ray.get(self.coordinator.close.remote(state), timeout=10)  # type: ignore[no-any-return]
        except (RayActorError, GetTimeoutError):
            return None

    def _hire(self, number: int, place: Hold) -> None:
        again = len(self._crashes.get(number, ()))
        worker_id = f"w{number}" if not again else f"w{number}r{again}"
        actor: Any = (
            ray.remote(WorkerActor)
            .options(max_restarts=0, **place.actor_options())
            .remote(self.plan, number, worker_id, self.coordinator)
        )
        self.hired[number] = _Hired(number, worker_id, place, actor, actor.run.remote())

    def _look_at_nodes(self) -> list[str]:
        """Tell which nodes went and came, and hire for the places that came."""
        if monotonic() - self._looked_at_nodes_s < _LOOK_AT_NODES_S:
            return []
        self._looked_at_nodes_s = monotonic()
        before, self._nodes = self._nodes, alive_nodes()
        lost = [f"event=node_lost node={before[n].name!r}" for n in before.keys() - self._nodes]
        joined = [
            f"event=node_joined node={node.name!r} gpus={node.num_gpus:g}"
            for node_id, node in self._nodes.items()
            if node_id not in before
        ]
        if self.plan.config.engine.num_workers is None:
            self.hire_all()
        return [*lost, *joined]

    def _look_after_workers(self) -> list[str]:
        by_ref = {hired.running: hired for hired in self.hired.values()}
        ended, _ = ray.wait(list(by_ref), timeout=_POLL_S) if by_ref else ([], [])
        return [self._attend(by_ref[ref]) for ref in ended]

    def _attend(self, hired: _Hired) -> str:
        """One worker has ended: hear why, open its leases, and replace it if its process died."""
        del self.hired[hired.number]
        cause = None
        try:
            with _told_in_one_line(but=(EngineError, RayActorError)):
                ray.get(hired.running)
        except EngineError as error:
            cause = str(_as_raised(error))
            self.causes.append(cause)
        except RayActorError:
            cause = self._replaced(hired)
        if hired.number not in self.hired:
            hired.hold.let_go()
            self._num_let_go += 1
        with _told_in_one_line():
            ray.get(self.coordinator.worker_ended.remote(hired.worker_id, cause))
        return f"event=worker_ended worker={hired.worker_id} cause={cause or 'no work left'!r}"

    def _replaced(self, hired: _Hired) -> str:
        """Hire again for a worker whose process or node died, and tell which of them it was."""
        # One that Ray has merely lost sight of would keep its GPUs.
        ray.kill(hired.actor)
        crashes = self._crashes.setdefault(hired.number, [])
        crashes.append(self._node_ids.get(hired.worker_id))
        alive = alive_nodes()
        # A node may die any number of times over a long run, and take its workers along.
        own = [node_id for node_id in crashes if node_id is None or node_id in alive]
        if len(own) <= _MOST_WORKER_CRASHES:
            self._hire(hired.number, hired.hold)
        else:
            self.causes.append(f"worker {hired.number} died {len(own)} times")
        return "its process died" if crashes[-1] in own else "its node was lost"

    def _waiting(self, progress: Progress) -> Iterator[str]:
        """Tell once which workers Ray has found no place for."""
        if self._told_waiting or monotonic() - self._started_s < _WAITING_AFTER_S:
            return
        self._told_waiting = True
        known = {report.worker_id for report in progress.workers}
        waiting = [h.worker_id for h in self.hired.values() if h.worker_id not in known]
        if waiting:
            engine = self.plan.config.engine
            yield (
                f"event=waiting_for_resources workers={','.join(waiting)} each_needs="
                f"'{engine.cpus:g} CPU, {engine.gpus_per_worker} GPU' "
                f"free='{free_resources()}'"
            )


@contextlib.contextmanager
def open_cluster(plan: SessionPlan, row_states: bytes) -> Iterator[Cluster]:
    """Connect to Ray, or start one here, and put the coordinator up; all is ended on leaving."""
    _connect(plan.config)
    try:
        # Beside the driver, which it cannot outlive: no other node's loss ends the run.
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": on_this_node()}
        coordinator: Any = ray.remote(Coordinator).options(**options).remote(plan, row_states)
        cluster = Cluster(plan=plan, coordinator=coordinator)
        try:
            yield cluster
        finally:
            for hired in cluster.hired.values():
                ray.kill(hired.actor)
                hired.hold.let_go()
            ray.kill(coordinator)
    finally:
        ray.shutdown()


def _connect(config: RunFile) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    if address:
        _join(address)
        return
    engine = config.engine
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(engine.cpus * (engine.num_workers or 1))),
        include_dashboard=False,
        object_store_memory=_LOCAL_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _join(address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        hint = (
            ""
            if os.environ.get("RAY_AUTH_MODE")
            else "; a cluster with tokens needs RAY_AUTH_MODE=token"
        )
        raise ConfigError(
            f"cluster.address: cannot join the Ray cluster at {address}: {error}{hint}"
        ) from None


@contextlib.contextmanager
def _told_in_one_line(but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Errors of the run that are no fault of ours, as they were raised on the other side.

    A coordinator that is gone because it found the folder taken over says so only here.
    """
    try:
        yield
    except but:
        raise
    except PipelineError as error:
        raise _as_raised(error) from None
    except OSError as error:
        raise ConfigError(f"output.folder: cannot be written: {_as_raised(error)}") from None
    except RayActorError:
        raise CoordinatorLostError(
            "the coordinator's process died; what was published stands, and the same command "
            "resumes"
        ) from None


def _as_raised(error: Exception) -> Exception:
    """Ray's copy of an error shows a traceback in its text; the original is its cause."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error
