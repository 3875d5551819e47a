"""Worker and coordinator as Ray actors, and the coordinator behind Ray as a lease book."""

import asyncio
import gc
import logging
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.chat_template.turns import fitted_prompt
from pipeline.dataset.frozen import FrozenPrompts, frozen_prompts, schema_from_text
from pipeline.dataset.journal import Journals, JournalWriter
from pipeline.dataset.partials import Partials
from pipeline.engines.metered import MeteredEngine
from pipeline.engines.served import ServedEngine
from pipeline.errors import PipelineError
from pipeline.quality.languages import language_detector
from pipeline.run.coordinator import Coordinator
from pipeline.run.placement import Place, this_place
from pipeline.run.start_check import bypass_proxy
from pipeline.run_file import with_row_budgets
from pipeline.store.arrow import spare_pandas
from pipeline.store.bucket import WORKING_PATIENCE_S, open_folder
from pipeline.store.own_folder import keep_private
from pipeline.store.run_folder import LOGS
from pipeline.worker.worker import Worker
from schemas.manifest import FailedRow, Part
from schemas.plan import EngineTrial
from schemas.progress import LeaseReply, Orders, WorkerReport
from schemas.session import SessionPlan
from schemas.shard import LeaseKey

_COPY_LOG_INTERVAL_S = 60.0
# measured: with Python's own 700, a fifth of a worker's CPU time goes to the collector, which looks
# at all that was imported; few objects of a worker are part of a circle
_ALLOCATIONS_PER_COLLECTION = 50_000


@dataclass(frozen=True, slots=True)
class RemoteBook:
    """The coordinator behind Ray, as a worker's LeaseBook."""

    coordinator: Any
    place: Place
    engine: MeteredEngine
    _sent: list[EngineTrial] = field(default_factory=list)
    """Last report of the engine's plans."""

    async def lease(self, worker_id: str) -> LeaseReply:
        return await self.coordinator.lease.remote(worker_id)  # type: ignore[no-any-return]

    async def publish(
        self, part: Part, rows: list[tuple[LeaseKey, int]]
    ) -> set[tuple[LeaseKey, int]]:
        # Before the part: the run ends when its last rows are published.
        if (span := await self.engine.idle_span()) is not None:
            await self.coordinator.note_span.remote(part.worker_id, span)
        return await self.coordinator.publish.remote(part, rows)  # type: ignore[no-any-return]

    async def set_aside(self, key: LeaseKey, row: int, failed: FailedRow) -> None:
        await self.coordinator.set_aside.remote(key, row, failed)

    async def give_back(self, key: LeaseKey, first_row: int) -> None:
        await self.coordinator.give_back.remote(key, first_row)

    async def release(self, worker_id: str) -> None:
        await self.coordinator.release.remote(worker_id)

    async def hand_over(self, worker_id: str) -> None:
        # What the former launch was last seen to do.
        await self.note_last_span(worker_id)
        await self.coordinator.hand_over.remote(worker_id)

    async def engine_died(self, rows: list[tuple[LeaseKey, int]]) -> None:
        await self.coordinator.engine_died.remote(rows)

    async def engine_lost(self, worker_id: str, cause: str) -> None:
        await self.coordinator.engine_lost.remote(worker_id, cause)

    async def note_last_span(self, worker_id: str) -> None:
        """Send the engine's readings since the last heartbeat that had any."""
        if (last := self.engine.last_span()) is not None:
            await self.coordinator.note_span.remote(worker_id, *last)

    async def heartbeat(self, report: WorkerReport) -> Orders:
        if (trial := self.engine.trial) is not None and [trial] != self._sent:
            await self.coordinator.note_trial.remote(report.worker_id, trial)
            self._sent[:] = [trial]
        if (span := self.engine.take_span()) is not None:
            await self.coordinator.note_span.remote(report.worker_id, span)
        place = self.place
        placed = replace(report, node=place.node, node_id=place.node_id, gpus=place.gpus)
        return await self.coordinator.heartbeat.remote(placed)  # type: ignore[no-any-return]


