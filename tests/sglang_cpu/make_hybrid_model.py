"""Write a tiny hybrid model with a draft head. Run in SGLang's environment.

usage: make_hybrid_model.py FOLDER

Laid out as Qwen3.6: three layers of gated delta rule to one of attention, and an MTP layer. Its
layers add nothing to what flows through them, as in the dense model. The draft head reads the same
table, except that it errs behind one word, so that some drafts are kept and some are not. Under MTP
a CPU engine takes the likeliest token, so the likeliest way through the table ends.
"""

import json
import math
import sys
from pathlib import Path

import torch
from make_model import (
    HIDDEN,
    INNER,
    TABLE,
    words_and_table,
    write_generation,
    write_tokenizer,
)
from safetensors.torch import save_file

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 4, 2, 32
RULE_KEY_HEADS, RULE_VALUE_HEADS, RULE_SIZE, CONVOLVED = 2, 4, 32, 4
LAYERS = ("linear_attention",) * 3 + ("full_attention",)
ENDING_TABLE = TABLE | {
    " it": {" once": 0.6, " twice": 0.4},
    " more": {" weighing": 0.4, "</think>": 0.6},
    " indeed": {" indeed": 0.4, "!": 0.6},
}
DRAFT_ERRS_BEHIND, AND_TAKES_IT_FOR = " weighing", "!"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder)
    size = math.ceil(len(ids) / 64) * 64
    write_config(folder, size, end=ids["<|im_end|>"])
    save_file(weights(ids, size), folder / "model.safetensors", metadata={"format": "pt"})
    print(f"a hybrid model of {len(ids)} tokens in {folder}")


def weights(ids: dict[str, int], size: int) -> dict[str, torch.Tensor]:
    # The norms of this family count from one.
    found = words_and_table(ids, size, ENDING_TABLE) | {"model.norm.weight": torch.zeros(HIDDEN)}
    for number, kind in enumerate(LAYERS):
        mixer = idle_rule() if kind == "linear_attention" else idle_attention()
        found |= under(f"model.layers.{number}.", mixer | idle_rest())
    found |= under("mtp.layers.0.", idle_attention() | idle_rest())
    found |= {
        "mtp.fc.weight": draft_reads_the_word_alone(ids),
        "mtp.norm.weight": torch.zeros(HIDDEN),
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(HIDDEN),
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(HIDDEN),
    }
    return {name: one.to(torch.bfloat16).contiguous() for name, one in found.items()}


def under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": one for name, one in tensors.items()}


def draft_reads_the_word_alone(ids: dict[str, int]) -> torch.Tensor:
    """Of the last word and the model's state it takes the word, once for another."""
    word = torch.eye(HIDDEN)
    word[:, ids[DRAFT_ERRS_BEHIND]] = word[:, ids[AND_TAKES_IT_FOR]]
    return torch.cat([word, torch.zeros(HIDDEN, HIDDEN)], dim=1)


def idle_rule() -> dict[str, torch.Tensor]:
    keys, values = RULE_KEY_HEADS * RULE_SIZE, RULE_VALUE_HEADS * RULE_SIZE
    return under(
        "linear_attn.",
        {
            "in_proj_qkv.weight": torch.randn(2 * keys + values, HIDDEN) * 0.02,
            "in_proj_z.weight": torch.randn(values, HIDDEN) * 0.02,
            "in_proj_b.weight": torch.randn(RULE_VALUE_HEADS, HIDDEN) * 0.02,
            "in_proj_a.weight": torch.randn(RULE_VALUE_HEADS, HIDDEN) * 0.02,
            "conv1d.weight": torch.randn(2 * keys + values, 1, CONVOLVED) * 0.1,
            "A_log": torch.zeros(RULE_VALUE_HEADS),
            "dt_bias": torch.ones(RULE_VALUE_HEADS),
            "norm.weight": torch.ones(RULE_SIZE),
            "out_proj.weight": torch.zeros(HIDDEN, values),
        },
    )


def idle_attention() -> dict[str, torch.Tensor]:
    """Beside each head's query stands the gate of its output."""
    return under(
        "self_attn.",
        {
            "q_proj.weight": torch.randn(2 * HEADS * HEAD_DIM, HIDDEN) * 0.02,
            "k_proj.weight": torch.randn(KEY_VALUE_HEADS * HEAD_DIM, HIDDEN) * 0.02,
            "v_proj.weight": torch.randn(KEY_VALUE_HEADS * HEAD_DIM, HIDDEN) * 0.02,
            "o_proj.weight": torch.zeros(HIDDEN, HEADS * HEAD_DIM),
            "q_norm.weight": torch.zeros(HEAD_DIM),
            "k_norm.weight": torch.zeros(HEAD_DIM),
        },
    )


def idle_rest() -> dict[str, torch.Tensor]:
    return {
        "input_layernorm.weight": torch.zeros(HIDDEN),
        "post_attention_layernorm.weight": torch.zeros(HIDDEN),
        "mlp.gate_proj.weight": torch.randn(INNER, HIDDEN) * 0.02,
        "mlp.up_proj.weight": torch.randn(INNER, HIDDEN) * 0.02,
        "mlp.down_proj.weight": torch.zeros(HIDDEN, INNER),
    }


def write_config(folder: Path, size: int, *, end: int) -> None:
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": len(LAYERS),
        "layer_types": LAYERS,
        "full_attention_interval": len(LAYERS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": RULE_KEY_HEADS,
        "linear_num_value_heads": RULE_VALUE_HEADS,
        "linear_key_head_dim": RULE_SIZE,
        "linear_value_head_dim": RULE_SIZE,
        "linear_conv_kernel_dim": CONVOLVED,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": end,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_generation(folder, end=end)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
