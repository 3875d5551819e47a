"""Turns that are generated on after a planned stop. Pure, but for reading the model's tokenizer.

SGLang returns the token ids of a request that is aborted, and its chat endpoint generates on from
ids. Its parser of the thinking then sees the new tokens alone, so the texts of the whole turn are
decoded here: only for models whose whole turns, decoded here, have the texts that the server sent.

Invariant: a turn is continued from the ids that the engine generated, or from its beginning. What
the rest depends on beyond those ids, such as penalties of earlier tokens, rules the first out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.errors import ConfigError, PlanError
from pipeline.models.files import default_repetition_penalty
from pipeline.models.thinking import split_thinking
from pipeline.models.tokenizer import model_text_decoder
from pipeline.untrusted.parsing import UnreadableError, guarded
from schemas.chat_template import ThinkingTags
from schemas.completion import Interruption, Outcome, Turn
from schemas.partial import PartialTurn, TokenIds
from schemas.prompt import Request, SamplingParams

Decode = Callable[[Sequence[Sequence[int]]], list[str]]

# assumed: a parser that splits this many turns as we do splits them all so
_CHECKED_TURNS = 16


@dataclass(slots=True, kw_only=True)
class Continuing:
    """Continued turns of one SGLang engine."""

    model: str
    tags: ThinkingTags
    tokens_per_step: int = 1
    """Most tokens that one step of the engine keeps."""
    further_fields: Mapping[str, object]
    """Fields of every request that we do not know the effect of."""
    log: Callable[[str], None] = print
    read_decoder: Callable[[str], Decode | None] = model_text_decoder
    read_penalty: Callable[[str], float] = default_repetition_penalty
    _decode: Decode | None = None
    _penalty: float = 1.0
    """Repetition penalty of requests that have none of their own."""
    _has_read: bool = False
    _num_agreeing: int = 0
    _is_out: bool = False
    """True once texts differed, or the server did not continue from given ids."""

    def fitted(self, request: Request) -> Request:
        """Return the request without its first part if it cannot be continued here."""
        first = request.continues
        if first is None or (self._suits(request) and _has_budget(request.sampling, first)):
            return request
        return replace(request, continues=None)

    def takes_long(self, request: Request) -> bool:
        """Tell if `outcome` decodes an answer to the request, or reads the tokenizer."""
        return request.continues is not None or self._num_agreeing < _CHECKED_TURNS

    def outcome(
        self, request: Request, outcome: Outcome, *, opens_in_prompt: bool
    ) -> Outcome | None:
        """Return the outcome of the whole turn, whose first part the request may have had.

        None if the server did not take that part, so that the turn is to begin anew.
        """
        first = request.continues
        if first is not None:
            return self._of_whole(request, first, outcome, opens_in_prompt=opens_in_prompt)
        if isinstance(outcome, Turn):
            self._check(outcome, opens_in_prompt=opens_in_prompt)
        if isinstance(outcome, Interruption) and outcome.so_far is not None:
            may_go_on = self._num_agreeing > 0 and self._suits(request)
            so_far = self._kept(outcome.so_far) if may_go_on else None
            return replace(outcome, so_far=so_far)
        return outcome

    # -- what can be continued

    def _suits(self, request: Request) -> bool:
        # A stop text may span both parts; calls of tools are parsed by the server.
        is_whole = request.sampling.stop is None and not request.tools
        if not is_whole or self.further_fields or self._decoder() is None:
            return False
        sampling = request.sampling
        repetition = sampling.repetition_penalty
        # SGLang counts the tokens of the output, srt/sampling/penaltylib in 0.5.23, so it would
        # forget those of the first part.
        penalises = sampling.presence_penalty or sampling.frequency_penalty
        return not penalises and (self._penalty if repetition is None else repetition) == 1.0

    def _decoder(self) -> Decode | None:
        if not self._has_read:
            self._has_read = True
            try:
                self._decode = self.read_decoder(self.model)
                self._penalty = self.read_penalty(self.model)
            except (ConfigError, PlanError) as error:
                self._end(str(error))
            if self._decode is None:
                self._end("there is no tokenizer.json in its folder or the hub cache")
        return None if self._is_out else self._decode

    def _end(self, why: str) -> None:
        if not self._is_out:
            self.log(f"event=not_continued model={self.model!r} why={why!r}")
        self._is_out = True

    def _check(self, turn: Turn, *, opens_in_prompt: bool) -> None:
        """Compare a whole turn's texts with those of its ids."""
        decode = self._decoder()
        ids = turn.completion_token_ids
        if self._num_agreeing >= _CHECKED_TURNS or decode is None or ids is None:
            return
        try:
            texts = _texts(decode, ids, turn, self.tags, opens_in_prompt=opens_in_prompt)
        except UnreadableError as error:
            self._end(f"its tokenizer cannot decode an answer: {error}")
            return
        # A server's parser leaves empty thinking out.
        if (texts[0] or None, texts[1]) == (turn.reasoning_text or None, turn.answer_text):
            self._num_agreeing += 1
        elif turn.finish_reason == "stop":
            # A text that is cut may end within a character.
            self._end("texts that are decoded from token ids differ from those of the engine")

    def _kept(self, so_far: PartialTurn) -> PartialTurn | None:
        """Leave out the last step, whose tokens SGLang does not check for the end of the turn."""
        num_kept = so_far.num_tokens - self.tokens_per_step
        if num_kept <= 0:
            return None
        reasoning = so_far.reasoning_tokens
        is_thinking = so_far.is_thinking or (reasoning or 0) > num_kept
        return replace(
            so_far,
            completion_token_ids=so_far.completion_token_ids[:num_kept],
            reasoning_tokens=num_kept if is_thinking else reasoning,
            is_thinking=is_thinking,
        )

    # -- the whole of two parts

    def _of_whole(
        self, request: Request, first: PartialTurn, outcome: Outcome, *, opens_in_prompt: bool
    ) -> Outcome | None:
        decode, so_far = self._decoder(), getattr(outcome, "so_far", None)
        if isinstance(outcome, Turn) and decode is not None:
            ids = outcome.completion_token_ids
            if ids is None or outcome.prompt_token_ids != sent_ids(first):
                self._end("this release does not know input_ids")
                return None
            whole = first.completion_token_ids + ids
            try:
                texts = _texts(decode, whole, outcome, self.tags, opens_in_prompt=opens_in_prompt)
            except UnreadableError as error:
                self._end(f"its tokenizer cannot decode an answer: {error}")
                return None
            return _joined(first, outcome, whole, texts)
        if isinstance(outcome, Interruption) and so_far is not None:
            rest = self._kept(so_far) if so_far.prompt_token_ids == sent_ids(first) else None
            return replace(outcome, so_far=rest and _longer(first, rest))
        return outcome


