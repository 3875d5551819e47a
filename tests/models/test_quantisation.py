"""Quantisation configs of every method, and the bytes of each module."""

from typing import Any, Literal

import pytest

from pipeline.models.formats import (
    bytes_per_param,
    checkpoint_format,
    format_of,
    name_format,
    online_format,
)
from pipeline.models.quantisation import config_format, multiplied_in_16_bits
from schemas.plan import CheckpointFormat, FormatRule, Shard, TensorGroup

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def group(name: str, shard: Shard = "attention", **changes: object) -> TensorGroup:
    """A group of weights of that name."""
    values: dict[str, Any] = {"layers": 1, "quantizable": True, **changes}
    return TensorGroup(names=(name,), params=1, shard=shard, **values)


def declared(quant: dict[str, Any], **more: object) -> CheckpointFormat:
    """The format that a quantisation config declares."""
    found = config_format({"quantization_config": quant, **more}, None)
    assert found is not None
    return found


# --- methods ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "base", "scope", "group_size"),
    [
        (FP8, "fp8-block", "linears", 128),
        ({"quant_method": "FP8"}, "fp8", "linears", 128),
        ({"quant_method": "mxfp4"}, "mxfp4", "experts", 32),
        ({"quant_method": "mxfp8"}, "mxfp8", "linears", 32),
        ({"quant_method": "awq"}, "int4-awq", "linears", 128),
        ({"quant_method": "gptq", "group_size": 64}, "int4-gptq", "linears", 64),
        ({"quant_method": "auto-round", "group_size": 64}, "int4", "linears", 64),
        ({"quant_method": "autoround"}, "int4", "linears", 128),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized",
          "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}}},
         "int4", "linears", 32),
        ({"quant_method": "compressed-tensors", "format": "float-quantized",
          "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "fp8", "linears", 128),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
         "nvfp4", "linears", 128),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack"}, "mxfp4", "linears", 128),
        ({"quant_algo": "NVFP4"}, "nvfp4", "linears", 16),
        ({"quant_method": "modelopt"}, "fp8", "linears", 16),
    ],
)  # fmt: skip
def test_format_of_each_method(
    quant: dict[str, Any], base: str, scope: str, group_size: int
) -> None:
    found = declared(quant)
    assert (found.base, found.scope, found.group_size) == (base, scope, group_size)
    assert found.rules == ()
    assert not found.fp8_kv_cache
    assert found.source == "quantization_config"


def test_config_without_a_known_method_declares_nothing() -> None:
    assert config_format({}, None) is None
    assert config_format({"quantization_config": {"quant_method": "novel"}}, None) is None


def test_text_part_may_have_the_quantisation_config() -> None:
    found = config_format({"text_config": {"quantization_config": FP8}}, None)
    assert found is not None
    assert found.base == "fp8-block"


@pytest.mark.parametrize(
    ("algo", "base"),
    [
        ("MXFP8", "mxfp8"), ("W4A8_MXFP4_FP8", "mxfp4"), ("NVFP4", "nvfp4"), ("FP4", "nvfp4"),
        ("W4A16_AWQ", "int4-awq"), ("INT4", "int4-awq"), ("W4A16", "int4-awq"),
        ("FP8_PB_WO", "fp8-block"), ("FP8_BLOCK", "fp8-block"), ("fp8", "fp8"),
    ],
)  # fmt: skip
def test_algorithms_of_modelopt(algo: str, base: str) -> None:
    found = config_format({}, {"quantization": {"quant_algo": algo, "group_size": 24}})
    assert found is not None
    assert (found.base, found.group_size, found.source) == (base, 24, "hf_quant_config")


def test_excluded_modules_stay_in_bf16() -> None:
    names = ["model.layers.3.mlp.gate", "model.layers.4.mlp.gate", "lm_head", "re:.*x"]
    rules = tuple(
        FormatRule(pattern=pattern, format="bf16")
        for pattern in ("model.layers.#.mlp.gate", "lm_head", "re:.*x")
    )
    assert declared({**FP8, "modules_to_not_convert": names}).rules == rules
    collapsed = {"patterns": names}
    assert declared({**FP8, "modules_to_not_convert": collapsed}).rules == rules
    assert declared({**FP8, "modules_to_not_convert": str(names)}).rules == rules
    assert declared({"quant_method": "compressed-tensors", "ignore": names}).rules == rules
    assert declared({"quant_algo": "NVFP4", "exclude_modules": names}).rules == rules
    assert declared({"quant_algo": "NVFP4", "ignore": names}).rules == rules


def test_fp4_experts_of_an_fp8_checkpoint_come_first() -> None:
    found = declared({**FP8, "modules_to_not_convert": ["lm_head"]}, expert_dtype="fp4")
    assert [(rule.pattern, rule.format) for rule in found.rules] == [
        ("*mlp.experts*", "mxfp4"),
        ("lm_head", "bf16"),
    ]


