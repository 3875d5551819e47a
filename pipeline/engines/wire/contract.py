"""Hold a server to what was requested of it, at its first answers.

A fault of the server's set-up is in every answer, and a run would find it when all rows are paid
for: token ids that are missing, or of another text; a prompt that another chat template rendered.

Invariant: an answer that shows such a breach becomes no turn, unless the user accepts the breach.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from pipeline.engines.wire.text import one_line
from pipeline.engines.wire.transport import Response
from pipeline.models.thinking import THINK, split_thinking
from pipeline.models.tokenizer import TokenTexts
from pipeline.untrusted.parsing import UNREADABLE, parsed
from schemas.chat_template import ThinkingTags
from schemas.completion import Interruption, Turn
from schemas.prompt import Message, Request
from schemas.session import Breach

# assumed: a fault of the set-up is in the first answer; a few more find one of some prompts
_CHECKED_TURNS = 4
# Answers whose last ids are compared where the model's end tokens are not known. assumed: no model
# has more end tokens, and answers without one end with more different ids
_COMPARED_ENDS, _MOST_END_TOKENS = 16, 4
_SHOWN_CHARACTERS = 60
# A token at the start of a text that the tokenizer adds and the template leaves out
_MOST_ADDED_CHARACTERS = 32
_ACCEPT = "--accept-engine-faults goes on as it is"

PromptOf = Callable[[Sequence[Message], Mapping[str, object]], str | None]
"""Function from messages and template arguments to the prompt; None where it is not known."""


def _unknown_prompt(_messages: Sequence[Message], _kwargs: Mapping[str, object]) -> None:
    """Stand in for a template that is not at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """Parts that are at hand of the model that a server should run."""

    texts: TokenTexts | None = None
    end_ids: frozenset[int] = frozenset()
    prompt_of: PromptOf = _unknown_prompt


