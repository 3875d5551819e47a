"""The dry run: what it counts, and that it writes nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import regenerate
from jobs.dry_run_lines import dry_run_lines
from pipeline.errors import ConfigError, ResumeError
from pipeline.run.dry_run import dry_run
from pipeline.run.session import SessionOptions, prepare
from pipeline.store.folder import LocalFolder
from schemas.config.run_file import RunFile
from tests.fakes.chat_templates import CHATML, DEEPSEEK_R1, GPT_OSS, QWEN3_5

ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "hi"}]},
    {
        "id": "b",
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "two"},
        ],
    },
    {"id": "c", "messages": [{"role": "user", "content": "long " * 30}]},
    {"id": "d", "messages": [{"role": "assistant", "content": "no question"}]},
    {"id": "e", "messages": [{"role": "assistant", "content": "nor here"}]},
]


def run_file(folder: Path, rows: list[dict[str, Any]] = ROWS, **more: Any) -> RunFile:  # noqa: ANN401 - sections of a run file
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "prompts": {"path": str(path), "id_column": "id"},
        "model": "m",
        "output": {"folder": str(folder / "out")},
        "samples_per_prompt": 2,
    }
    return RunFile.model_validate(values | more)


def test_rows_turns_and_problems_are_counted(tmp_path: Path) -> None:
    counts = dry_run(run_file(tmp_path), LocalFolder(tmp_path / "out"))
    assert (counts.column, counts.shape) == ("messages", "messages")
    # Five prompts in two samples; a and c have one turn, b has two.
    assert (counts.rows_total, counts.rows_done, counts.turns) == (10, 0, 8)
    assert [(kind, count) for kind, (count, _) in counts.problems.items()] == [("no_user_turn", 2)]
    assert not (tmp_path / "out").exists()


def test_prompt_tokens_are_those_of_the_first_request_of_each_sample(tmp_path: Path) -> None:
    alone = dry_run(run_file(tmp_path, ROWS[:1]), LocalFolder(tmp_path / "out"))
    both = dry_run(run_file(tmp_path, ROWS[:2]), LocalFolder(tmp_path / "out"))
    second = dry_run(run_file(tmp_path, ROWS[1:2]), LocalFolder(tmp_path / "out"))
    assert alone.prompt_tokens > 0
    assert alone.prompt_tokens % 2 == 0
    assert both.prompt_tokens == alone.prompt_tokens + second.prompt_tokens
    once = run_file(tmp_path, ROWS[:1], samples_per_prompt=1)
    assert dry_run(once, LocalFolder(tmp_path / "out")).prompt_tokens == alone.prompt_tokens / 2


def test_prompts_without_room_in_the_context_are_counted(tmp_path: Path) -> None:
    def without_room(context_length: int | None) -> int:
        engine = {
            "kind": "sglang",
            "command": ["sglang"],
            "context_length": context_length,
        }
        config = run_file(tmp_path, ROWS[:1], engine=engine, sampling={"max_tokens": 1000})
        return dry_run(config, LocalFolder(tmp_path / "out")).prompts_without_room

    config = run_file(tmp_path, ROWS[:1], samples_per_prompt=1)
    tokens = dry_run(config, LocalFolder(tmp_path / "out")).prompt_tokens
    assert without_room(tokens + 1000) == 0
    assert without_room(tokens + 999) == 1
    assert without_room(None) == 0


def test_input_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        dry_run(run_file(tmp_path, []), LocalFolder(tmp_path / "out"))


def test_folder_of_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    config = run_file(tmp_path)
    prepare(config, folder, SessionOptions(), token="t", now_s=1.0, log=lambda line: None)
    assert dry_run(config, folder).rows_done == 0
    with pytest.raises(ResumeError, match=r"sampling\.max_tokens"):
        dry_run(run_file(tmp_path, sampling={"max_tokens": 7}), folder)


def with_template(folder: Path, text: str, rows: list[dict[str, Any]], **more: Any) -> RunFile:  # noqa: ANN401 - sections of a run file
    """Return a run file of a model in a folder that has this chat template."""
    model = folder / "model"
    model.mkdir()
    (model / "chat_template.jinja").write_text(text)
    engine = {"kind": "endpoint", "base_urls": ["http://127.0.0.1:1/v1"]}
    return run_file(folder, rows, model=str(model), engine=engine, **more)


SYSTEM_TURNS: list[dict[str, Any]] = [
    {
        "id": "two",
        "messages": [
            {"role": "system", "content": "s1"},
            {"role": "system", "content": "s2"},
            {"role": "user", "content": "q"},
        ],
    },
    {
        "id": "late",
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "system", "content": "mid"},
            {"role": "user", "content": "q2"},
        ],
    },
    {
        "id": "off",
        "messages": [{"role": "user", "content": "q"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
]


def test_one_prompt_of_each_kind_is_shown_as_the_model_sees_it(tmp_path: Path) -> None:
    config = with_template(tmp_path, QWEN3_5, SYSTEM_TURNS)
    counts = dry_run(config, LocalFolder(tmp_path / "out"))
    two, late, off = counts.shown
    assert two.text is not None
    assert two.text.strip() == (
        "<|im_start|>system\ns1\n\ns2<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )
    assert late.text is not None
    assert "user\nmid\n\nq2<|im_end|>" in late.text
    assert [shown.opens_thinking for shown in counts.shown] == [True, True, False]
    assert "thinking off by the row" in off.kind
    assert all(shown.num_tokens for shown in counts.shown)
    assert (counts.prompts_refitted, counts.warnings, counts.can_ask) == (2, (), True)
    text = "\n".join(dry_run_lines(config, counts))
    assert "^ the model begins here, inside its thinking" in text
    assert "prompts.system_turns: as_given" in text


def test_prompt_that_the_template_refuses_is_a_warning(tmp_path: Path) -> None:
    prompts = {"path": str(tmp_path / "p.jsonl"), "id_column": "id", "system_turns": "as_given"}
    config = with_template(tmp_path, QWEN3_5, SYSTEM_TURNS[:1], prompts=prompts)
    counts = dry_run(config, LocalFolder(tmp_path / "out"))
    assert counts.shown[0].fault == "System message must be at the beginning."
    assert "System message must be at the beginning." in counts.warnings[0]


@pytest.mark.parametrize(
    ("text", "thinking", "words"),
    [
        (DEEPSEEK_R1, False, "thinking: false has no effect"),
        (GPT_OSS, False, "reasoning_effort sets how long it thinks"),
        (CHATML, True, "thinking: true adds nothing"),
        (DEEPSEEK_R1, True, None),
        (QWEN3_5, False, None),
    ],
)
def test_thinking_that_the_model_cannot_follow_is_reported_before_the_run(
    tmp_path: Path, text: str, thinking: bool, words: str | None
) -> None:
    config = with_template(tmp_path, text, ROWS[:1], thinking=thinking)
    warnings = dry_run(config, LocalFolder(tmp_path / "out")).warnings
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


def test_flag_that_no_release_has_is_a_warning(tmp_path: Path) -> None:
    flags = ["--no-such-flag", "3", "--stream-interval", "8"]
    engine = {"kind": "sglang", "python": sys.executable, "flags": flags}
    config = run_file(tmp_path, ROWS[:1], model="Qwen/Qwen3-8B", engine=engine)
    (warning,) = dry_run(config, LocalFolder(tmp_path / "out")).warnings
    assert warning.startswith("engine.flags: --no-such-flag 3 is in no release of SGLang")


def test_columns_that_are_not_read_are_named_with_the_keys_that_use_them(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "id": "a", "topic": "t"}]
    prompts = {"path": str(tmp_path / "p.jsonl")}
    for more, unread in ({}, "columns 'id', 'topic'"), ({"id_column": "id"}, "column 'topic'"):
        config = run_file(tmp_path, rows, prompts={**prompts, **more})
        counts = dry_run(config, LocalFolder(tmp_path / "out"))
        (line,) = (line for line in dry_run_lines(config, counts) if line.startswith("not read"))
        assert line.startswith(f"not read   {unread}: prompts.id_column takes ids from one")


def test_template_that_is_not_at_hand_is_named_with_its_reason(tmp_path: Path) -> None:
    engine = {"kind": "endpoint", "base_urls": ["http://127.0.0.1:1/v1"]}
    config = run_file(tmp_path, ROWS[:1], model="Qwen/Qwen3-0.6B", engine=engine)
    counts = dry_run(config, LocalFolder(tmp_path / "out"))
    assert counts.why_no_template == "HF_HUB_OFFLINE is set, so nothing is fetched from the hub"
    assert counts.shown[0].text is None


def test_input_without_a_good_row_cannot_run_and_a_large_share_of_bad_ones_is_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(rows: list[dict[str, Any]], status: int) -> list[str]:
        config = run_file(tmp_path, rows)
        path = tmp_path / "run.json"
        path.write_text(config.model_dump_json())
        assert regenerate.main([str(path), "--dry-run"]) == status
        return capsys.readouterr().out.splitlines()

    assert "100.0% of the prompts end as error rows" in lines(ROWS[3:], 2)[-1]
    assert "66.7% of the prompts" in lines(ROWS[2:], 0)[-1]
    assert not any("error rows, more than" in line for line in lines(ROWS[:3], 0))
