"""Time, memory and size of the report of a large run.

usage: python -m tests.benchmarks.report_rows [--rows N] [--folder DIR]

Writes parts of 3,000 rows with about 8 KB of text each, and makes the report of the folder: as a
command would, and once more as a run or --serve would after ten more parts.
"""

import argparse
import contextlib
import dataclasses
import random
import resource
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from pipeline.dataset.columns import completion_table
from pipeline.dataset.parts import publish, stage_table
from pipeline.report.page import report_page
from pipeline.report.report import run_report
from pipeline.report.rows.figures import RowFigures
from pipeline.store.folder import LocalFolder
from schemas.completion import Completion
from schemas.prompt import Message
from tests.fakes.example_completion import COMPLETION
from tests.fakes.example_run import BEGAN_AT_S, write_example_run

_PART_ROWS = 3_000
_LATER_PARTS = 10
_KEPT = pa.schema([("category", pa.string())])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=900_000)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        root = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = LocalFolder(root / "out")
        num_parts = arguments.rows // _PART_ROWS
        write_example_run(folder, num_parts=40, num_engines=64, rows_total=arguments.rows)
        table = completion_table(_rows(random.Random(1)), _KEPT)
        for number in range(num_parts):
            _publish(folder, number, table)
        before_mib = _peak_mib()
        figures = RowFigures()
        print(
            "first ", _measured(folder, figures), f"peak {before_mib:.0f} -> {_peak_mib():.0f} MiB"
        )
        for number in range(num_parts, num_parts + _LATER_PARTS):
            _publish(folder, number, table)
        print("again ", _measured(folder, figures), f"peak {_peak_mib():.0f} MiB")
    return 0


def _measured(folder: LocalFolder, figures: RowFigures) -> str:
    started_s = time.monotonic()
    report = run_report(folder, now_s=BEGAN_AT_S + 90_000, rows=figures, state="running")
    page = report_page(report)
    seconds = time.monotonic() - started_s
    return f"{figures.num_rows:,} rows: {seconds:.1f} s, page {len(page.encode()) / 1e6:.2f} MB,"


def _rows(chance: random.Random) -> list[Completion]:
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 9))) for _ in range(5000)]

    def text(number: int) -> str:
        return " ".join(chance.choices(words, k=number))

    rows = []
    for number in range(_PART_ROWS):
        tokens = min(int(chance.lognormvariate(7, 1)), 4096)
        turn = dataclasses.replace(COMPLETION.turns[0], completion_tokens=tokens)
        messages = (
            Message(role="user", content=text(60)),
            Message(role="assistant", content=text(300), reasoning_content=text(1000)),
        )
        rows.append(
            dataclasses.replace(
                COMPLETION, row_id=f"row-{number}", messages=messages, turns=(turn,),
                flags=("looping",) if number % 20 == 0 else (),
                carried={"category": chance.choice(["code", "maths", "chat"])},
            )
        )  # fmt: skip
    return rows


def _publish(folder: LocalFolder, number: int, table: pa.Table) -> None:
    """Publish the rows under ids of their own, ten seconds after the last part."""
    at_s, worker = BEGAN_AT_S + 100 + 10 * number, f"w{number % 64}"
    own = {
        "row_id": [f"{number}-{place}" for place in range(table.num_rows)],
        "worker_id": [worker] * table.num_rows,
        "started_at": [datetime.fromtimestamp(at_s - 60, UTC)] * table.num_rows,
        "finished_at": [datetime.fromtimestamp(at_s, UTC)] * table.num_rows,
    }
    for name, values in own.items():
        column = table.schema.get_field_index(name)
        field = table.schema.field(column)
        table = table.set_column(column, field, pa.array(values, field.type))
    part = stage_table(
        folder, f"large-{number:05d}.parquet", table, run_id="run-1", worker_id=worker
    )
    publish(folder, part, now_s=at_s)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    raise SystemExit(main())
