"""Outcomes of a request, and the row of output with its parquet schema.

The schema is written out by hand because readers depend on it; a test keeps it equal to
`Completion`.
"""

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from schemas.partial import Continuation, PartialTurn, TokenIds
from schemas.prompt import Message, SamplingParams, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]

QualityFlag = Literal[
    "empty_answer",
    "empty_reasoning",
    "unasked_reasoning",
    "cut_in_thinking",
    "cut_in_answer",
    "looping",
    "leftover_tags",
    "thinking_leaked_into_answer",
    "refusal",
    "wrong_language",
    "copied_prompt",
    "too_short",
    "not_utf8_clean",
]
"""Faults of a generated turn; each has a section under `quality` in the run file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A regenerated assistant turn."""

    reasoning_text: str | None
    answer_text: str
    finish_reason: FinishReason
    prompt_tokens: int | None
    completion_tokens: int | None
    reasoning_tokens: int | None
    prompt_token_ids: TokenIds | None
    """32-bit integers, `array("i")`: a tenth of the memory of a tuple."""
    completion_token_ids: TokenIds | None
    generation_boundary: int | None
    """Index of the first completion id in prompt ids plus completion ids; masks the loss."""
    duration_s: float
    tool_calls: tuple[ToolCall, ...] | None = None
    """Calls of tools that the turn ends with, or consists of."""
    continued: tuple[Continuation, ...] | None = None
    """Places from which it was generated on after a planned stop; None if it is of one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A failure that is the row's fault: a retry would be refused again."""

    kind: Literal["refused_by_engine", "unusable_finish"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """A failure that says nothing about the row, which is retried."""

    cause: str
    retry_after_s: float | None = None
    """Wait that the server requested."""
    connection_failed: bool = False
    """True if no HTTP answer came in time, so that the engine itself may be gone."""
    kind: Literal["timeout", "refusal", "denial", "breach", "other"] = "other"
    """`refusal`: the server answered with an HTTP error; `denial`: with one that it would give to
    any request, such as that of a refused key or a redirect; `breach`: it answered, but not
    what was requested of it."""
    is_engines: bool = False
    """True if the attempt says something about the engine alone, which was busy or away, so that it
    does not count against the row."""
    so_far: PartialTurn | None = None
    """First part of the turn, if the engine returned one that can be continued."""


Outcome = Turn | Refusal | Interruption


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A row of the output: a prompt's regenerated conversation, or its error."""

    row_id: str
    sample_index: int
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]
    status: Literal["ok", "error"]
    finish_reason: FinishReason | None
    error_kind: str | None
    error_text: str | None
    model: str
    thinking: bool
    engine: str
    engine_release: str | None
    plan: str | None
    """Launch flags of the engine, planned or given; None if it has none."""
    sampling: SamplingParams
    attempt: int
    """Attempts at the row: 1 if the first one succeeded, 0 if no engine received it."""
    flags: tuple[QualityFlag, ...]
    """Flags of all turns, without repeats."""
    quality_retries: int
    """Turns that were discarded for their flags and generated again."""
    worker_id: str
    content_hash: str
    started_at_s: float
    finished_at_s: float
    tools: str | None = None
    """Definitions of the tools that were sent, as JSON text."""
    tool_calls: tuple[ToolCall, ...] | None = None
    """Calls of the last turn, if it is an answer that calls."""
    carried: dict[str, object]

    @property
    def completion_tokens(self) -> int:
        return sum(turn.completion_tokens or 0 for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens or 0 for turn in self.turns)


_FUNCTION_CALL = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("arguments", pa.string(), nullable=False),
    ]
)

_TOOL_CALL = pa.struct(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("function", _FUNCTION_CALL, nullable=False),
        pa.field("type", pa.string(), nullable=False),
    ]
)

_MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("reasoning_content", pa.string()),
        pa.field("tool_calls", pa.list_(_TOOL_CALL)),
        pa.field("tool_call_id", pa.string()),
        pa.field("name", pa.string()),
    ]
)

_CONTINUATION = pa.struct(
    [
        pa.field("at_token", pa.int32(), nullable=False),
        pa.field("worker_id", pa.string(), nullable=False),
    ]
)

_TURN = pa.struct(
    [
        pa.field("reasoning_text", pa.string()),
        pa.field("answer_text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("completion_tokens", pa.int32()),
        pa.field("reasoning_tokens", pa.int32()),
        pa.field("prompt_token_ids", pa.list_(pa.int32())),
        pa.field("completion_token_ids", pa.list_(pa.int32())),
        pa.field("generation_boundary", pa.int32()),
        pa.field("duration_s", pa.float64(), nullable=False),
        pa.field("tool_calls", pa.list_(_TOOL_CALL)),
        pa.field("continued", pa.list_(_CONTINUATION)),
    ]
)

_TOKEN_BIAS = pa.struct(
    [
        pa.field("token_id", pa.string(), nullable=False),
        pa.field("bias", pa.float64(), nullable=False),
    ]
)

_SAMPLING = pa.struct(
    [
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("top_k", pa.int32()),
        pa.field("min_p", pa.float64()),
        pa.field("presence_penalty", pa.float64()),
        pa.field("repetition_penalty", pa.float64()),
        pa.field("max_tokens", pa.int32()),
        pa.field("seed", pa.int64()),
        pa.field("frequency_penalty", pa.float64()),
        pa.field("stop", pa.list_(pa.string())),
        pa.field("logit_bias", pa.list_(_TOKEN_BIAS)),
    ]
)

_TIME = pa.timestamp("ms", tz="UTC")

# Carried columns follow these, under their own names and types.
COMPLETION_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("messages", pa.list_(_MESSAGE), nullable=False),
        pa.field("turns", pa.list_(_TURN), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("error_kind", pa.string()),
        pa.field("error_text", pa.string()),
        pa.field("model", pa.string(), nullable=False),
        pa.field("thinking", pa.bool_(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("engine_release", pa.string()),
        pa.field("plan", pa.string()),
        pa.field("sampling", _SAMPLING, nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("flags", pa.list_(pa.string()), nullable=False),
        pa.field("quality_retries", pa.int32(), nullable=False),
        pa.field("worker_id", pa.string(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("started_at", _TIME, nullable=False),
        pa.field("finished_at", _TIME, nullable=False),
        pa.field("tools", pa.string()),
        pa.field("tool_calls", pa.list_(_TOOL_CALL)),
    ]
)

# Columns that runs of earlier releases lack: a resume leaves them out of the run's parts. A kept
# column of the same name takes their place.
OPTIONAL_COLUMNS = frozenset({"tools", "tool_calls"})
