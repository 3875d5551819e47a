"""Quality flags of a generated turn, and the sampling of its next attempt. Pure.

Invariant: a flag says what the text shows, not why; the same turn and settings give the same flags,
and each check needs time linear in the text. A text of more than 65,536 characters is judged on its
first and last halves of that. Flags prefer precision to recall, because rows are
dropped by them.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import get_args

from pipeline.models.thinking import ALL_TAGS, GPT_OSS_BARE
from pipeline.quality.looping import (
    MIN_ROUND_WORDS_IN_ANSWER,
    MIN_ROUND_WORDS_IN_THINKING,
    ends_in_counted_rounds,
    is_looping,
    split_code,
)
from schemas.completion import QualityFlag, Turn
from schemas.config.quality import QualityConfig
from schemas.prompt import SamplingParams, derived_seed

FLAGS: tuple[QualityFlag, ...] = get_args(QualityFlag)
CUT_FLAGS = frozenset({"cut_in_thinking", "cut_in_answer"})

# A quarter of the longest answers: some 16,000 tokens are judged whole, in 30 ms.
JUDGED_CHARACTERS = 65_536

LanguageOf = Callable[[str], tuple[str, float]]
"""Function from a text to the code of its language and the probability of that language."""


def turn_flags(
    turn: Turn,
    *,
    question: str,
    thinking: bool,
    quality: QualityConfig,
    language_of: LanguageOf | None = None,
) -> tuple[QualityFlag, ...]:
    """Check `turn`, the answer to `question`, and return its flags in the order of FLAGS.

    `thinking` is true when the request enabled thinking.
    """
    reasoning, answer = judged_part(turn.reasoning_text or ""), judged_part(turn.answer_text)
    question = judged_part(question)
    was_cut, has_text = turn.finish_reason == "length", _has_text(answer)
    has_answer = has_text or bool(turn.tool_calls)
    checks: dict[QualityFlag, Callable[[], bool]] = {
        "empty_answer": lambda: not has_answer,
        "empty_reasoning": lambda: thinking and not _has_text(reasoning),
        "unasked_reasoning": lambda: not thinking and _has_text(reasoning),
        "cut_in_thinking": lambda: was_cut and not has_answer,
        "cut_in_answer": lambda: was_cut and has_answer,
        "looping": lambda: _loops(reasoning, answer, question, was_cut, quality),
        "leftover_tags": lambda: bool(
            leftover_tags(answer, question) or leftover_tags(reasoning, question)
        ),
        "thinking_leaked_into_answer": lambda: has_leaked_thinking(
            answer, question, quality.thinking_leaked_into_answer.min_cues
        ),
        "refusal": lambda: is_refusal(answer),
        "wrong_language": lambda: (
            language_of is not None and is_wrong_language(question, answer, quality, language_of)
        ),
        "copied_prompt": lambda: is_copy(question, answer, quality),
        "too_short": lambda: has_text and is_too_short(question, answer, quality, was_cut),
        "not_utf8_clean": lambda: (
            is_unclean(answer, question) or is_unclean(reasoning, question + answer)
        ),
    }
    return tuple(name for name in FLAGS if quality.flag(name).enabled and checks[name]())


def judged_part(text: str) -> str:
    """Return the part of a text that is judged: all of it, or the first and last stretches."""
    if len(text) <= JUDGED_CHARACTERS:
        return text
    half = JUDGED_CHARACTERS // 2
    return f"{text[:half]}\n{text[-half:]}"


def flags_to_retry(flags: Iterable[QualityFlag], quality: QualityConfig) -> set[QualityFlag]:
    return {name for name in flags if quality.flag(name).policy == "retry"}


def retry_sampling(
    params: SamplingParams,
    flags: Iterable[QualityFlag],
    *,
    retry: int,
    quality: QualityConfig,
    most_tokens: int | None,
    row: tuple[str, int, int],
) -> SamplingParams | None:
    """Sampling of a turn's next attempt; None where that could not be better.

    `flags` are those of the last attempt, `retry` counts from 1, `params` are those of the first
    attempt, `most_tokens` is the room in the context, and `row` is row id, sample and turn index.
    """
    causes = set(flags)
    is_greedy = params.temperature == 0
    if causes & CUT_FLAGS:
        # A turn that was cut while it looped needs another sample, not a larger budget.
        budget = _grown_budget(params.max_tokens, most_tokens, quality.budget_factor**retry)
        if budget is None and causes <= CUT_FLAGS | {"empty_answer"}:
            return None
        params = replace(params, max_tokens=budget or params.max_tokens)
    if "looping" in causes or is_greedy:
        step = quality.temperatures[min(retry, len(quality.temperatures)) - 1]
        params = replace(params, temperature=max(params.temperature or 0.0, step))
    if params.seed is None:
        return params
    row_id, sample_index, turn_index = row
    seed = derived_seed(params, f"{row_id}\n{retry}", sample_index, turn_index)
    return replace(params, seed=seed)


def _grown_budget(max_tokens: int | None, room: int | None, factor: float) -> int | None:
    """Return a larger token budget within the context's room; None where there is none.

    A turn without a budget of its own was cut by the context.
    """
    if max_tokens is None:
        return None
    grown = int(max_tokens * factor)
    budget = grown if room is None else min(grown, room)
    return budget if budget > max_tokens else None


# -- emptiness and length

_BLANKS = r"\s\u200b-\u200f\u2028-\u202e\u2060-\u2064\ufeff\u00ad"
_INVISIBLE = re.compile(f"[{_BLANKS}]+")
_VISIBLE = re.compile(f"[^{_BLANKS}]")

_ASKS_FOR_LENGTH = re.compile(
    r"\b(write|compose|draft)\b[^.\n]{0,40}\b(essay|story|article|letter|report|blog post|speech|"
    r"tutorial|guide|paragraphs?)\b|\bexplain\b|\bin detail\b|\bstep[- ]by[- ]step\b|"
    r"\bdescribe\b|\bsummari[sz]e\b|\bcompare\b",
    re.IGNORECASE,
)
_ASKS_FOR_BREVITY = re.compile(
    r"\b(one|a single|two|three|few|\d+)[- ](word|words|sentence|letter|character|line|number)\b|"
    r"\b(brief(ly)?|short(ly|est)?|concise(ly)?|only|just|yes or no|true or false|tl;?dr|"
    r"which (one|option|of)|answer with|emoji|multiple.choice)\b",
    re.IGNORECASE,
)
_ONLY_BEGUN = re.compile(
    r"(sure|of course|certainly|absolutely|great question|okay|ok|alright|here is|here's|"
    r"here are|the|i|in|to|this|as|let me|first)[\s,.!:\u2014-]*",
    re.IGNORECASE,
)
_LONGEST_ANNOUNCEMENT = 120
_HEAD_OF_LONG = 1_000


def _visible(text: str) -> str:
    return _INVISIBLE.sub("", text)


def _has_text(text: str) -> bool:
    return _VISIBLE.search(text) is not None


def is_too_short(question: str, answer: str, quality: QualityConfig, was_cut: bool) -> bool:
    """Detect mere punctuation, a bare opening, or one line where the question asks for an essay."""
    if _is_clearly_long(answer, quality):
        return False
    visible = _visible(answer)
    if len(visible) < quality.too_short.min_characters:
        return True
    if was_cut or is_refusal(answer):
        return False
    if _is_all_marks(visible):
        return visible not in question or not visible.strip(".\u2026!?")
    text = answer.strip()
    if text.endswith((":", "\uff1a")) and "\n" not in text and len(text) <= _LONGEST_ANNOUNCEMENT:
        return True
    if _ASKS_FOR_BREVITY.search(question):
        return False
    if _ONLY_BEGUN.fullmatch(text) and _is_more_than_small_talk(question):
        return True
    asks_for_length = _ASKS_FOR_LENGTH.search(question) is not None
    return asks_for_length and len(visible) < quality.too_short.min_characters_of_long


def _is_clearly_long(answer: str, quality: QualityConfig) -> bool:
    """Tell a long text with more letters at its head than any bound of this check."""
    limits = quality.too_short
    least = max(_LONGEST_ANNOUNCEMENT, limits.min_characters, limits.min_characters_of_long)
    head = answer[:_HEAD_OF_LONG]
    if len(answer) <= _HEAD_OF_LONG:
        return False
    # Mostly the first characters suffice.
    return any(
        sum(map(str.isalpha, head[:length])) >= least for length in (2 * least, _HEAD_OF_LONG)
    )


def _is_all_marks(visible: str) -> bool:
    return all(unicodedata.category(character).startswith("P") for character in visible)


def _is_more_than_small_talk(question: str) -> bool:
    """Tell questions of more than four words, which `Sure!` does not answer, from small talk."""
    return len(question.split()) > 4


# -- loops

_ASKS_FOR_REPETITION = re.compile(
    r"\b(repeat|repeating|repeated|repetitive|over and over|again and again|\d+ times|"
    r"(ten|twenty|fifty|hundred|thousand) times|forever|infinite|lyrics|chant|mantra)\b",
    re.IGNORECASE,
)


def _loops(
    reasoning: str, answer: str, question: str, was_cut: bool, quality: QualityConfig
) -> bool:
    if is_looping(reasoning, quality.looping):
        return True
    if was_cut and _ends_in_counted_rounds(reasoning, answer):
        return True
    # Asked last: a search through a long question costs as much as the check of an answer.
    return is_looping(answer, quality.looping) and (
        was_cut or _ASKS_FOR_REPETITION.search(question) is None
    )


def _ends_in_counted_rounds(reasoning: str, answer: str) -> bool:
    """Check the part of a turn in which it was cut."""
    if _has_text(answer):
        return ends_in_counted_rounds(answer, MIN_ROUND_WORDS_IN_ANSWER)
    return ends_in_counted_rounds(reasoning, MIN_ROUND_WORDS_IN_THINKING)


# -- tags


def _marks_of_thinking() -> set[str]:
    """Return the tags of all families; sentences that serve as tags are no marks."""
    marks = {mark for tags in ALL_TAGS for mark in (tags.opening, tags.closing)}
    return {mark for mark in marks if mark[0] in "<[\u25c1"}


# Markers of the chat templates of ChatML, Llama 2 to 4, Gemma 2 to 4, Mistral, DeepSeek, GLM,
# gpt-oss, Phi, Granite, MiniMax, Seed and Nemotron, the tags of thinking of all families, and the
# byte and filler tokens of SentencePiece.
_TAGS = re.compile(
    "|".join(sorted(map(re.escape, _marks_of_thinking()), key=len, reverse=True))
    + r"|<\|[A-Za-z_]\w{0,40}\|>"
    r"|<\uff5c[^\uff5c<>\n]{1,40}\uff5c>"
    r"|</?(?:think|thinking|tool_call|tool_calls|tool_response|function_call|start_of_turn"
    r"|end_of_turn)>"
    r"|<\|(?:turn|tool|tool_call|tool_response)>|<(?:turn|tool|tool_call|tool_response)\|>"
    r"|</?seed:\w{1,30}>|<SPECIAL_\d{1,3}>|\]~!b\[|\]~b\]|\[e~\[|\[END FINAL RESPONSE\]"
    r"|^\s*<response>|</response>\s*$"
    # gpt-oss, where the server left out its special tokens
    r"|assistant(?:analysis|commentary|final)(?![a-z])"
    r"|\[/?INST\]|<</?SYS>>|\[gMASK\]|<0x[0-9A-F]{2}>|<(?:pad|eos|bos|unk|unused\d+)>"
    r"|^\s*<s>(?!.*</s>)|</s>\s*$"
)
# Each tag has one of them; most texts have none.
_PARTS_OF_TAGS = ("<", "[", "]~", "\u25c1", "assistant")
_CLOSING_TAGS = frozenset(tags.closing for tags in (*ALL_TAGS, GPT_OSS_BARE))
_INLINE_CODE = re.compile(r"(`{1,2})[^`\n]{1,300}\1")
_QUOTES = "\"'\u201c\u201d\u2018\u2019\u00ab\u00bb\u300c\u300d"


def leftover_tags(text: str, question: str) -> list[str]:
    """Find template markers, except in code, in quotes or where the question has them too."""
    if not any(part in text for part in _PARTS_OF_TAGS):
        return []
    prose = _without_code(text)
    return [
        match.group().strip()
        for match in _TAGS.finditer(prose)
        if not _is_quoted(prose, match) and match.group().strip() not in question
    ]


def _without_code(text: str) -> str:
    prose = split_code(text)[0]
    return _INLINE_CODE.sub(" ", prose) if "`" in prose else prose


def _is_quoted(text: str, match: re.Match[str]) -> bool:
    before, after = text[: match.start()][-1:], text[match.end() : match.end() + 1]
    return bool(before) and before in _QUOTES and bool(after) and after in _QUOTES


# -- thinking in the answer

# An opening mark ends the search for a closing one: many of them would each be followed far.
_SPOKEN = re.compile(r"[\"\u201c\u00ab][^\"\u201c\u201d\u00ab\u00bb\n]{0,400}[\"\u201d\u00bb]")
_OPENING_QUOTES = '"\u201c\u00ab'
_HEAD_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class _Cue:
    """A phrase of thinking."""

    words: tuple[str, ...]
    """Texts of which every match has one: most texts have none, which is soon seen."""
    pattern: re.Pattern[str]

    def is_in(self, text: str, lowered: str) -> bool:
        return any(word in lowered for word in self.words) and bool(self.pattern.search(text))


_CUES = tuple(
    _Cue(words, re.compile(pattern, re.IGNORECASE | re.MULTILINE))
    for words, pattern in (
        (
            ("user",),
            (
                r"\b(the|this) user('s| is| has| wants| want| asks?| asked| just| said| seems|"
                r" needs| might| may| probably)\b"
            ),
        ),
        (("hm",), r"(^|[.!?]\s+)(hmm+|hm)\b"),
        (("wait",), r"(^|[.!?]\s+)(but |oh )?wait\b[,. \u2014]"),
        (("ok", "alright"), r"\b(okay|ok|alright),? so\b"),
        (
            ("let me",),
            (
                r"\blet me (think|see|recall|re-?read|reconsider|double[- ]check|check|figure|"
                r"consider|break (this|it) down|start by|parse|work through)\b"
            ),
        ),
        (
            ("should", "need to", "must", "have to", "could", "will"),
            (
                r"\b(i|we) (should|need to|must|have to|could|will) (probably |just |also |first )?"
                r"(respond|reply|answer|provide|figure out|make sure|explain|give|mention|"
                r"determine|check|consider|recall|clarify|start|acknowledge|compute|find|produce|output)\b"
            ),
        ),
        (("actually", "no"), r"(^|[.!?]\s+)(actually|no), (no|wait|that's|that is)\b"),
        (
            ("answer", "response", "reply"),
            r"\b(so|but) (the|my) (final )?(answer|response|reply) (should|would|could|might)\b",
        ),
        (("i'm", "i am"), r"\bi('m| am) (thinking|supposed|going to (answer|respond))\b"),
        (
            ("\u7528\u6237",),
            r"\u7528\u6237(\u95ee|\u60f3|\u8981|\u9700\u8981|\u8ba9|\u53ef\u80fd|\u7684\u95ee\u9898)",
        ),
        (
            ("\u55ef", "\u597d\u7684", "\u7b49\u7b49"),
            # No line feed among the blanks: a run of them would be read anew from each line.
            r"(^|\u3002)[^\S\n]*(\u55ef|\u597d\u7684\uff0c(\u7528\u6237|\u6211)|\u7b49\u7b49)",
        ),
        (
            ("\u6211",),
            (
                r"\u6211(\u9700\u8981|\u5e94\u8be5)"
                r"(\u5148|\u56de\u7b54|\u786e\u8ba4|\u8003\u8651|\u89e3\u91ca|\u60f3)"
            ),
        ),
    )
)


def has_leaked_thinking(answer: str, question: str, min_cues: int) -> bool:
    """Detect thinking in an answer: a closing tag, or several typical phrases, two at its head.

    Text in quotation marks is somebody's speech and does not count.
    """
    if not _CLOSING_TAGS.isdisjoint(leftover_tags(answer, question)):
        return True
    prose = _without_speech(_without_code(answer))
    head = prose.lstrip()[:_HEAD_CHARACTERS]
    if _num_cues(head) < 2:
        return False
    return _num_cues(prose) >= min_cues


def _without_speech(text: str) -> str:
    return _SPOKEN.sub(" ", text) if any(mark in text for mark in _OPENING_QUOTES) else text


def _num_cues(text: str) -> int:
    lowered = text.lower()
    return sum(cue.is_in(text, lowered) for cue in _CUES)


# -- refusals

_REFUSAL_HEAD_CHARACTERS = 200
_I_AM = re.compile(r"\bI['\u2019]m\b", re.IGNORECASE)
_REFUSALS = re.compile(
    r"\bI (cannot|can['\u2019]t|won['\u2019]t|am unable to|am not able to|must decline to|"
    r"will not) (help|assist|comply|provide|support|fulfill?|create|generate|write|answer|"
    r"discuss|engage|continue|do that|share|give)\b"
    r"|\bas an AI( language model)?,? "
    r"I (cannot|can['\u2019]t|am unable|don['\u2019]t|am not able)\b"
    r"|\u62b1\u6b49\uff0c?\u6211(\u65e0\u6cd5|\u4e0d\u80fd)"
    r"|\blo siento,? (pero )?no puedo\b|\bje suis d\u00e9sol\u00e9e?,? (mais )?je ne peux pas\b",
    re.IGNORECASE,
)
# Every refusal has one of them: most texts have none.
_PARTS_OF_REFUSALS = (
    *("cannot", "can't", "can\u2019t", "won't", "won\u2019t", "will not", "unable", "not able"),
    *("decline", "as an ai", "\u62b1\u6b49", "siento", "d\u00e9sol"),
)


def is_refusal(answer: str) -> bool:
    head = answer.strip()[:_REFUSAL_HEAD_CHARACTERS]
    lowered = head.lower()
    if not any(part in lowered for part in _PARTS_OF_REFUSALS):
        return False
    return _REFUSALS.search(_without_speech(_I_AM.sub("I am", head))) is not None


# -- copies of the prompt

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
_ENDS_WORDS = 6
# Six words, and the piece of a seventh.
_ENDS_CHARACTERS = 400


def is_copy(question: str, answer: str, quality: QualityConfig) -> bool:
    """Detect an answer that repeats the question, with its beginning and its end.

    An answer that corrects or reorders a text shares most of it too, but in another order.
    """
    limits = quality.copied_prompt
    question, answer = question.lower(), answer.lower()
    if not all(word in answer for word in _ends_of(question)):
        return False
    prompt = _WORD.findall(question)
    if len(prompt) < limits.min_words:
        return False
    most_words = int(len(prompt) / max(limits.min_share, 0.01)) + 1
    words = islice(_WORD.finditer(answer), most_words + 1)
    copy = [word.group() for word in words]
    if not copy or len(copy) > most_words:
        return False
    if min(len(prompt), len(copy)) < limits.min_share * max(len(prompt), len(copy)):
        return False
    if prompt == copy:
        return True
    shingles = [set(zip(*(words[n:] for n in range(4)), strict=False)) for words in (prompt, copy)]
    if not all(shingles):
        return False
    shared = len(shingles[0] & shingles[1])
    if shared < limits.min_share * max(map(len, shingles)):
        return False
    copied_text = f" {' '.join(copy)} "
    ends = (prompt[:_ENDS_WORDS], prompt[-_ENDS_WORDS:])
    return all(f" {' '.join(end)} " in copied_text for end in ends)


def _ends_of(question: str) -> Iterator[str]:
    """Yield words of the question's ends, which every copy has; in a moment for a long one."""
    head = pairwise(_WORD.finditer(question[:_ENDS_CHARACTERS]))
    yield from (word.group() for word, _ in islice(head, _ENDS_WORDS))
    tail = _WORD.findall(question[-_ENDS_CHARACTERS:])[1:]
    yield from tail[-_ENDS_WORDS:]


