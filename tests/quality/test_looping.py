"""Signs of a loop, one at a time, just within and just beyond their bounds."""

import random

from pipeline.quality.looping import ends_in_a_loop, is_looping
from schemas.config.quality import LoopingConfig

# Signs that cannot apply: a distinct share is at least 0, and a repeated share at most 1.
ONLY_TAIL = LoopingConfig(min_distinct_share=0.0, max_repeated_share=1.0)
ONLY_NGRAMS = LoopingConfig(max_repeated_share=1.0)
ONLY_SENTENCES = LoopingConfig(min_distinct_share=0.0, tail_characters=9999)


def walk(num_words: int, num_different: int) -> str:
    """A random walk without sentences, whose end is not periodic."""
    chance = random.Random(5)
    words = [f"word{'abcdefghijklmnopqrstuvwxyz'[n % 26]}{n // 26}" for n in range(num_different)]
    return " ".join(chance.choice(words) for _ in range(num_words))


def test_few_distinct_word_sequences_are_a_loop() -> None:
    # Two words give 2**6 = 64 sequences of six, of 195 in a window of 200: a share below 0.33.
    assert is_looping(walk(200, 2), LoopingConfig(min_distinct_share=0.34, max_repeated_share=1.0))
    assert not is_looping(walk(400, 30), ONLY_NGRAMS)


def test_text_shorter_than_a_window_has_no_word_sequences() -> None:
    assert not is_looping(walk(199, 1), LoopingConfig(max_repeated_share=1.0, tail_characters=9999))
    assert is_looping(walk(200, 1), LoopingConfig(max_repeated_share=1.0, tail_characters=9999))


def test_windows_overlap_by_half() -> None:
    # 100 different words, 200 of a loop, 100 different ones: only the window at 100 is the loop.
    different = [f"w{'abcdefghij'[n % 10]}{'klmnopqrst'[n // 10 % 10]}{n}" for n in range(200)]
    text = " ".join([*different[:100], *["again"] * 200, *different[100:]])
    limits = LoopingConfig(min_distinct_share=0.02, max_repeated_share=1.0)
    # The window at 100 has 1 of 195 sequences distinct, 0.005; those at 0 and 200 more than half.
    assert is_looping(text, limits)


def test_windows_of_figures_are_no_loop() -> None:
    assert not is_looping("1 2 " * 400, LoopingConfig(max_repeated_share=1.0, tail_characters=9999))


def test_more_than_half_of_the_sentences_are_repeats() -> None:
    different = [f"Sentence number {'abcdefghij'[n]} has its own content" for n in range(8)]
    repeats = ["This sentence comes again and again"] * 9
    # 8 + 9 sentences, of which 8 repeat an earlier one: 8 / 17 is below a half; 9 / 18 is a half.
    assert not is_looping(". ".join(different + repeats), ONLY_SENTENCES)
    assert not is_looping(". ".join([*different, *repeats, repeats[0]]), ONLY_SENTENCES)
    # 10 / 19.
    assert is_looping(". ".join([*different, *repeats, *repeats[:2]]), ONLY_SENTENCES)


def test_seven_sentences_are_too_few_to_judge() -> None:
    sentence = "The answer to this question is quite simple"
    limits = LoopingConfig(min_distinct_share=0.0, tail_characters=9999)
    assert not is_looping(". ".join([sentence] * 7), limits)
    assert is_looping(". ".join([sentence] * 8), limits)


def test_cjk_sentences_count_from_eight_characters() -> None:
    eight = "\u4eca\u5929\u5929\u6c14\u975e\u5e38\u597d\u554a"
    assert is_looping("\u3002".join([eight] * 8), ONLY_SENTENCES)
    assert not is_looping("\u3002".join([eight[:7]] * 8), ONLY_SENTENCES)
    # Latin sentences count from twenty.
    assert is_looping(". ".join(["x" * 20] * 8), ONLY_SENTENCES)
    assert not is_looping(". ".join(["x" * 19] * 8), ONLY_SENTENCES)


def test_half_of_a_window_must_be_words() -> None:
    limits = LoopingConfig(max_repeated_share=1.0, tail_characters=9999)
    assert is_looping("again 1 " * 100, limits)
    # Two thirds are figures.
    assert not is_looping("again 1 2 " * 100, limits)


def test_tail_repeats_six_times_and_has_its_length() -> None:
    passage = "so the answer must be fifty-four words, no, sixty! "
    assert len(passage) == 51
    # Six passages have 306 characters.
    assert ends_in_a_loop(passage * 6, 300)
    assert not ends_in_a_loop(passage * 6, 307)
    assert not ends_in_a_loop(passage * 5, 100)
    assert ends_in_a_loop("Some text before. " + passage * 6, 300)
    assert not ends_in_a_loop(passage * 6 + "and a different end", 300)


def test_list_numbers_are_ignored_in_twice_the_tail() -> None:
    # Without numbers an item has 10 characters; the last 8,000 with numbers have all 60 items.
    items = "\n".join(f"{n}. Eat well." for n in range(100, 160))
    assert is_looping(items, ONLY_TAIL)
    # A window of 8,000 characters that is mostly long numbers leaves too little text to judge.
    long_numbers = "\n".join(f"{'9' * 190}{n}. Eat well." for n in range(100, 160))
    assert not is_looping(long_numbers, LoopingConfig(
        min_distinct_share=0.0, max_repeated_share=1.0, tail_characters=500,
    ))  # fmt: skip
    assert is_looping(long_numbers, LoopingConfig(
        min_distinct_share=0.0, max_repeated_share=1.0, tail_characters=300,
    ))  # fmt: skip
