"""Files of an export are those that SpecForge's and speculators' loaders open.

`make test-trainers` drives the loaders themselves; here the files are read the way they do.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.export import main
from pipeline.export.chats import ChatForm
from pipeline.export.files import data_files
from pipeline.store.folder import LocalFolder
from schemas.completion import Completion
from schemas.export import ExportFormat, ExportOptions
from schemas.prompt import FunctionCall, ToolCall
from tests.fakes.published_run import conversation_row, published_run
from tests.fakes.tool_rows import CALL, TOOLS, with_tools

ROWS = [
    conversation_row("one", ("answer 1", "hm"), system="be brief"),
    conversation_row("two", ("answer 1", "hm"), ("answer 2\u2028more", "so")),
    conversation_row("none", ("no thinking", None)),
]


def exported(folder: LocalFolder, dest: Path, *options: str) -> Path:
    assert main([str(folder.root), "--to", str(dest), *options]) == 0
    return dest


def lines(file: Path) -> list[dict[str, Any]]:
    """Read JSON lines as SpecForge does: text, line by line."""
    with file.open(encoding="utf-8") as stream:
        return [json.loads(line) for line in stream if line.strip()]


def as_both_load(file: Path, cache: Path) -> "datasets.Dataset":
    return datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))


# -- SpecForge and speculators


@pytest.mark.parametrize("format_", ["specforge", "speculators"])
def test_trainers_get_conversations_and_no_column_beside(tmp_path: Path, format_: str) -> None:
    folder = published_run(tmp_path, ROWS, carried=())
    dest = exported(folder, tmp_path / "d", "--format", format_)
    found = lines(dest / "data" / "train-00000.jsonl")
    status = {"status": "success"} if format_ == "specforge" else {}
    assert found[0] == {
        "id": "one",
        **status,
        "conversations": [
            {"role": "system", "content": "be brief", "reasoning_content": ""},
            {"role": "user", "content": "question 1", "reasoning_content": ""},
            {"role": "assistant", "content": "answer 1", "reasoning_content": "hm"},
        ],
    }
    assert [row["id"] for row in found] == ["one", "two", "none"]
    assert found[1]["conversations"][3]["content"] == "answer 2\u2028more"
    loaded = as_both_load(dest / "data" / "train-00000.jsonl", tmp_path / "cache")
    assert loaded.to_list() == found


def test_carried_columns_stay_out_of_trainers_files(tmp_path: Path) -> None:
    # SpecForge would hand `level` to the chat template as a variable.
    rows = [replace(ROWS[0], carried={"level": 3})]
    folder = published_run(tmp_path, rows, carried=["level"])
    dest = exported(folder, tmp_path / "d", "--format", "specforge")
    (row,) = lines(dest / "data" / "train-00000.jsonl")
    assert sorted(row) == ["conversations", "id", "status"]


def test_samples_of_a_row_have_ids_of_their_own(tmp_path: Path) -> None:
    rows = [
        conversation_row(row_id, (f"answer {sample}", None), sample=sample)
        for row_id in ("a", "a#1")
        for sample in (0, 1)
    ]
    dest = exported(published_run(tmp_path, rows), tmp_path / "d", "--format", "specforge")
    found = lines(dest / "data" / "train-00000.jsonl")
    assert [row["id"] for row in found] == ["a#0", "a#1", "a#1#0", "a#1#1"]


@pytest.mark.parametrize(
    ("reasoning", "turn"),
    [
        ("drop", {"role": "assistant", "content": "answer 1"}),
        ("inline", {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer 1"}),
    ],
)
def test_reasoning_of_a_trainers_file_can_be_elsewhere(
    tmp_path: Path, reasoning: str, turn: dict[str, str]
) -> None:
    options = ("--format", "speculators", "--reasoning", reasoning)
    dest = exported(published_run(tmp_path, ROWS), tmp_path / "d", *options)
    assert lines(dest / "data" / "train-00000.jsonl")[0]["conversations"][2] == turn


def test_gpt_oss_gets_channels_and_no_status(tmp_path: Path) -> None:
    # SpecForge's parser for gpt-oss takes no other roles, and no further column.
    folder = published_run(tmp_path, ROWS, model="openai/gpt-oss-20b")
    dest = exported(folder, tmp_path / "d", "--format", "specforge")
    found = lines(dest / "data" / "train-00000.jsonl")
    assert [sorted(row) for row in found] == [["conversations", "id"]] * 3
    roles = [[turn["role"] for turn in row["conversations"]] for row in found]
    assert roles == [
        ["system", "user", "assistant_analysis", "assistant_final"],
        [
            "assistant_reasoning_effort",
            *("user", "assistant_analysis", "assistant_final"),
            *("user", "assistant_analysis", "assistant_final"),
        ],
        ["assistant_reasoning_effort", "user", "assistant_final"],
    ]
    assert found[1]["conversations"][0]["content"] == "medium"
    assert set(found[0]["conversations"][0]) == {"role", "content"}


def test_reasoning_inside_the_text_does_not_go_with_gpt_oss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published_run(tmp_path, ROWS, model="openai/gpt-oss-20b")
    options = ["--format", "specforge", "--reasoning", "inline"]
    assert main([str(folder.root), "--to", str(tmp_path / "d"), *options]) == 2
    assert "expected apart or drop" in capsys.readouterr().err


# -- tools


def shaped(format_: ExportFormat, batch: pa.Table) -> dict[str, list[Any]]:
    form = ChatForm(format=format_, reasoning="apart", has_tools=True)
    columns, left_out = form.columns(batch)
    assert not left_out
    return {name: values.to_pylist() for name, values in columns}


@pytest.mark.parametrize("as_text", [False, True])
def test_specforge_gets_calls_and_tools_as_text_without_nulls(as_text: bool) -> None:
    calls, tools = ([CALL], TOOLS) if not as_text else (json.dumps([CALL]), json.dumps(TOOLS))
    found = shaped("specforge", with_tools(calls=calls, tools=tools))
    called, result = found["conversations"][0][1:3]
    assert json.loads(called["tool_calls"]) == [CALL]
    assert (result["role"], result["tool_call_id"], result["tool_calls"]) == ("tool", "c1", "")
    assert json.loads(found["tools"][0])[0]["function"]["name"] == "add"
    assert found["tools"][1] == "[]"
    assert None not in found["conversations"][1][0].values()


def test_speculators_gets_calls_as_a_list_and_tools_as_text() -> None:
    found = shaped("speculators", with_tools(calls=json.dumps([CALL]), tools=json.dumps(TOOLS)))
    assert [turn["tool_calls"] for turn in found["conversations"][0]] == [[], [CALL], [], []]
    assert json.loads(found["tools"][0]) == TOOLS
    assert found["tools"][1] == ""


def test_calls_of_a_last_turn_come_from_their_own_column() -> None:
    batch = with_tools(calls=None, tools=json.dumps(TOOLS))
    batch = batch.append_column("tool_calls", pa.array([json.dumps([CALL]), None]))
    found = shaped("speculators", batch)
    assert found["conversations"][0][-1]["tool_calls"] == [CALL]
    assert found["conversations"][1][-1]["tool_calls"] == []


def test_arguments_of_a_call_become_text() -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    found = shaped("speculators", with_tools(calls=[call], tools=None))
    assert found["conversations"][0][1]["tool_calls"] == [CALL]


def test_rows_with_tool_turns_are_left_out_for_gpt_oss() -> None:
    form = ChatForm(format="specforge", reasoning="apart", has_tools=True, harmony_effort="low")
    columns, left_out = form.columns(with_tools(calls=[CALL], tools=None))
    assert left_out == {0: "no_form_of_tool_turns_for_gpt_oss"}
    assert [name for name, _ in columns] == ["id", "conversations"]


def test_carried_tools_reach_the_trainer(tmp_path: Path) -> None:
    rows = [replace(ROWS[0], carried={"tools": json.dumps(TOOLS)}), ROWS[2]]
    folder = published_run(tmp_path, rows, carried=["tools"])
    dest = exported(folder, tmp_path / "d", "--format", "specforge")
    found = lines(dest / "data" / "train-00000.jsonl")
    assert [json.loads(row["tools"]) for row in found] == [TOOLS, []]


def test_system_turns_are_joined_for_specforge_and_developers_are_systems() -> None:
    batch = pa.table(
        {
            "row_id": ["a"],
            "sample_index": pa.array([0], pa.int32()),
            "messages": [
                [
                    {"role": role, "content": role, "reasoning_content": None}
                    for role in ("system", "developer", "user", "assistant", "developer")
                ]
            ],
        }
    )
    roles = {}
    formats: list[ExportFormat] = ["specforge", "speculators"]
    for format_ in formats:
        form = ChatForm(format=format_, reasoning="drop")
        turns = dict(form.columns(batch)[0])["conversations"].to_pylist()[0]
        roles[format_] = [(turn["role"], turn["content"]) for turn in turns]
    rest = [("user", "user"), ("assistant", "assistant"), ("system", "developer")]
    assert roles["specforge"] == [("system", "system\n\ndeveloper"), *rest]
    assert roles["speculators"] == [("system", "system"), ("system", "developer"), *rest]


def test_late_thinking_loads_after_ten_megabytes_without_any(tmp_path: Path) -> None:
    # `load_dataset("json")` takes the types from the first 10 MB: a null there is no text later.
    long = "x" * 2**18
    rows = [conversation_row(f"r{n:02d}", (long, None)) for n in range(48)]
    rows.append(conversation_row("z", ("short", "hm")))
    folder = published_run(tmp_path, rows)
    for format_ in ("specforge", "speculators"):
        dest = exported(folder, tmp_path / format_, "--format", format_)
        loaded = as_both_load(dest / "data" / "train-00000.jsonl", tmp_path / "cache")
        assert loaded[-1]["conversations"][1]["reasoning_content"] == "hm"


def test_late_call_loads_after_ten_megabytes_without_any(tmp_path: Path) -> None:
    long = "x" * 2**18
    plain = [conversation_row(f"r{n:02d}", (long, None)) for n in range(48)]
    calls = (ToolCall(id="c1", function=FunctionCall(name="add", arguments='{"a": 1}')),)
    called = [_with_call(conversation_row(name, ("", None)), calls) for name in ("y", "z")]
    folder = published_run(tmp_path, [*plain, *called])
    for format_ in ("specforge", "speculators"):
        options = ("--format", format_, "--file-type", "jsonl")
        dest = exported(folder, tmp_path / format_, *options)
        loaded = as_both_load(dest / "data" / "train-00000.jsonl", tmp_path / "cache")
        assert sorted(loaded["id"]) == [*(f"r{n:02d}" for n in range(48)), "y", "z"]
        (last,) = [row["conversations"][-1]["tool_calls"] for row in loaded if row["id"] == "z"]
        assert (json.loads(last) if format_ == "specforge" else last) == [CALL]
    # One row has moved, to the front; the others keep their order.
    assert loaded["id"][:2] == ["y", "r00"]


def _with_call(row: Completion, calls: tuple[ToolCall, ...]) -> Completion:
    return replace(row, tool_calls=calls, finish_reason="tool_calls", tools=json.dumps(TOOLS))


# -- file types


@pytest.mark.parametrize(
    "format_", ["messages", "conversations", "tokens", "rows", "specforge", "speculators"]
)
@pytest.mark.parametrize(
    ("file_type", "compress", "suffix"),
    [
        ("parquet", "zstd", "parquet"),
        ("parquet", "gzip", "parquet"),
        ("jsonl", "none", "jsonl"),
        ("jsonl", "zstd", "jsonl.zst"),
        ("jsonl", "gzip", "jsonl.gz"),
    ],
)
def test_every_format_goes_into_every_type_of_file(
    tmp_path: Path, format_: str, file_type: str, compress: str, suffix: str
) -> None:
    folder = published_run(tmp_path, ROWS)
    options = ("--format", format_, "--file-type", file_type, "--compress", compress)
    dest = exported(folder, tmp_path / "d", *options)
    (file,) = (dest / "data").iterdir()
    assert file.name == f"train-00000.{suffix}"
    usual = exported(folder, tmp_path / "usual", "--format", format_, "--file-type", "parquet")
    expected = pq.read_table(usual / "data").to_pylist()
    if file_type == "parquet":
        column = pq.ParquetFile(file).metadata.row_group(0).column(0)
        assert column.compression == compress.upper()
        assert pq.read_table(file).to_pylist() == expected
        return
    # One frame, which every reader of the compression reads to its end.
    with pa.input_stream(str(file), compression=None if compress == "none" else compress) as data:
        found = [json.loads(line) for line in data.read().splitlines()]
    assert json.loads(json.dumps(expected, default=_iso)) == found
    assert f"path: data/train-*.{suffix}" in (dest / "README.md").read_text()


def _iso(value: object) -> str:
    assert isinstance(value, datetime)
    return value.isoformat()


def test_gzip_and_folder_of_lines_load_with_the_card(tmp_path: Path) -> None:
    folder = published_run(tmp_path, ROWS)
    dest = exported(folder, tmp_path / "d", "--file-type", "jsonl", "--compress", "gzip")
    (file,) = (dest / "data").iterdir()
    with gzip.open(file) as data:
        assert len(data.read().splitlines()) == 3
    found = datasets.load_dataset(str(dest), cache_dir=str(tmp_path / "cache"))
    assert found["train"].num_rows == 3


def test_token_lines_are_what_both_trainers_take_as_tokenised(tmp_path: Path) -> None:
    folder = published_run(tmp_path, ROWS)
    options = ("--format", "tokens", "--file-type", "jsonl")
    dest = exported(folder, tmp_path / "d", *options)
    found = lines(dest / "data" / "train-00000.jsonl")
    # One line per turn, with plain integers.
    assert [(row["row_id"], row["turn_index"]) for row in found] == [
        ("one", 0), ("two", 0), ("two", 1), ("none", 0),
    ]  # fmt: skip
    assert found[2]["input_ids"] == [*range(20), 101, 102, 103, 104, 105]
    assert found[2]["loss_mask"] == [0] * 20 + [1] * 5
    assert all(type(number) is int for row in found for number in row["input_ids"])


def test_values_that_json_lacks_become_text_or_null(tmp_path: Path) -> None:
    table = pa.table(
        {
            "share": [0.5, float("nan"), float("inf")],
            "at": pa.array([datetime(2026, 1, 2, tzinfo=UTC)] * 3),
            "raw": [b"\x00\xff", None, b""],
            "deep": [{"x": [float("-inf"), 1.0]}, None, {"x": []}],
        }
    )
    files = data_files(ExportOptions(file_type="jsonl", compression="none"))
    with (tmp_path / "f.jsonl").open("wb") as stream, files.writer(stream, table.schema) as writer:
        writer.write_table(table)
    assert lines(tmp_path / "f.jsonl") == [
        {
            "share": 0.5, "at": "2026-01-02T00:00:00+00:00", "raw": "AP8=",
            "deep": {"x": [None, 1.0]},
        },
        {"share": None, "at": "2026-01-02T00:00:00+00:00", "raw": None, "deep": None},
        {"share": None, "at": "2026-01-02T00:00:00+00:00", "raw": "", "deep": {"x": []}},
    ]  # fmt: skip


def test_lines_go_into_one_file_unless_a_size_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SpecForge opens one path.
    monkeypatch.setattr("pipeline.export.buckets._BUCKET_BYTES", 500)
    monkeypatch.setattr("jobs.export.MIB", 300)
    rows = [conversation_row(f"r{n}", ("a" * 50, None)) for n in range(20)]
    folder = published_run(tmp_path, rows)
    one = exported(folder, tmp_path / "one", "--format", "specforge")
    assert [file.name for file in (one / "data").iterdir()] == ["train-00000.jsonl"]
    more = exported(folder, tmp_path / "more", "--format", "specforge", "--file-mib", "1")
    files = sorted((more / "data").iterdir())
    assert len(files) > 2
    assert [row["id"] for file in files for row in lines(file)] == [row.row_id for row in rows]


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        (("--format", "specforge"), False),
        (("--format", "specforge", "--compress", "zstd"), True),
        (("--format", "speculators", "--file-type", "parquet"), True),
        (("--format", "messages", "--compress", "gzip"), False),
    ],
)
def test_files_that_a_trainer_does_not_open_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Sequence[str], warns: bool
) -> None:
    exported(published_run(tmp_path, ROWS), tmp_path / "d", *options)
    assert ("opens JSON lines without compression" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "specforges"], "--format: invalid choice: 'specforges'"),
        (["--file-type", "csv"], "--file-type: invalid choice: 'csv'"),
        (["--file-type", "jsonl", "--compress", "xz"], "--compress: invalid choice: 'xz'"),
        (["--cut"], "--cut: give --max-tokens too"),
        (["--max-tokens", "0"], "--max-tokens: found 0; expected 1 or more"),
        (["--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
    ],
)
def test_unknown_choice_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main([str(tmp_path), "--to", str(tmp_path / "d"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


# -- lengths and repetitions


def dropped(dest: Path) -> list[dict[str, Any]]:
    return lines(dest / "dropped.jsonl")


def rows_of_lengths() -> list[Completion]:
    """Turn n of a row ends at 10 · n + 5 tokens: 15, 25, 35."""
    three = conversation_row("three", ("a", "x"), ("b", None), ("c", "y"))
    unknown = conversation_row("unknown", ("d", None))
    return [
        three,
        conversation_row("one", ("e", None)),
        replace(unknown, turns=(replace(unknown.turns[0], prompt_tokens=None),)),
    ]


def test_longer_rows_are_left_out(tmp_path: Path) -> None:
    folder = published_run(tmp_path, rows_of_lengths())
    dest = exported(folder, tmp_path / "d", "--format", "specforge", "--max-tokens", "34")
    assert [row["id"] for row in lines(dest / "data" / "train-00000.jsonl")] == ["one"]
    assert {row["row_id"]: row["reason"] for row in dropped(dest)} == {
        "three": "more_than_max_tokens",
        "unknown": "tokens_not_counted",
    }
    fits = exported(folder, tmp_path / "fits", "--max-tokens", "35")
    assert json.loads((fits / "export.json").read_text())["rows_exported"] == 2


@pytest.mark.parametrize(
    ("limit", "kept"), [(14, []), (15, ["a"]), (24, ["a"]), (25, ["a", "b"]), (35, ["a", "b", "c"])]
)
def test_longer_rows_are_cut_at_a_turns_end(tmp_path: Path, limit: int, kept: list[str]) -> None:
    folder = published_run(tmp_path, [rows_of_lengths()[0], conversation_row("s", ("", None))])
    dest = tmp_path / "d"
    options = ("--format", "specforge", "--max-tokens", f"{limit}", "--cut")
    if not kept:
        assert main([str(folder.root), "--to", str(dest), *options]) == 2
        return
    exported(folder, dest, *options)
    row = lines(dest / "data" / "train-00000.jsonl")[0]
    assert [turn["content"] for turn in row["conversations"][1::2]] == kept
    assert row["conversations"][-1]["role"] == "assistant"
    if len(kept) == 3:
        assert dropped(dest) == []
        return
    assert dropped(dest) == [
        {
            "row_id": "three",
            "sample_index": 0,
            "reason": "cut_to_max_tokens",
            "turns_kept": len(kept),
        }
    ]
    record = json.loads((dest / "export.json").read_text())
    assert (record["rows_exported"], record["rows_cut"], record["dropped"]) == (2, 1, {})
    assert "1 rows end at an earlier turn" in (dest / "README.md").read_text()


@pytest.mark.parametrize("format_", ["messages", "conversations", "rows", "tokens"])
def test_every_format_is_cut_at_the_same_turn(tmp_path: Path, format_: str) -> None:
    rows = rows_of_lengths()[:2]
    folder = published_run(tmp_path, rows, part_rows=1)
    options = ("--format", format_, "--max-tokens", "30", "--cut", "--file-type", "jsonl")
    found = lines(exported(folder, tmp_path / "d", *options) / "data" / "train-00000.jsonl")
    turns: dict[str, int] = {}
    for row in found:
        texts = row.get("messages", row.get("conversations", [None, None]))
        turns[row["row_id"]] = turns.get(row["row_id"], 0) + len(texts) // 2
        if format_ == "rows":
            assert len(row["turns"]) == len(texts) // 2
        else:
            assert "turns" not in row
    assert turns == {"three": 2, "one": 1}


def test_cut_row_ends_as_its_last_turn_did(tmp_path: Path) -> None:
    row = rows_of_lengths()[0]
    stopped, cut, last = row.turns
    row = replace(
        row, turns=(stopped, replace(cut, finish_reason="length"), last), finish_reason="stop"
    )
    folder = published_run(tmp_path, [row])
    options = ("--format", "rows", "--max-tokens", "30", "--cut", "--file-type", "jsonl")
    (found,) = lines(exported(folder, tmp_path / "d", *options) / "data" / "train-00000.jsonl")
    assert found["finish_reason"] == "length"
    assert len(found["messages"]) == 4


def test_row_whose_turns_are_not_its_messages_is_not_cut_anywhere(tmp_path: Path) -> None:
    row = rows_of_lengths()[0]
    other = replace(row.turns[0], answer_text="another text")
    rows = [replace(row, turns=(other, *row.turns[1:])), conversation_row("one", ("e", None))]
    dest = exported(published_run(tmp_path, rows), tmp_path / "d", "--max-tokens", "30", "--cut")
    assert [one["reason"] for one in dropped(dest)] == ["turns_are_not_the_messages"]


def test_rows_with_the_answers_of_an_earlier_one_are_left_out(tmp_path: Path) -> None:
    rows = [
        conversation_row("a", ("yes", "one way")),
        conversation_row("b", ("yes\n", "another way")),
        conversation_row("c", ("yes", None), ("no", None)),
        conversation_row("d", ("yesno", None)),
        conversation_row("e", ("yes", None), ("no", None)),
        conversation_row("f", ("maybe", None)),
    ]
    # Parts have the last rows first; the first of the input is kept all the same.
    folder = published_run(tmp_path, rows, part_rows=2)
    dest = exported(folder, tmp_path / "d", "--format", "specforge", "--dedup", "--shuffle", "3")
    found = {row["id"] for row in lines(dest / "data" / "train-00000.jsonl")}
    assert found == {"a", "c", "d", "f"}
    assert {row["row_id"]: row["reason"] for row in dropped(dest)} == {
        "b": "repeated_answer",
        "e": "repeated_answer",
    }


def test_dropped_row_does_not_stand_for_its_repetition(tmp_path: Path) -> None:
    rows = [
        replace(conversation_row("a", ("yes", None)), flags=("looping",)),
        conversation_row("b", ("yes", None)),
    ]
    dest = exported(
        published_run(tmp_path, rows), tmp_path / "d", "--dedup", "--file-type", "jsonl"
    )
    assert [row["row_id"] for row in lines(dest / "data" / "train-00000.jsonl")] == ["b"]


def test_exports_of_the_page_are_commands_of_this_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
    begins = "python -m jobs.export "
    found = [line for line in page.read_text().splitlines() if line.startswith(begins)]
    assert len(found) == 3
    folder = published_run(tmp_path, ROWS)
    monkeypatch.chdir(tmp_path)
    for number, line in enumerate(found):
        arguments = line.removeprefix(begins).split()
        arguments[0], arguments[2] = str(folder.root), f"d{number}"
        assert main(arguments) == 0
        assert (tmp_path / f"d{number}" / "data" / "train-00000.jsonl").exists()
