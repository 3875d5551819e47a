"""The weights of attention layers of every kind, from a model's config.

Shapes follow the families' public layouts. Nothing here knows how many ranks share a tensor.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.models.fields import ConfigFields
from schemas.plan import Shard, TensorGroup


def attention_tensors(
    fields: ConfigFields, layers: int, attention_layers: int, *, draft: bool = False
) -> list[TensorGroup]:
    """Return the attention weights of the layers that keep keys and values."""
    if fields.kinds("compress_ratios"):
        return _compressed_attention(fields, layers, draft=draft)
    if fields.get("kv_lora_rank"):
        return _latent_attention(fields, attention_layers)
    if fields.get("global_head_dim") or fields.get("swa_head_dim"):
        return _two_shape_attention(fields, layers)
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    dim = head_dim(fields)
    v_dim = fields.number("v_head_dim", default=dim)
    gate = 2 if fields.get("attn_output_gate") else 1
    return [
        per_layer(
            attention_layers, hidden * heads * dim * gate, "attention",
            "self_attn.q_proj", "mixer.q_proj", "attn.q_proj",
        ),
        per_layer(
            attention_layers, hidden * kv_heads(fields) * (dim + v_dim), "kv",
            "self_attn.k_proj", "self_attn.v_proj", "mixer.k_proj", "mixer.v_proj",
        ),
        per_layer(
            attention_layers, heads * v_dim * hidden, "attention",
            "self_attn.o_proj", "mixer.o_proj", "attn.o_proj",
        ),
        *_block_sparse_indexer(fields, hidden),
    ]  # fmt: skip


def head_dim(fields: ConfigFields) -> int:
    """Return the width of one attention head."""
    given = fields.number("head_dim", "attention_head_dim")
    return given or fields.need("hidden_size") // fields.need("num_attention_heads")


def kv_heads(fields: ConfigFields) -> int:
    """Return the number of KV heads; in a pruned model, the fewest of any layer."""
    heads, blocks = fields.need("num_attention_heads"), fields.kinds("block_configs")
    if blocks and not fields.get("num_key_value_heads"):
        return heads // max(filter(None, map(query_group, blocks)), default=1)
    return fields.number("num_key_value_heads") or heads


def query_group(block: Mapping[str, Any]) -> int:
    """Return the query heads per KV head of a pruned model's block; 0 without attention."""
    attention = block.get("attention") or {}
    return 0 if attention.get("no_op") else int(attention.get("n_heads_in_group") or 0)


def _block_sparse_indexer(fields: ConfigFields, hidden: int) -> list[TensorGroup]:
    sparse = fields.section("sparse_attention_config")
    if not sparse.get("use_sparse_attention"):
        return []
    width = int(sparse.get("sparse_index_dim") or 128)
    heads = int(sparse.get("sparse_num_index_heads") or 4)
    layers = sum(1 for flag in sparse.get("sparse_attention_freq") or () if flag)
    names = layer_names("self_attn.indexer")
    return [group(names, layers * hidden * width * (heads + 2), "replicated", quantizable=False)]


def _two_shape_attention(fields: ConfigFields, layers: int) -> list[TensorGroup]:
    """Return the weights of window and full layers with different heads (Gemma-4, MiMo-V2)."""
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    dim, shared_kv = fields.need("head_dim"), fields.need("num_key_value_heads")
    kinds = [str(kind) for kind in fields.kinds("layer_types")][:layers]
    pattern = list(fields.kinds("hybrid_layer_pattern"))[:layers]
    window = sum(1 for kind in kinds if kind.startswith("sliding")) or pattern.count(1)
    full = layers - window
    full_dim = fields.number("global_head_dim", default=dim)
    full_kv = fields.number("num_global_key_value_heads", default=shared_kv)
    window_dim = fields.number("swa_head_dim", default=dim)
    window_kv = fields.number("swa_num_key_value_heads", default=shared_kv)
    full_v_dim = fields.number("v_head_dim", default=full_dim)
    window_v_dim = fields.number("swa_v_head_dim", default=window_dim)
    # With attention_k_eq_v the full layers store one matrix for keys and values.
    full_matrices = 1 if fields.get("attention_k_eq_v") else 2
    query = hidden * heads * (full * full_dim + window * window_dim)
    key_value = hidden * (
        full * full_kv * full_dim * full_matrices + window * window_kv * window_dim * 2
    )
    out = hidden * heads * (full * full_v_dim + window * window_v_dim)
    return [
        group(layer_names("self_attn.q_proj"), query, "attention", layers=layers),
        group(layer_names("self_attn.k_proj", "self_attn.v_proj"), key_value, "kv", layers=layers),
        group(layer_names("self_attn.o_proj"), out, "attention", layers=layers),
    ]