@dataclass(slots=True, kw_only=True)
class Contract:
    """Checks of one server's first answers. Threads may call it."""

    wants_token_ids: bool
    requires_prompt_ids: bool = True
    """Answers whose prompts have no token ids are of no use; else they are in doubt."""
    read_model: Callable[[], KnownModel]
    tags: ThinkingTags = THINK
    has_further_fields: bool = False
    """Requests have fields that we do not know the effect of."""
    accepted: frozenset[Breach] = frozenset()
    log: Callable[[str], None] = print
    release: str | None = None
    reasoning_parser: str | None = None
    """Parser that the server separates the thinking with; None if it has none, or is unknown."""
    _model: KnownModel | None = None
    _num_checked: Counter[Breach] = field(default_factory=Counter)
    _reported: set[Breach] = field(default_factory=set)
    """Breaches that are accepted, and reported once."""
    _broken: Interruption | None = None
    """Outcome of every answer after one that breaks the contract."""
    _has_doubt: bool = False
    _num_turns: int = 0
    _last_ids: set[int] = field(default_factory=set)
    _num_last_ids: int = 0
    _lock: Lock = field(default_factory=Lock)

    @property
    def is_settled(self) -> bool:
        """Tell if no further answer is checked."""
        return self._num_turns >= _COMPARED_ENDS and self._broken is None

    def outcome(
        self,
        request: Request,
        kwargs: Mapping[str, object],
        response: Response,
        turn: Turn,
        *,
        opens_in_prompt: bool,
    ) -> Turn | Interruption:
        """Return the turn, or an interruption that says how it breaks the contract."""
        if self.is_settled or request.continues is not None:
            return turn
        answer = _Answer(
            request=request,
            kwargs=kwargs,
            turn=turn,
            choice=_choice(response),
            opens_in_prompt=opens_in_prompt,
        )
        with self._lock:
            return self._judged(answer)

    def _judged(self, answer: "_Answer") -> Turn | Interruption:
        if self._broken is not None:
            return self._broken
        self._num_turns += 1
        checks: dict[Breach, Callable[[_Answer], str | None]] = {
            "missing_token_ids": self._missing_ids,
            "unparsed_reasoning": self._unparsed_reasoning,
            "other_prompt": self._other_prompt,
            "other_text": self._other_text,
            "no_end_token": self._no_end,
        }
        for breach, check in checks.items():
            fault = None if breach in self._reported else check(answer)
            if fault is None:
                continue
            if breach not in self.accepted:
                self._broken = Interruption(cause=fault, kind="breach")
                return self._broken
            self._reported.add(breach)
            self.log(f"event=engine_fault_accepted fault={fault!r}")
        return answer.turn

    def _is_due(self, breach: Breach) -> bool:
        """Count an answer that can be checked. Return False when enough of them were."""
        self._num_checked[breach] += 1
        return self._num_checked[breach] <= _CHECKED_TURNS

    @property
    def model(self) -> KnownModel:
        if self._model is None:
            self._model = self.read_model()
        return self._model

    # -- the checks: each returns the fault, and what to do

    def _missing_ids(self, answer: "_Answer") -> str | None:
        turn = answer.turn
        has_prompt = turn.prompt_token_ids is not None
        has_completion = turn.completion_token_ids is not None
        is_due = self.wants_token_ids and self._is_due("missing_token_ids")
        if not is_due or (has_prompt and has_completion):
            return None
        if has_completion and not self.requires_prompt_ids:
            self._doubt("no token ids of the prompt: the export format tokens leaves such rows out")
            return None
        found = "no token ids"
        if has_prompt or has_completion:
            found = f"token ids of the {'prompt' if has_prompt else 'completion'} alone"
        return (
            f"its answers have {found}, but engine.return_token_ids requests all of them; "
            f"SGLang returns them from release 0.5.17, vLLM from 0.10.2, and this server is "
            f"{self.release or 'of an unknown release'}; update it, or --accept-missing-token-ids "
            f"goes on without, and the export format tokens leaves such rows out"
        )

    def _unparsed_reasoning(self, answer: "_Answer") -> str | None:
        parser, is_whole = self.reasoning_parser, answer.turn.finish_reason == "stop"
        if parser is None or not is_whole or not self._is_due("unparsed_reasoning"):
            return None
        message = answer.choice.get("message")
        fields = message if isinstance(message, dict) else {}
        is_apart = any(fields.get(name) for name in ("reasoning_content", "reasoning"))
        if is_apart or self.tags.closing not in str(fields.get("content")):
            return None
        return (
            f"it has --reasoning-parser {parser}, but the thinking is in the content, up to "
            f"{self.tags.closing}; start it with this model's parser, or with none; {_ACCEPT}"
        )

    def _other_prompt(self, answer: "_Answer") -> str | None:
        texts, ids = self.model.texts, answer.turn.prompt_token_ids
        # Releases differ in the form in which a template gets the tools.
        if texts is None or ids is None or answer.request.tools or self.has_further_fields:
            return None
        if not self._is_due("other_prompt"):
            return None
        ours = self.model.prompt_of(answer.request.messages, answer.kwargs)
        if ours is None or texts.ids(ours) == ids.tolist():
            return None
        theirs = texts.whole_text(ids)
        if _ends_the_same(_letters(theirs), _letters(ours)):
            return None
        return (
            f"its prompts are not those of the model's chat template: where the template has "
            f"{_shown_difference(ours, theirs)}; start it with the template of this model, or set "
            f"model to the one that it runs; {_ACCEPT}"
        )

    def _other_text(self, answer: "_Answer") -> str | None:
        texts, ids = self.model.texts, answer.turn.completion_token_ids
        if texts is None or ids is None or not self._is_plain(answer):
            return None
        if not self._is_due("other_text"):
            return None
        decoded = texts.text(ids)
        split = split_thinking(
            decoded,
            None,
            opens_in_prompt=answer.opens_in_prompt,
            was_cut=False,
            tags=self.tags,
        )
        returned = f"{answer.turn.reasoning_text or ''}{answer.turn.answer_text}"
        ours = f"{split[0] or ''}{split[1]}"
        if _letters(returned) in (_letters(ours), _letters(decoded)):
            return None
        return (
            f"the token ids of its answer are of another text, by the tokenizer of this model: "
            f"where they have {_shown_difference(ours, returned)}; set model to the one that it "
            f"runs; {_ACCEPT}"
        )

    def _no_end(self, answer: "_Answer") -> str | None:
        ids, matched = answer.turn.completion_token_ids, answer.choice.get("matched_stop")
        if not ids or isinstance(matched, str) or not self._is_plain(answer):
            return None
        is_end = self._is_end(ids[-1], matched)
        if is_end is None:
            return self._many_ends(ids[-1])
        if not self._is_due("no_end_token") or is_end:
            return None
        expected = matched if isinstance(matched, int) else sorted(self.model.end_ids)[:4]
        return _no_end_text(f"the last id of one is {ids[-1]}, and its end token {expected}")

    def _is_end(self, last: int, matched: object) -> bool | None:
        """Tell if an id ends a turn, by the server's word or the model's files; None: unknown."""
        model = self.model
        special = model.texts.special_ids if model.texts is not None else frozenset[int]()
        if type(matched) is int:
            return last == matched
        return last in model.end_ids or last in special if model.end_ids else None

    def _many_ends(self, last: int) -> str | None:
        self._last_ids.add(last)
        self._num_last_ids += 1
        if len(self._last_ids) <= _MOST_END_TOKENS:
            return None
        # Without the model's files or the server's word it is likely, and not certain.
        self._doubt(
            f"token ids that seem to lack the end token: {self._num_last_ids} of "
            f"them end with {len(self._last_ids)} different ids"
        )
        return None

    def _doubt(self, fault: str) -> None:
        """Report once what does not stop a run."""
        if not self._has_doubt:
            self._has_doubt = True
            self.log(f"event=engine_doubt fault={fault!r}")

    def _is_plain(self, answer: "_Answer") -> bool:
        """Tell if the model alone ended the turn, so that its text is all that its ids are."""
        turn, request = answer.turn, answer.request
        is_own = turn.finish_reason == "stop" and turn.tool_calls is None and not request.tools
        return is_own and request.sampling.stop is None and not self.has_further_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """An answer, and the request for it."""

    request: Request
    kwargs: Mapping[str, object]
    turn: Turn
    choice: Mapping[str, Any]
    opens_in_prompt: bool


def _choice(response: Response) -> Mapping[str, Any]:
    try:
        choice = parsed(response.content)["choices"][0]
    except UNREADABLE:
        return {}
    return choice if isinstance(choice, dict) else {}


def _no_end_text(found: str) -> str:
    return (
        f"the token ids of its answers lack the end token: {found}; a drafter that is trained on "
        f"them never ends a turn; use a release that returns it; {_ACCEPT}"
    )


def _letters(text: str) -> str:
    """Leave out what tokenizers and servers add or strip: blanks, and halves of characters."""
    return "".join(text.split()).replace("\ufffd", "")


def _ends_the_same(theirs: str, ours: str) -> bool:
    return theirs.endswith(ours) and len(theirs) - len(ours) <= _MOST_ADDED_CHARACTERS


def _shown_difference(ours: str, theirs: str) -> str:
    pairs = enumerate(zip(ours, theirs, strict=False))
    differs_at = next((at for at, (one, other) in pairs if one != other), len(ours))
    start = max(0, differs_at - 10)
    shown = [one_line(repr(text[start : start + _SHOWN_CHARACTERS])) for text in (ours, theirs)]
    return f"{shown[0]}, the server has {shown[1]}"