# -- language

_LANGUAGES = re.compile(
    r"\b(translat\w*|traduc\w*|tradui\w*|\u00fcbersetz\w*|in (english|german|french|spanish|"
    r"italian|portuguese|dutch|russian|chinese|mandarin|japanese|korean|arabic|hindi|polish|"
    r"turkish|latin|greek|swedish)|auf (deutsch|englisch|franz\u00f6sisch|spanisch)|"
    r"en (espa\u00f1ol|ingl\u00e9s|fran\u00e7ais|anglais|allemand)|"
    r"(english|german|french|spanish|italian|portuguese|russian|chinese|japanese|korean|arabic|"
    r"hindi) (language|phrase|word|poem|sentence|version|text)s?)\b"
    r"|\u7ffb\u8bd1|\u7ffb\u8a33|\u82f1\u6587|\u82f1\u8bed|\u82f1\u8a9e|\u4e2d\u6587",
    re.IGNORECASE,
)
_PROSE_SHARE = 0.5


def is_wrong_language(
    question: str, answer: str, quality: QualityConfig, language_of: LanguageOf
) -> bool:
    """Detect an answer in another language than the question, unless it mentions a language."""
    limits = quality.wrong_language
    if _LANGUAGES.search(question):
        return False
    languages = []
    for text in (question, answer):
        prose = " ".join(_without_code(text).split())
        letters = sum(character.isalpha() for character in prose)
        is_prose = letters >= _PROSE_SHARE * max(1, len(prose))
        # A Chinese or Japanese character has as much content as a few letters.
        weight = sum(3 if ord(character) > 0x2E80 else 1 for character in prose)
        if weight < limits.min_characters or not is_prose:
            return False
        language, probability = language_of(prose)
        if probability < limits.min_probability:
            return False
        languages.append(language)
    return languages[0] != languages[1]


