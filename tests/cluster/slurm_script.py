"""The Slurm script of `plan --write`, with stand-ins for two commands of Slurm and a real Ray.

Run by `make test-cluster`; not a part of the suite. `srun` runs its command here, `scontrol` names
this machine and notes what is requeued.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.running import ROOT, Run, engine_pids, free_port, new_run, questions, wait_until
from tests.fakes.scripted_model import write_scripted_model

_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
_SCONTROL = """#!/bin/bash
case $1 in
  show) echo "$SLURM_JOB_NODELIST" ;;
  requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    others = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    return {
        **others,
        "HOME": str(home),
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "REQUEUED": str(tmp_path / "requeued"),
        "RAY_PORT": str(free_port()),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "this",
        "SLURM_JOB_NUM_NODES": "1",
        "REGENERATE_BIN": str(Path(sys.executable).parent),
    }


def started(run: Run, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    folder = run.run_file.parent / "submitted"
    if not folder.exists():
        shutil.copytree(ROOT / "jobs/deploy/b200-x8", folder)
        shutil.copy(run.run_file, folder / "run.yaml")
    environment = {**environment, "SLURM_SUBMIT_DIR": str(folder)}
    return subprocess.Popen(
        ["bash", str(folder / "slurm.sbatch")], env=environment, start_new_session=True
    )


def ended(job: "subprocess.Popen[bytes]") -> int:
    """The script's status; Slurm ends whatever it leaves behind."""
    try:
        return job.wait(timeout=180)
    finally:
        os.killpg(job.pid, signal.SIGTERM)


def test_job_whose_time_is_up_is_queued_again_and_resumes(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    model_file = tmp_path / "scripted.gguf"
    write_scripted_model(model_file)
    engine = {"kind": "embedded", "count": 2, "model_file": str(model_file)}
    run = new_run(tmp_path, questions(3000), engine=engine)
    job = started(run, environment)
    wait_until(lambda: (run.folder / "data").exists() and len(run.ids()) > 100)
    os.kill(job.pid, signal.SIGUSR1)
    assert ended(job) == 128 + signal.SIGTERM
    assert Path(environment["REQUEUED"]).read_text() == "42\n"
    wait_until(lambda: not engine_pids(run.folder))
    assert run.status()["state"] == "stopped"
    assert 100 < len(run.ids()) < 3000
    environment["RAY_PORT"] = str(free_port())
    assert ended(started(run, environment)) == 0
    assert sorted(run.ids()) == [f"q{number:05d}" for number in range(3000)]
    assert Path(environment["REQUEUED"]).read_text() == "42\n"
