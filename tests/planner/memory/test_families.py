"""Families, formats and parallel layouts: bytes worked out by hand."""

import contextlib
from typing import Any

import pytest

from pipeline.errors import PlanError
from pipeline.models.facts import model_facts
from pipeline.models.files import catalogue_names, load_model
from pipeline.models.formats import bytes_per_param, checkpoint_format, name_format
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.plan import RefusedPlan, plan_launch
from pipeline.planner.sglang.flags import parse_launch_line
from schemas.plan import LaunchPlan, LinearState, ModelFacts, Shard, SlidingCache, TensorGroup
from schemas.units import GIB


def facts(name: str, weights_format: str | None = None) -> ModelFacts:
    """A model of the catalogue."""
    return load_model(name, weights_format=weights_format)


def params(model: ModelFacts) -> float:
    """Parameters in billions, copies made after loading left out."""
    return sum(g.params for g in model.tensors if "absorbed" not in g.names[0]) / 1e9


def plan(model: ModelFacts, line: str = "", gpu: str = "h200", version: str = "") -> LaunchPlan:
    """The forecast of a launch that SGLang does not refuse."""
    made = plan_launch(model, gpu_named(gpu), parse_launch_line(line.split()), version=version)
    assert isinstance(made, LaunchPlan), made
    return made


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-32B", 32.76),  # public counts throughout
        ("Qwen/Qwen3-235B-A22B", 235.1),
        ("meta-llama/Meta-Llama-3.1-405B", 405.9),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7),
        ("deepseek-ai/DeepSeek-V3", 671.0),
        ("moonshotai/Kimi-K2-Instruct", 1026.4),
        ("deepseek-ai/DeepSeek-V4-Flash", 284.3),
        ("openai/gpt-oss-120b", 116.8),
        ("Qwen/Qwen3.5-397B-A17B", 396.8),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 120.7),
        ("zai-org/GLM-4.6", 352.8),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 107.8),
    ],
)
def test_parameters_agree_with_the_published_count(name: str, billions: float) -> None:
    assert params(facts(name)) == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", catalogue_names())
def test_every_model_of_the_catalogue_has_a_plan(name: str) -> None:
    made = plan_launch(
        facts(name),
        gpu_named("b300"),
        parse_launch_line(["--tp", "8"]),
        version="0.5.23",
    )
    if isinstance(made, RefusedPlan):
        assert "divi" in made.message  # heads that eight ranks do not divide
    else:
        assert sum(row.bytes for row in made.budget.rows) == made.budget.total_bytes


@pytest.mark.parametrize(
    ("name", "line", "cost"),
    [
        # 2 x 8 heads x 128 x 64 layers x 2 B
        ("Qwen/Qwen3-32B", "--tp 1", 262_144),
        ("Qwen/Qwen3-32B", "--tp 4", 65_536),
        # heads are repeated, never split: 8 heads on 16 ranks cost one head a rank
        ("Qwen/Qwen3-32B", "--tp 16", 2 * 128 * 64 * 2),
        # 576 x 61 x 2 B, whatever the ranks
        ("moonshotai/Kimi-K2-Instruct", "--tp 8", 70_272),
        ("moonshotai/Kimi-K2-Instruct", "--tp 16", 70_272),
        # bf16 on Hopper: (576 x 2 + 132) x 61
        ("deepseek-ai/DeepSeek-V3.2", "--tp 8", 78_324),
        # the scaled fp8 layout of Hopper: (656 + 132) x 61
        ("deepseek-ai/DeepSeek-V3.2", "--tp 8 --kv-cache-dtype fp8_e4m3", 48_068),
        # 2048 B x 18 full layers + 0.8 x 2048 x 18 window layers
        ("openai/gpt-oss-120b", "--tp 1", 66_355.2),
        ("openai/gpt-oss-120b", "--tp 1 --swa-full-tokens-ratio 0.5", 2048 * 18 * 1.5),
        # only the 16 full layers of 64 keep KV
        ("Qwen/Qwen3.6-27B", "--tp 1", 65_536),
        ("Qwen/Qwen3.6-27B", "--tp 1 --kv-cache-dtype fp8_e4m3", 32_768),
    ],
)
def test_token_cost(name: str, line: str, cost: float) -> None:
    assert plan(facts(name), line).kv_bytes_per_token == pytest.approx(cost)


