"""What `make estimate-fit` printed: the constants of `step_time`, and the pairs fitted to."""

from pipeline.planner.step_time import Kernels

FITTED = Kernels(
    weight_stream=0.841,
    expert_stream=0.587,
    cache_stream=0.86,
    gemm=0.546,
    expert_gemm=0.411,
    attention_gemm=0.693,
    prefill_gemm=0.537,
    fp8=0.814,
    fp4=1.0,
    int4=1.0,
    widened_gemm=0.263,
    widening=0.236,
    routing=0.846,
    other_vendor=0.499,
    step_s=0.000632,
    layer_s=1.62e-05,
    moe_layer_s=4.54e-05,
    state_layer_s=6.33e-06,
    nvlink_all_reduce_s=1.65e-05,
    pcie_all_reduce_s=3.86e-05,
    link=0.64,
    prefill_s=0.012,
    draft_step_s=0.000356,
)

# Families and cards of the calibration part.
FITTED_PAIRS: frozenset[tuple[str, str]] = frozenset(
    (
        ("DeepSeek-V3", "H200"),
        ("DeepSeek-V3.2-Exp", "B200"),
        ("Kimi-K2.5", "B200"),
        ("Kimi-K2.5", "B300"),
        ("Llama-3.1-8B", "H200"),
        ("Llama-4-Maverick-17B-128E", "Instinct MI300X"),
        ("Llama-4-Scout-17B-16E", "Instinct MI300X"),
        ("Meta-Llama-3.1-70B", "H100 80GB"),
        ("Meta-Llama-3.1-70B", "H200"),
        ("MiniMax-M2.5", "H100 80GB"),
        ("Qwen3-235B-A22B", "B200"),
        ("Qwen3-235B-A22B", "H200"),
        ("Qwen3-Next-80B-A3B", "B200"),
        ("Qwen3.5-27B", "B200"),
        ("Qwen3.5-27B", "H200"),
        ("Qwen3.5-35B-A3B", "H200"),
        ("Qwen3.5-397B-A17B", "H200"),
        ("Qwen3.5-397B-A17B", "RTX PRO 6000 Blackwell"),
        ("gpt-oss-120b", "B200"),
    )
)
