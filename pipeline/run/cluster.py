"""The coordinator and the workers as Ray actors, and the driver's hold on them. The door to Ray.

Invariant: a worker whose process died, or whose node did, is started again where there is a place;
the coordinator stays on the driver's node and ends with it.
"""

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from pipeline.dataset.frozen import frozen_prompts, schema_from_text
from pipeline.dataset.parts import stage_part
from pipeline.engines.metered import MeteredEngine
from pipeline.engines.served import ServedEngine
from pipeline.errors import ConfigError, CoordinatorLostError, EngineError, PipelineError
from pipeline.quality.languages import language_detector
from pipeline.run.coordinator import Coordinator
from pipeline.run.placement import (
    Hold,
    Node,
    Place,
    alive_nodes,
    draining_nodes,
    free_resources,
    hold,
    node_changes,
    num_places,
    on_this_node,
    this_place,
)
from pipeline.store.bucket import WORKING_PATIENCE_S, open_folder
from pipeline.store.run_folder import LOGS
from pipeline.worker.worker import Worker
from schemas.config import RunFile
from schemas.estimate import Band
from schemas.manifest import FailedRow, Part
from schemas.progress import LeaseReply, Orders, Progress, WorkerReport
from schemas.session import SessionPlan
from schemas.shard import LeaseKey

_POLL_S = 0.5
_MOST_WORKER_CRASHES = 5
_WAITING_AFTER_S = 30.0
_LOOK_AT_NODES_S = 5.0
_KEEP_LOG_S = 60.0
_COORDINATOR_WAITS_S = 10.0
_LOCAL_OBJECT_STORE_BYTES = 128 * 2**20
# Leases and reports are all that Ray carries; its default takes a third of the memory.


@dataclass(frozen=True, slots=True)
class RemoteBook:
    """The coordinator behind Ray, as the worker's LeaseBook."""

    coordinator: Any
    place: Place
    engine: MeteredEngine

    async def lease(self, worker_id: str) -> LeaseReply:
        return await self.coordinator.lease.remote(worker_id)  # type: ignore[no-any-return]

    async def publish(
        self, part: Part, rows: list[tuple[LeaseKey, int]]
    ) -> set[tuple[LeaseKey, int]]:
        # First: with the last rows the run ends, and nobody is asked any more.
        if (span := await self.engine.idle_span()) is not None:
            await self.coordinator.note_span.remote(part.worker_id, span)
        return await self.coordinator.publish.remote(part, rows)  # type: ignore[no-any-return]

    async def set_aside(self, key: LeaseKey, row: int, failed: FailedRow) -> None:
        await self.coordinator.set_aside.remote(key, row, failed)

    async def give_back(self, key: LeaseKey, first_row: int) -> None:
        await self.coordinator.give_back.remote(key, first_row)

    async def release(self, worker_id: str) -> None:
        await self.coordinator.release.remote(worker_id)

    async def engine_died(self, rows: list[tuple[LeaseKey, int]]) -> None:
        await self.coordinator.engine_died.remote(rows)

    async def engine_lost(self, worker_id: str, cause: str) -> None:
        await self.coordinator.engine_lost.remote(worker_id, cause)

    async def tell_last_span(self, worker_id: str) -> None:
        """What the engine did between the last heartbeat that told and its end."""
        if (last := self.engine.last_span()) is not None:
            await self.coordinator.note_span.remote(worker_id, *last)

    async def heartbeat(self, report: WorkerReport) -> Orders:
        if (span := self.engine.take_span()) is not None:
            await self.coordinator.note_span.remote(report.worker_id, span)
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
        self._folder = folder = open_folder(plan.root, patience_s=WORKING_PATIENCE_S)
        self._log_name = f"{LOGS}/engine-{worker_number}.log"
        self._log: Callable[[str], object] = book.log.remote
        frozen = frozen_prompts(folder, plan.frozen_name)
        assert frozen is not None
        engine = MeteredEngine(
            served=ServedEngine(
                config=plan.config,
                longest_prompts=frozen.longest,
                worker_number=worker_number,
                log_path=folder.local_file(self._log_name),
                log=lambda line: book.log.remote(f"{line} worker={worker_id}"),
            )
        )
        self._book = RemoteBook(book, this_place(), engine)
        self._worker = Worker(
            worker_id=worker_id,
            session_id=plan.session_id,
            config=plan.config,
            engine=engine,
            book=self._book,
            prompt_of=frozen.prompt,
            stage=partial(
                stage_part,
                folder,
                run_id=plan.run_id,
                carried_schema=schema_from_text(plan.carried_schema),
                worker_id=worker_id,
            ),
            log=lambda line: book.log.remote(line),
            language_of=(
                language_detector() if plan.config.quality.wrong_language.enabled else None
            ),
        )

    async def run(self) -> None:
        keeping = asyncio.create_task(self._keep_log_forever())
        try:
            await self._worker.run()
        finally:
            keeping.cancel()
            await self._book.tell_last_span(self._worker.worker_id)
            await self._keep_log()

    async def _keep_log_forever(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_LOG_S)
            await self._keep_log()

    async def _keep_log(self) -> None:
        """Bring the engine's log into a folder that is not on this machine."""
        try:
            await asyncio.to_thread(self._folder.keep_local, self._log_name)
        except (PipelineError, OSError) as error:
            # Rows do not hang on it, and publications will tell if the folder is gone.
            self._log(f"event=warning {self._log_name} cannot be kept: {error}")

    async def stop(self) -> None:
        self._worker.stop()
        # At once: the engine may take longer to end than the driver waits.
        await self._keep_log()


