"""A leased row: its next request, and the completion it ends as. Pure.

Invariant: a request contains the source's turns, with the regenerated ones in place of the old, up
to the next open turn; a completion contains every turn regenerated so far, whatever ended the row.
A turn whose flags ask for a retry is thrown away, a bounded number of times.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pipeline.dataset.prompts import conversation, history
from pipeline.quality.flags import FLAGS, LanguageOf, flags_to_retry, retry_sampling, turn_flags
from pipeline.worker.ports import Engine
from schemas.begun import BegunRow, FlaggedTurn
from schemas.completion import Completion, QualityFlag, Turn
from schemas.config.run_file import RunFile
from schemas.manifest import FailedRow
from schemas.partial import Continuation, PartialTurn
from schemas.prompt import (
    Problem,
    Prompt,
    Request,
    SamplingParams,
    continued_seed,
    tools_text,
    with_own_seed,
)
from schemas.shard import Lease, LeaseKey


@dataclass(slots=True, kw_only=True)
class Row:
    """A leased row with the turns regenerated so far, which survive retries."""

    key: LeaseKey
    number: int
    prompt: Prompt
    sample_index: int
    is_canary: bool = False
    turns: list[Turn] = field(default_factory=list)
    so_far: PartialTurn | None = None
    """First part of the open turn, which is generated on from there."""
    attempts_at_turn: int = 0
    interruptions: int = 0
    deaths: int = 0
    """Engine deaths while the row was in flight, in this and other workers."""
    started_at_s: float = 0.0
    """Time of the first request; 0 before it."""
    flags: set[QualityFlag] = field(default_factory=set)
    """Flags of the turns so far."""
    quality_retries: int = 0
    quality_retries_of_turn: int = 0
    flagged_turn: tuple[Turn, tuple[QualityFlag, ...]] | None = None
    """The open turn's last generation and its flags, for which it is generated again."""
    next_sampling: SamplingParams | None = None
    """Sampling of the next generation of a flagged turn."""
    first_sampling: SamplingParams | None = None
    """Sampling of the first turn, where it was generated again."""

    @property
    def has_begun(self) -> bool:
        """Tell if some of the row was generated before this worker has sent it."""
        return bool(self.turns) or self.so_far is not None

    @property
    def has_open_turns(self) -> bool:
        """Tell if another turn is to be generated.

        A call that the model chose ends the conversation, since the source has no result for it;
        later turns that see the source's own answers do not depend on it.
        """
        if len(self.turns) == self.prompt.num_turns:
            return False
        has_called = bool(self.turns and self.turns[-1].tool_calls)
        return not has_called or self.prompt.originals is not None


def rows_of_lease(
    lease: Lease, prompt_of: Callable[[int], Prompt], samples_per_prompt: int
) -> Iterator[Row]:
    """Yield the lease's rows with their prompts, in order."""
    deaths = dict(lease.deaths)
    for number in lease.rows:
        prompt_number, sample_index = divmod(number, samples_per_prompt)
        yield Row(
            key=lease.key,
            number=number,
            prompt=prompt_of(prompt_number),
            sample_index=sample_index,
            deaths=deaths.get(number, 0),
            is_canary=lease.is_canary,
        )


def begun_row(row: Row) -> BegunRow:
    """Return what is kept of a row."""
    flagged = row.flagged_turn
    return BegunRow(
        row_id=row.prompt.row_id,
        sample_index=row.sample_index,
        content_hash=row.prompt.content_hash,
        started_at_s=row.started_at_s,
        turns=tuple(row.turns),
        so_far=row.so_far,
        interruptions=row.interruptions,
        flags=tuple(sorted(row.flags)),
        quality_retries=row.quality_retries,
        quality_retries_of_turn=row.quality_retries_of_turn,
        flagged_turn=FlaggedTurn(turn=flagged[0], flags=flagged[1]) if flagged else None,
        next_sampling=row.next_sampling,
        first_sampling=row.first_sampling,
    )


def resume_row(row: Row, begun: BegunRow) -> None:
    """Put a row where it was when its engine was stopped."""
    flagged = begun.flagged_turn
    row.started_at_s = begun.started_at_s
    row.turns, row.so_far = list(begun.turns), begun.so_far
    row.interruptions, row.flags = begun.interruptions, set(begun.flags)
    row.quality_retries = begun.quality_retries
    row.quality_retries_of_turn = begun.quality_retries_of_turn
    row.flagged_turn = (flagged.turn, flagged.flags) if flagged else None
    row.next_sampling, row.first_sampling = begun.next_sampling, begun.first_sampling


def row_request(row: Row, config: RunFile, worker_id: str) -> Request:
    """Build the request for the row's first open turn, or for the rest of it."""
    turn_index, so_far = len(row.turns), row.so_far
    sampling = row.next_sampling or _seeded(row, config, turn_index)
    if so_far is not None:
        place = Continuation(at_token=so_far.num_tokens, worker_id=worker_id)
        sampling = continued_seed(sampling, so_far.num_tokens)
        so_far = replace(so_far, continued=(*so_far.continued, place))
    return Request(
        row_id=row.prompt.row_id,
        sample_index=row.sample_index,
        turn_index=turn_index,
        messages=history(
            row.prompt.messages,
            row.turns,
            with_reasoning=config.reasoning_in_history,
            originals=row.prompt.originals,
        ),
        sampling=sampling,
        settings=row.prompt.settings,
        tools=row.prompt.tools,
        continues=so_far,
    )


