"""Time and memory of an export.

usage: python -m tests.benchmarks.export_rows [--rows N] [--row-bytes N] [--format F,F]
                                              [--folder DIR]

Writes a finished run of N rows of the given size, in parts of 500 and not in the order of the
input; texts repeat after 10,000 rows. Then exports it once per format, each in its own process.
Token ids spell the text in a byte-level vocabulary that is written next to the run: `tokens` does
not use it, `checked-tokens` compares each row's ids with its text, and `token-lines` are JSON lines
of rows within a length and without repetitions.

100,000 rows of 10 KB need 4 GB of disk and two minutes, mostly to write the run; 900,000
(`--rows 900000`) need nine times that. `--folder` keeps the run for the next time.
"""

import argparse
import contextlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path

import psutil
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.dataset.columns import completion_table
from pipeline.dataset.frozen import schema_from_text
from pipeline.dataset.parts import publish, stage_table
from pipeline.run.session import Prepared, SessionOptions, prepare
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import RUN_FILE
from schemas.completion import Completion, Turn
from schemas.config.run_file import RunFile
from schemas.prompt import Message, SamplingParams, content_hash

ROOT = Path(__file__).resolve().parents[2]
_PART_ROWS, _DIFFERENT_PARTS = 500, 20
_LETTERS = "abcdefghijklmnop"
_FORMATS = (
    *("messages", "conversations", "rows", "tokens", "checked-tokens"),
    *("specforge", "speculators", "token-lines"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--row-bytes", type=int, default=10_000)
    parser.add_argument("--format", default="messages,tokens,checked-tokens")
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args(argv)
    formats = arguments.format.split(",")
    if unknown := set(formats) - set(_FORMATS):
        parser.error(f"--format: unknown {min(unknown)!r}; known: {', '.join(_FORMATS)}")
    with contextlib.ExitStack() as stack:
        root = arguments.folder
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root.mkdir(parents=True, exist_ok=True)
        folder = LocalFolder(root / "run")
        started_s = time.monotonic()
        if not folder.exists(RUN_FILE):
            write_run(folder, arguments.rows, arguments.row_bytes)
        print(f"run written in {time.monotonic() - started_s:.0f} s")
        for format_ in formats:
            measure(folder, root / "data-set", format_, arguments.rows)
            shutil.rmtree(root / "data-set", ignore_errors=True)
    return 0


def write_run(folder: LocalFolder, num_rows: int, row_bytes: int) -> None:
    prompts = folder.root.parent / "prompts.jsonl"
    with prompts.open("w") as file:
        for number in range(num_rows):
            file.write(f'{{"id": "row-{number:08d}", "prompt": "Question {number}?"}}\n')
    folder.make()
    values = {
        "prompts": {"path": str(prompts), "id_column": "id"},
        "model": "a/model",
        "output": {"folder": str(folder.root)},
    }
    prepared = prepare(
        RunFile.model_validate(values),
        folder,
        SessionOptions(),
        token="t",
        now_s=0.0,
        log=lambda line: None,
    )
    chance = random.Random(1)
    words = ["".join(chance.choices(_LETTERS, k=chance.randint(2, 9))) for _ in range(5000)]
    vocabulary = write_tokenizer(folder.root.parent / "model", words)
    tables = [
        completion_table(
            [completion(n, row_bytes, words, vocabulary, chance) for n in range(_PART_ROWS)],
            schema_from_text(prepared.plan.carried_schema),
        )
        for _ in range(_DIFFERENT_PARTS)
    ]
    starts = list(range(0, num_rows, _PART_ROWS))
    chance.shuffle(starts)
    for start in starts:
        write_part(
            folder, prepared, chance.choice(tables), start, min(start + _PART_ROWS, num_rows)
        )


def write_part(
    folder: LocalFolder, prepared: Prepared, model: pa.Table, start: int, stop: int
) -> None:
    """Publish a part with the texts of `model` under new row ids."""
    ids = pa.array([f"row-{number:08d}" for number in range(start, stop)])
    table = model.slice(0, stop - start).set_column(0, model.schema.field(0), ids)
    name = f"part-{start:09d}.parquet"
    part = stage_table(folder, name, table, run_id=prepared.plan.run_id, worker_id="w0")
    publish(folder, part, now_s=0.0)


def pieces(word: str) -> list[str]:
    """A word with the space before it as tokens, 3.7 bytes each on average."""
    return [f"\u0120{word}"] if len(word) <= 3 else [f"\u0120{word[:3]}", word[3:]]


def write_tokenizer(model: Path, words: list[str]) -> dict[str, int]:
    """A byte-level vocabulary of the words' pieces, as `tokenizer.json`."""
    known = [*pre_tokenizers.ByteLevel.alphabet(), *(p for word in words for p in pieces(word))]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(known))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    model.mkdir(exist_ok=True)
    tokenizer.save(str(model / "tokenizer.json"))
    return vocabulary


def completion(
    number: int, row_bytes: int, words: list[str], vocabulary: dict[str, int], chance: random.Random
) -> Completion:
    """Build a row whose conversation has about `row_bytes` bytes, token ids aside."""
    # A word and its space have 6.5 bytes on average.
    chosen = chance.choices(words, k=row_bytes * 2 // 13)
    cut = len(chosen) * 3 // 4
    reasoning_text, answer_text = " ".join(chosen[:cut]), " ".join(chosen[cut:])
    reasoning, answer = (
        [vocabulary[piece] for word in some for piece in pieces(word)]
        for some in (chosen[:cut], chosen[cut:])
    )
    question = Message(role="user", content=f"Question {number}?")
    turn = Turn(
        reasoning_text=reasoning_text,
        answer_text=answer_text,
        finish_reason="stop",
        prompt_tokens=10,
        completion_tokens=len(reasoning) + len(answer),
        reasoning_tokens=len(reasoning),
        prompt_token_ids=array("i", range(10)),
        completion_token_ids=array("i", [*reasoning, *answer]),
        generation_boundary=10,
        duration_s=1.0,
    )
    said = Message(role="assistant", content=answer_text, reasoning_content=reasoning_text)
    return Completion(
        row_id=f"row-{number:08d}",
        sample_index=0,
        messages=(question, said),
        turns=(turn,),
        status="ok",
        finish_reason="stop",
        error_kind=None,
        error_text=None,
        model="a/model",
        thinking=True,
        engine="sglang",
        engine_release="0.5.23",
        plan="--tp-size 1",
        sampling=_SAMPLING,
        attempt=1,
        flags=("looping",) if number % 50 == 0 else (),
        quality_retries=0,
        worker_id="w0",
        content_hash=content_hash((question,)),
        started_at_s=0.0,
        finished_at_s=1.0,
        carried={},
    )


_SAMPLING = SamplingParams(
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    min_p=None,
    presence_penalty=None,
    repetition_penalty=None,
    max_tokens=4096,
    seed=7,
)


def measure(folder: LocalFolder, dest: Path, format_: str, num_rows: int) -> None:
    command = [sys.executable, "-m", "jobs.export", str(folder.root), "--to", str(dest)]
    command += ["--shuffle", "1", "--format"]
    if format_ == "token-lines":
        command += ["tokens", "--file-type", "jsonl", "--dedup", "--max-tokens", "1000000", "--cut"]
    else:
        command += [format_.removeprefix("checked-")]
    command += ["--split", "train=0.98", "--split", "test=0.02"]
    if format_.startswith("checked-"):
        command += ["--tokenizer", str(folder.root.parent / "model")]
    started_s, cpu_s = time.monotonic(), _cpu_s_of_ended()
    process = subprocess.Popen(command, cwd=ROOT)
    peak = [0]
    thread = threading.Thread(target=_watch, args=(process.pid, peak))
    thread.start()
    code = process.wait()
    thread.join()
    took_s = time.monotonic() - started_s
    print(
        f"{format_}: exit {code} after {took_s:.0f} s, {num_rows / took_s:,.0f} rows/s, "
        f"{_cpu_s_of_ended() - cpu_s:.0f} s of CPU, "
        f"peak memory {peak[0] / 2**20:,.0f} MiB",
        flush=True,
    )


def _cpu_s_of_ended() -> float:
    """CPU seconds of all child processes: a busy machine changes them less than the time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _watch(pid: int, peak: list[int]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        while True:
            peak[0] = max(peak[0], psutil.Process(pid).memory_info().rss)
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