# -- the driver's side


@dataclass(slots=True)
class _Hired:
    number: int
    worker_id: str
    hold: Hold
    actor: Any
    running: Any
    is_leaving: bool = False
    """Told to end, because its node will."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """The run's actors, as the driver holds them."""

    plan: SessionPlan
    coordinator: Any
    hired: dict[int, _Hired] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    """Why engines were given up, one line each."""
    progress: Progress | None = None
    """What the coordinator said last."""
    _hires: dict[int, int] = field(default_factory=dict)
    _crashes: dict[int, list[str | None]] = field(default_factory=dict)
    """The nodes on which each worker has died."""
    _node_ids: dict[str, str | None] = field(default_factory=dict)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _looked_at_nodes_s: float = -math.inf
    _num_let_go: int = 0
    _engines_awaited: int = 0
    _started_s: float = field(default_factory=monotonic)
    _told_waiting: bool = False
    _asked: Any = None
    """The question to the coordinator that it has not answered yet."""
    _told_silent: bool = False

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

    def poll(self, days_left: Band | None) -> tuple[Progress, list[str]]:
        """Wait a moment, look after the workers, and tell how far the run is.

        Raises DriverLostError when the folder was taken over, CoordinatorLostError when the
        coordinator is gone, ConfigError when the folder cannot be written, and whatever a worker
        raised by a fault of ours.
        """
        events = self._look_after_workers()
        self._asked = self._asked or self.coordinator.poll.remote(days_left)
        try:
            with _told_in_one_line(but=(GetTimeoutError,)):
                # The first answer takes as long as many rows take to read.
                waits_s = _COORDINATOR_WAITS_S if self.progress else None
                progress, lines = ray.get(self._asked, timeout=waits_s)
        except GetTimeoutError:
            assert self.progress is not None
            return self.progress, [*events, *self._silence()]
        self._asked, self.progress, self._told_silent = None, progress, False
        self._node_ids = {report.worker_id: report.node_id for report in progress.workers}
        self._engines_awaited = progress.engines_awaited
        events += [*self._look_at_nodes(), *self._clear_draining_nodes()]
        return progress, [*lines, *events, *self._waiting(progress)]

    def _silence(self) -> list[str]:
        """Told once: what keeps the coordinator from answering is its folder."""
        if self._told_silent:
            return []
        self._told_silent = True
        return ["event=waiting_for_folder the coordinator waits for output.folder to answer"]

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
        # A name of its own for each: parts and leases bear it.
        again = self._hires[number] = self._hires.get(number, -1) + 1
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
        if self.plan.config.engine.num_workers is None:
            self.hire_all()
        return node_changes(before, self._nodes)

    def _clear_draining_nodes(self) -> list[str]:
        """Have workers flush and end while their node is about to be taken away."""
        draining = draining_nodes()
        leaving = [
            hired
            for hired in self.hired.values()
            if self._node_ids.get(hired.worker_id) in draining and not hired.is_leaving
        ]
        for hired in leaving:
            hired.is_leaving = True
            hired.actor.stop.remote()
        return [f"event=node_leaving worker={hired.worker_id}" for hired in leaving]

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
            if hired.is_leaving and cause is None:
                self._hire(hired.number, hold(self.plan.config.engine))
            else:
                self._num_let_go += 1
        with _told_in_one_line():
            ray.get(self.coordinator.worker_ended.remote(hired.worker_id, cause))
        told = cause or ("its node leaves" if hired.is_leaving else "no work left")
        return f"event=worker_ended worker={hired.worker_id} cause={told!r}"

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
