"""Rotary tables: positions x dimensions x 4 bytes for each distinct one."""

from typing import Any

import pytest

from pipeline.models.fields import ConfigFields
from pipeline.models.rotary import rotary_table_bytes
from schemas.units import MIB

_HEADS = {"num_attention_heads": 32, "hidden_size": 4096, "head_dim": 128}
_YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
_GEMMA_4 = {
    "head_dim": 256,
    "global_head_dim": 512,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("positions", "more", "expected_mib"),
    [
        # Qwen3: 40,960 x 128 x 4 B
        (40_960, {"rope_theta": 1_000_000}, 20),
        # Qwen3.5: a quarter of 256 dimensions
        (262_144, {"head_dim": 256, "rope_parameters": {
            "rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}}, 64),
        # MiniMax-M2 names the dimensions
        (196_608, {"rope_theta": 5e6, "rotary_dim": 64}, 48),
        # Llama-4-Scout: 5 GiB
        (10_485_760, {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 16}},
         5120),
        # Gemma-4: 0.25 and 0.50 GiB, whatever part of a full layer's dimensions is turned
        (262_144, _GEMMA_4, 768),
        # Gemma-3: two bases
        (131_072, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}, 128),
        # DeepSeek-R1: 40 x 4,096 positions of 64 dimensions
        (163_840, {"qk_rope_head_dim": 64, "rope_theta": 1e4, "rope_scaling": _YARN}, 40),
        # YaRN reaches further than the config's own positions: 4 x 32,768
        (40_960, {"rope_theta": 1e6, "rope_scaling": {
            **_YARN, "factor": 4.0, "original_max_position_embeddings": 32_768}}, 64),
        # DeepSeek-V4: compressed layers have another base
        (1_048_576, {"qk_rope_head_dim": 64, "rope_theta": 1e4, "compress_rope_theta": 1.6e5}, 512),
        # no positions at all
        (262_144, {}, 0),
    ],
)  # fmt: skip
def test_tables_are_positions_by_dimensions(
    positions: int, more: dict[str, Any], expected_mib: int
) -> None:
    fields = ConfigFields({**_HEADS, "max_position_embeddings": positions, **more})
    assert rotary_table_bytes(fields, "SomeForCausalLM") == expected_mib * MIB


def test_nemotron_h_turns_nothing() -> None:
    fields = ConfigFields({**_HEADS, "max_position_embeddings": 262_144, "rope_theta": 10_000})
    assert rotary_table_bytes(fields, "NemotronHForCausalLM") == 0
