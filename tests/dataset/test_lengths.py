"""Lengths of prompts and completions: what is counted, and what is sampled."""

import json
from pathlib import Path

import pytest

from pipeline.dataset.frozen import freeze
from pipeline.dataset.lengths import (
    expected_lengths,
    frozen_size,
    input_size,
    prompt_bounds,
    stated_prompts,
)
from pipeline.dataset.prompts import read_prompts
from pipeline.errors import ConfigError
from pipeline.store.folder import LocalFolder
from schemas.config.run_file import RunFile


def run_file(tmp_path: Path, rows: list[dict[str, object]], **changes: object) -> RunFile:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "prompts": {"path": str(path), "keep_columns": ["n"]}, "model": "m",
        "output": {"folder": str(tmp_path)}, **changes,
    }  # fmt: skip
    return RunFile.model_validate(values)


def prompts(*lengths: int) -> list[dict[str, object]]:
    return [{"prompt": "x" * length, "n": length} for length in lengths]


# --- prompts -----------------------------------------------------------------------------------


def test_every_prompt_is_counted_and_a_bad_one_is_not(tmp_path: Path) -> None:
    config = run_file(tmp_path, [*prompts(40, 80), {"prompt": ""}], samples_per_prompt=3)
    size = input_size(config)
    assert size.num_completions == 6
    # A token per 4 bytes and 5 for the message: 15 and 25, mean 20, deviation 5.
    assert (size.prompts.mean_tokens, size.prompts.sampled) == (20, 2)
    assert size.prompts.cv == pytest.approx(0.25)
    assert size.prompts.source.startswith("2 prompts of ")
    assert size.longest == prompt_bounds(config).longest
    ((turns, tokens),) = prompt_bounds(config).longest
    assert turns == 1
    assert tokens >= 80


def test_large_input_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.dataset.lengths._SAMPLED_PROMPTS", 100)
    size = input_size(run_file(tmp_path, prompts(*range(4, 4004, 4))))
    assert (size.num_completions, size.prompts.sampled) == (1000, 100)
    # 1 to 1,000 tokens and 5 more, uniform: 505.5 with an error of 289 / 10.
    assert size.prompts.mean_tokens == pytest.approx(505.5, abs=60)
    assert size.prompts.cv == pytest.approx(0.57, abs=0.1)


def test_frozen_prompts_are_read_in_stretches(tmp_path: Path) -> None:
    # 4,000 rows: 40 stretches of 50; one row in two is unusable.
    rows: list[dict[str, object]] = [{"prompt": "x" * 40}, {"prompt": ""}] * 2000
    config = run_file(tmp_path, rows, samples_per_prompt=2, prompts={
        "path": str(tmp_path / "prompts.jsonl")
    })  # fmt: skip
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    frozen = freeze(folder, "set", read_prompts(config.prompts))
    size = frozen_size(config, frozen)
    assert size.num_completions == 4000
    assert (size.prompts.mean_tokens, size.prompts.sampled) == (15, 1000)
    assert size.longest == frozen.longest == prompt_bounds(config).longest


def test_input_without_a_usable_prompt_is_refused(tmp_path: Path) -> None:
    config = run_file(tmp_path, [{"prompt": ""}], prompts={"path": str(tmp_path / "prompts.jsonl")})
    with pytest.raises(ConfigError, match=r"prompts.jsonl has no usable prompt"):
        input_size(config)
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    with pytest.raises(ConfigError, match=r"prompts.jsonl has no usable prompt"):
        frozen_size(config, freeze(folder, "set", read_prompts(config.prompts)))


def test_stated_prompts_have_no_spread() -> None:
    stated = stated_prompts(512.0)
    assert (stated.mean_tokens, stated.cv, stated.sampled) == (512.0, 0.0, 0)


# --- completions -------------------------------------------------------------------------------


def test_column_comes_before_the_stated_mean_and_both_before_the_prior(tmp_path: Path) -> None:
    stated = {"output_tokens_mean": 300.0, "output_tokens_cv": 0.0}
    column = {**stated, "output_tokens_column": "n"}
    rows = prompts(40, 80)
    assert expected_lengths(run_file(tmp_path, rows, lengths=column)).summary.mean_tokens == 60
    by_mean = expected_lengths(run_file(tmp_path, rows, lengths=stated)).summary
    assert by_mean.mean_tokens == pytest.approx(300)
    assert by_mean.source == "lengths section of the run file"
    prior = expected_lengths(run_file(tmp_path, rows)).summary
    assert prior.source.startswith("assumed: ")
    # The given limit replaces the run file's.
    cut = expected_lengths(run_file(tmp_path, rows, lengths=column), limit_tokens=50).summary
    assert (cut.mean_tokens, cut.limit_tokens) == (45, 50)


def test_column_that_the_run_keeps_already_is_read_once(tmp_path: Path) -> None:
    config = run_file(
        tmp_path, [*prompts(40, 80), {"prompt": "a", "n": None}],
        lengths={"output_tokens_column": "n"},
    )  # fmt: skip
    assert expected_lengths(config).summary.mean_tokens == 60


@pytest.mark.parametrize("value", ["long", True, -1, float("nan"), float("inf")])
def test_column_of_anything_but_lengths_is_refused(tmp_path: Path, value: object) -> None:
    config = run_file(
        tmp_path, [{"prompt": "a", "n": value}], lengths={"output_tokens_column": "n"}
    )
    with pytest.raises(ConfigError, match=r"row 1, column n: found .*expected a number of tokens"):
        expected_lengths(config)
