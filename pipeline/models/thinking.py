"""Thinking by model family: its tags, the switch in its chat template, and where it ends. Pure.

The table answers for models whose chat template is not at hand. An engine with a reasoning parser
returns the thinking separately; one without leaves the tags in the text, sometimes without the
opening tag, which the template has put at the end of the prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.chat_template import TemplateFacts, ThinkingSwitch, ThinkingTags
from schemas.config.run_file import RunFile
from schemas.prompt import RowSettings

# Tags by family, as in SGLang 0.5.23, srt/parser/reasoning_parser.py, and in the chat templates of
# the Hugging Face repositories.
THINK = ThinkingTags(opening="<think>", closing="</think>")
MINIMAX_M3 = ThinkingTags(opening="<mm:think>", closing="</mm:think>")
SEED = ThinkingTags(opening="<seed:think>", closing="</seed:think>")
MISTRAL = ThinkingTags(opening="[THINK]", closing="[/THINK]")
KIMI = ThinkingTags(opening="◁think▷", closing="◁/think▷")
KIMI_K3 = ThinkingTags(opening="<|open|>think<|sep|>", closing="<|close|>think<|sep|>")
GEMMA = ThinkingTags(opening="<|channel>thought", closing="<channel|>")
GPT_OSS = ThinkingTags(
    opening="<|channel|>analysis<|message|>",
    closing="<|end|><|start|>assistant<|channel|>final<|message|>",
)
# What is left of them where the server leaves out special tokens.
GPT_OSS_BARE = ThinkingTags(opening="analysis", closing="assistantfinal")
COHERE = ThinkingTags(opening="<|START_THINKING|>", closing="<|END_THINKING|>")
APERTUS = ThinkingTags(opening="<|inner_prefix|>", closing="<|inner_suffix|>")
THINKING = ThinkingTags(opening="<thinking>", closing="</thinking>")
APRIEL = ThinkingTags(opening="Here are my reasoning steps:", closing="[BEGIN FINAL RESPONSE]")
# Granite 3.2 has sentences instead of tags.
GRANITE_3_2 = ThinkingTags(opening="Here is my thought process:", closing="Here is my response:")
ALL_TAGS = (
    *(THINK, MINIMAX_M3, SEED, MISTRAL, KIMI, KIMI_K3, GEMMA, GPT_OSS, COHERE, APERTUS),
    *(THINKING, APRIEL, GRANITE_3_2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's template; the family is known by a part of the model's name."""

    name_parts: tuple[str, ...]
    switch: ThinkingSwitch | None
    """Switch of its thinking; None where there is none."""
    opens_in_prompt: bool = False
    """The template writes the opening tag, so the text begins inside the thinking."""
    tags: ThinkingTags = THINK
    efforts: tuple[str, ...] = ()


def _argument(name: str, on: object = True, off: object = False) -> ThinkingSwitch:
    return ThinkingSwitch(on={name: on}, off={name: off})


_ENABLE_THINKING, _THINKING = _argument("enable_thinking"), _argument("thinking")
_SLASH_WORDS = ThinkingSwitch(words=("/think", "/no_think"))

