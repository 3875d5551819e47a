"""The run's actors as the driver holds them: it hires workers, replaces and drains them.

Invariant: a worker whose process or node died is started again where there is a place. The
coordinator stays on the driver's node and ends with it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from pipeline.errors import (
    ConfigError,
    EngineError,
    EngineUnfitError,
    PipelineError,
    RayLostError,
)
from pipeline.live.log import LiveLog
from pipeline.run.actors import CoordinatorActor, WorkerActor
from pipeline.run.connection.connect import cluster_address, connect
from pipeline.run.connection.head_watch import watch_ray
from pipeline.run.placement import (
    Hold,
    Node,
    alive_nodes,
    draining_nodes,
    free_resources,
    hold,
    node_changes,
    num_places,
    on_this_node,
    workers_per_process,
)
from schemas.estimate import Band
from schemas.progress import Progress
from schemas.session import SessionPlan

_POLL_S = 0.5
_MOST_WORKER_CRASHES = 5
_WAITING_AFTER_S = 30.0
_LOOK_AT_NODES_S = 5.0
_COORDINATOR_WAITS_S = 10.0
_READINGS_WAIT_S = 5.0
_LAST_LINES_WAIT_S = 0.5


@dataclass(slots=True)
class _Hired:
    number: int
    worker_id: str
    hold: Hold
    actor: Any
    running: Any
    is_leaving: bool = False
    """Stopped because its node will be taken away."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Coordinator and workers of one session."""

    plan: SessionPlan
    coordinator: Any
    workers_per_process: int = 1
    hired: dict[int, _Hired] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    """Reasons why engines were abandoned, one line each."""
    num_unfit: int = 0
    """Engines that were abandoned because they do not answer as requested."""
    progress: Progress | None = None
    """The coordinator's last answer."""
    dashboard: str | None = None
    """Address of Ray's dashboard; None for a Ray of the run's own, which has none."""
    _processes: dict[int, Any] = field(default_factory=dict)
    """Actors that take the next workers, by the number of the first of their workers."""
    _hires: dict[int, int] = field(default_factory=dict)
    _crashes: dict[int, list[str | None]] = field(default_factory=dict)
    """Nodes on which each worker has died."""
    _node_ids: dict[str, str | None] = field(default_factory=dict)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _looked_at_nodes_s: float = -math.inf
    _num_released: int = 0
    _engines_awaited: int = 0
    _started_s: float = field(default_factory=monotonic)
    _has_reported_waiting: bool = False
    _pending_poll: Any = None
    """The poll that the coordinator has not answered yet."""
    _has_reported_silence: bool = False

    def hire_all(self) -> None:
        """Hire the workers of the run file, or as many as the cluster has places for.

        Ray starts each worker when there is a place for it; none waits for another.
        """
        num_workers = self.plan.config.engine.num_workers
        if num_workers is None:
            # At least `min_engines`, so that a cluster that grows on demand sees the demand.
            self._nodes = self._nodes or alive_nodes()
            places = num_places(self._nodes.values(), self.plan.config.engine)
            num_workers = max(self.plan.config.cluster.min_engines, places)
        while len(self.hired) + self._num_released < num_workers:
            number = len(self.hired) + self._num_released
            self._hire(number, hold(self.plan.config.engine))

    def poll(self, days_left: Band | None) -> tuple[Progress, list[str]]:
        """Wait a moment, replace workers that died, and return the progress and log lines.

        Raises DriverLostError when the folder was taken over, RayLostError when the
        coordinator is gone, ConfigError when the folder cannot be written, and any error that is a
        bug in a worker.
        """
        events = self._replace_ended()
        self._pending_poll = self._pending_poll or self.coordinator.poll.remote(days_left)
        try:
            with _as_raised_there(but=(GetTimeoutError,)):
                # The first answer comes when the coordinator has read the rows.
                waits_s = _COORDINATOR_WAITS_S if self.progress else None
                progress, lines = ray.get(self._pending_poll, timeout=waits_s)
        except GetTimeoutError:
            assert self.progress is not None
            return self.progress, [*events, *self._silence()]
        self._pending_poll, self.progress, self._has_reported_silence = None, progress, False
        self._node_ids = {report.worker_id: report.node_id for report in progress.workers}
        self._engines_awaited = progress.engines_awaited
        events += [*self._look_at_nodes(), *self._clear_draining_nodes()]
        return progress, [*lines, *events, *self._waiting(progress)]

    def newer_log(self, num_seen: int) -> LiveLog | None:
        """Return the run's readings if there are more than `num_seen`; may run in any thread."""
        try:
            return ray.get(  # type: ignore[no-any-return]
                self.coordinator.newer_log.remote(num_seen), timeout=_READINGS_WAIT_S
            )
        except RayError:
            # The coordinator waits for its folder, or the session ends: `poll` reports either.
            return None

    def _silence(self) -> list[str]:
        """Report once that the coordinator does not answer: it waits for its folder."""
        if self._has_reported_silence:
            return []
        self._has_reported_silence = True
        return ["event=waiting_for_folder the coordinator waits for output.folder to answer"]

    @property
    def is_deserted(self) -> bool:
        """Return whether too few workers are left to continue, or to begin."""
        least = self.plan.config.cluster.min_engines if self._engines_awaited else 1
        return len(self.hired) < least

    @property
    def are_unfit(self) -> bool:
        """Return whether all engines were abandoned because they do not answer as requested."""
        return not self.hired and 0 < len(self.causes) == self.num_unfit

    def drain(self, timeout_s: float) -> list[str]:
        """Have every worker flush and end its engine; wait at most `timeout_s`.

        Returns the log lines since the last poll.
        """
        for hired in self.hired.values():
            hired.actor.stop.remote(hired.worker_id)
        running = [hired.running for hired in self.hired.values()]
        if running:
            ray.wait(running, num_returns=len(running), timeout=timeout_s)
        try:
            return ray.get(self.coordinator.take_lines.remote(), timeout=_LAST_LINES_WAIT_S)  # type: ignore[no-any-return]
        except (RayActorError, GetTimeoutError):
            return []

    def close(self, state: Literal["done", "stopped", "failed"]) -> Progress | None:
        """Have the coordinator write the final state. Return None when it does not answer."""
        try:
            return ray.get(self.coordinator.close.remote(state), timeout=10)  # type: ignore[no-any-return]
        except (RayActorError, GetTimeoutError):
            return None

    def _hire(self, number: int, place: Hold) -> None:
        # Each process has its own id, under which it leases and publishes.
        rehires = self._hires[number] = self._hires.get(number, -1) + 1
        worker_id = f"w{number}" if not rehires else f"w{number}r{rehires}"
        actor = self._process_of(number, place)
        running = actor.run.remote(number, worker_id)
        self.hired[number] = _Hired(number, worker_id, place, actor, running)

    def _process_of(self, number: int, place: Hold) -> Any:  # noqa: ANN401 - Ray types no handle
        """Return the actor for a worker, a new one where there is none."""
        if self.workers_per_process == 1:
            return self._new_process(place, 1)
        first = number - number % self.workers_per_process
        num_workers = min(
            self.workers_per_process, (self.plan.config.engine.num_workers or 1) - first
        )
        if first not in self._processes:
            self._processes[first] = self._new_process(place, num_workers)
        return self._processes[first]

    def _new_process(self, place: Hold, num_workers: int) -> Any:  # noqa: ANN401 - Ray types no handle
        return (
            ray.remote(WorkerActor)
            .options(max_restarts=0, **place.actor_options(num_workers))
            .remote(self.plan, self.coordinator)
        )

    def _leave(self, actor: Any) -> None:  # noqa: ANN401 - Ray types no handle
        """Send no more workers to an actor, whose process or node is gone or will be."""
        self._processes = {n: one for n, one in self._processes.items() if one is not actor}

    def _look_at_nodes(self) -> list[str]:
        """Report nodes that were lost or joined, and hire for new places."""
        if monotonic() - self._looked_at_nodes_s < _LOOK_AT_NODES_S:
            return []
        self._looked_at_nodes_s = monotonic()
        before, self._nodes = self._nodes, alive_nodes()
        if self.plan.config.engine.num_workers is None:
            self.hire_all()
        return node_changes(before, self._nodes)

    def _clear_draining_nodes(self) -> list[str]:
        """Stop the workers of nodes that are about to be taken away."""
        draining = draining_nodes()
        leaving = [
            hired
            for hired in self.hired.values()
            if self._node_ids.get(hired.worker_id) in draining and not hired.is_leaving
        ]
        for hired in leaving:
            hired.is_leaving = True
            self._leave(hired.actor)
            hired.actor.stop.remote(hired.worker_id)
        return [f"event=node_leaving worker={hired.worker_id}" for hired in leaving]

    def _replace_ended(self) -> list[str]:
        by_ref = {hired.running: hired for hired in self.hired.values()}
        ended, _ = ray.wait(list(by_ref), timeout=_POLL_S) if by_ref else ([], [])
        return [self._attend(by_ref[ref]) for ref in ended]

    def _attend(self, hired: _Hired) -> str:
        """Handle the end of a worker: open its leases, and replace it if its process died."""
        del self.hired[hired.number]
        cause = None
        try:
            with _as_raised_there(but=(EngineError, RayActorError)):
                ray.get(hired.running)
        except EngineError as error:
            cause = str(_original(error))
            self.causes.append(cause)
            self.num_unfit += isinstance(error, EngineUnfitError)
        except RayActorError:
            cause = self._replaced(hired)
        if hired.number not in self.hired:
            hired.hold.release()
            if hired.is_leaving and cause is None:
                self._hire(hired.number, hold(self.plan.config.engine))
            else:
                self._num_released += 1
        with _as_raised_there():
            ray.get(self.coordinator.worker_ended.remote(hired.worker_id, cause))
        reason = cause or ("its node leaves" if hired.is_leaving else "no work left")
        return f"event=worker_ended worker={hired.worker_id} cause={reason!r}"

    def _replaced(self, hired: _Hired) -> str:
        """Hire again for a worker that died. Return whether its process or its node did."""
        # A worker that is alive but unreachable would keep its GPUs.
        ray.kill(hired.actor)
        self._leave(hired.actor)
        crashes = self._crashes.setdefault(hired.number, [])
        crashes.append(self._node_ids.get(hired.worker_id))
        alive = alive_nodes()
        # Nodes may die any number of times in a long run; only crashes of the process count.
        own = [node_id for node_id in crashes if node_id is None or node_id in alive]
        if len(own) <= _MOST_WORKER_CRASHES:
            self._hire(hired.number, hired.hold)
        else:
            self.causes.append(f"worker {hired.number} died {len(own)} times")
        return "its process died" if crashes[-1] in own else "its node was lost"

    def _waiting(self, progress: Progress) -> Iterator[str]:
        """Report once which workers Ray has found no place for."""
        if self._has_reported_waiting or monotonic() - self._started_s < _WAITING_AFTER_S:
            return
        self._has_reported_waiting = True
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
def open_cluster(
    plan: SessionPlan, row_states: bytes, log: Callable[[str], None]
) -> Iterator[Cluster]:
    """Connect to Ray, or start one here, and start the coordinator. All ends with the block."""
    dashboard = connect(plan.config, log)
    is_over = watch_ray()
    try:
        # On the driver's node, whose loss ends the run anyway.
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": on_this_node()}
        coordinator: Any = ray.remote(CoordinatorActor).options(**options).remote(plan, row_states)
        cluster = Cluster(
            plan=plan,
            coordinator=coordinator,
            dashboard=dashboard,
            workers_per_process=workers_per_process(
                plan.config.engine, is_private=cluster_address(plan.config) is None
            ),
        )
        try:
            yield cluster
        finally:
            for hired in cluster.hired.values():
                ray.kill(hired.actor)
                hired.hold.release()
            ray.kill(coordinator)
    finally:
        ray.shutdown()
        is_over.set()


@contextlib.contextmanager
def _as_raised_there(but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise the errors of an actor as it raised them, without Ray's traceback in their text.

    That the folder was taken over is known only from the coordinator's error.
    """
    try:
        yield
    except but:
        raise
    except PipelineError as error:
        raise _original(error) from None
    except OSError as error:
        raise ConfigError(f"output.folder: cannot be written: {_original(error)}") from None
    except RayActorError:
        raise RayLostError(
            "the coordinator's process died; published rows are kept, and the same command resumes"
        ) from None


def _original(error: Exception) -> Exception:
    """Return the original of an error, which Ray keeps as the cause of its copy."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error
