"""Records of engines: which came up, and which rows were in flight at a death."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.dataset.run_record import read_manifest
from pipeline.live.log import read_live_log
from pipeline.run.coordinator import Coordinator
from pipeline.store import lock
from pipeline.store.folder import LocalFolder
from pipeline.store.journal import read_deaths
from pipeline.store.run_folder import DEATHS_FILE
from schemas.chat_template import TemplateFacts
from schemas.config.run_file import RunFile
from schemas.progress import LiveSpan, WorkerReport, WorkerState
from schemas.prompt import Prompt
from schemas.session import SessionPlan
from tests.fakes.desk import frozen, prompts_of
from tests.fakes.example_report import worker_report

SAMPLES, ROWS = 2, 8


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    """Builds the coordinator of a session in this folder."""
    return new_session(LocalFolder(tmp_path), prompts_of(ROWS // SAMPLES))


def new_session(folder: LocalFolder, prompts: list[Prompt]) -> Coordinator:
    for name in ("data", "staging", "logs"):
        folder.make(name)
    the_frozen = frozen(folder, prompts)
    config = RunFile.model_validate(
        {
            "prompts": {"path": "x"},
            "model": "m",
            "output": {"folder": str(folder.root)},
            "samples_per_prompt": SAMPLES,
        }
    )
    plan = SessionPlan(
        root=folder.where,
        config=config,
        run_id="r",
        session_id="s",
        token=lock.this_process().token,
        frozen_name=the_frozen.name,
        carried_schema=the_frozen.carried_schema,
        own_schema="",
        rows_error=0,
        template=TemplateFacts(source="test"),
    )
    return Coordinator(plan, bytes(len(prompts) * SAMPLES))


def report(state: WorkerState, *, restarts: int = 0, plan: str | None = "--a 1") -> WorkerReport:
    return worker_report(
        state=state,
        engine="sglang",
        engine_release="sglang 0.5.23",
        restarts=restarts,
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
    ran = read_manifest(LocalFolder(tmp_path)).engines
    assert [(one.plan, one.max_running_requests) for one in ran] == [("--a 1", 31), ("--a 2", 31)]
    assert ran[0].release == "sglang 0.5.23"


def test_last_span_of_an_engine_stands_where_it_ended_and_not_where_it_was_told(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    span = LiveSpan(
        duration_s=10.0, engine_age_s=0.0, cap_requests=8, running_requests=4.0, tokens_per_s=90.0,
        prompt_tokens_per_s=9.0, accept_length=None, counted_by="engine", finished=((900, 1),),
        running=(), card=None,
    )  # fmt: skip
    coordinator.note_span("w0", span, 5.0)
    coordinator.note_span("w1", span)
    coordinator.close("done")
    log = read_live_log(LocalFolder(tmp_path))
    assert log is not None
    (stopped,), (told,) = log.readings["w0"], log.readings["w1"]
    assert told.end_s - stopped.end_s == pytest.approx(5.0, abs=0.5)


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


def test_rows_that_were_in_flight_at_deaths_are_known_to_the_next_session(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    lease = coordinator.lease("w0").lease
    assert lease is not None
    # Prompt 1, its second sample, at two deaths; prompt 2, its first, at one.
    coordinator.engine_died([(lease.key, 3), (lease.key, 4)])
    coordinator.engine_died([(lease.key, 3), (replace(lease.key, attempt=9), 5)])
    # The driver is killed in the middle of a line, and the input is another order and one less.
    with (tmp_path / DEATHS_FILE).open("ab") as file:
        file.write(b'{"at_s": 1.0, "rows": [["q0')
    prompts = prompts_of(4)
    again = new_session(LocalFolder(tmp_path), [prompts[3], prompts[1], prompts[0]])
    next_lease = again.lease("w0").lease
    assert next_lease is not None
    assert next_lease.deaths == ((3, 2),)
    again.engine_died([(next_lease.key, 3)])
    assert read_deaths(LocalFolder(tmp_path)) == {("q001", 1): 3, ("q002", 0): 1}


def test_folder_of_a_run_without_deaths_has_no_file_of_them(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    lease = coordinator.lease("w0").lease
    assert lease is not None
    coordinator.engine_died([])
    coordinator.engine_died([(replace(lease.key, attempt=9), 5)])
    assert not (tmp_path / DEATHS_FILE).exists()
