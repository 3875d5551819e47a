"""Facts and weights of small configs, worked out by hand, one for each kind of layer."""

from typing import Any

import pytest

from pipeline.models.facts import model_facts
from schemas.plan import (
    BlockSparseCache,
    BuiltInDraft,
    CompressedCache,
    Dense,
    GqaCache,
    LinearState,
    MlaCache,
    ModelFacts,
    Moe,
    NoDraft,
    NoState,
    SlidingCache,
    SparseMlaCache,
    Vision,
)

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64,
    "vocab_size": 100, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "q_lora_rank": 32,
}  # fmt: skip
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_shared_experts": 2,
}  # fmt: skip
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": [0, 4, 4, 128, 4],
    "head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 8, "o_groups": 2, "index_n_heads": 3,
    "index_head_dim": 5, "n_routed_experts": 6, "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
GDN = {
    "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 4,
    "linear_value_head_dim": 5, "full_attention_interval": 4,
}  # fmt: skip
KDA = {
    "linear_attn_config": {
        "kda_layers": [0, 1, 2], "full_attn_layers": [3], "num_heads": 4, "head_dim": 8,
    },
}  # fmt: skip


def facts(**changes: object) -> ModelFacts:
    """The facts of the base config with these fields."""
    return model_facts("m", BASE | changes)


def weights(model: ModelFacts) -> dict[str, int]:
    """Weights of each group by its first module."""
    return {group.names[0].removeprefix("layers.#."): group.params for group in model.tensors}


# --- attention --------------------------------------------------------------------------------


def test_grouped_query_attention() -> None:
    model = facts()
    assert model.cache == GqaCache(layers=4, kv_heads=2, head_dim=8, v_head_dim=8)
    assert (model.state, model.draft, model.ffn) == (
        NoState(),
        NoDraft(),
        Dense(intermediate_size=256),
    )
    assert (model.layers, model.hidden_size, model.heads, model.kv_heads) == (4, 64, 8, 2)
    assert (model.head_dim, model.vocab_size, model.context_length) == (8, 100, 512)
    assert (model.uses_mla, model.sparse_topk_tokens, model.nearest_family) == (False, 0, False)
    assert weights(model) == {
        "embed_tokens": 100 * 64,
        "lm_head": 100 * 64,
        "self_attn.q_proj": 4 * 64 * 8 * 8,
        "self_attn.k_proj": 4 * 64 * 2 * (8 + 8),
        "self_attn.o_proj": 4 * 8 * 8 * 64,
        "mlp.gate_proj": 3 * 64 * 4 * 256,
    }


def test_head_sizes_and_gates_are_read() -> None:
    model = facts(head_dim=16, v_head_dim=10, attn_output_gate=True, num_key_value_heads=None)
    assert model.cache == GqaCache(layers=4, kv_heads=8, head_dim=16, v_head_dim=10)
    found = weights(model)
    assert found["self_attn.q_proj"] == 4 * 64 * 8 * 16 * 2
    assert found["self_attn.k_proj"] == 4 * 64 * 8 * (16 + 10)
    assert found["self_attn.o_proj"] == 4 * 8 * 10 * 64


@pytest.mark.parametrize(
    ("changes", "has_head"),
    [
        ({}, True), ({"tie_word_embeddings": True}, False), ({"tie_word_embeddings": False}, True),
        ({"model_type": "gemma3"}, False),
        ({"model_type": "gemma3", "tie_word_embeddings": False}, True),
    ],
)  # fmt: skip
def test_tied_embeddings_have_no_head(changes: dict[str, Any], has_head: bool) -> None:
    assert ("lm_head" in weights(facts(**changes))) is has_head