def test_sparse_latent_is_fp8_on_blackwell() -> None:
    # (576 + 132) x 61
    made = plan(facts("deepseek-ai/DeepSeek-V3.2"), "--tp 8", gpu="b200")
    assert made.kv_bytes_per_token == 43_188


def test_shared_indexers_are_counted_once_a_group() -> None:
    # GLM-5.2 picks tokens in layers 0-2 and in every fourth after: 576 x 78 + 132 x 21
    made = plan(facts("zai-org/GLM-5.2-FP8"), "--tp 8", gpu="b300")
    assert made.kv_bytes_per_token == 576 * 78 + 132 * 21


def test_declared_draft_layers_are_priced_from_0_5_14() -> None:
    model = facts("deepseek-ai/DeepSeek-V3")
    mtp = "--tp 8 --speculative-algorithm EAGLE"
    # one layer of 61 more: 70,272 + 1,152
    assert plan(model, mtp, version="0.5.14").kv_bytes_per_token == 70_272 + 1_152
    old = plan(model, mtp, version="0.5.12")
    assert old.kv_bytes_per_token == 70_272
    assert any("draft KV" in item.name for item in old.headroom_items)


def test_a_draft_path_has_the_mtp_layer_priced() -> None:
    # Qwen3.6 says mtp_num_hidden_layers, which SGLang does not read: 65,536 against 69,632.
    model = facts("Qwen/Qwen3.6-27B")
    mtp = "--model-path Qwen/Qwen3.6-27B --speculative-algorithm EAGLE"
    assert plan(model, mtp).kv_bytes_per_token == 65_536
    same = f"{mtp} --speculative-draft-model-path Qwen/Qwen3.6-27B"
    assert plan(model, same).kv_bytes_per_token == 69_632


def test_window_layers_have_a_pool_of_their_own() -> None:
    model = facts("google/gemma-4-26B-A4B")
    assert isinstance(model.cache, SlidingCache)
    # 30 layers: 25 with a window (8 heads x 256), 5 full (2 heads x 512), bf16
    full = 2 * (512 + 512) * 5 * 2
    window = 8 * (256 + 256) * 25 * 2
    made = plan(model)
    assert made.kv_bytes_per_token == pytest.approx(full + 0.8 * window)
    assert made.capacity.swa_tokens == pytest.approx(
        made.capacity.max_total_num_tokens * 0.8, abs=1
    )


def test_a_window_pool_without_a_prefix_cache_is_sized_by_requests() -> None:
    # 64 x (128 window + 128 eviction + 1 page + 1 allocated) + 2 x 8192 + 1 = 32,897 tokens;
    # the full layers alone are priced: 2 x 8 heads x 64 x 12 layers x 2 B = 24,576
    line = "--disable-radix-cache --max-running-requests 64"
    made = plan(facts("openai/gpt-oss-20b"), line, version="0.5.14")
    assert made.capacity.swa_tokens == 32_897
    assert made.kv_bytes_per_token == 24_576
    old = plan(facts("openai/gpt-oss-20b"), line, version="0.5.12")
    assert old.kv_bytes_per_token == 24_576 * 1.8


@pytest.mark.parametrize(
    ("version", "gpu", "cost"),
    [
        # bf16 latents and index keys in all 78 layers: (1152 + 132) x 78
        ("0.5.17", "h100", 100_152),
        # the scaled fp8 layout on a 12.x card: (656 + 132) x 78, then index keys in 21 layers
        ("0.5.17", "rtx-pro-6000", 61_464),
        ("0.5.23", "rtx-pro-6000", 53_940),
        ("0.5.12", "b200", 55_224),
    ],
)
def test_glm_token_cost_by_release(version: str, gpu: str, cost: int) -> None:
    made = plan(facts("zai-org/GLM-5.2-FP8"), "--tp 16 --mem-fraction-static 0.9", gpu, version)
    assert made.kv_bytes_per_token == cost


def test_v4_pages_are_padded_from_0_5_21() -> None:
    # 0.1 x (584 x 43 + 8/128 x 10,240 x 21) + 21 x (584 + 132)/4 + 20 x 584/128 = 7,705.45
    model = facts("deepseek-ai/DeepSeek-V4-Flash")
    assert plan(model, "--tp 4", version="0.5.17").kv_bytes_per_token == pytest.approx(7_705.45)
    assert plan(model, "--tp 4", version="0.5.23").kv_bytes_per_token == pytest.approx(7_086.75)


