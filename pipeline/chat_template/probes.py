"""Find out by rendering what a chat template does with thinking and with system turns.

Each probe is a short conversation of texts that no template contains. The facts are which of them
are left in the rendered text, and what surrounds them.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from pipeline.chat_template.rendering import ChatTemplate, Conversation, TemplateFault, render
from pipeline.chat_template.switches import (
    WORD_PAIRS,
    argument_probes,
    argument_switch,
    efforts_of,
    names_about_thinking,
    word_switch,
)
from pipeline.models.thinking import ALL_TAGS, facts_by_name
from schemas.chat_template import TemplateFacts, ThinkingSwitch, ThinkingTags, TurnFate

Rendered = str | TemplateFault
Turns = Sequence[Mapping[str, object]]

# Texts of the probes. Lower case and without spaces, so that no filter of a template alters them.
_SYSTEM, _SECOND, _QUESTION, _ANSWER, _FOLLOW_UP, _REASONING = (
    f"zq{word}qz" for word in ("system", "second", "question", "answer", "followup", "reasoning")
)
# Marks of templates: words in angle or square brackets, or between triangles.
_MARK = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Za-z_]{1,30}\]|\u25c1[^\u25b7\s]{1,30}\u25b7")
_PIECE = re.compile(rf"{_MARK.pattern}|.", re.DOTALL)
_INLINE = "inline "
_MARK_OF_THINKING = re.compile(r"think|thought|reason|analysis|inner", re.IGNORECASE)


def template_facts(template: ChatTemplate, model: str) -> TemplateFacts | TemplateFault:
    """Return the facts of a template, or the fault that keeps it from rendering one question.

    Words in the system turn that switch a family without its template come from the model's name.
    """
    tokens = tuple(sorted(template.special_tokens.items()))
    return _facts(template.text, template.source, tokens, model)


@lru_cache(maxsize=64)
def _facts(
    text: str, source: str, tokens: tuple[tuple[str, str], ...], model: str
) -> TemplateFacts | TemplateFault:
    template = ChatTemplate(text=text, source=source, special_tokens=dict(tokens))
    prober = _Prober(template=template)
    first = prober.render(_first_probes())
    plain = first["plain"]
    if isinstance(plain, TemplateFault):
        return plain
    by_name = facts_by_name(model)
    switch, efforts = _switch_and_efforts(prober, first, by_name.switch)
    second = prober.render(_second_probes(template.text, switch))
    tags, opens_on, opens_off = _thinking_of(template.text, second)
    has_place = any(isinstance(text, str) and _REASONING in text for text in second.values())
    return TemplateFacts(
        source=template.source,
        digest=hashlib.sha256(template.text.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        thinks=bool(switch or efforts or tags or has_place),
        switch=switch,
        opens_when_on=opens_on,
        opens_when_off=opens_off,
        tags=tags or by_name.tags,
        efforts=efforts,
        keeps_earlier_reasoning=_has(second["earlier"], _REASONING),
        keeps_last_reasoning=_has(second["last"], _REASONING),
        cuts_answers=_cuts_answers(second),
        added_system=_added_system(plain, first["two_turns"]),
        system=_fate(first["system"], _SYSTEM),
        developer=_developer_fate(first["developer"], template.text),
        second_system=_fate(first["second_system"], _SYSTEM, _SECOND),
        late_system=_fate(first["late_system"], _SYSTEM, _QUESTION),
    )


@dataclass(slots=True, kw_only=True)
class _Prober:
    """Renders named probes, and notes the variables that the template reads."""

    template: ChatTemplate
    variables: set[str] = field(default_factory=set)

    def render(self, probes: Mapping[str, Conversation]) -> dict[str, Rendered]:
        rendered = render(self.template, list(probes.values()))
        self.variables.update(rendered.variables)
        return dict(zip(probes, rendered.texts, strict=True))


# -- conversations


def _turn(role: str, content: str, **more: str) -> dict[str, object]:
    return {"role": role, "content": content, **more}


_USER, _REPLY, _NEXT = (
    _turn("user", _QUESTION),
    _turn("assistant", _ANSWER),
    _turn("user", _FOLLOW_UP),
)


def _first_probes() -> dict[str, Conversation]:
    system = _turn("system", _SYSTEM)
    turns: dict[str, Turns] = {
        "plain": [_USER],
        "two_turns": [_USER, _REPLY, _NEXT],
        "system": [system, _USER],
        "developer": [_turn("developer", _SYSTEM), _USER],
        "second_system": [system, _turn("system", _SECOND), _USER],
        "late_system": [_USER, _REPLY, system, _NEXT],
    }
    for pair in WORD_PAIRS:
        turns |= {word: [_turn("system", f"{_SYSTEM}\n{word}"), _USER] for word in pair}
    return {name: Conversation(messages=messages) for name, messages in turns.items()}


def _switch_and_efforts(
    prober: _Prober, first: Mapping[str, Rendered], by_name: ThinkingSwitch | None
) -> tuple[ThinkingSwitch | None, tuple[str, ...]]:
    names = names_about_thinking(prober.variables, prober.template.text)
    probes = argument_probes(names)
    rendered = prober.render(
        {key: Conversation(messages=[_USER], kwargs=kwargs) for key, kwargs in probes.items()}
    )
    switch = argument_switch(names, rendered) or word_switch(first)
    if switch is None and by_name is not None and by_name.words is not None:
        switch = by_name
    return switch, efforts_of(names, rendered, switch)


def _second_probes(text: str, switch: ThinkingSwitch | None) -> dict[str, Conversation]:
    on = switch.kwargs(thinking=True) if switch else {}
    reasoned = _turn("assistant", _ANSWER, reasoning_content=_REASONING)
    # Names that other templates have for it.
    renamed = _turn("assistant", _ANSWER, reasoning=_REASONING, thinking=_REASONING)
    probes = {
        "on": _switched(switch, thinking=True),
        "off": _switched(switch, thinking=False),
        "earlier": Conversation(messages=[_USER, reasoned, _NEXT], kwargs=on),
        "last": Conversation(messages=[_USER, reasoned], kwargs=on, add_generation_prompt=False),
        "renamed": Conversation(messages=[_USER, renamed], kwargs=on, add_generation_prompt=False),
    }
    for tags in _tags_written_in(text):
        inline = f"{tags.opening}\n{_REASONING}\n{tags.closing}\n\n{_ANSWER}"
        turns = [_USER, _turn("assistant", inline), _NEXT]
        probes[f"{_INLINE}{tags.opening}"] = Conversation(messages=turns, kwargs=on)
    return probes


def _switched(switch: ThinkingSwitch | None, *, thinking: bool) -> Conversation:
    if switch is None:
        return Conversation(messages=[_USER])
    turns: list[Mapping[str, object]] = [_USER]
    if switch.words is not None:
        turns.insert(0, _turn("system", switch.words[0 if thinking else 1]))
    return Conversation(messages=turns, kwargs=switch.kwargs(thinking=thinking))


# -- thinking


def _thinking_of(
    text: str, probes: Mapping[str, Rendered]
) -> tuple[ThinkingTags | None, bool, bool]:
    """Return the tags, and whether the prompt ends inside them with thinking on and off."""
    on, off = _after_question(probes["on"]), _after_question(probes["off"])
    shown = [one for one in (probes["last"], probes["renamed"]) if isinstance(one, str)]
    around = [tags for tags in map(_tags_around_reasoning, shown) if tags is not None]
    # Tags that the template shows around the reasoning go first, then those it ends a prompt with.
    candidates = [
        *(tags for tags in ALL_TAGS if any(_surrounds(tags, one) for one in shown)),
        *around,
        *(tags for tags in ALL_TAGS if tags.opening in on or tags.opening in off),
        *_tags_written_in(text),
    ]
    tags = candidates[0] if candidates else None
    opens = [any(ends_inside(tags, end) for tags in candidates) for end in (on, off)]
    return tags, opens[0], opens[1]


def _after_question(rendered: Rendered) -> str:
    return rendered.rpartition(_QUESTION)[2] if isinstance(rendered, str) else ""


def _surrounds(tags: ThinkingTags, rendered: str) -> bool:
    before, found, after = rendered.partition(_REASONING)
    return bool(found) and before.rstrip().endswith(tags.opening) and tags.closing in after


def _tags_around_reasoning(rendered: str) -> ThinkingTags | None:
    """Return the marks right before and after the reasoning, if they name thinking."""
    before, found, after = rendered.partition(_REASONING)
    openings, closings = _MARK.findall(before), _MARK.findall(after)
    if not found or not openings or not closings:
        return None
    if not before.rstrip().endswith(openings[-1]) or not _MARK_OF_THINKING.search(openings[-1]):
        return None
    return ThinkingTags(opening=openings[-1], closing=closings[0])


def ends_inside(tags: ThinkingTags, ending: str) -> bool:
    """Tell if a prompt ends with the opening tag; one more mark may follow, as a budget's."""
    _, opening, after = ending.rpartition(tags.opening)
    rest = after.strip()
    is_end = not rest or (_MARK.fullmatch(rest) is not None and rest != tags.closing)
    return bool(opening) and is_end


