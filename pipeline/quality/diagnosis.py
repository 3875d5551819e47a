"""What the canary found, in examples and likely causes, and the budget that would do. Pure.

Causes are guesses from what rows show beside what was asked for; each says what to change. Lengths
that were cut are known only to be longer: budgets come from a log-normal fitted to both kinds.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from pipeline.models.thinking import FAMILIES, family, template_kwargs
from pipeline.planner.lengths.log_normal_fit import log_normal_fit
from pipeline.quality.canary import ERROR_ROWS, MEAN_TOKENS, Excess
from schemas.config import RunFile

_EXAMPLES_PER_FLAG = 3
_EXAMPLE_CHARACTERS = 160
_FEWEST_WHOLE_TURNS = 10
_MOSTLY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row that a limit is over by, cut short."""

    row_id: str
    question: str
    reasoning: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The `max_tokens` that would hold so many of all completions whole."""

    tokens_95: int
    tokens_99: int
    num_whole: int
    num_cut: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What stopped the canary."""

    num_rows: int
    excesses: tuple[Excess, ...]
    examples: dict[str, tuple[Example, ...]]
    budgets: Budgets | None
    causes: tuple[str, ...]


def diagnosis(
    excesses: Sequence[Excess], rows: Iterable[Mapping[str, Any]], config: RunFile
) -> Diagnosis:
    """`rows` are the canary's, as published."""
    seen = list(rows)
    budgets = budgets_of(seen)
    return Diagnosis(
        num_rows=len(seen),
        excesses=tuple(excesses),
        examples={excess.name: _examples(excess.name, seen) for excess in excesses},
        budgets=budgets,
        causes=tuple(_causes({excess.name for excess in excesses}, seen, budgets, config)),
    )


# -- examples


def _examples(name: str, rows: list[Mapping[str, Any]]) -> tuple[Example, ...]:
    chosen = [row for row in rows if _bears(row, name)][:_EXAMPLES_PER_FLAG]
    return tuple(_example(row) for row in chosen)


def _bears(row: Mapping[str, Any], name: str) -> bool:
    if name == MEAN_TOKENS:
        return True
    return row["status"] == "error" if name == ERROR_ROWS else name in row["flags"]


def _example(row: Mapping[str, Any]) -> Example:
    last = row["turns"][-1] if row["turns"] else {"reasoning_text": "", "answer_text": ""}
    asked = [message["content"] for message in row["messages"] if message["role"] == "user"]
    answer = row["error_text"] if row["status"] == "error" else last["answer_text"]
    return Example(
        row_id=row["row_id"],
        question=_cut(asked[-1] if asked else ""),
        reasoning=_cut(last["reasoning_text"] or ""),
        answer=_cut(answer or ""),
    )


def _cut(text: str) -> str:
    """In one line; of a long text its beginning and its end, where loops and cuts show."""
    line = " ".join(text.split())
    if len(line) <= _EXAMPLE_CHARACTERS:
        return line
    half = _EXAMPLE_CHARACTERS // 2
    return f"{line[:half]} [...] {line[-half:]}"


# -- budgets


def budgets_of(rows: Iterable[Mapping[str, Any]]) -> Budgets | None:
    """None where nothing was cut, nothing was counted, or too few turns ended by themselves.

    A turn that loops would never have ended: its length says nothing of the others'.
    """
    whole: Counter[int] = Counter()
    cut: Counter[int] = Counter()
    for row in rows:
        for turn in row["turns"]:
            tokens = turn["completion_tokens"]
            if not tokens or "looping" in row["flags"]:
                continue
            (cut if turn["finish_reason"] == "length" else whole)[tokens] += 1
    if not cut or whole.total() < _FEWEST_WHOLE_TURNS:
        return None
    fit = log_normal_fit(sorted(whole.items()), sorted(cut.items()))
    if fit is None:
        return None
    lengths = NormalDist(fit.mu, fit.sigma)
    tokens_95, tokens_99 = (math.ceil(math.exp(lengths.inv_cdf(share))) for share in (0.95, 0.99))
    return Budgets(
        tokens_95=tokens_95, tokens_99=tokens_99, num_whole=whole.total(), num_cut=cut.total()
    )


# -- causes