@pytest.mark.parametrize(
    ("name", "kind", "layers"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "gdn", 36),
        ("moonshotai/Kimi-K3", "kda", 69),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "mamba2", 23),
        ("nvidia/Nemotron-H-56B-Base-8K", "mamba2", 54),
    ],
)
def test_hybrids_keep_states(name: str, kind: str, layers: int) -> None:
    state = facts(name).state
    assert isinstance(state, LinearState)
    assert (state.kind, state.layers) == (kind, layers)


def test_qwen_next_slot_matches_the_log_of_its_family() -> None:
    # 36 x (8192 columns x 3 x 2 B + 32 x 128 x 128 x 4 B) = 77,266,944 B, halved at TP2
    made = plan(facts("Qwen/Qwen3-Next-80B-A3B-Instruct"), "--tp 4")
    assert made.state_bytes == (made.capacity.state_slots + 1) * 77_266_944 // 4


def test_attention_data_parallelism_keeps_attention_whole() -> None:
    model = facts("deepseek-ai/DeepSeek-V3")
    shared = plan(model, "--tp 8")
    apart = plan(model, "--tp 8 --dp 8 --enable-dp-attention")
    # 61 layers of 187 M attention parameters in fp8, seven eighths of them no longer shared,
    # and the embedding whole: several GiB a card
    assert 8 < (apart.weights_bytes - shared.weights_bytes) / GIB < 16
    assert apart.settings.chunked_prefill_size == shared.settings.chunked_prefill_size // 8


def test_pipeline_stages_divide_layers() -> None:
    model = facts("meta-llama/Meta-Llama-3.1-70B")
    whole, half = plan(model, "--tp 2"), plan(model, "--tp 2 --pp 2")
    assert half.weights_bytes < 0.53 * whole.weights_bytes
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2


# --- formats ----------------------------------------------------------------------------------


def group(name: str, shard: Shard) -> TensorGroup:
    """Return a group of one parameter."""
    return TensorGroup(
        names=(name,), params=1, shard=shard, layers=1, quantizable=True, fixed_bytes_per_param=0.0
    )


@pytest.mark.parametrize(
    ("told", "size"),
    [
        ("bf16", 2.0),
        ("fp8", 1.0),
        ("fp8-block", 1 + 4 / 16384),
        ("mxfp8", 1 + 1 / 32),
        ("mxfp4", 0.5 + 1 / 32),
        ("nvfp4", 0.5 + 1 / 16),
        ("int4-awq", 0.5 + 2 / 128 + 0.5 / 128),
        ("int4-gptq", 0.5 + 2 / 128 + 0.5 / 128),
        ("int4", 0.5 + 2 / 128),
    ],
)
def test_bytes_of_a_told_format(told: str, size: float) -> None:
    experts = group("layers.#.mlp.experts", "expert")
    checkpoint = checkpoint_format("some/model", {}, None, stated=told, moe=True)
    assert bytes_per_param(experts, checkpoint) == pytest.approx(size)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen3-32B-FP8", "fp8-block"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "nvfp4"),
        ("nvidia/DeepSeek-R1-0528-FP4-V2", "nvfp4"),
        ("Qwen/Qwen3-235B-A22B-GPTQ-Int4", "int4-gptq"),
        ("org/Model-AWQ", "int4-awq"),
        ("MiniMaxAI/MiniMax-M3-MXFP8", "mxfp8"),
        ("Lorbus/Qwen3.6-27B-AutoRound-INT4", "int4"),
        ("Qwen/Qwen3-32B", None),
        ("RadixArk/Qwen3.8-27B-NVFP4-BF16-LMHead", "nvfp4"),
    ],
)
def test_format_is_read_from_the_name(name: str, found: str | None) -> None:
    assert name_format(name) == found


def test_a_name_may_keep_the_head_in_bf16() -> None:
    # 248320 x 5120 values: 2 B against 0.5625 B is 1.70 GiB
    small = plan(facts("RadixArk/Qwen3.8-27B-NVFP4")).weights_bytes
    large = plan(facts("RadixArk/Qwen3.8-27B-NVFP4-BF16-LMHead")).weights_bytes
    assert (large - small) / GIB == pytest.approx(248320 * 5120 * 1.4375 / GIB, abs=0.01)


def test_listed_modules_stay_out_of_an_nvfp4_checkpoint() -> None:
    model = facts("nvidia/Qwen3.5-397B-A17B-NVFP4")
    sizes = {g.names[0]: bytes_per_param(g, model.format) for g in model.tensors}
    assert sizes["layers.#.mlp.experts"] == 0.5625
    assert sizes["layers.#.self_attn.q_proj"] == 2.0
    assert sizes["layers.#.linear_attn.out_proj"] == 2.0
    assert sizes["lm_head"] == 2.0


