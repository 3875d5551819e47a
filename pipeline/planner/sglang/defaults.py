"""Defaults that SGLang derives from the card's memory: chunk, CUDA graphs, static fraction.

SGLang arg_groups/memory_hook.py and cuda_graph_hook.py of 0.5.23, server_args.py of older releases.
"""

from dataclasses import dataclass

from pipeline.planner.sglang.flags import LaunchFlags, graphs_of
from pipeline.planner.sglang.inputs import LaunchInputs
from schemas.plan import (
    CompressedCache,
    LinearState,
    MlaCache,
    ModelFacts,
    NoVision,
    SparseMlaCache,
    Vision,
)

# Multimodal models whose prefill is captured: the allow-list of arg_groups/model_config, 0.5.23
_CAPTURED_MULTIMODAL = ("Qwen3_5", "KimiK25", "KimiK3", "MiniMaxM3", "Step3p7")
# Flags that turn piecewise prefill graphs off. server_args.py, 0.5.12
_WITHOUT_PIECEWISE = (
    "enable-torch-compile", "enable-lora", "lora-paths", "enable-hierarchical-cache",
    "enable-deterministic-inference", "enable-symm-mem", "enable-eplb", "cpu-offload-gb",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CardDefaults:
    """Sizes that follow from the card's memory where the line does not give them."""

    chunk_tokens: int
    """Tokens per chunk before attention data parallelism divides them; -1 for one chunk."""
    decode_max_bs: int


def card_defaults(launch: LaunchInputs) -> CardDefaults:
    """Return the prefill chunk and the largest batch of the decode graphs."""
    chunk, max_bs = _by_memory(launch)
    flags = launch.flags
    given_chunk = flags.number("chunked-prefill-size")
    graphs = graphs_of(flags, "decode")
    requests = flags.number("max-running-requests")
    if graphs.sizes:
        max_bs = max(graphs.sizes)
    elif graphs.max_size is not None:
        max_bs = graphs.max_size
    elif requests is not None and launch.rules.graphs_follow_requests:
        max_bs = min(max_bs, requests)
    return CardDefaults(
        chunk_tokens=chunk if given_chunk is None else given_chunk, decode_max_bs=max_bs
    )


def _by_memory(launch: LaunchInputs) -> tuple[int, int]:
    few_ranks = (launch.flags.number("tp-size") or 1) < 4
    mib, rules = launch.gpu.smi_mib, launch.rules
    if mib < 20 * 1024:
        return 2048, 8
    if mib < 35 * 1024:
        return rules.small_card_chunk, rules.small_card_graph_bs[0 if few_ranks else 1]
    if mib < 60 * 1024:
        return 4096, 32 if few_ranks else 160
    if mib < 160 * 1024:
        return 8192, 256 if few_ranks else 512
    return 16384, 512


def default_fraction(launch: LaunchInputs, sizes: CardDefaults, prefill_graphs: int) -> float:
    """Return `mem_fraction_static` where the line gives none. All terms are MiB."""
    flags, ranks, rules = launch.flags, launch.ranks, launch.rules
    chunk, decode_max_bs = sizes.chunk_tokens, sizes.decode_max_bs
    tokens = chunk if chunk > 0 else flags.number("max-prefill-tokens") or 16384
    reserved = 512 + 1.5 * max(tokens, 2048) + 1024 * ranks.tp_size * ranks.pp_size / 8
    # Releases before 0.5.14 count the decode graphs even where they are disabled.
    if rules.spec_v2_switch or not no_decode_graphs(flags):
        reserved += 2 * decode_max_bs
    if ranks.attention_dp_size > 1:
        reserved += 3 * decode_max_bs * ranks.attention_dp_size
        if decode_max_bs > 300:
            reserved += 1.5 * decode_max_bs * ranks.attention_dp_size
    if prefill_graphs:
        reserved += 1536 if launch.model.uses_mla else 8 * prefill_graphs
        if rules.prefill_graphs == "breakable" and ranks.all_to_all == "deepep":
            reserved += 1024
    smi_mib = launch.gpu.smi_mib
    if smi_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    reserved += _later_reserves(launch)
    return round((smi_mib - reserved) / smi_mib, 3) * _vision_factor(flags, launch.model)


def _later_reserves(launch: LaunchInputs) -> float:
    """Return what SGLang reserves on top of the 10 GiB floor of large cards."""
    flags, rules = launch.flags, launch.rules
    reserved = 0.0
    deepep = launch.ranks.all_to_all == "deepep"
    if deepep and not rules.spec_v2_switch and not no_decode_graphs(flags):
        reserved += 2048
    algorithm = flags.text("speculative-algorithm").upper()
    if algorithm == "STANDALONE":
        reserved += rules.standalone_reserve_mib
    elif algorithm and algorithm != "NGRAM":
        reserved += rules.speculation_reserve_mib
    return reserved


def _vision_factor(flags: LaunchFlags, model: ModelFacts) -> float:
    # memory_hook.py: adjust_mem_fraction_for_vlm; the result is not rounded again
    if not isinstance(model.vision, Vision) or text_only(flags):
        return 1.0
    load = model.vision.layers_seen_by_sglang * model.vision.hidden_size**2 / (24 * 1024**2)
    return 0.95 * min(max(1 - 0.1 * (load - 1), 0.8), 1.05)


def text_only(flags: LaunchFlags) -> bool:
    """Return True where a multimodal model is served without its encoder."""
    return flags.has("language-only") or flags.has("language-model-only")


def no_decode_graphs(flags: LaunchFlags) -> bool:
    """Return True where decoding runs without CUDA graphs."""
    return graphs_of(flags, "decode").is_off


# --- prefill graphs ---------------------------------------------------------------------------


def priced_prefill_graphs(launch: LaunchInputs, chunk_tokens: int) -> int:
    """Return how many prefill graphs the default fraction reserves memory for."""
    graphs = graphs_of(launch.flags, "prefill")
    is_chosen = graphs.backend != "" and not graphs.is_off
    forced = launch.flags.has("enforce-piecewise-cuda-graph") or is_chosen
    if _prefill_graphs_off(launch) or chunk_tokens <= 0:
        return 0
    if not forced and _prefill_graphs_incompatible(launch):
        return 0
    return len(graphs.sizes or prefill_buckets(_largest_prefill_graph(launch, chunk_tokens)))


def _largest_prefill_graph(launch: LaunchInputs, chunk_tokens: int) -> int:
    flags, given = launch.flags, graphs_of(launch.flags, "prefill").max_size
    limits = [chunk_tokens] if given is None else [given]
    if given is None:
        if launch.model.uses_mla:
            limits.append(launch.rules.mla_prefill_graph_tokens)
        if (most_tokens := flags.number("max-total-tokens")) is not None:
            limits.append(most_tokens)
        if "llama-2" in flags.model_path.lower():
            limits.append(4096)
    if (context := flags.number("context-length")) is not None:
        limits.append(context)
    return min(limits)


def captured_prefill_graphs(
    launch: LaunchInputs, priced: int, chunk_tokens: int, backend: str
) -> int:
    """Return how many prefill graphs are captured.

    Backends that SGLang picks after the fraction can still turn them off.
    """
    flags, model, rules = launch.flags, launch.model, launch.rules
    if rules.prefill_graphs == "breakable":
        trtllm = model.architecture == "DeepseekV3ForCausalLM" and backend == "trtllm_mla"
        if trtllm or not priced:
            return 0
        # Attention data parallelism divides the chunk after the fraction is set.
        chunk = chunk_tokens // launch.ranks.attention_dp_size
        graphs = graphs_of(flags, "prefill")
        is_given = graphs.sizes or graphs.max_size is not None
        return priced if is_given else min(priced, len(prefill_buckets(chunk)))
    runner = flags.text("moe-runner-backend", "auto")
    if runner == "auto" and launch.gpu.compute_capability in (100, 103):
        # server_args.py of 0.5.12 picks FlashInfer's TRT-LLM experts for these models.
        picked = model.architecture.startswith(
            ("Qwen3Moe", "Qwen3VLMoe", "Qwen3Next", "Qwen3_5Moe", "Deepseek", "GlmMoeDsa")
        )
        runner = "flashinfer_trtllm" if picked else runner
    bypassed = runner in ("flashinfer_trtllm", "flashinfer_mxfp4")
    return 0 if bypassed and not model.architecture.startswith("GptOss") else priced


def _prefill_graphs_off(launch: LaunchInputs) -> bool:
    if launch.flags.has("disable-piecewise-cuda-graph"):
        return True
    if launch.rules.prefill_graphs != "breakable" and launch.flags.has("disable-cuda-graph"):
        # Piecewise graphs have a switch of their own.
        return launch.flags.has("disable-prefill-cuda-graph")
    return graphs_of(launch.flags, "prefill").is_off


def _prefill_graphs_incompatible(launch: LaunchInputs) -> bool:
    # arg_groups/cuda_graph_hook.py, 0.5.23; server_args.py of 0.5.12 for piecewise graphs
    flags, ranks = launch.flags, launch.ranks
    if isinstance(launch.model.cache, CompressedCache) or ranks.pp_size > 1:
        return True
    if flags.number("attn-cp-size") or ranks.dcp_size > 1:
        return True
    if launch.rules.prefill_graphs == "opt_in":
        return not flags.has("enable-piecewise-cuda-graph")
    if launch.rules.prefill_graphs == "piecewise":
        return _piecewise_incompatible(launch)
    return _breakable_incompatible(launch)


def _piecewise_incompatible(launch: LaunchInputs) -> bool:
    model, ranks = launch.model, launch.ranks
    return (
        not isinstance(model.vision, NoVision)
        or model.architecture.startswith("Qwen3Next")
        or (isinstance(model.cache, SparseMlaCache) and launch.rules.spec_v2_switch)
        or ranks.attention_dp_size > 1
        or ranks.all_to_all != "none"
        or any(launch.flags.has(name) for name in _WITHOUT_PIECEWISE)
    )


def _breakable_incompatible(launch: LaunchInputs) -> bool:
    model, ranks, rules = launch.model, launch.ranks, launch.rules
    if model.architecture.startswith(("KimiK25", "MiniMaxM3Sparse")):
        # captured piecewise while the others are captured breakable, and breakable later
        return not rules.latent_prefill_graphs and ranks.attention_dp_size > 1
    plain_latent = isinstance(model.cache, MlaCache) or model.architecture.startswith("NemotronH")
    if plain_latent and not rules.latent_prefill_graphs:
        return True
    if isinstance(model.state, LinearState) and model.state.kind == "kda":
        return True
    if ranks.all_to_all not in ("none", "deepep", "megamoe", "flashinfer"):
        return True
    if launch.flags.has("enable-two-batch-overlap"):
        return True
    multimodal = not isinstance(model.vision, NoVision)
    return multimodal and not model.architecture.startswith(_CAPTURED_MULTIMODAL)


# --- graph sizes ------------------------------------------------------------------------------


def decode_buckets(max_bs: int, *, speculative: bool) -> tuple[int, ...]:
    """Return the batch sizes of the decode graphs, the maximum included."""
    if speculative:
        sizes = [
            *range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8),
            *range(272, max_bs + 1, 16),
        ]  # fmt: skip
    else:
        sizes = [
            1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_bs + 1, 32),
        ]  # fmt: skip
    return _up_to(max_bs, sizes)


def prefill_buckets(max_tokens: int) -> tuple[int, ...]:
    """Return the token counts of the prefill graphs, the maximum included from 4 on."""
    sizes = [
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
        *range(1280, 4097, 256), *range(4608, max_tokens + 1, 512),
    ]  # fmt: skip
    return _up_to(max_tokens, sizes) if max_tokens >= 4 else ()


def _up_to(maximum: int, sizes: list[int]) -> tuple[int, ...]:
    below = [size for size in sizes if size < maximum]
    return (*below, maximum)
