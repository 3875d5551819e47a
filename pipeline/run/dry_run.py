"""The dry run: read and check the whole input; start and write nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from pipeline.dataset.done_rows import DoneRows
from pipeline.dataset.prompts import history, read_prompts
from pipeline.dataset.run_record import check_columns, check_identity, read_manifest, read_run
from pipeline.engines.served import token_counter
from pipeline.errors import ConfigError
from pipeline.run.ledger import DONE
from pipeline.run.session import run_identity
from pipeline.run_file import given_context_tokens
from pipeline.store.folder import Folder
from schemas.config import RunFile
from schemas.prompt import Prompt

_BATCH_ROWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Counts of the whole input."""

    column: str
    shape: str
    rows_total: int
    """Prompts times samples."""
    rows_done: int
    turns: int
    prompt_tokens: int
    """Tokens of the first request of every row without a problem."""
    token_method: str
    context_tokens: int | None
    """Context length of the engines, if the run file gives it."""
    prompts_without_room: int
    """Prompts that exceed the context together with `sampling.max_tokens`."""
    problems: dict[str, tuple[int, str]]
    """Kind of problem → number of prompts, and the text of one."""


def dry_run(config: RunFile, folder: Folder) -> DryRun:
    """Count the input. Raises ConfigError for a bad one, ResumeError for another run's folder."""
    stream = read_prompts(config.prompts)
    columns, record = stream.columns, read_run(folder)
    done = DoneRows.of(())
    if record is not None:
        check_columns(record)
        identity = run_identity(config, columns)
        check_identity(record, identity, accept_drift=False)
        done = DoneRows.of(tuple(read_manifest(folder).parts.values()))
    counter = token_counter(config)
    problems: dict[str, tuple[int, str]] = {}
    context_tokens = given_context_tokens(config)
    num_prompts = turns = prompt_tokens = without_room = 0
    ids: list[tuple[pa.Array, pa.Array]] = []
    for batch in _batches(stream.prompts):
        ids.append(_ids(batch))
        for prompt in batch:
            num_prompts += 1
            if prompt.problem is not None:
                count, example = problems.get(prompt.problem.kind, (0, prompt.problem.text))
                problems[prompt.problem.kind] = (count + 1, example)
                continue
            turns += prompt.num_turns
            tokens = counter.count(history(prompt.messages, []))
            prompt_tokens += tokens
            if context_tokens is not None:
                without_room += tokens + config.sampling.max_tokens > context_tokens
    if not num_prompts:
        raise ConfigError(f"prompts.path: {config.prompts.path} has no rows")
    samples = config.samples_per_prompt
    states = bytearray(num_prompts * samples)
    rows_done, _ = done.mark(iter(ids), states, samples=samples, done=DONE)
    return DryRun(
        column=columns.column,
        shape=columns.shape,
        rows_total=num_prompts * samples,
        rows_done=rows_done,
        turns=turns * samples,
        prompt_tokens=prompt_tokens * samples,
        token_method=counter.method,
        context_tokens=context_tokens,
        prompts_without_room=without_room,
        problems=problems,
    )


def _batches(prompts: Iterator[Prompt]) -> Iterator[list[Prompt]]:
    batch: list[Prompt] = []
    for prompt in prompts:
        batch.append(prompt)
        if len(batch) == _BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _ids(batch: list[Prompt]) -> tuple[pa.Array, pa.Array]:
    row_ids = pa.array([prompt.row_id for prompt in batch], pa.string())
    return row_ids, pa.array([prompt.content_hash for prompt in batch], pa.string())
