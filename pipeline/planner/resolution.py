"""What SGLang's argument resolution makes of a launch line, on one card, in one release.

`resolved` returns either the settings that the engine will run with or the `Refusal` it prints.
The order follows arg_groups/pipeline.py of 0.5.23: card-dependent defaults first, then attention
data parallelism, then speculation, then backends.
"""

from dataclasses import dataclass

from pipeline.planner.graphs import prefill_buckets
from pipeline.planner.launch_flags import LaunchFlags
from pipeline.planner.refusals import refusal_message
from pipeline.planner.sglang_rules import ReleaseRules
from pipeline.planner.speculation import speculation_of
from schemas.plan import (
    CompressedCache,
    Gpu,
    LinearState,
    MlaCache,
    ModelFacts,
    NoSpeculation,
    NoVision,
    PlanSettings,
    SparseMlaCache,
    Vision,
)

# arg_groups/model_config allow-list of 0.5.23: multimodal models whose prefill is captured
_CAPTURED_MULTIMODAL = ("Qwen3_5", "KimiK25", "KimiK3", "MiniMaxM3", "Step3p7")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The launch stops before it loads anything; `message` is the engine's own line."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How the ranks divide the model."""

    tp_size: int
    pp_size: int
    attention_dp_size: int
    attention_tp_size: int
    dcp_size: int
    dense_tp_size: int
    all_to_all: str
    redundant_experts: int
    dp_lm_head: bool


