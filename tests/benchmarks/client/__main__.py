"""The client beside an ideal one, datatrove and a bare openai loop, on the same stand-in servers.

usage: python -m tests.benchmarks.client [--scale F] [--only NAME ...] [--clients NAME ...]
                                         [--datatrove PYTHON]

Three workloads and a kill, one line each per client. Serving time counts from the first request to
the last answer, as the servers see it. CPU is that of the whole process tree, start and end
included, divided by the rows. `--scale 0.01` is a look in seconds.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import yaml

from tests.benchmarks.client.measure import Measured, Usage
from tests.benchmarks.client.servers import Standins, standins
from tests.benchmarks.client.workload import Workload, write_prompts

_HERE = Path(__file__).parent
WORKLOADS = {
    "4 x 256 in flight, median 1 s": Workload(
        num_rows=20_000, num_servers=4, in_flight=256, median_s=1.0
    ),
    "4 x 64 in flight, answers at once": Workload(
        num_rows=20_000, num_servers=4, in_flight=64, median_s=0.0
    ),
    "50,000-token answers, 4 x 64 in flight": Workload(
        num_rows=300,
        num_servers=4,
        in_flight=64,
        median_s=1.0,
        prompt_characters=100_000,
        answer_tokens=50_000,
    ),
}
KILLED = Workload(num_rows=2_000, num_servers=4, in_flight=16, median_s=1.0)
KILL = "killed after the first answers, 4 x 16 in flight"
_KILL_AFTER_S = 14.0
CLIENTS = ("ideal", "openai", "datatrove", "regenerate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Figures of one client."""

    client: str
    serving_s: float
    first_90_s: float
    peak_in_flight: int
    first_request_s: float
    cpu_ms_per_row: float
    peak_pss_gb: float
    rows: str


Command = Callable[[Path, Workload, Standins], list[str]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows")
    parser.add_argument("--only", nargs="*", default=None, help="words of the workloads' names")
    parser.add_argument("--clients", nargs="*", choices=CLIENTS, default=CLIENTS)
    parser.add_argument("--datatrove", default=None, help="interpreter that has datatrove")
    parser.add_argument("--set", nargs="*", default=[], help="keys of our run file")
    given = parser.parse_args(argv)
    if given.datatrove is not None and shutil.which(given.datatrove) is None:
        parser.error(
            f"--datatrove: no program at {given.datatrove}; `make bench-client` installs it"
        )
    commands = _commands(given.datatrove, given.set)
    clients = [name for name in given.clients if name in commands]
    for name, load in WORKLOADS.items():
        if _is_wanted(name, given.only):
            scaled = replace(load, num_rows=max(1, int(load.num_rows * given.scale)))
            _print_lines(name, scaled, [_measured(c, commands[c], scaled) for c in clients])
    if _is_wanted(KILL, given.only):
        scaled = replace(KILLED, num_rows=max(1, int(KILLED.num_rows * given.scale)))
        after_s = _KILL_AFTER_S * min(1.0, given.scale)
        print(f"\n{KILL}: {scaled.num_rows:,} rows, killed {after_s:.0f} s after the first answer")
        for client in clients:
            if client in ("regenerate", "datatrove"):
                print(_killed(client, commands[client], scaled, after_s), flush=True)
    return 0


def _is_wanted(name: str, words: list[str] | None) -> bool:
    return words is None or any(word in name for word in words)


# -- the clients


def _commands(datatrove: str | None, settings: list[str]) -> dict[str, Command]:
    commands: dict[str, Command] = {
        "ideal": lambda folder, load, servers: _module("ideal", folder, load, servers),
        "openai": lambda folder, load, servers: _module("bare_openai", folder, load, servers),
        "regenerate": lambda folder, load, servers: _ours(folder, load, servers, settings),
    }
    if datatrove is not None:
        commands["datatrove"] = lambda folder, load, servers: [
            datatrove,
            str(_HERE / "datatrove_side.py"),
            str(folder / "prompts.parquet"),
            str(folder / "out"),
            str(load.in_flight),
            *servers.urls,
        ]
    return commands


def _module(name: str, folder: Path, load: Workload, servers: Standins) -> list[str]:
    module = f"tests.benchmarks.client.{name}"
    prompts = str(folder / "prompts.parquet")
    return [sys.executable, "-m", module, prompts, str(load.in_flight), *servers.urls]


def _ours(folder: Path, load: Workload, servers: Standins, settings: list[str]) -> list[str]:
    values: dict[str, Any] = {
        "prompts": {"path": str(folder / "prompts.parquet"), "id_column": "id"},
        "model": "m",
        "sampling": {"max_tokens": 60_000},
        "engine": {
            "kind": "endpoint",
            "base_urls": servers.urls,
            "max_running_requests": load.in_flight,
        },
        "output": {"folder": str(folder / "out")},
    }
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(values))
    overrides = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "jobs.regenerate", str(run_file), *overrides]


