"""SGLang's argument resolution: from a launch line to the settings that the engine runs with.

`resolved` returns those settings, or a `RefusedLaunch` with the message that SGLang prints. The
order is that of arg_groups/pipeline.py, 0.5.23: card-dependent defaults first, then attention data
parallelism, then speculation, then backends.
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
from pipeline.planner.sglang.inputs import LaunchInputs, launch_inputs
from pipeline.planner.sglang.refusals import refusal_message
from pipeline.planner.sglang.releases import ReleaseRules
from schemas.plan import (
    CompressedCache,
    Gpu,
    LinearState,
    ModelFacts,
    PlanSettings,
    SparseMlaCache,
    Speculation,
)

# SGLang's own default. server_args.py, 0.5.23
_MAX_PREFILL_TOKENS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLaunch:
    """A launch that stops before it loads anything; `message` is the engine's own."""

    message: str


def resolved(
    flags: LaunchFlags, model: ModelFacts, gpu: Gpu, rules: ReleaseRules
) -> PlanSettings | RefusedLaunch:
    """Return the settings that the engine runs with, or its refusal."""
    launch = launch_inputs(flags, model, gpu, rules)
    strategy = _mamba_strategy(launch)
    backend, page = _backend_and_page(launch)
    message = refusal_message(launch, mamba_strategy=strategy, page_size=page, backend=backend)
    if message:
        return RefusedLaunch(message=message)
    ranks, sizes = launch.ranks, card_defaults(launch)
    chunk = sizes.chunk_tokens
    prefill_graphs = priced_prefill_graphs(launch, chunk)
    fraction = flags.fraction("mem-fraction-static")
    requests, source = _requests(launch)
    kv_dtype = _kv_dtype(flags, model, gpu)
    return PlanSettings(
        release=rules.label,
        tp_size=ranks.tp_size,
        pp_size=ranks.pp_size,
        attention_dp_size=ranks.attention_dp_size,
        mem_fraction_static=default_fraction(launch, sizes, prefill_graphs)
        if fraction is None
        else fraction,
        mem_fraction_given=fraction is not None,
        chunked_prefill_size=chunk // ranks.attention_dp_size if chunk > 0 else chunk,
        max_prefill_tokens=flags.number("max-prefill-tokens") or _MAX_PREFILL_TOKENS,
        context_length=flags.number("context-length") or model.context_length,
        page_size=page,
        attention_backend=backend,
        kv_cache_dtype=kv_dtype,
        scaled_latent=_scaled_latent(launch, kv_dtype),
        decode_graph_max_bs=0 if no_decode_graphs(flags) else sizes.decode_max_bs,
        prefill_graph_buckets=captured_prefill_graphs(launch, prefill_graphs, chunk, backend),
        max_running_requests=requests,
        max_running_requests_source=source,
        max_total_tokens=flags.number("max-total-tokens"),
        disable_radix_cache=flags.has("disable-radix-cache"),
        mamba_strategy=strategy,
        speculation=launch.speculation,
        assumptions=_assumptions(flags, gpu),
    )


# --- requests and states ----------------------------------------------------------------------


def _requests(launch: LaunchInputs) -> tuple[int | None, str]:
    """Return max_running_requests over all ranks, and where the number comes from."""
    given = launch.flags.number("max-running-requests")
    if given is not None:
        return given, "given"
    if isinstance(launch.model.cache, CompressedCache):
        return 256, "SGLang's default for DeepSeek-V4"
    if isinstance(launch.speculation, Speculation):
        return 48, "SGLang's default under speculation"
    return None, "unset"


def _mamba_strategy(launch: LaunchInputs) -> str:
    """Return how the prefix cache keeps the states of linear attention."""
    flags, state = launch.flags, launch.model.state
    if not isinstance(state, LinearState):
        return "none"
    if flags.has("disable-radix-cache"):
        return "radix_off"
    given = flags.text("mamba-radix-cache-strategy", "auto")
    if given != "auto":
        return given
    # Models with short convolutions do not track states.
    # arg_groups/mamba_hook.py: supports_mamba_cache_extra_buffer, 0.5.23
    if flags.has("disable-overlap-schedule") or state.kind == "conv":
        return "no_buffer"
    return launch.rules.auto_mamba_strategy


# --- backends ---------------------------------------------------------------------------------


