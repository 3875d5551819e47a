"""Lengths of a run's prompts and completions: from a sample, a pilot, or a column.

One pass over the input in constant memory: every prompt is counted, a seeded sample of them is
tokenized.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from statistics import fmean, pstdev

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.dataset.frozen import FrozenPrompts
from pipeline.dataset.prompts import history, read_prompts
from pipeline.errors import ConfigError, PlanError
from pipeline.models.tokenizer import TokenCounter, model_token_counter
from pipeline.planner.lengths.censored import length_estimate, updated_lengths
from pipeline.planner.lengths.lengths import LengthModel, configured_lengths, lengths_from_sample
from pipeline.store.object_store import open_store, place
from schemas.config.run_file import RunFile
from schemas.estimate import InputSize, PromptLengths
from schemas.prompt import Message, Prompt, PromptBounds

_SAMPLED_PROMPTS = 2000
_SEED = 7
# Prompts of the sample up to this length are counted at the end.
_KEPT_CHARACTERS = 64 * 1024
_STRETCHES, _STRETCH_ROWS = 40, 50


def input_size(config: RunFile) -> InputSize:
    """Count the completions to generate, and the prompts' lengths by a seeded sample.

    Raises ConfigError for an input that cannot be read or has no usable prompt.
    """
    sample = _Sample(counter=model_token_counter(config.model))
    bounds = PromptBounds()
    turns = 0
    for prompt in read_prompts(config.prompts).prompts:
        bounds.note(prompt)
        if prompt.problem is None:
            turns += prompt.num_turns
            sample.offer(prompt)
    return InputSize(
        num_completions=turns * config.samples_per_prompt,
        prompts=_prompt_lengths(config, sample),
        longest=bounds.longest,
        budgets=bounds.budgets,
    )


def prompt_bounds(config: RunFile) -> PromptBounds:
    """Return the longest prompts of the input by their number of turns, and the rows' budgets."""
    bounds = PromptBounds()
    for prompt in read_prompts(config.prompts).prompts:
        bounds.note(prompt)
    return bounds


