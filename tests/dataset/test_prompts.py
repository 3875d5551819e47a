"""Rows → prompts: every shape and file, one prompt a row, ids that no order changes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.dataset.prompts import PromptStream, input_fingerprint, read_prompts
from pipeline.errors import ConfigError
from schemas.config.requests import PromptsConfig
from schemas.prompt import Prompt

HI = [{"role": "user", "content": "hi"}]
OPEN = ("assistant", "")
BOM = b"\xef\xbb\xbf"

Row = dict[str, Any]


def parquet(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def json_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, **settings: Any) -> PromptStream:  # noqa: ANN401 - any key of the section
    return read_prompts(PromptsConfig(path=str(path), **settings))


def prompts(path: Path, **settings: Any) -> list[Prompt]:  # noqa: ANN401
    return list(opened(path, **settings).prompts)


def ids(path: Path, **settings: Any) -> list[str]:  # noqa: ANN401
    return [prompt.row_id for prompt in prompts(path, **settings)]


def turns(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in prompt.messages]


def only(rows: list[Prompt]) -> Prompt:
    [prompt] = rows
    return prompt


def refusal(path: Path, **settings: Any) -> str:  # noqa: ANN401
    """The one line with which the input is refused, on opening or while reading."""
    with pytest.raises(ConfigError) as caught:
        prompts(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- shapes and columns


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"messages": HI}, "messages"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "conversations"),
        ({"conversations": HI}, "conversations"),
        ({"prompt": "hi"}, "prompt"),
        ({"prompt": HI}, "prompt"),
    ],
)
def test_each_shape_is_recognised_from_its_column(
    tmp_path: Path, suffix: str, row: Row, column: str
) -> None:
    write = parquet if suffix == ".parquet" else json_lines
    stream = opened(write(tmp_path / f"p{suffix}", [{"other": 1, **row}]))
    assert (stream.columns.column, stream.columns.shape) == (column, column)
    assert turns(only(list(stream.prompts))) == [("user", "hi"), OPEN]


def test_messages_come_before_conversations_and_these_before_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "c", "conversations": HI, "messages": HI}]
    assert opened(json_lines(tmp_path / "a.jsonl", rows)).columns.column == "messages"
    del rows[0]["messages"]
    assert opened(json_lines(tmp_path / "b.jsonl", rows)).columns.column == "conversations"


def test_named_column_is_read_by_its_values(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"prompt": "no", "question": "yes", "chat": HI}])
    assert turns(only(prompts(path, column="question"))) == [("user", "yes"), OPEN]
    assert turns(only(prompts(path, column="chat"))) == [("user", "hi"), OPEN]


def test_named_shape_overrides_the_columns_name(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"messages": "plain text"}])
    assert turns(only(prompts(path, shape="prompt"))) == [("user", "plain text"), OPEN]
    path = json_lines(tmp_path / "q.jsonl", [{"prompt": "plain text"}])
    problem = only(prompts(path, shape="messages")).problem
    assert problem is not None
    assert problem.kind == "not_a_list"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("system", "system"),
        ("developer", "developer"),
        ("human", "user"),
        ("User", "user"),
        (" user ", "user"),
        ("gpt", "assistant"),
        ("model", "assistant"),
        ("bot", "assistant"),
        ("chatgpt", "assistant"),
    ],
)
def test_role_names_of_both_families_are_known(tmp_path: Path, name: str, role: str) -> None:
    chat = [{"from": "human", "value": "q"}, {"from": name, "value": "x"}]
    chat.append({"from": "human", "value": "r"})
    path = json_lines(tmp_path / "p.jsonl", [{"conversations": chat}])
    assert turns(only(prompts(path)))[1][0] == role


def test_unknown_columns_are_listed_when_none_is_recognised(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"question": "q", "answer": "a"}])
    assert refusal(path) == (
        "prompts.column: none of messages, conversations, conversation, prompt is a column of "
        f"{path}; name one of: question, answer"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("column", "question"),
        ("id_column", "uid"),
        ("system_column", "sys"),
        ("keep_columns", ["topic"]),
    ],
)
def test_named_column_that_is_missing_is_refused_with_what_is_there(
    tmp_path: Path, field: str, value: object
) -> None:
    path = parquet(tmp_path / "p.parquet", [{"prompt": "q", "n": 1}])
    name = value[0] if isinstance(value, list) else value
    expected = f"prompts.{field}: no column {name!r} in {path}; it has: prompt, n"
    assert refusal(path, **{field: value}) == expected


@pytest.mark.parametrize("name", ["row_id", "messages", "model", "started_at"])
def test_kept_column_with_the_name_of_an_output_column_is_refused(
    tmp_path: Path, name: str
) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"prompt": "q", name: HI}])
    assert refusal(path, column="prompt", keep_columns=[name]) == (
        f"prompts.keep_columns: {name!r} is the name of a column of the output; "
        f"rename it in the input"
    )


# -- system prompts


@pytest.mark.parametrize("column", ["system_prompt", "system"])
def test_system_column_is_recognised_by_name(tmp_path: Path, column: str) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"prompt": "q", column: "be brief"}])
    assert turns(only(prompts(path))) == [("system", "be brief"), ("user", "q"), OPEN]


def test_named_system_column_is_taken_before_a_known_name(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"prompt": "q", "system": "a", "persona": "b"}])
    assert turns(only(prompts(path, system_column="persona")))[0] == ("system", "b")


def test_system_prompt_stands_in_where_the_row_has_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, *HI]
    rows: list[Row] = [
        {"messages": HI, "system": "row"},
        {"messages": HI, "system": None},
        {"messages": HI, "system": "  "},
        {"messages": own, "system": "row"},
    ]
    found = prompts(parquet(tmp_path / "p.parquet", rows), system_prompt="run")
    firsts = [turns(prompt)[0][1] for prompt in found]
    assert firsts == ["row", "run", "run", "own"]
    assert all(turns(prompt)[1:] == [("user", "hi"), OPEN] for prompt in found)


def test_developer_turn_counts_as_a_system_turn(tmp_path: Path) -> None:
    chat = [{"role": "developer", "content": "d"}, *HI]
    path = json_lines(tmp_path / "p.jsonl", [{"messages": chat}])
    assert turns(only(prompts(path, system_prompt="run")))[0] == ("developer", "d")


# -- turns


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("u", "ua"),
        ("ua", "ua"),
        ("uau", "uaua"),
        ("uaua", "uaua"),
        ("suaua", "suaua"),
        ("aua", "ua"),
        ("saua", "sua"),
        ("aaua", "ua"),
        ("uaaua", "uaua"),
        ("uuaa", "uua"),
        ("uu", "uua"),
        ("uas", "ua"),
        ("uasu", "uasua"),
        ("usa", "usa"),
        ("us", "usa"),
    ],
)
def test_every_assistant_turn_that_answers_a_user_is_reopened(
    tmp_path: Path, roles: str, expected: str
) -> None:
    names = {"u": "user", "a": "assistant", "s": "system"}
    chat = [{"role": names[role], "content": f"old {n}"} for n, role in enumerate(roles)]
    prompt = only(prompts(json_lines(tmp_path / "p.jsonl", [{"messages": chat}])))
    assert [role for role, _ in turns(prompt)] == [names[role] for role in expected]
    assert {text for role, text in turns(prompt) if role == "assistant"} == {""}
    assert all(text.startswith("old") for role, text in turns(prompt) if role != "assistant")
    assert prompt.num_turns == expected.count("a")


def test_text_of_an_old_assistant_turn_is_never_looked_at(tmp_path: Path) -> None:
    rows = [{"messages": [*HI, {"role": "assistant", "content": c}]} for c in (None, 7, "", ["x"])]
    found = prompts(json_lines(tmp_path / "p.jsonl", rows))
    assert [turns(prompt) for prompt in found] == [[("user", "hi"), OPEN]] * 4


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_list_of_text_parts_is_joined(tmp_path: Path, suffix: str) -> None:
    parts = [{"type": "text", "text": "one "}, {"text": "two"}]
    write = parquet if suffix == ".parquet" else json_lines
    path = write(tmp_path / f"p{suffix}", [{"messages": [{"role": "user", "content": parts}]}])
    assert turns(only(prompts(path))) == [("user", "one two"), OPEN]


def test_list_of_plain_strings_is_joined(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": ["one ", "two"]}]
    path = parquet(tmp_path / "p.parquet", [{"messages": chat}])
    assert turns(only(prompts(path))) == [("user", "one two"), OPEN]


# -- bad rows


@pytest.mark.parametrize(
    ("messages", "kind", "text"),
    [
        (None, "not_a_list", "messages: found nothing; expected a list of turns"),
        ("hi", "not_a_list", "messages: found a str; expected a list of turns"),
        ({"role": "user"}, "not_a_list", "messages: found a dict; expected a list of turns"),
        (["hi"], "not_a_list", "messages[0]: found a str; expected a role and its text"),
        ([*HI, None], "not_a_list", "messages[1]: found a NoneType; expected a role and its text"),
        ([], "no_user_turn", "messages: no user turn among 0"),
        ([{"role": "system", "content": "s"}], "no_user_turn", "messages: no user turn among 1"),
        ([{"role": "assistant", "content": "a"}], "no_user_turn", "messages: no user turn among 1"),
        ([{"role": "tool", "content": "t"}], "no_user_turn", "messages: no user turn among 1"),
        ([{"role": "critic", "content": "t"}], "unknown_role", "messages[0]: role 'critic'; known"),
        ([{"role": 5, "content": "t"}], "unknown_role", "messages[0]: role 5; known are"),
        ([{"content": "t"}], "unknown_role", "messages[0]: role None; known are"),
        ([{"role": "user", "content": ""}], "empty_text", "messages[0]: the text is empty"),
        ([{"role": "user", "content": " \n"}], "empty_text", "messages[0]: the text is empty"),
        ([{"role": "user"}], "empty_text", "messages[0]: the text is empty"),
        ([*HI, {"role": "user", "content": []}], "empty_text", "messages[1]: the text is empty"),
        ([{"role": "user", "content": 5}], "not_text", "messages[0]: found a int; expected text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "not_text",
            "messages[0]: a part of type 'image_url', not text",
        ),
        (
            [{"role": "user", "content": [3]}],
            "not_text",
            "messages[0]: a part of type 'int', not text",
        ),
        (
            [{"role": "user", "content": "\ud800"}],
            "not_text",
            "messages[0]: has a lone surrogate",
        ),
    ],
)
def test_bad_row_is_a_prompt_with_its_problem(
    tmp_path: Path, messages: object, kind: str, text: str
) -> None:
    rows = [{"id": "bad", "messages": messages}, {"id": "good", "messages": HI}]
    bad, good = prompts(json_lines(tmp_path / "p.jsonl", rows), id_column="id")
    assert bad.problem is not None
    assert bad.problem.kind == kind
    assert bad.problem.text.startswith(text)
    assert (bad.row_id, bad.messages, bad.num_turns) == ("bad", (), 0)
    assert (good.problem, turns(good)) == (None, [("user", "hi"), OPEN])


@pytest.mark.parametrize(
    ("value", "kind"), [(None, "empty_text"), ("", "empty_text"), (5, "not_text"), ({}, "not_text")]
)
def test_bad_plain_prompt_has_its_problem(tmp_path: Path, value: object, kind: str) -> None:
    problem = only(prompts(json_lines(tmp_path / "p.jsonl", [{"prompt": value}]))).problem
    assert problem is not None
    assert problem.kind == kind
    assert problem.text.startswith("prompt: ")


def test_bad_system_text_is_the_rows_problem(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"prompt": "q", "system": "\udc00"}])
    problem = only(prompts(path)).problem
    assert problem is not None
    assert (problem.kind, problem.text) == ("not_text", "system: has a lone surrogate")


def test_column_may_hold_another_type_in_each_json_line(tmp_path: Path) -> None:
    values: list[object] = [HI, "text", 7, None, {"role": "user"}, [["nested"]], True]
    found = prompts(json_lines(tmp_path / "p.jsonl", [{"messages": value} for value in values]))
    kinds = [prompt.problem.kind if prompt.problem else None for prompt in found]
    assert kinds == [None, *["not_a_list"] * 6]


# -- files


@pytest.mark.parametrize("name", ["p.parquet", "p.pq"])
def test_parquet_file_is_read_in_order(tmp_path: Path, name: str) -> None:
    path = parquet(tmp_path / name, [{"prompt": f"q{n}"} for n in range(1100)])
    assert [turns(prompt)[0][1] for prompt in prompts(path)] == [f"q{n}" for n in range(1100)]


@pytest.mark.parametrize("name", ["p.jsonl", "p.ndjson", "p.json"])
def test_json_lines_file_is_read_in_order(tmp_path: Path, name: str) -> None:
    path = json_lines(tmp_path / name, [{"prompt": f"q{n}"} for n in range(1100)])
    assert [turns(prompt)[0][1] for prompt in prompts(path)] == [f"q{n}" for n in range(1100)]


def test_json_lines_may_have_empty_lines_a_bom_and_odd_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [b'{"prompt": "a"}\r', b"", b"   ", '{"prompt": "b\u2028\x85c"}'.encode(), b""]
    path.write_bytes(BOM + b"\n".join(lines) + b'\n{"prompt": "no line feed"}')
    texts = [turns(prompt)[0][1] for prompt in prompts(path)]
    assert texts == ["a", "b\u2028\x85c", "no line feed"]


def test_surrogate_pair_in_json_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00"}\n')
    assert turns(only(prompts(path)))[0] == ("user", "\U0001f600")


def test_folder_is_read_with_its_sub_folders_and_without_hidden_files(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "data"
    parquet(folder / "b.parquet", [{"prompt": "b"}])
    parquet(folder / "a" / "z.parquet", [{"prompt": "a"}])
    parquet(folder / ".old" / "x.parquet", [{"prompt": "hidden"}])
    parquet(folder / ".x.parquet", [{"prompt": "hidden"}])
    (folder / "README.md").write_text("no data")
    assert [turns(prompt)[0][1] for prompt in prompts(folder)] == ["a", "b"]


def test_folder_of_json_lines_is_read_file_by_file(tmp_path: Path) -> None:
    json_lines(tmp_path / "2.jsonl", [{"prompt": "c"}])
    json_lines(tmp_path / "1.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    (tmp_path / "0.jsonl").write_bytes(b"")
    assert [turns(prompt)[0][1] for prompt in prompts(tmp_path)] == ["a", "b", "c"]


def test_parquet_file_without_rows_is_passed_over(tmp_path: Path) -> None:
    empty = pa.table({"prompt": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "a.parquet")
    assert prompts(tmp_path / "a.parquet") == []
    parquet(tmp_path / "b.parquet", [{"prompt": "b"}])
    assert turns(only(prompts(tmp_path)))[0] == ("user", "b")


def test_row_group_without_rows_is_passed_over(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"]})
    with pq.ParquetWriter(tmp_path / "p.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    assert turns(only(prompts(tmp_path / "p.parquet")))[0] == ("user", "a")


def test_saved_data_set_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]).save_to_disk(tmp_path / "d")
    stream = opened(tmp_path / "d")
    assert stream.arrow_schema == pa.schema([pa.field("prompt", pa.string())])
    assert [turns(prompt)[0][1] for prompt in stream.prompts] == ["a", "b"]


def test_split_of_a_saved_data_set_is_chosen(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "d")
    assert turns(only(prompts(tmp_path / "d")))[0] == ("user", "train")
    assert turns(only(prompts(tmp_path / "d", split="test")))[0] == ("user", "test")
    assert refusal(tmp_path / "d", split="dev") == (
        f"prompts.split: {tmp_path / 'd'} has no split 'dev'; it has train, test"
    )


def test_broken_saved_data_set_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "d")
    (tmp_path / "d" / "dataset_info.json").unlink()
    assert refusal(tmp_path / "d").startswith(f"prompts.path: cannot read {tmp_path / 'd'}: ")


def test_parquet_files_whose_types_clash_are_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", [{"prompt": "a", "x": 1}])
    parquet(tmp_path / "b.parquet", [{"prompt": "b", "x": ["list"]}])
    said = refusal(tmp_path, keep_columns=["x"])
    assert said.startswith(f"prompts.path: the columns of {tmp_path / 'b.parquet'} are not those")


def test_file_that_breaks_off_is_refused_when_its_break_is_reached(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "a.parquet", [{"prompt": "a" * 999 + str(n)} for n in range(99)])
    data = bytearray(whole.read_bytes())
    data[10:60] = bytes(50)
    whole.write_bytes(data)
    assert refusal(whole).startswith(f"prompts.path: cannot read {whole}: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": ', "not JSON: Expecting value at column 11; expected one JSON object"),
        (b'["a"]', "found a list; expected one JSON object per row"),
        (b"7", "found a int; expected one JSON object per row"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12; expected one JSON object per row"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "has a number with too many digits"),
        (b'{"prompt": ' + b"[" * 200_000, "nested too deep"),
    ],
)
def test_broken_json_line_is_one_bad_row_with_its_number(
    tmp_path: Path, line: bytes, said: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b'\n{"prompt": "b"}\n')
    first, bad, last = prompts(path)
    assert [turns(first)[0][1], turns(last)[0][1]] == ["a", "b"]
    assert bad.problem is not None
    assert bad.problem.kind == "unreadable"
    assert bad.problem.text.startswith(f"{path} line 3: {said}")


def test_broken_line_far_down_is_one_bad_row(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"prompt": "a"}] * 2000)
    path.write_text(path.read_text() + "{\n")
    problems = [prompt.problem for prompt in prompts(path)]
    assert problems[:2000] == [None] * 2000
    assert problems[2000] is not None


@pytest.mark.parametrize("data", [b"", b"\n\n", BOM])
def test_json_lines_without_rows_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(data)
    assert refusal(path) == f"prompts.path: {path} has no rows"


# -- ids


def test_id_column_names_the_rows(tmp_path: Path) -> None:
    rows = [{"id": n, "prompt": "same"} for n in (3, 0, 12)]
    assert ids(parquet(tmp_path / "p.parquet", rows), id_column="id") == ["3", "0", "12"]
    assert ids(json_lines(tmp_path / "p.jsonl", rows), id_column="id") == ["3", "0", "12"]


@pytest.mark.parametrize(("first", "second"), [("b", "b"), (7, 7), (7, "7")])
def test_first_repeated_id_is_named_with_its_row(
    tmp_path: Path, first: object, second: object
) -> None:
    rows = [{"id": value, "prompt": "q"} for value in ("a", first, "c", second, "a")]
    path = json_lines(tmp_path / "p.jsonl", rows)
    assert refusal(path, id_column="id") == (
        f"prompts.id_column: the id {str(first)!r} is in more than one row of {path} "
        f"(again in row 4); ids must be unique"
    )


@pytest.mark.parametrize("missing", [{"id": None}, {"id": ""}, {}])
def test_row_without_an_id_is_named(tmp_path: Path, missing: Row) -> None:
    path = json_lines(
        tmp_path / "p.jsonl", [{"id": "a", "prompt": "q"}, {"prompt": "q", **missing}]
    )
    assert refusal(path, id_column="id") == (f"prompts.id_column: row 2 of {path} has no 'id'")


def test_id_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    rows = [{"id": value, "prompt": "q"} for value in ("a", "\ud800")]
    path = json_lines(tmp_path / "p.jsonl", rows)
    assert refusal(path, id_column="id") == (
        f"prompts.id_column: the id '\\ud800' in row 2 of {path} has a lone surrogate"
    )


def test_same_id_with_another_text_has_another_content_hash(tmp_path: Path) -> None:
    [one] = prompts(json_lines(tmp_path / "a.jsonl", [{"id": 1, "prompt": "a"}]), id_column="id")
    [two] = prompts(json_lines(tmp_path / "b.jsonl", [{"id": 1, "prompt": "b"}]), id_column="id")
    assert one.row_id == two.row_id
    assert one.content_hash != two.content_hash
    assert len(one.content_hash) == 16


def test_exact_repeats_are_numbered(tmp_path: Path) -> None:
    found = ids(json_lines(tmp_path / "p.jsonl", [{"prompt": text} for text in "abaa"]))
    stems = [row_id.rpartition("-")[0] for row_id in found]
    assert [row_id.rpartition("-")[2] for row_id in found] == ["0", "0", "1", "2"]
    assert stems[0] == stems[2] == stems[3] != stems[1]
    assert len(stems[0]) == 32


def test_old_answers_do_not_count_for_the_id(tmp_path: Path) -> None:
    rows = [{"messages": [*HI, {"role": "assistant", "content": text}]} for text in "xy"]
    first, second = ids(json_lines(tmp_path / "p.jsonl", rows))
    assert (first[:-1], second[-1]) == (second[:-1], "1")


def test_kept_columns_count_for_the_id_and_others_do_not(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "label": "x", "n": 1}, {"prompt": "q", "label": "y", "n": 2}]
    path = json_lines(tmp_path / "p.jsonl", rows)
    assert len({row_id.rpartition("-")[0] for row_id in ids(path)}) == 1
    kept = ids(path, keep_columns=["label"])
    assert len({row_id.rpartition("-")[0] for row_id in kept}) == 2
    backwards = json_lines(tmp_path / "q.jsonl", rows[::-1])
    assert ids(backwards, keep_columns=["label"]) == kept[::-1]


def test_order_of_keys_and_of_kept_columns_does_not_count_for_the_id(tmp_path: Path) -> None:
    one = json_lines(tmp_path / "p.jsonl", [{"prompt": "q", "a": {"x": 1, "y": 2}, "b": 3}])
    two = json_lines(tmp_path / "q.jsonl", [{"b": 3, "a": {"y": 2, "x": 1}, "prompt": "q"}])
    assert ids(one, keep_columns=["a", "b"]) == ids(two, keep_columns=["b", "a"])


def test_system_prompt_counts_for_the_id(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"prompt": "q"}])
    assert ids(path) != ids(path, system_prompt="be brief")


def test_bad_rows_have_ids_of_their_own(tmp_path: Path) -> None:
    values = [None, 7, "x", [], ["x"], 7]
    found = ids(json_lines(tmp_path / "p.jsonl", [{"messages": value} for value in values]))
    assert len(set(found)) == 6
    assert found[5] == found[1][:-1] + "1"


def test_parquet_and_json_lines_name_a_row_alike(tmp_path: Path) -> None:
    rows = [{"messages": HI, "n": 1, "tags": ["a"]}, {"messages": HI, "n": 2, "tags": []}]
    kept = ["n", "tags"]
    assert ids(parquet(tmp_path / "p.parquet", rows), keep_columns=kept) == ids(
        json_lines(tmp_path / "p.jsonl", rows), keep_columns=kept
    )


def test_ids_are_those_that_earlier_runs_published(tmp_path: Path) -> None:
    # printf '[[["user","hi"],["assistant",""]],{},null]' | sha256sum | cut -c1-32
    # printf '[["user","hi"],["assistant",""]]' | sha256sum | cut -c1-16
    prompt = only(prompts(json_lines(tmp_path / "p.jsonl", [{"prompt": "hi"}])))
    assert prompt.row_id == "2e69966d924961b4bd43e79091a3eef3-0"
    assert prompt.content_hash == "92ec9a8a1c381d3c"


texts = st.sampled_from(["a", "b", "c d", "ä", "\U0001f600", "", None])


@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), contents=st.lists(texts, min_size=1, max_size=8), is_named=st.booleans())
def test_shuffled_input_has_the_same_ids(
    tmp_path: Path, data: st.DataObject, contents: list[str | None], is_named: bool
) -> None:
    rows = [{"id": n, "prompt": text, "label": n % 2} for n, text in enumerate(contents)]
    shuffled = data.draw(st.permutations(rows))
    section: Row = {"id_column": "id" if is_named else None, "keep_columns": ["label"]}
    before = prompts(json_lines(tmp_path / "a.jsonl", rows), **section)
    after = prompts(json_lines(tmp_path / "b.jsonl", shuffled), **section)
    assert len({prompt.row_id for prompt in before}) == len(rows)
    by_id = {prompt.row_id: prompt for prompt in after}
    assert {prompt.row_id for prompt in before} == by_id.keys()
    assert all(by_id[p.row_id].content_hash == p.content_hash for p in before)
    assert Counter(p.row_id for p in after).most_common(1)[0][1] == 1


# -- limit, what is carried, fingerprint


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_limit_takes_the_first_rows_under_their_full_names(tmp_path: Path, suffix: str) -> None:
    write = parquet if suffix == ".parquet" else json_lines
    path = write(tmp_path / f"p{suffix}", [{"prompt": text} for text in "aabc"])
    assert ids(path, limit=3) == ids(path)[:3]
    assert ids(path, limit=99) == ids(path)


def test_row_behind_the_limit_is_not_read(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"id": 1, "prompt": "a"}] * 2)
    assert ids(path, id_column="id", limit=1) == ["1"]


def test_kept_columns_are_carried_and_no_others(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "a": {"x": [1]}, "b": "t", "c": 1}, {"prompt": "r", "b": None}]
    found = prompts(json_lines(tmp_path / "p.jsonl", rows), keep_columns=["b", "a"])
    assert [prompt.carried for prompt in found] == [
        {"b": "t", "a": {"x": [1]}},
        {"b": None, "a": None},
    ]


def test_source_types_are_told_where_the_file_has_them(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["q"], "n": pa.array([1], pa.int8())})
    pq.write_table(table, tmp_path / "p.parquet")
    schema = opened(tmp_path / "p.parquet").arrow_schema
    assert isinstance(schema, pa.Schema)
    assert schema.field("n").type == pa.int8()
    assert opened(json_lines(tmp_path / "p.jsonl", [{"prompt": "q"}])).arrow_schema is None


def test_fingerprint_changes_with_the_file_and_the_section(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "p.jsonl", [{"prompt": "a"}])
    config = PromptsConfig(path=str(path))
    first = input_fingerprint(config)
    assert first == input_fingerprint(config)
    assert first != input_fingerprint(config.model_copy(update={"limit": 1}))
    json_lines(path, [{"prompt": "a"}, {"prompt": "b"}])
    assert first != input_fingerprint(config)


def test_hub_name_has_no_fingerprint() -> None:
    assert input_fingerprint(PromptsConfig(path="someone/some-data-set")) is None


@pytest.mark.parametrize("name", ["none.parquet", "none.jsonl", "none"])
def test_path_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path / name) == f"prompts.path: no file or folder {tmp_path / name}"


@pytest.mark.parametrize("name", ["p.docx", "p", "p.parquet.gz", "p.zst"])
def test_file_of_an_unknown_kind_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a,b\n")
    said = refusal(tmp_path / name)
    assert said.startswith(f"prompts.path: {tmp_path / name} ends in ")
    assert "expected .parquet, .pq, .jsonl, .ndjson, .json, .csv, .tsv, .arrow, or " in said


def test_named_column_that_first_comes_late_in_json_lines_is_found(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number}?"} for number in range(600)]
    rows.append({"prompt": "the last?", "label": "late"})
    path = tmp_path / "late.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    stream = read_prompts(PromptsConfig(path=str(path), keep_columns=["label"]))
    assert [prompt.carried["label"] for prompt in stream.prompts][-2:] == [None, "late"]


def test_memory_stays_flat_over_one_large_row_group(tmp_path: Path) -> None:
    # 64 MB of prompts in one row group; Arrow's own count of what it holds is a few batches.
    table = pa.table({"prompt": [f"{number:08d}" * 256 for number in range(32_000)]})
    path = tmp_path / "large.parquet"
    pq.write_table(table, path, row_group_size=32_000, use_dictionary=False)
    del table
    pool = pa.default_memory_pool()
    before, peak = pool.bytes_allocated(), 0
    for _ in read_prompts(PromptsConfig(path=str(path))).prompts:
        peak = max(peak, pool.bytes_allocated() - before)
    assert peak < 16 * 2**20
