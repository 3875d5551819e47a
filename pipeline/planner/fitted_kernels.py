"""The constants of `step_time` as `make estimate-fit` printed them, on the calibration part."""

from pipeline.planner.step_time import Kernels

FITTED = Kernels(
    weight_stream=0.841,
    expert_stream=0.572,
    cache_stream=0.86,
    gemm=0.733,
    expert_gemm=0.423,
    attention_gemm=0.613,
    prefill_gemm=0.524,
    fp8=0.704,
    fp4=1.0,
    int4=1.0,
    widened_gemm=0.268,
    widening=0.294,
    routing=0.816,
    other_vendor=0.387,
    step_s=0.000505,
    layer_s=1.42e-05,
    moe_layer_s=4.82e-05,
    state_layer_s=4.93e-06,
    nvlink_all_reduce_s=1.29e-05,
    pcie_all_reduce_s=4e-05,
    link=0.835,
    prefill_s=0.0116,
    draft_step_s=0.000285,
)
