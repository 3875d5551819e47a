"""Defaults that SGLang takes from the card's size: chunk, graphs, and the static fraction.

arg_groups/memory_hook.py and cuda_graph_hook.py of 0.5.23, server_args.py of older releases.
"""

import re

from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import Parallel
from pipeline.planner.sglang.releases import ReleaseRules
from schemas.plan import (
    CompressedCache,
    Gpu,
    LinearState,
    MlaCache,
    ModelFacts,
    NoVision,
    SparseMlaCache,
    Vision,
)

# arg_groups/model_config allow-list of 0.5.23: multimodal models whose prefill is captured
_CAPTURED_MULTIMODAL = ("Qwen3_5", "KimiK25", "KimiK3", "MiniMaxM3", "Step3p7")


def card_defaults(flags: LaunchFlags, gpu: Gpu, rules: ReleaseRules) -> tuple[int, int]:
    """Chunk size and the largest decode graph."""
    few_ranks = (flags.number("tp-size") or 1) < 4
    mib = gpu.smi_mib
    if mib < 20 * 1024:
        chunk, max_bs = 2048, 8
    elif mib < 35 * 1024:
        chunk, max_bs = rules.small_card_chunk, rules.small_card_graph_bs[0 if few_ranks else 1]
    elif mib < 60 * 1024:
        chunk, max_bs = 4096, 32 if few_ranks else 160
    elif mib < 160 * 1024:
        chunk, max_bs = 8192, 256 if few_ranks else 512
    else:
        chunk, max_bs = 16384, 512
    given_bs = flags.number("cuda-graph-max-bs-decode")
    asked = flags.number("max-running-requests")
    listed = flags.words("cuda-graph-bs-decode")
    if listed:
        sizes = [int(size) for text in listed for size in re.findall(r"\d+", text)]
        max_bs = max(sizes, default=max_bs)
    elif given_bs is not None:
        max_bs = given_bs
    elif asked is not None and rules.graphs_follow_requests:
        max_bs = min(max_bs, asked)
    given_chunk = flags.number("chunked-prefill-size")
    return chunk if given_chunk is None else given_chunk, max_bs


def default_fraction(
    flags: LaunchFlags, model: ModelFacts, gpu: Gpu, rules: ReleaseRules, ranks: Parallel,
    chunk: int, decode_max_bs: int, buckets: int,
) -> float:  # fmt: skip
    """`mem_fraction_static` where nobody gives it. All terms are MiB."""
    tokens = chunk if chunk > 0 else flags.number("max-prefill-tokens") or 16384
    reserved = 512 + 1.5 * max(tokens, 2048) + 1024 * ranks.tp_size * ranks.pp_size / 8
    # Releases before 0.5.14 count the decode graphs even where they are disabled.
    if rules.spec_v2_switch or not no_decode_graphs(flags):
        reserved += 2 * decode_max_bs
    if ranks.attention_dp_size > 1:
        reserved += 3 * decode_max_bs * ranks.attention_dp_size
        if decode_max_bs > 300:
            reserved += 1.5 * decode_max_bs * ranks.attention_dp_size
    if buckets:
        reserved += 1536 if model.uses_mla else 8 * buckets
        if rules.prefill_graphs == "breakable" and ranks.all_to_all == "deepep":
            reserved += 1024
    if gpu.smi_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    reserved += _later_reserves(flags, rules, ranks)
    fraction = round((gpu.smi_mib - reserved) / gpu.smi_mib, 3)
    return fraction * _vision_factor(flags, model)


def _later_reserves(flags: LaunchFlags, rules: ReleaseRules, ranks: Parallel) -> float:
    """What comes on top of the 10 GiB floor."""
    reserved = 0.0
    if not rules.spec_v2_switch and ranks.all_to_all == "deepep" and not no_decode_graphs(flags):
        reserved += 2048
    algorithm = flags.text("speculative-algorithm").upper()
    if algorithm == "STANDALONE":
        reserved += rules.standalone_reserve_mib
    elif algorithm and algorithm != "NGRAM":
        reserved += rules.speculation_reserve_mib
    return reserved


def _vision_factor(flags: LaunchFlags, model: ModelFacts) -> float:
    """memory_hook.py: adjust_mem_fraction_for_vlm; the result is not rounded again."""
    if not isinstance(model.vision, Vision) or text_only(flags):
        return 1.0
    load = model.vision.layers_seen_by_sglang * model.vision.hidden_size**2 / (24 * 1024**2)
    return 0.95 * min(max(1 - 0.1 * (load - 1), 0.8), 1.05)


def text_only(flags: LaunchFlags) -> bool:
    """Whether a multimodal model is served without its encoder."""
    return flags.has("language-only") or flags.has("language-model-only")


def no_decode_graphs(flags: LaunchFlags) -> bool:
    """Whether decoding runs without graphs."""
    return flags.has("disable-cuda-graph") or flags.has("disable-decode-cuda-graph")


