"""A run file in the planner's words: one owner for limits, load, flags, context and cards."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError, PlanError
from pipeline.planner.lengths.lengths import output_lengths
from pipeline.planner.rate.search import HardwareOption, SearchLimits
from pipeline.run_file import (
    check_launch,
    configured_group,
    configured_hardware,
    estimate_query,
    given_context_tokens,
    needed_context_tokens,
    output_limit_tokens,
    plan_base,
    run_load,
    run_model,
    search_limits,
    usd_per_gpu_hour,
    users_flags,
    with_model_sampling,
    with_planner_settings,
)
from schemas.config.run_file import RunFile
from schemas.estimate import InputSize, PromptLengths

MODEL = "Qwen/Qwen3.6-27B"
TODAY = date(2026, 12, 1)


def run(**sections: Any) -> RunFile:  # noqa: ANN401  # sections of a run file
    values: dict[str, Any] = {
        "prompts": {"path": "unused"},
        "model": MODEL,
        "output": {"folder": "unused"},
        "engine": {"kind": "sglang", "python": "/usr/bin/python3"},
        **sections,
    }
    return RunFile.model_validate(values)


def sglang(**keys: object) -> dict[str, object]:
    return {"kind": "sglang", "python": "/usr/bin/python3", **keys}


# --- limits, load and lengths -----------------------------------------------------------------


def test_each_permission_reaches_the_search() -> None:
    assert search_limits(run()) == SearchLimits()
    names = ("mtp", "prefix_cache", "attention_dp", "pipeline", "kv_dtype", "state_dtype")
    for name in names:
        usual = getattr(SearchLimits(), name)
        limits = search_limits(run(planner={f"allow_{name}": not usual}))
        changed = [each for each in names if getattr(limits, each) != getattr(SearchLimits(), each)]
        assert changed == [name]


def test_load_takes_what_is_given_then_the_run_file_then_the_usual_prompt() -> None:
    stated = run(lengths={"prompt_tokens_mean": 700})
    assert run_load(stated, prompt_tokens_mean=900).prompt_tokens_mean == 900
    assert run_load(stated).prompt_tokens_mean == 700
    assert run_load(run()).prompt_tokens_mean == 512
    given = output_lengths(1234, 1.0, 8192, "given")
    assert run_load(stated, lengths=given).lengths == given
    assert run_load(run()).accept_odds is None


def test_accept_length_becomes_the_odds_of_one_drafted_token() -> None:
    # 1 + p + p^2 + p^3 = 2.5 tokens of 4: p = 0.606, since 1 + 0.606 + 0.367 + 0.223 = 2.196 is
    # less and p = 0.68 gives 1 + 0.68 + 0.462 + 0.314 = 2.457.
    load = run_load(run(estimate={"accept_length": 2.5, "draft_tokens": 4}))
    assert load.accept_odds is not None
    odds = load.accept_odds
    assert 1 + odds + odds**2 + odds**3 == pytest.approx(2.5, abs=1e-3)


def test_stated_lengths_and_their_limit() -> None:
    lengths = {"output_tokens_mean": 2000, "output_tokens_cv": 1.0}
    # No limit is given: six standard deviations over the mean, 2,000 x (1 + 6).
    assert output_limit_tokens(run(lengths=lengths)) == 14_000
    limited = run(lengths=lengths, sampling={"max_tokens": 6000})
    assert output_limit_tokens(limited) == 6000
    assert run_load(limited).lengths.summary.limit_tokens == 6000
    assert output_limit_tokens(run()) == run().sampling.max_tokens


# --- flags and context ------------------------------------------------------------------------


def test_keys_of_the_run_file_are_flags_unless_the_line_has_them() -> None:
    engine = sglang(context_length=9000, max_running_requests=33, env={"A": "b"})
    flags = users_flags(run(engine=engine))
    assert flags.number("context-length") == 9000
    assert flags.number("max-running-requests") == 33
    assert dict(flags.env) == {"A": "b"}
    assert flags.model_path == MODEL
    line = ["--context-length", "7000", "--max-running-requests", "5"]
    written = users_flags(run(engine=sglang(flags=line, context_length=9000)))
    assert written.number("context-length") == 7000
    assert written.number("max-running-requests") == 5
    assert not users_flags(run()).has("max-running-requests")


def test_plans_keep_the_given_context_and_take_the_needed_one_otherwise() -> None:
    assert plan_base(run(), 5000).number("context-length") == 5000
    assert not plan_base(run(), None).has("context-length")
    given = run(engine=sglang(context_length=9000))
    assert plan_base(given, 5000).number("context-length") == 9000
    # Keys of another kind of engine are no flags of SGLang.
    endpoint = {"kind": "endpoint", "base_urls": ["http://127.0.0.1:1/v1"], "context_length": 9000}
    assert plan_base(run(engine=endpoint), 5000).number("context-length") == 5000


def test_context_that_the_run_file_gives_by_kind_of_engine() -> None:
    assert given_context_tokens(run()) is None
    assert given_context_tokens(run(engine=sglang(context_length=9000))) == 9000
    endpoint = {"kind": "endpoint", "base_urls": ["http://127.0.0.1:1/v1"], "context_length": 7000}
    assert given_context_tokens(run(engine=endpoint)) == 7000
    assert given_context_tokens(run(engine={"kind": "embedded"})) is None


def test_needed_context_holds_the_longest_row_with_all_its_budgets() -> None:
    model = run_model(run())
    config = run(sampling={"max_tokens": 4000})
    budget = config.most_completion_tokens
    # One turn of 30,000 tokens or three turns that start at 25,000, and 1,024 for the template,
    # rounded up to 1,024.
    longest = ((1, 30_000), (3, 25_000))
    needed = max(30_000 + budget, 25_000 + 3 * budget) + 1024
    assert needed_context_tokens(config, model, longest) == -(-needed // 1024) * 1024
    assert needed_context_tokens(config, model, longest, template_tokens=5000) == (
        -(-(needed - 1024 + 5000) // 1024) * 1024
    )
    # At least 8,192, at most what the model holds, unknown without prompts or model.
    small = run(sampling={"max_tokens": 10})
    assert needed_context_tokens(small, model, ((1, 10),)) == 8192
    assert needed_context_tokens(config, model, ((1, 10**9),)) == model.context_length
    assert needed_context_tokens(config, model, ()) is None
    assert needed_context_tokens(config, None, longest) is None


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"engine": sglang(flags=["--tp-size", "2", "stray"])},
            "engine.flags: found 'stray', which belongs to no",
        ),
        ({"hardware": [{"gpu": "nothing", "count": 1}]}, "hardware.0.gpu: "),
        ({"planner": {"model_config_path": "/nowhere"}}, "planner.model_config_path: "),
    ],
)
def test_launch_that_cannot_be_made_is_refused_by_its_key(
    sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_launch(run(**sections))


def test_launch_that_can_be_made_passes() -> None:
    check_launch(run(hardware=[{"gpu": "b200", "count": 2}]))


# --- model, cards and prices ------------------------------------------------------------------


def test_planner_settings_replace_those_that_are_given() -> None:
    config = run(planner={"sglang_version": "0.5.20", "weights_format": "fp8"})
    changed = with_planner_settings(
        config, sglang_version="0.5.23", weights_format=None, model_config_path=Path("/m")
    )
    assert changed.planner.sglang_version == "0.5.23"
    assert changed.planner.weights_format == "fp8"
    assert changed.planner.model_config_path == "/m"
    assert config.planner.sglang_version == "0.5.20"


def test_override_of_the_launch_line_changes_the_model() -> None:
    override = ["--json-model-override-args", '{"max_position_embeddings": 4096}']
    plain, overridden = run(model="Qwen/Qwen3-8B"), sglang(flags=override)
    assert run_model(plain).context_length == 40_960
    changed = run(model="Qwen/Qwen3-8B", engine=overridden)
    assert run_model(changed).context_length == 4096
    broken = run(engine=sglang(flags=["--json-model-override-args", "{"]))
    with pytest.raises(PlanError, match="--json-model-override-args"):
        run_model(broken)


def test_hardware_is_listed_with_its_counts() -> None:
    config = run(hardware=[{"gpu": "b200", "count": 2}, {"gpu": "h200", "count": 4}])
    found = configured_hardware(config)
    assert [(option.gpu.name, option.count) for option in found] == [("B200", 2), ("H200", 4)]
    with pytest.raises(PlanError, match="no hardware section"):
        configured_hardware(run())


def test_own_price_of_the_command_line_wins_over_the_run_file() -> None:
    entry = {"gpu": "b200", "count": 2, "usd_per_gpu_hour": 4.0, "spot_usd_per_gpu_hour": 2.0}
    (config,) = run(hardware=[entry]).hardware
    group = configured_group(config, {})
    assert (group.hardware.count, group.own_usd, group.own_spot_usd) == (2, 4.0, 2.0)
    group = configured_group(config, {"B200": (3.0, None)})
    assert (group.own_usd, group.own_spot_usd) == (3.0, None)


def test_ranking_price_is_the_own_one_else_the_catalogues_on_demand() -> None:
    config = run(hardware=[{"gpu": "b200", "count": 1, "usd_per_gpu_hour": 4.0}])
    hardware: tuple[HardwareOption, ...] = configured_hardware(config)
    assert usd_per_gpu_hour(config, hardware, today=TODAY) == {"B200": 4.0}
    listed = usd_per_gpu_hour(run(hardware=[{"gpu": "b200", "count": 1}]), hardware, today=TODAY)
    assert listed["B200"] > 0
    assert listed["B200"] != 4.0
    twice = [{"gpu": "b200", "count": n, "usd_per_gpu_hour": float(n)} for n in (1, 2)]
    with pytest.raises(PlanError, match=r"B200 has two prices, usd_per_gpu_hour 1.0 and 2.0"):
        usd_per_gpu_hour(run(hardware=twice), hardware, today=TODAY)


def test_estimates_query_carries_every_word_of_the_run_file() -> None:
    config = run(
        planner={"sglang_version": "0.5.23", "allow_mtp": False},
        estimate={"storage_gb_per_s": 3.0, "hours_between_preemptions": 7.0},
        sampling={"max_tokens": 4000},
    )
    prompts = PromptLengths(mean_tokens=300, cv=0.2, sampled=10, source="counted")
    lengths = output_lengths(1000, 1.0, 4000, "stated")
    size = InputSize(num_completions=77, prompts=prompts, longest=((1, 20_000),))
    query = estimate_query(config, size, lengths, today=TODAY)
    assert (query.num_completions, query.prompts, query.today) == (77, prompts, TODAY)
    assert (query.load.prompt_tokens_mean, query.load.lengths) == (300, lengths)
    assert query.limits == SearchLimits(mtp=False)
    assert (query.storage_bytes_per_s, query.hours_between_preemptions) == (3e9, 7.0)
    assert (query.version, query.release_known, query.calibrations) == ("0.5.23", True, {})
    needed = needed_context_tokens(config, query.model, size.longest)
    assert query.base.number("context-length") == needed
    unknown = with_planner_settings(config, sglang_version="0.9.9")
    assert estimate_query(unknown, size, lengths, today=TODAY).release_known is False


# --- sampling of the model ---------------------------------------------------------------------


def with_generation_config(tmp_path: Path, sampling: object, values: object) -> RunFile:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return with_model_sampling(
        RunFile.model_validate(
            {
                "prompts": {"path": "p"},
                "model": str(tmp_path),
                "output": {"folder": "o"},
                "sampling": sampling,
            }
        )
    )


def test_sampling_of_the_model_is_what_its_own_file_says(tmp_path: Path) -> None:
    values = {"temperature": 1.0, "top_k": 40, "do_sample": True, "eos_token_id": [1, 2]}
    sampling = with_generation_config(tmp_path, "model", values).sampling
    found = sampling.model_dump(exclude_none=True)
    assert found == {"temperature": 1.0, "top_k": 40, "max_tokens": 4096, "seed": 7}


def test_given_values_outrank_those_of_the_model(tmp_path: Path) -> None:
    given = {"base": "model", "temperature": None, "max_tokens": 9}
    run = with_generation_config(tmp_path, given, {"temperature": 1.0, "top_p": 0.8})
    assert (run.sampling.temperature, run.sampling.top_p, run.sampling.max_tokens) == (None, 0.8, 9)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"temperature": 9}, "sampling.temperature: found 9 (int); it should be less than or"),
        ([], "generation_config.json is not a JSON object"),
    ],
)
def test_unusable_sampling_of_the_model_is_named(tmp_path: Path, values: object, line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        with_generation_config(tmp_path, "model", values)


def test_model_without_a_file_of_its_own_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sampling: found no generation_config\.json of 'm'"):
        with_model_sampling(
            RunFile.model_validate(
                {
                    "prompts": {"path": "p"},
                    "model": "m",
                    "output": {"folder": "o"},
                    "sampling": "model",
                }
            )
        )
