"""One row on its way: what is asked next, and what it ends as. Pure.

Invariant: a request holds the source's turns with the regenerated ones in place of the old, up to
the next open place; a completion holds every turn regenerated so far, whatever ended the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from schemas.completion import Completion, Turn
from schemas.config import RunFile
from schemas.manifest import FailedRow
from schemas.prompt import Message, Problem, Prompt, Request, SamplingParams, with_own_seed
from schemas.shard import LeaseKey


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
        sampling=_seeded(row, config, turn_index),
    )


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
        sampling=_seeded(row, config, 0),
        attempt=row.interruptions + 1 if row.started_at_s else 0,
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


def history(
    messages: Sequence[Message], turns: Sequence[Turn], *, with_reasoning: bool = False
) -> tuple[Message, ...]:
    """What is asked next: all up to the first open place, with the turns so far filled in."""
    asked: list[Message] = []
    generated = iter(turns)
    for message in messages:
        if message.role != "assistant":
            asked.append(message)
            continue
        turn = next(generated, None)
        if turn is None:
            break
        reasoning = turn.reasoning_text if with_reasoning else None
        asked.append(replace(message, content=turn.answer_text, reasoning_content=reasoning))
    return tuple(asked)


def conversation(messages: Sequence[Message], turns: Sequence[Turn]) -> tuple[Message, ...]:
    """The regenerated conversation, with every turn's reasoning; open places are left out."""
    return history(messages, turns, with_reasoning=True)


def _seeded(row: Row, config: RunFile, turn_index: int) -> SamplingParams:
    params = SamplingParams(**config.sampling.model_dump())
    return with_own_seed(params, row.prompt.row_id, row.sample_index, turn_index)