def _causes(
    names: set[str], rows: list[Mapping[str, Any]], budgets: Budgets | None, config: RunFile
) -> Iterable[str]:
    if names & {"cut_in_thinking", "cut_in_answer"}:
        yield _why_cut(rows, budgets, config)
    if "empty_reasoning" in names:
        yield _why_no_thinking(rows, config)
    if "thinking_leaked_into_answer" in names:
        yield (
            "the thinking stands in the answer: the engine's reasoning parser is missing or is "
            "another family's (SGLang: --reasoning-parser; none at all will do, since tags are "
            "split here)"
        )
    if "empty_answer" in names and "cut_in_thinking" not in names:
        yield _why_empty(rows)
    if "leftover_tags" in names or "copied_prompt" in names:
        yield (
            "the model does not see turns as it was trained to: the chat template is missing or "
            "another model's, or its end-of-turn token does not stop the engine (check "
            "tokenizer_config.json and generation_config.json beside the weights, or "
            "--chat-template)"
        )
    if "looping" in names:
        yield _why_looping(config)
    if "not_utf8_clean" in names:
        yield (
            "broken characters: weights or KV cache of a precision that the kernels get wrong, or "
            "a damaged checkpoint; compare with another quantisation"
        )
    if ERROR_ROWS in names:
        said = Counter(str(row["error_text"]) for row in rows if row["status"] == "error")
        yield f"rows end as error rows, most often with: {_cut(said.most_common(1)[0][0])}"
    if MEAN_TOKENS in names:
        yield "lengths are not what lengths.output_tokens_mean expects: days and dollars are off"


def _why_cut(rows: list[Mapping[str, Any]], budgets: Budgets | None, config: RunFile) -> str:
    cut = [row for row in rows if row["finish_reason"] == "length"]
    if cut and sum("looping" in row["flags"] for row in cut) > _MOSTLY * len(cut):
        return f"rows are cut because they loop, not because they are long; {_why_looping(config)}"
    longest = max(
        (turn["completion_tokens"] or 0 for row in cut for turn in row["turns"]), default=0
    )
    limit = "sampling.max_tokens"
    if 0 < longest < config.sampling.max_tokens:
        limit = "the engine's context (engine.context_length, --context-length)"
    if budgets is None:
        return f"{limit} is too small, and too few rows ended by themselves to say what would do"
    return (
        f"{limit} is too small: {budgets.num_cut} of {budgets.num_cut + budgets.num_whole} turns "
        f"were cut; an estimated {budgets.tokens_95:,} tokens hold 95% of them whole, "
        f"{budgets.tokens_99:,} hold 99%"
    )


def _why_no_thinking(rows: list[Mapping[str, Any]], config: RunFile) -> str:
    found, word = family(config.model), template_kwargs(config.model, thinking=True)
    overridden = set(word) & set(config.chat_template_kwargs)
    if any("thinking_leaked_into_answer" in row["flags"] for row in rows):
        return (
            "thinking is not told apart from the answer: no tags come, so the engine strips them "
            "(SGLang: --reasoning-parser of this model's family)"
        )
    if overridden:
        return f"chat_template_kwargs sets {', '.join(sorted(overridden))}, the word for thinking"
    if found not in FAMILIES:
        return (
            f"thinking is not switched on: {config.model!r} is of no family known here, so its "
            f"template was sent {word}; if its word is another, name it in chat_template_kwargs, "
            f"and set thinking: false for a model that has none"
        )
    if not word:
        return f"{config.model!r} has no switch for thinking; it chose to answer at once"
    return (
        f"the template was sent {word} and the model did not think: the served model is another "
        f"family's, or the server renders a template of its own"
    )


def _why_empty(rows: list[Mapping[str, Any]]) -> str:
    last = [row["turns"][-1] for row in rows if "empty_answer" in row["flags"]]
    thought = sum(bool((turn["reasoning_text"] or "").strip()) for turn in last)
    if thought > _MOSTLY * len(last):
        return (
            "answers are empty behind whole thinking: the engine's reasoning parser takes the "
            "answer for thinking, as one of another family does (SGLang: --reasoning-parser)"
        )
    return (
        "the model ends at once: the chat template is missing or ends the turn itself, or a stop "
        "token comes first"
    )


def _why_looping(config: RunFile) -> str:
    if config.sampling.temperature == 0:
        return (
            "sampling.temperature is 0: thinking models loop when they are drawn greedily (their "
            "cards ask for 0.6 to 1.0)"
        )
    return (
        f"loops at temperature {config.sampling.temperature:g}: raise it or presence_penalty to "
        f"what the model's card asks for; if it asks for this, suspect the quantisation"
    )
