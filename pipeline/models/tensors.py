"""The weights of a model as groups that share a shape rule, from its config.

Shapes follow the families' public layouts. Biases, norms and other vectors are left out: together
they are less than a thousandth. Nothing here knows how many ranks share a tensor.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.models.attention_tensors import (
    attention_tensors,
    group,
    layer_names,
    linear_attention_tensors,
    per_layer,
)
from pipeline.models.fields import ConfigFields
from schemas.plan import TensorGroup


def target_tensors(
    fields: ConfigFields, layers: int, attention_layers: int, state_layers: int
) -> tuple[TensorGroup, ...]:
    """Return all weights but the draft's."""
    groups = [*_vocabulary(fields), *attention_tensors(fields, layers, attention_layers)]
    groups += linear_attention_tensors(fields, state_layers)
    groups += _feed_forward(fields, layers)
    vision = vision_params(fields.whole_section("vision_config"))
    if vision:
        groups.append(group(("visual.blocks", "vision_tower", "model.visual"), vision, "vision"))
    return tuple(group for group in groups if group.params > 0)


def draft_tensors(fields: ConfigFields, layers: int, count: int) -> tuple[TensorGroup, ...]:
    """Return the MTP layers: each a block of the target's last kind and a joining projection."""
    hidden = fields.need("hidden_size")
    scale = count / max(layers, 1)
    attention = attention_tensors(fields, layers, layers, draft=True)
    blocks = [
        replace(
            group,
            names=tuple(f"mtp.{name}" for name in group.names),
            params=int(group.params * scale),
            layers=count,
        )
        for group in (*attention, *_draft_feed_forward(fields, layers))
    ]
    blocks.append(group(("mtp.fc",), 2 * hidden * hidden * count, "replicated", quantizable=False))
    return tuple(group for group in blocks if group.params > 0)


def vision_params(vision: Mapping[str, Any]) -> int:
    """Return the size of a multimodal model's encoder, under any of the names in configs."""
    hidden = int(vision.get("hidden_size") or vision.get("vt_hidden_size") or 0)
    depth = int(
        vision.get("num_hidden_layers")
        or vision.get("depth")
        or vision.get("vt_num_hidden_layers")
        or 0
    )
    if not hidden or not depth:
        return 0
    inner = int(vision.get("intermediate_size") or vision.get("vt_intermediate_size") or 4 * hidden)
    attention = 4 * hidden * int(vision.get("qkv_hidden_size") or hidden)
    merged = hidden * int(vision.get("spatial_merge_size") or 2) ** 2
    out = int(vision.get("out_hidden_size") or vision.get("text_hidden_size") or merged)
    merger = merged * merged + merged * out
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    patch = hidden * 3 * int(vision.get("patch_size") or 14) ** 2 * 2
    positions = hidden * int(vision.get("num_position_embeddings") or 0)
    return depth * (attention + 2 * hidden * inner) + mergers * merger + patch + positions


def _vocabulary(fields: ConfigFields) -> list[TensorGroup]:
    size = fields.need("vocab_size") * fields.need("hidden_size")
    groups = [group(("embed_tokens",), size, "embedding", quantizable=False)]
    tied = fields.get("tie_word_embeddings")
    if tied is None:
        tied = str(fields.get("model_type", default="")).startswith("gemma")
    if not tied:
        groups.append(group(("lm_head", "head"), size, "head"))
    return groups


# --- feed-forward -----------------------------------------------------------------------------


def _feed_forward(fields: ConfigFields, layers: int) -> list[TensorGroup]:
    experts = fields.number("n_routed_experts", "num_experts", "num_local_experts")
    dense_layers, moe_layers = _ffn_layers(fields, layers, experts)
    groups = []
    if dense_layers:
        groups.append(_dense(fields, dense_layers, has_experts=experts > 1))
    if experts > 1 and fields.get("enable_moe_block"):
        # Gemma-4 runs a dense block next to the experts in every layer.
        groups.append(_dense(fields, layers, has_experts=False))
    if moe_layers:
        groups += _experts(fields, moe_layers, experts)
    return groups


def _draft_feed_forward(fields: ConfigFields, layers: int) -> list[TensorGroup]:
    experts = fields.number("n_routed_experts", "num_experts", "num_local_experts")
    if experts > 1:
        return _experts(fields, layers, experts)
    return [_dense(fields, layers, has_experts=False)]


