"""A Ray head on this machine, with a dashboard that takes jobs."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.running import ROOT, Run, below, free_port, is_listening, wait_until

RAY_COMMAND = str(Path(sys.executable).with_name("ray"))
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_metrics_report_interval_ms": "500",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """`address` is where runs join it, `url` where it takes jobs."""

    address: str
    url: str
    metrics_port: int
    pid: int

    def actor_pid(self, name: str) -> int:
        """Return the process of an actor of this class: other Rays may run on the machine."""
        words = f"ray::{name}"
        return next(p.pid for p in below(self.pid) if words in " ".join(p.cmdline()))

    def submit(self, run: Run, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Submit as a user does, and wait for the job's end."""
        command = [RAY_COMMAND, "job", "submit", "--address", self.url, "--submission-id", name]
        command += ["--working-dir", str(ROOT), "--", *job_command(run), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    @property
    def takes_jobs(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/jobs/", timeout=5) as page:
                return bool(page.status == 200)
        except OSError:
            return False


def job_command(run: Run) -> list[str]:
    return [sys.executable, "-m", "jobs.regenerate", str(run.run_file)]


@contextmanager
def ray_head() -> Iterator[Head]:
    port, dashboard_port, metrics_port = free_port(), free_port(), free_port()
    options = ["--num-cpus=4", "--num-gpus=2", "--object-store-memory=80000000"]
    options += [f"--port={port}", f"--dashboard-port={dashboard_port}"]
    options += [f"--metrics-export-port={metrics_port}"]
    # Heads share a machine: none may have a default port.
    options += [f"--dashboard-agent-listen-port={free_port()}"]
    options += [f"--ray-client-server-port={free_port()}"]
    options += ["--no-monitor", "--include-log-monitor=False"]
    with pytest.MonkeyPatch.context() as environment:
        for name, value in _ENVIRONMENT.items():
            environment.setenv(name, value)
        process = subprocess.Popen(
            [RAY_COMMAND, "start", "--head", "--block", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: is_listening(port))
            yield Head(
                address=f"127.0.0.1:{port}",
                url=f"http://127.0.0.1:{dashboard_port}",
                metrics_port=metrics_port,
                pid=process.pid,
            )
        finally:
            process.terminate()
            process.wait()
