"""How far a run is, from its output folder alone.

usage: python -m jobs.status FOLDER [--json]
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from pipeline.durations import duration
from pipeline.errors import ConfigError
from pipeline.status import run_status
from pipeline.storage import Folder
from schemas.progress import RunStatus, WorkerReport

_MOST_FAILED_SHOWN = 20


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the folder holds no run."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.status", description="How far a run is, from its files alone."
    )
    parser.add_argument("folder", type=Path, help="the run's output.folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    now_s = time.time()
    try:
        status = run_status(Folder(arguments.folder.absolute()), now_s=now_s)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(as_json(status), indent=1) if arguments.json else _text(status, now_s))
    return 0


def as_json(status: RunStatus) -> dict[str, object]:
    values = asdict(status)
    values["failed"] = [
        {"row_id": row_id, "sample_index": sample, "cause": cause}
        for row_id, sample, cause in status.failed
    ]
    return values


def _text(status: RunStatus, now_s: float) -> str:
    share = status.rows_done / status.rows_total if status.rows_total else 1.0
    rows = f"{status.rows_done:,} of {status.rows_total:,} done ({share:.1%})"
    error_rows = f"{status.rows_error:,} of them error rows; {status.rows_failed:,} failed"
    lines = [
        f"{status.folder}: {status.state}",
        f"rows       {rows}, {error_rows}",
        f"tokens     {status.completion_tokens:,} generated, {_rate(status.tokens_per_s)}",
        f"time left  {duration(status.eta_s)}",
        f"published  {status.num_parts:,} parts, the last {_ago(status.last_publish_s, now_s)}",
    ]
    if status.rows_outside_input:
        lines.append(f"outside    {status.rows_outside_input:,} published rows not in the input")
    lines += [_worker_line(worker) for worker in sorted(status.workers, key=_by_node)]
    lines += failed_lines(status)
    return "\n".join(lines)


def _by_node(worker: WorkerReport) -> tuple[str, tuple[str, ...], str]:
    return worker.node or "", worker.gpus, worker.worker_id


def _worker_line(worker: WorkerReport) -> str:
    where = f" on {worker.node}" if worker.node else ""
    gpus = f" GPU {','.join(worker.gpus)}" if worker.gpus else ""
    return (
        f"worker     {worker.worker_id} {worker.state}{where}{gpus}: {worker.in_flight} in flight, "
        f"{worker.not_started} waiting, {worker.backing_off} backing off, "
        f"{worker.restarts} restarts ({worker.engine_release or worker.engine})"
    )


def failed_lines(status: RunStatus) -> list[str]:
    """Rows that used up their budget, the first ones with their last cause."""
    lines = [
        f"failed     {row_id}" + (f" sample {sample}" if sample else "") + f": {cause}"
        for row_id, sample, cause in status.failed[:_MOST_FAILED_SHOWN]
    ]
    more = len(status.failed) - len(lines)
    return [*lines, f"failed     and {more:,} more"] if more > 0 else lines


def _rate(tokens_per_s: float | None) -> str:
    return "no rate yet" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s"


def _ago(then_s: float | None, now_s: float) -> str:
    return "not yet" if then_s is None else f"{duration(max(0.0, now_s - then_s))} ago"


if __name__ == "__main__":
    sys.exit(main())
