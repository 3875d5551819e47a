"""Run folder with all that a report reads, written by the code of a real run.

Three engines over some hours: one restarts and steps down, rows come with flags, the last session
goes on. Deterministic.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pyarrow as pa

from pipeline.dataset.parts import publish
from pipeline.dataset.run_record import list_in_manifest, write_run, write_run_file
from pipeline.store.folder import LocalFolder
from pipeline.store.journal import append_events, event_of
from pipeline.store.run_folder import LIVE_FILE, READINGS_FILE
from schemas.completion import Completion, QualityFlag, Turn
from schemas.config.run_file import RunFile
from schemas.estimate import Band, LiveReading
from schemas.manifest import CanaryEvent, FailedRow, RunIdentity, RunRecord, Session
from schemas.progress import Progress, TimeLeft, WorkerReport
from schemas.prompt import Message, SamplingParams
from schemas.units import SECONDS_PER_DAY
from tests.fakes.staged_part import stage_part

BEGAN_AT_S = 1_790_000_000.0
LIMIT = 4096
_SAMPLING = SamplingParams(
    temperature=0.6, top_p=0.95, top_k=20, min_p=None, presence_penalty=None,
    repetition_penalty=None, max_tokens=LIMIT, seed=7,
)  # fmt: skip


def write_example_run(
    folder: LocalFolder, *, num_parts: int = 60, rows_a_part: int = 8, part_s: float = 120.0,
    rows_total: int = 1000, state: str = "running", num_engines: int = 3,
    error_parts: Collection[int] = (),
) -> float:  # fmt: skip
    """Fill the folder, and return the time of its last part.

    Parts of `error_parts` have an error row.
    """
    random = Random(5)
    engines = [f"w{number}" for number in range(num_engines)]
    folder.make()
    write_run(
        folder,
        RunRecord(
            run_id="run-1",
            created_at_s=BEGAN_AT_S,
            identity=RunIdentity(settings={}),
            carried_schema="",
        ),
    )
    write_run_file(folder, run_file(folder.root))
    list_in_manifest(folder, _session(rows_total))
    list_in_manifest(folder, _canary("begun", 1.0))
    list_in_manifest(folder, _canary("passed", 4 * part_s))
    now_s = BEGAN_AT_S
    for number in range(num_parts):
        now_s = BEGAN_AT_S + (number + 1) * part_s
        place = number % num_engines
        worker = engines[place] + ("r1" if place == 1 and number > num_parts / 2 else "")
        rows = [_row(f"p{number}-{n}", worker, now_s, random) for n in range(rows_a_part)]
        if number in error_parts:
            rows[0] = _error_row(rows[0])
        part = stage_part(
            folder, f"{number:05d}.parquet", rows,
            run_id="run-1", carried_schema=pa.schema([("category", pa.string())]), worker_id=worker,
        )  # fmt: skip
        publish(folder, part, now_s=now_s)
    failed = FailedRow(
        row_id="hard", sample_index=0, cause="HTTP 503", attempts=6, failed_at_s=now_s
    )
    list_in_manifest(folder, failed)
    row_s = part_s / rows_a_part
    _write_readings(folder, engines, num_parts * part_s, rows_total * row_s, random)
    _write_events(folder, engines, num_parts * part_s)
    open_rows = rows_total - num_parts * rows_a_part
    _write_live(folder, engines, now_s, state, _days_left(open_rows * row_s))
    return now_s


def run_file(root: Path) -> RunFile:
    return RunFile.model_validate(
        {
            "prompts": {"path": "p.parquet", "keep_columns": ["category"]},
            "model": "Qwen/Qwen3.6-27B",
            "sampling": {"max_tokens": LIMIT},
            "engine": {
                "kind": "sglang", "python": "python", "count": 3, "max_running_requests": 48,
            },
            "lengths": {
                "output_tokens_mean": 1400, "output_tokens_cv": 0.9, "prompt_tokens_mean": 90,
            },
            "estimate": {"accept_length": 2.6},
            "hardware": [{"gpu": "b200", "count": 3, "usd_per_gpu_hour": 4.2}],
            "output": {"folder": str(root), "flush_interval_s": 120},
        }
    )  # fmt: skip


def _session(rows_total: int) -> Session:
    return Session(
        session_id="s1", started_at_s=BEGAN_AT_S, rows_total=rows_total, rows_done=0, rows_error=0,
        rows_outside_input=0,
    )  # fmt: skip


def _canary(verdict: str, after_s: float) -> CanaryEvent:
    return CanaryEvent(
        session_id="s1", verdict=verdict, settings="f", shares={}, at_s=BEGAN_AT_S + after_s  # type: ignore[arg-type]
    )  # fmt: skip


def _row(row_id: str, worker: str, finished_at_s: float, random: Random) -> Completion:
    reasoning = min(int(random.lognormvariate(6.6, 0.8)), LIMIT)
    answer = min(int(random.lognormvariate(5.6, 0.6)), LIMIT - reasoning)
    is_cut = reasoning + answer >= LIMIT
    took_s = (reasoning + answer) * 0.045 + random.uniform(0, 20)
    flags: tuple[QualityFlag, ...] = ("looping",) if random.random() < 0.05 else ()
    number = random.randrange(2, 1000)
    thought = " ".join(
        f"Is {n} a factor of {number}?" for n in range(2, min(2 + reasoning // 9, 300))
    )
    said = "" if is_cut else f"{number} is {_factors(number)}."
    turn = Turn(
        reasoning_text=thought, answer_text=said, finish_reason="length" if is_cut else "stop",
        prompt_tokens=90, completion_tokens=reasoning + answer, reasoning_tokens=reasoning,
        prompt_token_ids=None, completion_token_ids=None, generation_boundary=None,
        duration_s=took_s,
    )  # fmt: skip
    return Completion(
        row_id=row_id, sample_index=0,
        messages=(
            Message(role="user", content=f"Which primes is {number} the product of?"),
            Message(role="assistant", content=said, reasoning_content=thought),
        ),
        turns=(turn,), status="ok",
        finish_reason=turn.finish_reason, error_kind=None, error_text=None, model="m",
        thinking=True, engine="sglang", engine_release="0.5.23", plan=None, attempt=1,
        sampling=_SAMPLING,
        flags=("cut_in_thinking",) if is_cut else flags, quality_retries=0,
        worker_id=worker, content_hash="0" * 16,
        started_at_s=finished_at_s - took_s, finished_at_s=finished_at_s,
        carried={"category": random.choice(["code", "maths", "chat"])},
    )  # fmt: skip


def _factors(number: int) -> str:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return " x ".join(map(str, factors))


def _error_row(row: Completion) -> Completion:
    """Return a row that the engine refused, of the same prompt."""
    return replace(
        row, messages=row.messages[:1], turns=(), status="error", finish_reason=None, flags=(),
        error_kind="refused_by_engine", error_text="HTTP 400: the prompt is too long",
    )  # fmt: skip


def _days_left(seconds: float) -> Band:
    days = seconds / SECONDS_PER_DAY
    return Band(p10=0.9 * days, p50=days, p90=1.1 * days)


def _write_readings(
    folder: LocalFolder, engines: list[str], span_s: float, whole_s: float, random: Random
) -> None:
    config = run_file(folder.root).model_dump(mode="json")
    records: list[dict[str, object]] = [
        {"record": "run", "began_at_s": BEGAN_AT_S, "run_file": config},
        {
            "record": "lengths",
            "finished": [[900, 300], [1900, 180]],
            "running": {"w0": [[500, 44]]},
        },
    ]
    for number in range(1, 21):
        at_s = span_s * number / 20
        noted = TimeLeft(at_s=at_s, days=_days_left(whole_s - at_s))
        records.append({"record": "time_left", **asdict(noted)})
    for place, engine in enumerate(engines):
        start_s = 40.0 + 25 * place
        while start_s < span_s:
            is_down = place == 1 and 0.5 * span_s < start_s < 0.58 * span_s
            cap = 32 if place == 1 and start_s >= 0.5 * span_s else 48
            reading = LiveReading(
                engine=engine, start_s=start_s, end_s=min(start_s + 60, span_s),
                engine_age_s=start_s,
                cap_requests=cap, running_requests=cap * random.uniform(0.9, 0.99),
                tokens_per_s=cap * random.uniform(24, 27), prompt_tokens_per_s=400.0,
                accept_length=random.uniform(2.35, 2.6),
            )  # fmt: skip
            if not is_down:
                records.append({"record": "reading", **asdict(reading)})
            start_s += 60
    lines = "".join(json.dumps(record) + "\n" for record in records)
    folder.write_whole(READINGS_FILE, lines.encode())


def _write_events(folder: LocalFolder, engines: list[str], span_s: float) -> None:
    lines = [(40.0 + 25 * n, f"event=engine_ready worker={e}") for n, e in enumerate(engines)]
    lines += [
        (0.50 * span_s, "event=engine_lost worker=w1 cause='CUDA out of memory <runtime>'"),
        (0.51 * span_s, "event=step_down cause=runtime change='32 requests' worker=w1"),
        (0.58 * span_s, "event=engine_ready worker=w1r1"),
    ]  # fmt: skip
    events = (event_of(line, now_s=BEGAN_AT_S + at_s) for at_s, line in lines)
    append_events(folder, [event for event in events if event is not None])


def _write_live(
    folder: LocalFolder, engines: list[str], now_s: float, state: str, days_left: Band
) -> None:
    worker = WorkerReport(
        worker_id="w0", state="running", engine="sglang", engine_release="0.5.23", in_flight=44,
        not_started=9, backing_off=0, unflushed=3, requests=900, interruptions=1, restarts=0,
        completion_tokens=0, last_cause=None,
    )  # fmt: skip
    live = Progress(
        session_id="s1", updated_at_s=now_s, state=state, rows_total=0, rows_done=0, rows_failed=0,  # type: ignore[arg-type]
        rows_error=0, completion_tokens=0, last_publish_s=now_s, leases_lost=0,
        workers=tuple(
            replace(worker, worker_id=f"{engine}r1" if engine == "w1" else engine)
            for engine in engines
        ),
        days_left=days_left,
    )  # fmt: skip
    folder.write_whole(LIVE_FILE, live.to_json().encode())