def add_or_retry_turn(
    row: Row,
    turn: Turn,
    config: RunFile,
    *,
    context_length: int | None,
    language_of: LanguageOf | None,
) -> None:
    """Keep a generated turn with its flags, or prepare the row to generate it again."""
    quality, index = config.quality, len(row.turns)
    row.attempts_at_turn, row.so_far = 0, None
    messages = history(row.prompt.messages, row.turns, originals=row.prompt.originals)
    question = next((m.content for m in reversed(messages) if m.role == "user"), "")
    flags = turn_flags(
        turn,
        question=question,
        thinking=_thinks(row, config),
        quality=quality,
        language_of=language_of,
    )
    if flags_to_retry(flags, quality) and row.quality_retries_of_turn + 1 < quality.max_attempts:
        room = None
        if context_length is not None and turn.prompt_tokens is not None:
            room = context_length - turn.prompt_tokens
        again = retry_sampling(
            _sampling(row, config),
            flags,
            retry=row.quality_retries_of_turn + 1,
            quality=quality,
            most_tokens=room,
            row=(row.prompt.row_id, row.sample_index, index),
        )
        if again is not None:
            row.next_sampling, row.flagged_turn = again, (turn, flags)
            row.quality_retries_of_turn += 1
            row.quality_retries += 1
            return
    if index == 0:
        row.first_sampling = row.next_sampling
    _keep(row, turn, flags)


def keep_flagged_turn(row: Row) -> bool:
    """Keep the flagged turn after its next generation was refused. Return False without one.

    A server may refuse a token budget beyond a context length that it does not report.
    """
    if row.flagged_turn is None:
        return False
    row.quality_retries -= 1
    _keep(row, *row.flagged_turn)
    return True


def _keep(row: Row, turn: Turn, flags: tuple[QualityFlag, ...]) -> None:
    row.turns.append(turn)
    row.flags.update(flags)
    row.next_sampling, row.flagged_turn, row.quality_retries_of_turn = None, None, 0


def row_completion(
    row: Row,
    problem: Problem | None,
    *,
    config: RunFile,
    engine: Engine,
    worker_id: str,
    now_s: float,
) -> Completion:
    """Build the row of output: `ok`, or `error` with its problem."""
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
        thinking=_thinks(row, config),
        engine=engine.name,
        engine_release=engine.release,
        plan=engine.plan,
        sampling=row.first_sampling or _seeded(row, config, 0),
        attempt=row.interruptions + 1 if row.started_at_s else 0,
        flags=tuple(flag for flag in FLAGS if flag in row.flags),
        quality_retries=row.quality_retries,
        worker_id=worker_id,
        content_hash=row.prompt.content_hash,
        started_at_s=row.started_at_s or now_s,
        finished_at_s=now_s,
        tools=tools_text(row.prompt.tools),
        tool_calls=row.turns[-1].tool_calls if row.turns and is_whole else None,
        carried=row.prompt.carried,
    )


def failed_row(row: Row, cause: str, *, now_s: float) -> FailedRow:
    """Build the manifest's entry of a row that has used up its attempts."""
    return FailedRow(
        row_id=row.prompt.row_id,
        sample_index=row.sample_index,
        cause=cause,
        attempts=row.attempts_at_turn,
        failed_at_s=now_s,
    )


def over_context(num_tokens: int, context_length: int) -> Problem | None:
    """Return the problem of a prompt of at least `num_tokens`, or None when it fits."""
    if num_tokens < context_length:
        return None
    return Problem(
        kind="over_context",
        text=(
            f"the prompt has at least {num_tokens} tokens; the engine's context is {context_length}"
        ),
    )


def engine_killed(row: Row, cause: str) -> Problem:
    """Return the problem of a row that was alone in flight when its engine died again."""
    died = f"the engine died {row.deaths + 1} times with this row in flight"
    return Problem(kind="engine_killed", text=f"{died}, at last of: {cause}")


def _thinks(row: Row, config: RunFile) -> bool:
    own = row.prompt.settings.thinking
    return config.thinking if own is None else own


def _sampling(row: Row, config: RunFile) -> SamplingParams:
    """Return the run's sampling with the row's own settings in it."""
    own = row.prompt.settings
    params = SamplingParams.of(config.sampling)
    return replace(
        params,
        temperature=params.temperature if own.temperature is None else own.temperature,
        max_tokens=own.max_tokens or params.max_tokens,
    )


def _seeded(row: Row, config: RunFile, turn_index: int) -> SamplingParams:
    params = _sampling(row, config)
    return with_own_seed(params, row.prompt.row_id, row.sample_index, turn_index)