def _backend_and_page(launch: LaunchInputs) -> tuple[str, int]:
    """Return the attention backend and its page size. arg_groups/attention_hook.py, 0.5.23."""
    flags, cache = launch.flags, launch.model.cache
    backend = flags.text("attention-backend") or _default_backend(launch)
    if not flags.has("attention-backend") and _needs_single_token_pages(launch):
        backend = backend.replace("trtllm_mha", "triton")
    used = (backend, flags.text("decode-attention-backend") or backend)
    page = flags.number("page-size") or 1
    if isinstance(cache, CompressedCache):
        return backend, 256
    if isinstance(cache, SparseMlaCache) and backend in ("dsa", "nsa"):
        return backend, 64
    if "trtllm_mla" in used or "cutedsl_mla" in used:
        return backend, page if page in (32, 64) else 64
    if "trtllm_mha" in used:
        return backend, page if page in (16, 32, 64, 128) else 64
    if "flashmla" in used:
        return backend, 64
    blackwell = launch.gpu.compute_capability // 10 == 10
    if backend == "fa4" and not launch.model.uses_mla and blackwell:
        return backend, 128
    return backend, page


def _needs_single_token_pages(launch: LaunchInputs) -> bool:
    """Return True for Qwen hybrids whose prefix cache tracks no states, on Blackwell.

    arg_groups/model_overrides/qwen3_5.py, 0.5.23; the automatic strategy counts as untracked.
    """
    if not launch.model.architecture.startswith(("Qwen3Next", "Qwen3_5")):
        return False
    flags = launch.flags
    tracked = flags.text("mamba-radix-cache-strategy").startswith("extra_buffer")
    drafted = isinstance(launch.speculation, Speculation)
    return not (tracked or drafted or flags.has("disable-radix-cache"))


def _default_backend(launch: LaunchInputs) -> str:
    model, capability = launch.model, launch.gpu.compute_capability
    datacenter_blackwell = capability in (100, 103)
    if isinstance(model.cache, CompressedCache):
        return "dsv4"
    if isinstance(model.cache, SparseMlaCache):
        return "dsa"
    if model.uses_mla:
        return _mla_backend(model.architecture, capability)
    if model.architecture.startswith("Gemma4") and not datacenter_blackwell:
        # Heads of 512 have no FlashAttention kernel. model_overrides/gemma4.py, 0.5.23
        return "triton"
    if capability == 90:
        return "fa3"
    is_mamba2 = isinstance(model.state, LinearState) and model.state.kind == "mamba2"
    runs_trtllm = launch.rules.mamba2_trtllm_attention or not is_mamba2
    topk = launch.speculation.topk if isinstance(launch.speculation, Speculation) else 1
    if datacenter_blackwell and topk <= 1 and runs_trtllm:
        return "trtllm_mha"
    # Attention sinks have no FlashInfer kernel.
    return "triton" if model.architecture.startswith("GptOss") else "flashinfer"


def _mla_backend(architecture: str, capability: int) -> str:
    if capability == 90:
        return "fa3"
    if capability not in (100, 103):
        return "triton"
    deepseek = architecture in ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
    return "trtllm_mla" if deepseek else "flashinfer"


def _kv_dtype(flags: LaunchFlags, model: ModelFacts, gpu: Gpu) -> str:
    # mem_cache/kv_cache_dtype.py, 0.5.23
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
    if flags.text("dtype") in ("float", "float32"):
        return "float32"
    return "fp8_e4m3" if model.format.fp8_kv_cache else "bfloat16"


def _scaled_latent(launch: LaunchInputs, kv_dtype: str) -> bool:
    """Return True where a sparse model's fp8 latent has block scales: FlashMLA's layout.

    arg_groups/overrides.py, 0.5.23: Hopper uses it, Blackwell only for GLM on 12.x cards.
    """
    flags, rules, capability = launch.flags, launch.rules, launch.gpu.compute_capability
    if not isinstance(launch.model.cache, SparseMlaCache) or not rules.scaled_latent_priced:
        return False
    backends = (flags.text("dsa-prefill-backend"), flags.text("dsa-decode-backend"))
    if "trtllm" in backends or not kv_dtype.startswith("fp8"):
        return False
    if capability < 100:
        return True
    is_glm = launch.model.architecture == "GlmMoeDsaForCausalLM"
    return is_glm and capability // 10 == 12 and rules.glm_sm120_scaled_latent


def _assumptions(flags: LaunchFlags, gpu: Gpu) -> tuple[str, ...]:
    notes = []
    if gpu.unified_memory:
        notes.append("the card shares the host's memory: what the system uses is not known")
    if not gpu.known:
        notes.append("the card is not in the catalogue: planned as a Hopper of that memory")
    if flags.set_aside:
        notes.append(f"flags that no known release has: {', '.join(flags.set_aside)}")
    return tuple(notes)