# -- characters

_UNCLEAN = re.compile(
    "[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\x80-\x84\x86-\x9f\ufffd\ufffe\uffff\ud800-\udfff"
    "\ue000-\uf8ff]"
)
# UTF-8 decoded as Windows-1252: letters beyond ASCII become these pairs.
_MOJIBAKE = re.compile(
    "\u00c3[\u00a0-\u00bf\u2018-\u201e\u0192\u2020-\u2026]"
    "|\u00e2\u20ac[\u2122\u0153\u009d\u201c\u201d\u02dc\u00a6]|\u00c2[\u00a0-\u00bf]"
)
_MIN_MOJIBAKE = 2
_ABOUT_ENCODINGS = re.compile(
    r"U\+FFFD|replacement character|mojibake|encod|unicode|control character|escape sequence",
    re.IGNORECASE,
)


def is_unclean(text: str, context: str) -> bool:
    """Detect characters of broken bytes, unless the text or its context is about encodings."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return False
    broken = set(_UNCLEAN.findall(text)) - set(context)
    garbled = len(_MOJIBAKE.findall(text)) >= _MIN_MOJIBAKE and not _MOJIBAKE.search(context)
    if not broken and not garbled:
        return False
    return _ABOUT_ENCODINGS.search(text) is None and _ABOUT_ENCODINGS.search(context) is None
