"""The weights of attention layers of every kind, from a model's config.

Shapes follow the families' public layouts. Nothing here knows how many ranks share a tensor.
"""

from pipeline.models.fields import ConfigFields
from schemas.plan import Shard, TensorGroup


def attention_tensors(
    fields: ConfigFields, layers: int, attention_layers: int, *, draft: bool = False
) -> list[TensorGroup]:
    """The attention of the layers that keep keys and values."""
    if fields.kinds("compress_ratios"):
        return _compressed_attention(fields, layers, draft=draft)
    if fields.get("kv_lora_rank"):
        return _latent_attention(fields, attention_layers)
    if fields.get("global_head_dim") or fields.get("swa_head_dim"):
        return _two_shape_attention(fields, layers)
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    dim = fields.number("head_dim", "attention_head_dim", default=hidden // heads)
    kv_heads = _kv_heads(fields)
    v_dim = fields.number("v_head_dim", default=dim)
    gate = 2 if fields.get("attn_output_gate") else 1
    return [
        group(
            layer_names("self_attn.q_proj", "mixer.q_proj", "attn.q_proj"),
            attention_layers * hidden * heads * dim * gate,
            "attention",
            layers=attention_layers,
        ),
        group(
            layer_names("self_attn.k_proj", "self_attn.v_proj", "mixer.k_proj", "mixer.v_proj"),
            attention_layers * hidden * kv_heads * (dim + v_dim),
            "kv",
            layers=attention_layers,
        ),
        group(
            layer_names("self_attn.o_proj", "mixer.o_proj", "attn.o_proj"),
            attention_layers * heads * v_dim * hidden,
            "attention",
            layers=attention_layers,
        ),
        *_block_sparse_indexer(fields, hidden),
    ]


def _kv_heads(fields: ConfigFields) -> int:
    blocks = fields.kinds("block_configs")
    heads = fields.need("num_attention_heads")
    if blocks and not fields.get("num_key_value_heads"):
        groups = [int((b.get("attention") or {}).get("n_heads_in_group") or 0) for b in blocks]
        return heads // max([group for group in groups if group], default=1)
    return fields.number("num_key_value_heads") or heads


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
    """Window layers and full layers with heads of their own (Gemma-4, MiMo-V2)."""
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    dim, kv_heads = fields.need("head_dim"), fields.need("num_key_value_heads")
    kinds = [str(kind) for kind in fields.kinds("layer_types")][:layers]
    pattern = list(fields.kinds("hybrid_layer_pattern"))[:layers]
    window = sum(1 for kind in kinds if kind.startswith("sliding")) or pattern.count(1)
    full = layers - window
    full_dim = fields.number("global_head_dim", default=dim)
    full_kv = fields.number("num_global_key_value_heads", default=kv_heads)
    window_dim = fields.number("swa_head_dim", default=dim)
    window_kv = fields.number("swa_num_key_value_heads", default=kv_heads)
    # With attention_k_eq_v the full layers store one matrix for keys and values.
    full_sides = 1 if fields.get("attention_k_eq_v") else 2
    query = hidden * heads * (full * full_dim + window * window_dim)
    key_value = hidden * (
        full * full_kv * full_dim * full_sides + window * window_kv * window_dim * 2
    )
    v_dim = fields.number("v_head_dim", default=full_dim)
    out = (
        hidden
        * heads
        * (full * v_dim + window * fields.number("swa_v_head_dim", default=window_dim))
    )
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
    query = q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
    gate = hidden * heads * v_dim if fields.get("mla_use_output_gate") else 0
    groups = [
        group(
            layer_names("self_attn.q_a_proj"),
            layers * hidden * q_rank,
            "replicated",
            layers=layers,
        ),
        group(
            layer_names("self_attn.kv_a_proj_with_mqa"),
            layers * hidden * (rank + rope),
            "replicated",
            layers=layers,
        ),
        group(
            layer_names("self_attn.q_b_proj", "self_attn.q_proj"),
            layers * query,
            "attention",
            layers=layers,
        ),
        group(
            layer_names("self_attn.kv_b_proj"),
            layers * rank * heads * (nope + v_dim),
            "attention",
            layers=layers,
        ),
        # The absorbed form keeps a bf16 copy of the up-projection beside the original.
        # SGLang models/deepseek_common/deepseek_weight_loader.py: post_load_weights, 0.5.23.
        group(
            layer_names("self_attn.absorbed"),
            layers * rank * heads * (nope + v_dim),
            "attention",
            layers=layers,
            fixed=2.0,
        ),
        group(
            layer_names("self_attn.o_proj"),
            layers * (heads * v_dim * hidden + gate),
            "attention",
            layers=layers,
        ),
    ]
    index_heads, index_dim = fields.number("index_n_heads"), fields.number("index_head_dim")
    if index_heads and index_dim:
        per_layer = q_rank * index_heads * index_dim + hidden * (index_dim + index_heads)
        count = index_layers(fields, layers)
        names = layer_names("self_attn.indexer")
        groups.append(group(names, count * per_layer, "replicated", layers=count))
    return groups


def index_layers(fields: ConfigFields, layers: int) -> int:
    """Layers that pick their own tokens; the others reuse the pick of a layer below.

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
    """DeepSeek-V4. SGLang models/deepseek_v4.py and layers/attention/dsv4, 0.5.23."""
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    dim, q_rank = fields.need("head_dim"), fields.need("q_lora_rank")
    o_rank, o_groups = fields.need("o_lora_rank"), fields.need("o_groups")
    ratios = list(fields.kinds("compress_ratios"))[:layers]
    c4, c128 = ratios.count(4), ratios.count(128)
    index_heads, index_dim = fields.need("index_n_heads"), fields.need("index_head_dim")
    # A compressor projects to a value and a gate; at ratio 4 its windows overlap, so twice that.
    compressors = hidden * dim * (4 * c4 + 2 * c128)
    indexer = c4 * (q_rank * index_heads * index_dim + hidden * (4 * index_dim + index_heads))
    connections = (
        layers
        * 2
        * (2 + fields.number("hc_mult", default=4))
        * fields.number("hc_mult", default=4) ** 2
        * hidden
    )
    return (
        [
            group(
                layer_names("self_attn.wqkv_a", "attn.wqkv_a"),
                layers * hidden * (q_rank + dim),
                "replicated",
                layers=layers,
            ),
            group(
                layer_names("self_attn.wq_b", "attn.wq_b"),
                layers * q_rank * heads * dim,
                "attention",
                layers=layers,
            ),
            group(
                layer_names("self_attn.wo_a", "attn.wo_a"),
                layers * heads * dim * o_rank,
                "attention",
                layers=layers,
                fixed=2.0,
            ),
            group(
                layer_names("self_attn.wo_b", "attn.wo_b"),
                layers * o_groups * o_rank * hidden,
                "attention",
                layers=layers,
            ),
            group(
                layer_names("attn.compressor"), compressors, "replicated", layers=layers, fixed=2.0
            ),
            group(layer_names("attn.indexer"), indexer, "replicated", layers=layers, fixed=2.0),
            group(layer_names("hc"), connections, "replicated", layers=layers, fixed=4.0),
        ]
        if not draft
        else [
            group(
                layer_names("attn.wqkv_a"),
                layers * hidden * (q_rank + dim),
                "replicated",
                layers=layers,
            ),
            group(
                layer_names("attn.wq_b"), layers * q_rank * heads * dim, "attention", layers=layers
            ),
            group(
                layer_names("attn.wo_a"),
                layers * heads * dim * o_rank,
                "attention",
                layers=layers,
                fixed=2.0,
            ),
            group(
                layer_names("attn.wo_b"),
                layers * o_groups * o_rank * hidden,
                "attention",
                layers=layers,
            ),
        ]
    )


def linear_attention_tensors(fields: ConfigFields, layers: int) -> list[TensorGroup]:
    """The layers that keep a recurrent state."""
    if not layers:
        return []
    hidden = fields.need("hidden_size")
    if fields.section("linear_attn_config"):
        return _kda(fields, hidden, layers)
    if fields.get("linear_num_value_heads"):
        key = fields.need("linear_num_key_heads") * fields.need("linear_key_head_dim")
        value = fields.need("linear_num_value_heads") * fields.need("linear_value_head_dim")
        small = 2 * fields.need("linear_num_value_heads") * hidden
        return [
            group(
                layer_names("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
                layers * hidden * 2 * (key + value),
                "attention",
                layers=layers,
            ),
            group(
                layer_names("linear_attn.in_proj_ba"),
                layers * small,
                "attention",
                layers=layers,
                quantizable=False,
            ),
            group(
                layer_names("linear_attn.out_proj"),
                layers * value * hidden,
                "attention",
                layers=layers,
            ),
        ]
    if fields.get("mamba_num_heads", "mamba_n_heads"):
        heads = fields.need("mamba_num_heads", "mamba_n_heads")
        inner = heads * fields.need("mamba_head_dim", "mamba_d_head")
        groups = fields.number("n_groups", "mamba_n_groups", default=1)
        state = fields.need("ssm_state_size", "mamba_d_state")
        into = hidden * (2 * inner + 2 * groups * state + heads)
        return [
            group(layer_names("mixer.in_proj"), layers * into, "attention", layers=layers),
            group(
                layer_names("mixer.out_proj"), layers * inner * hidden, "attention", layers=layers
            ),
        ]
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
        group(
            layer_names("self_attn.q_proj"),
            layers * hidden * 3 * width,
            "attention",
            layers=layers,
        ),
        group(
            layer_names("self_attn.g_proj"),
            layers * (gates + hidden * heads),
            "attention",
            layers=layers,
        ),
        group(layer_names("self_attn.o_proj"), layers * width * hidden, "attention", layers=layers),
    ]


def group(
    names: tuple[str, ...],
    params: int,
    shard: Shard,
    *,
    layers: int = 1,
    quantizable: bool = True,
    fixed: float = 0.0,
) -> TensorGroup:
    """A group of weights that share a shape rule."""
    return TensorGroup(
        names=names,
        params=params,
        shard=shard,
        layers=layers,
        quantizable=quantizable,
        fixed_bytes_per_param=fixed,
    )


def layer_names(*modules: str) -> tuple[str, ...]:
    """Names of modules that stand in every layer."""
    return tuple(f"layers.#.{module}" for module in modules)
