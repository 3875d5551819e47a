"""System turns that are fitted to what a chat template keeps."""

from dataclasses import replace

import pytest

from pipeline.chat_template.turns import fitted, fitted_prompt
from schemas.chat_template import TemplateFacts, ThinkingSwitch
from schemas.config.run_file import RunFile
from schemas.prompt import Message, Prompt, Role

UNKNOWN = TemplateFacts(source="test")
ALL_KEPT = TemplateFacts(
    source="test",
    digest="d",
    system="kept",
    developer="kept",
    second_system="kept",
    late_system="kept",
)
ONE_SYSTEM = replace(ALL_KEPT, developer="refused", second_system="refused", late_system="refused")
NO_SYSTEM = replace(ONE_SYSTEM, system="refused")
_ROLES: dict[str, Role] = {
    "s": "system",
    "d": "developer",
    "u": "user",
    "a": "assistant",
}


def turns(*words: str) -> tuple[Message, ...]:
    """Build messages from a letter for the role and the text: `s:be brief`."""
    pairs = (word.split(":", 1) for word in words)
    return tuple(Message(role=_ROLES[letter], content=text) for letter, text in pairs)


@pytest.mark.parametrize(
    ("facts", "given", "sent"),
    [
        # Joined.
        (ONE_SYSTEM, ["s:1", "s:2", "u:q", "a:"], ["s:1\n\n2", "u:q", "a:"]),
        (ONE_SYSTEM, ["s:1", "d:2", "u:q", "a:"], ["s:1\n\n2", "u:q", "a:"]),
        (ONE_SYSTEM, ["d:1", "u:q", "a:"], ["s:1", "u:q", "a:"]),
        # Later ones go where their text is read: before the next question.
        (ONE_SYSTEM, ["u:q", "a:", "s:m", "u:r", "a:"], ["u:q", "a:", "u:m\n\nr", "a:"]),
        (
            ONE_SYSTEM,
            ["u:q", "a:", "d:m", "s:n", "u:r", "a:"],
            ["u:q", "a:", "u:m\n\nn\n\nr", "a:"],
        ),
        (ONE_SYSTEM, ["u:q", "s:m", "a:"], ["u:q\n\nm", "a:"]),
        (
            ONE_SYSTEM,
            ["s:1", "u:q", "s:m", "a:", "u:r", "a:"],
            ["s:1", "u:q\n\nm", "a:", "u:r", "a:"],
        ),
        # A template that keeps all is given all; one that keeps none, the texts.
        (ALL_KEPT, ["s:1", "d:2", "u:q", "a:", "s:m", "u:r", "a:"], None),
        (NO_SYSTEM, ["s:1", "d:2", "u:q", "a:"], ["u:1\n\n2\n\nq", "a:"]),
        # A developer turn that the template knows, and only one.
        (
            replace(ALL_KEPT, second_system="dropped"),
            ["d:1", "d:2", "u:q", "a:"],
            ["d:1\n\n2", "u:q", "a:"],
        ),
        # Unknown: one system turn, the first.
        (
            UNKNOWN,
            ["d:1", "s:2", "u:q", "a:", "s:m", "u:r", "a:"],
            ["s:1\n\n2", "u:q", "a:", "u:m\n\nr", "a:"],
        ),
        (UNKNOWN, ["s:1", "u:q", "a:"], None),
        (UNKNOWN, ["u:q", "a:"], None),
    ],
)
def test_text_of_a_turn_goes_where_the_template_keeps_it(
    facts: TemplateFacts, given: list[str], sent: list[str] | None
) -> None:
    messages = turns(*given)
    expected = messages if sent is None else turns(*sent)
    assert fitted(messages, facts, thinking=True) == expected


def test_turns_are_left_as_they_are_on_request() -> None:
    messages = turns("s:1", "s:2", "u:q", "a:")
    assert fitted(messages, ONE_SYSTEM, thinking=True, as_given=True) == messages


@pytest.mark.parametrize(
    ("given", "thinking", "first"),
    [
        (["u:q", "a:"], True, "s:think hard"),
        (["u:q", "a:"], False, "s:do not think"),
        (["s:Be brief.", "u:q", "a:"], False, "s:do not think\n\nBe brief."),
        (["d:Be brief.", "u:q", "a:"], True, "s:think hard\n\nBe brief."),
        # The row's own word stands.
        (["s:think hard", "u:q", "a:"], False, "s:think hard"),
    ],
)
def test_words_for_thinking_are_in_the_system_turn(
    given: list[str], thinking: bool, first: str
) -> None:
    switch = ThinkingSwitch(words=("think hard", "do not think"))
    facts = replace(ONE_SYSTEM, switch=switch)
    sent = fitted(turns(*given), facts, thinking=thinking)
    assert sent[:1] == turns(first)
    assert sent[1:] == turns("u:q", "a:")


def test_prompt_is_fitted_as_the_run_file_says_and_keeps_its_id_and_hash() -> None:
    prompt = Prompt(
        row_id="r", content_hash="h", messages=turns("s:1", "s:2", "u:q", "a:"), carried={}
    )
    run = {"model": "m", "output": {"folder": "o"}}
    fit = RunFile.model_validate(run | {"prompts": {"path": "p"}})
    keep = RunFile.model_validate(run | {"prompts": {"path": "p", "system_turns": "as_given"}})
    sent = fitted_prompt(prompt, fit, ONE_SYSTEM)
    assert sent == replace(prompt, messages=turns("s:1\n\n2", "u:q", "a:"))
    assert fitted_prompt(prompt, keep, ONE_SYSTEM) == prompt
