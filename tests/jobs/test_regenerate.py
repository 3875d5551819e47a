"""The command around a session: paths, the summary and its exit status."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import regenerate
from pipeline.errors import ConfigError
from pipeline.report.status import run_status
from pipeline.run.driver import SessionEnd
from pipeline.store.folder import LocalFolder
from schemas.config.run_file import RunFile
from tests.fakes.example_run import write_example_run


def run_file(prompts: str = "p.jsonl", output: str = "out", **more: Any) -> RunFile:  # noqa: ANN401 - sections of a run file
    values = {"prompts": {"path": prompts}, "model": "m", "output": {"folder": output}}
    return RunFile.model_validate(values | more)


# -- paths


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    engine = {"kind": "embedded", "model_file": "m.gguf"}
    config = regenerate._with_absolute_paths(run_file(engine=engine).model_copy())
    assert config.prompts.path == str(tmp_path / "p.jsonl")
    assert config.output.folder == str(tmp_path / "out")
    assert config.engine.model_file == str(tmp_path / "m.gguf")
    local = run_file().model_copy(update={"model": "model"})
    assert regenerate._with_absolute_paths(local).model == str(tmp_path / "model")


def test_names_on_the_hub_and_urls_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = regenerate._with_absolute_paths(run_file("owner/set", "s3://bucket/run"))
    assert config.prompts.path == "owner/set"
    assert config.output.folder == "s3://bucket/run"
    assert config.model == "m"
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "set").mkdir()
    there = regenerate._with_absolute_paths(run_file("owner/set"))
    assert there.prompts.path == str(tmp_path / "owner" / "set")


@pytest.mark.parametrize(
    ("prompts", "output", "is_within"),
    [
        ("data", "data/out", True),
        ("data", "out", False),
        ("data/p.jsonl", "data/out", False),
        ("s3://b/data", "s3://b/data/out", True),
        ("s3://b/data?region=x", "s3://b/data/out?region=x", True),
        ("s3://b/data", "s3://b/data2", False),
    ],
)
def test_output_inside_the_folder_of_prompts_is_refused(
    tmp_path: Path, prompts: str, output: str, is_within: bool
) -> None:
    (tmp_path / "data").mkdir()

    def placed(path: str) -> str:
        return path if path.startswith("s3:") else str(tmp_path / path)

    config = run_file(placed(prompts), placed(output))
    if is_within:
        with pytest.raises(ConfigError, match=r"output\.folder: .* is inside prompts\.path"):
            regenerate._check_folders_apart(config)
    else:
        regenerate._check_folders_apart(config)


def test_flags_to_retry_are_those_whose_rows_are_not_kept() -> None:
    quality = {"empty_answer": {"policy": "retry"}, "looping": {"policy": "drop"}}
    before = regenerate._flags_to_retry(run_file())
    after = regenerate._flags_to_retry(run_file(quality=quality))
    assert after - before >= {"empty_answer", "looping"} - before
    assert {"empty_answer", "looping"} <= after
    kept = {"looping": {"policy": "keep"}}
    assert "looping" not in regenerate._flags_to_retry(run_file(quality=kept))


# -- the summary

END = SessionEnd(kind="failed", causes=("no GPU", "no GPU"), wall_s=100.0)


def summary(folder: Path, *, as_json: bool = False, accept_errors: bool = False) -> int:
    arguments = regenerate.argument_parser().parse_args(["run.yaml"])
    arguments.json, arguments.accept_errors = as_json, accept_errors
    return regenerate._print_summary(LocalFolder(folder), END, arguments)


def test_unfinished_run_exits_with_3_and_names_each_cause_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_example_run(LocalFolder(tmp_path), num_parts=2)
    assert summary(tmp_path) == 3
    shown = capsys.readouterr().out
    assert "unfinished " in shown
    assert shown.count("no GPU") == 1
    assert f"data set   {tmp_path}/data (2 parts)" in shown
    report, resume = shown.splitlines()[-2:]
    assert report == f"report     {tmp_path}/report.html"
    assert resume.startswith("next       ")
    assert " -m jobs.regenerate run.yaml   # resume: " in resume


def test_summary_as_json_counts_this_sessions_tokens_over_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_example_run(LocalFolder(tmp_path), num_parts=10, rows_total=80, state="done")
    summary(tmp_path, as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert values["rows_done"] == values["rows_total"] == 80
    assert (values["wall_s"], values["causes"]) == (100.0, ["no GPU", "no GPU"])
    # The whole run was one session of 100 s.
    assert values["tokens_per_s"] == values["completion_tokens"] / 100.0
    assert list(values["flags"].values()) == sorted(values["flags"].values(), reverse=True)
    assert values["data"] == f"{tmp_path}/data"
    assert values["report"] == f"{tmp_path}/report.html"
    (command,) = values["next"]
    assert command["command"].endswith(f" -m jobs.export {tmp_path} --to {tmp_path}-export")


@pytest.mark.parametrize(
    ("changes", "accept_errors", "code"),
    [
        ({}, False, 0),
        ({"rows_error": 2}, False, 3),
        ({"rows_error": 2}, True, 0),
        ({"rows_done": 79, "rows_failed": 1}, True, 3),
        ({"rows_done": 79}, True, 3),
    ],
)
def test_exit_status_is_0_when_every_row_has_its_completion(
    tmp_path: Path, changes: dict[str, int], accept_errors: bool, code: int
) -> None:
    folder = LocalFolder(tmp_path)
    write_example_run(folder, num_parts=10, rows_total=80, state="done")
    done = replace(run_status(folder, now_s=0.0), rows_failed=0)
    status = replace(done, **changes)  # type: ignore[arg-type]
    assert regenerate._exit_status(status, accept_errors=accept_errors) == code


def test_example_is_cut_to_one_line() -> None:
    messages = [
        {"role": "user", "content": "a\n b", "reasoning_content": None},
        {"role": "assistant", "content": "x" * 1300, "reasoning_content": "hm"},
    ]
    lines = regenerate._example_text({"row_id": "q1", "messages": messages}).splitlines()
    assert lines[:3] == ["example    q1", "  user: a b", "  thinking: hm"]
    assert lines[3] == f"  assistant: {'x' * 1197}..."
    assert regenerate._example_text(None) == "example    no completion yet"
