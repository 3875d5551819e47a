"""Memory of the driver and the coordinator, and rows per second, with many prompts.

usage: python -m tests.benchmarks.million_prompts [--rows N] [--seconds S] [--folder DIR]

Writes N prompts of 2 KB, runs the main job against an endpoint that answers at once, stops it by
SIGTERM after S seconds of generation, and resumes it for S seconds more.
"""

import argparse
import contextlib
import multiprocessing
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.fakes.scripted_server import ScriptedServer, serving

ROOT = Path(__file__).resolve().parents[2]

_BATCH_ROWS = 20_000
_PROMPT_CHARACTERS = 2_000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        folder = arguments.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        write_prompts(folder / "prompts.parquet", arguments.rows)
        url = stack.enter_context(endpoint())
        run_file = write_run_file(folder, url)
        for name in ("first session", "resumed"):
            print(f"{name:14}", measured(run_file, arguments.seconds))
    return 0


def write_prompts(path: Path, num_rows: int) -> None:
    """Write prompts of 2 KB, all different."""
    chance = random.Random(1)
    letters = "abcdefghijklmnop"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(5000)]
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, num_rows, _BATCH_ROWS):
            numbers = range(start, min(start + _BATCH_ROWS, num_rows))
            prompts = [" ".join(chance.choices(words, k=340))[:_PROMPT_CHARACTERS] for _ in numbers]
            ids = [f"prompt-{number:09d}" for number in numbers]
            writer.write_table(pa.table({"id": ids, "prompt": prompts}, schema=schema))


@contextlib.contextmanager
def endpoint() -> Iterator[str]:
    """Start an endpoint in its own process that answers at once."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    yield ours.recv()
    process.kill()


def _serve(pipe: "multiprocessing.connection.Connection") -> None:
    server = ScriptedServer(keeps_requests=False)
    with serving(server):
        pipe.send(server.url)
        pipe.recv()


def write_run_file(folder: Path, url: str) -> Path:
    values = {
        "prompts": {"path": str(folder / "prompts.parquet"), "id_column": "id"},
        "model": "m",
        "engine": {
            "kind": "endpoint",
            "base_urls": [url],
            "max_running_requests": 64,
            "return_token_ids": False,
        },
        "output": {"folder": str(folder / "out"), "flush_interval_s": 5},
        # Its answers repeat the question on purpose.
        "quality": {"canary_rows": 0, "window_rows": 0},
    }
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(values))
    return run_file


def measured(run_file: Path, seconds: float) -> str:
    with subprocess.Popen(
        [sys.executable, "-m", "jobs.regenerate", str(run_file)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        return _figures(process, seconds)


def _figures(process: "subprocess.Popen[str]", seconds: float) -> str:
    """Let the run generate for a while, stop it, and return its figures."""
    started_s = time.monotonic()
    assert process.stderr is not None
    ready_s, lines = 0.0, []
    for line in process.stderr:
        lines.append(line)
        if "event=engine_ready" in line:
            ready_s = time.monotonic() - started_s
            break
    assert ready_s, "".join(lines)
    coordinator_bytes = _peak_over(process.pid, seconds)
    driver_bytes = _peak_bytes(process.pid)
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    process.wait()
    done = re.search(r"rows_done=(\d+) rows_total=(\d+)", rest)
    assert done is not None, rest
    return (
        f"ready after {ready_s:.0f} s; driver peak {driver_bytes / 2**20:.0f} MiB, coordinator "
        f"{coordinator_bytes / 2**20:.0f} MiB; {done[1]} of {done[2]} rows done after "
        f"{seconds:.0f} s more"
    )


def _peak_over(driver_pid: int, seconds: float) -> int:
    """The coordinator's peak memory while the run goes on."""
    peak = 0
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        for process in psutil.Process(driver_pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                if "Coordinator" in " ".join(process.cmdline()):
                    peak = max(peak, _peak_bytes(process.pid))
        time.sleep(1)
    return peak


def _peak_bytes(pid: int) -> int:
    """The kernel's high-water mark of a process' resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