# -- measuring


def _measured(client: str, command: Command, load: Workload) -> Line:
    folder = Path(tempfile.mkdtemp(prefix="bench-client-"))
    try:
        write_prompts(folder / "prompts.parquet", load)
        with standins(load) as servers:
            words = command(folder, load, servers)
            running = Measured(words, folder / "usage.json", folder / "log")
            usage = running.wait()
            if usage.code:
                print((folder / "log").read_text()[-3000:], file=sys.stderr)
            return _line(client, load, usage, servers.seen(), running.started_s, folder / "out")
    finally:
        shutil.rmtree(folder)


def _line(
    client: str, load: Workload, usage: Usage, seen: dict[str, Any], started_s: float, out: Path
) -> Line:
    answered = sorted(at_s - seen["first_s"] for at_s in seen["answered_s"])
    rows = _rows(client, out)
    return Line(
        client=client,
        serving_s=answered[-1] if answered else math.nan,
        first_90_s=answered[int(0.9 * (len(answered) - 1))] if answered else math.nan,
        peak_in_flight=seen["peak_in_flight"],
        first_request_s=seen["first_s"] - started_s,
        cpu_ms_per_row=1000 * usage.cpu_s / load.num_rows,
        peak_pss_gb=usage.peak_pss_bytes / 1e9,
        rows=f"{seen['requests']:,} requests" if rows is None else _checked(rows, load),
    )


def _rows(client: str, out: Path) -> list[str] | None:
    """Row ids of the output; None for a client that keeps nothing."""
    if client == "regenerate":
        table = ds.dataset(out / "data", format="parquet").to_table(columns=["row_id"])
        return [str(row_id) for row_id in table["row_id"].to_pylist()]
    if client == "datatrove":
        lines = (line for file in out.glob("*.jsonl") for line in file.open())
        return [str(json.loads(line)["id"]) for line in lines]
    return None


def _checked(rows: list[str], load: Workload) -> str:
    lost, doubled = load.num_rows - len(set(rows)), len(rows) - len(set(rows))
    return f"{len(rows):,} rows, {lost} lost, {doubled} doubled"


def _print_lines(name: str, load: Workload, lines: list[Line]) -> None:
    ideal = next((line for line in lines if line.client == "ideal"), None)
    print(f"\n{name}: {load.num_rows:,} rows of {load.answer_tokens:,} tokens")
    print(
        f"  {'client':11}{'serving':>9}{'/ideal':>8}{'90 %/ideal':>11}{'peak':>7}"
        f"{'first s':>9}{'CPU-ms/row':>11}{'PSS GB':>8}  rows"
    )
    for line in lines:
        ratios = ("", "")
        if ideal is not None:
            ratios = (
                f"{line.serving_s / ideal.serving_s:.2f}",
                f"{line.first_90_s / ideal.first_90_s:.2f}",
            )
        print(
            f"  {line.client:11}{line.serving_s:8.1f}s{ratios[0]:>8}{ratios[1]:>11}"
            f"{line.peak_in_flight:>7,}{line.first_request_s:>9.1f}{line.cpu_ms_per_row:>11.2f}"
            f"{line.peak_pss_gb:>8.2f}  {line.rows}",
            flush=True,
        )


def _killed(client: str, command: Command, load: Workload, after_s: float) -> str:
    """Kill the run with all its processes, run it again, and count what was asked twice."""
    folder = Path(tempfile.mkdtemp(prefix="bench-client-"))
    try:
        write_prompts(folder / "prompts.parquet", load)
        with standins(load) as servers:
            words = command(folder, load, servers)
            running = Measured(words, folder / "usage.json", folder / "log")
            while running.is_running and not servers.seen()["answered_s"]:
                time.sleep(0.1)
            time.sleep(after_s)
            before = servers.seen()
            running.kill()
            running.wait()
            again = Measured(words, folder / "usage.json", folder / "log")
            usage = again.wait()
            if usage.code:
                print((folder / "log").read_text()[-3000:], file=sys.stderr)
            seen = servers.seen()
            rows = _rows(client, folder / "out") or []
            return (
                f"  {client:11} {len(before['answered_s']):,} answers before the kill; asked again "
                f"{seen['asked_again']}, answered twice {seen['answered_again']}; "
                f"{_checked(rows, load)}"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
