"""What SGLang's argument resolution makes of a launch line, on one card, in one release.

`resolved` returns the settings that the engine will run with, or a `RefusedLaunch` with the line
that SGLang prints. The order follows arg_groups/pipeline.py of 0.5.23: card-dependent defaults
first, then attention data parallelism, then speculation, then backends.
"""

from dataclasses import dataclass

from pipeline.planner.sglang.defaults import (
    captured_prefill_graphs,
    card_defaults,
    default_fraction,
    no_decode_graphs,
    priced_prefill_graphs,
)
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import parallel_of
from pipeline.planner.sglang.refusals import refusal_message
from pipeline.planner.sglang.releases import ReleaseRules
from pipeline.planner.sglang.speculation import speculation_of
from schemas.plan import (
    CompressedCache,
    Gpu,
    LinearState,
    ModelFacts,
    NoSpeculation,
    PlanSettings,
    SparseMlaCache,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLaunch:
    """The launch stops before it loads anything; `message` is the engine's own line."""

    message: str


def resolved(
    flags: LaunchFlags, model: ModelFacts, gpu: Gpu, rules: ReleaseRules
) -> PlanSettings | RefusedLaunch:
    """The settings the engine runs with, or its refusal."""
    ranks = parallel_of(flags)
    speculation = speculation_of(flags, model, rules)
    strategy = mamba_strategy(flags, model, rules)
    backend, page = _backend_and_page(flags, model, gpu, rules, speculation)
    message = refusal_message(
        flags, model, rules, ranks.pp_size, ranks.tp_size, ranks.attention_dp_size,
        ranks.attention_tp_size, speculation, strategy, page, backend,
    )  # fmt: skip
    if message:
        return RefusedLaunch(message=message)
    chunk, decode_max_bs = card_defaults(flags, gpu, rules)
    buckets = priced_prefill_graphs(flags, model, rules, ranks, chunk)
    given = flags.fraction("mem-fraction-static")
    fraction = given
    if fraction is None:
        fraction = default_fraction(flags, model, gpu, rules, ranks, chunk, decode_max_bs, buckets)
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
        decode_graph_max_bs=0 if no_decode_graphs(flags) else decode_max_bs,
        prefill_graph_buckets=captured_prefill_graphs(
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