def parallel_of(flags: LaunchFlags) -> Parallel:
    """The parallel layout; attention data parallelism only where it is switched on."""
    tp = max(flags.number("tp-size") or 1, 1)
    dp = max(flags.number("dp-size") or 1, 1)
    adp = dp if flags.has("enable-dp-attention") else 1
    adp = max(flags.number("attn-dp-size") or adp, 1)
    cp = max(flags.number("attn-cp-size") or 1, 1)
    return Parallel(
        tp_size=tp,
        pp_size=max(flags.number("pp-size") or 1, 1),
        attention_dp_size=adp,
        attention_tp_size=max(tp // adp // cp, 1),
        dcp_size=max(flags.number("dcp-size") or 1, 1),
        dense_tp_size=flags.number("moe-dense-tp-size") or tp,
        all_to_all=flags.text("moe-a2a-backend", "none"),
        redundant_experts=flags.number("ep-num-redundant-experts") or 0,
        dp_lm_head=flags.has("enable-dp-lm-head"),
    )


def resolved(
    flags: LaunchFlags, model: ModelFacts, gpu: Gpu, rules: ReleaseRules
) -> PlanSettings | Refusal:
    """The settings the engine runs with, or its refusal."""
    ranks = parallel_of(flags)
    speculation = speculation_of(flags, model, rules)
    strategy = mamba_strategy(flags, model, rules)
    backend, page = _backend_and_page(flags, model, gpu, rules, speculation)
    message = refusal_message(
        flags, model, rules, ranks.tp_size, ranks.attention_dp_size, ranks.attention_tp_size,
        speculation, strategy, page, backend,
    )  # fmt: skip
    if message:
        return Refusal(message=message)
    chunk, decode_max_bs = _card_defaults(flags, gpu, rules)
    buckets = _priced_prefill_graphs(flags, model, rules, ranks, chunk)
    given = flags.fraction("mem-fraction-static")
    fraction = given
    if fraction is None:
        fraction = _default_fraction(flags, model, gpu, rules, ranks, chunk, decode_max_bs, buckets)
    requests, source = _requests(flags, model, speculation)
    return PlanSettings(
        release=rules.label,
        tp_size=ranks.tp_size,
        pp_size=ranks.pp_size,
        attention_dp_size=ranks.attention_dp_size,
        mem_fraction_static=fraction,
        mem_fraction_given=given is not None,
        chunked_prefill_size=chunk // ranks.attention_dp_size if chunk > 0 else chunk,
        max_prefill_tokens=flags.number("max-prefill-tokens") or 16384,
        context_length=flags.number("context-length") or model.context_length,
        page_size=page,
        attention_backend=backend,
        kv_cache_dtype=_kv_dtype(flags, model, gpu),
        scaled_latent=_scaled_latent(flags, model, gpu, rules),
        decode_graph_max_bs=0 if _no_decode_graphs(flags) else decode_max_bs,
        prefill_graph_buckets=_captured_prefill_graphs(
            buckets, chunk, flags, model, gpu, ranks, rules, backend
        ),
        max_running_requests=requests,
        max_running_requests_source=source,
        max_total_tokens=flags.number("max-total-tokens"),
        disable_radix_cache=flags.has("disable-radix-cache"),
        mamba_strategy=strategy,
        speculation=speculation,
        assumptions=_assumptions(flags, gpu),
    )


# --- card-dependent defaults: arg_groups/memory_hook.py ---------------------------------------


def _card_defaults(flags: LaunchFlags, gpu: Gpu, rules: ReleaseRules) -> tuple[int, int]:
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
        max_bs = max(int(word) for text in listed for word in text.split(",") if word)
    elif given_bs is not None:
        max_bs = given_bs
    elif asked is not None and rules.graphs_follow_requests:
        max_bs = min(max_bs, asked)
    given_chunk = flags.number("chunked-prefill-size")
    return chunk if given_chunk is None else given_chunk, max_bs


def _default_fraction(
    flags: LaunchFlags, model: ModelFacts, gpu: Gpu, rules: ReleaseRules, ranks: Parallel,
    chunk: int, decode_max_bs: int, buckets: int,
) -> float:  # fmt: skip
    """`mem_fraction_static` where nobody gives it. All terms are MiB."""
    tokens = chunk if chunk > 0 else flags.number("max-prefill-tokens") or 16384
    reserved = 512 + 1.5 * max(tokens, 2048) + 1024 * ranks.tp_size * ranks.pp_size / 8
    # Releases before 0.5.14 count the decode graphs even where they are disabled.
    if rules.spec_v2_switch or not _no_decode_graphs(flags):
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
    if not rules.spec_v2_switch and ranks.all_to_all == "deepep" and not _no_decode_graphs(flags):
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


def _no_decode_graphs(flags: LaunchFlags) -> bool:
    return flags.has("disable-cuda-graph") or flags.has("disable-decode-cuda-graph")


def _priced_prefill_graphs(
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


def _captured_prefill_graphs(
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


# --- requests, states, backends ---------------------------------------------------------------


def _requests(flags: LaunchFlags, model: ModelFacts, speculation: object) -> tuple[int | None, str]:
    """Requested running requests over all ranks, and who asked for them."""
    given = flags.number("max-running-requests")
    if given is not None:
        return given, "given"
    if isinstance(model.cache, CompressedCache):
        return 256, "SGLang's default for DeepSeek-V4"
    if not isinstance(speculation, NoSpeculation):
        return 48, "SGLang's default under speculation"
    return None, "unset"


def mamba_strategy(flags: LaunchFlags, model: ModelFacts, rules: ReleaseRules) -> str:
    """How the prefix cache keeps linear-attention states."""
    if not isinstance(model.state, LinearState):
        return "none"
    if flags.has("disable-radix-cache"):
        return "radix_off"
    given = flags.text("mamba-radix-cache-strategy", "auto")
    if given != "auto":
        return given
    if flags.has("disable-overlap-schedule"):
        return "no_buffer"
    # The short convolution and Mamba2 models without tracked states stay on no_buffer.
    # arg_groups/mamba_hook.py: supports_mamba_cache_extra_buffer, 0.5.23.
    if model.state.kind == "conv":
        return "no_buffer"
    return rules.auto_mamba_strategy


def _backend_and_page(
    flags: LaunchFlags, model: ModelFacts, gpu: Gpu, rules: ReleaseRules, speculation: object
) -> tuple[str, int]:
    """Attention backend and page size. arg_groups/attention_hook.py, 0.5.23."""
    backend = flags.text("attention-backend") or _default_backend(model, gpu, rules, speculation)
    if not flags.has("attention-backend") and _needs_single_token_pages(flags, model, speculation):
        backend = backend.replace("trtllm_mha", "triton")
    decode = flags.text("decode-attention-backend") or backend
    asked = flags.number("page-size")
    if isinstance(model.cache, CompressedCache):
        return backend, 256
    if isinstance(model.cache, SparseMlaCache) and backend in ("dsa", "nsa"):
        return backend, 64
    page = asked or 1
    if "trtllm_mla" in (backend, decode) or "cutedsl_mla" in (backend, decode):
        return backend, page if page in (32, 64) else 64
    if "trtllm_mha" in (backend, decode):
        return backend, page if page in (16, 32, 64, 128) else 64
    if "flashmla" in (backend, decode):
        return backend, 64
    if backend == "fa4" and not model.uses_mla and gpu.compute_capability // 10 == 10:
        return backend, 128
    return backend, page


def _needs_single_token_pages(flags: LaunchFlags, model: ModelFacts, speculation: object) -> bool:
    """Qwen hybrids with a prefix cache that keeps no tracked states, on Blackwell.

    arg_groups/model_overrides/qwen3_5.py, 0.5.23; the automatic strategy counts as untracked.
    """
    if not model.architecture.startswith(("Qwen3Next", "Qwen3_5")):
        return False
    tracked = flags.text("mamba-radix-cache-strategy").startswith("extra_buffer")
    drafted = not isinstance(speculation, NoSpeculation)
    return not (tracked or drafted or flags.has("disable-radix-cache"))


def _default_backend(model: ModelFacts, gpu: Gpu, rules: ReleaseRules, speculation: object) -> str:
    hopper = gpu.compute_capability == 90
    datacenter_blackwell = gpu.compute_capability in (100, 103)
    topk = getattr(speculation, "topk", 1)
    if isinstance(model.cache, CompressedCache):
        return "dsv4"
    if isinstance(model.cache, SparseMlaCache):
        return "dsa"
    if model.uses_mla:
        if hopper:
            return "fa3"
        if datacenter_blackwell:
            deepseek = model.architecture in (
                "DeepseekV3ForCausalLM",
                "KimiK25ForConditionalGeneration",
            )
            return "trtllm_mla" if deepseek else "flashinfer"
        return "triton"
    if model.architecture.startswith("Gemma4") and not datacenter_blackwell:
        # heads of 512 have no FlashAttention kernel. model_overrides/gemma4.py, 0.5.23.
        return "triton"
    if hopper:
        return "fa3"
    mamba2 = isinstance(model.state, LinearState) and model.state.kind == "mamba2"
    if datacenter_blackwell and topk <= 1 and (rules.mamba2_trtllm_attention or not mamba2):
        return "trtllm_mha"
    # Attention sinks have no FlashInfer kernel.
    return "triton" if model.architecture.startswith("GptOss") else "flashinfer"


def _kv_dtype(flags: LaunchFlags, model: ModelFacts, gpu: Gpu) -> str:
    """mem_cache/kv_cache_dtype.py, 0.5.23."""
    given = flags.text("kv-cache-dtype", "auto")
    if isinstance(model.cache, CompressedCache):
        return "fp8_e4m3"
    if given == "bf16":
        return "bfloat16"
    if given != "auto":
        return given
    if model.architecture.startswith("GptOss"):
        return "bfloat16"
    if isinstance(model.cache, SparseMlaCache):
        return "fp8_e4m3" if gpu.compute_capability >= 100 else "bfloat16"
    return "fp8_e4m3" if model.format.fp8_kv_cache else "bfloat16"


def _scaled_latent(flags: LaunchFlags, model: ModelFacts, gpu: Gpu, rules: ReleaseRules) -> bool:
    """Whether a sparse model's fp8 latent is priced with block scales: FlashMLA's layout.

    arg_groups/overrides.py, 0.5.23: Hopper uses it, Blackwell only for GLM on 12.x cards.
    """
    if not isinstance(model.cache, SparseMlaCache) or not rules.scaled_latent_priced:
        return False
    backends = (flags.text("dsa-prefill-backend"), flags.text("dsa-decode-backend"))
    if "trtllm" in backends or not _kv_dtype(flags, model, gpu).startswith("fp8"):
        return False
    if gpu.compute_capability < 100:
        return True
    glm = model.architecture == "GlmMoeDsaForCausalLM" and gpu.compute_capability // 10 == 12
    return glm and rules.glm_sm120_scaled_latent


def _assumptions(flags: LaunchFlags, gpu: Gpu) -> tuple[str, ...]:
    notes = []
    if gpu.unified_memory:
        notes.append("the card shares the host's memory: what the system uses is not known")
    if not gpu.known:
        notes.append("the card is not in the catalogue: planned as a Hopper of that memory")
    if flags.set_aside:
        notes.append(f"flags not known to any release read: {', '.join(flags.set_aside)}")
    return tuple(notes)
