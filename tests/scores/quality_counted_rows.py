"""Turns that were cut while they counted: loops that number their rounds, and data that is numbered.

The loops have the shapes that are reported of real models, in words of their own: doubts as bullets
(TyloQuant issue 12, Qwen3.5-0.8B), an answer that is weighed again and again (Qwen3 issue 1887), a
start that is only announced (oh-my-pi issue 8701), numbered roles of a dialogue (llama.cpp issue
19585), the same item under each number (llama.cpp issue 6762).
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedText:
    """A text and whether it loops; `in_thinking` says where it stands when the cut comes."""

    kind: str
    question: str
    text: str
    loops: bool
    in_thinking: bool = True


def _rounds(frame: str, numbers: Iterable[int], between: str = " ") -> str:
    return between.join(frame.format(n=n, before=n - 1, after=n + 1) for n in numbers)


def _mixed(frames: tuple[str, ...], seed: int, num_sentences: int) -> str:
    """Sentences in any order with one count that runs through them."""
    chance, n, sentences = random.Random(seed), 3, []
    for _ in range(num_sentences):
        sentences.append(chance.choice(frames).format(n=n))
        n += chance.random() < 0.5
    return " ".join(sentences)


def _lines(frame: Callable[[int], str], numbers: Iterable[int]) -> str:
    return "\n".join(map(frame, numbers))


def _loop(kind: str, text: str, *, in_thinking: bool = True) -> CountedText:
    question = "How many r are in strawberry, and how sure are you of it?"
    # The cut goes through the last round.
    return CountedText(
        kind=f"counted {kind}", question=question, text=text[:-7], loops=True,
        in_thinking=in_thinking,
    )  # fmt: skip


def _data(kind: str, question: str, text: str, *, in_thinking: bool = False) -> CountedText:
    return CountedText(
        kind=f"numbered {kind}", question=question, text=text[:-3], loops=False,
        in_thinking=in_thinking,
    )  # fmt: skip


COUNTED = {
    "tuned": (
        _loop(
            "attempts",
            "I need ten words that end in -ough.\n\n"
            + _rounds(
                "Attempt {n}: I list them again from the top, and the seventh does not fit, so I "
                "start over.",
                range(1, 40),
                "\n\n",
            ),
        ),
        _loop("steps", _rounds("Wait, let me check step {n} again.", range(17, 90))),
        _loop(
            "bullets",
            _rounds("*   Wait, rule {n} says no lists.\n*   Okay.", range(4, 70), "\n"),
        ),
        _loop(
            "drafts",
            _rounds(
                "I'll go with version {n}. Actually, version {n} is too long. I will write "
                "version {after}.",
                range(2, 60),
            ),
        ),
        _loop(
            "steps in any order",
            _mixed(
                (
                    "Hmm, is line {n} right?",
                    "Let me read line {n} once more.",
                    "Line {n} is fine.",
                    "Okay.",
                ),
                seed=5,
                num_sentences=220,
            ),
        ),
        _loop("Chinese", _rounds("第{n}次检查：再看一遍题目，答案还是不对。", range(1, 60), "")),
        _loop(
            "answers",
            "Here is the plan.\n\n"
            + _rounds(
                "Part {n} continues what was begun in part {before}, and it goes into more depth "
                "on the points that were raised there.",
                range(3, 40),
                "\n",
            ),
            in_thinking=False,
        ),
        _loop("items", _rounds("{n}. Drink water.", range(1, 80), "\n"), in_thinking=False),
        _data(
            "conversions",
            "Convert feet to inches, up to a hundred.",
            _lines(lambda n: f"{n} feet are {12 * n} inches in the imperial system.", range(1, 70)),
        ),
        _data(
            "centimetres",
            "Convert inches to centimetres.",
            _lines(lambda n: f"{n} in is the same length as {2.54 * n:.2f} cm.", range(1, 90)),
        ),
        _data(
            "trials",
            "Find n with n^2 + 1 divisible by 13.",
            _lines(
                lambda n: f"For n = {n} the sum is {n * n + 1}, which leaves {(n * n + 1) % 13}.",
                range(20, 90),
            ),
            in_thinking=True,
        ),
        _data(
            "song",
            "Sing the bottles song from ninety-nine.",
            _lines(
                lambda n: (
                    f"{n} bottles of beer on the wall, {n} bottles of beer.\n"
                    f"Take one down and pass it around, {n - 1} bottles of beer on the wall.\n"
                ),
                range(99, 20, -1),
            ),
        ),
        _data(
            "JSON",
            "Return 500 users as JSON.",
            _lines(
                lambda n: f'  {{"id": {n}, "name": "user {n}", "role": "guest", "is new": true}},',
                range(1, 90),
            ),
        ),
        _data(
            "CSV",
            "Write a CSV file with 500 users.",
            _lines(lambda n: f"{n},user{n},user{n}@example.com,active", range(1, 120)),
        ),
        _data(
            "code",
            "Write 300 tests for the parser.",
            "```python\n"
            + _lines(
                lambda n: (
                    f"# Case {n} is read from the file that stands beside this test.\n"
                    f"def test_case_{n}() -> None:\n    assert parse(read({n})) == expected({n})\n"
                ),
                range(1, 60),
            ),
        ),
        _data(
            "table",
            "Plan a hundred days.",
            _lines(
                lambda n: f"| Day {n} | Walk in the morning and rest after noon |", range(1, 60)
            ),
        ),
        _data(
            "days",
            "Make a plan of a hundred days.",
            _lines(lambda n: f"- Day {n}: stretch, walk and rest.", range(1, 80)),
        ),
        _data(
            "seats",
            "List the seats of the hall.",
            _lines(
                lambda n: (
                    f"Seat {n} is in row {n // 12 + 1} of the hall and looks straight at the stage."
                ),
                range(1, 80),
            ),
        ),
    ),
    "held_out": (
        _loop(
            "tries",
            "The grid has nine cells.\n\n"
            + _rounds(
                "Try {n}. I place the queen again. It is attacked, so this is not it.",
                range(6, 50),
            ),
        ),
        _loop("rows", _rounds("Hmm, maybe I should look at row {n} first?", range(2, 70), "\n")),
        _loop(
            "checks",
            _rounds("- Check {n} done.\n- But did I count the spaces?", range(10, 60), "\n"),
        ),
        _loop(
            "rewrites",
            _rounds(
                "Let's write it. Take {n}! No, take {n} repeats the title; I begin take {after}.",
                range(1, 50),
            ),
        ),
        _loop(
            "passages in any order",
            _mixed(
                (
                    "So paragraph {n} says yes.",
                    "But does paragraph {n} say so?",
                    "Right.",
                    "Then paragraph {n} must be read again.",
                    "I come back to paragraph {n} later.",
                ),
                seed=8,
                num_sentences=260,
            ),
        ),
        _loop("Chinese", _rounds("等等，我再算第{n}步。嗯，好像没问题！", range(5, 70), "")),
        _loop(
            "chapters",
            _rounds(
                "In section {n} we look at the same question from one more side and find that "
                "nothing has changed since section {before}.",
                range(4, 50),
                "\n\n",
            ),
            in_thinking=False,
        ),
        _loop("points", _rounds("{n}) Be kind.\n", range(1, 90), ""), in_thinking=False),
        _data(
            "squares",
            "List squares in words.",
            _lines(
                lambda n: f"The square of {n} is {n * n}, and that is all there is to say of it.",
                range(1, 70),
            ),
        ),
        _data(
            "temperatures",
            "Convert Celsius to Fahrenheit, one a line.",
            _lines(
                lambda n: f"At {n} degrees Celsius a thermometer shows {n * 1.8 + 32:.1f} F.",
                range(-10, 60),
            ),
        ),
        _data(
            "trials",
            "What is the smallest prime factor of 9409?",
            _lines(
                lambda n: f"9409 divided by {n} leaves {9409 % n}, so {n} is no factor of it.",
                range(11, 90, 2),
            ),
            in_thinking=True,
        ),
        _data(
            "countdown",
            "Count down from a hundred to the launch, with a comment each.",
            _lines(
                lambda n: f"{n} seconds are left, and everybody in the room holds their breath.",
                range(100, 30, -1),
            ),
        ),
        _data(
            "SQL",
            "Insert 500 test customers.",
            _lines(
                lambda n: (
                    f"INSERT INTO customers (id, name, city) VALUES ({n}, 'Customer {n}', 'Oslo');"
                ),
                range(1, 70),
            ),
        ),
        _data(
            "log",
            "Show a log of two hours.",
            _lines(
                lambda n: f"[{8 + n // 60:02d}:{n % 60:02d}:00] INFO scheduler: job {n} is done",
                range(1, 110),
            ),
        ),
        _data(
            "YAML",
            "Give me a compose file of a hundred workers.",
            "```yaml\nservices:\n"
            + _lines(
                lambda n: (
                    f"  worker{n}:\n    image: app\n    # It restarts when it ends by itself."
                ),
                range(1, 70),
            ),
        ),
        _data(
            "handshakes",
            "List who shakes hands with whom among fourteen guests.",
            _lines(
                lambda pair: f"Guest {pair // 14 + 1} shakes hands with guest {pair % 14 + 1}.",
                [n for n in range(14 * 8) if n % 14 > n // 14],
            ),
            in_thinking=True,
        ),
        _data(
            "exercises",
            "Write an exercise a line for each page.",
            _lines(lambda n: f"{n}. Read page {n} aloud.", range(1, 90)),
        ),
        _data(
            "savings",
            "How does the account grow?",
            _lines(
                lambda n: (
                    f"After month {n} the account holds {250 * n} euros if nothing is taken out."
                ),
                range(1, 70),
            ),
        ),
    ),
}