def test_mixed_checkpoint_lists_what_is_quantised() -> None:
    layers = {"model.layers.0.mlp": {"quant_algo": "NVFP4"}, "model.layers.1.mlp": {}, "head": 1}
    found = declared({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["x"]})
    assert (found.base, found.scope) == ("bf16", "listed")
    # Layers of one pattern have one rule, the first; modules without an algorithm are FP8.
    assert [(rule.pattern, rule.format) for rule in found.rules] == [
        ("model.layers.#.mlp", "nvfp4"),
        ("head", "fp8"),
        ("x", "bf16"),
    ]


def test_mixed_checkpoint_on_an_fp8_base_lists_what_differs() -> None:
    quant = {
        "quant_algo": "MIXED_PRECISION", "weight_block_size": [1, 1], "ignore": ["x"],
        "quantized_layers": {
            "collapsed": True,
            "patterns": {"layers.#.mlp": {"spec": {"quant_algo": "NVFP4"}}},
        },
    }  # fmt: skip
    found = declared(quant)
    assert (found.base, found.scope) == ("fp8-block", "linears")
    assert [(rule.pattern, rule.format) for rule in found.rules] == [("layers.#.mlp", "nvfp4")]


def test_mixed_checkpoint_may_list_groups_with_targets() -> None:
    groups = {
        "a": {"weights": {"num_bits": 8}, "targets": ["q_proj", "Linear"]},
        "b": {"weights": {"num_bits": 4}, "targets": ["experts"]},
    }
    found = declared({"quant_algo": "MIXED_PRECISION", "config_groups": groups})
    assert [(rule.pattern, rule.format) for rule in found.rules] == [
        ("q_proj", "fp8"),
        ("experts", "nvfp4"),
    ]


@pytest.mark.parametrize(
    ("quant", "is_fp8"),
    [
        ({"kv_cache_quant_algo": "fp8"}, True),
        ({"kv_cache_quant_algo": "NVFP4"}, False),
        ({"kv_cache_scheme": {"num_bits": 8}}, True),
        ({"kv_cache_scheme": {"num_bits": 4}}, False),
        ({"kv_cache_scheme": "fp8"}, True),
        ({"kv_cache_scheme": None}, False),
    ],
)
def test_fp8_kv_cache_is_declared(quant: dict[str, Any], is_fp8: bool) -> None:
    assert declared({**FP8, **quant}).fp8_kv_cache is is_fp8
    assert declared({"quant_algo": "FP8", **quant}).fp8_kv_cache is is_fp8


@pytest.mark.parametrize(
    ("quant", "in_16_bits"),
    [
        ({}, False),
        ({"quant_algo": "W4A16_NVFP4"}, True),
        ({"config_groups": {"g": {"weights": {"num_bits": 4}}}}, True),
        ({"config_groups": {"g": {"weights": {"num_bits": 4}, "input_activations": {}}}}, True),
        ({"config_groups": {"g": {"weights": {"num_bits": 4}, "input_activations": {"a": 1}}}},
         False),
        ({"config_groups": {"g": {"weights": {"num_bits": 8}}}}, False),
        ({"config_groups": []}, False),
        ({"config_groups": {"g": None}}, False),
    ],
)  # fmt: skip
def test_four_bit_weights_may_be_multiplied_in_16_bits(
    quant: dict[str, Any], in_16_bits: bool
) -> None:
    assert multiplied_in_16_bits({"quantization_config": quant}, None) is in_16_bits


def test_modelopts_own_file_counts_for_16_bits() -> None:
    assert multiplied_in_16_bits({}, {"quantization": {"quant_algo": "W4A16"}})
    assert not multiplied_in_16_bits({}, {"quantization": {"quant_algo": "NVFP4"}})


# --- which format counts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "quant", "stated", "base", "source"),
    [
        ("o/m", None, None, "bf16", "no quantisation config"),
        ("o/m", None, "bf16", "bf16", "as told"),
        ("o/m", None, "fp8", "fp8", "as told"),
        ("o/m-AWQ", None, None, "int4-awq", "read from the name"),
        ("o/m", FP8, None, "fp8-block", "quantization_config"),
        ("o/m-FP8", FP8, None, "fp8-block", "quantization_config"),
        ("o/m", FP8, "fp8", "fp8-block", "quantization_config"),
        # The catalogue's config of another checkpoint does not hold for this name.
        ("o/m-AWQ", FP8, None, "int4-awq", "read from the name"),
        ("o/m", FP8, "nvfp4", "nvfp4", "as told"),
        ("o/m-BF16", FP8, None, "bf16", "no quantisation config"),
        ("o/m-int4", {"quant_method": "awq"}, None, "int4-awq", "quantization_config"),
    ],
)
def test_config_counts_unless_statement_or_name_contradict(
    name: str, quant: dict[str, Any] | None, stated: str | None, base: str, source: str
) -> None:
    config = {"quantization_config": quant} if quant else {}
    found = checkpoint_format(name, config, None, stated=stated, moe=False)
    assert (found.base, found.source) == (base, source)


