"""Detection of texts that loop. Pure, and linear in the length of the text.

One of three signs is enough: the text ends in one passage repeated over and over, list numbers
aside; a window of it has few distinct word n-grams; most of its sentences are repeats. Tables and
closed code blocks are repetitive by nature, so only the first sign applies to them.

A fourth sign applies to texts that were cut: they end in rounds of the same sentences that differ
only in a count (attempt 1, attempt 2). Numbered data looks similar, but its figures carry content:
they jump, fall, have decimals or diverge, with few words between them. Rounds that are counted in
words, or whose figures change, are not flagged, because a search by trial looks the same.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from schemas.config.quality import LoopingConfig

_TAIL_CHARACTERS = 4_000
_MIN_PERIODS = 6
_PROBE_CHARACTERS = 12
# Of sequences of six words, a song that counts down from ninety-nine has more than half distinct,
# and a random walk over five words a few per cent.
_NGRAM_WORDS = 6
_MIN_LETTERS_SHARE = 0.5
_MIN_SENTENCES = 8
_MIN_SENTENCE_CHARACTERS = 20
_MIN_CJK_SENTENCE_CHARACTERS = 8

# Bounds for counted rounds. assumed: they separate the labelled rows with room on both sides, see
# `make quality-score`.
_COUNTED_CHARACTERS = 16_000
_MIN_ROUNDS = 8
_MIN_ROUNDS_WORDS = 100
# Prose has 0.95; JSON, SQL and logs with time stamps have 0.45 to 0.75.
_MIN_LETTERS_OF_ROUND = 0.75
MIN_ROUND_WORDS_IN_THINKING = 5
_MAX_DIGITS = 9
# Answers list days or exercises, one per line, so only longer rounds count there.
MIN_ROUND_WORDS_IN_ANSWER = 10

_CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORDS = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]+")
# The same for texts without other characters, in two thirds of the time.
_ASCII_WORDS = re.compile(r"\w+|[^\w\s]+", re.ASCII)
_CJK_CHARACTER = re.compile(rf"[{_CJK}]")
_SENTENCE_ENDS = re.compile(r"[.!?:;]\s+|[\u3002\uff01\uff1f\uff1b]|\n")
# The same for texts without other characters, in two thirds of the time.
_ASCII_SENTENCE_ENDS = re.compile(r"[.!?:;]\s+|\n")
_COUNTED_SENTENCE_ENDS = re.compile(r"[.!?;]\s+|[\u3002\uff01\uff1f\uff1b]|\n")
_FENCES = ("```", "~~~")
_ITEM_NUMBER = re.compile(r"^[ \t]*\d+[.)][ \t]+", re.MULTILINE)
_FIGURE = re.compile(r"\d+(?:[.,]\d+)*")


def is_looping(text: str, limits: LoopingConfig) -> bool:
    """Detect a loop by the first three signs."""
    text = text.rstrip()
    if ends_in_a_loop(text, limits.tail_characters):
        return True
    tail = text[-2 * _TAIL_CHARACTERS :]
    if _has_item(tail) and ends_in_a_loop(_ITEM_NUMBER.sub("", tail), limits.tail_characters):
        return True
    prose, blocks = split_code(text)
    if _has_repeated_sentences(prose, blocks, limits.max_repeated_share):
        return True
    return any(
        _has_few_distinct(window, limits.min_distinct_share) and _is_of_words(window)
        for window in _windows(_words(prose.lower()), limits.window_words)
    )


def _has_item(text: str) -> bool:
    return any(line.lstrip(" \t")[:1].isdigit() for line in text.split("\n"))


def ends_in_a_loop(text: str, tail_characters: int) -> bool:
    """Detect at least `tail_characters` at the end that repeat one passage six times or more."""
    tail = text[-_TAIL_CHARACTERS:]
    probe = tail[-_PROBE_CHARACTERS:]
    if len(tail) < tail_characters or tail.count(probe) < _MIN_PERIODS - 1:
        return False
    backwards = tail[::-1]
    # borders[n] is the length of the longest proper prefix of the first n+1 characters that is also
    # their suffix. Their shortest period is n+1 minus that length (Knuth, Morris, Pratt).
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


def ends_in_counted_rounds(text: str, least_round_words: int) -> bool:
    """Detect a text, cut off, that ends in rounds of the same words that differ only in a count.

    A round is a set of sentences that recur in any order.
    """
    sentences = _figured_sentences(text)
    size = _MIN_ROUNDS
    while size <= len(sentences):
        if _are_counted_rounds(sentences[-size:], least_round_words):
            return True
        size *= 2
    return False


def _figured_sentences(text: str) -> list[tuple[str, list[str]]]:
    """List the last sentences outside code and tables, with figures masked, and their figures.

    The last sentence is left out, because it may be incomplete. A text that ends in an open code
    block has none: what is listed there is data.
    """
    if sum(line.lstrip().startswith(_FENCES) for line in text.split("\n")) % 2:
        return []
    tail = split_code(text)[0][-_COUNTED_CHARACTERS:].lower()
    pieces = (piece.strip() for piece in _COUNTED_SENTENCE_ENDS.split(tail))
    sentences = [piece for piece in pieces if any(map(str.isalpha, piece))]
    return [(_FIGURE.sub("0", piece), _FIGURE.findall(piece)) for piece in sentences[:-1]]


def _are_counted_rounds(sentences: Sequence[tuple[str, list[str]]], least_round_words: int) -> bool:
    rows: dict[str, list[list[str]]] = defaultdict(list)
    for frame, figures in sentences:
        rows[frame].append(figures)
    if len(rows) * _MIN_ROUNDS > len(sentences):
        return False
    words = {frame: _num_words(frame) for frame in rows}
    if sum(words.values()) < least_round_words:
        return False
    if sum(words[frame] for frame, _ in sentences) < _MIN_ROUNDS_WORDS:
        return False
    if _letters_share("".join(frame for frame, _ in sentences)) < _MIN_LETTERS_OF_ROUND:
        return False
    moving = [
        [column for column in zip(*table, strict=True) if len(set(column)) > 1]
        for table in rows.values()
    ]
    return any(moving) and all(_count_on(columns, len(sentences)) for columns in moving)


def _count_on(columns: Sequence[Sequence[str]], most_steps: int) -> bool:
    """Tell if all figures follow one count: integers that never fall and rise slowly."""
    if not all(
        figure.isdecimal() and len(figure) <= _MAX_DIGITS for column in columns for figure in column
    ):
        return False
    steps = {tuple(int(figure) - int(column[0]) for figure in column) for column in columns}
    return len(steps) <= 1 and all(
        list(counted) == sorted(counted) and counted[-1] <= most_steps for counted in steps
    )


def _num_words(frame: str) -> int:
    """Count words separated by blanks, as in prose, and characters of scripts without blanks."""
    return sum(len(_CJK_CHARACTER.findall(word)) or word[0].isalpha() for word in frame.split())


def _letters_share(text: str) -> float:
    visible = "".join(text.split())
    return sum(map(str.isalpha, visible)) / len(visible)


def split_code(text: str) -> tuple[str, list[str]]:
    """Split a text into prose, without tables and closed code blocks, and those blocks.

    A block that never closes counts as prose, because a loop in it may be the reason.
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
    ends = _ASCII_SENTENCE_ENDS if prose.isascii() else _SENTENCE_ENDS
    for piece in ends.split(prose.lower()):
        if len(piece) < _MIN_CJK_SENTENCE_CHARACTERS:
            continue
        sentence = " ".join(piece.split())
        is_cjk = len(sentence) > 0 and ord(sentence[0]) > 0x2E80
        least = _MIN_CJK_SENTENCE_CHARACTERS if is_cjk else _MIN_SENTENCE_CHARACTERS
        if len(sentence) >= least:
            yield sentence


def _words(text: str) -> list[str]:
    return (_ASCII_WORDS if text.isascii() else _WORDS).findall(text)


def _windows(words: list[str], window_words: int) -> Iterable[list[str]]:
    """Yield windows of words that overlap by half."""
    for start in range(0, len(words) - window_words + 1, max(1, window_words // 2)):
        yield words[start : start + window_words]


def _is_of_words(window: list[str]) -> bool:
    """Tell a window of words from one of mostly figures and marks."""
    num_letters = sum(word[0].isalpha() for word in window)
    return num_letters >= _MIN_LETTERS_SHARE * len(window)


def _has_few_distinct(window: list[str], min_share: float) -> bool:
    least = min_share * (len(window) - _NGRAM_WORDS + 1)
    # The n-gram that ends with a word's first occurrence is a new one.
    if len(set(window)) - _NGRAM_WORDS + 1 >= least:
        return False
    ngrams = zip(*(window[offset:] for offset in range(_NGRAM_WORDS)), strict=False)
    return len(set(ngrams)) < least
