"""Thinking by model family: the switch in its chat template, and where its thinking ends. Pure.

Each family's chat template has its own switch. An engine with a reasoning parser returns the
thinking separately; one without leaves the tags in the text, sometimes without the opening tag,
which the template has put at the end of the prompt.
"""

from dataclasses import dataclass

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's template switch; the family is known by a part of the model's name."""

    name_parts: tuple[str, ...]
    word: str | None
    """Key in `chat_template_kwargs`; None where the template has no switch."""
    on: object = True
    off: object = False
    opens_in_prompt: bool = False
    """The template writes the opening tag, so the text begins inside the thinking."""


# Switches and defaults as in SGLang 0.5.23, srt/parser/reasoning_parser.py and
# srt/entrypoints/openai/serving_chat.py; templates of the Hugging Face repositories.
FAMILIES = (
    Family(name_parts=("deepseek-v3.1", "deepseek-v3.2", "deepseek-v4"), word="thinking"),
    Family(name_parts=("deepseek-r1",), word=None, opens_in_prompt=True),
    Family(name_parts=("kimi-k2.5", "kimi-k2.6", "kimi-k2.7", "kimi-k3"), word="thinking"),
    Family(name_parts=("kimi-k2-thinking",), word=None),
    Family(name_parts=("minimax-m3",), word="thinking_mode", on="enabled", off="disabled"),
    Family(name_parts=("minimax-m2",), word=None, opens_in_prompt=True),
    Family(name_parts=("granite",), word="thinking"),
    Family(name_parts=("-thinking-2507", "qwq"), word=None, opens_in_prompt=True),
    Family(
        name_parts=("qwen3.5", "qwen3.6", "qwen3.8"), word="enable_thinking", opens_in_prompt=True
    ),
    Family(
        name_parts=(
            "qwen3",
            "glm-4.5",
            "glm-4.6",
            "glm-4.7",
            "glm-5",
            "nemotron",
            "mimo",
            "gemma-4",
        ),
        word="enable_thinking",
    ),
)

_UNKNOWN = Family(name_parts=(), word="enable_thinking")


def family(model: str) -> Family:
    """Return the first family that matches the model's name; Qwen's switch where none does."""
    name = model.lower()
    return next((f for f in FAMILIES if any(part in name for part in f.name_parts)), _UNKNOWN)


def template_kwargs(model: str, *, thinking: bool) -> dict[str, object]:
    """Return the `chat_template_kwargs` that switch thinking for this model."""
    switch = family(model)
    if switch.word is None:
        return {}
    return {switch.word: switch.on if thinking else switch.off}


def split_thinking(
    content: str, reasoning: str | None, *, opens_in_prompt: bool, was_cut: bool
) -> tuple[str | None, str]:
    """Return `(reasoning_text, answer_text)` of one generated turn.

    `reasoning` is what the engine returned separately, if anything. Otherwise the tags in `content`
    decide: everything before the closing tag is thinking, with or without the opening tag; a text
    cut before the closing tag is all thinking if the text or the prompt opened it. The line feeds
    between thinking and answer are in neither.
    """
    if reasoning is not None:
        return reasoning.strip("\n"), content.lstrip("\n")
    body = content.lstrip()
    opened = body.startswith(_OPEN)
    if opened:
        body = body.removeprefix(_OPEN)
    before, closing, after = body.partition(_CLOSE)
    if closing and (opened or opens_in_prompt or _OPEN not in before):
        return before.strip("\n"), after.lstrip("\n")
    if opened or (opens_in_prompt and was_cut):
        return body.strip("\n"), ""
    return None, content
