"""Launch lines that SGLang refuses before it loads anything, and the message it prints.

Each rule names the SGLang file that it is from. A rule that only some releases have reads the
release table.
"""

from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.inputs import LaunchInputs
from pipeline.planner.sglang.layout import Parallel, no_overlap
from pipeline.planner.sglang.releases import OLDEST, no_stages
from schemas.plan import CompressedCache, LinearState, ModelFacts, NoSpeculation, Speculation


def refusal_message(
    launch: LaunchInputs, *, mamba_strategy: str, page_size: int, backend: str
) -> str:
    """Return the engine's message, or "" where it accepts the launch."""
    return (
        _numbers(launch.flags)
        or _parallel(launch.model, launch.ranks)
        or _pipeline(launch)
        or _context(launch.flags, launch.model)
        or _speculative(launch, page_size, backend)
        or _states(launch, mamba_strategy, page_size, backend)
    )


def _numbers(flags: LaunchFlags) -> str:
    fraction = flags.fraction("mem-fraction-static")
    if fraction is not None and not 0 < fraction < 1:
        return f"--mem-fraction-static must lie between 0 and 1, got {fraction:g}"
    positive = (
        "tp-size", "dp-size", "pp-size", "page-size", "max-running-requests", "context-length",
        "max-total-tokens", "max-mamba-cache-size", "speculative-num-steps",
        "speculative-eagle-topk", "speculative-num-draft-tokens",
    )  # fmt: skip
    for name in positive:
        value = flags.number(name)
        if value is not None and value < 1:
            return f"--{name} must be positive, got {value}"
    for name in ("mamba-full-memory-ratio", "swa-full-tokens-ratio"):
        ratio = flags.fraction(name)
        if ratio is not None and ratio <= 0:
            return f"--{name} must be positive, got {ratio:g}"
    chunk = flags.number("chunked-prefill-size")
    page = flags.number("page-size") or 1
    if chunk is not None and chunk > 0 and chunk % page:
        # server_args.py: check_server_args
        return "chunked_prefill_size must be divisible by page_size"
    return ""


def _parallel(model: ModelFacts, ranks: Parallel) -> str:
    attention_tp = ranks.attention_tp_size
    if ranks.tp_size % ranks.attention_dp_size:
        # arg_groups/parallel_hook.py
        return f"tp_size ({ranks.tp_size}) must be divisible by dp_size ({ranks.attention_dp_size})"
    if model.heads % attention_tp:
        # the models' own assertion on total_num_heads
        return (
            f"AssertionError: the model's {model.heads} attention heads are not divisible by "
            f"the attention tensor-parallel size {attention_tp}"
        )
    small, large = sorted((model.kv_heads, attention_tp))
    if not model.uses_mla and not isinstance(model.cache, CompressedCache) and large % small:
        return (
            f"AssertionError: {model.kv_heads} key-value heads do not divide over "
            f"the attention tensor-parallel size {attention_tp}"
        )
    return ""


def _pipeline(launch: LaunchInputs) -> str:
    """Check a launch in stages.

    validation_hook.py: check_pipeline_parallel_compat; model_runner.py: support_pp.
    """
    flags, model, pp_size = launch.flags, launch.model, launch.ranks.pp_size
    if pp_size == 1:
        return ""
    if (flags.number("attn-cp-size") or 1) > 1:
        return "PP is not supported with context parallelism"
    micro_batch = flags.number("pp-max-micro-batch-size")
    if (micro_batch or 1) < 1:
        return f"pp_max_micro_batch_size must be a positive integer or None, got {micro_batch}"
    if model.layers < pp_size:
        return f"{model.layers} layers are too few for {pp_size} pipeline stages"
    if no_stages(model.architecture, launch.rules):
        return "AssertionError: Pipeline Parallel is not compatible with this model."
    return _drafted_in_stages(launch)


