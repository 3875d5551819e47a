"""Whether a text repeats itself without end. Pure, and linear in the text's length.

Three signs, each of which is enough: the text ends in one stretch over and over; a window of it has
few sequences of words that are unlike each other; most of its sentences stood there before.
Tables and closed blocks of code repeat themselves by nature: only the first sign counts there.
A loop that counts its rounds (attempt 1, attempt 2) passes: lists of figures look the same.
"""

import re
from collections.abc import Iterable, Iterator

from schemas.quality_config import LoopingConfig

_TAIL_CHARACTERS = 4_000
_MIN_PERIODS = 6
_PROBE_CHARACTERS = 12
_NGRAM_WORDS = 6
# With six words in a row, a song that counts down from ninety-nine has more than half of them
# unlike each other, and a walk over five words a few in a hundred.
_MIN_LETTERS_SHARE = 0.5
_MIN_SENTENCES = 8
_MIN_SENTENCE_CHARACTERS = 20
_MIN_CJK_SENTENCE_CHARACTERS = 8

_CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORDS = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]+")
_SENTENCE_ENDS = re.compile(r"[.!?:;]\s+|[\u3002\uff01\uff1f\uff1b]|\n")
_FENCES = ("```", "~~~")


def is_looping(text: str, limits: LoopingConfig) -> bool:
    text = text.rstrip()
    if ends_in_a_loop(text, limits.tail_characters):
        return True
    prose, blocks = split_code(text)
    if _has_repeated_sentences(prose, blocks, limits.max_repeated_share):
        return True
    return any(
        _distinct_share(window) < limits.min_distinct_share
        for window in _windows(_WORDS.findall(prose.lower()), limits.window_words)
    )


def ends_in_a_loop(text: str, tail_characters: int) -> bool:
    """Whether at least `tail_characters` at the end are one stretch, six times or more."""
    tail = text[-_TAIL_CHARACTERS:]
    probe = tail[-_PROBE_CHARACTERS:]
    if len(tail) < tail_characters or tail.count(probe) < _MIN_PERIODS - 1:
        return False
    backwards = tail[::-1]
    # borders[n]: length of the longest proper prefix of the first n+1 that is their suffix too.
    # The shortest period of those n+1 is their number less that length (Knuth, Morris, Pratt).
    borders = [0] * len(backwards)
    matched = 0
    for number in range(1, len(backwards)):
        while matched and backwards[number] != backwards[matched]:
            matched = borders[matched - 1]
        matched += backwards[number] == backwards[matched]
        borders[number] = matched
        length = number + 1
        if length >= tail_characters and (length - matched) * _MIN_PERIODS <= length:
            return True
    return False


def split_code(text: str) -> tuple[str, list[str]]:
    """The text without tables and closed code blocks, and those blocks.

    A block that never closes is part of the text: a loop inside of it is why it does not.
    """
    prose: list[str] = []
    blocks: list[str] = []
    block: list[str] | None = None
    for line in text.split("\n"):
        start = line.lstrip()
        if start.startswith(_FENCES):
            if block is None:
                block = []
            else:
                blocks.append("\n".join(block))
                block = None
        elif block is not None:
            block.append(line)
        elif not start.startswith("|"):
            prose.append(line)
    return "\n".join(prose + (block or [])), blocks


def _has_repeated_sentences(prose: str, blocks: list[str], max_share: float) -> bool:
    units = [*_sentences(prose), *(" ".join(block.split()) for block in blocks)]
    if len(units) < _MIN_SENTENCES:
        return False
    return (len(units) - len(set(units))) / len(units) > max_share


def _sentences(prose: str) -> Iterator[str]:
    for piece in _SENTENCE_ENDS.split(prose):
        sentence = " ".join(piece.lower().split())
        is_cjk = len(sentence) > 0 and ord(sentence[0]) > 0x2E80
        least = _MIN_CJK_SENTENCE_CHARACTERS if is_cjk else _MIN_SENTENCE_CHARACTERS
        if len(sentence) >= least:
            yield sentence


def _windows(words: list[str], window_words: int) -> Iterable[list[str]]:
    """Windows of words that overlap by half; those that are mostly figures and marks left out."""
    for start in range(0, len(words) - window_words + 1, max(1, window_words // 2)):
        window = words[start : start + window_words]
        num_letters = sum(word[0].isalpha() for word in window)
        if num_letters >= _MIN_LETTERS_SHARE * window_words:
            yield window


def _distinct_share(window: list[str]) -> float:
    num_ngrams = len(window) - _NGRAM_WORDS + 1
    ngrams = zip(*(window[offset:] for offset in range(_NGRAM_WORDS)), strict=False)
    return len(set(ngrams)) / num_ngrams
