"""Diagnosis of a canary: examples, likely causes and sufficient token budgets. Pure.

Causes are guesses from the rows and the settings; each says what to change. Budgets come from a
log-normal fit in which the lengths of cut turns are lower bounds.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from pipeline.planner.lengths.log_normal_fit import log_normal_fit
from pipeline.quality.canary import ERROR_ROWS, MEAN_TOKENS, Excess
from schemas.chat_template import TemplateFacts
from schemas.config.run_file import RunFile

_EXAMPLES_PER_FLAG = 3
_EXAMPLE_CHARACTERS = 160
_MIN_WHOLE_TURNS = 10
_MOSTLY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row that counts against a limit, shortened."""

    row_id: str
    question: str
    reasoning: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The `max_tokens` at which 95 % and 99 % of all completions would not be cut."""

    tokens_95: int
    tokens_99: int
    num_whole: int
    num_cut: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The exceeded limits of a canary, with examples and likely causes."""

    num_rows: int
    excesses: tuple[Excess, ...]
    examples: dict[str, tuple[Example, ...]]
    budgets: Budgets | None
    causes: tuple[str, ...]


def diagnosis(
    excesses: Sequence[Excess],
    rows: Iterable[Mapping[str, Any]],
    config: RunFile,
    template: TemplateFacts,
) -> Diagnosis:
    """Diagnose the exceeded limits from the canary's published rows."""
    rows = list(rows)
    names = {excess.name for excess in excesses}
    budgets = budgets_of(rows)
    return Diagnosis(
        num_rows=len(rows),
        excesses=tuple(excesses),
        examples={excess.name: _examples(excess.name, rows) for excess in excesses},
        budgets=budgets,
        causes=tuple(_causes(names, rows, budgets, config, template)),
    )


# -- examples


def _examples(name: str, rows: list[Mapping[str, Any]]) -> tuple[Example, ...]:
    chosen = [row for row in rows if _counts_against(row, name)][:_EXAMPLES_PER_FLAG]
    return tuple(_example(row) for row in chosen)


def _counts_against(row: Mapping[str, Any], name: str) -> bool:
    if name == MEAN_TOKENS:
        return True
    return row["status"] == "error" if name == ERROR_ROWS else name in row["flags"]


def _example(row: Mapping[str, Any]) -> Example:
    last = row["turns"][-1] if row["turns"] else {"reasoning_text": "", "answer_text": ""}
    questions = [message["content"] for message in row["messages"] if message["role"] == "user"]
    answer = row["error_text"] if row["status"] == "error" else last["answer_text"]
    return Example(
        row_id=row["row_id"],
        question=_shortened(questions[-1] if questions else ""),
        reasoning=_shortened(last["reasoning_text"] or ""),
        answer=_shortened(answer or ""),
    )


def _shortened(text: str) -> str:
    """Return one line with the beginning and the end, which show loops and cuts."""
    line = " ".join(text.split())
    if len(line) <= _EXAMPLE_CHARACTERS:
        return line
    half = _EXAMPLE_CHARACTERS // 2
    return f"{line[:half]} [...] {line[-half:]}"


# -- budgets


def budgets_of(rows: Iterable[Mapping[str, Any]]) -> Budgets | None:
    """Estimate budgets; None where no turn was cut, or too few ended by themselves.

    Turns that loop are left out: they would never have ended.
    """
    whole: Counter[int] = Counter()
    cut: Counter[int] = Counter()
    for row in rows:
        for turn in row["turns"]:
            tokens = turn["completion_tokens"]
            if not tokens or "looping" in row["flags"]:
                continue
            (cut if turn["finish_reason"] == "length" else whole)[tokens] += 1
    if not cut or whole.total() < _MIN_WHOLE_TURNS:
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
    names: set[str],
    rows: list[Mapping[str, Any]],
    budgets: Budgets | None,
    config: RunFile,
    template: TemplateFacts,
) -> Iterable[str]:
    if names & {"cut_in_thinking", "cut_in_answer"}:
        yield _why_cut(rows, budgets, config)
    yield from _causes_about_thinking(names, rows, config, template)
    if "empty_answer" in names and "cut_in_thinking" not in names:
        yield _why_empty(rows)
    if "leftover_tags" in names or "copied_prompt" in names:
        yield (
            "the prompt format is not the one the model was trained on: the chat template is "
            "missing or another model's, or its end-of-turn token does not stop the engine (check "
            "tokenizer_config.json and generation_config.json next to the weights, or "
            "--chat-template)"
        )
    if "looping" in names:
        yield _why_looping(config)
    if "not_utf8_clean" in names:
        yield (
            "broken characters: the kernels mishandle the precision of the weights or KV cache, or "
            "the checkpoint is damaged; compare with another quantisation"
        )
    if ERROR_ROWS in names:
        texts = Counter(str(row["error_text"]) for row in rows if row["status"] == "error")
        yield f"rows end as error rows, most often with: {_shortened(texts.most_common(1)[0][0])}"
    if MEAN_TOKENS in names:
        yield "lengths differ from lengths.output_tokens_mean, so days and dollars are off"


