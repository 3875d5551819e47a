"""Checks need time linear in a turn's length, whatever it looks like, and bounded above a size.

Growth is measured by doubling: eight times the text may need at most twenty times the CPU time,
where a quadratic check needs sixty-four.
"""

import time
from dataclasses import replace

import pytest

from pipeline.quality.flags import JUDGED_CHARACTERS, judged_part, turn_flags
from schemas.completion import Turn
from schemas.config.quality import QualityConfig
from tests.fakes.example_completion import TURN

SHAPES = {
    "line feeds": "\n",
    "blanks": " ",
    "tabs and line feeds": "\t\n",
    "one letter": "a",
    "one mark": ".",
    "marks with blanks": ". ",
    "marks with line feeds": "!\n",
    "alternating": "ab",
    "words": "word ",
    "digits": "7",
    "list numbers": "1. \n",
    "opening quotes": "\u201c",
    "straight quotes": '"a ',
    "backticks": "`",
    "single code": "`a` ",
    "fences": "```\n",
    "table bars": "|a|\n",
    "opening tags": "<|",
    "tags": "</s> ",
    "brackets": "[INST",
    "chinese stops": "\u3002",
    "chinese stops with blanks": "\u3002\u3000",
    "emoji": "\U0001f99c",
    "zero width": "\u200b",
    "broken characters": "\ufffd",
    "mojibake": "\u00c3\u00a9",
    "counted rounds": "Attempt 1: we try it again and check it.\n",
    "hm": "hm",
    "the user": "the user ",
    "combining marks": "a\u0301",
}
QUALITY = QualityConfig()
_SMALL = JUDGED_CHARACTERS // 32


def turn_of(text: str, *, is_reasoning: bool, was_cut: bool) -> Turn:
    return replace(
        TURN,
        reasoning_text=text if is_reasoning else TURN.reasoning_text,
        answer_text=TURN.answer_text if is_reasoning else text,
        finish_reason="length" if was_cut else "stop",
    )


def cpu_s(text: str) -> float:
    """Least CPU time of two checks of the text, as reasoning, answer and question."""
    best = float("inf")
    turns = [
        turn_of(text, is_reasoning=is_reasoning, was_cut=was_cut)
        for is_reasoning in (True, False)
        for was_cut in (True, False)
    ]
    for _ in range(2):
        began_s = time.thread_time()
        for turn in turns:
            turn_flags(turn, question=text, thinking=True, quality=QUALITY)
        best = min(best, time.thread_time() - began_s)
    return best


@pytest.mark.parametrize("shape", SHAPES)
def test_checks_are_linear_in_every_shape(shape: str) -> None:
    unit = SHAPES[shape]
    small = unit * (_SMALL // len(unit))
    # Behind a start that looks like an answer, and alone.
    for start in ("", "The answer is 7. Wait, so the user wants more.\n"):
        short_s, long_s = cpu_s(start + small), cpu_s(start + small * 8)
        assert long_s < 20 * short_s + 0.02, (shape, short_s, long_s)


@pytest.mark.parametrize("shape", ["line feeds", "one letter", "words", "emoji"])
def test_text_above_the_stated_size_costs_no_more(shape: str) -> None:
    unit = SHAPES[shape]
    most = unit * (JUDGED_CHARACTERS // len(unit))
    assert cpu_s(most * 8) < 3 * cpu_s(most) + 0.02


def test_head_and_tail_of_a_huge_text_are_judged() -> None:
    text = "a" * JUDGED_CHARACTERS + "b" * 100_000 + "c" * JUDGED_CHARACTERS
    half = JUDGED_CHARACTERS // 2
    assert judged_part(text) == "a" * half + "\n" + "c" * half
    assert judged_part("a" * JUDGED_CHARACTERS) == "a" * JUDGED_CHARACTERS
    loop = "We try it again from the start. " * 500
    prose = " ".join(f"Sentence {n} is about the matter {n * 7919 % 10007}." for n in range(20_000))
    looping = turn_of(prose + loop, is_reasoning=True, was_cut=True)
    assert "looping" in turn_flags(looping, question="?", thinking=True, quality=QUALITY)
