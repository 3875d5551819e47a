"""Facts of a model from its `config.json`: what each layer keeps, and how large it is.

Fields decide rather than model names wherever they can, so that a new model of a known family
needs no change here. Nothing here knows about cards and launches.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.errors import PlanError
from pipeline.models.attention_tensors import head_dim, index_layers, kv_heads, query_group
from pipeline.models.fields import ConfigFields
from pipeline.models.formats import checkpoint_format
from pipeline.models.quantisation import multiplied_in_16_bits
from pipeline.models.rotary import rotary_table_bytes
from pipeline.models.tensors import draft_tensors, target_tensors, vision_params
from schemas.plan import (
    BlockSparseCache,
    BuiltInDraft,
    CompressedCache,
    Dense,
    GqaCache,
    KvLayout,
    LinearState,
    MlaCache,
    ModelFacts,
    Moe,
    NoDraft,
    NoState,
    NoVision,
    SlidingCache,
    SparseMlaCache,
    StateLayout,
    Vision,
)

# Architectures whose window layers have a pool of their own; every other sliding-window model keeps
# all tokens in all layers. SGLang configs/model_config.py: is_hybrid_swa_model, 0.5.23.
_SLIDING_POOL_PREFIXES = (
    "Llama4", "GptOss", "MiMoV2", "Step3p", "Gemma4", "Laguna", "Mellum", "MuseGlimmer",
)  # fmt: skip

# Families whose layers this module describes; other architectures are planned from fields alone.
_KNOWN_PREFIXES = (
    *_SLIDING_POOL_PREFIXES, "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma", "Phi",
    "Deepseek", "Glm", "Kimi", "MiniMax", "NemotronH", "FalconH1", "GraniteMoeHybrid", "Lfm2",
    "MiMo", "Granite", "Olmo", "Bamba", "InternLM", "Baichuan", "DeciLM", "LongcatFlash",
)  # fmt: skip

# Raised by arithmetic on a field of the wrong type
_UNEXPECTED = (
    TypeError, ValueError, AttributeError, KeyError, IndexError, ZeroDivisionError, OverflowError,
)  # fmt: skip


def model_facts(
    name: str,
    config: Mapping[str, Any],
    *,
    hf_quant: Mapping[str, Any] | None = None,
    weights_format: str | None = None,
    checkpoint_bytes: int = 0,
) -> ModelFacts:
    """Return what the planner needs to know about a checkpoint. Raises PlanError.

    A config is another program's file: a field of any type may be wrong, and the error is one line.
    """
    try:
        return _facts(name, config, hf_quant, weights_format, checkpoint_bytes)
    except _UNEXPECTED as error:
        raise PlanError(
            f"the model config of {name} has a field of an unexpected kind: {error}"
        ) from error


def _facts(
    name: str,
    config: Mapping[str, Any],
    hf_quant: Mapping[str, Any] | None,
    weights_format: str | None,
    checkpoint_bytes: int,
) -> ModelFacts:
    fields = ConfigFields(config)
    architecture = fields.architecture()
    for needed in _needed_fields(architecture):
        fields.need(*needed)
    layers = _num_layers(fields)
    ffn = _ffn(fields)
    cache = _cache(fields, architecture, layers)
    state = _state(fields, layers)
    return ModelFacts(
        name=name,
        architecture=architecture,
        model_type=str(fields.get("model_type", default="")),
        layers=layers,
        hidden_size=fields.need("hidden_size"),
        vocab_size=fields.need("vocab_size"),
        heads=fields.need("num_attention_heads"),
        kv_heads=kv_heads(fields),
        head_dim=head_dim(fields),
        context_length=fields.need("max_position_embeddings", "seq_length", "max_seq_len"),
        uses_mla=isinstance(cache, MlaCache | SparseMlaCache),
        sparse_topk_tokens=_sparse_topk(fields, cache),
        cache=cache,
        state=state,
        vision=_vision(fields),
        ffn=ffn,
        draft=_draft(fields, layers),
        tensors=target_tensors(fields, layers, _full_layers(cache), _state_layers(state)),
        format=checkpoint_format(
            name, config, hf_quant, stated=weights_format, moe=isinstance(ffn, Moe)
        ),
        multiplied_in_16_bits=multiplied_in_16_bits(config, hf_quant),
        rotary_bytes=rotary_table_bytes(fields, architecture),
        checkpoint_bytes=checkpoint_bytes,
        nearest_family=not _is_known(architecture),
        assumptions=_assumptions(fields, architecture),
    )


_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_LINEAR_STATE = tuple(
    (f"linear_{field}",)
    for field in ("num_value_heads", "num_key_heads", "value_head_dim", "key_head_dim")
)
# Fields without which the model would pass for another, smaller one; the first match counts.
_NEEDED_BY_ARCHITECTURE = (
    ("DeepseekV32", (("kv_lora_rank",), _EXPERTS)),
    ("DeepseekV3", (("kv_lora_rank",), _EXPERTS)),
    ("DeepseekV4", (_EXPERTS,)),
    ("DeepseekV2", (("kv_lora_rank",),)),
    ("KimiK2", (("kv_lora_rank",), _EXPERTS)),
    ("Qwen3_5Moe", (*_LINEAR_STATE, _EXPERTS)),
    ("Qwen3_5", _LINEAR_STATE),
    ("Qwen3Next", (*_LINEAR_STATE, _EXPERTS)),
    ("Qwen3Moe", (_EXPERTS,)),
)


def _sparse_topk(fields: ConfigFields, cache: KvLayout) -> int:
    if isinstance(cache, BlockSparseCache):
        sparse = fields.section("sparse_attention_config")
        # The published MiniMax-M3 config: 16 blocks of 128 tokens.
        blocks = int(sparse.get("sparse_topk_blocks") or 16)
        return blocks * int(sparse.get("sparse_block_size") or 128)
    if isinstance(cache, SparseMlaCache | CompressedCache):
        return fields.number("index_topk", default=2048)
    return 0


def _needed_fields(architecture: str) -> tuple[tuple[str, ...], ...]:
    matching = (needed for name, needed in _NEEDED_BY_ARCHITECTURE if architecture.startswith(name))
    return next(matching, ())


def _num_layers(fields: ConfigFields) -> int:
    pattern = fields.get("hybrid_override_pattern")
    kinds = fields.kinds("layers_block_type")
    if pattern and not fields.get("num_hidden_layers"):
        return len(pattern)
    if kinds and not fields.get("num_hidden_layers"):
        return len(kinds)
    return fields.need("num_hidden_layers", "n_layer", "num_layers")


# --- the KV cache -----------------------------------------------------------------------------


def _cache(fields: ConfigFields, architecture: str, layers: int) -> KvLayout:
    if fields.kinds("compress_ratios"):
        return _compressed(fields, layers)
    if fields.get("kv_lora_rank"):
        return _latent(fields, layers)
    sparse = fields.section("sparse_attention_config")
    if sparse.get("use_sparse_attention"):
        return _block_sparse(fields, sparse, layers)
    if architecture.startswith(_SLIDING_POOL_PREFIXES):
        return _sliding(fields, layers)
    return _gqa(fields, _attention_layers(fields, layers))


def _gqa(fields: ConfigFields, layers: int) -> GqaCache:
    dim = head_dim(fields)
    return GqaCache(
        layers=layers,
        kv_heads=kv_heads(fields),
        head_dim=dim,
        v_head_dim=fields.number("v_head_dim", default=dim),
    )


def _attention_layers(fields: ConfigFields, layers: int) -> int:
    """Return how many layers keep keys and values; in a hybrid, the others keep a state."""
    pattern = fields.get("hybrid_override_pattern")
    if pattern:
        return int(pattern.count("*"))
    kinds = fields.kinds("layers_block_type") or fields.kinds("layer_types")
    if kinds:
        names = map(str, kinds)
        return sum(1 for name in names if "attention" in name and "linear" not in name)
    interval = fields.number("full_attention_interval")
    if interval and fields.get("linear_num_value_heads"):
        return layers // interval
    blocks = fields.kinds("block_configs")
    if blocks:
        return sum(1 for block in blocks if query_group(block))
    return layers


def _latent(fields: ConfigFields, layers: int) -> MlaCache | SparseMlaCache:
    linear = fields.section("linear_attn_config")
    if linear:
        layers = len(linear.get("full_attn_layers") or ()) or layers
    rank, rope = fields.need("kv_lora_rank"), fields.number("qk_rope_head_dim")
    if not fields.get("index_head_dim"):
        expanded = fields.number("qk_nope_head_dim") + rope + fields.number("v_head_dim")
        return MlaCache(layers=layers, kv_lora_rank=rank, rope_dim=rope, expanded_dim=expanded)
    return SparseMlaCache(
        layers=layers,
        kv_lora_rank=rank,
        rope_dim=rope,
        index_heads=fields.need("index_n_heads"),
        index_head_dim=fields.need("index_head_dim"),
        index_layers=index_layers(fields, layers),
    )


def _compressed(fields: ConfigFields, layers: int) -> CompressedCache:
    ratios = list(fields.kinds("compress_ratios"))[:layers]
    return CompressedCache(
        layers=layers,
        listed_layers=len(fields.kinds("compress_ratios")),
        c4_layers=ratios.count(4),
        c128_layers=ratios.count(128),
        window_tokens=fields.number("sliding_window", default=128),
    )


def _block_sparse(fields: ConfigFields, sparse: Mapping[str, Any], layers: int) -> BlockSparseCache:
    flags = list(sparse.get("sparse_attention_freq") or [1] * layers)
    key_only = list(sparse.get("sparse_disable_index_value") or [0] * layers)
    num_sparse = sum(1 for flag in flags if flag)
    num_key_only = sum(1 for flag, only in zip(flags, key_only, strict=False) if flag and only)
    return BlockSparseCache(
        layers=layers,
        kv_heads=kv_heads(fields),
        head_dim=head_dim(fields),
        index_dim=int(sparse.get("sparse_index_dim") or 128),
        index_key_layers=num_key_only,
        index_key_value_layers=num_sparse - num_key_only,
    )


def _sliding(fields: ConfigFields, layers: int) -> KvLayout:
    window_layers = _window_layers(fields, layers)
    window = fields.number("sliding_window", "sliding_window_size", "attention_chunk_size")
    if not window_layers or not window:
        return _gqa(fields, layers)
    dim, heads = head_dim(fields), kv_heads(fields)
    v_head_dim = fields.number("v_head_dim", default=dim)
    # Gemma-4 names the full layers' own shape, MiMo-V2 the window layers'.
    full_dim = fields.number("global_head_dim", default=dim)
    window_dim = fields.number("swa_head_dim", default=dim)
    return SlidingCache(
        full=GqaCache(
            layers=layers - window_layers,
            kv_heads=fields.number("num_global_key_value_heads", default=heads),
            head_dim=full_dim,
            v_head_dim=full_dim if full_dim != dim else v_head_dim,
        ),
        window=GqaCache(
            layers=window_layers,
            kv_heads=fields.number("swa_num_key_value_heads", default=heads),
            head_dim=window_dim,
            v_head_dim=fields.number("swa_v_head_dim", default=v_head_dim),
        ),
        window_tokens=window,
    )


def _window_layers(fields: ConfigFields, layers: int) -> int:
    kinds = fields.kinds("layer_types")
    if kinds:
        return sum(1 for kind in kinds[:layers] if str(kind).startswith(("sliding", "chunked")))
    pattern = fields.kinds("hybrid_layer_pattern")
    if pattern:
        return sum(1 for flag in pattern[:layers] if flag == 1)
    # In Llama-4, every fourth layer is a full one.
    # SGLang configs/model_config.py: get_hybrid_layer_ids.
    return layers - layers // 4


def _full_layers(cache: KvLayout) -> int:
    if isinstance(cache, SlidingCache):
        return cache.full.layers + cache.window.layers
    return cache.layers


def _state_layers(state: StateLayout) -> int:
    return state.layers if isinstance(state, LinearState) else 0


# --- recurrent state --------------------------------------------------------------------------


def _state(fields: ConfigFields, layers: int) -> StateLayout:
    state = _declared_state(fields, layers)
    if isinstance(state, LinearState) and state.layers <= 0:
        return NoState()
    return state


def _declared_state(fields: ConfigFields, layers: int) -> StateLayout:
    if fields.section("linear_attn_config"):
        return _kda(fields)
    if fields.get("linear_num_value_heads"):
        return _gdn(fields, layers)
    if fields.get("mamba_num_heads", "mamba_n_heads"):
        return _mamba2(fields, layers)
    kinds = [str(kind) for kind in fields.kinds("layer_types")]
    if "conv" in kinds:
        return _short_conv(fields, kinds.count("conv"))
    return NoState()


def _gdn(fields: ConfigFields, layers: int) -> LinearState:
    return LinearState(
        kind="gdn",
        layers=layers - _attention_layers(fields, layers),
        heads=fields.need("linear_num_value_heads"),
        head_dim=fields.need("linear_value_head_dim"),
        state_dim=fields.need("linear_key_head_dim"),
        groups=fields.need("linear_num_key_heads"),
        conv_kernel=fields.number("linear_conv_kernel_dim", default=4),
        ssm_dtype=str(fields.get("mamba_ssm_dtype", default="float32")),
    )


def _mamba2(fields: ConfigFields, layers: int) -> LinearState:
    pattern = fields.get("hybrid_override_pattern")
    kinds = fields.kinds("layers_block_type") or fields.kinds("layer_types")
    if pattern:
        count = pattern.count("M")
    elif kinds:
        count = sum(1 for kind in kinds if "mamba" in str(kind))
    else:
        # Every layer of Falcon-H1 has both kinds.
        count = layers
    return LinearState(
        kind="mamba2",
        layers=count,
        heads=fields.need("mamba_num_heads", "mamba_n_heads"),
        head_dim=fields.need("mamba_head_dim", "mamba_d_head"),
        state_dim=fields.need("ssm_state_size", "mamba_d_state"),
        groups=fields.number("n_groups", "mamba_n_groups", default=1),
        conv_kernel=fields.number("conv_kernel", "mamba_d_conv", default=4),
        ssm_dtype=str(fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default="float32")),
    )


def _kda(fields: ConfigFields) -> LinearState:
    linear = fields.section("linear_attn_config")
    for name in ("kda_layers", "num_heads", "head_dim"):
        if not linear.get(name):
            raise PlanError(f"the model config lacks 'linear_attn_config.{name}'")
    return LinearState(
        kind="kda",
        layers=len(linear["kda_layers"]),
        heads=int(linear["num_heads"]),
        head_dim=int(linear["head_dim"]),
        state_dim=int(linear["head_dim"]),
        groups=int(linear["num_heads"]),
        conv_kernel=int(linear.get("short_conv_kernel_size") or 4),
        # SGLang ignores this family's config for the state's type; the launch may set it.
        ssm_dtype="float32",
    )


def _short_conv(fields: ConfigFields, layers: int) -> LinearState:
    return LinearState(
        kind="conv",
        layers=layers,
        heads=1,
        head_dim=fields.need("hidden_size"),
        state_dim=0,
        groups=1,
        conv_kernel=fields.number("conv_L_cache", default=3),
        ssm_dtype="float32",
    )


# --- the rest ---------------------------------------------------------------------------------


def _ffn(fields: ConfigFields) -> Dense | Moe:
    experts = fields.number("n_routed_experts", "num_experts", "num_local_experts")
    if experts <= 1:
        return Dense(intermediate_size=fields.number("intermediate_size", default=0))
    per_token = fields.number(
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts",
        default=1,
    )  # fmt: skip
    return Moe(
        experts=experts,
        experts_per_token=per_token,
        intermediate_size=fields.need("moe_intermediate_size", "intermediate_size"),
        input_size=fields.number("moe_latent_size", "routed_expert_hidden_size")
        or fields.need("hidden_size"),
    )


def _vision(fields: ConfigFields) -> NoVision | Vision:
    vision = fields.whole_section("vision_config")
    if not vision:
        return NoVision()
    return Vision(
        # SGLang reads these two names alone and falls back to 1024 and 24.
        # arg_groups/memory_hook.py: adjust_mem_fraction_for_vlm, 0.5.23.
        # Kimi's config class maps its names onto them; Qwen's `depth` is ignored.
        hidden_size=int(vision.get("hidden_size") or vision.get("vt_hidden_size") or 1024),
        layers_seen_by_sglang=int(
            vision.get("num_hidden_layers") or vision.get("vt_num_hidden_layers") or 24
        ),
        params=vision_params(vision),
    )


def _draft(fields: ConfigFields, layers: int) -> NoDraft | BuiltInDraft:
    declared = fields.number("num_nextn_predict_layers")
    count = declared or fields.number("mtp_num_hidden_layers", "mtp_transformer_layers")
    if not count:
        return NoDraft()
    return BuiltInDraft(
        layers=count,
        declared=declared > 0,
        tensors=draft_tensors(fields, layers, count),
    )


def _is_known(architecture: str) -> bool:
    return architecture.startswith(_KNOWN_PREFIXES)


def _assumptions(fields: ConfigFields, architecture: str) -> tuple[str, ...]:
    if _is_known(architecture):
        return ()
    kind = "latent attention" if fields.get("kv_lora_rank") else "grouped-query attention"
    return (f"architecture {architecture} is not known: planned as {kind} from its config alone",)
