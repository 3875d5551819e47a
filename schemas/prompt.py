"""Prompt, SamplingParams, Request; the row id.

A conversation is a tuple of messages in which an assistant message is a place to fill: it holds
no text of the source's. The row id depends on what a row says, never on where it stands.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Longest = Sequence[tuple[int, int]]
"""Turns to generate → the most tokens that a row of so many can ask with, answers left out."""

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
    """One turn. An assistant turn of a prompt has empty content: it is to be generated."""

    role: Role
    content: str
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a row has no completion: the fault is its own, and it becomes an `error` row.

    All kinds but the last two are found before an engine is asked.
    """

    kind: ProblemKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One source row: its conversation with the assistant's places open, and what it carries."""

    row_id: str
    content_hash: str
    """16 hex digits over the conversation; the same id with another hash is another prompt."""
    messages: tuple[Message, ...]
    carried: dict[str, object]
    """Kept source columns, JSON values only."""
    problem: Problem | None = None

    @property
    def num_turns(self) -> int:
        """Assistant turns to generate."""
        return sum(message.role == "assistant" for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of the sampler; None leaves the engine's default."""

    temperature: float
    top_p: float
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    max_tokens: int
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One try at one assistant turn: everything that the engine is sent, but for its address."""

    row_id: str
    sample_index: int
    turn_index: int
    messages: tuple[Message, ...]
    sampling: SamplingParams


TEMPLATE_TOKENS_PER_MESSAGE = 5
# ChatML: <|im_start|>, role, line feed, and <|im_end|>, line feed behind the text.


def most_tokens(messages: Iterable[Message]) -> int:
    """No byte-level vocabulary takes more tokens than this: a token is a byte at least."""
    return sum(
        len(message.content.encode("utf-8", "surrogatepass")) + TEMPLATE_TOKENS_PER_MESSAGE
        for message in messages
    )


def content_hash(messages: tuple[Message, ...]) -> str:
    """16 hex digits (64 bits of SHA-256) over roles and texts in order."""
    return _digest([[message.role, message.content] for message in messages])[:16]


def content_row_id(
    messages: tuple[Message, ...], carried: dict[str, object], raw: object = None
) -> str:
    """32 hex digits over all that the run sees of a row; an exact repeat has the same.

    The kept columns count, so that two rows with one prompt and different labels stay two rows
    whichever comes first. `raw` stands for a row whose conversation could not be read.
    """
    turns = [[message.role, message.content] for message in messages]
    return _digest([turns, carried, raw])[:32]


def derived_seed(params: SamplingParams, row_id: str, sample_index: int, turn_index: int) -> int:
    """The seed of one request, below 2^31: its own for each row, sample and turn."""
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
