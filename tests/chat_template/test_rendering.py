"""Rendering: the environment of transformers, and bounds against hostile templates."""

import subprocess
import time
from typing import Any

import pytest

from pipeline.chat_template import rendering
from pipeline.chat_template.rendering import ChatTemplate, Conversation, TemplateFault, render

USER = {"role": "user", "content": "Grüße <b>"}


def rendered(text: str, **more: object) -> str | TemplateFault:
    conversation = Conversation(messages=[USER], kwargs=more)
    template = ChatTemplate(text=text, source="test", special_tokens={"bos_token": "<s>"})
    return render(template, [conversation], now="2026-12-01T10:00:00").texts[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Grüße <b>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Grüße <b>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "01 Dec 2026"),
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "1"),
        ("a {% generation %}{% set x = 1 %}b{{ x }}{% endgeneration %} c", "a b1 c"),
        ("{% if add_generation_prompt %}go{% endif %}{{ tools is none }}", "goTrue"),
        # Blocks take their line with them.
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ missing }}|{{ given }}", "|7"),
    ],
)
def test_template_renders_as_in_transformers(text: str, expected: str) -> None:
    assert rendered(text, given=7) == expected


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{{ raise_exception('Only\nuser turns.') }}", "Only user turns."),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for %}", "Expected an expression"),
        ("{{ 'x' * 10**12 }}", "MemoryError"),
        ("{{ 'x' * 10**7 }}", "10,000,000 characters"),
    ],
)
def test_template_that_fails_is_a_fault_in_one_line(text: str, cause: str) -> None:
    fault = rendered(text)
    assert isinstance(fault, TemplateFault)
    assert cause in fault.cause
    assert "\n" not in fault.cause


def test_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_LIMIT_S", 1)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    began_s = time.monotonic()
    fault = rendered(loop)
    assert isinstance(fault, TemplateFault)
    assert "within 1 s" in fault.cause
    assert time.monotonic() - began_s < 10


def test_one_conversation_that_is_refused_does_not_stop_the_others() -> None:
    text = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}ok"
    conversations = [Conversation(messages=[USER] * n) for n in (1, 2, 1)]
    texts = render(ChatTemplate(text=text, source="test"), conversations).texts
    assert texts == ("ok", TemplateFault(cause="one"), "ok")


def test_requests_with_tools_use_their_own_template() -> None:
    template = ChatTemplate(text="plain", tool_text="{{ tools | length }} tools", source="test")
    conversations = [
        Conversation(messages=[USER], tools=[{"type": "function"}]),
        Conversation(messages=[USER]),
    ]
    assert render(template, conversations).texts == ("1 tools", "plain")


def test_template_does_not_see_the_secrets_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    run = subprocess.run

    def noting(*command: Any, **options: Any) -> Any:  # noqa: ANN401 - those of subprocess.run
        seen.append(options["env"])
        return run(*command, **options)

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(subprocess, "run", noting)
    assert rendered("ok") == "ok"
    assert len(seen) == 1
    assert "hf_secret" not in str(seen)
