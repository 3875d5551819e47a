"""Signals: those that the parent has ignored stay so, the others stop the driver."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.running import ROOT

SCRIPT = """
import os, signal, sys
from pipeline.run import signals
if sys.argv[2] == "ignored":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
caught = signals.catch_signals() if sys.argv[1] == "catch" else signals.exit_on_signals(print)
os.kill(os.getpid(), signal.SIGHUP)
print("lives", caught)
"""


@pytest.mark.parametrize(
    ("how", "hangup", "code", "out"),
    [
        ("catch", "ignored", 0, "lives []\n"),
        ("catch", "heeded", 0, f"lives [{int(signal.SIGHUP)}]\n"),
        ("exit", "ignored", 0, "lives None\n"),
        ("exit", "heeded", 129, "event=stopped by=SIGHUP nothing was started\n"),
    ],
)
def test_hangup_that_the_parent_ignores_stays_ignored(
    how: str, hangup: str, code: int, out: str
) -> None:
    command = [sys.executable, "-c", SCRIPT, how, hangup]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (code, out), ended.stderr


@pytest.mark.parametrize("job", ["regenerate", "plan", "status"])
def test_interrupt_while_modules_are_imported_is_one_line(tmp_path: Path, job: str) -> None:
    slow = "import sys, time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "yaml.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", f"jobs.{job}", "run.yaml"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "stopped by SIGINT\n")
