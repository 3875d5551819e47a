"""Prompts, requests and row ids.

A conversation is a tuple of messages in which each assistant message is an empty slot to fill.
The row id depends on the content of a row, never on its position.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from schemas.config.requests import SamplingConfig

Longest = Sequence[tuple[int, int]]
"""Pairs of turns to generate and most prompt tokens of a row with that many, without answers."""

Role = Literal["system", "developer", "user", "assistant"]

ProblemKind = Literal[
    "unreadable",
    "too_large",
    "bad_setting",
    "not_a_list",
    "no_user_turn",
    "unknown_role",
    "empty_text",
    "not_text",
    "over_context",
    "refused_by_engine",
    "unusable_finish",
    "engine_killed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A turn. An assistant turn of a prompt has empty content and is to be generated."""

    role: Role
    content: str
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A fault of the row itself, which becomes an `error` row.

    Kinds other than `refused_by_engine`, `unusable_finish` and `engine_killed` are found before a
    request is sent.
    """

    kind: ProblemKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """Settings of one row; None leaves one to the run file."""

    thinking: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    chat_template_kwargs: dict[str, object] | None = None

    def given(self) -> dict[str, object]:
        """Return the settings that the row has."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A source row: its conversation with empty assistant turns, and its carried columns."""

    row_id: str
    content_hash: str
    """16 hex digits; an id with another hash is another prompt."""
    messages: tuple[Message, ...]
    carried: dict[str, object]
    """Kept columns of the source, JSON values only."""
    problem: Problem | None = None
    settings: RowSettings = RowSettings()

    @property
    def num_turns(self) -> int:
        """Number of assistant turns to generate."""
        return sum(message.role == "assistant" for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBias:
    """Addition to the logit of one token."""

    token_id: str
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters; None leaves a value to the server."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    max_tokens: int | None
    seed: int | None
    frequency_penalty: float | None = None
    stop: tuple[str, ...] | None = None
    logit_bias: tuple[TokenBias, ...] | None = None

    @classmethod
    def of(cls, config: SamplingConfig) -> "SamplingParams":
        """Return the parameters of a run file."""
        values = config.model_dump(exclude={"base", "stop", "logit_bias"})
        biases = (config.logit_bias or {}).items()
        return cls(
            **values,
            stop=None if config.stop is None else tuple(config.stop),
            logit_bias=tuple(TokenBias(token_id=key, bias=bias) for key, bias in biases) or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An attempt at one assistant turn: all that is sent to the engine."""

    row_id: str
    sample_index: int
    turn_index: int
    messages: tuple[Message, ...]
    sampling: SamplingParams
    settings: RowSettings = RowSettings()
    """The row's own thinking and chat-template words; its sampling is in `sampling`."""


@dataclass(slots=True, kw_only=True)
class PromptBounds:
    """Largest prompts and token budgets of the rows seen so far; bad rows count for nothing."""

    longest_by_turns: dict[int, int] = field(default_factory=dict)
    row_max_tokens: int | None = None
    """Largest token budget that a row sets itself."""
    has_unset: bool = False
    """True if a row leaves its budget to the run file."""

    def note(self, prompt: Prompt) -> None:
        if prompt.problem is not None:
            return
        turns, tokens = prompt.num_turns, most_tokens(prompt.messages)
        self.longest_by_turns[turns] = max(tokens, self.longest_by_turns.get(turns, 0))
        if prompt.settings.max_tokens is None:
            self.has_unset = True
        else:
            self.row_max_tokens = max(prompt.settings.max_tokens, self.row_max_tokens or 0)

    @property
    def longest(self) -> Longest:
        return tuple(sorted(self.longest_by_turns.items()))

    @property
    def budgets(self) -> "RowBudgets | None":
        """Return the budgets that rows set; None where no row sets one."""
        if self.row_max_tokens is None:
            return None
        return RowBudgets(largest=self.row_max_tokens, are_all_set=not self.has_unset)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBudgets:
    """Token budgets that rows set themselves."""

    largest: int
    are_all_set: bool
    """True if no row leaves its budget to the run file."""


# ChatML: <|im_start|>, role and line feed before the text, <|im_end|> and line feed after it.
TEMPLATE_TOKENS_PER_MESSAGE = 5


def most_tokens(messages: Iterable[Message]) -> int:
    """Bound the tokens of a conversation from above: a token is at least one byte."""
    return sum(
        len(message.content.encode("utf-8", "surrogatepass")) + TEMPLATE_TOKENS_PER_MESSAGE
        for message in messages
    )


def content_hash(messages: tuple[Message, ...], settings: RowSettings = RowSettings()) -> str:
    """Hash roles and texts in order, and the row's settings, to 16 hex digits of SHA-256."""
    turns = [[message.role, message.content] for message in messages]
    given = settings.given()
    return _digest([turns, given] if given else turns)[:16]


def content_row_id(
    messages: tuple[Message, ...],
    carried: dict[str, object],
    raw: object = None,
    settings: RowSettings = RowSettings(),
) -> str:
    """Hash all that the run reads of a row to 32 hex digits; an exact repeat has the same id.

    Kept columns count, so that two rows with one prompt and different labels remain two rows.
    `raw` replaces a conversation that could not be read.
    """
    turns = [[message.role, message.content] for message in messages]
    given = settings.given()
    return _digest([turns, carried, raw, *([given] if given else [])])[:32]


def derived_seed(params: SamplingParams, row_id: str, sample_index: int, turn_index: int) -> int:
    """Derive the seed of one request, below 2^31, from row, sample and turn."""
    return int(_digest([params.seed, row_id, sample_index, turn_index])[:8], 16) & 0x7FFFFFFF


def with_own_seed(
    params: SamplingParams, row_id: str, sample_index: int, turn_index: int
) -> SamplingParams:
    if params.seed is None:
        return params
    return replace(params, seed=derived_seed(params, row_id, sample_index, turn_index))


def _digest(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