def test_int4_compressed_tensors_keep_attention_in_bf16() -> None:
    model = facts("moonshotai/Kimi-K2.5")
    sizes = {g.names[0]: bytes_per_param(g, model.format) for g in model.tensors}
    assert sizes["layers.#.mlp.experts"] == 0.5 + 2 / 32
    assert sizes["layers.#.self_attn.o_proj"] == 2.0
    assert sizes["layers.#.mlp.shared_experts"] == 2.0


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(PlanError, match="--weights-format 'fp3'"):
        facts("Qwen/Qwen3-32B", "fp3")


# --- configs that lack something --------------------------------------------------------------

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "field",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"],
)
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != field}
    with pytest.raises(PlanError, match=f"lacks '{field}'"):
        model_facts("x", config)


@pytest.mark.parametrize("value", ["many", True, -3, 0])
def test_a_field_of_the_wrong_kind_is_named(value: object) -> None:
    with pytest.raises(PlanError, match="hidden_size"):
        model_facts("x", LLAMA | {"hidden_size": value})


@pytest.mark.parametrize(
    "broken",
    [
        {"architectures": 3},
        {"vision_config": {"hidden_size": "x", "depth": 2}},
        {"layer_types": 5},
        {"quantization_config": "fp8"},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
        {"linear_attn_config": {"kda_layers": 1, "num_heads": 2, "head_dim": 64}},
    ],
)
def test_a_broken_config_is_planned_or_one_line(broken: dict[str, Any]) -> None:
    with contextlib.suppress(PlanError):
        plan(model_facts("x", LLAMA | broken))


def test_an_unknown_architecture_is_marginal_with_the_reason() -> None:
    made = plan(model_facts("x", LLAMA | {"architectures": ["NovelForCausalLM"]}))
    assert made.verdict == "marginal"
    assert any("NovelForCausalLM" in note for note in made.assumptions)


def test_a_multimodal_wrapper_is_read_through() -> None:
    made = model_facts("x", {"architectures": ["QwenForX"], "text_config": LLAMA})
    assert made.hidden_size == 1024


@pytest.mark.parametrize(
    ("architecture", "lacking"),
    [
        ("DeepseekV3ForCausalLM", "kv_lora_rank"),
        ("Qwen3_5ForConditionalGeneration", "linear_num_value_heads"),
        ("Qwen3NextForCausalLM", "linear_num_value_heads"),
        ("Qwen3MoeForCausalLM", "n_routed_experts"),
    ],
)
def test_config_that_lacks_what_its_family_is_made_of_is_refused(
    architecture: str, lacking: str
) -> None:
    dense = {
        "architectures": [architecture],
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "vocab_size": 1000,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "max_position_embeddings": 4096,
    }
    with pytest.raises(PlanError, match=f"lacks '{lacking}'"):
        model_facts("m", dense)


def test_pipeline_stages_are_priced_as_the_largest() -> None:
    # 64 layers in 3 stages: 21, 21, 22. The last has 6 of 16 full layers, 2 x 4 heads x 256 x 2 B
    # each, and at most 17 of 48 states of 3,207,168 B.
    made = plan(facts("Qwen/Qwen3.6-27B"), "--pp-size 3 --disable-radix-cache")
    assert made.kv_bytes_per_token == 6 * 2 * 4 * 256 * 2
    assert made.state_bytes == (made.capacity.state_slots + 1) * 17 * 3_207_168


def test_micro_batches_leave_requests_over() -> None:
    line = "--pp-size 4 --max-running-requests 46 --disable-radix-cache"
    made = plan(facts("Qwen/Qwen3.6-27B"), line)
    assert made.capacity.max_running_requests == 46
    assert made.requests_at_expected_length == 44
    assert any("at most 11 requests: 44 of 46" in note for note in made.warnings)


def test_states_of_a_pipeline_keep_one_tracking_slot() -> None:
    # The overlap schedule is off: 3 + 1 slots a request instead of 3 + 2.
    model = facts("Qwen/Qwen3.6-27B")
    line = "--mamba-radix-cache-strategy extra_buffer"
    one, four = plan(model, line).capacity, plan(model, f"{line} --pp-size 4").capacity
    assert one.max_running_requests == one.state_slots // 5
    assert four.max_running_requests == four.state_slots // 4