def _latent_attention(fields: ConfigFields, layers: int) -> list[TensorGroup]:
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    rank, rope = fields.need("kv_lora_rank"), fields.number("qk_rope_head_dim")
    nope = fields.number("qk_nope_head_dim", default=128)
    v_dim = fields.number("v_head_dim", default=128)
    q_rank = fields.number("q_lora_rank")
    query = (q_rank or hidden) * heads * (nope + rope)
    gate = hidden * heads * v_dim if fields.get("mla_use_output_gate") else 0
    up = rank * heads * (nope + v_dim)
    groups = [
        per_layer(layers, hidden * q_rank, "replicated", "self_attn.q_a_proj"),
        per_layer(layers, hidden * (rank + rope), "replicated", "self_attn.kv_a_proj_with_mqa"),
        per_layer(layers, query, "attention", "self_attn.q_b_proj", "self_attn.q_proj"),
        per_layer(layers, up, "attention", "self_attn.kv_b_proj"),
        # The absorbed form keeps a bf16 copy of the up-projection next to the original.
        # SGLang models/deepseek_common/deepseek_weight_loader.py: post_load_weights, 0.5.23.
        per_layer(layers, up, "attention", "self_attn.absorbed", fixed=2.0),
        per_layer(layers, heads * v_dim * hidden + gate, "attention", "self_attn.o_proj"),
    ]
    index_heads, index_dim = fields.number("index_n_heads"), fields.number("index_head_dim")
    if index_heads and index_dim:
        index = q_rank * index_heads * index_dim + hidden * (index_dim + index_heads)
        count = index_layers(fields, layers)
        groups.append(per_layer(count, index, "replicated", "self_attn.indexer"))
    return groups


def index_layers(fields: ConfigFields, layers: int) -> int:
    """Return how many layers select their own tokens; the others reuse a selection from below.

    SGLang configs/model_config.py: dsa_layer_skips_topk, 0.5.23.
    """
    kinds = fields.kinds("indexer_types")
    if kinds:
        return sum(1 for kind in kinds[:layers] if kind != "shared")
    every = fields.number("index_topk_freq", default=1)
    if every <= 1:
        return layers
    offset = fields.number("index_skip_topk_offset", default=1)
    return sum(1 for layer in range(layers) if max(layer - offset + 1, 0) % every == 0)


def _compressed_attention(fields: ConfigFields, layers: int, *, draft: bool) -> list[TensorGroup]:
    """Return DeepSeek-V4's weights. SGLang models/deepseek_v4.py, layers/attention/dsv4, 0.5.23."""
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    dim, q_rank = fields.need("head_dim"), fields.need("q_lora_rank")
    o_rank, o_groups = fields.need("o_lora_rank"), fields.need("o_groups")
    blocks = ("attn",) if draft else ("self_attn", "attn")

    def projection(name: str, params: int, shard: Shard, *, fixed: float = 0.0) -> TensorGroup:
        return per_layer(layers, params, shard, *(f"{one}.{name}" for one in blocks), fixed=fixed)

    groups = [
        projection("wqkv_a", hidden * (q_rank + dim), "replicated"),
        projection("wq_b", q_rank * heads * dim, "attention"),
        projection("wo_a", heads * dim * o_rank, "attention", fixed=2.0),
        projection("wo_b", o_groups * o_rank * hidden, "attention"),
    ]
    return groups if draft else [*groups, *_compression(fields, layers)]


def _compression(fields: ConfigFields, layers: int) -> list[TensorGroup]:
    hidden, dim, q_rank = map(fields.need, ("hidden_size", "head_dim", "q_lora_rank"))
    ratios = list(fields.kinds("compress_ratios"))[:layers]
    c4, c128 = ratios.count(4), ratios.count(128)
    index_heads, index_dim = fields.need("index_n_heads"), fields.need("index_head_dim")
    streams = fields.number("hc_mult", default=4)
    # A compressor projects to a value and a gate; at ratio 4 its windows overlap, so twice that.
    compressors = hidden * dim * (4 * c4 + 2 * c128)
    indexer = c4 * (q_rank * index_heads * index_dim + hidden * (4 * index_dim + index_heads))
    connections = layers * 2 * (2 + streams) * streams**2 * hidden
    return [
        group(layer_names("attn.compressor"), compressors, "replicated", layers=layers, fixed=2.0),
        group(layer_names("attn.indexer"), indexer, "replicated", layers=layers, fixed=2.0),
        group(layer_names("hc"), connections, "replicated", layers=layers, fixed=4.0),
    ]


