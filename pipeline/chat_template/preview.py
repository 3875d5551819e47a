"""Prompts as the model will see them: one of each kind, rendered through its own template."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.chat_template.probes import ends_inside
from pipeline.chat_template.rendering import (
    ChatTemplate,
    Conversation,
    TemplateFault,
    message_fields,
    render,
)
from pipeline.models.thinking import row_template_kwargs
from schemas.chat_template import TemplateFacts
from schemas.config.run_file import RunFile
from schemas.prompt import Message, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPrompt:
    """A prompt of one kind, as the model sees it at the last turn that is to be generated."""

    kind: str
    row_id: str
    text: str | None
    """Rendered prompt; None where the template is not at hand, or refuses the conversation."""
    num_tokens: int | None
    opens_thinking: bool
    """The prompt ends inside the thinking."""
    fault: str | None
    """Reason why the template refuses it: an engine refuses it too."""


def kind_of(prompt: Prompt) -> str:
    """Name the kind of a prompt: its turns, and what else the template gets."""
    kinds = ["multi-turn" if prompt.num_turns > 1 else "single turn"]
    kinds += [role for role in ("system", "developer") if _has(prompt, role)]
    if prompt.has_tools:
        kinds.append("tools")
    own = prompt.settings
    if own.thinking is not None:
        kinds.append(f"thinking {'on' if own.thinking else 'off'} by the row")
    if own.chat_template_kwargs:
        kinds.append("template arguments of the row")
    return ", ".join(kinds)


def _has(prompt: Prompt, role: str) -> bool:
    return any(message.role == role for message in prompt.messages)


def shown_prompts(
    prompts: Sequence[Prompt],
    template: ChatTemplate | None,
    facts: TemplateFacts,
    config: RunFile,
    count_text: Callable[[str], int],
) -> tuple[ShownPrompt, ...]:
    """Render the prompts; without a template they are shown without a text."""
    words = {**facts.thinking_kwargs(thinking=config.thinking), **config.chat_template_kwargs}
    conversations = [
        Conversation(
            messages=[message_fields(message) for message in _last_request(prompt)],
            tools=prompt.tools or None,
            kwargs=row_template_kwargs(words, facts, prompt.settings),
        )
        for prompt in prompts
    ]
    texts: Sequence[str | TemplateFault | None] = [None] * len(prompts)
    if template is not None and prompts:
        texts = render(template, conversations).texts
    shown = zip(prompts, texts, strict=True)
    return tuple(_shown(prompt, text, facts, count_text) for prompt, text in shown)


def _shown(
    prompt: Prompt,
    text: str | TemplateFault | None,
    facts: TemplateFacts,
    count_text: Callable[[str], int],
) -> ShownPrompt:
    fault = text.cause if isinstance(text, TemplateFault) else None
    text = None if isinstance(text, TemplateFault) else text
    tags = facts.tags
    return ShownPrompt(
        kind=kind_of(prompt),
        row_id=prompt.row_id,
        text=text,
        num_tokens=None if text is None else count_text(text),
        opens_thinking=text is not None and tags is not None and ends_inside(tags, text),
        fault=fault,
    )


def _last_request(prompt: Prompt) -> Iterator[Message]:
    """Yield the messages before the last open turn, with the source's answers or a text for each.

    The source's own answers are in it where later turns see these.
    """
    last = max(number for number, message in enumerate(prompt.messages) if message.is_open)
    answers = iter(prompt.originals or ())
    num_answers = 0
    for message in prompt.messages[:last]:
        if message.is_open:
            num_answers += 1
            text = next(answers, f"[answer {num_answers}]")
            message = replace(message, content=text)
        yield message
