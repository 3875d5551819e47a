"""Texts of chosen rows: read in place, clipped, and kept while they are chosen."""

from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.dataset.frozen import freeze
from pipeline.dataset.parts import publish
from pipeline.dataset.prompts import read_prompts
from pipeline.report.rows.examples import Example, ExampleBook, clipped
from pipeline.report.rows.figures import RowFigures
from pipeline.report.rows.groups import example_groups
from pipeline.report.rows.picks import Pick
from pipeline.store.folder import LocalFolder
from schemas.completion import Completion
from schemas.config.requests import PromptsConfig
from schemas.prompt import FunctionCall, Message, ToolCall
from tests.fakes.staged_part import stage_part


def published(root: Path, name: str, rows: list[Completion]) -> LocalFolder:
    folder = LocalFolder(root)
    for inner in ("staging", "data"):
        folder.make(inner)
    part = stage_part(folder, name, rows, run_id="r", carried_schema=pa.schema([]), worker_id="w0")
    publish(folder, part, now_s=1.0)
    return folder


def read(folder: LocalFolder, part: str, place: int) -> Example:
    book, pick = ExampleBook(), Pick(0.5, part, place)
    book.read(folder, [pick])
    (example,) = book.of([pick])
    return example


def page_bytes(example: Example) -> int:
    """Add up the bytes of all texts as the page has them."""
    texts = [one.text for one in example.said] + [
        one.reasoning for one in example.said if one.reasoning
    ]
    return sum(len(escape(part).encode()) for text in texts for part in (text.head, text.tail))


def test_row_has_its_texts_and_figures(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    rows = [completion(f"r{n}", attempt=n, flags=("looping",)) for n in range(200)]
    folder = published(tmp_path, "p.parquet", rows)
    example = read(folder, "p.parquet", 130)
    assert (example.row_id, example.attempts, example.flags) == ("r130", 130, ("looping",))
    question, answer = example.said
    assert (question.role, question.text.head, question.reasoning) == ("user", "3 + 4?", None)
    assert (answer.role, answer.text.head) == ("assistant", "seven")
    assert answer.reasoning is not None
    assert answer.reasoning.head == "hm"
    assert (example.took_s, example.prompt_tokens, example.completion_tokens) == (0.25, 5, 3)
    assert example.first_words == "3 + 4?"


def test_error_row_has_its_error_and_its_prompt(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    row = completion("bad", error=True, messages=(Message(role="user", content="3 + 4?"),))
    example = read(published(tmp_path, "p.parquet", [row]), "p.parquet", 0)
    assert example.error == "empty_text: the text is empty"
    assert [one.text.head for one in example.said] == ["3 + 4?"]
    assert (example.completion_tokens, example.finish_reason) == (None, None)


def test_called_tools_are_part_of_the_text(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    call = ToolCall(id="1", function=FunctionCall(name="add", arguments='{"a": 3, "b": 4}'))
    messages = (
        Message(role="user", content="3 + 4?"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="7", tool_call_id="1"),
    )
    rows = [completion("a", messages=messages)]
    example = read(published(tmp_path, "p.parquet", rows), "p.parquet", 0)
    assert [(one.role, one.text.head) for one in example.said] == [
        ("user", "3 + 4?"), ("assistant", 'calls add({"a": 3, "b": 4})'), ("tool", "7")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["word " * 40_000, "<&>'\"" * 40_000, "語" * 100_000, "\0\x1b" * 90_000]
)
def test_long_texts_are_clipped_by_their_bytes_in_the_page(
    text: str, tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    messages = [
        Message(role="assistant" if n % 2 else "user", content=text, reasoning_content=text)
        for n in range(40)
    ]
    row = completion("long", messages=tuple(messages))
    example = read(published(tmp_path, "p.parquet", [row]), "p.parquet", 0)
    assert (len(example.said), example.messages_left_out) == (6, 34)
    assert 7_000 < page_bytes(example) <= 8_000
    first = example.said[0].text
    assert len(first.head) + first.num_left_out + len(first.tail) == len(text)


def test_short_texts_leave_their_room_to_a_long_one(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    messages = (
        Message(role="user", content="3 + 4?"),
        Message(role="assistant", content="seven", reasoning_content="hm " * 5_000),
    )
    row = completion("a", messages=messages)
    example = read(published(tmp_path, "p.parquet", [row]), "p.parquet", 0)
    assert 2_990 < page_bytes(example) <= 3_020


def test_clipped_text_has_its_beginning_and_its_end() -> None:
    text = clipped("".join(f"{n:04d}" for n in range(1000)), 300)
    assert text.head.startswith("00000001")
    assert len(text.head) == 200
    assert text.tail.endswith("0999")
    assert text.num_left_out == 4000 - 300
    assert clipped("short", 300).num_left_out == 0
    assert clipped("a\0b\tc\n\x1b[0m", 300).head == "a␀b\tc\n␛[0m"


def test_texts_are_read_once_and_forgotten_with_their_choice(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    folder = published(tmp_path, "p.parquet", [completion("a"), completion("b")])
    book = ExampleBook()
    first, second = Pick(0.1, "p.parquet", 0), Pick(0.2, "p.parquet", 1)
    book.read(folder, [first])
    folder.remove("data/p.parquet")
    book.read(folder, [first, second])
    assert [example.row_id for example in book.of([first, second])] == ["a"]
    book.read(folder, [])
    assert book.of([first]) == []


def test_groups_say_how_many_rows_they_left_out(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    rows = [completion(f"bad{n}", error=True) for n in range(50)]
    rows += [completion(f"r{n}", flags=("looping",)) for n in range(5)]
    folder = published(tmp_path, "p.parquet", rows)
    figures = RowFigures()
    figures.read(folder, ["p.parquet"])
    failed = [(f"f{n}", 0, "HTTP 503") for n in range(45)]
    groups = {(g.kind, g.flag): g for g in example_groups(folder, figures, failed)}
    assert {key: (len(g.examples), g.num_left_out) for key, g in groups.items()} == {
        ("error", None): (40, 10),
        ("failed", None): (40, 5),
        ("flag", "looping"): (3, 2),
        ("slowest", None): (10, 45),
        ("random", None): (5, 0),
    }


def test_failed_row_has_the_prompt_that_was_frozen(tmp_path: Path) -> None:
    source = tmp_path / "p.jsonl"
    source.write_text("".join(f'{{"id": "q{n}", "prompt": "Question {n}?"}}\n' for n in range(9)))
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    freeze(folder, "set", read_prompts(PromptsConfig(path=str(source), id_column="id")))
    found = ExampleBook().failed(folder, [("q7", 1, "timed out"), ("gone", 0, "timed out")])
    assert [(e.row_id, e.sample_index, e.error) for e in found] == [
        ("q7", 1, "timed out"), ("gone", 0, "timed out")
    ]  # fmt: skip
    assert [one.text.head for one in found[0].said] == ["Question 7?"]
    assert found[1].said == ()


def test_row_of_the_first_format_has_no_flags(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    folder = published(tmp_path, "p.parquet", [replace(completion("a"), flags=("looping",))])
    with folder.open_input("data/p.parquet") as source:
        table = pa.parquet.read_table(source)
    old = table.drop_columns(["flags", "quality_retries", "plan"])
    pa.parquet.write_table(old, tmp_path / "data" / "p.parquet")
    figures = RowFigures()
    figures.read(folder, ["p.parquet"])
    (slow, drawn) = example_groups(folder, figures, [])
    assert [group.examples[0].flags for group in (slow, drawn)] == [(), ()]
