"""The job as Ray runs it for its users: submitted to a cluster, stopped, and resumed."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import ROOT, Run, engine_pids, free_port, new_run, questions, wait_until
from scripted_model import write_scripted_model
from scripted_server import Reply, ScriptedServer, answer, serving

pytestmark = [pytest.mark.ray, pytest.mark.engine]


@dataclass(frozen=True, slots=True)
class Head:
    """A head node with a dashboard, which takes jobs."""

    url: str
    ray: str

    def submit(self, run: Run, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Submit and wait for the job's end."""
        return self.command(
            *("submit", "--submission-id", name, "--working-dir", str(ROOT)),
            *("--", sys.executable, "-m", "jobs.regenerate", str(run.run_file), *arguments),
        )

    def command(self, verb: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [self.ray, "job", verb, "--address", self.url, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    ray = str(Path(sys.executable).with_name("ray"))
    port, dashboard_port = free_port(), free_port()
    options = ["--num-cpus=2", "--num-gpus=2", "--object-store-memory=80000000"]
    options += [f"--port={port}", f"--dashboard-port={dashboard_port}"]
    # Each head of a machine has an agent, and their default port is one.
    options += [f"--dashboard-agent-listen-port={free_port()}"]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        process = subprocess.Popen(
            [ray, "start", "--head", "--block", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        running = Head(f"http://127.0.0.1:{dashboard_port}", ray)
        try:
            wait_until(lambda: running.command("submit", "--", "true").returncode == 0)
            yield running
        finally:
            process.terminate()
            process.wait()


def test_submitted_job_runs_on_the_cluster_and_is_resumed_after_a_stop(
    head: Head, tmp_path: Path
) -> None:
    model_file = tmp_path / "scripted.gguf"
    write_scripted_model(model_file)
    engine = {"kind": "embedded", "count": 2, "model_file": str(model_file), "gpus": 1}
    run = new_run(tmp_path, questions(800), engine=engine, cluster={"min_engines": 2})
    head.command(
        *("submit", "--submission-id", "first", "--no-wait", "--working-dir", str(ROOT)),
        *("--", sys.executable, "-m", "jobs.regenerate", str(run.run_file)),
    )
    wait_until(lambda: (run.folder / "data").exists() and len(run.ids()) > 100)
    stopped = head.command("stop", "first")
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: not engine_pids(run.folder))
    said = head.command("logs", "first").stdout
    assert "event=stopped by=SIGTERM" in said
    assert run.status()["state"] == "stopped"
    rows_after_stop = len(run.ids())
    assert 100 < rows_after_stop < 800
    again = head.submit(run, "second")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "rows       800 of 800 done" in again.stdout
    assert len(set(run.ids())) == len(run.ids()) == 800
    # Both workers held a GPU of the cluster's two.
    assert {row["worker_id"] for row in run.published().to_pylist()} == {"w0", "w1"}


def test_stop_flushes_what_is_finished(head: Head, tmp_path: Path) -> None:
    def slow(request: dict[str, object], number: int) -> Reply:
        return Reply(body=answer(request, number).body, delay_s=0.2)

    with serving(ScriptedServer(script=slow)) as server:
        engine = {"kind": "endpoint", "base_urls": [server.url], "max_running_requests": 4}
        run = new_run(
            tmp_path,
            questions(2000),
            engine=engine,
            output={"folder": str(tmp_path / "out"), "flush_interval_s": 600},
        )
        head.command(
            *("submit", "--submission-id", "flush", "--no-wait", "--working-dir", str(ROOT)),
            *("--", sys.executable, "-m", "jobs.regenerate", str(run.run_file)),
        )
        wait_until(lambda: len(server.requests) > 40)
        assert run.ids() == []
        head.command("stop", "flush")
        wait_until(lambda: not (run.folder / "driver.json").exists())
        # All but the requests in flight when the signal came.
        assert len(run.ids()) >= len(server.requests) - 8
        time.sleep(0.5)
        asked = len(server.requests)
        time.sleep(0.5)
        assert len(server.requests) == asked


def test_failed_job_tells_its_exit_code(head: Head, tmp_path: Path) -> None:
    run = new_run(tmp_path, questions(3), engine={"kind": "nonsense"})
    ended = head.submit(run, "bad")
    assert ended.returncode != 0
    assert "engine.kind: found 'nonsense'" in ended.stdout + ended.stderr
    assert "exit code 2" in ended.stdout + ended.stderr
