"""Render conversations through a chat template, in a process that it cannot outlive.

Rendering is the same as in transformers' `apply_chat_template`: same sandbox, filters and globals.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.untrusted.parsing import UNREADABLE, UnreadableError, json_object
from schemas.prompt import Message, message_extras

_SCRIPT = Path(__file__).with_name("sandbox.py")
# assumed: a template renders hundreds of conversations in a second
_LIMIT_S = 10
# Function of the sandbox, as of transformers, with which a template writes the date
_CLOCK = "strftime_now"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The text of a template, its special tokens, and where both come from."""

    text: str
    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_text: str | None = None
    """The template that replaces `text` for requests with tools; None: the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to render."""

    messages: Sequence[Mapping[str, object]]
    kwargs: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[object] | None = None
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFault:
    """The reason why a conversation was not rendered, in one line."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderings:
    """The texts of conversations, in order, and the variables that the template reads."""

    texts: tuple[str | TemplateFault, ...]
    variables: tuple[str, ...] = ()


def message_fields(message: Message) -> dict[str, object]:
    """Return a message as a template gets it: arguments of calls are objects, as in SGLang.

    SGLang srt/entrypoints/openai/serving_chat.py: normalize_assistant_tool_call_arguments, 0.5.23.
    """
    fields = {"role": message.role, "content": message.content, **message_extras(message)}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _arguments(text: str) -> object:
    try:
        return json.loads(text)
    except UNREADABLE:
        # The source's own text; the template prints it as it is.
        return text


def prompt_text(
    template: ChatTemplate, messages: Sequence[Message], kwargs: Mapping[str, object]
) -> str | None:
    """Render the prompt of one request; None where the template fails, or reads the clock."""
    if _CLOCK in template.text:
        return None
    one = Conversation(messages=[message_fields(message) for message in messages], kwargs=kwargs)
    (text,) = render(template, [one]).texts
    return text if isinstance(text, str) else None


def render(
    template: ChatTemplate, conversations: Sequence[Conversation], *, now: str = ""
) -> Renderings:
    """Render all conversations; a fault of the template is in each text that it prevents.

    `now` is the ISO time of `strftime_now`; empty: the clock's.
    """
    with_tools = [n for n, one in enumerate(conversations) if one.tools and template.tool_text]
    texts: dict[int, str | TemplateFault] = {}
    variables: set[str] = set()
    plain = [n for n in range(len(conversations)) if n not in set(with_tools)]
    for numbers, text in ((plain, template.text), (with_tools, template.tool_text)):
        if numbers and text is not None:
            chosen = [conversations[number] for number in numbers]
            rendered = _render(text, template.special_tokens, chosen, now)
            texts.update(zip(numbers, rendered.texts, strict=True))
            variables.update(rendered.variables)
    return Renderings(
        texts=tuple(texts[number] for number in range(len(conversations))),
        variables=tuple(sorted(variables)),
    )


def _render(
    text: str, special_tokens: Mapping[str, str], conversations: Sequence[Conversation], now: str
) -> Renderings:
    prompts = [
        {
            "messages": list(one.messages),
            "tools": list(one.tools) if one.tools else None,
            "documents": None,
            "add_generation_prompt": one.add_generation_prompt,
            **one.kwargs,
        }
        for one in conversations
    ]
    task = {
        "template": text,
        "special_tokens": dict(special_tokens),
        "prompts": prompts,
        "now": now,
    }
    answer = _answer(json.dumps(task))
    if "error" in answer:
        fault = TemplateFault(cause=str(answer["error"]))
        return Renderings(texts=(fault,) * len(prompts))
    return Renderings(
        texts=tuple(
            TemplateFault(cause=one["error"]) if "error" in one else one["text"]
            for one in answer["prompts"]
        ),
        variables=tuple(answer["variables"]),
    )


def _answer(task: str) -> dict[str, Any]:
    """Run the sandbox, without the secrets of this process's environment."""
    command = [sys.executable, "-P", "-s", str(_SCRIPT), str(_LIMIT_S)]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
    for name in ("TZ", "LD_LIBRARY_PATH"):
        if name in os.environ:
            environment[name] = os.environ[name]
    try:
        done = subprocess.run(  # noqa: S603 - our own script
            command,
            input=task,
            capture_output=True,
            encoding="utf-8",
            env=environment,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not render within {_LIMIT_S} s"}
    try:
        return json_object(done.stdout)
    except UnreadableError:
        why = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        return {"error": f"the process that renders it ended: {why[0][:200]}"}
