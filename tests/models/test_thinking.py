"""Switches of the chat templates by family, and where thinking ends in a turn."""

import pytest

from pipeline.models.thinking import family, split_thinking, template_kwargs


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
    assert template_kwargs(model, thinking=True) == kwargs
    assert family(model).opens_in_prompt is opens


def test_thinking_is_switched_off_in_the_families_own_words() -> None:
    assert template_kwargs("MiniMaxAI/MiniMax-M3", thinking=False) == {"thinking_mode": "disabled"}
    assert template_kwargs("Qwen/Qwen3-32B", thinking=False) == {"enable_thinking": False}
    assert template_kwargs("deepseek-ai/DeepSeek-R1", thinking=False) == {}


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
