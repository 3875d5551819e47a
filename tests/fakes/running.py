"""Runs of the job as its user starts them: a process, a run file, an output folder."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import jobs.status

ROOT = Path(__file__).resolve().parents[2]
_WAIT_S = 180.0


@dataclass(slots=True, kw_only=True)
class Run:
    """An output folder and the run file that fills it."""

    folder: Path
    run_file: Path
    prompts: Path

    ray_address: str | None = None
    """The cluster to join; None: a local Ray of its own."""

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return start_job(self.run_file, *arguments, ray_address=self.ray_address)

    def finish(self, *arguments: str) -> "Ended":
        return ended(self.start(*arguments))

    def status(self) -> dict[str, Any]:
        return printed_json(jobs.status.main, str(self.folder), "--json")

    def published(self) -> pa.Table:
        """Return every row in `data/`, as any reader sees it."""
        files = sorted((self.folder / "data").glob("*.parquet"))
        return pa.concat_tables([pq.read_table(file) for file in files]) if files else pa.table({})

    def ids(self) -> list[str]:
        table = self.published()
        return table["row_id"].to_pylist() if table.num_columns else []

    def wait_for_rows(self, num_rows: int, process: "subprocess.Popen[str]") -> None:
        """Wait until `num_rows` are listed as published."""
        wait_until(lambda: self._num_listed() >= num_rows or process.poll() is not None)
        assert process.poll() is None, process.communicate()

    def _num_listed(self) -> int:
        manifest = self.folder / "manifest.jsonl"
        if not manifest.exists():
            return 0
        lines = manifest.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return sum(len(event.get("row_ids", ())) for event in events)


def start_job(
    run_file: Path, *arguments: str, ray_address: str | None = None, folder: Path = ROOT
) -> "subprocess.Popen[str]":
    """`ray_address` is the cluster to join; None: a local Ray of its own."""
    address = {"RAY_ADDRESS": ray_address} if ray_address else {}
    return subprocess.Popen(
        # -P: nothing is imported from the folder, as for the console script.
        [sys.executable, "-P", "-m", "jobs.regenerate", str(run_file), *arguments],
        cwd=folder,
        env={**os.environ, **address, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


def ended(process: "subprocess.Popen[str]") -> Ended:
    out, err = process.communicate(timeout=_WAIT_S)
    return Ended(process.returncode, out, err)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.05)


def new_run(
    tmp_path: Path, rows: list[dict[str, Any]], ray_address: str | None = None, **settings: object
) -> Run:
    """`settings` are keys of the run file; sections are merged into those that stand there."""
    prompts = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), prompts)
    run = Run(
        folder=tmp_path / "out",
        run_file=tmp_path / "run.yaml",
        prompts=prompts,
        ray_address=ray_address,
    )
    write_run_file(run, **settings)
    return run


def write_run_file(run: Run, **settings: object) -> None:
    values: dict[str, Any] = {
        "prompts": {"path": str(run.prompts), "id_column": "id"},
        "model": "Qwen/Qwen3-8B",
        "sampling": {"max_tokens": 256},
        "output": {"folder": str(run.folder), "flush_interval_s": 0.5},
        # Scripted models repeat themselves; what they write is not the matter of most runs.
        "quality": {"canary_rows": 0, "window_rows": 0},
    }
    for section, given in settings.items():
        standing = values.get(section)
        merges = isinstance(standing, dict) and isinstance(given, dict)
        values[section] = {**standing, **given} if merges else given  # type: ignore[dict-item]
    if values.get("engine", {}).get("kind") == "endpoint":
        # The name of the scripted servers' model.
        values["engine"] = {"served_model_name": "m", **values["engine"]}
    run.run_file.write_text(yaml.safe_dump(values))


def printed_json(main: Callable[[list[str]], int], *arguments: str) -> dict[str, Any]:
    """Run a command in this process and return the JSON that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*arguments]) == 0
    return json.loads(printed.getvalue())  # type: ignore[no-any-return]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def questions(num_rows: int) -> list[dict[str, Any]]:
    return [
        {"id": f"q{number:05d}", "category": f"c{number % 3}", "prompt": f"question {number}?"}
        for number in range(num_rows)
    ]


def below(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def engine_pids(folder: Path) -> list[int]:
    """Embedded engines that write their logs under this folder, found by their guards."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(word.endswith("guard.py") for word in words) and str(folder) in " ".join(words):
            found += [child.pid for child in below(process.pid)]
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
