"""What `make estimate-fit` printed: the constants of `step_time`, and the pairs fitted to."""

from pipeline.planner.rate.step_time import Kernels

FITTED = Kernels(
    weight_stream=0.841,
    expert_stream=0.569,
    cache_stream=0.839,
    block_bytes_per_s=7160000000.0,
    state_vector=0.0849,
    gemm=0.457,
    expert_gemm=0.401,
    attention_gemm=0.691,
    prefill_gemm=0.565,
    fp8=0.809,
    fp4=1.0,
    int4=1.0,
    int4_gemm=0.747,
    widened_gemm=0.262,
    widening=0.187,
    routing=0.851,
    old_fp8_experts=0.19,
    old_layer=1.49,
    other_vendor=0.489,
    step_s=0.00062,
    layer_s=1.53e-05,
    moe_layer_s=3.23e-05,
    state_layer_s=6.68e-06,
    nvlink_all_reduce_s=1.56e-05,
    pcie_all_reduce_s=3.95e-05,
    link=0.628,
    prefill_s=0.0101,
    draft_step_s=0.000341,
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
