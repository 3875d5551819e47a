"""Idle agents of a private Ray: in the command of Ray's raylet, and as processes."""

import subprocess
import sys
from pathlib import Path

from pipeline.run.connection.private import with_idle_agents
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
