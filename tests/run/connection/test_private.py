"""Idle agents of a private Ray: in the command of Ray's raylet, and as processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import ray
import ray._private.ray_constants
import ray._private.services

from pipeline.run.connection import connect as connect_module
from pipeline.run.connection.private import as_bare_as_possible, with_idle_agents
from tests.fakes.live_run import run_file
from tests.fakes.running import wait_until

IDLE_AGENT = Path("pipeline/run/connection/idle_agent.py").resolve()
NODE_ID = "ab" * 28


def test_raylet_gets_idle_agents_for_its_session() -> None:
    command = [
        "raylet",
        "--session_dir=/tmp/ray/session 1",
        "--dashboard_agent_command=python agent.py --a=b",
        "--runtime_env_agent_command=python main.py",
        "--labels={}",
    ]
    idle = f"{sys.executable} -I -S {IDLE_AGENT} '/tmp/ray/session 1'"
    ports = "metrics_agent_port metrics_export_port dashboard_agent_listen_port"
    assert with_idle_agents(command) == [
        *command[:2],
        f"--dashboard_agent_command={idle} {ports}",
        f"--runtime_env_agent_command={idle} runtime_env_agent_port",
        "--labels={}",
    ]


def test_other_commands_stay_as_they_are() -> None:
    command = ["gcs_server", "--log_dir=/tmp"]
    assert with_idle_agents(command) == command


def test_idle_agent_writes_its_ports_and_ends_with_its_parent(tmp_path: Path) -> None:
    start = f"""import os, subprocess, sys
agent = subprocess.Popen([sys.executable, "-I", "-S", {str(IDLE_AGENT)!r}, {str(tmp_path)!r},
                          "one_port", "other_port"], env={{"RAY_NODE_ID": {NODE_ID!r}}})
print(agent.pid, flush=True)
sys.stdin.read()"""
    parent = subprocess.Popen(
        [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    agent = Path("/proc", parent.stdout.readline().strip())
    files = {tmp_path / f"{name}_{NODE_ID}" for name in ("one_port", "other_port")}
    wait_until(lambda: set(tmp_path.iterdir()) == files)
    assert [file.read_text() for file in files] == ["-1", "-1"]
    assert agent.exists()
    parent.communicate()
    wait_until(lambda: not agent.exists())


def test_names_that_a_release_of_ray_lacks_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    services, constants = ray._private.services, ray._private.ray_constants
    with as_bare_as_possible() as missing:
        assert missing == ()
        assert constants.ENABLE_RAY_CLUSTER is False
    monkeypatch.delattr(services, "start_ray_process")
    monkeypatch.delattr(constants, "ENABLE_RAY_CLUSTER")
    with as_bare_as_possible() as missing:
        assert missing == ("start_ray_process", "ENABLE_RAY_CLUSTER")
    assert not hasattr(constants, "ENABLE_RAY_CLUSTER")


def test_a_private_ray_that_is_not_as_bare_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connect_module, "start_ray", lambda num_cpus: ("ENABLE_RAY_CLUSTER",))
    lines: list[str] = []
    assert connect_module.connect(run_file(tmp_path), lines.append) is None
    (line,) = lines
    assert line.startswith(f"event=warning Ray {ray.__version__} lacks ENABLE_RAY_CLUSTER, ")
