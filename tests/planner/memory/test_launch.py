"""The model as a launch line changes it."""

import json

import pytest

from pipeline.errors import PlanError
from pipeline.planner.memory.launch import changed_by_flags, other_overrides
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from schemas.plan import GqaCache, SlidingCache
from tests.fakes.launches import catalogue_model


def flags_of(**override: object) -> LaunchFlags:
    return parse_launch_line(["--json-model-override-args", json.dumps(override)])


@pytest.mark.parametrize(
    ("override", "context"),
    [
        ({"max_position_embeddings": 131_072}, 131_072),
        ({"text_config": {"max_position_embeddings": 65_536}}, 65_536),
        # The rope's factor stretches the config's 40,960, unless it says what it starts from.
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 163_840),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 32_768}}, 40_960),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 40_960),
    ],
)  # fmt: skip
def test_overridden_config_gives_the_context(override: dict[str, object], context: int) -> None:
    launched = changed_by_flags(catalogue_model("Qwen/Qwen3-8B"), flags_of(**override))
    assert launched.context_length == context


def test_overridden_fields_that_are_not_read_are_listed() -> None:
    flags = flags_of(max_position_embeddings=1, num_hidden_layers=4, architectures=["X"])
    assert other_overrides(flags) == ["num_hidden_layers", "architectures"]
    with pytest.raises(PlanError, match="expected a JSON object, found '\\[1\\]'"):
        other_overrides(parse_launch_line(["--json-model-override-args", "[1]"]))


def test_without_a_window_pool_all_layers_keep_all_tokens() -> None:
    flags = parse_launch_line(["--disable-hybrid-swa-memory"])
    model = catalogue_model("openai/gpt-oss-20b")
    # 24 layers of 8 heads of 64, half of them windows
    assert isinstance(model.cache, SlidingCache)
    assert changed_by_flags(model, flags).cache == GqaCache(
        layers=24, kv_heads=8, head_dim=64, v_head_dim=64
    )


def test_model_that_was_changed_is_changed_from_its_files_anew() -> None:
    model = catalogue_model("Qwen/Qwen3-8B")
    rope = flags_of(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    once = changed_by_flags(model, rope)
    assert changed_by_flags(once, rope) == once
    assert changed_by_flags(once, parse_launch_line([])) == model
    quantised = changed_by_flags(model, parse_launch_line(["--quantization", "fp8"]))
    assert quantised.format.base == "fp8"
    assert quantised.stored == model
