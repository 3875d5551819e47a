"""Constants of the step time, and the values that `make estimate-fit` printed for them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Shares of a GPU's peaks that kernels reach, and fixed latencies.

    The values here start the fit: shares used by closed-form models, and latencies from public
    measurements. `tests/scores/fit_estimate.py` pulls each one towards its value here.
    """

    # Share of the memory bandwidth at which a dense matrix of 16-bit weights streams.
    weight_stream: float = 0.84
    expert_stream: float = 0.65
    cache_stream: float = 0.75
    # Bandwidth of one block of Triton's decode attention: at best one multiprocessor's part of
    # the card's, 9.5 GB/s on RTX PRO 6000 (1,792 GB/s over 188).
    block_bytes_per_s: float = 9e9
    # Share of the vector rate at which linear attention updates its states.
    state_vector: float = 0.10
    # Share of the arithmetic peak that a dense matrix product reaches at decode shapes.
    gemm: float = 0.65
    expert_gemm: float = 0.40
    attention_gemm: float = 0.50
    prefill_gemm: float = 0.55
    # Narrow weights reach these parts of the shares above.
    fp8: float = 0.75
    fp4: float = 0.70
    int4: float = 0.80
    # Products of 4-bit integers, widened tile by tile (Marlin, arXiv:2408.11743).
    int4_gemm: float = 0.80
    # Products whose narrow weights are first widened to 16 bits.
    widened_gemm: float = 0.50
    # Share of the vector rate at which weights are widened, one operation each.
    widening: float = 0.30
    # Exponent of the tokens: skewed routing touches fewer experts than uniform routing.
    routing: float = 0.92
    # Part of the shares above that fp8 experts reach on Blackwell before SGLang 0.5.9.
    old_fp8_experts: float = 0.50
    # Launch cost of a layer before SGLang 0.5.9, relative to later releases.
    old_layer: float = 1.30
    # Part of the shares above that the same engine reaches on AMD cards.
    other_vendor: float = 0.60
    step_s: float = 0.8e-3
    layer_s: float = 15e-6
    moe_layer_s: float = 25e-6
    state_layer_s: float = 5e-6
    nvlink_all_reduce_s: float = 10e-6
    pcie_all_reduce_s: float = 35e-6
    # Share of the link's rate that an all-reduce reaches.
    link: float = 0.50
    prefill_s: float = 5e-3
    draft_step_s: float = 0.35e-3


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

# Pairs of model family and card among the readings that the constants were fitted to.
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
