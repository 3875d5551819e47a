"""Prompts, requests and row ids.

A conversation is a tuple of messages in which each assistant message is an empty slot to fill.
The row id depends on the content of a row, never on its position.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from schemas.config.requests import SamplingConfig

Longest = Sequence[tuple[int, int]]
"""Pairs of turns to generate and most prompt tokens of a row with that many, without answers."""

Role = Literal["system", "developer", "user", "assistant"]

ProblemKind = Literal[
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
class Prompt:
    """A source row: its conversation with empty assistant turns, and its carried columns."""

    row_id: str
    content_hash: str
    """16 hex digits; an id with another hash is another prompt."""
    messages: tuple[Message, ...]
    carried: dict[str, object]
    """Kept columns of the source, JSON values only."""
    problem: Problem | None = None

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


# ChatML: <|im_start|>, role and line feed before the text, <|im_end|> and line feed after it.
TEMPLATE_TOKENS_PER_MESSAGE = 5


def most_tokens(messages: Iterable[Message]) -> int:
    """Bound the tokens of a conversation from above: a token is at least one byte."""
    return sum(
        len(message.content.encode("utf-8", "surrogatepass")) + TEMPLATE_TOKENS_PER_MESSAGE
        for message in messages
    )


def content_hash(messages: tuple[Message, ...]) -> str:
    """Hash roles and texts in order to 16 hex digits (64 bits of SHA-256)."""
    return _digest([[message.role, message.content] for message in messages])[:16]


def content_row_id(
    messages: tuple[Message, ...], carried: dict[str, object], raw: object = None
) -> str:
    """Hash all that the run reads of a row to 32 hex digits; an exact repeat has the same id.

    Kept columns count, so that two rows with one prompt and different labels remain two rows.
    `raw` replaces a conversation that could not be read.
    """
    turns = [[message.role, message.content] for message in messages]
    return _digest([turns, carried, raw])[:32]


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