def frozen_size(config: RunFile, frozen: FrozenPrompts) -> InputSize:
    """Estimate the size of a run's frozen prompts from stretches spread over all of them."""
    sample = _Sample(counter=model_token_counter(config.model))
    turns = num_read = 0
    stretches = range(0, frozen.num_rows, max(frozen.num_rows // _STRETCHES, 1))
    for start in stretches:
        for number in range(start, min(start + _STRETCH_ROWS, frozen.num_rows)):
            prompt = frozen.prompt(number)
            num_read += 1
            if prompt.problem is None:
                turns += prompt.num_turns
                sample.offer(prompt)
    lengths = _prompt_lengths(config, sample)
    completions = turns / num_read * frozen.num_rows * config.samples_per_prompt
    return InputSize(
        num_completions=round(completions),
        prompts=lengths,
        longest=frozen.longest,
        budgets=frozen.budgets,
    )


def stated_prompts(mean_tokens: float) -> PromptLengths:
    """Return the prompt length that the run file states."""
    return PromptLengths(
        mean_tokens=mean_tokens, cv=0.0, sampled=0, source="lengths.prompt_tokens_mean"
    )


@dataclass(slots=True, kw_only=True)
class _Sample:
    """Seeded sample of prompts, each with the same probability (Vitter's algorithm R).

    Long prompts are counted at once, so that a sample of them does not stay in memory.
    """

    counter: TokenCounter
    random: Random = field(default_factory=lambda: Random(_SEED))  # noqa: S311 - a sample, no secret
    num_offered: int = 0
    _kept: list[tuple[Message, ...] | int] = field(default_factory=list)

    def offer(self, prompt: Prompt) -> None:
        self.num_offered += 1
        if len(self._kept) < _SAMPLED_PROMPTS:
            self._kept.append(self._text_or_count(prompt))
        elif (index := self.random.randrange(self.num_offered)) < _SAMPLED_PROMPTS:
            self._kept[index] = self._text_or_count(prompt)

    def counts(self) -> list[int]:
        return [kept if isinstance(kept, int) else self.counter.count(kept) for kept in self._kept]

    def _text_or_count(self, prompt: Prompt) -> tuple[Message, ...] | int:
        messages = history(prompt.messages, [])
        is_short = sum(len(message.content) for message in messages) <= _KEPT_CHARACTERS
        return messages if is_short else self.counter.count(messages)


def _prompt_lengths(config: RunFile, sample: _Sample) -> PromptLengths:
    counts = sample.counts()
    if not counts:
        raise ConfigError(f"prompts.path: {config.prompts.path} has no usable prompt")
    mean = fmean(counts)
    return PromptLengths(
        mean_tokens=mean,
        cv=pstdev(counts) / mean if mean else 0.0,
        sampled=len(counts),
        source=f"{len(counts):,} prompts of {config.prompts.path}, {sample.counter.method}",
    )


# --- completions ------------------------------------------------------------------------------


def expected_lengths(
    config: RunFile, pilot: str | None = None, *, limit_tokens: int | None = None
) -> LengthModel:
    """Return the lengths of a pilot, a column, the run file or the prior, in this order."""
    limit = limit_tokens or config.sampling.limit_tokens
    lengths = config.lengths
    if pilot is not None:
        return _pilot_lengths(config, pilot, limit)
    if lengths.output_tokens_column is not None:
        column = lengths.output_tokens_column
        source = f"column {column} of {config.prompts.path}"
        return lengths_from_sample(_column_lengths(config, column), limit, source)
    return _stated_lengths(config, limit)


def _stated_lengths(config: RunFile, limit_tokens: int) -> LengthModel:
    return configured_lengths(
        config.lengths.output_tokens_mean,
        config.lengths.output_tokens_cv,
        thinking=config.thinking,
        limit_tokens=limit_tokens,
        source="lengths section of the run file",
    )


def _pilot_lengths(config: RunFile, pilot: str, limit_tokens: int) -> LengthModel:
    """Return the lengths of a pilot's completions.

    Where the pilot had a lower limit, a length that it cut is a lower bound, and what it hides
    comes from the run file's lengths or the prior.
    """
    turns = list(_pilot_turns(pilot))
    cut = [tokens for tokens, is_cut in turns if is_cut and tokens < limit_tokens]
    if not cut:
        source = f"completions in {pilot}"
        return lengths_from_sample((tokens for tokens, _ in turns), limit_tokens, source)
    ended = [tokens for tokens, is_cut in turns if not is_cut or tokens >= limit_tokens]
    seen = f"{len(cut):,} of {len(turns):,} were cut at the pilot's lower limit"
    source = f"completions in {pilot}; {seen}"
    stated = _stated_lengths(config, limit_tokens)
    estimate = length_estimate(ended, cut, limit_tokens, stated.shape)
    if estimate is None:
        source = f"{stated.summary.source}: too few ended of the {source}"
        return replace(stated, summary=replace(stated.summary, source=source))
    return updated_lengths(stated, estimate, f"{source}, so their length is estimated")


def _pilot_turns(folder: str) -> Iterator[tuple[int, bool]]:
    """Yield the tokens of every turn in a run's published parts, and if a limit ended it."""
    store = open_store(folder)
    names = [
        f"{within}/{entry.name}"
        for within in ("data", ".")
        for entry in store.entries(within)
        if entry.is_file and entry.name.endswith(".parquet")
    ]
    if not names:
        raise PlanError(f"--lengths-from {folder}: no parquet file here or in its data folder")
    published = [name for name in names if name.startswith("data/")]
    for name in published or names:
        file = place(folder, name.removeprefix("./"))
        try:
            with store.open_input(name) as opened:
                column = pq.read_table(opened, columns=["turns"]).column("turns")
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise PlanError(f"--lengths-from {file}: cannot read column turns: {reason}") from None
        if not _has_turns(column.type):
            raise PlanError(
                f"--lengths-from {file}: column turns: found {column.type}, expected a list of "
                "turns with completion_tokens"
            )
        for turns in column.to_pylist():
            yield from _tokens_of(turns)


def _has_turns(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not lists or not pa.types.is_struct(kind.value_type):
        return False
    index = kind.value_type.get_field_index("completion_tokens")
    return index >= 0 and bool(pa.types.is_integer(kind.value_type.field(index).type))


def _tokens_of(turns: Iterable[dict[str, object] | None] | None) -> Iterator[tuple[int, bool]]:
    for turn in turns or ():
        tokens = turn.get("completion_tokens") if turn else None
        if turn and isinstance(tokens, int):
            yield tokens, turn.get("finish_reason") == "length"


def _column_lengths(config: RunFile, column: str) -> Iterator[int]:
    prompts = config.prompts.model_copy(
        update={"keep_columns": [*dict.fromkeys([*config.prompts.keep_columns, column])]}
    )
    for number, prompt in enumerate(read_prompts(prompts).prompts, start=1):
        value = prompt.carried.get(column)
        if value is None:
            continue
        whole = isinstance(value, int | float) and not isinstance(value, bool)
        if not whole or not math.isfinite(value) or value < 0:  # type: ignore[operator,arg-type]  # a number, as checked
            raise ConfigError(
                f"prompts.path: {config.prompts.path} row {number}, column {column}: found "
                f"{value!r}, expected a number of tokens"
            )
        yield round(value)  # type: ignore[call-overload]  # a number, as checked
