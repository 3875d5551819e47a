"""Print the status of a run, from its output folder alone.

usage: python -m jobs.status FOLDER [--json] [--watch [--interval S] | --verify]
"""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict

from jobs.terminal import RUN_FOLDER, about_a_run, tell
from pipeline.console.commands import help_examples, program
from pipeline.console.printable import on_one_line, printable
from pipeline.dataset.run_record import check_has_run
from pipeline.dataset.verification import check_parts
from pipeline.live.output import time_left
from pipeline.planner.estimate.figures import duration
from pipeline.report.status import run_status
from pipeline.store.folder import Folder
from schemas.progress import RunStatus, WorkerReport

_MOST_FAILED_SHOWN = 20
_INTERRUPTED = 130
_CLEAR_SCREEN = "\x1b[H\x1b[2J"
# Reading the status may use a tenth of the time.
_INTERVAL_TO_READING = 10


def main(argv: list[str] | None = None) -> int:
    """Exit with 0, 2 without a readable run or for damaged parts, 130 for an interrupted watch."""
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    if arguments.verify and (arguments.watch or arguments.json):
        parser.error("--verify cannot be combined with --watch or --json")
    show = _verify if arguments.verify else _watch if arguments.watch else _show_once
    return about_a_run(arguments.folder, lambda folder: show(folder, arguments))


def argument_parser() -> argparse.ArgumentParser:
    """Return the command's own parser."""
    parser = argparse.ArgumentParser(
        prog=program("jobs.status"),
        description="Print the status of a run, from its output folder alone.",
        epilog=help_examples(
            "jobs.status",
            "out/run",
            "out/run --watch --interval 30",
            "s3://bucket/run --json",
            "out/run --verify",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help=RUN_FOLDER)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watch", action="store_true", help="repeat until the run ends")
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="with --watch: seconds between updates; default: 5",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read every published part, and name damaged ones"
    )
    return parser


def _show_once(folder: Folder, arguments: argparse.Namespace) -> int:
    now_s = time.time()
    status = run_status(folder, now_s=now_s)
    tell(json.dumps(as_json(status), indent=1) if arguments.json else _text(status, now_s))
    return 0


def _verify(folder: Folder, _: argparse.Namespace) -> int:
    """Read all parts; exit with 2 if one is damaged."""
    check_has_run(folder)
    parts = list(check_parts(folder))
    bad = [part for part in parts if part.damage is not None]
    for part in bad:
        tell(f"damaged    {folder.place(part.path)}: {part.damage}")
    if not bad:
        tell(f"verified   {len(parts):,} parts, {sum(part.num_rows for part in parts):,} rows")
        return 0
    rows = sum(part.num_rows for part in bad)
    tell(f"next       move them away; the next run generates their {rows:,} rows again")
    return 2


def _watch(folder: Folder, arguments: argparse.Namespace) -> int:
    """Repeat until the run ends, or Ctrl-C (exit 130). A slow folder is read less often.

    A terminal is redrawn; elsewhere, and with --json, each reading is one line.
    """
    try:
        while True:
            began_s, now_s = time.monotonic(), time.time()
            status = run_status(folder, now_s=now_s)
            print(_update(status, now_s, as_line=arguments.json), flush=True)
            if status.state not in ("running", "unknown"):
                return 0
            took_s = time.monotonic() - began_s
            time.sleep(max(arguments.interval, _INTERVAL_TO_READING * took_s))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe; the rest of the buffer is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _update(status: RunStatus, now_s: float, *, as_line: bool) -> str:
    if as_line:
        return json.dumps(as_json(status))
    if sys.stdout.isatty():
        return f"{_CLEAR_SCREEN}{printable(_text(status, now_s))}\n{_clock(now_s)}, Ctrl-C to leave"
    return f"{_clock(now_s)} {_line(status, now_s)}"


def _clock(now_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(now_s))


def _line(status: RunStatus, now_s: float) -> str:
    workers = status.workers
    return (
        f"{status.state} rows={status.rows_done}/{status.rows_total} errors={status.rows_error} "
        f"failed={status.rows_failed} tokens={status.completion_tokens} "
        f"rate='{_rate(status.tokens_per_s)}' time_left='{duration(status.eta_s)}' "
        f"published='{_ago(status.last_publish_s, now_s)}' "
        f"engines={sum(w.state in ('running', 'idle') for w in workers)}/{len(workers)} "
        f"in_flight={sum(w.in_flight for w in workers)} "
        f"restarts={sum(w.restarts for w in workers)} "
        f"timeouts={sum(w.timeouts for w in workers)}"
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number of seconds above 0")
    return value


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
        f"time left  {time_left(status.days_left) if status.days_left else duration(status.eta_s)}",
        f"published  {status.num_parts:,} parts, the last {_ago(status.last_publish_s, now_s)}",
    ]
    if status.tokens_saved:
        lines.append(f"continued  {status.tokens_saved:,} tokens kept at planned stops")
    if status.rows_outside_input:
        lines.append(f"outside    {status.rows_outside_input:,} published rows, not in the input")
    for worker in sorted(status.workers, key=_by_node):
        lines.append(_worker_line(worker))
        if worker.starved is not None:
            lines.append(f"starved    {worker.worker_id} {on_one_line(worker.starved)}")
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
        f"{worker.restarts} restarts, {worker.timeouts} of {worker.requests} requests timed out "
        f"({on_one_line(worker.engine_release or worker.engine)})"
    )


def failed_lines(status: RunStatus) -> list[str]:
    """List the first failed rows with their last cause, and the number of the others."""
    lines = [
        on_one_line(f"failed     {row_id}" + (f" sample {sample}" if sample else "") + f": {cause}")
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
