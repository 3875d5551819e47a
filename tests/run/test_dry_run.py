"""The dry run: what it counts, and that it writes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError, ResumeError
from pipeline.run.dry_run import dry_run
from pipeline.run.session import SessionOptions, prepare
from pipeline.store.folder import LocalFolder
from schemas.config.run_file import RunFile

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
