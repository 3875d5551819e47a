"""Switches of the chat templates by family, and where thinking ends in a turn."""

import pytest

from pipeline.models.thinking import (
    GPT_OSS,
    KIMI,
    MISTRAL,
    facts_by_name,
    family,
    split_thinking,
)
from schemas.chat_template import ThinkingTags


@pytest.mark.parametrize(
    ("model", "kwargs", "opens"),
    [
        ("deepseek-ai/DeepSeek-V3.1", {"thinking": True}, False),
        ("deepseek-ai/DeepSeek-V4-Flash", {"thinking": True}, False),
        ("deepseek-ai/DeepSeek-R1", {}, True),
        ("moonshotai/Kimi-K2.5", {"thinking": True}, False),
        ("moonshotai/Kimi-K2-Thinking", {}, False),
        ("MiniMaxAI/MiniMax-M3", {"thinking_mode": "enabled"}, False),
        ("MiniMaxAI/MiniMax-M2.5", {}, True),
        ("ibm-granite/granite-4", {"thinking": True}, False),
        ("Qwen/Qwen3-4B-Thinking-2507", {}, True),
        ("Qwen/QwQ-32B", {}, True),
        ("Qwen/Qwen3.6-27B", {"enable_thinking": True}, True),
        ("Qwen/Qwen3-32B", {"enable_thinking": True}, False),
        ("zai-org/GLM-5", {"enable_thinking": True}, False),
        ("some/unknown", {"enable_thinking": True}, False),
    ],
)
def test_switch_of_each_family(model: str, kwargs: dict[str, object], opens: bool) -> None:
    facts = facts_by_name(model)
    assert facts.thinking_kwargs(thinking=True) == kwargs
    assert facts.opens_thinking(thinking=True) is opens


def test_thinking_is_switched_off_in_the_families_own_words() -> None:
    def kwargs(model: str) -> dict[str, object]:
        return facts_by_name(model).thinking_kwargs(thinking=False)

    assert kwargs("MiniMaxAI/MiniMax-M3") == {"thinking_mode": "disabled"}
    assert kwargs("Qwen/Qwen3-32B") == {"enable_thinking": False}
    assert kwargs("ByteDance-Seed/Seed-OSS-36B-Instruct") == {"thinking_budget": 0}
    assert kwargs("deepseek-ai/DeepSeek-R1") == {}


def test_families_of_words_are_switched_in_the_system_turn() -> None:
    switches = [
        facts_by_name(model).switch
        for model in (
            "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
            "nvidia/Llama-3_3-Nemotron-Super-49B-v1_5",
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        )
    ]
    assert [switch and switch.words for switch in switches] == [
        ("detailed thinking on", "detailed thinking off"),
        ("/think", "/no_think"),
        None,
    ]


@pytest.mark.parametrize(
    "model", ["openai/gpt-oss-120b", "deepseek-ai/DeepSeek-R1-0528", "MiniMaxAI/MiniMax-M2.5"]
)
def test_family_that_cannot_be_switched_is_known_to_think(model: str) -> None:
    facts = facts_by_name(model)
    assert (facts.switch, facts.thinks) == (None, True)
    assert family(model).opens_in_prompt is facts.opens_thinking(thinking=False)


def test_unknown_model_gets_the_usual_switch_and_nothing_else_is_claimed() -> None:
    facts = facts_by_name("some/unknown")
    assert facts.thinks is None
    assert facts.tags is None
    assert (facts.developer, facts.second_system) == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("content", "reasoning", "opens", "cut", "parts"),
    [
        ("\n\nA", "\nR\n", False, False, ("R", "A")),
        ("A", "", False, False, ("", "A")),
        ("<think>\nR\n</think>\n\nA", None, False, False, ("R", "A")),
        ("R\n</think>\nA", None, True, False, ("R", "A")),
        # An opening tag that the engine stripped; without a closing tag, all is the answer.
        ("R</think>A", None, False, False, ("R", "A")),
        ("A", None, True, False, (None, "A")),
        ("R", None, True, True, ("R", "")),
        ("A", None, False, True, (None, "A")),
        ("<think>R", None, False, False, ("R", "")),
        # An answer that quotes the tags did not think.
        ("say <think>x</think>", None, False, False, (None, "say <think>x</think>")),
        ("say <think>x</think>", None, True, False, ("say <think>x", "")),
    ],
)
def test_thinking_ends_at_the_closing_tag(
    content: str, reasoning: str | None, opens: bool, cut: bool, parts: tuple[str | None, str]
) -> None:
    assert split_thinking(content, reasoning, opens_in_prompt=opens, was_cut=cut) == parts


@pytest.mark.parametrize(
    ("tags", "content", "cut", "parts"),
    [
        (KIMI, "◁think▷R◁/think▷A", False, ("R", "A")),
        (MISTRAL, "[THINK]R[/THINK]A", False, ("R", "A")),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>R<|end|><|start|>assistant<|channel|>final<|message|>A",
            False,
            ("R", "A"),
        ),
        # Without special tokens.
        (GPT_OSS, "analysisR.assistantfinalA", False, ("R.", "A")),
        (GPT_OSS, "analysisR", True, ("R", "")),
        (GPT_OSS, "analysis of the data", False, (None, "analysis of the data")),
    ],
)
def test_thinking_ends_at_the_tags_of_the_family(
    tags: ThinkingTags, content: str, cut: bool, parts: tuple[str | None, str]
) -> None:
    assert split_thinking(content, None, opens_in_prompt=False, was_cut=cut, tags=tags) == parts
