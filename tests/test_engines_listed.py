"""What the coordinator keeps of engines: what ran, and which rows were in flight at a death."""

from pathlib import Path

import pytest
from desk import frozen, prompts_of

from pipeline import checkpoint, driver_lock
from pipeline.coordinator import Coordinator
from pipeline.storage import LocalFolder as Folder
from schemas.config import RunFile
from schemas.progress import WorkerReport, WorkerState
from schemas.session import SessionPlan


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    folder = Folder(tmp_path)
    for name in ("data", "staging", "logs"):
        folder.make(name)
    prompts = frozen(folder, prompts_of(8))
    config = RunFile.model_validate(
        {"prompts": {"path": "x"}, "model": "m", "output": {"folder": str(tmp_path)}}
    )
    plan = SessionPlan(
        root=str(tmp_path),
        config=config,
        run_id="r",
        session_id="s",
        token=driver_lock.this_process().token,
        frozen_name=prompts.name,
        carried_schema=prompts.carried_schema,
        rows_error=0,
    )
    return Coordinator(plan, bytes(8))


def report(state: WorkerState, *, restarts: int = 0, plan: str | None = "--a 1") -> WorkerReport:
    return WorkerReport(
        worker_id="w0",
        state=state,
        engine="sglang",
        engine_release="sglang 0.5.23",
        in_flight=0,
        not_started=0,
        backing_off=0,
        unflushed=0,
        requests=0,
        interruptions=0,
        restarts=restarts,
        completion_tokens=0,
        last_cause=None,
        plan=plan,
        max_running_requests=31,
    )


def test_each_start_that_came_up_is_listed_once_with_what_runs(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    coordinator.heartbeat(report("starting", plan=None))
    for _ in range(3):
        coordinator.heartbeat(report("running"))
    coordinator.heartbeat(report("restarting", restarts=1))
    coordinator.heartbeat(report("idle", restarts=1, plan="--a 2"))
    ran = checkpoint.read_manifest(Folder(tmp_path)).engines
    assert [(one.plan, one.max_running_requests) for one in ran] == [("--a 1", 31), ("--a 2", 31)]
    assert ran[0].release == "sglang 0.5.23"


def test_rows_in_flight_at_a_death_are_told_to_who_leases_them_next(
    coordinator: Coordinator,
) -> None:
    lease = coordinator.lease("w0").lease
    assert lease is not None
    coordinator.engine_died([(lease.key, 3)])
    coordinator.engine_lost("w0", "connection: reset")
    again = coordinator.lease("w1").lease
    assert again is not None
    assert again.deaths == ((3, 1),)
