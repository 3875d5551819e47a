"""The coordinator at 1,000 engines and 10 million rows: calls a second, memory, start and resume.

usage: python -m tests.benchmarks.coordinator [--rows N] [--engines N] [--rows-a-part N]
                                              [--folder DIR]

The coordinator, its ledger, the checkpoint and the session are the real ones, on real files, each
step in a process of its own. Engines are a loop that leases, reports and publishes in turn; prompts
and parts are empty of text, and a part's file is empty. Ray is left out: what a call costs beside
its transport is measured.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.dataset.frozen import freeze
from pipeline.dataset.prompts import InputColumns, PromptStream, input_fingerprint
from pipeline.run.coordinator import Coordinator
from pipeline.run.session import Prepared, SessionOptions, prepare
from pipeline.store import lock
from pipeline.store.folder import LocalFolder
from schemas.config.run_file import RunFile
from schemas.manifest import Part
from schemas.progress import WorkerReport
from schemas.prompt import Message, Prompt
from tests.fakes.example_report import worker_report

if TYPE_CHECKING:
    from schemas.shard import LeaseKey

_SHARE_DONE = 0.9
_LOST_EVERY = 500
# One publication in so many comes from an engine that was taken for dead meanwhile.
_SAMPLE_ROWS = 2_048
_IDLE_CALLS = 20_000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--engines", type=int, default=1_000)
    parser.add_argument("--rows-a-part", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = run_file(folder)
        freeze_quickly(config, given.rows)
        print(f"{given.rows:,} rows, {given.engines:,} engines, {given.rows_a_part} rows a part")
        in_a_process(started, config)
        in_a_process(worked, config, given.engines, given.rows_a_part)
        in_a_process(started, config)
    return 0


def in_a_process(step: Callable[..., list[str]], *arguments: object) -> None:
    """Print what the step says, and the most memory that its process has held."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        lines, peak_bytes = pool.apply(_measured, (step, arguments))
    print(*lines, f"  peak memory {peak_bytes / 2**20:,.0f} MiB", sep="\n", flush=True)


def _measured(
    step: Callable[..., list[str]], arguments: tuple[object, ...]
) -> tuple[list[str], int]:
    lines = step(*arguments)
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return lines, int(found[1]) * 1024


# -- the folder


def run_file(folder: Path) -> RunFile:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("{}\n")
    return RunFile.model_validate(
        {
            "prompts": {"path": str(prompts), "column": "prompt", "id_column": "id"},
            "model": "m",
            "output": {"folder": str(folder / "out")},
            # A canary would hold all other rows back until its own are published.
            "quality": {"canary_rows": 0},
        }
    )


def freeze_quickly(config: RunFile, num_rows: int) -> None:
    """A frozen set of so many rows: one file as `freeze` writes it, then its like by columns."""
    folder = LocalFolder(Path(config.output.folder))
    folder.make()
    name = input_fingerprint(config.prompts)
    assert name is not None
    prompt = Prompt(
        row_id="",
        content_hash="",
        messages=(Message(role="user", content="hi"),),
        carried={},
        problem=None,
    )
    columns = InputColumns(column="prompt", shape="prompt", system_column=None)
    sample = (
        replace(prompt, row_id=row_id(n), content_hash=content_hash(n)) for n in range(_SAMPLE_ROWS)
    )
    freeze(
        folder,
        name,
        PromptStream(columns=columns, carried=(), arrow_schema=None, prompts=sample),
    )
    like = pq.read_table(folder.path(f"prompts/{name}/rows-00000.parquet"))
    for number, start in enumerate(range(0, num_rows, _SAMPLE_ROWS)):
        rows = range(start, min(start + _SAMPLE_ROWS, num_rows))
        ids = pa.array([row_id(row) for row in rows])
        hashes = pa.array([content_hash(row) for row in rows])
        body = like["body"].slice(0, len(rows)).combine_chunks()
        table = pa.table([ids, hashes, body], schema=like.schema)
        path = folder.path(f"prompts/{name}/rows-{number:05d}.parquet")
        pq.write_table(table, path, compression="zstd", row_group_size=512)
    # Without the files' checksums, which are of the sample.
    index = json.loads(folder.read(f"prompts/{name}/index.json")) | {"num_rows": num_rows}
    del index["files"]
    folder.write_whole(f"prompts/{name}/index.json", json.dumps(index).encode())


def row_id(row: int) -> str:
    return f"prompt-{row:09d}"


def content_hash(row: int) -> str:
    return hashlib.blake2b(row.to_bytes(8, "big"), digest_size=8).hexdigest()


# -- the steps


@contextlib.contextmanager
def prepared_session(config: RunFile) -> Iterator[Prepared]:
    folder, holder = LocalFolder(Path(config.output.folder)), lock.this_process()
    lock.acquire(folder, holder, time.sleep)
    yield prepare(
        config,
        folder,
        SessionOptions(),
        token=holder.token,
        now_s=time.time(),
        log=lambda line: None,
    )
    lock.release(folder, holder)


