"""`jobs.plan` and `jobs.estimate` show the flags with which a run file's engines are launched."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import estimate, plan
from pipeline.dataset.frozen import freeze
from pipeline.dataset.prompts import read_prompts
from pipeline.engines.launch import LaunchHistory
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.store.folder import LocalFolder
from schemas.config.reader import read_run_file
from schemas.config.run_file import RunFile

AGREED = ("context-length", "max-running-requests", "mem-fraction-static", "chunked-prefill-size")


def written(
    folder: Path,
    engine: dict[str, Any],
    *,
    with_prompts: bool = True,
    model: str = "Qwen/Qwen3.6-27B",
) -> Path:
    """A run on one B200; its longest prompt has 17,600 bytes."""
    prompts = folder / "prompts.jsonl"
    if with_prompts:
        texts = ["Why?", "Tell me: " + "a" * 17_586]
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    values = {
        "prompts": {"path": str(prompts)},
        "model": model,
        "sampling": {"max_tokens": 28672},
        "engine": {"kind": "sglang", "command": ["c"], "gpus": 1, **engine},
        "output": {"folder": str(folder / "out")},
        "hardware": [{"gpu": "B200"}],
        "lengths": {"prompt_tokens_mean": 512, "output_tokens_mean": 2529, "output_tokens_cv": 1.2},
        "planner": {"sglang_version": "0.5.23", "allow_mtp": False},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def launched(run: RunFile, folder: Path) -> dict[str, str]:
    stream = read_prompts(run.prompts)
    out = LocalFolder(folder)
    frozen = freeze(out, "set", stream)
    told: list[str] = []
    launch = LaunchHistory(config=run, folder=out, log=told.append, longest_prompts=frozen.longest)
    launch.begin(())
    return agreed(launch.arguments())


def agreed(argv: list[str]) -> dict[str, str]:
    flags = parse_launch_line(argv)
    return {name: flags.text(name) for name in AGREED}


@pytest.mark.parametrize(
    ("engine", "context"),
    [
        # 17,595 bytes and 5 + 5 for two messages, 28,672 and 1,024: 47,301, which is 47 KiB.
        ({}, "48128"),
        ({"context_length": 65536, "max_running_requests": 100}, "65536"),
        ({"flags": ["--context-length=40960"]}, "40960"),
    ],
)
def test_plan_estimate_and_launch_have_one_context_and_one_limit_of_requests(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    engine: dict[str, Any],
    context: str,
) -> None:
    path = written(tmp_path, engine)
    found = launched(read_run_file(path), tmp_path / "frozen")
    assert found["context-length"] == context
    assert plan.main([str(path), "--json", "--most", "1"]) == 0
    planned = json.loads(capsys.readouterr().out)[0]
    assert agreed(planned["argv"]) == found
    assert estimate.main([str(path), "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)["options"][0]["plans"][0]
    assert agreed(estimated["argv"]) == found


def test_plan_says_that_the_context_is_assumed_where_the_prompts_are_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([str(written(tmp_path, {}, with_prompts=False)), "--most", "1"]) == 0
    assert "\ncontext 30,720, assumed: the prompts are not here" in capsys.readouterr().out
    assert plan.main([str(written(tmp_path, {})), "--most", "1"]) == 0
    assert "\ncontext 48,128\n" in capsys.readouterr().out


def test_override_of_the_models_config_counts_in_all_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Qwen3-8B ends at 40,960 of itself, which is less than the prompts need.
    override = '--json-model-override-args={"max_position_embeddings": 131072}'
    path = written(tmp_path, {"flags": [override]}, model="Qwen/Qwen3-8B")
    assert launched(read_run_file(path), tmp_path / "frozen")["context-length"] == "48128"
    assert plan.main([str(path), "--json", "--most", "1"]) == 0
    planned = json.loads(capsys.readouterr().out)[0]
    assert agreed(planned["argv"])["context-length"] == "48128"
    assert estimate.main([str(path), "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)["options"][0]["plans"][0]
    assert agreed(estimated["argv"])["context-length"] == "48128"