# --- linear attention -------------------------------------------------------------------------


def linear_attention_tensors(fields: ConfigFields, layers: int) -> list[TensorGroup]:
    """Return the weights of the layers that keep a recurrent state."""
    if not layers:
        return []
    hidden = fields.need("hidden_size")
    if fields.section("linear_attn_config"):
        return _kda(fields, hidden, layers)
    if fields.get("linear_num_value_heads"):
        return _gated_delta_net(fields, hidden, layers)
    if fields.get("mamba_num_heads", "mamba_n_heads"):
        return _mamba2(fields, hidden, layers)
    # A short convolution: one projection to three streams and one back.
    return [group(layer_names("conv.in_proj"), layers * 4 * hidden * hidden, "attention")]


def _kda(fields: ConfigFields, hidden: int, layers: int) -> list[TensorGroup]:
    linear = fields.section("linear_attn_config")
    heads, dim = int(linear["num_heads"]), int(linear["head_dim"])
    width = heads * dim
    gates = 2 * (hidden * dim + dim * width)
    if linear.get("use_full_rank_gate"):
        gates = hidden * dim + dim * width + hidden * width
    return [
        per_layer(layers, hidden * 3 * width, "attention", "self_attn.q_proj"),
        per_layer(layers, gates + hidden * heads, "attention", "self_attn.g_proj"),
        per_layer(layers, width * hidden, "attention", "self_attn.o_proj"),
    ]


def _gated_delta_net(fields: ConfigFields, hidden: int, layers: int) -> list[TensorGroup]:
    heads = fields.need("linear_num_value_heads")
    key = fields.need("linear_num_key_heads") * fields.need("linear_key_head_dim")
    value = heads * fields.need("linear_value_head_dim")
    return [
        per_layer(
            layers, hidden * 2 * (key + value), "attention",
            "linear_attn.in_proj_qkv", "linear_attn.in_proj_z",
        ),
        per_layer(
            layers, 2 * heads * hidden, "attention", "linear_attn.in_proj_ba", quantizable=False
        ),
        per_layer(layers, value * hidden, "attention", "linear_attn.out_proj"),
    ]  # fmt: skip


def _mamba2(fields: ConfigFields, hidden: int, layers: int) -> list[TensorGroup]:
    heads = fields.need("mamba_num_heads", "mamba_n_heads")
    inner = heads * fields.need("mamba_head_dim", "mamba_d_head")
    groups = fields.number("n_groups", "mamba_n_groups", default=1)
    state = fields.need("ssm_state_size", "mamba_d_state")
    into = hidden * (2 * inner + 2 * groups * state + heads)
    return [
        per_layer(layers, into, "attention", "mixer.in_proj"),
        per_layer(layers, inner * hidden, "attention", "mixer.out_proj"),
    ]


# --- groups -----------------------------------------------------------------------------------


def per_layer(
    layers: int,
    params: int,
    shard: Shard,
    *modules: str,
    quantizable: bool = True,
    fixed: float = 0.0,
) -> TensorGroup:
    """Return a group of modules that have `params` weights in each of `layers` layers."""
    names = layer_names(*modules)
    return group(names, layers * params, shard, layers=layers, quantizable=quantizable, fixed=fixed)


def group(
    names: tuple[str, ...],
    params: int,
    shard: Shard,
    *,
    layers: int = 1,
    quantizable: bool = True,
    fixed: float = 0.0,
) -> TensorGroup:
    """Return a group of weights that share a shape rule."""
    return TensorGroup(
        names=names,
        params=params,
        shard=shard,
        layers=layers,
        quantizable=quantizable,
        fixed_bytes_per_param=fixed,
    )


def layer_names(*modules: str) -> tuple[str, ...]:
    """Return the names of modules that every layer has."""
    return tuple(f"layers.#.{module}" for module in modules)