def _drafted_in_stages(launch: LaunchInputs) -> str:
    flags, speculation = launch.flags, launch.speculation
    if isinstance(speculation, NoSpeculation):
        return ""
    if speculation.algorithm != "EAGLE":
        return (
            "Pipeline parallelism currently only supports EAGLE (non-multi-layer) speculative "
            "decoding"
        )
    if not flags.switched_on("SGLANG_ENABLE_PP_SPEC"):
        if flags.text("disaggregation-mode") == "prefill":
            return ""
        return (
            "PP + speculative decoding (MTP) is only supported on prefill nodes "
            "(disaggregation-mode=prefill)"
        )
    if launch.ranks.attention_dp_size > 1:
        return "SGLANG_ENABLE_PP_SPEC is not compatible with attention DP (--attn-dp-size)"
    return ""


def _context(flags: LaunchFlags, model: ModelFacts) -> str:
    # configs/model_config.py: _derive_context_length
    requested = flags.number("context-length")
    if requested is None or requested <= model.context_length:
        return ""
    if flags.switched_on("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"):
        return ""
    return (
        f"User-specified context_length ({requested}) is greater than the derived context_length "
        f"({model.context_length}). To allow it, set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
    )


def _speculative(launch: LaunchInputs, page_size: int, backend: str) -> str:
    flags, speculation = launch.flags, launch.speculation
    if isinstance(speculation, NoSpeculation):
        return ""
    if not flags.has("speculative-num-steps") and (
        flags.has("speculative-eagle-topk")
        or (
            flags.has("speculative-num-draft-tokens")
            and speculation.algorithm in ("EAGLE", "EAGLE3", "STANDALONE")
        )
    ):
        # speculative_hook.py: the three are chosen together or not at all
        return (
            "speculative_num_steps is unset: leave --speculative-eagle-topk and "
            "--speculative-num-draft-tokens unset as well"
        )
    if isinstance(launch.model.cache, CompressedCache) and speculation.topk > 1:
        return "DeepSeek-V4 supports only --speculative-eagle-topk 1"
    if speculation.topk > 1 and backend == "trtllm_mha":
        return "The trtllm_mha attention backend supports only --speculative-eagle-topk 1"
    if speculation.topk > 1 and page_size > 1 and backend not in ("flashinfer", "fa3", "triton"):
        return (
            f"speculative_eagle_topk({speculation.topk}) > 1 with page_size({page_size}) > 1 is "
            f"only supported by the flashinfer, fa3 and triton attention backends"
        )
    return ""


def _states(launch: LaunchInputs, strategy: str, page_size: int, backend: str) -> str:
    flags, model, rules = launch.flags, launch.model, launch.rules
    if not isinstance(model.state, LinearState):
        return ""
    if (
        isinstance(launch.speculation, Speculation)
        and strategy == "no_buffer"
        and rules.speculation_needs_extra_buffer
        and rules.release >= OLDEST
    ):
        # server_args.py: _handle_mamba_radix_cache, 0.5.10 - 0.5.13
        return (
            f"Speculative decoding for {model.architecture} is not compatible with radix cache "
            f"when using --mamba-scheduler-strategy no_buffer. To use radix cache with "
            f"speculative decoding, please use --mamba-scheduler-strategy extra_buffer and set "
            f"SGLANG_ENABLE_SPEC_V2=1."
        )
    if (
        strategy == "no_buffer"
        and flags.text("mamba-radix-cache-strategy") == "no_buffer"
        and page_size > 1
    ):
        # mamba_hook.py
        return f"no_buffer needs page_size 1, and {backend} runs with page_size {page_size}"
    if strategy.startswith("extra_buffer"):
        return _tracking(flags, launch.speculation, page_size)
    return ""


def _tracking(flags: LaunchFlags, speculation: NoSpeculation | Speculation, page_size: int) -> str:
    # mamba_hook.py: the track interval covers a verify step and whole pages
    interval = flags.number("mamba-track-interval") or 256
    if isinstance(speculation, Speculation) and interval < speculation.num_draft_tokens:
        return (
            f"mamba_track_interval {interval} must be greater than or equal to "
            f"speculative_num_draft_tokens {speculation.num_draft_tokens}"
        )
    if interval % page_size:
        return f"mamba_track_interval {interval} must be divisible by page_size {page_size}"
    if no_overlap(flags) and flags.text("mamba-radix-cache-strategy") == "extra_buffer_lazy":
        return "Lazy extra buffer requires the overlap schedule"
    return ""
