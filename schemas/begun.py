"""Rows that a planned stop interrupted, as they are kept on disk until they are continued."""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from schemas.completion import QualityFlag, Turn
from schemas.partial import Continuation, PartialTurn, TokenIds
from schemas.prompt import FunctionCall, SamplingParams, TokenBias, ToolCall

_ID_FIELDS = ("prompt_token_ids", "completion_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaggedTurn:
    """A turn that is generated again because of its flags."""

    turn: Turn
    flags: tuple[QualityFlag, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunRow:
    """Finished turns of a row, the open turn so far, and what is to follow."""

    row_id: str
    sample_index: int
    content_hash: str
    started_at_s: float
    turns: tuple[Turn, ...] = ()
    so_far: PartialTurn | None = None
    interruptions: int = 0
    flags: tuple[QualityFlag, ...] = ()
    quality_retries: int = 0
    quality_retries_of_turn: int = 0
    flagged_turn: FlaggedTurn | None = None
    next_sampling: SamplingParams | None = None
    first_sampling: SamplingParams | None = None

    @property
    def num_tokens(self) -> int:
        """Completion tokens that the row has."""
        of_turns = sum(turn.completion_tokens or 0 for turn in self.turns)
        return of_turns + (self.so_far.num_tokens if self.so_far is not None else 0)

    def to_json(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        flagged = self.flagged_turn
        values["turns"] = [_turn_values(turn) for turn in self.turns]
        values["so_far"] = self.so_far and _packed(self.so_far)
        values["flagged_turn"] = flagged and [_turn_values(flagged.turn), flagged.flags]
        for name in ("next_sampling", "first_sampling"):
            values[name] = values[name] and asdict(values[name])
        return json.dumps(values, ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "BegunRow":
        """Raises ValueError, KeyError or TypeError for a text that is none of ours."""
        values = json.loads(text)
        flagged = values["flagged_turn"]
        return cls(
            **{
                **values,
                "turns": tuple(map(_turn_of, values["turns"])),
                "so_far": values["so_far"] and _partial_of(values["so_far"]),
                "flags": tuple(values["flags"]),
                "flagged_turn": flagged
                and FlaggedTurn(turn=_turn_of(flagged[0]), flags=tuple(flagged[1])),
                "next_sampling": _sampling_of(values["next_sampling"]),
                "first_sampling": _sampling_of(values["first_sampling"]),
            }
        )


def _turn_values(turn: Turn) -> dict[str, object]:
    calls = turn.tool_calls
    return {**_packed(turn), "tool_calls": calls and [asdict(call) for call in calls]}


def _packed(record: Turn | PartialTurn) -> dict[str, object]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    for name in _ID_FIELDS:
        ids: TokenIds | None = values[name]
        values[name] = None if ids is None else base64.b64encode(ids.tobytes()).decode()
    values["continued"] = record.continued and [asdict(one) for one in record.continued]
    return values


def _unpacked(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, **{name: _ids_of(values[name]) for name in _ID_FIELDS}}


def _ids_of(text: str | None) -> TokenIds | None:
    if text is None:
        return None
    ids = TokenIds("i")
    ids.frombytes(base64.b64decode(text, validate=True))
    return ids


def _continued_of(values: list[dict[str, Any]] | None) -> tuple[Continuation, ...] | None:
    return None if values is None else tuple(Continuation(**value) for value in values)


def _partial_of(values: Mapping[str, Any]) -> PartialTurn:
    continued = _continued_of(values["continued"]) or ()
    return PartialTurn(**{**_unpacked(values), "continued": continued})


def _turn_of(values: Mapping[str, Any]) -> Turn:
    calls = values["tool_calls"]
    called = calls and tuple(
        ToolCall(**{**call, "function": FunctionCall(**call["function"])}) for call in calls
    )
    continued = _continued_of(values["continued"])
    return Turn(**{**_unpacked(values), "tool_calls": called, "continued": continued})


def _sampling_of(values: Mapping[str, Any] | None) -> SamplingParams | None:
    if values is None:
        return None
    stop, biases = values["stop"], values["logit_bias"]
    return SamplingParams(
        **{
            **values,
            "stop": None if stop is None else tuple(stop),
            "logit_bias": biases and tuple(TokenBias(**bias) for bias in biases),
        }
    )
