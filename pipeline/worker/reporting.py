"""The worker's heartbeat: the state of its parts at one moment."""

from collections import Counter
from dataclasses import dataclass
from time import monotonic

from pipeline.worker.background import Background
from pipeline.worker.backlog import Backlog, InFlight
from pipeline.worker.engine_watch import EngineWatch
from pipeline.worker.generation import Generator
from pipeline.worker.ports import Engine
from pipeline.worker.publishing import Publisher
from pipeline.worker.retries import Attempts
from schemas.progress import Supply, WorkerReport, WorkerState


@dataclass(frozen=True, slots=True)
class Reporter:
    """Reports on the parts of one worker."""

    worker_id: str
    engine: Engine
    backlog: Backlog
    in_flight: InFlight
    generator: Generator
    publisher: Publisher
    engine_watch: EngineWatch

    def report(self, state: WorkerState) -> WorkerReport:
        window = self.publisher.window
        return WorkerReport(
            worker_id=self.worker_id,
            state=state,
            engine=self.engine.name,
            engine_release=self.engine.release,
            in_flight=len(self.in_flight),
            not_started=self.backlog.num_not_started,
            backing_off=self.backlog.num_delayed,
            unflushed=self.publisher.num_unflushed,
            requests=self.generator.num_requests,
            interruptions=self.generator.num_interruptions,
            timeouts=self.generator.num_timeouts,
            refusals=self.generator.num_refusals,
            restarts=self.engine_watch.num_restarts,
            completion_tokens=self.generator.completion_tokens,
            last_cause=self.engine_watch.last_cause,
            window_rows=len(window),
            window_flags=dict(Counter(flag for flags in window for flag in flags)),
            plan=self.engine.plan,
            max_running_requests=self.engine.max_running_requests,
            starved=self.engine.starved,
        )

    def supply(self, attempts: Attempts, leasing: Background) -> Supply:
        """Return what the worker has for its engine."""
        return Supply(
            in_flight=len(self.in_flight),
            waiting=self.backlog.num_waiting,
            backing_off=self.backlog.num_delayed,
            held_s=max(0.0, attempts.held_until_s - monotonic()),
            is_alone=self.backlog.has_suspects(self.in_flight),
            is_leasing=leasing.is_running,
        )