def test_pruned_blocks_have_heads_and_widths_of_their_own() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 3.0}},
        {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True, "ffn_mult": 9}},
        {"attention": {"no_op": True, "n_heads_in_group": 8}, "ffn": {}},
        {"attention": None, "ffn": {"ffn_mult": 6.0}},
    ]
    model = facts(
        block_configs=blocks, num_key_value_heads=None, intermediate_size=None,
        architectures=["DeciLMForCausalLM"],
    )  # fmt: skip
    assert model.cache == GqaCache(layers=2, kv_heads=8 // 4, head_dim=8, v_head_dim=8)
    # 2 x 3 x 64 / 3 = 128 -> 256; 2 x 6 x 64 / 3 = 256
    assert weights(model)["mlp.gate_proj"] == 3 * 64 * (256 + 256)


def test_latent_attention() -> None:
    model = facts(**MLA)
    assert model.cache == MlaCache(layers=4, kv_lora_rank=16, rope_dim=4, expanded_dim=18)
    assert model.uses_mla
    found = weights(model)
    assert found["self_attn.q_a_proj"] == 4 * 64 * 32
    assert found["self_attn.kv_a_proj_with_mqa"] == 4 * 64 * (16 + 4)
    assert found["self_attn.q_b_proj"] == 4 * 32 * 8 * (8 + 4)
    assert found["self_attn.kv_b_proj"] == found["self_attn.absorbed"] == 4 * 16 * 8 * (8 + 6)
    assert found["self_attn.o_proj"] == 4 * 8 * 6 * 64
    gated = weights(facts(**MLA | {"q_lora_rank": None, "mla_use_output_gate": True}))
    assert "self_attn.q_a_proj" not in gated
    assert gated["self_attn.q_b_proj"] == 4 * 64 * 8 * (8 + 4)
    assert gated["self_attn.o_proj"] == 4 * (8 * 6 * 64 + 64 * 8 * 6)
    absorbed = next(group for group in model.tensors if "absorbed" in group.names[0])
    assert (absorbed.fixed_bytes_per_param, absorbed.layers) == (2.0, 4)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, 4),
        ({"index_topk_freq": 1}, 4),
        # Layers 0 and 1 count as 0, layers 2 and 3 as 1 and 2; every second selects.
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, 3),
        ({"index_topk_freq": 2}, 2),
        ({"indexer_types": ["full", "shared", "full", "shared", "full"]}, 2),
    ],
)
def test_sparse_latent_attention(changes: dict[str, Any], layers: int) -> None:
    model = facts(**MLA, index_n_heads=3, index_head_dim=5, index_topk=64, **changes)
    assert model.cache == SparseMlaCache(
        layers=4, kv_lora_rank=16, rope_dim=4, index_heads=3, index_head_dim=5, index_layers=layers
    )
    assert model.sparse_topk_tokens == 64
    assert weights(model)["self_attn.indexer"] == layers * (32 * 3 * 5 + 64 * (5 + 3))


def test_block_sparse_attention() -> None:
    sparse = {
        "use_sparse_attention": True, "sparse_index_dim": 16, "sparse_num_index_heads": 2,
        "sparse_attention_freq": [0, 1, 1, 1], "sparse_disable_index_value": [1, 1, 0, 0],
        "sparse_topk_blocks": 3, "sparse_block_size": 32,
    }  # fmt: skip
    model = facts(sparse_attention_config=sparse)
    assert model.cache == BlockSparseCache(
        layers=4, kv_heads=2, head_dim=8, index_dim=16, index_key_layers=1,
        index_key_value_layers=2,
    )  # fmt: skip
    assert model.sparse_topk_tokens == 3 * 32
    assert weights(model)["self_attn.indexer"] == 3 * 64 * 16 * (2 + 2)
    usual = facts(sparse_attention_config={"use_sparse_attention": True})
    assert usual.sparse_topk_tokens == 16 * 128
    assert usual.cache == BlockSparseCache(
        layers=4, kv_heads=2, head_dim=8, index_dim=128, index_key_layers=0,
        index_key_value_layers=4,
    )  # fmt: skip
    assert isinstance(facts(sparse_attention_config={}).cache, GqaCache)


