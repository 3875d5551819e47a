"""The job as Ray runs it for its users: submitted to a cluster, stopped, and resumed."""

import shlex
import time
from pathlib import Path

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.fakes.ray_head import Head, job_command
from tests.fakes.running import ROOT, Run, engine_pids, new_run, questions, wait_until
from tests.fakes.scripted_model import write_scripted_model
from tests.fakes.scripted_server import Reply, ScriptedServer, answer, serving

pytestmark = [pytest.mark.ray, pytest.mark.engine]


@pytest.fixture(scope="module")
def jobs(head: Head) -> JobSubmissionClient:
    wait_until(lambda: head.takes_jobs)
    return JobSubmissionClient(head.url)


def begin(jobs: JobSubmissionClient, run: Run, name: str) -> None:
    """Submit, and wait for nothing."""
    jobs.submit_job(
        entrypoint=shlex.join(job_command(run)),
        submission_id=name,
        runtime_env={"working_dir": str(ROOT)},
    )


def stop(jobs: JobSubmissionClient, name: str) -> None:
    """Stop a job as `ray job stop` does: returns when the job's process is gone."""
    assert jobs.stop_job(name)
    wait_until(lambda: jobs.get_job_status(name).is_terminal())
    assert jobs.get_job_status(name) == JobStatus.STOPPED


def test_submitted_job_runs_on_the_cluster_and_is_resumed_after_a_stop(
    head: Head, jobs: JobSubmissionClient, tmp_path: Path
) -> None:
    model_file = tmp_path / "scripted.gguf"
    write_scripted_model(model_file)
    engine = {"kind": "embedded", "count": 2, "model_file": str(model_file), "gpus": 1}
    run = new_run(tmp_path, questions(800), engine=engine, cluster={"min_engines": 2})
    begin(jobs, run, "first")
    wait_until(lambda: (run.folder / "data").exists() and len(run.ids()) > 50)
    stop(jobs, "first")
    wait_until(lambda: not engine_pids(run.folder))
    # The driver says so after its engines have ended.
    wait_until(lambda: "event=stopped by=SIGTERM" in jobs.get_job_logs("first"))
    assert run.status()["state"] == "stopped"
    rows_after_stop = len(run.ids())
    assert 50 < rows_after_stop < 800
    again = head.submit(run, "second")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "rows       800 of 800 done" in again.stdout
    assert len(set(run.ids())) == len(run.ids()) == 800
    # Both workers held a GPU of the cluster's two.
    assert {row["worker_id"] for row in run.published().to_pylist()} == {"w0", "w1"}


@pytest.mark.slow
def test_stop_flushes_what_is_finished(jobs: JobSubmissionClient, tmp_path: Path) -> None:
    def slow(request: dict[str, object], number: int) -> Reply:
        return Reply(body=answer(request, number).body, delay_s=0.1)

    with serving(ScriptedServer(script=slow)) as server:
        engine = {"kind": "endpoint", "base_urls": [server.url], "max_running_requests": 4}
        run = new_run(
            tmp_path,
            questions(2000),
            engine=engine,
            output={"folder": str(tmp_path / "out"), "flush_interval_s": 600},
        )
        begin(jobs, run, "flush")
        wait_until(lambda: len(server.requests) > 40)
        assert run.ids() == []
        stop(jobs, "flush")
        wait_until(lambda: not (run.folder / "driver.json").exists())
        # All but the requests in flight when the signal came.
        assert len(run.ids()) >= len(server.requests) - 8
        time.sleep(0.25)
        asked = len(server.requests)
        time.sleep(0.25)
        assert len(server.requests) == asked


def test_failed_job_tells_its_exit_code(
    head: Head, jobs: JobSubmissionClient, tmp_path: Path
) -> None:
    run = new_run(tmp_path, questions(3), engine={"kind": "nonsense"})
    ended = head.submit(run, "bad")
    assert ended.returncode != 0
    assert "engine.kind: found 'nonsense'" in ended.stdout + ended.stderr
    assert "exit code 2" in ended.stdout + ended.stderr
