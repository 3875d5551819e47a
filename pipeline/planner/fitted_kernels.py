"""What `make estimate-fit` printed: the constants of `step_time`, and the pairs fitted to."""

from pipeline.planner.step_time import Kernels

FITTED = Kernels(
    weight_stream=0.841,
    expert_stream=0.614,
    cache_stream=0.86,
    gemm=0.581,
    expert_gemm=0.414,
    attention_gemm=0.676,
    prefill_gemm=0.539,
    fp8=0.79,
    fp4=1.0,
    int4=0.809,
    widened_gemm=0.261,
    widening=0.228,
    routing=0.834,
    other_vendor=0.386,
    step_s=0.00062,
    layer_s=1.53e-05,
    moe_layer_s=5.25e-05,
    state_layer_s=6.04e-06,
    nvlink_all_reduce_s=1.53e-05,
    pcie_all_reduce_s=3.62e-05,
    link=0.669,
    prefill_s=0.011,
    draft_step_s=0.000357,
)

# Families and cards of the calibration part.
FITTED_PAIRS: frozenset[tuple[str, str]] = frozenset(
    (
        ("DeepSeek-V3", "H200"),
        ("DeepSeek-V3.2-Exp", "B200"),
        ("Kimi-K2.5", "B200"),
        ("Kimi-K2.5", "B300"),
        ("Kimi-K2.5", "Instinct MI355X"),
        ("Llama-3.1-70B", "H100 80GB"),
        ("Llama-3.1-70B", "H200"),
        ("Llama-3.1-8B", "H200"),
        ("Llama-4-Maverick-17B-128E", "Instinct MI300X"),
        ("MiniMax-M2.5", "H100 80GB"),
        ("NVIDIA-Nemotron-3-Super-120B-A12B", "DGX Spark (GB10)"),
        ("Qwen3-235B-A22B", "B200"),
        ("Qwen3-235B-A22B", "H200"),
        ("Qwen3-Coder-Next", "B200"),
        ("Qwen3.5-27B", "B200"),
        ("Qwen3.5-27B", "H200"),
        ("Qwen3.5-35B-A3B", "H200"),
        ("Qwen3.5-397B-A17B", "H200"),
        ("Qwen3.5-397B-A17B", "RTX PRO 6000 Blackwell"),
        ("gpt-oss-120b", "B200"),
    )
)
