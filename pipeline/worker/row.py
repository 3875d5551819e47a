"""One row on its way: what is asked next, and what it ends as. Pure.

Invariant: a request holds the source's turns with the regenerated ones in place of the old, up to
the next open place; a completion holds every turn regenerated so far, whatever ended the row. A
turn whose flags ask for another try is thrown away, a bounded number of times.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipeline.dataset.prompts import conversation, history
from pipeline.quality.flags import FLAGS, LanguageOf, flags_to_retry, retry_sampling, turn_flags
from schemas.completion import Completion, QualityFlag, Turn
from schemas.config import RunFile
from schemas.manifest import FailedRow
from schemas.prompt import Problem, Prompt, Request, SamplingParams, with_own_seed
from schemas.shard import Lease, LeaseKey


@dataclass(slots=True, kw_only=True)
class Row:
    """A leased row; what is regenerated so far stays with it over retries."""

    key: LeaseKey
    number: int
    prompt: Prompt
    sample_index: int
    turns: list[Turn] = field(default_factory=list)
    tries_of_turn: int = 0
    interruptions: int = 0
    deaths: int = 0
    """Deaths of its engine while it was in flight, here and elsewhere."""
    started_at_s: float = 0.0
    """0 until an engine is asked."""
    flags: set[QualityFlag] = field(default_factory=set)
    """Of the turns so far."""
    quality_retries: int = 0
    retries_of_turn: int = 0
    last_try: tuple[Turn, tuple[QualityFlag, ...]] | None = None
    """Of the open turn, where that is generated again for its flags."""
    next_sampling: SamplingParams | None = None
    """Of the try that follows it."""
    first_sampling: SamplingParams | None = None
    """What the first turn was generated with."""


def rows_of_lease(
    lease: Lease, prompt_of: Callable[[int], Prompt], samples_per_prompt: int
) -> Iterator[Row]:
    """The lease's rows with their prompts, in order."""
    deaths = dict(lease.deaths)
    for number in lease.rows:
        prompt_number, sample_index = divmod(number, samples_per_prompt)
        yield Row(
            key=lease.key,
            number=number,
            prompt=prompt_of(prompt_number),
            sample_index=sample_index,
            deaths=deaths.get(number, 0),
        )


def row_request(row: Row, config: RunFile) -> Request:
    """The request for the row's first open turn."""
    turn_index = len(row.turns)
    return Request(
        row_id=row.prompt.row_id,
        sample_index=row.sample_index,
        turn_index=turn_index,
        messages=history(
            row.prompt.messages, row.turns, with_reasoning=config.reasoning_in_history
        ),
        sampling=row.next_sampling or _seeded(row, config, turn_index),
    )


def take_turn(
    row: Row,
    turn: Turn,
    config: RunFile,
    *,
    context_length: int | None,
    language_of: LanguageOf | None,
) -> None:
    """Keep a generated turn with its flags, or set the row for another try of the same turn."""
    quality, index = config.quality, len(row.turns)
    row.tries_of_turn = 0
    asked = history(row.prompt.messages, row.turns)
    question = next((m.content for m in reversed(asked) if m.role == "user"), "")
    flags = turn_flags(
        turn,
        question=question,
        thinking=config.thinking,
        quality=quality,
        language_of=language_of,
    )
    if flags_to_retry(flags, quality) and row.retries_of_turn + 1 < quality.max_attempts:
        room = None
        if context_length is not None and turn.prompt_tokens is not None:
            room = context_length - turn.prompt_tokens
        again = retry_sampling(
            SamplingParams(**config.sampling.model_dump()),
            flags,
            retry=row.retries_of_turn + 1,
            quality=quality,
            most_tokens=room,
            row=(row.prompt.row_id, row.sample_index, index),
        )
        if again is not None:
            row.next_sampling, row.last_try = again, (turn, flags)
            row.retries_of_turn += 1
            row.quality_retries += 1
            return
    if index == 0:
        row.first_sampling = row.next_sampling
    _keep(row, turn, flags)


def keep_last_try(row: Row) -> bool:
    """Take the turn that was to be bettered, when the better one is refused; False without one.

    A server may refuse a budget that goes beyond a context which it does not tell.
    """
    if row.last_try is None:
        return False
    row.quality_retries -= 1
    _keep(row, *row.last_try)
    return True


def _keep(row: Row, turn: Turn, flags: tuple[QualityFlag, ...]) -> None:
    row.turns.append(turn)
    row.flags.update(flags)
    row.next_sampling, row.last_try, row.retries_of_turn = None, None, 0


def row_completion(
    row: Row,
    problem: Problem | None,
    *,
    config: RunFile,
    engine: str,
    engine_release: str | None,
    plan: str | None,
    worker_id: str,
    now_s: float,
) -> Completion:
    """The row of output that this row ends as: `ok`, or `error` with its problem."""
    is_whole = problem is None
    return Completion(
        row_id=row.prompt.row_id,
        sample_index=row.sample_index,
        messages=conversation(row.prompt.messages, row.turns),
        turns=tuple(row.turns),
        status="ok" if is_whole else "error",
        finish_reason=row.turns[-1].finish_reason if row.turns and is_whole else None,
        error_kind=problem.kind if problem else None,
        error_text=problem.text if problem else None,
        model=config.model,
        thinking=config.thinking,
        engine=engine,
        engine_release=engine_release,
        plan=plan,
        sampling=row.first_sampling or _seeded(row, config, 0),
        attempt=row.interruptions + 1 if row.started_at_s else 0,
        flags=tuple(flag for flag in FLAGS if flag in row.flags),
        quality_retries=row.quality_retries,
        worker_id=worker_id,
        content_hash=row.prompt.content_hash,
        started_at_s=row.started_at_s or now_s,
        finished_at_s=now_s,
        carried=row.prompt.carried,
    )


def failed_row(row: Row, cause: str, *, now_s: float) -> FailedRow:
    """The row as the manifest lists it when it has used up its tries."""
    return FailedRow(
        row_id=row.prompt.row_id,
        sample_index=row.sample_index,
        cause=cause,
        attempts=row.tries_of_turn,
        failed_at_s=now_s,
    )


def over_context(tokens: int, context_length: int) -> Problem | None:
    """What is wrong with a prompt of at least so many tokens, if anything."""
    if tokens < context_length:
        return None
    return Problem(
        kind="over_context",
        text=f"the prompt has at least {tokens} tokens; the engine's context is {context_length}",
    )


def _seeded(row: Row, config: RunFile, turn_index: int) -> SamplingParams:
    params = SamplingParams(**config.sampling.model_dump())
    return with_own_seed(params, row.prompt.row_id, row.sample_index, turn_index)
