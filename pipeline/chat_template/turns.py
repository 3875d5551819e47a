"""Fit the system turns of a conversation to a model's chat template. Pure.

Templates refuse or drop turns: a `developer` role, a second system turn, one in mid-conversation,
any system turn at all. The text of such a turn goes where the template keeps it. Where the template
is not at hand, the conversation gets at most one system turn, its first, which all take that know
system turns. No text is lost, and answers see no instruction that came after them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeline.models.thinking import row_thinking
from schemas.chat_template import TemplateFacts
from schemas.config.run_file import RunFile
from schemas.prompt import Message, Prompt

_SYSTEM_ROLES = ("system", "developer")
_BETWEEN = "\n\n"


def fitted_prompt(prompt: Prompt, config: RunFile, facts: TemplateFacts) -> Prompt:
    """Return the prompt as it is sent; the row's `messages` are these.

    A row whose template arguments switch thinking gets that as its own setting of thinking.
    """
    if prompt.problem is not None:
        return prompt
    thinking, settings = row_thinking(config, facts, prompt.settings), prompt.settings
    if thinking != (config.thinking if settings.thinking is None else settings.thinking):
        settings = replace(settings, thinking=thinking)
    as_given = not config.prompts.fits_system_turns
    messages = fitted(prompt.messages, facts, thinking=thinking, as_given=as_given)
    return replace(prompt, messages=messages, settings=settings)


def fitted(
    messages: tuple[Message, ...], facts: TemplateFacts, *, thinking: bool, as_given: bool = False
) -> tuple[Message, ...]:
    """Return the conversation as it is sent: its system turns fitted, thinking's words added.

    `as_given` leaves the turns as they are, and only adds the words.
    """
    if not as_given:
        messages = _with_fitted_system(messages, facts)
    return _with_words(messages, facts, thinking=thinking)


def _with_fitted_system(messages: tuple[Message, ...], facts: TemplateFacts) -> tuple[Message, ...]:
    if not any(message.role in _SYSTEM_ROLES for message in messages):
        return messages
    if facts.developer != "kept":
        messages = tuple(_as_system(message) for message in messages)
    num_leading = _num_leading(messages)
    leading, rest = messages[:num_leading], messages[num_leading:]
    if facts.second_system != "kept":
        leading = _joined(leading)
    if facts.late_system != "kept":
        rest = _into_user_turns(rest)
    if facts.system in ("refused", "dropped"):
        return _into_user_turns((*leading, *rest))
    return (*leading, *rest)


def _as_system(message: Message) -> Message:
    return replace(message, role="system") if message.role == "developer" else message


def _num_leading(messages: Sequence[Message]) -> int:
    others = (n for n, message in enumerate(messages) if message.role not in _SYSTEM_ROLES)
    return next(others, len(messages))


def _joined(leading: tuple[Message, ...]) -> tuple[Message, ...]:
    if len(leading) < 2:
        return leading
    roles = {message.role for message in leading}
    first = leading[0] if len(roles) == 1 else _as_system(leading[0])
    return (replace(first, content=_text(message.content for message in leading)),)


def _text(texts: Iterable[str]) -> str:
    return _BETWEEN.join(text for text in texts if text)


def _into_user_turns(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Put each system turn before the text of the next user turn, else after the last one's."""
    fitted: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role in _SYSTEM_ROLES:
            waiting.append(message.content)
        elif message.role == "user":
            fitted.append(replace(message, content=_text([*waiting, message.content])))
            waiting.clear()
        else:
            _add_to_last_user_turn(fitted, waiting)
            fitted.append(message)
    _add_to_last_user_turn(fitted, waiting)
    return tuple(fitted)


def _add_to_last_user_turn(fitted: list[Message], waiting: list[str]) -> None:
    """Add what waits in front of an answer. Without a user turn before it, it waits on."""
    numbers = [n for n, message in enumerate(fitted) if message.role == "user"]
    if waiting and numbers:
        last = fitted[numbers[-1]]
        fitted[numbers[-1]] = replace(last, content=_text([last.content, *waiting]))
        waiting.clear()


def _with_words(
    messages: tuple[Message, ...], facts: TemplateFacts, *, thinking: bool
) -> tuple[Message, ...]:
    """Put the words that switch thinking in front of the system turn, unless it has some."""
    words = facts.switch.words if facts.switch is not None else None
    if words is None:
        return messages
    own = words[0 if thinking else 1]
    if not messages or messages[0].role not in _SYSTEM_ROLES:
        return (Message(role="system", content=own), *messages)
    if any(word in messages[0].content for word in words):
        return messages
    return (replace(messages[0], content=_text([own, messages[0].content])), *messages[1:])