def test_window_layers_have_heads_of_their_own() -> None:
    # Gemma-4 names the full layers' shape, and shares keys with values there.
    gemma = facts(
        architectures=["Gemma4ForConditionalGeneration"], sliding_window=32, head_dim=8,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], global_head_dim=16,
        num_global_key_value_heads=1, attention_k_eq_v=True,
    )  # fmt: skip
    assert gemma.cache == SlidingCache(
        full=GqaCache(layers=1, kv_heads=1, head_dim=16, v_head_dim=16),
        window=GqaCache(layers=3, kv_heads=2, head_dim=8, v_head_dim=8),
        window_tokens=32,
    )
    found = weights(gemma)
    assert found["self_attn.q_proj"] == 64 * 8 * (1 * 16 + 3 * 8)
    assert found["self_attn.k_proj"] == 64 * (1 * 1 * 16 * 1 + 3 * 2 * 8 * 2)
    assert found["self_attn.o_proj"] == 64 * 8 * (1 * 16 + 3 * 8)
    # MiMo-V2 names the window layers' shape.
    mimo = facts(
        architectures=["MiMoV2FlashForCausalLM"], sliding_window=32, head_dim=12, v_head_dim=8,
        hybrid_layer_pattern=[1, 0, 1, 1], swa_head_dim=10, swa_num_key_value_heads=4,
        swa_v_head_dim=6,
    )  # fmt: skip
    assert mimo.cache == SlidingCache(
        full=GqaCache(layers=1, kv_heads=2, head_dim=12, v_head_dim=8),
        window=GqaCache(layers=3, kv_heads=4, head_dim=10, v_head_dim=6),
        window_tokens=32,
    )
    found = weights(mimo)
    assert found["self_attn.k_proj"] == 64 * (1 * 2 * 12 * 2 + 3 * 4 * 10 * 2)
    assert found["self_attn.o_proj"] == 64 * 8 * (1 * 8 + 3 * 6)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        # Every fourth layer of Llama-4 is a full one.
        ({"attention_chunk_size": 8}, 3),
        ({"sliding_window": 8, "layer_types": ["chunked_attention", "full_attention"] * 2}, 2),
    ],
)
def test_window_layers_are_counted(changes: dict[str, Any], windows: int) -> None:
    model = facts(architectures=["Llama4ForConditionalGeneration"], **changes)
    assert isinstance(model.cache, SlidingCache)
    assert (model.cache.full.layers, model.cache.window.layers) == (4 - windows, windows)
    assert model.cache.window_tokens == 8


def test_windows_without_a_pool_keep_all_tokens() -> None:
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    assert facts(sliding_window=8, layer_types=layers).cache == GqaCache(
        layers=4, kv_heads=2, head_dim=8, v_head_dim=8
    )
    full = facts(architectures=["GptOssForCausalLM"], layer_types=["full_attention"] * 4)
    assert isinstance(full.cache, GqaCache)


def test_compressed_attention() -> None:
    model = facts(**V4)
    assert model.cache == CompressedCache(
        layers=4, listed_layers=5, c4_layers=2, c128_layers=1, window_tokens=128
    )
    assert model.sparse_topk_tokens == 2048
    found = weights(model)
    assert found["self_attn.wqkv_a"] == 4 * 64 * (32 + 16)
    assert found["self_attn.wq_b"] == 4 * 32 * 8 * 16
    assert found["self_attn.wo_a"] == 4 * 8 * 16 * 8
    assert found["self_attn.wo_b"] == 4 * 2 * 8 * 64
    assert found["attn.compressor"] == 64 * 16 * (4 * 2 + 2 * 1)
    assert found["attn.indexer"] == 2 * (32 * 3 * 5 + 64 * (4 * 5 + 3))
    assert found["hc"] == 4 * 2 * (2 + 4) * 4**2 * 64
    fixed = {group.names[0]: group.fixed_bytes_per_param for group in model.tensors}
    assert fixed["layers.#.self_attn.wo_a"] == fixed["layers.#.attn.indexer"] == 2.0
    assert (fixed["layers.#.hc"], fixed["layers.#.self_attn.wq_b"]) == (4.0, 0.0)


# --- linear attention -------------------------------------------------------------------------


def test_gated_delta_net() -> None:
    model = facts(**GDN)
    assert model.cache == GqaCache(layers=1, kv_heads=2, head_dim=8, v_head_dim=8)
    assert model.state == LinearState(
        kind="gdn", layers=3, heads=6, head_dim=5, state_dim=4, groups=3, conv_kernel=4,
        ssm_dtype="float32",
    )  # fmt: skip
    found = weights(model)
    assert found["self_attn.q_proj"] == 1 * 64 * 8 * 8
    assert found["linear_attn.in_proj_qkv"] == 3 * 64 * 2 * (3 * 4 + 6 * 5)
    assert found["linear_attn.in_proj_ba"] == 3 * 2 * 6 * 64
    assert found["linear_attn.out_proj"] == 3 * 6 * 5 * 64