def priced_prefill_graphs(
    flags: LaunchFlags, model: ModelFacts, rules: ReleaseRules, ranks: Parallel, chunk: int
) -> int:
    """How many prefill graphs the default fraction allows for."""
    forced = flags.has("enforce-piecewise-cuda-graph") or flags.text(
        "cuda-graph-backend-prefill"
    ) not in ("", "disabled")
    if _prefill_graphs_off(flags, rules) or chunk <= 0:
        return 0
    if not forced and _prefill_graphs_incompatible(flags, model, rules, ranks):
        return 0
    tokens = min(rules.mla_prefill_graph_tokens, chunk) if model.uses_mla else chunk
    cap = flags.number("max-total-tokens")
    if cap is not None:
        tokens = min(tokens, cap)
    if "llama-2" in flags.model_path.lower():
        tokens = min(tokens, 4096)
    return len(prefill_buckets(tokens))


def captured_prefill_graphs(
    priced: int, chunk: int, flags: LaunchFlags, model: ModelFacts, gpu: Gpu,
    ranks: Parallel, rules: ReleaseRules, backend: str,
) -> int:  # fmt: skip
    """How many are captured: backends resolved after the fraction can still turn them off."""
    if rules.prefill_graphs == "breakable":
        trtllm = model.architecture == "DeepseekV3ForCausalLM" and backend == "trtllm_mla"
        if trtllm or not priced:
            return 0
        # Attention data parallelism divides the chunk after the fraction is set.
        return min(priced, len(prefill_buckets(chunk // ranks.attention_dp_size)))
    runner = flags.text("moe-runner-backend", "auto")
    if runner == "auto" and gpu.compute_capability in (100, 103):
        # server_args.py of 0.5.12 picks FlashInfer's TRT-LLM experts for these models.
        picked = model.architecture.startswith(
            ("Qwen3Moe", "Qwen3VLMoe", "Qwen3Next", "Qwen3_5Moe", "Deepseek", "GlmMoeDsa")
        )
        runner = "flashinfer_trtllm" if picked else runner
    bypassed = runner in ("flashinfer_trtllm", "flashinfer_mxfp4")
    return 0 if bypassed and not model.architecture.startswith("GptOss") else priced


def _prefill_graphs_off(flags: LaunchFlags, rules: ReleaseRules) -> bool:
    switches = ["disable-piecewise-cuda-graph", "disable-prefill-cuda-graph"]
    if rules.prefill_graphs == "breakable":
        # Piecewise graphs are a switch of their own.
        switches.append("disable-cuda-graph")
    if any(flags.has(name) for name in switches):
        return True
    return flags.text("cuda-graph-backend-prefill") == "disabled"


def _prefill_graphs_incompatible(
    flags: LaunchFlags, model: ModelFacts, rules: ReleaseRules, ranks: Parallel
) -> bool:
    """arg_groups/cuda_graph_hook.py, 0.5.23; server_args.py of 0.5.12 for piecewise graphs."""
    multimodal = not isinstance(model.vision, NoVision)
    if isinstance(model.cache, CompressedCache) or ranks.pp_size > 1:
        return True
    if flags.number("attn-cp-size") or ranks.dcp_size > 1:
        return True
    if rules.prefill_graphs == "opt_in":
        return not flags.has("enable-piecewise-cuda-graph")
    if rules.prefill_graphs == "piecewise":
        others = (
            "enable-torch-compile", "enable-lora", "lora-paths", "enable-hierarchical-cache",
            "enable-deterministic-inference", "enable-symm-mem", "enable-eplb", "cpu-offload-gb",
        )  # fmt: skip
        return (
            multimodal
            or model.architecture.startswith("Qwen3Next")
            or (isinstance(model.cache, SparseMlaCache) and rules.spec_v2_switch)
            or ranks.attention_dp_size > 1
            or ranks.all_to_all != "none"
            or any(flags.has(name) for name in others)
        )
    plain_latent = isinstance(model.cache, MlaCache) or model.architecture.startswith("NemotronH")
    if model.architecture.startswith(("KimiK25", "MiniMaxM3Sparse")):
        # captured piecewise while the others are captured breakable, and breakable later
        return not rules.latent_prefill_graphs and ranks.attention_dp_size > 1
    if plain_latent and not rules.latent_prefill_graphs:
        return True
    if isinstance(model.state, LinearState) and model.state.kind == "kda":
        return True
    if ranks.all_to_all not in ("none", "deepep", "megamoe", "flashinfer"):
        return True
    if flags.has("enable-two-batch-overlap"):
        return True
    return multimodal and not model.architecture.startswith(_CAPTURED_MULTIMODAL)


def decode_buckets(max_bs: int, *, speculative: bool) -> tuple[int, ...]:
    """Batch sizes of the decode graphs, the maximum included."""
    if speculative:
        sizes = [
            *range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8),
            *range(272, max_bs + 1, 16),
        ]  # fmt: skip
    else:
        sizes = [
            1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_bs + 1, 32),
        ]  # fmt: skip
    kept = [size for size in sizes if size <= max_bs]
    return tuple(kept) if max_bs in kept else (*kept, max_bs)


def prefill_buckets(max_tokens: int) -> tuple[int, ...]:
    """Token counts of the prefill graphs, the maximum included."""
    sizes = [
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
        *range(1280, 4097, 256), *range(4608, max_tokens + 1, 512),
    ]  # fmt: skip
    kept = [size for size in sizes if size <= max_tokens]
    return tuple(kept) if max_tokens in kept or max_tokens < 4 else (*kept, max_tokens)