class WorkerActor:
    """A process of one worker with its engine, or of several workers of endpoints."""

    def __init__(self, plan: SessionPlan, book: Any) -> None:  # noqa: ANN401 - Ray types no handle
        spare_pandas()
        bypass_proxy()
        if plan.config.output.mode == "private":
            keep_private()
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._plan, self._coordinator = plan, book
        self._folder = open_folder(plan.root, patience_s=WORKING_PATIENCE_S)
        self._journals = JournalWriter(
            journals=Journals(folder=self._folder, run_id=plan.run_id),
            own_schema=schema_from_text(plan.own_schema),
            carried_schema=schema_from_text(plan.carried_schema),
        )
        is_checked = plan.config.quality.wrong_language.enabled
        self._language_of = language_detector() if is_checked else None
        self._workers: dict[str, Worker] = {}
        self._log_names: dict[str, str] = {}
        _spare_collections()

    async def run(self, worker_number: int, worker_id: str) -> None:
        """Run a worker to its end."""
        log_name = self._log_names[worker_id] = f"{LOGS}/engine-{worker_number}.log"
        frozen = self._frozen_prompts()
        engine = self._engine(worker_number, worker_id, frozen, log_name)
        book = RemoteBook(self._coordinator, this_place(), engine)
        worker = self._workers[worker_id] = self._worker(worker_id, engine, book, frozen)
        copying = asyncio.create_task(self._copy_log_forever(log_name))
        try:
            await worker.run()
        finally:
            copying.cancel()
            await book.note_last_span(worker_id)
            await self._copy_log(log_name)

    async def stop(self, worker_id: str) -> None:
        """Have a worker drain."""
        if worker_id not in self._workers:
            # Its call of `run` comes first: it has ended, or its process is a new one.
            return
        self._workers[worker_id].stop()
        # At once: the engine may need longer to end than the driver waits.
        await self._copy_log(self._log_names[worker_id])

    def _frozen_prompts(self) -> FrozenPrompts:
        """Open the prompts for one worker: what it has read of them last stays in memory."""
        frozen = frozen_prompts(self._folder, self._plan.frozen_name)
        assert frozen is not None
        return frozen

    def _engine(
        self, worker_number: int, worker_id: str, frozen: FrozenPrompts, log_name: str
    ) -> MeteredEngine:
        return MeteredEngine(
            served=ServedEngine(
                config=with_row_budgets(self._plan.config, frozen.budgets),
                template=self._plan.template,
                longest_prompts=frozen.longest,
                accepted_breaches=self._plan.accepted_breaches,
                worker_number=worker_number,
                log_path=self._folder.local_file(log_name),
                log=lambda line: self._log(f"{line} worker={worker_id}"),
            )
        )

    def _worker(
        self, worker_id: str, engine: MeteredEngine, book: RemoteBook, frozen: FrozenPrompts
    ) -> Worker:
        plan = self._plan
        return Worker(
            worker_id=worker_id,
            session_id=plan.session_id,
            config=plan.config,
            engine=engine,
            book=book,
            prompt_of=lambda number: fitted_prompt(
                frozen.prompt(number), plan.config, plan.template
            ),
            writer=self._journals,
            log=self._log,
            partials=Partials(
                folder=self._folder, run_id=plan.run_id, settings=plan.rows_depend_on
            ),
            language_of=self._language_of,
        )

    def _log(self, line: str) -> None:
        self._coordinator.log.remote(line)

    async def _copy_log_forever(self, log_name: str) -> None:
        while True:
            await asyncio.sleep(_COPY_LOG_INTERVAL_S)
            await self._copy_log(log_name)

    async def _copy_log(self, log_name: str) -> None:
        """Copy the engine's log into a folder that is not on this machine."""
        try:
            await asyncio.to_thread(self._folder.keep_local, log_name)
        except (PipelineError, OSError) as error:
            # No row depends on it; if the folder is gone, the next publication fails.
            self._log(f"event=warning {log_name} cannot be copied: {error}")


def _spare_collections() -> None:
    """Have the garbage collector look at new objects alone, and rarely."""
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)


class CoordinatorActor(Coordinator):
    """The coordinator in a process of its own."""

    def __init__(self, plan: SessionPlan, row_states: bytes) -> None:
        spare_pandas()
        if plan.config.output.mode == "private":
            keep_private()
        super().__init__(plan, row_states)
