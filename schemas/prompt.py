"""Prompts, requests and row ids.

A conversation is a tuple of messages in which each assistant message is an empty slot to fill.
The row id depends on the content of a row, never on its position.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from schemas.partial import PartialTurn

if TYPE_CHECKING:
    # Its import takes a tenth of a second, which the planner's commands save.
    from schemas.config.requests import SamplingConfig

Longest = Sequence[tuple[int, int]]
"""Pairs of turns to generate and most prompt tokens of a row with that many, without answers."""

Role = Literal["system", "developer", "user", "assistant", "tool"]

ProblemKind = Literal[
    "unreadable",
    "too_large",
    "bad_setting",
    "not_a_list",
    "no_user_turn",
    "unknown_role",
    "empty_text",
    "not_text",
    "bad_tools",
    "over_context",
    "refused_by_engine",
    "unusable_finish",
    "engine_killed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """Name of a called function, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool, in the form of chat messages."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A turn. An assistant turn of a prompt without content and calls is to be generated."""

    role: Role
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    """Call that a tool's turn answers."""
    name: str | None = None
    """Tool that answers, where the source names it."""

    @property
    def is_open(self) -> bool:
        return self.role == "assistant" and not self.content and not self.tool_calls

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that the template puts into the prompt."""
        calls = self.tool_calls or ()
        return (
            *(call.function.name for call in calls),
            *(call.function.arguments for call in calls),
            self.content,
        )


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
    tools: tuple[dict[str, object], ...] = ()
    """Definitions of the tools, as the request has them."""
    originals: tuple[str, ...] | None = None
    """The source's own answers, one for each open turn, if later turns are to see these."""

    @property
    def has_tools(self) -> bool:
        """Tell if the request has tools, or turns that call one."""
        return bool(self.tools) or any(message.tool_calls for message in self.messages)

    @property
    def num_turns(self) -> int:
        """Number of assistant turns to generate."""
        return sum(message.is_open for message in self.messages)


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
    def of(cls, config: "SamplingConfig") -> "SamplingParams":
        """Return the parameters of a run file."""
        biases = (config.logit_bias or {}).items()
        # Not `model_dump`: it would be a twentieth of a worker's time.
        values = {name: getattr(config, name) for name in _PLAIN_SAMPLING}
        return cls(
            **values,
            stop=None if config.stop is None else tuple(config.stop),
            logit_bias=tuple(TokenBias(token_id=key, bias=bias) for key, bias in biases) or None,
        )


_PLAIN_SAMPLING = tuple(
    name for name in SamplingParams.__dataclass_fields__ if name not in ("stop", "logit_bias")
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
    tools: tuple[dict[str, object], ...] = ()
    continues: PartialTurn | None = None
    """The turn's first part, to be generated on; None to generate it from its beginning."""


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
        turns, tokens = prompt.num_turns, most_prompt_tokens(prompt)
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
        sum(map(_num_bytes, message.texts)) + TEMPLATE_TOKENS_PER_MESSAGE for message in messages
    )


def most_prompt_tokens(prompt: Prompt) -> int:
    """Bound the tokens of a prompt from above, without its generated answers."""
    others = [tools_text(prompt.tools) or "", *(prompt.originals or ())]
    return most_tokens(prompt.messages) + sum(map(_num_bytes, others))


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def tools_text(tools: Sequence[Mapping[str, object]]) -> str | None:
    """Return the definitions of tools as JSON text; None for none."""
    return json.dumps(tools, ensure_ascii=False) if tools else None


def content_hash(
    messages: tuple[Message, ...],
    settings: RowSettings = RowSettings(),
    tools: Sequence[Mapping[str, object]] = (),
    originals: Sequence[str] | None = None,
) -> str:
    """Hash all that decides a row's requests to 16 hex digits (64 bits of SHA-256)."""
    turns = [_hashed(message) for message in messages]
    more = _hashed_extras(settings, tools, originals)
    return _digest([turns, *more] if more else turns)[:16]


def content_row_id(
    messages: tuple[Message, ...],
    carried: dict[str, object],
    raw: object = None,
    settings: RowSettings = RowSettings(),
    tools: Sequence[Mapping[str, object]] = (),
    originals: Sequence[str] | None = None,
) -> str:
    """Hash all that the run reads of a row to 32 hex digits; an exact repeat has the same id.

    Kept columns count, so that two rows with one prompt and different labels remain two rows.
    `raw` replaces a conversation that could not be read.
    """
    turns = [_hashed(message) for message in messages]
    more = _hashed_extras(settings, tools, originals)
    return _digest([turns, carried, raw, *more])[:32]


def _hashed(message: Message) -> list[object]:
    more = message_extras(message)
    return [message.role, message.content, *([more] if more else ())]


def _hashed_extras(
    settings: RowSettings,
    tools: Sequence[Mapping[str, object]],
    originals: Sequence[str] | None,
) -> list[object]:
    """Return what few rows have beyond their turns; a row without any keeps its hash."""
    given = settings.given()
    if tools or originals:
        return [given, tools, originals]
    return [given] if given else []


def message_extras(message: Message) -> dict[str, object]:
    """Return the fields that only few turns have, where they have a value."""
    fields = {
        "reasoning_content": message.reasoning_content,
        "tool_calls": message.tool_calls and [asdict(call) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {name: value for name, value in fields.items() if value is not None}


def message_of(role: Role, content: str, extras: Mapping[str, Any]) -> Message:
    """Build a message of its role, its text and its `message_extras`."""
    calls = [
        ToolCall(id=call["id"], function=FunctionCall(**call["function"]))
        for call in extras.get("tool_calls") or ()
    ]
    return Message(role=role, content=content, **{**extras, "tool_calls": tuple(calls) or None})


def derived_seed(params: SamplingParams, row_id: str, sample_index: int, turn_index: int) -> int:
    """Derive the seed of one request, below 2^31, from row, sample and turn."""
    return int(_digest([params.seed, row_id, sample_index, turn_index])[:8], 16) & 0x7FFFFFFF


def with_own_seed(
    params: SamplingParams, row_id: str, sample_index: int, turn_index: int
) -> SamplingParams:
    if params.seed is None:
        return params
    return replace(params, seed=derived_seed(params, row_id, sample_index, turn_index))


def continued_seed(params: SamplingParams, at_token: int) -> SamplingParams:
    """Give the rest of a turn a seed of its own: the first part's would repeat its draws."""
    if params.seed is None:
        return params
    return replace(params, seed=int(_digest([params.seed, at_token])[:8], 16) & 0x7FFFFFFF)


# `json.dumps` would make an encoder for each call.
_HASHED = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)


def _digest(value: object) -> str:
    text = _HASHED.encode(value)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
