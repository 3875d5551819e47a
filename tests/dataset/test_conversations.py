"""Conversations, templates and settings of single rows, as users' columns have them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from pipeline.dataset.frozen import freeze, frozen_prompts
from pipeline.dataset.prompts import PromptStream, read_prompts
from pipeline.errors import ConfigError
from pipeline.run_file import with_row_budgets
from pipeline.store.folder import LocalFolder
from schemas.config.reader import run_file_of
from schemas.config.requests import PromptsConfig
from schemas.config.run_file import RunFile
from schemas.prompt import Prompt, PromptBounds, RowBudgets, RowSettings

OPEN = ("assistant", "")
Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def opened(path: Path, rows: list[dict[str, Any]], **section: Any) -> PromptStream:  # noqa: ANN401
    file = path / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(PromptsConfig(path=str(file), **section))


def read(path: Path, row: dict[str, Any], **section: Any) -> Prompt:  # noqa: ANN401
    [prompt] = opened(path, [row], **section).prompts
    return prompt


def turns(prompt: Prompt) -> list[tuple[str, str]]:
    assert prompt.problem is None, prompt.problem
    return [(message.role, message.content) for message in prompt.messages]


def problem(prompt: Prompt) -> str:
    assert prompt.problem is not None
    return f"{prompt.problem.kind}: {prompt.problem.text}"


# -- shapes


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps([Q, A])},
        {"messages": " " + json.dumps([Q, A], indent=1)},
        {"messages": str([Q, A])},
        {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}},
        {"conversations": {"from": ["human", "gpt"], "value": ["q", "a"], "weight": None}},
        {"conversations": json.dumps({"from": ["human", "gpt"], "value": ["q", "a"]})},
        {"conversation": [Q, A], "model": "vicuna-13b"},
        {"prompt": json.dumps([Q])},
        {"messages": [{"role": "prompter", "text": "q"}, {"role": "assistant", "text": "a"}]},
        {"messages": [{"role": "system", "content": ""}, Q, A]},
        {"messages": [{"role": "system", "content": None}, Q, A]},
        {"messages": [{"role": "developer", "content": " \n"}, Q]},
        {"messages": [{"role": "system", "content": []}, Q]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "bing", "value": "b"}]},
        {"messages": [Q, {"role": "claude-3.5", "content": "x"}, {"role": "claude-3.5"}]},
    ],
)
def test_conversation_is_read_in_every_usual_shape(tmp_path: Path, row: dict[str, Any]) -> None:
    assert turns(read(tmp_path, row)) == [("user", "q"), OPEN]


def test_feature_written_with_sequence_is_read(tmp_path: Path) -> None:
    turn = {"from": datasets.Value("string"), "value": datasets.Value("string")}
    features = datasets.Features({"conversations": datasets.Sequence(turn)})
    rows = {"conversations": [{"from": ["human", "gpt"], "value": ["q", "a"]}]}
    path = tmp_path / "p.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    [prompt] = read_prompts(PromptsConfig(path=str(path))).prompts
    assert turns(prompt) == [("user", "q"), OPEN]


@pytest.mark.parametrize(
    "text", ["[1, 2]", '[{"a": 1}]', "{role}", "[not json", '{"role": "user"}', "[]"]
)
def test_question_that_looks_like_json_stays_a_question(tmp_path: Path, text: str) -> None:
    assert turns(read(tmp_path, {"prompt": text})) == [("user", text), OPEN]


def test_text_is_never_a_conversation_where_the_shape_says_so(tmp_path: Path) -> None:
    text = json.dumps([Q])
    assert turns(read(tmp_path, {"prompt": text}, shape="prompt")) == [("user", text), OPEN]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["alice", "bob"], "unknown_role"),
        (["human", "bing", "alice"], "unknown_role"),
        (["human", "function_call"], "bad_tools"),
    ],
)
def test_speaker_that_answers_no_user_is_no_assistant(
    tmp_path: Path, names: list[str], kind: str
) -> None:
    chat = [{"from": name, "value": "x"} for name in names]
    assert problem(read(tmp_path, {"conversations": chat})).startswith(kind)


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (5, "not_text: system: found a int; expected text"),
        ({"text": "x"}, "not_text: system: found a dict; expected text"),
        ([{"type": "image"}], "not_text: system: a part of type 'image', not text"),
    ],
)
def test_system_prompt_that_is_no_text_does_not_vanish(
    tmp_path: Path, system: object, expected: str
) -> None:
    assert problem(read(tmp_path, {"prompt": "q", "system": system})) == expected


def test_system_column_can_be_turned_off(tmp_path: Path) -> None:
    row = {"prompt": "q", "system_prompt": "detailed thinking on"}
    assert turns(read(tmp_path, row))[0] == ("system", "detailed thinking on")
    assert turns(read(tmp_path, row, system_column=False)) == [("user", "q"), OPEN]


# -- templates


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        ("{a}\n\n{b}", {"a": "x", "b": "y"}, "x\n\ny"),
        ("{a}\n\n{b}", {"a": "x", "b": ""}, "x"),
        ("{a}\n\n{b}", {"a": "x", "b": None}, "x"),
        ("{a}\n\n{b}", {"a": None, "b": "y"}, "y"),
        ("{a}\n\n{b}", {"a": "  x", "b": "y\n"}, "  x\n\ny\n"),
        ("A: {a}\nB: {b}\nAnswer:", {"a": "x", "b": ""}, "A: x\nB: \nAnswer:"),
        ("{{{a}}} {b}", {"a": 1, "b": 2.5}, "{1} 2.5"),
        ("{my col}", {"my col": "x{y}", "b": ""}, "x{y}"),
    ],
)
def test_template_joins_columns(
    tmp_path: Path, template: str, row: dict[str, Any], expected: str
) -> None:
    assert turns(read(tmp_path, row, template=template)) == [("user", expected), OPEN]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"a": "", "b": None}, "empty_text: a, b: the text is empty"),
        ({"a": "x", "b": ["y"]}, "not_text: b: found a list; expected text"),
        ({"a": "\ud800", "b": "y"}, "not_text: prompts.template: has a lone surrogate"),
    ],
)
def test_row_that_fills_no_template_is_bad(
    tmp_path: Path, row: dict[str, Any], expected: str
) -> None:
    assert problem(read(tmp_path, row, template="{a} {b}")) == expected


def test_template_with_an_unknown_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.template: no column 'c' in .*; it has: a"):
        read(tmp_path, {"a": "x"}, template="{a} {c}")


def test_system_column_is_put_before_a_filled_template(tmp_path: Path) -> None:
    prompt = read(tmp_path, {"a": "x", "system": "s"}, template="{a}")
    assert turns(prompt)[0] == ("system", "s")


def run_file(**prompts: Any) -> RunFile:  # noqa: ANN401
    values = {"prompts": {"path": "p", **prompts}, "model": "m", "output": {"folder": "out"}}
    return run_file_of(values, "run.yaml")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"template": "{a"}, "prompts.template: found '{a'; expected '}'"),
        ({"template": "a}"}, "prompts.template: found 'a}'; Single '}'"),
        ({"template": "{}"}, "braces are for one column's name each"),
        ({"template": "{a!r}"}, "braces are for one column's name each"),
        ({"template": "{a:>9}"}, "braces are for one column's name each"),
        ({"template": "text"}, "which names no column"),
        ({"template": "{a}", "column": "b"}, "it stands in place of column and shape"),
        ({"row_settings": {"top_p": "x"}}, "prompts.row_settings"),
        ({"path": ""}, "prompts.path: found '' (str); it should be a path"),
        ({"path": "a\0b"}, "a path should have no NUL character"),
        ({"path": "x" * 300}, "at most 255 bytes"),
        ({"path": "x/" * 2100}, "the path 4,095"),
        ({"limit": 10**30}, "prompts.limit"),
        ({"limit": 1e30}, "prompts.limit"),
    ],
)
def test_wrong_value_of_the_section_is_one_line(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_file(**section)
    assert "\n" not in str(refused.value)
    assert said in str(refused.value)


def test_home_is_expanded_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert run_file(path="~/p.jsonl").prompts.path == "/home/me/p.jsonl"
    assert run_file(path="$HOME/p.jsonl").prompts.path == "/home/me/p.jsonl"
    assert run_file(path="${HOME}/p.jsonl").prompts.path == "/home/me/p.jsonl"
    assert run_file(path="s3://bucket/$HOME").prompts.path == "s3://bucket/$HOME"


# -- settings of single rows

COLUMNS = {
    "thinking": "think",
    "max_tokens": "budget",
    "temperature": "heat",
    "chat_template_kwargs": "words",
}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, RowSettings()),
        ({"think": None, "budget": "", "heat": None, "words": None}, RowSettings()),
        ({"think": False}, RowSettings(thinking=False)),
        ({"think": "On"}, RowSettings(thinking=True)),
        ({"think": 0}, RowSettings(thinking=False)),
        ({"budget": 128}, RowSettings(max_tokens=128)),
        ({"budget": "128"}, RowSettings(max_tokens=128)),
        ({"budget": 128.0}, RowSettings(max_tokens=128)),
        ({"heat": 0}, RowSettings(temperature=0.0)),
        ({"heat": "0.7"}, RowSettings(temperature=0.7)),
        ({"words": {"a": 1, "b": None}}, RowSettings(chat_template_kwargs={"a": 1})),
        ({"words": '{"a": 1}'}, RowSettings(chat_template_kwargs={"a": 1})),
        (
            {"words": {"enable_thinking": False}},
            RowSettings(chat_template_kwargs={"enable_thinking": False}),
        ),
    ],
)
def test_settings_of_a_row_are_read(
    tmp_path: Path, row: dict[str, Any], expected: RowSettings
) -> None:
    rows = [{"prompt": "q", **row}, {"prompt": "r", **dict.fromkeys(COLUMNS.values())}]
    first, _ = opened(tmp_path, rows, row_settings=COLUMNS).prompts
    assert first.settings == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"think": "maybe"}, "think: found 'maybe'; expected true or false"),
        ({"think": [1]}, "think: found [1]; expected true or false"),
        ({"budget": 0}, "budget: found 0; expected a number of tokens, at least 1"),
        ({"budget": 1.5}, "budget: found 1.5; expected a number of tokens, at least 1"),
        ({"budget": True}, "budget: found True; expected a number of tokens, at least 1"),
        ({"budget": 10**400}, "expected a number of tokens, at least 1"),
        ({"heat": 2.1}, "heat: found 2.1; expected a number from 0 to 2"),
        ({"heat": "nan"}, "heat: found 'nan'; expected a number from 0 to 2"),
        ({"words": "off"}, "words: found 'off'; expected an object of chat-template words"),
        ({"words": {"a": float("inf")}}, "expected an object of JSON values"),
    ],
)
def test_wrong_setting_is_the_rows_problem(
    tmp_path: Path, row: dict[str, Any], expected: str
) -> None:
    rows = [{"prompt": "q", **row}, {"prompt": "r", **dict.fromkeys(COLUMNS.values())}]
    first, second = opened(tmp_path, rows, row_settings=COLUMNS).prompts
    assert problem(first).startswith("bad_setting: ")
    assert problem(first).endswith(expected)
    assert second.problem is None


def test_column_with_chat_template_words_is_recognised_and_can_be_turned_off(
    tmp_path: Path,
) -> None:
    row = {"prompt": "q", "chat_template_kwargs": {"enable_thinking": False}}
    assert read(tmp_path, row).settings.chat_template_kwargs == {"enable_thinking": False}
    assert read(tmp_path, row, row_settings={}).settings == RowSettings()


def test_settings_are_part_of_a_rows_identity(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "q", "budget": budget} for budget in (None, 1, 2)]
    prompts = list(opened(tmp_path, rows, row_settings={"max_tokens": "budget"}).prompts)
    assert len({prompt.row_id for prompt in prompts}) == 3
    assert len({prompt.content_hash for prompt in prompts}) == 3
    plain = read(tmp_path, {"prompt": "q"})
    assert (plain.row_id, plain.content_hash) == (prompts[0].row_id, prompts[0].content_hash)


def test_settings_are_frozen_with_the_row(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "run")
    rows: list[dict[str, Any]] = [{"prompt": "q", "budget": 9000}, {"prompt": "r", "budget": None}]
    freeze(folder, "a", opened(tmp_path, rows, row_settings={"max_tokens": "budget"}))
    frozen = frozen_prompts(folder, "a")
    assert frozen is not None
    assert [frozen.prompt(n).settings.max_tokens for n in (0, 1)] == [9000, None]
    assert frozen.budgets == RowBudgets(largest=9000, are_all_set=False)
    assert frozen.columns.row_settings == {"max_tokens": "budget"}


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [([None], 4096), ([None, 100], 4096), ([100, 200], 200), ([None, 9000], 9000)],
)
def test_plan_takes_the_largest_budget_of_any_row(
    tmp_path: Path, budgets: list[int | None], expected: int
) -> None:
    bounds = PromptBounds()
    rows = [{"prompt": "q", "budget": budget} for budget in budgets]
    for prompt in opened(tmp_path, rows, row_settings={"max_tokens": "budget"}).prompts:
        bounds.note(prompt)
    planned = with_row_budgets(run_file(), bounds.budgets)
    assert planned.sampling.max_tokens == expected