def test_kimi_delta_attention() -> None:
    model = facts(**MLA, **KDA)
    assert model.cache == MlaCache(layers=1, kv_lora_rank=16, rope_dim=4, expanded_dim=18)
    assert model.state == LinearState(
        kind="kda", layers=3, heads=4, head_dim=8, state_dim=8, groups=4, conv_kernel=4,
        ssm_dtype="float32",
    )  # fmt: skip
    found = {group.names[0]: group.params for group in model.tensors if group.layers == 3}
    assert found["layers.#.self_attn.q_proj"] == 3 * 64 * 3 * 32
    assert found["layers.#.self_attn.g_proj"] == 3 * (2 * (64 * 8 + 8 * 32) + 64 * 4)
    assert found["layers.#.self_attn.o_proj"] == 3 * 32 * 64
    full_rank = {**KDA["linear_attn_config"], "use_full_rank_gate": True}
    gates = weights(facts(**MLA, linear_attn_config=full_rank))["self_attn.g_proj"]
    assert gates == 3 * (64 * 8 + 8 * 32 + 64 * 32 + 64 * 4)


def test_mamba2_layers_by_pattern() -> None:
    model = facts(
        architectures=["NemotronHForCausalLM"], hybrid_override_pattern="MM*-E",
        num_hidden_layers=None, mamba_num_heads=4, mamba_head_dim=8, n_groups=2,
        ssm_state_size=16, conv_kernel=3, mamba_ssm_cache_dtype="bfloat16", mlp_hidden_act="relu2",
    )  # fmt: skip
    assert model.layers == 5
    assert model.state == LinearState(
        kind="mamba2", layers=2, heads=4, head_dim=8, state_dim=16, groups=2, conv_kernel=3,
        ssm_dtype="bfloat16",
    )  # fmt: skip
    found = weights(model)
    assert found["self_attn.q_proj"] == 64 * 8 * 8
    assert found["mixer.in_proj"] == 2 * 64 * (2 * 32 + 2 * 2 * 16 + 4)
    assert found["mixer.out_proj"] == 2 * 32 * 64
    # One dense layer with two matrices.
    assert found["mlp.gate_proj"] == 2 * 64 * 256


def test_short_convolutions() -> None:
    model = facts(layer_types=["conv", "full_attention", "conv", "conv"])
    assert model.state == LinearState(
        kind="conv", layers=3, heads=1, head_dim=64, state_dim=0, groups=1, conv_kernel=3,
        ssm_dtype="float32",
    )  # fmt: skip
    assert model.cache == GqaCache(layers=1, kv_heads=2, head_dim=8, v_head_dim=8)
    assert weights(model)["conv.in_proj"] == 3 * 4 * 64 * 64


# --- experts, drafts, vision ------------------------------------------------------------------


def test_experts() -> None:
    model = facts(**EXPERTS)
    assert model.ffn == Moe(experts=6, experts_per_token=2, intermediate_size=32, input_size=64)
    found = weights(model)
    assert found["mlp.gate_proj"] == 3 * 64 * 1 * 256
    assert found["mlp.experts"] == 3 * 6 * 3 * 64 * 32
    assert found["mlp.gate"] == 3 * 64 * 6
    assert found["mlp.shared_experts"] == 3 * 3 * 64 * 2 * 32


@pytest.mark.parametrize(
    ("changes", "dense", "moe"),
    [
        ({"first_k_dense_replace": None}, 0, 4),
        ({"mlp_only_layers": [0, 2]}, 3, 1),
        ({"moe_layer_freq": [0, 1, 1, 0]}, 2, 2),
        ({"interleave_moe_layer_step": 2}, 2, 2),
        ({"decoder_sparse_step": 4}, 3, 1),
        ({"layers_block_type": ["attention", "mlp", "moe", "moe"]}, 1, 2),
    ],
)
def test_layers_with_experts(changes: dict[str, Any], dense: int, moe: int) -> None:
    found = weights(facts(**EXPERTS | changes))
    assert found.get("mlp.gate_proj", 0) == 3 * 64 * dense * 256
    assert found["mlp.gate"] == moe * 64 * 6


def test_width_of_shared_and_latent_experts() -> None:
    given = weights(facts(**EXPERTS, shared_expert_intermediate_size=40))
    assert given["mlp.shared_experts"] == 3 * 3 * 64 * 40
    llama = weights(facts(**EXPERTS, model_type="llama4_text"))
    assert llama["mlp.shared_experts"] == 3 * 3 * 64 * 32
    latent = facts(**EXPERTS, moe_latent_size=16)
    assert latent.ffn == Moe(experts=6, experts_per_token=2, intermediate_size=32, input_size=16)
    found = weights(latent)
    assert found["mlp.experts"] == 3 * 6 * 3 * 16 * 32
    assert found["mixer.latent_proj"] == 3 * 2 * 64 * 16


