"""The engine's process under its guard: what it gets, what it leaves behind, how it ends."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.engines.process.server import EngineProcess, installed_release
from pipeline.errors import EngineError

pytestmark = [pytest.mark.engine]


NewProcess = Callable[[str], EngineProcess]


@pytest.fixture
def process_of(tmp_path: Path) -> Iterator[NewProcess]:
    """Build processes that run a script of the shell, and stop them in the end."""
    processes: list[EngineProcess] = []

    def new(script: str) -> EngineProcess:
        command = ["/bin/sh", "-c", script]
        log_path = tmp_path / "log"
        processes.append(EngineProcess(command=command, env={}, log_path=log_path, secret="s3cret"))
        return processes[-1]

    yield new
    for process in processes:
        asyncio.run(process.stop())


def ended(process: EngineProcess, within_s: float = 10.0) -> int:
    deadline_s = time.monotonic() + within_s
    while process.is_running:
        assert time.monotonic() < deadline_s, "still running"
        time.sleep(0.02)
    assert process.status is not None
    return process.status


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a container may leave it as a zombie."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    process = EngineProcess(
        command=["/no/such/engine"], env={}, log_path=tmp_path / "logs" / "log", secret="s"
    )
    with pytest.raises(EngineError, match="the engine's command /no/such/engine does not exist"):
        process.start()
    assert (process.is_running, process.status) == (False, None)


def test_end_is_told_with_status_and_last_lines_and_the_secret_is_masked(
    process_of: NewProcess, tmp_path: Path
) -> None:
    script = "for n in 1 2 3 4; do echo line $n; done; echo; echo key s3cret; exit 7"
    process = process_of(script)
    process.start()
    assert ended(process) == 7
    told = process.how_it_ended()
    assert told == (
        "the engine ended with status 7; its last lines: line 3 | line 4 | key *** "
        f"(log: {tmp_path / 'log'})"
    )
    assert process.kernel_kills == 0


def test_status_of_a_killed_engine_is_the_signal_and_128(process_of: NewProcess) -> None:
    process = process_of("kill -9 $$")
    process.start()
    assert ended(process) == 137


def test_guard_ends_with_the_engine_though_a_child_holds_its_output(
    process_of: NewProcess, tmp_path: Path
) -> None:
    process = process_of("sleep 60 & echo $!; exit 3")
    process.start()
    assert ended(process) == 3
    child = int((tmp_path / "log").read_text().splitlines()[-1])
    assert is_gone(child)


def test_stop_kills_what_ignores_sigterm_and_everything_below(
    process_of: NewProcess, tmp_path: Path
) -> None:
    process = process_of("trap '' TERM; setsid sleep 60 & echo $!; wait; sleep 60")
    process.start()
    deadline_s = time.monotonic() + 10
    while not (lines := (tmp_path / "log").read_text().splitlines()[1:]):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    asyncio.run(process.stop())
    assert not process.is_running
    assert is_gone(int(lines[0]))


def test_log_is_that_of_the_present_launch(process_of: NewProcess, tmp_path: Path) -> None:
    for word in ("first", "second"):
        process = process_of(f"echo {word} s3cret")
        process.start()
        ended(process)
    text = process.log_text()
    assert "second ***" in text
    assert "first" not in text
    assert (tmp_path / "log").read_text().count("--- launch ") == 2


def test_activity_counts_the_log_and_the_processes(process_of: NewProcess, tmp_path: Path) -> None:
    process = process_of("echo begin; while :; do :; done")
    assert process.activity().log_bytes == 0
    process.start()
    before = process.activity()
    deadline_s = time.monotonic() + 10
    while (after := process.activity()).cpu_ticks <= before.cpu_ticks + 5:
        assert time.monotonic() < deadline_s, "no tick of the CPU is counted"
        time.sleep(0.05)
    assert after.log_bytes == (tmp_path / "log").stat().st_size > 0
    assert after.io_bytes >= len("begin\n")
    asyncio.run(process.stop())


@pytest.mark.parametrize(
    ("script", "release"),
    [("echo 0.5.21", "0.5.21"), ("echo 0.5.21; exit 1", None), ("exit 0", None)],
)
def test_release_is_read_in_the_engines_own_interpreter(
    tmp_path: Path, script: str, release: str | None
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert installed_release(str(python)) == release


def test_release_of_an_interpreter_that_does_not_run_is_unknown(tmp_path: Path) -> None:
    assert installed_release(str(tmp_path / "absent")) is None
    assert installed_release(sys.executable) is None, "SGLang is not installed beside the tests"