@pytest.mark.parametrize(
    ("stated", "moe", "scope", "pattern"),
    [
        ("mxfp4", True, "experts", "mtp*"),
        ("mxfp4", False, "linears", "mtp*"),
        ("nvfp4", True, "experts", "mtp*"),
        ("nvfp4", False, "linears", "mtp*"),
        ("fp8", True, "linears", None),
    ],
)
def test_usual_coverage_of_a_stated_format(
    stated: str, moe: bool, scope: str, pattern: str | None
) -> None:
    found = checkpoint_format("o/m", {}, None, stated=stated, moe=moe)
    assert found.scope == scope
    assert [rule.pattern for rule in found.rules] == ([pattern] if pattern else [])
    assert (found.group_size, found.fp8_kv_cache) == (128, False)


def test_names_of_known_publishers_say_more() -> None:
    nvidia = checkpoint_format("nvidia/m-NVFP4", {}, None, stated=None, moe=False)
    assert nvidia.fp8_kv_cache
    kimi = checkpoint_format("o/Kimi-K9-INT4", {}, None, stated=None, moe=False)
    assert kimi.group_size == 32
    head = checkpoint_format("o/m-FP8-bf16-lm-head", {}, None, stated="fp8", moe=False)
    assert head.rules == (FormatRule(pattern="lm_head", format="bf16"),)
    assert [name_format(f"{o}/m-FP8") for o in ("Qwen", "zai-org", "MiniMaxAI", "o")] == [
        "fp8-block", "fp8-block", "fp8-block", "fp8",
    ]  # fmt: skip


def test_engine_quantises_plain_checkpoints_alone() -> None:
    plain = checkpoint_format("o/m", {}, None, stated=None, moe=False)
    online = online_format(plain, "w8a8_int8")
    assert (online.base, online.source) == ("fp8", "--quantization w8a8_int8")
    assert online_format(plain, "modelopt_fp4").base == "nvfp4"
    assert online_format(plain, "novel") == plain
    fp8 = declared(FP8)
    assert online_format(fp8, "mxfp4") == fp8


# --- modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "covers"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.#.mlp.gate", "layers.#.mlp.gate", True),
        ("model.language_model.layers.#.mlp.gate", "layers.#.mlp.gate", True),
        ("model.layers.#.mlp.gate", "layers.#.mlp.gate_proj", False),
        ("*mlp.gate*", "layers.#.mlp.gate_proj", True),
        ("*.gate.weight", "layers.#.mlp.gate", True),
        ("layers.#.self_attn.q_proj.linear", "layers.#.self_attn.q_proj", True),
        ("q_proj", "layers.#.self_attn.q_proj", True),
        ("proj", "layers.#.self_attn.q_proj", False),
        ("model.layers.#*", "mtp.fc", True),
        ("model.layers.#.*", "layers.#.mlp.dense", True),
        ("model.layers.#", "layers.#.mlp.gate", False),
        ("re:model.layers.\\d+.mlp", "layers.#.mlp.gate", True),
        ("re:.*self_attn", "layers.#.mlp.gate", False),
    ],
)
def test_pattern_covers_modules(pattern: str, name: str, covers: bool) -> None:
    checkpoint = CheckpointFormat(
        base="fp8", rules=(FormatRule(pattern=pattern, format="mxfp8"),), scope="linears",
        group_size=128, fp8_kv_cache=False, source="",
    )  # fmt: skip
    assert (format_of(group(name), checkpoint) == "mxfp8") is covers


@pytest.mark.parametrize(
    ("scope", "shard", "expected"),
    [
        ("linears", "attention", "fp8"), ("linears", "expert", "fp8"), ("linears", "head", "bf16"),
        ("linears", "vision", "bf16"), ("experts", "expert", "fp8"),
        ("experts", "attention", "bf16"), ("listed", "expert", "bf16"),
    ],
)  # fmt: skip
def test_scope_decides_without_a_rule(
    scope: Literal["linears", "experts", "listed"], shard: Shard, expected: str
) -> None:
    checkpoint = CheckpointFormat(
        base="fp8", rules=(), scope=scope, group_size=128, fp8_kv_cache=False, source=""
    )
    assert format_of(group("x", shard), checkpoint) == expected
    assert format_of(group("x", shard, quantizable=False), checkpoint) == "bf16"


def test_bytes_of_a_parameter_include_its_scales() -> None:
    awq, gptq = (
        declared({"quant_method": "awq"}),
        declared({"quant_method": "gptq", "group_size": 64}),
    )
    assert bytes_per_param(group("x"), awq) == 0.5 + 2 / 128 + 0.5 / 128
    assert bytes_per_param(group("x"), gptq) == 0.5 + 2 / 64 + 0.5 / 64
    assert bytes_per_param(group("x", quantizable=False), awq) == 2.0
    assert bytes_per_param(group("x", fixed_bytes_per_param=4.0), awq) == 4.0
    assert bytes_per_param(group("x"), declared(FP8)) == 1 + 4 / 16384
