"""Constants of the step time, and the values that `make estimate-fit` printed for them."""

import math
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
    # Share of the fp8 peak at which the indexer of sparse attention scores the keys.
    index_gemm: float = 0.30
    prefill_gemm: float = 0.55
    prefill_expert_gemm: float = 0.40
    # Share that prefill reaches where the bf16 peak is low: fewer bytes feed its tensor cores. 83 %
    # of 468 TFLOPS is measured on RTX PRO 6000.
    prefill_gemm_low_peak: float = 0.78
    # Narrow weights of dense matrices reach these parts of the shares above.
    fp8: float = 0.75
    fp4: float = 0.70
    int4: float = 0.80
    # Narrow weights of experts do.
    fp8_experts: float = 0.75
    fp4_experts: float = 0.70
    int4_experts: float = 0.80
    # Products of 4-bit integers, widened tile by tile (Marlin, arXiv:2408.11743).
    int4_gemm: float = 0.80
    # Products whose narrow weights are first widened to 16 bits.
    widened_gemm: float = 0.50
    # Parts of the shares of prefill's products that narrow weights reach there.
    fp8_prefill: float = 0.75
    fp4_prefill: float = 0.60
    int4_prefill: float = 0.80
    widened_prefill: float = 0.70
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
    # Scores, selection and page tables of a layer that selects its tokens.
    index_layer_s: float = 20e-6
    nvlink_all_reduce_s: float = 10e-6
    pcie_all_reduce_s: float = 35e-6
    # Share of the link's rate that an all-reduce reaches.
    link: float = 0.50
    prefill_s: float = 1e-3
    # Launch cost of a prefill, relative to a step: it runs without a CUDA graph.
    prefill_launches: float = 1.5
    draft_step_s: float = 0.35e-3


# Every peak reached and nothing waited for: the least time that a card allows.
PEAKS = Kernels(
    weight_stream=1.0, expert_stream=1.0, cache_stream=1.0, block_bytes_per_s=math.inf,
    state_vector=1.0, gemm=1.0, expert_gemm=1.0, attention_gemm=1.0, index_gemm=1.0,
    prefill_gemm=1.0, prefill_expert_gemm=1.0, prefill_gemm_low_peak=1.0, fp8=1.0, fp4=1.0,
    int4=1.0, fp8_experts=1.0, fp4_experts=1.0, int4_experts=1.0, int4_gemm=1.0,
    widened_gemm=1.0, fp8_prefill=1.0, fp4_prefill=1.0, int4_prefill=1.0, widened_prefill=1.0,
    widening=math.inf, old_fp8_experts=1.0, old_layer=1.0, other_vendor=1.0, step_s=0.0,
    layer_s=0.0, moe_layer_s=0.0, state_layer_s=0.0, index_layer_s=0.0, nvlink_all_reduce_s=0.0,
    pcie_all_reduce_s=0.0, link=1.0, prefill_s=0.0,
    prefill_launches=0.0, draft_step_s=0.0,
)  # fmt: skip

FITTED = Kernels(
    weight_stream=0.84,
    expert_stream=0.787,
    cache_stream=0.86,
    block_bytes_per_s=7890000000.0,
    state_vector=0.1,
    gemm=0.264,
    expert_gemm=0.404,
    attention_gemm=0.535,
    index_gemm=0.29,
    prefill_gemm=0.686,
    prefill_expert_gemm=0.38,
    prefill_gemm_low_peak=0.78,
    fp8=0.831,
    fp4=0.592,
    int4=0.757,
    fp8_experts=0.859,
    fp4_experts=0.916,
    int4_experts=0.968,
    int4_gemm=1.0,
    widened_gemm=0.31,
    fp8_prefill=0.679,
    fp4_prefill=0.613,
    int4_prefill=0.625,
    widened_prefill=0.486,
    widening=0.185,
    routing=0.937,
    old_fp8_experts=0.335,
    old_layer=1.58,
    other_vendor=0.481,
    step_s=0.000711,
    layer_s=2.14e-05,
    moe_layer_s=3.3e-05,
    state_layer_s=5.04e-06,
    index_layer_s=5.54e-05,
    nvlink_all_reduce_s=7.78e-06,
    pcie_all_reduce_s=4.39e-05,
    link=0.42,
    prefill_s=0.00103,
    prefill_launches=2.86,
    draft_step_s=0.000308,
)