def sent_ids(first: PartialTurn) -> TokenIds:
    """Return the ids from which the engine generates on."""
    return first.prompt_token_ids + first.completion_token_ids


def _has_budget(sampling: SamplingParams, first: PartialTurn) -> bool:
    return sampling.max_tokens is None or sampling.max_tokens > first.num_tokens


def _texts(
    decode: Decode, ids: TokenIds, turn: Turn, tags: ThinkingTags, *, opens_in_prompt: bool
) -> tuple[str | None, str]:
    return split_thinking(
        guarded(lambda: decode([ids])[0]),
        None,
        opens_in_prompt=opens_in_prompt,
        was_cut=turn.finish_reason == "length",
        tags=tags,
    )


def _joined(first: PartialTurn, rest: Turn, ids: TokenIds, texts: tuple[str | None, str]) -> Turn:
    return replace(
        rest,
        reasoning_text=texts[0],
        answer_text=texts[1],
        prompt_tokens=len(first.prompt_token_ids),
        completion_tokens=len(ids),
        reasoning_tokens=_reasoning_tokens(first, rest.reasoning_tokens),
        prompt_token_ids=first.prompt_token_ids,
        completion_token_ids=ids,
        generation_boundary=len(first.prompt_token_ids),
        duration_s=first.duration_s + rest.duration_s,
        continued=first.continued,
    )


def _longer(first: PartialTurn, rest: PartialTurn) -> PartialTurn:
    return replace(
        first,
        completion_token_ids=first.completion_token_ids + rest.completion_token_ids,
        reasoning_tokens=_reasoning_tokens(first, rest.reasoning_tokens),
        is_thinking=first.is_thinking and rest.is_thinking,
        duration_s=first.duration_s + rest.duration_s,
    )


def _reasoning_tokens(first: PartialTurn, of_rest: int | None) -> int | None:
    """Add the thinking of both parts; the server counts that of the rest as if it began there.

    None where it found none although the first part ends inside the thinking.
    """
    if not first.is_thinking:
        return first.reasoning_tokens
    if not of_rest or first.reasoning_tokens is None:
        return None
    return first.reasoning_tokens + of_rest
