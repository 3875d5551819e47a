"""Writes the labelled set of quality flags: tests/data/quality/rows.jsonl.

usage: python -m tests.scores.make_quality_set

Two halves of one shape and no common text or seed: thresholds are chosen on `tuned`, and `held_out`
shows what they are worth. Six rows in ten are good, hard negatives written by hand among them.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.scores.quality_counted_rows import COUNTED, CountedText
from tests.scores.quality_hard_negatives import HARD_NEGATIVES
from tests.scores.quality_material import FOREIGN, REASONING, TOPICS, Topic

ROOT = Path(__file__).resolve().parents[1]

PATH = ROOT / "data" / "quality" / "rows.jsonl"
SEEDS = {"tuned": 11, "held_out": 4242}
_ROWS_PER_FLAG = 15
# A flag with more forms than that, each of which is to be in both halves.
_FORMS = {"leftover_tags": 29}
_GOOD_ROWS = 345


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRow:
    """A generated turn and the flags that it should get."""

    half: str
    kind: str
    question: str
    reasoning: str | None
    answer: str
    finish_reason: str
    thinking: bool
    flags: tuple[str, ...]


@dataclass(slots=True)
class Maker:
    """Draws rows of one half."""

    half: str
    chance: random.Random

    def rows(self) -> Iterator[LabelledRow]:
        for kind, question, answer in HARD_NEGATIVES[self.half]:
            yield self.row(kind, question, answer)
        for _ in range(_GOOD_ROWS - len(HARD_NEGATIVES[self.half])):
            yield self.chance.choice(GOOD)(self)
        for flag, make in BAD.items():
            for number in range(_FORMS.get(flag, _ROWS_PER_FLAG)):
                yield make(self, flag, number)
        for counted in COUNTED[self.half]:
            yield counted_row(self, counted)

    def row(
        self, kind: str, question: str, answer: str, *flags: str, **more: object
    ) -> LabelledRow:
        values: dict[str, object] = {
            "reasoning": self.reasoning(self.topic()),
            "finish_reason": "stop",
            "thinking": True,
        }
        return LabelledRow(
            half=self.half, kind=kind, question=question, answer=answer, flags=flags,
            **(values | more),  # type: ignore[arg-type]
        )  # fmt: skip

    def topic(self) -> Topic:
        return self.chance.choice(TOPICS[self.half])

    def reasoning(self, topic: Topic) -> str:
        return self.chance.choice(REASONING[self.half]).format(topic=topic.name)

    def prose(self, topic: Topic, least: int = 3) -> str:
        number = self.chance.randint(least, len(topic.sentences))
        return " ".join(self.chance.sample(topic.sentences, number))

    def long_prose(self) -> str:
        topics = self.chance.sample(TOPICS[self.half], 5)
        return "\n\n".join(self.prose(topic, 5) for topic in topics)


# -- good rows


def plain(m: Maker) -> LabelledRow:
    topic = m.topic()
    return m.row("prose", topic.question, m.prose(topic), reasoning=m.reasoning(topic))


def opened(m: Maker) -> LabelledRow:
    topic = m.topic()
    opener = m.chance.choice(
        ("Great question! ", "Sure! ", "Okay, here is how it works. ", "In short: ",
         "Let me explain. ")
    )  # fmt: skip
    return m.row("prose", topic.question, opener + m.prose(topic))


def as_list(m: Maker) -> LabelledRow:
    topic = m.topic()
    marker = m.chance.choice(("- ", "* ", "• "))
    items = "\n".join(marker + sentence for sentence in topic.sentences)
    return m.row("list", topic.question, f"The main points:\n\n{items}\n\nThat is all.")


def as_sections(m: Maker) -> LabelledRow:
    parts = [
        f"## {number}. On {topic.name}\n\n{m.prose(topic)}"
        for number, topic in enumerate(m.chance.sample(TOPICS[m.half], 4), 1)
    ]
    return m.row("sections", "Write a short guide to these four subjects.", "\n\n".join(parts))


def as_code(m: Maker) -> LabelledRow:
    name = m.chance.choice(("total", "scan", "merge", "parse", "rotate", "split", "filter"))
    lines = "\n".join(
        f"    if value == {n}:\n        result.append(value)\n        continue" for n in range(7)
    )
    head = f"def {name}(values):\n    result = []\n    for value in values:"
    code = f"{head}\n{lines}\n    return result"
    fence = m.chance.choice(("```", "~~~"))
    answer = f"{fence}python\n{code}\n{fence}\n\nIt runs in one pass over `values`."
    return m.row("code", f"Write a Python function {name} that filters a list.", answer)


def as_data(m: Maker) -> LabelledRow:
    rows = [
        {"id": n, "city": m.chance.choice(("Oslo", "Bern", "Riga")), "ok": m.chance.random() < 0.5}
        for n in range(m.chance.randint(5, 40))
    ]
    return m.row(
        "json", "Give me test data as JSON.", json.dumps(rows, indent=m.chance.choice((0, 2)))
    )


def as_table(m: Maker) -> LabelledRow:
    lines = [f"| {n} | {n * n} | {n**3} |" for n in range(m.chance.randint(5, 60))]
    return m.row(
        "table", "Make a table of squares and cubes.", "\n".join(["| n | n² | n³ |", *lines])
    )


def as_foreign(m: Maker) -> LabelledRow:
    text = m.chance.choice(FOREIGN[m.half])
    return m.row(f"in {text.language}", text.question, text.answer)


def unthinking(m: Maker) -> LabelledRow:
    topic = m.topic()
    return m.row(
        "not asked to think",
        topic.question,
        m.prose(topic),
        thinking=False,
        reasoning=m.chance.choice((None, "", "\n\n")),
    )


def with_a_draft(m: Maker) -> LabelledRow:
    """Thinking that drafts the answer, reads it again, and changes the order."""
    topic = m.topic()
    draft = " ".join(topic.sentences)
    order = m.prose(topic, 4)
    reasoning = (
        f"{m.reasoning(topic)}\n\nDraft: {draft}\n\nHmm, that is dry. Wait, the order could be "
        f"better. Let me try again.\n\nDraft 2: {order}\n\nBetter. I will go with that."
    )
    return m.row("draft in thinking", topic.question, order, reasoning=reasoning)


def with_sums(m: Maker) -> LabelledRow:
    first, step = m.chance.randint(2, 9), m.chance.randint(2, 9)
    lines, total = [], 0
    for n in range(m.chance.randint(5, 25)):
        total += first + n * step
        lines.append(
            f"After {n + 1} weeks: {total - first - n * step} + {first + n * step} = {total}."
        )
    return m.row("math", "How does the sum grow week by week?", "\n".join(lines))


def brief(m: Maker) -> LabelledRow:
    a, b = m.chance.randint(2, 99), m.chance.randint(2, 99)
    return m.row("short", f"What is {a} times {b}? Just the number.", str(a * b))


def long_text(m: Maker) -> LabelledRow:
    return m.row("long", "Tell me all you know about these things.", m.long_prose())


def restated(m: Maker) -> LabelledRow:
    topic = m.topic()
    return m.row("restated", topic.question, f"{topic.question}\n\n{m.prose(topic, 4)}")


def about_marks(m: Maker) -> LabelledRow:
    mark = m.chance.choice(("[THINK]", "<think>", "<seed:think>", "<|channel|>analysis", "◁think▷"))
    answer = f"It opens the thinking. What follows {mark} is not shown. {m.prose(m.topic())}"
    return m.row("about a mark", f"What does {mark} do in a chat template?", answer)


GOOD: tuple[Callable[[Maker], LabelledRow], ...] = (
    plain, opened, as_list, as_sections, as_code, as_data, as_table, as_foreign, unthinking,
    with_a_draft, with_sums, brief, long_text, restated, about_marks,
)  # fmt: skip


# -- bad rows, a function a flag; `number` walks through its forms


def empty_answer(m: Maker, flag: str, number: int) -> LabelledRow:
    answer = ("", "\n\n", " \n", "\u200b", "\ufeff\n")[number % 5]
    return m.row("empty", m.topic().question, answer, flag)


def empty_reasoning(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    nothing = (None, "", "\n\n", " ")[number % 4]
    return m.row("no thinking", topic.question, m.prose(topic), flag, reasoning=nothing)


def unasked_reasoning(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    thought = (m.reasoning(topic), f"\n{m.prose(topic)}\n", "Hmm.")[number % 3]
    return m.row(
        "thinking was off", topic.question, m.prose(topic), flag, reasoning=thought, thinking=False
    )


def cut_in_thinking(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    text = f"{m.reasoning(topic)} {m.prose(topic)}"
    cut = text[: m.chance.randint(len(text) // 2, len(text) - 2)]
    answer = ("", "\n")[number % 2]
    return m.row(
        "cut", topic.question, answer, "empty_answer", flag, reasoning=cut, finish_reason="length"
    )


def cut_in_answer(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    text = (m.prose(topic), m.long_prose(), "\n".join(f"- {s}" for s in topic.sentences))[
        number % 3
    ]
    cut = text[: m.chance.randint(len(text) // 2, len(text) - 2)].rstrip()
    return m.row("cut", topic.question, cut, flag, finish_reason="length")


def looping(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    head, sentences = m.prose(topic), topic.sentences
    cut = "cut_in_answer"
    match number % 9:
        case 0:
            return _cut(m, "sentence", topic, f"{head}\n\n" + f"{sentences[0]} " * 30, flag, cut)
        case 1:
            return _cut(m, "paragraph", topic, f"{head}\n\n" * 12, flag, cut)
        case 2:
            run = m.chance.choice(("!", "0", "a", "的", " the", "\\n"))
            return _cut(m, "one token", topic, run * 600, flag, cut)
        case 3:
            doubt = m.chance.choice(DOUBTS[m.half])
            thinking = f"{m.reasoning(topic)}\n\n{doubt} " + f"{doubt} " * 40
            return m.row(
                "thinking", topic.question, "", "empty_answer", "cut_in_thinking", flag,
                reasoning=thinking, finish_reason="length",
            )  # fmt: skip
        case 4:
            walk = " ".join(m.chance.choice(sentences[:2]) for _ in range(80))
            return _cut(m, "two sentences at random", topic, walk, flag, cut)
        case 5:
            walk = " ".join(m.chance.choice(sentences[:4]) for _ in range(60))
            return m.row("four sentences at random", topic.question, walk, flag)
        case 6:
            code = "```python\nvalues = [\n" + "    (0, 0, 0),\n" * 80
            return _cut(m, "code", topic, code, flag, cut)
        case 7:
            items = "\n".join(f"{n}. {sentences[n % 3]}" for n in range(1, 40))
            return m.row("list", topic.question, items, flag)
        case _:
            ending = m.chance.choice(
                ("I hope this helps! Let me know. ", "Good luck! 😊 ", "Bye. ")
            )
            return m.row("farewell", topic.question, f"{head}\n\n{ending * 70}", flag)


def _cut(m: Maker, kind: str, topic: Topic, answer: str, *flags: str) -> LabelledRow:
    return m.row(kind, topic.question, answer, *flags, finish_reason="length")


def counted_row(m: Maker, counted: CountedText) -> LabelledRow:
    """Cut while it counts: a loop where its rounds say nothing, else a list that was too long."""
    flag = ("looping",) if counted.loops else ()
    if counted.in_thinking:
        return m.row(
            counted.kind, counted.question, "", "empty_answer", "cut_in_thinking", *flag,
            reasoning=counted.text, finish_reason="length",
        )  # fmt: skip
    return m.row(
        counted.kind, counted.question, counted.text, "cut_in_answer", *flag,
        finish_reason="length",
    )  # fmt: skip


DOUBTS = {
    "tuned": ("Wait, let me check that again.", "Hmm, but is it? No, it is right. But is it?"),
    "held_out": ("Actually, maybe not. Let me redo this.", "So the answer is yes. Or no. Or yes."),
}


def leftover_tags(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    text = m.prose(topic)
    leak = "thinking_leaked_into_answer"
    forms: tuple[tuple[str, tuple[str, ...]], ...] = (
        (f"{text}<|im_end|>", (flag,)),
        (f"{text}<|im_end|>\n<|im_start|>user\nAnd then?", (flag,)),
        (f"{text}</s>", (flag,)),
        (f"<think>\n\n</think>\n\n{text}", (flag, leak)),
        (f"{text}\n</think>\n\n{text}", (flag, leak)),
        ('<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>', (flag,)),
        (f"{text} [/INST] {text}", (flag,)),
        (f"{text}<｜end▁of▁sentence｜>", (flag,)),
        (f"<|start_header_id|>assistant<|end_header_id|>\n\n{text}", (flag,)),
        (f"{text}<end_of_turn>", (flag,)),
        (f"<|channel|>final<|message|>{text}", (flag,)),
        (f"[gMASK]{text}", (flag,)),
        (f"{text}<0x0A><0x0A>{text}", (flag,)),
        (f"<mm:think>\n\n</mm:think>{text}", (flag, leak)),
        (f"{text}</seed:think>{text}", (flag, leak)),
        (f"{text}<seed:eos>", (flag,)),
        (f"[THINK]{text}[/THINK]{text}", (flag, leak)),
        (f"\u25c1think\u25b7{text}\u25c1/think\u25b7{text}", (flag, leak)),
        (f"<|close|>think<|sep|><|open|>response<|sep|>{text}", (flag, leak)),
        (f"<|channel>thought\n{text}<channel|>{text}", (flag, leak)),
        (f"{text}<turn|>\n<|turn>user\nAnd then?", (flag,)),
        (f"<|channel|>analysis<|message|>{text}", (flag,)),
        (f"analysis{text}assistantfinal{text}", (flag, leak)),
        (f"<|START_THINKING|>{text}<|END_THINKING|>{text}", (flag, leak)),
        (f"{text}<|inner_suffix|>{text}", (flag, leak)),
        (f"{text}\n[BEGIN FINAL RESPONSE]\n{text}", (flag, leak)),
        (f"<response>{text}</response>", (flag,)),
        (f"{text}[e~[\n]~b]user", (flag,)),
        (f"{text}\n<SPECIAL_12>", (flag,)),
    )
    answer, flags = forms[number % len(forms)]
    return m.row("tags", topic.question, answer, *flags)


def thinking_leaked_into_answer(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    thought = THOUGHTS[m.half][number % len(THOUGHTS[m.half])].format(topic=topic.name)
    return m.row("thinks aloud", topic.question, f"{thought}\n\n{m.prose(topic)}", flag)


THOUGHTS = {
    "tuned": (
        (
            "Okay, so the user is asking about {topic}. I need to explain it clearly. Let me recall "
            "the main points before I answer."
        ),
        "Hmm, the user wants to know about {topic}. Let me think. I should start with the cause.",
        (
            "The user asks about {topic}. We need to answer in a few sentences. Wait, maybe they mean "
            "something else. No, it is fine."
        ),
        (
            "Alright, so I have a question on {topic}. Let me break this down. First I should provide "
            "the definition."
        ),
        (
            "Let me think about {topic} first. The user might be a beginner, so I should explain it "
            "without jargon."
        ),
        "嗯，用户问的是 {topic}。我需要先解释原因，然后再给出例子。",
        "We need to respond to a question about {topic}. The user wants facts. Hmm, which ones?",
        "Okay, so {topic}. I'm supposed to keep this short. Let me recall what matters.",
    ),
    "held_out": (
        (
            "Okay, the user is curious about {topic}. I should give a clear answer. Let me start by "
            "recalling the basics."
        ),
        "Hmm, {topic}. Let me figure out what the user needs. I could mention the history too.",
        "So the user asked about {topic}. But wait, is this a trick question? I need to check.",
        (
            "First, I need to determine what the user wants to know on {topic}. Let me consider both "
            "readings."
        ),
        (
            "The user just wants a summary of {topic}. I must answer in plain words. Actually, wait, "
            "they may want more."
        ),
        "好的，用户想了解 {topic}。我应该先回答核心问题，再补充细节。",
        "Let me double-check what I know of {topic}. Hmm. I will explain the mechanism first.",
        (
            "Okay, so I need to explain {topic}. Wait, the question says beginner. I should start "
            "simple."
        ),
    ),
}


def refusal(m: Maker, flag: str, number: int) -> LabelledRow:
    answer = REFUSALS[m.half][number % len(REFUSALS[m.half])]
    return m.row("refusal", f"{m.topic().question} Tell me the dangerous way.", answer, flag)


REFUSALS = {
    "tuned": (
        "I'm sorry, but I can't help with that.",
        "I cannot assist with this request, because it could hurt someone.",
        "I'm sorry, I cannot provide instructions for that. Please talk to a professional.",
        "As an AI language model, I cannot answer questions of this kind.",
        "I can't help with anything dangerous, though I am glad to talk about safety.",
        "抱歉，我无法提供这方面的帮助。",
        "Sorry, I won't write that. Is there something else that I can do for you?",
        "Lo siento, pero no puedo ayudarte con eso.",
    ),
    "held_out": (
        "I am unable to help with that request.",
        "I'm really sorry, but I won't provide that. If you are in danger, call for help.",
        "I can’t assist with that, but here is a number that you can call.",
        "I must decline to answer this one.",
        "As an AI, I can't give advice on hurting people.",
        "抱歉，我不能回答这个问题。",
        "I'm not able to create this kind of content.",
        "Je suis désolé, mais je ne peux pas vous aider.",
    ),
}


def wrong_language(m: Maker, flag: str, number: int) -> LabelledRow:
    texts = FOREIGN[m.half]
    asked = texts[number % len(texts)]
    if number % 2:
        other = texts[(number + 1 + number // len(texts)) % len(texts)]
        if other is not asked:
            return m.row("other language", asked.question, other.answer, flag)
    topic = m.topic()
    return m.row("English", asked.question, m.prose(topic, 5), flag)


def copied_prompt(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    question = f"{topic.question} Here is what I read: {m.prose(topic)} Is all of this right?"
    answer = (
        question,
        question.lower(),
        f"{question}\n",
        f'"{question}"',
        question.replace(".", " ."),
        f"{question} Yes.",
    )[number % 6]
    return m.row("copy", question, answer, flag)


def too_short(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    question, answer = SHORT[m.half][number % len(SHORT[m.half])]
    return m.row("too short", question or topic.question, answer, flag)


SHORT = {
    "tuned": (
        ("", "."),
        ("Write an essay about the sea.", "The sea is big."),
        ("", "Here are the main points:"),
        ("Explain in detail how a plane flies.", "It has wings."),
        ("", "Sure!"),
        ("", "..."),
        ("Describe your favourite painting.", "Blue."),
        ("How do I plan a garden for a small yard?", "The"),
    ),
    "held_out": (
        ("", "—"),
        ("Write a story about a lost key.", "A key was lost."),
        ("", "Here is a step-by-step guide that you can follow:"),
        ("Summarise the causes of the First World War.", "Alliances."),
        ("", "Of course."),
        ("", "!!"),
        ("Compare Rust and Go for servers.", "Both work."),
        ("What should I pack for a week in Norway?", "Certainly!"),
    ),
}


def not_utf8_clean(m: Maker, flag: str, number: int) -> LabelledRow:
    topic = m.topic()
    text = m.prose(topic)
    middle = len(text) // 2
    accented = m.chance.choice(FOREIGN[m.half])
    match number % 5:
        case 0:
            answer = f"{text} \ufffd"
        case 1:
            answer = text[:middle] + "\ufffd\ufffd" + text[middle:]
        case 2:
            answer = text[:middle] + m.chance.choice("\x00\x01\x07\x08\x7f") + text[middle:]
        case 3:
            answer = f"{text} It’s “fine” – the café’s déjà vu."
            answer = answer.encode().decode("cp1252", "replace").replace("\ufffd", "")
        case _:
            answer = text[:middle] + m.chance.choice("\ue000\uffff\x81") + text[middle:]
    question = accented.question if number % 10 == 9 else topic.question
    flags = (flag,) if question == topic.question else ("wrong_language", flag)
    return m.row("broken characters", question, answer, *flags)


BAD: dict[str, Callable[[Maker, str, int], LabelledRow]] = {
    make.__name__: make
    for make in (
        empty_answer, empty_reasoning, unasked_reasoning, cut_in_thinking, cut_in_answer, looping,
        leftover_tags, thinking_leaked_into_answer, refusal, wrong_language, copied_prompt,
        too_short, not_utf8_clean,
    )
}  # fmt: skip


def labelled_rows() -> list[LabelledRow]:
    return [row for half, seed in SEEDS.items() for row in Maker(half, random.Random(seed)).rows()]


def read_labelled_rows() -> list[LabelledRow]:
    lines = PATH.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [LabelledRow(**{**row, "flags": tuple(row["flags"])}) for row in rows]


def main() -> int:
    PATH.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(row), ensure_ascii=True) for row in labelled_rows()]
    PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{PATH.relative_to(ROOT.parent)}: {len(lines)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
