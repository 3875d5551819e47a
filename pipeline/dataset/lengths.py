"""How long a run's prompts and completions are: counted from a sample, a pilot, or a column.

One pass over the input, flat in memory: every prompt is counted as one, a seeded sample of them in
tokens.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from statistics import fmean, pstdev

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.dataset.frozen import FrozenPrompts, note_longest
from pipeline.dataset.prompts import history, read_prompts
from pipeline.errors import ConfigError, PlanError
from pipeline.models.tokenizer import model_token_counter
from pipeline.planner.lengths.lengths import LengthModel, configured_lengths, lengths_from_sample
from pipeline.store.object_store import open_store, place
from schemas.config import RunFile
from schemas.estimate import InputSize, PromptLengths
from schemas.prompt import Longest, Message

_SAMPLED_PROMPTS = 2000
_SEED = 7
_STRETCHES, _STRETCH_ROWS = 40, 50


def input_size(config: RunFile) -> InputSize:
    """Completions to generate, and the prompts' lengths by a seeded sample.

    Raises ConfigError for an input that cannot be read or has no prompt to ask.
    """
    random = Random(_SEED)  # noqa: S311 - a sample, no secret
    kept: list[tuple[Message, ...]] = []
    longest: dict[int, int] = {}
    asked = turns = 0
    for prompt in read_prompts(config.prompts).prompts:
        if prompt.problem is not None:
            continue
        asked += 1
        turns += prompt.num_turns
        note_longest(longest, prompt)
        # Each prompt so far has the same chance to be in the sample (Vitter's algorithm R).
        if len(kept) < _SAMPLED_PROMPTS:
            kept.append(history(prompt.messages, []))
        elif (place := random.randrange(asked)) < _SAMPLED_PROMPTS:
            kept[place] = history(prompt.messages, [])
    if not asked:
        raise ConfigError(f"prompts.path: {config.prompts.path} has no prompt that can be asked")
    return InputSize(
        num_completions=turns * config.samples_per_prompt,
        prompts=_counted(config, kept),
        longest=tuple(sorted(longest.items())),
    )


def longest_prompts(config: RunFile) -> Longest:
    """The same of an input of which nothing else is asked."""
    longest: dict[int, int] = {}
    for prompt in read_prompts(config.prompts).prompts:
        note_longest(longest, prompt)
    return tuple(sorted(longest.items()))


def frozen_size(config: RunFile, frozen: FrozenPrompts) -> InputSize:
    """The same of prompts that a run has frozen, by stretches of them spread over the whole."""
    kept: list[tuple[Message, ...]] = []
    turns = looked_at = 0
    stretches = range(0, frozen.num_rows, max(frozen.num_rows // _STRETCHES, 1))
    for start in stretches:
        for number in range(start, min(start + _STRETCH_ROWS, frozen.num_rows)):
            prompt = frozen.prompt(number)
            looked_at += 1
            if prompt.problem is None:
                turns += prompt.num_turns
                kept.append(history(prompt.messages, []))
    if not kept:
        raise ConfigError(f"prompts.path: {config.prompts.path} has no prompt that can be asked")
    completions = turns / looked_at * frozen.num_rows * config.samples_per_prompt
    return InputSize(
        num_completions=round(completions),
        prompts=_counted(config, kept),
        longest=frozen.longest,
    )


def stated_prompts(mean_tokens: float) -> PromptLengths:
    """The run file's word."""
    return PromptLengths(
        mean_tokens=mean_tokens, cv=0.0, sampled=0, source="lengths.prompt_tokens_mean"
    )


def _counted(config: RunFile, kept: list[tuple[Message, ...]]) -> PromptLengths:
    counter = model_token_counter(config.model)
    counts = [counter.count(messages) for messages in kept]
    mean = fmean(counts)
    return PromptLengths(
        mean_tokens=mean,
        cv=pstdev(counts) / mean if mean else 0.0,
        sampled=len(counts),
        source=f"{len(counts):,} prompts of {config.prompts.path}, {counter.method}",
    )


# --- completions ------------------------------------------------------------------------------


def expected_lengths(
    config: RunFile, pilot: str | None = None, *, limit_tokens: int | None = None
) -> LengthModel:
    """A pilot's completions, a column, the run file's word, or the prior: the first there is."""
    limit = limit_tokens or config.sampling.max_tokens
    lengths = config.lengths
    if pilot is not None:
        written = list(_pilot_turns(pilot))
        source = f"completions in {pilot}{_cut_short(written, limit)}"
        return lengths_from_sample((tokens for tokens, _ in written), limit, source)
    if lengths.output_tokens_column is not None:
        column = lengths.output_tokens_column
        source = f"column {column} of {config.prompts.path}"
        return lengths_from_sample(_column_lengths(config, column), limit, source)
    return configured_lengths(
        lengths.output_tokens_mean,
        lengths.output_tokens_cv,
        thinking=config.thinking,
        limit_tokens=limit,
        source="lengths section of the run file",
    )


def _pilot_turns(folder: str) -> Iterator[tuple[int, bool]]:
    """Tokens of every regenerated turn in a run's published parts, and whether a limit ended it."""
    store = open_store(folder)
    names = [
        f"{within}/{entry.name}"
        for within in ("data", ".")
        for entry in store.entries(within)
        if entry.is_file and entry.name.endswith(".parquet")
    ]
    if not names:
        raise PlanError(f"--lengths-from {folder}: no parquet file in it or in its data folder")
    published = [name for name in names if name.startswith("data/")]
    for name in published or names:
        file = place(folder, name.removeprefix("./"))
        try:
            with store.open_input(name) as opened:
                column = pq.read_table(opened, columns=["turns"]).column("turns")
        except (OSError, ValueError) as error:
            said = str(error).splitlines()[0]
            raise PlanError(f"--lengths-from {file}: cannot read column turns: {said}") from None
        if not _holds_turns(column.type):
            raise PlanError(
                f"--lengths-from {file}: column turns: found {column.type}; a list of turns with "
                "completion_tokens was expected"
            )
        for turns in column.to_pylist():
            yield from _counts(turns)


def _holds_turns(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not lists or not pa.types.is_struct(kind.value_type):
        return False
    place = kind.value_type.get_field_index("completion_tokens")
    return place >= 0 and bool(pa.types.is_integer(kind.value_type.field(place).type))


def _counts(turns: Iterable[dict[str, object] | None] | None) -> Iterator[tuple[int, bool]]:
    for turn in turns or ():
        tokens = turn.get("completion_tokens") if turn else None
        if turn and isinstance(tokens, int):
            yield tokens, turn.get("finish_reason") == "length"


def _cut_short(written: Sequence[tuple[int, bool]], limit_tokens: int) -> str:
    """A pilot with a lower limit does not say how long its completions would have been."""
    cut = sum(ended and tokens < limit_tokens for tokens, ended in written)
    if not cut:
        return ""
    return (
        f"; {cut:,} of {len(written):,} were ended by the pilot's own lower limit, so that the "
        "true mean is higher"
    )


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
                f"{value!r}; a number of tokens was expected"
            )
        yield round(value)  # type: ignore[call-overload]  # a number, as checked