def test_dense_block_next_to_the_experts_is_in_every_layer() -> None:
    model = facts(**EXPERTS | {"enable_moe_block": True, "first_k_dense_replace": None})
    found = weights(model)
    assert found["mlp.gate_proj"] == 3 * 64 * 4 * 256
    assert found["experts"] == 4 * 6 * 3 * 64 * 32


def test_built_in_draft_is_a_layer_of_the_targets_kind() -> None:
    model = facts(**EXPERTS, num_nextn_predict_layers=2)
    assert isinstance(model.draft, BuiltInDraft)
    assert (model.draft.layers, model.draft.declared) == (2, True)
    found = {group.names[0]: group for group in model.draft.tensors}
    assert found["mtp.layers.#.self_attn.q_proj"].params == 2 * 64 * 8 * 8
    assert found["mtp.layers.#.self_attn.q_proj"].layers == 2
    assert found["mtp.layers.#.mlp.experts"].params == 2 * 6 * 3 * 64 * 32
    assert found["mtp.fc"].params == 2 * 64 * 64 * 2
    assert not found["mtp.fc"].quantizable
    undeclared = facts(mtp_num_hidden_layers=1).draft
    assert isinstance(undeclared, BuiltInDraft)
    assert (undeclared.layers, undeclared.declared) == (1, False)
    assert undeclared.tensors[-2].params == 3 * 64 * 256


def test_draft_of_compressed_attention_compresses_nothing() -> None:
    draft = facts(**V4).draft
    assert isinstance(draft, BuiltInDraft)
    names = [group.names for group in draft.tensors if "attn" in group.names[0]]
    assert names == [(f"mtp.layers.#.attn.{name}",) for name in ("wqkv_a", "wq_b", "wo_a", "wo_b")]


def test_vision_encoder() -> None:
    vision = {
        "hidden_size": 32, "depth": 2, "intermediate_size": 48, "spatial_merge_size": 2,
        "out_hidden_size": 64, "deepstack_visual_indexes": [1], "patch_size": 4,
        "num_position_embeddings": 10,
    }  # fmt: skip
    # blocks 2 x (4 x 32^2 + 2 x 32 x 48), mergers 2 x (128^2 + 128 x 64), patches and positions
    params = 2 * (4096 + 3072) + 2 * (16384 + 8192) + 32 * 3 * 16 * 2 + 320
    model = facts(vision_config=vision)
    # SGLang does not read `depth`.
    assert model.vision == Vision(hidden_size=32, layers_seen_by_sglang=24, params=params)
    assert weights(model)["visual.blocks"] == params
    # Merged 3 x 3: 288 wide.
    merged = facts(vision_config=vision | {"spatial_merge_size": 3}).vision
    assert isinstance(merged, Vision)
    assert merged.params - params == 2 * (288 * 288 + 288 * 64 - 16384 - 8192)
    for part in ({"hidden_size": 32}, {"depth": 2}):
        unsized = facts(vision_config=part).vision
        assert isinstance(unsized, Vision)
        assert unsized.params == 0
    assert facts(vision_config={"depth": 2}).vision == Vision(
        hidden_size=1024, layers_seen_by_sglang=24, params=0
    )
    kimi = facts(vision_config={"vt_hidden_size": 32, "vt_num_hidden_layers": 2})
    # 4 x 32 wide and merged 2 x 2: 128 -> 128; patches of 14
    params = 2 * (4096 + 2 * 32 * 128) + 2 * 128 * 128 + 32 * 3 * 196 * 2
    assert kimi.vision == Vision(hidden_size=32, layers_seen_by_sglang=2, params=params)


def test_unknown_architecture_is_planned_from_its_fields() -> None:
    model = facts(architectures=["NovelForCausalLM"])
    assert model.nearest_family
    [note] = model.assumptions
    assert note.startswith("architecture NovelForCausalLM is not known: planned as grouped-query")
    latent = facts(architectures=["NovelForCausalLM"], **MLA)
    assert "planned as latent attention" in latent.assumptions[0]
    assert facts().assumptions == ()