def _dense(fields: ConfigFields, layers: int, *, has_experts: bool) -> TensorGroup:
    hidden = fields.need("hidden_size")
    matrices = 2 if str(fields.get("mlp_hidden_act", default="")) == "relu2" else 3
    blocks = fields.kinds("block_configs")
    if blocks and not fields.get("intermediate_size"):
        inner_sum = sum(_pruned_inner(block, hidden) for block in blocks)
    else:
        inner_sum = layers * fields.need(
            "dense_intermediate_size", "intermediate_size_mlp", "intermediate_size"
        )
    names = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mixer.up_proj", "mixer.down_proj"]
    if has_experts:
        names.append("mlp.dense")
    return group(layer_names(*names), matrices * hidden * inner_sum, "dense_mlp", layers=layers)


def _pruned_inner(block: Mapping[str, Any], hidden: int) -> int:
    """Return the width of a pruned model's block, given as a multiple of the hidden size."""
    ffn = block.get("ffn") or {}
    if ffn.get("no_op") or not ffn.get("ffn_mult"):
        return 0
    wide = int(2 * float(ffn["ffn_mult"]) * hidden / 3)
    return -(-wide // 256) * 256


def _ffn_layers(fields: ConfigFields, layers: int, experts: int) -> tuple[int, int]:
    """Return how many layers have a dense block and how many have experts."""
    pattern = fields.get("hybrid_override_pattern")
    if pattern:
        return pattern.count("-"), pattern.count("E")
    kinds = [str(kind) for kind in fields.kinds("layers_block_type")]
    if kinds:
        return kinds.count("mlp"), kinds.count("moe")
    if experts <= 1:
        return layers, 0
    freq = fields.get("moe_layer_freq")
    if isinstance(freq, list):
        moe = sum(1 for flag in freq[:layers] if flag)
        return layers - moe, moe
    step = fields.number("interleave_moe_layer_step", "decoder_sparse_step", default=1)
    if step > 1:
        return layers - layers // step, layers // step
    dense = fields.number("first_k_dense_replace", "num_dense_layers")
    dense += len(fields.kinds("mlp_only_layers"))
    return dense, layers - dense


def _experts(fields: ConfigFields, layers: int, experts: int) -> list[TensorGroup]:
    hidden = fields.need("hidden_size")
    inner = fields.need("moe_intermediate_size", "intermediate_size")
    matrices = 2 if str(fields.get("mlp_hidden_act", default="")) == "relu2" else 3
    # Latent experts work in a narrower space, reached by one projection down and one up.
    latent = fields.number("moe_latent_size", "routed_expert_hidden_size")
    width = latent or hidden
    names = layer_names(
        "mlp.experts",
        "ffn.experts",
        "mixer.experts",
        "block_sparse_moe.experts",
        "feed_forward.experts",
    )
    if fields.get("enable_moe_block"):
        # The experts are next to the dense block: patterns for one must not match the other.
        names = layer_names("experts")
    groups = [
        group(names, layers * experts * matrices * width * inner, "expert", layers=layers),
        per_layer(
            layers, hidden * experts, "replicated",
            "mlp.gate", "mlp.router", "mixer.gate", "block_sparse_moe.gate",
            quantizable=False,
        ),
    ]  # fmt: skip
    if latent:
        groups.append(
            per_layer(
                layers, 2 * hidden * latent, "replicated", "mixer.latent_proj", "mlp.latent_proj"
            )
        )
    shared = _shared_inner(fields, inner)
    if shared:
        groups.append(
            per_layer(
                layers, matrices * hidden * shared, "shared_expert",
                "mlp.shared_experts", "mlp.shared_expert", "ffn.shared_experts",
                "mixer.shared_experts", "block_sparse_moe.shared_experts",
            )
        )  # fmt: skip
    return groups


def _shared_inner(fields: ConfigFields, inner: int) -> int:
    """Return the width of all shared experts together."""
    given = fields.number(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    )
    count = fields.number("n_shared_experts", "num_shared_experts")
    if given:
        return given
    if str(fields.get("model_type", default="")).startswith("llama4"):
        return inner
    return count * inner