# Switches and defaults as in SGLang 0.5.23, srt/parser/reasoning_parser.py and
# srt/entrypoints/openai/serving_chat.py; templates and cards of the Hugging Face repositories.
FAMILIES = (
    Family(name_parts=("deepseek-v3.1", "deepseek-v3.2", "deepseek-v4"), switch=_THINKING),
    Family(name_parts=("deepseek-r1",), switch=None, opens_in_prompt=True),
    Family(name_parts=("gpt-oss",), switch=None, tags=GPT_OSS, efforts=("reasoning_effort",)),
    Family(name_parts=("kimi-k3",), switch=_THINKING, tags=KIMI_K3),
    Family(name_parts=("kimi-k2.5", "kimi-k2.6", "kimi-k2.7"), switch=_THINKING),
    Family(name_parts=("kimi-k2-thinking",), switch=None),
    Family(name_parts=("kimi-vl", "kimi-dev"), switch=None, tags=KIMI),
    Family(
        name_parts=("minimax-m3",),
        switch=_argument("thinking_mode", "enabled", "disabled"),
        tags=MINIMAX_M3,
    ),
    Family(name_parts=("minimax-m2",), switch=None, opens_in_prompt=True),
    Family(name_parts=("granite-3.2",), switch=_THINKING, tags=GRANITE_3_2),
    Family(name_parts=("granite",), switch=_THINKING),
    Family(name_parts=("apriel",), switch=None, opens_in_prompt=True, tags=APRIEL),
    Family(name_parts=("-thinking-2507", "qwq"), switch=None, opens_in_prompt=True),
    Family(
        name_parts=("qwen3.5", "qwen3.6", "qwen3.8"), switch=_ENABLE_THINKING, opens_in_prompt=True
    ),
    Family(name_parts=("seed-oss",), switch=ThinkingSwitch(off={"thinking_budget": 0}), tags=SEED),
    Family(
        name_parts=("mistral-small-4",),
        switch=_argument("reasoning_effort", "high", "none"),
        tags=MISTRAL,
    ),
    Family(name_parts=("magistral",), switch=None, tags=MISTRAL),
    Family(name_parts=("gemma-4",), switch=_ENABLE_THINKING, tags=GEMMA),
    Family(
        name_parts=("nemotron-super-49b-v1_5", "nemotron-nano-9b-v2", "nemotron-nano-12b-v2"),
        switch=_SLASH_WORDS,
    ),
    Family(
        # Llama-Nemotron Nano, Super and Ultra of the first version, by their model cards.
        name_parts=("llama-3.1-nemotron", "llama-3_1-nemotron", "llama-3_3-nemotron"),
        switch=ThinkingSwitch(words=("detailed thinking on", "detailed thinking off")),
    ),
    Family(
        name_parts=("qwen3", "glm-4.5", "glm-4.6", "glm-4.7", "glm-5", "nemotron", "mimo"),
        switch=_ENABLE_THINKING,
    ),
)

_UNKNOWN = Family(name_parts=(), switch=_ENABLE_THINKING)


def family(model: str) -> Family:
    """Return the first family that matches the model's name; Qwen's switch where none does."""
    name = model.lower()
    return next((f for f in FAMILIES if any(part in name for part in f.name_parts)), _UNKNOWN)


def facts_by_name(model: str) -> TemplateFacts:
    """Return what the table knows of a model's template; the rest stays unknown."""
    known = family(model)
    is_known = known is not _UNKNOWN
    name = f"the family of {model!r}" if is_known else f"no known family has {model!r}"
    is_switched = known.switch is not None
    return TemplateFacts(
        source=f"{name}, by its name",
        thinks=True if is_known else None,
        switch=known.switch,
        opens_when_on=known.opens_in_prompt,
        opens_when_off=known.opens_in_prompt and not is_switched,
        tags=known.tags if is_known else None,
        efforts=known.efforts,
    )


def row_template_kwargs(
    run_kwargs: Mapping[str, object], facts: TemplateFacts, own: RowSettings
) -> dict[str, object]:
    """Return the run's template arguments, then those of the row's thinking, then its own."""
    switched = {} if own.thinking is None else facts.thinking_kwargs(thinking=own.thinking)
    return {**run_kwargs, **switched, **(own.chat_template_kwargs or {})}


def row_thinking(config: RunFile, facts: TemplateFacts, own: RowSettings) -> bool:
    """Tell if a row is to be thought about: by the switch as it is sent, else as requested."""
    words = {**facts.thinking_kwargs(thinking=config.thinking), **config.chat_template_kwargs}
    sent = row_template_kwargs(words, facts, own)
    if facts.switch is not None:
        if any(name in sent and sent[name] == off for name, off in facts.switch.off.items()):
            return False
        if any(name in sent and sent[name] == on for name, on in facts.switch.on.items()):
            return True
    return config.thinking if own.thinking is None else own.thinking


def split_thinking(
    content: str,
    reasoning: str | None,
    *,
    opens_in_prompt: bool,
    was_cut: bool,
    tags: ThinkingTags = THINK,
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
    if tags == GPT_OSS and not body.startswith(GPT_OSS.opening):
        tags = GPT_OSS_BARE
    opened = body.startswith(tags.opening)
    if tags == GPT_OSS_BARE and not was_cut:
        # An answer may begin with that word.
        opened = opened and tags.closing in body
    if opened:
        body = body.removeprefix(tags.opening)
    before, closing, after = body.partition(tags.closing)
    if closing and (opened or opens_in_prompt or tags.opening not in before):
        return before.strip("\n"), after.lstrip("\n")
    if opened or (opens_in_prompt and was_cut):
        return body.strip("\n"), ""
    return None, content
