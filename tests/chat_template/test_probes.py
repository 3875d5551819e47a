"""Facts of chat templates, found by rendering templates that do what the families' own do."""

import json
from dataclasses import asdict
from functools import cache

import pytest

from pipeline.chat_template.probes import ends_inside, template_facts
from pipeline.chat_template.rendering import ChatTemplate, TemplateFault
from pipeline.models.thinking import THINK
from schemas.chat_template import TemplateFacts
from tests.fakes import chat_templates
from tests.fakes.chat_templates import ALL, CHATML


@cache
def facts_of(text: str, name: str = "local/model") -> TemplateFacts:
    template = ChatTemplate(
        text=text,
        source="test",
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    found = template_facts(template, name)
    assert isinstance(found, TemplateFacts), found
    return found


def facts(model: str) -> TemplateFacts:
    """Return the facts of this model's template under a name that says nothing."""
    return facts_of(ALL[model])


@pytest.mark.parametrize(
    ("model", "on", "off"),
    [
        ("Qwen/Qwen3-32B", {"enable_thinking": True}, {"enable_thinking": False}),
        ("Qwen/Qwen3.6-27B", {"enable_thinking": True}, {"enable_thinking": False}),
        ("deepseek-ai/DeepSeek-V3.1", {"thinking": True}, {"thinking": False}),
        ("zai-org/GLM-4.5", {"enable_thinking": True}, {"enable_thinking": False}),
        ("moonshotai/Kimi-K3", {"thinking": True}, {"thinking": False}),
        ("MiniMaxAI/MiniMax-M3", {"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
        ("ibm-granite/granite-3.3-8b-instruct", {"thinking": True}, {"thinking": False}),
        ("google/gemma-4-31B-it", {"enable_thinking": True}, {"enable_thinking": False}),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", {}, {"thinking_budget": 0}),
        (
            "mistralai/Mistral-Small-4-119B-2603",
            {"reasoning_effort": "high"},
            {"reasoning_effort": "none"},
        ),
        ("some/inverted", {"disable_thinking": False}, {"disable_thinking": True}),
    ],
)
def test_argument_that_switches_thinking_is_found_whatever_the_models_name(
    model: str, on: dict[str, object], off: dict[str, object]
) -> None:
    switch = facts(model).switch
    assert switch is not None
    assert (switch.on, switch.off, switch.words) == (on, off, None)


@pytest.mark.parametrize(
    "model",
    [
        "deepseek-ai/DeepSeek-R1",
        "openai/gpt-oss-20b",
        "moonshotai/Kimi-K2-Thinking",
        "moonshotai/Kimi-VL-A3B-Thinking",
        "MiniMaxAI/MiniMax-M2",
    ],
)
def test_model_that_always_thinks_has_no_switch(model: str) -> None:
    found = facts(model)
    assert (found.switch, found.thinks) == (None, True)


@pytest.mark.parametrize(
    "model", ["meta-llama/Llama-3.1-8B-Instruct", "google/gemma-2-9b-it", "some/chatml"]
)
def test_model_without_thinking_is_told_from_one_without_a_switch(model: str) -> None:
    found = facts(model)
    assert (found.switch, found.thinks, found.tags) == (None, False, None)


def test_words_are_found_where_the_template_looks_for_them_and_else_known_by_name() -> None:
    own = facts("nvidia/NVIDIA-Nemotron-Nano-9B-v2")
    assert own.switch is not None
    assert own.switch.words == ("/think", "/no_think")
    assert (own.opens_when_on, own.opens_when_off) == (True, False)
    super_v1 = "nvidia/Llama-3_3-Nemotron-Super-49B-v1"
    by_name = facts_of(ALL[super_v1], super_v1).switch
    assert by_name is not None
    assert by_name.words == ("detailed thinking on", "detailed thinking off")
    # The template alone does not show that the model knows the words.
    assert facts(super_v1).switch is None


def test_effort_that_is_only_printed_is_no_switch() -> None:
    assert facts("openai/gpt-oss-20b").efforts == ("reasoning_effort",)
    assert facts("moonshotai/Kimi-K3").efforts == ("thinking_effort",)
    assert facts("mistralai/Mistral-Small-4-119B-2603").efforts == ()
    printed = CHATML + "{{ 'thinking: ' ~ (thinking | default('unset')) }}"
    assert facts_of(printed).switch is None


def test_switch_of_earlier_reasoning_is_no_switch_of_thinking() -> None:
    # Qwen3.5's `preserve_thinking` alters nothing in a conversation of one turn.
    assert "preserve_thinking" in chat_templates.QWEN3_5
    only_history = chat_templates.QWEN3_5.replace("enable_thinking", "unread")
    assert facts_of(only_history).switch is None


@pytest.mark.parametrize(
    ("model", "on", "off"),
    [
        ("Qwen/Qwen3-32B", False, False),
        ("Qwen/Qwen3.6-27B", True, False),
        ("deepseek-ai/DeepSeek-V3.1", True, False),
        ("deepseek-ai/DeepSeek-R1", True, True),
        ("moonshotai/Kimi-K3", True, False),
        ("MiniMaxAI/MiniMax-M2", True, True),
        ("MiniMaxAI/MiniMax-M3", True, False),
        ("google/gemma-4-31B-it", False, False),
        # It opens the thinking to say that there is none.
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", False, True),
        ("meta-llama/Llama-3.1-8B-Instruct", False, False),
    ],
)
def test_template_that_opens_the_thinking_itself_is_found(model: str, on: bool, off: bool) -> None:
    found = facts(model)
    assert (found.opens_when_on, found.opens_when_off) == (on, off)


@pytest.mark.parametrize(
    ("model", "opening", "closing"),
    [
        ("Qwen/Qwen3-32B", "<think>", "</think>"),
        ("MiniMaxAI/MiniMax-M3", "<mm:think>", "</mm:think>"),
        ("moonshotai/Kimi-K3", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("moonshotai/Kimi-VL-A3B-Thinking", "\u25c1think\u25b7", "\u25c1/think\u25b7"),
        ("google/gemma-4-31B-it", "<|channel>thought", "<channel|>"),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", "<seed:think>", "</seed:think>"),
        ("mistralai/Mistral-Small-4-119B-2603", "[THINK]", "[/THINK]"),
    ],
)
def test_tags_are_those_that_the_template_writes(model: str, opening: str, closing: str) -> None:
    tags = facts(model).tags
    assert tags is not None
    assert (tags.opening, tags.closing) == (opening, closing)


def test_tags_of_no_known_family_are_read_around_the_reasoning() -> None:
    text = chat_templates.QWEN3.replace("<think>", "<my_thoughts>").replace(
        "</think>", "</my_thoughts>"
    )
    tags = facts_of(text).tags
    assert tags is not None
    assert (tags.opening, tags.closing) == ("<my_thoughts>", "</my_thoughts>")


@pytest.mark.parametrize(
    ("model", "earlier", "last", "cuts"),
    [
        ("Qwen/Qwen3-32B", False, True, True),
        ("Qwen/Qwen3.6-27B", False, True, True),
        ("deepseek-ai/DeepSeek-R1", False, False, True),
        ("moonshotai/Kimi-K3", True, True, False),
        ("moonshotai/Kimi-K2-Thinking", False, True, False),
        ("mistralai/Mistral-Small-4-119B-2603", True, True, False),
        ("google/gemma-4-31B-it", False, True, True),
        # It refuses an answer that contains its tags.
        ("openai/gpt-oss-20b", False, False, None),
        ("some/chatml", False, False, False),
    ],
)
def test_reasoning_of_earlier_turns_is_kept_or_dropped(
    model: str, earlier: bool, last: bool, cuts: bool | None
) -> None:
    found = facts(model)
    assert found.keeps_earlier_reasoning is earlier
    assert found.keeps_last_reasoning is last
    assert found.cuts_answers is cuts


@pytest.mark.parametrize(
    ("model", "system", "developer", "second", "late"),
    [
        ("Qwen/Qwen3.6-27B", "kept", "refused", "refused", "refused"),
        ("deepseek-ai/DeepSeek-V3.1", "kept", "dropped", "kept", "kept"),
        ("openai/gpt-oss-20b", "kept", "kept", "dropped", "dropped"),
        ("google/gemma-4-31B-it", "kept", "kept", "kept", "kept"),
        ("google/gemma-2-9b-it", "refused", "refused", "refused", "refused"),
        # A role whose name is printed, as any other word would be.
        ("meta-llama/Llama-3.1-8B-Instruct", "kept", "foreign", "kept", "kept"),
    ],
)
def test_fate_of_system_turns_is_found(
    model: str, system: str, developer: str, second: str, late: str
) -> None:
    found = facts(model)
    fates = (found.system, found.developer, found.second_system, found.late_system)
    assert fates == (system, developer, second, late)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Qwen/Qwen3-32B", None),
        ("zai-org/GLM-4.5", None),
        ("google/gemma-4-31B-it", None),
        ("deepseek-ai/DeepSeek-V3.1", None),
        ("meta-llama/Llama-3.1-8B-Instruct", "Cutting Knowledge Date"),
        ("openai/gpt-oss-20b", "You are ChatGPT."),
        ("ibm-granite/granite-3.3-8b-instruct", "You are Granite"),
        ("MiniMaxAI/MiniMax-M2", "You are a helpful assistant."),
    ],
)
def test_system_turn_that_the_template_adds_is_found(model: str, words: str | None) -> None:
    added = facts(model).added_system
    assert added == "" if words is None else words in (added or "")


def test_template_that_renders_nothing_is_a_fault_with_its_cause() -> None:
    broken = ChatTemplate(text="{{ raise_exception('needs a tool') }}", source="test")
    found = template_facts(broken, "m")
    assert isinstance(found, TemplateFault)
    assert found.cause == "needs a tool"


def test_facts_survive_their_json() -> None:
    for model in ALL:
        found = facts(model)
        assert TemplateFacts.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_prompt_ends_inside_the_thinking_only_at_its_end() -> None:
    assert ends_inside(THINK, "a<think>\n")
    assert not ends_inside(THINK, "a<think>\n\n</think>\n\n")
    assert not ends_inside(THINK, "say <think> and stop")