def started(config: RunFile) -> list[str]:
    """Put the folder in order and the coordinator up."""
    began_s = time.perf_counter()
    with prepared_session(config) as prepared:
        prepared_s = time.perf_counter()
        Coordinator(prepared.plan, bytes(prepared.row_states))
        up_s = time.perf_counter()
    session = prepared.session
    in_order_s, coordinator_s = prepared_s - began_s, up_s - prepared_s
    return [
        f"start with {session.rows_done:,} of {session.rows_total:,} rows done",
        f"  folder in order after {in_order_s:.1f} s, coordinator up in {coordinator_s:.2f} s more",
    ]


@dataclass(slots=True)
class Times:
    """Seconds spent and calls made, by kind of call."""

    spent_s: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def of(self, kind: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.spent_s[kind] += time.perf_counter() - began_s  # type: ignore[assignment]
        self.calls[kind] += 1

    def lines(self) -> list[str]:
        return [
            f"  {kind:22} {calls:>9,} calls, {1e6 * self.spent_s[kind] / calls:8,.0f} us each, "
            f"{calls / self.spent_s[kind]:>8,.0f} a second"
            for kind, calls in self.calls.items()
        ]


def worked(config: RunFile, num_engines: int, rows_a_part: int) -> list[str]:
    """Work through most of the rows, then let half of the engines ask in vain."""
    with prepared_session(config) as prepared:
        coordinator = Coordinator(prepared.plan, bytes(prepared.row_states))
        stop = int(_SHARE_DONE * prepared.session.rows_total)
        engines, times = [f"w{number}" for number in range(num_engines)], Times()
        published = _work(coordinator, prepared, engines, stop, rows_a_part, times)
        _ask_in_vain(coordinator, engines, times)
    rows_a_s = published / sum(times.spent_s[kind] for kind in ("lease", "publish", "heartbeat"))
    return ["work", *times.lines(), f"  {rows_a_s:,.0f} rows a second through all of these"]


def _work(
    coordinator: Coordinator,
    prepared: Prepared,
    engines: list[str],
    stop: int,
    rows_a_part: int,
    times: Times,
) -> int:
    """Returns the rows published. Engines take turns: heartbeat, leases for a part, the part."""
    published = sequence = 0
    while published < stop:
        for engine in engines:
            sequence += 1
            with times.of("heartbeat"):
                coordinator.heartbeat(report(engine, not_started=0))
            rows: list[tuple[LeaseKey, int]] = []
            while len(rows) < rows_a_part:
                with times.of("lease"):
                    lease = coordinator.lease(engine).lease
                if lease is None:
                    return published
                rows += [(lease.key, row) for row in lease.rows]
            if sequence % _LOST_EVERY == 0:
                coordinator.engine_lost(engine, "lost")
            part = empty_part(prepared, sequence, engine, [row for _, row in rows])
            with times.of("publish"):
                stale = coordinator.publish(part, rows)
            assert len(stale) == (len(rows) if sequence % _LOST_EVERY == 0 else 0)
            published += 0 if stale else len(rows)
            if sequence % 500 == 0:
                with times.of("poll"):
                    coordinator.poll()
    return published


def _ask_in_vain(coordinator: Coordinator, engines: list[str], times: Times) -> None:
    """The last rows are out: half of the engines have some to spare, the others ask for them."""
    busy, idle = engines[::2], engines[1::2]
    leased = True
    while leased:
        leased = all(coordinator.lease(engine).lease is not None for engine in busy)
    for engine in busy:
        coordinator.heartbeat(report(engine, not_started=30))
    for number in range(_IDLE_CALLS):
        with times.of("lease, none left"):
            coordinator.lease(idle[number % len(idle)])


def report(worker_id: str, *, not_started: int) -> WorkerReport:
    return worker_report(
        worker_id,
        engine="sglang",
        engine_release="0.5.23",
        in_flight=64,
        not_started=not_started,
        unflushed=10,
        requests=1000,
        completion_tokens=1_000_000,
    )


def empty_part(prepared: Prepared, sequence: int, worker_id: str, rows: list[int]) -> Part:
    """A part of these rows with nothing in its file, staged."""
    name = f"part-{prepared.plan.session_id}-{worker_id}-{sequence:06d}.parquet"
    (Path(prepared.plan.root) / "staging" / name).touch()
    return Part(
        name=name,
        size_bytes=0,
        row_ids=tuple(row_id(row) for row in rows),
        sample_indexes=(0,) * len(rows),
        content_hashes=tuple(content_hash(row) for row in rows),
        num_errors=0,
        prompt_tokens=0,
        completion_tokens=0,
        worker_id=worker_id,
    )


if __name__ == "__main__":
    sys.exit(main())
