"""Flags of a turn, on the labelled set and at their bounds, and the next attempt's sampling."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeline.errors import ConfigError
from pipeline.quality.flags import FLAGS, retry_sampling, turn_flags
from pipeline.quality.looping import ends_in_counted_rounds, is_looping
from schemas.completion import FinishReason, Turn
from schemas.config.quality import FlagConfig, LoopingConfig, QualityConfig
from schemas.prompt import FunctionCall, SamplingParams, ToolCall
from tests.fakes import example_completion
from tests.scores.make_quality_set import LabelledRow, labelled_rows, read_labelled_rows
from tests.scores.score_quality import detector, found_flags, has_detector, scores

SAMPLING = replace(example_completion.SAMPLING, max_tokens=100)
TURN = replace(
    example_completion.TURN,
    reasoning_text="First the sum, then the check.",
    answer_text="It is seven.",
)


def flags(turn: Turn, question: str = "What is 3 + 4?", **settings: object) -> tuple[str, ...]:
    quality = QualityConfig.model_validate(settings)
    return turn_flags(turn, question=question, thinking=True, quality=quality)


def retried(found: set[str], *, retry: int = 1, room: int | None = 10_000, **changes: float) -> (
    SamplingParams | None
):  # fmt: skip
    return retry_sampling(
        replace(SAMPLING, **changes),  # type: ignore[arg-type]
        found,  # type: ignore[arg-type]
        retry=retry,
        quality=QualityConfig(),
        most_tokens=room,
        row=("a", 0, 0),
    )


@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
def test_answer_that_only_calls_a_tool_is_not_empty(finish: FinishReason) -> None:
    call = ToolCall(id="c", function=FunctionCall(name="w", arguments="{}"))
    calling = replace(TURN, answer_text="", finish_reason=finish)
    assert flags(calling) == ("empty_answer",)
    assert flags(replace(calling, tool_calls=(call,))) == ()
    cut = replace(calling, tool_calls=(call,), finish_reason="length")
    assert flags(cut) == ("cut_in_answer",)


# -- the labelled set


def test_labelled_set_is_the_one_that_its_script_writes() -> None:
    rows = read_labelled_rows()
    assert rows == labelled_rows()
    for half in ("tuned", "held_out"):
        chosen = [row for row in rows if row.half == half]
        assert len(chosen) >= 300
        assert sum(not row.flags for row in chosen) >= 0.6 * len(chosen)
    assert {flag for row in rows for flag in row.flags} == set(FLAGS)


@pytest.fixture(scope="module")
def judged() -> list[tuple[LabelledRow, tuple[str, ...]]]:
    language_of = detector()
    return [(row, found_flags(row, language_of)) for row in read_labelled_rows()]


@pytest.mark.parametrize("half", ["tuned", "held_out"])
@pytest.mark.parametrize("flag", FLAGS)
def test_flag_is_precise_and_misses_few(
    judged: list[tuple[LabelledRow, tuple[str, ...]]], half: str, flag: str
) -> None:
    if flag == "wrong_language" and not has_detector():
        pytest.skip("py3langid is an optional extra")
    score = scores(pair for pair in judged if pair[0].half == half)[flag]
    assert score.positives >= 15
    assert score.precision >= 0.95
    assert score.recall >= 0.90


# -- single flags


def test_good_turn_has_no_flag() -> None:
    assert flags(TURN) == ()


def test_cut_before_the_answer_is_told_from_a_cut_answer() -> None:
    thinking = replace(TURN, answer_text="", finish_reason="length")
    assert flags(thinking) == ("empty_answer", "cut_in_thinking")
    assert flags(replace(TURN, finish_reason="length")) == ("cut_in_answer",)


def test_thinking_that_was_not_asked_for_is_not_missed() -> None:
    turn = replace(TURN, reasoning_text=None)
    found = turn_flags(turn, question="?", thinking=False, quality=QualityConfig())
    assert found == ()
    assert flags(turn) == ("empty_reasoning",)


def test_flag_that_is_switched_off_is_not_looked_for() -> None:
    turn = replace(TURN, answer_text="")
    assert flags(turn, empty_answer={"enabled": False}) == ()


def test_every_flag_has_its_section_in_the_run_file() -> None:
    sections = QualityConfig().model_dump()
    assert all(isinstance(getattr(QualityConfig(), flag), FlagConfig) for flag in FLAGS)
    assert {name for name, value in sections.items() if isinstance(value, dict)} == set(FLAGS)


@pytest.mark.parametrize(
    "text",
    [
        "It is, it is not. " * 40_000,
        "".join(chr(97 + n % 26 + n // 7 % 3) for n in range(700_000)),
        "```\n" * 100_000,
        "<" * 500_000,
        "`" * 500_000,
        '"' * 500_000,
        "a " * 300_000,
        "1 2 " * 150_000,
        " ".join(f"Let me check step {n} again." for n in range(18_000)),
    ],
    ids=[
        *("sentence", "letters", "fences", "brackets", "ticks", "quotes", "words", "figures"),
        "rounds",
    ],
)
def test_cost_is_linear_even_for_a_text_of_half_a_megabyte(text: str) -> None:
    started_s = time.process_time()
    turn = replace(TURN, reasoning_text=text, answer_text=text, finish_reason="length")
    flags(turn, question="Explain this please now.")
    # Seen: 0.2 s to 1.5 s. A quadratic step over 500,000 characters takes hours.
    assert time.process_time() - started_s < 10


def test_loop_that_was_left_again_is_found_in_the_middle() -> None:
    loop = "The answer is eight because the sum is eight. " * 60
    ending = " ".join(f"Then point {n} was settled by a vote of {n * 3}." for n in range(20))
    assert is_looping(loop + ending, LoopingConfig())
    assert not is_looping(ending, LoopingConfig())


def test_rounds_that_only_count_on_are_a_loop_where_the_turn_was_cut() -> None:
    rounds = " ".join(f"Hmm, let me look at step {n} again." for n in range(3, 60))
    cut = replace(TURN, reasoning_text=rounds, answer_text="", finish_reason="length")
    assert "looping" in flags(cut)
    # Thinking that came to an answer left the loop by itself.
    assert "looping" not in flags(replace(TURN, reasoning_text=rounds))


@pytest.mark.parametrize(
    ("in_answer", "frame", "is_loop"),
    [
        # Ten words in an answer, five in thinking: a number is not a word.
        (True, "So let me look once more at the tenth case, number {n}. ", True),
        (True, "So let me look once more at the case, number {n}. ", True),
        (True, "So let me look once more at case number {n}. ", False),
        (False, "Let me try case {n} again. ", True),
        (False, "Let me try case {n}. ", False),
    ],
)
def test_rounds_have_their_words(in_answer: bool, frame: str, is_loop: bool) -> None:
    rounds = "".join(frame.format(n=n) for n in range(3, 60))
    reasoning, answer = ("Hm.", rounds) if in_answer else (rounds, "")
    turn = replace(TURN, reasoning_text=reasoning, answer_text=answer, finish_reason="length")
    assert ("looping" in flags(turn)) == is_loop


@pytest.mark.parametrize(
    ("round_of", "why"),
    [
        (lambda n: f"Now let me look at step {n * 7} again. ", "jumps"),
        (lambda n: f"Now let me look at step {90 - n} again. ", "falls"),
        (lambda n: f"Now let me look at step {n}.5 again. ", "has decimals"),
        (lambda n: f"Now step {n} is again a sum of {n // 3} terms. ", "moves apart"),
        (lambda n: f"Step {n} fails. ", "few words"),
        (lambda n: f"Now let me look at step {'9' * 5_000}{n} again. ", "more digits than a count"),
    ],
)
def test_figures_that_tell_something_are_no_count(round_of: Callable[[int], str], why: str) -> None:
    text = "".join(map(round_of, range(3, 60)))
    assert not ends_in_counted_rounds(text, 5), why


def test_loop_begins_anywhere_and_the_cut_may_go_through_a_round() -> None:
    head = "The first thing to see is that the sum is even. " * 2
    rounds = " ".join(f"So I look at case {n} once more." for n in range(3, 60))
    assert all(ends_in_counted_rounds(f"{head}{rounds}"[:-cut], 5) for cut in range(1, 30))
    left_again = " ".join(f"Case {word} is settled by its sign." for word in "abcdefghijklmnopqr")
    assert not ends_in_counted_rounds(f"{rounds} {left_again}", 5)


def test_numbered_list_of_one_item_is_a_loop() -> None:
    assert is_looping("\n".join(f"{n}. Eat well." for n in range(1, 60)), LoopingConfig())


@pytest.mark.parametrize(
    ("answer", "is_refused"),
    [
        ("I'm sorry, but I cannot help with that.", True),
        ("I cannot see the image, but the sum is seven.", False),
        # The phrase ends within the first 200 characters, or after them.
        ("x" * 175 + " I cannot help with it.", True),
        ("x" * 190 + " I cannot help with it.", False),
        ('She said: "I cannot help with that."', False),
    ],
)
def test_refusal_is_found_at_the_head_of_the_answer(answer: str, is_refused: bool) -> None:
    turn = replace(TURN, answer_text=answer)
    assert ("refusal" in flags(turn, refusal={"enabled": True})) == is_refused


QUESTION = "Please tell me how the tall old lighthouse on the northern cliff was built in winter"


@pytest.mark.parametrize(
    ("answer", "is_copied"),
    [
        (QUESTION, True),
        (f"{QUESTION}?", True),
        (f"{QUESTION} indeed", True),
        # 13 of 16 words, which is 0.81, but the last six words are not those of the question.
        (" ".join(QUESTION.split()[:13]), False),
        # The same words in reverse have no sequence of four in common.
        (" ".join(reversed(QUESTION.split())), False),
        ("It was built by hand", False),
    ],
)
def test_copy_has_the_beginning_and_the_end_of_the_question(answer: str, is_copied: bool) -> None:
    assert ("copied_prompt" in flags(replace(TURN, answer_text=answer), QUESTION)) == is_copied


def test_short_question_is_not_copied() -> None:
    assert "copied_prompt" not in flags(
        replace(TURN, answer_text="one two 3 four"), "one two 3 four"
    )
    five = "one two 3 four five"
    assert "copied_prompt" in flags(replace(TURN, answer_text=five), five)


@pytest.mark.parametrize(
    ("question", "answer", "is_wrong"),
    [
        # 80 characters are enough, 79 are not.
        ("e" * 80, "f" * 80, True),
        ("e" * 79, "f" * 80, False),
        ("e" * 80, "f" * 79, False),
        # A CJK character counts as three: 27 * 3 = 81, 26 * 3 = 78.
        ("e" * 80, "\u65e5" * 27, True),
        ("e" * 80, "\u65e5" * 26, False),
        ("e" * 80, "e" * 80, False),
        ("in french " + "e" * 80, "f" * 80, False),
        # 60 letters and 60 digits are half letters; 59 and 61 are not.
        ("e" * 80, "f" * 60 + "1" * 60, True),
        ("e" * 80, "f" * 59 + "1" * 61, False),
    ],
)
def test_language_differs_surely_in_enough_prose(
    question: str, answer: str, is_wrong: bool
) -> None:
    quality = QualityConfig.model_validate({"wrong_language": {"enabled": True}})

    def by_first_letter(text: str) -> tuple[str, float]:
        return text[0], 0.95

    def unsure(text: str) -> tuple[str, float]:
        return text[0], 0.94

    turn = replace(TURN, answer_text=answer)
    for detector_, expected in ((by_first_letter, is_wrong), (unsure, False), (None, False)):
        found = turn_flags(
            turn, question=question, thinking=True, quality=quality, language_of=detector_
        )
        assert ("wrong_language" in found) == expected


@pytest.mark.parametrize(
    ("question", "answer", "is_short"),
    [
        ("What is it?", "...", True),
        ("How many?", "42", False),
        ("Write an essay on rain.", "Rain is wet.", True),
        # 40 visible characters are enough.
        ("Write an essay on rain.", "x" * 40, False),
        ("Write an essay on rain.", "x" * 39, True),
        ("Write a short essay on rain.", "x" * 39, False),
        ("What is the capital of France?", "Sure!", True),
        ("Ready to go?", "Sure!", False),
        ("What is the capital of France?", "Here is the answer:", True),
    ],
)
def test_answer_is_too_short_for_its_question(question: str, answer: str, is_short: bool) -> None:
    assert ("too_short" in flags(replace(TURN, answer_text=answer), question)) == is_short


@pytest.mark.parametrize(
    ("answer", "question", "is_leaked"),
    [
        ("Okay, so the user wants a sum. I should compute it. It is 7.", "3 + 4?", True),
        # One typical phrase only.
        ("Okay, so that is 7.", "3 + 4?", False),
        ('She wrote: "Okay, so the user wants a sum. Let me think." It is 7.', "3 + 4?", False),
        ("It is 7.</think> Seven.", "3 + 4?", True),
        ("The tag </think> ends it.", "What does </think> do?", False),
        # Two phrases, but only one within the first 400 characters.
        ("Okay, so it is 7. " + "x " * 220 + "Let me think about it again.", "3 + 4?", False),
    ],
)
def test_thinking_in_the_answer_is_told_by_its_phrases(
    answer: str, question: str, is_leaked: bool
) -> None:
    found = flags(replace(TURN, answer_text=answer), question)
    assert ("thinking_leaked_into_answer" in found) == is_leaked


# -- the next try


def test_cut_turn_is_given_a_larger_budget_within_the_context() -> None:
    first, second = retried({"cut_in_answer"}), retried({"cut_in_answer"}, retry=2)
    assert first is not None
    assert second is not None
    assert (first.max_tokens, second.max_tokens) == (200, 400)
    assert first.temperature == 0.6
    bounded = retried({"cut_in_thinking"}, room=150)
    assert bounded is not None
    assert bounded.max_tokens == 150


def test_cut_turn_without_room_is_not_asked_again() -> None:
    assert retried({"cut_in_answer"}, room=100) is None
    assert retried({"cut_in_thinking", "empty_answer"}, room=90) is None
    assert retried({"cut_in_answer", "looping"}, room=100) is not None


def test_turn_without_a_budget_of_its_own_was_cut_by_the_context() -> None:
    unlimited = replace(SAMPLING, max_tokens=None)
    quality = QualityConfig()
    for flags_of_turn in ({"cut_in_answer"}, {"cut_in_thinking", "empty_answer"}):
        again = retry_sampling(
            unlimited, flags_of_turn, retry=1, quality=quality, most_tokens=9, row=("a", 0, 0)  # type: ignore[arg-type]
        )  # fmt: skip
        assert again is None
    looped = retried({"cut_in_answer", "looping"})
    assert looped is not None
    assert looped.temperature == 0.8


def test_loop_is_asked_again_hotter_step_by_step() -> None:
    heats = [retried({"looping"}, retry=retry) for retry in (1, 2, 3)]
    assert [params and params.temperature for params in heats] == [0.8, 1.0, 1.0]


def test_greedy_turn_is_heated_since_it_would_come_out_the_same() -> None:
    again = retried({"empty_answer"}, temperature=0.0)
    assert again is not None
    assert again.temperature == 0.8


def test_each_try_has_a_seed_of_its_own() -> None:
    seeds = {params.seed for retry in (1, 2, 3) if (params := retried({"looping"}, retry=retry))}
    assert len(seeds) == 3
    assert SAMPLING.seed not in seeds


def test_language_flag_without_its_package_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipeline.quality import languages

    monkeypatch.setattr(languages, "_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ConfigError, match=r"quality\.wrong_language\.enabled"):
        languages.check_language_detector()