def _tags_written_in(text: str) -> list[ThinkingTags]:
    """Return the known tags that are in the template's own text."""
    return [tags for tags in ALL_TAGS if tags.opening in text or tags.closing in text]


def _cuts_answers(probes: Mapping[str, Rendered]) -> bool | None:
    inline = [text for name, text in probes.items() if name.startswith(_INLINE)]
    whole = [text for text in inline if isinstance(text, str) and _ANSWER in text]
    if not whole:
        return False if not inline else None
    return any(_REASONING not in text for text in whole)


def _has(rendered: Rendered, text: str) -> bool | None:
    return text in rendered if isinstance(rendered, str) else None


# -- system turns


def _fate(rendered: Rendered, *texts: str) -> TurnFate:
    if isinstance(rendered, TemplateFault):
        return "refused"
    return "kept" if all(text in rendered for text in texts) else "dropped"


def _developer_fate(rendered: Rendered, text: str) -> TurnFate:
    """Tell a role that the template knows from one whose name it only prints."""
    fate = _fate(rendered, _SYSTEM)
    return "foreign" if fate == "kept" and "developer" not in text else fate


def _added_system(plain: str, two_turns: Rendered) -> str | None:
    """Return what is before the first question, other than the head of every user turn."""
    if isinstance(two_turns, TemplateFault):
        return None
    before = _PIECE.findall(plain.partition(_QUESTION)[0])
    head = _PIECE.findall(two_turns.partition(_ANSWER)[2].partition(_FOLLOW_UP)[0])
    while before and head and before[-1] == head[-1]:
        before.pop()
        head.pop()
    has_words = any(not _MARK.fullmatch(piece) and piece.isalnum() for piece in before)
    return "".join(before).strip() if has_words else ""