def _causes_about_thinking(
    names: set[str], rows: list[Mapping[str, Any]], config: RunFile, template: TemplateFacts
) -> Iterable[str]:
    if "empty_reasoning" in names:
        yield _why_no_thinking(rows, config, template)
    if "unasked_reasoning" in names:
        yield _why_thinking(rows, config, template)
    if "thinking_leaked_into_answer" in names:
        yield (
            "the thinking is in the answer: the engine's reasoning parser is missing or is another "
            "family's (SGLang: --reasoning-parser; without one, tags are split here)"
        )


def _why_cut(rows: list[Mapping[str, Any]], budgets: Budgets | None, config: RunFile) -> str:
    cut = [row for row in rows if row["finish_reason"] == "length"]
    if cut and sum("looping" in row["flags"] for row in cut) > _MOSTLY * len(cut):
        return f"rows are cut because they loop, not because they are long; {_why_looping(config)}"
    longest = max(
        (turn["completion_tokens"] or 0 for row in cut for turn in row["turns"]), default=0
    )
    limit = "sampling.max_tokens"
    budget = config.sampling.max_tokens
    if budget is None or 0 < longest < budget:
        limit = "the engine's context (engine.context_length, --context-length)"
    if budgets is None:
        return f"{limit} is too small, and too few rows ended by themselves to estimate more"
    return (
        f"{limit} is too small: {budgets.num_cut} of {budgets.num_cut + budgets.num_whole} turns "
        f"were cut; an estimated {budgets.tokens_95:,} tokens suffice for 95% of them, "
        f"{budgets.tokens_99:,} for 99%"
    )


def _why_no_thinking(
    rows: list[Mapping[str, Any]], config: RunFile, template: TemplateFacts
) -> str:
    switch = template.thinking_kwargs(thinking=True)
    overridden = set(switch) & set(config.chat_template_kwargs)
    if any("thinking_leaked_into_answer" in row["flags"] for row in rows):
        return (
            "thinking is not separated from the answer: the engine strips its tags (SGLang: set "
            "--reasoning-parser to that of this model's family)"
        )
    if overridden:
        return f"chat_template_kwargs sets {', '.join(sorted(overridden))}, the switch for thinking"
    if template.thinks is None:
        return (
            f"thinking is not enabled: {config.model!r} is of no known family, so its template got "
            f"{switch}; if its switch is another, set it in chat_template_kwargs; set thinking: "
            f"false for a model that has none"
        )
    if not template.thinks:
        return f"the chat template of {config.model!r} knows no thinking; set thinking: false"
    if template.switch is not None and template.switch.words is not None:
        return (
            f"the system turn got the words {template.switch.words[0]!r} and the model did not "
            f"think: another system prompt stands against them"
        )
    if not switch:
        return f"{config.model!r} has no switch for thinking; it chose to answer at once"
    return (
        f"the template got {switch} and the model did not think: the served model is of another "
        f"family, or the server renders its own template"
    )


def _why_thinking(rows: list[Mapping[str, Any]], config: RunFile, template: TemplateFacts) -> str:
    """Explain reasoning that came although thinking was off."""
    switch = template.thinking_kwargs(thinking=False)
    flagged = [row for row in rows if "unasked_reasoning" in row["flags"]]
    if sum("empty_answer" in row["flags"] for row in flagged) > _MOSTLY * len(flagged):
        return (
            "without thinking the answers are returned as reasoning: the engine's reasoning parser "
            "expects thinking in every text (SGLang: --reasoning-parser; leave it out)"
        )
    overridden = sorted(set(switch) & set(config.chat_template_kwargs))
    if overridden:
        return f"chat_template_kwargs sets {', '.join(overridden)}, the switch for thinking"
    if template.switch is None and template.thinks:
        return (
            f"thinking of {config.model!r} cannot be switched off ({template.source}); set "
            f"thinking: true"
        )
    if not switch and template.switch is None:
        return f"{config.model!r} has no switch for thinking; set thinking: true if it is to think"
    words = template.switch.words if template.switch is not None else None
    told = f"the words {words[1]!r} in the system turn" if words else f"{switch}"
    return (
        f"the template got {told} and the model thought all the same: the served model is of "
        f"another family, the server renders its own template, or the prompts ask for reasoning"
    )


def _why_empty(rows: list[Mapping[str, Any]]) -> str:
    last = [row["turns"][-1] for row in rows if "empty_answer" in row["flags"]]
    thought = sum(bool((turn["reasoning_text"] or "").strip()) for turn in last)
    if thought > _MOSTLY * len(last):
        return (
            "answers are empty after complete thinking: the engine's reasoning parser takes the "
            "answer for thinking, as that of another family does (SGLang: --reasoning-parser)"
        )
    return (
        "the model ends at once: the chat template is missing or ends the turn itself, or a stop "
        "token comes first"
    )


def _why_looping(config: RunFile) -> str:
    if config.sampling.temperature == 0:
        return (
            "sampling.temperature is 0: thinking models loop with greedy decoding (their model "
            "cards recommend 0.6 to 1.0)"
        )
    temperature = config.sampling.temperature
    shown = "of the server's choice" if temperature is None else f"{temperature:g}"
    return (
        f"loops at temperature {shown}: raise it or presence_penalty to "
        f"what the model card recommends; if that is what it has, suspect the quantisation"
    )
