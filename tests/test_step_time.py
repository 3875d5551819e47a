"""Parts of a step whose size is worked out by hand, on the launches that readings speak of."""

import pytest

from pipeline.planner.fitted_kernels import FITTED
from pipeline.planner.rate_point import PointQuery, point_replica
from pipeline.planner.step_time import Replica, decode_step


def replica(**changes: object) -> Replica:
    launch: dict[str, object] = {
        "model": "Qwen/Qwen3.5-397B-A17B",
        "gpu": "rtx_pro_6000",
        "num_gpus": 4,
        "tp_size": 4,
        "dtype": "nvfp4",
        "running_requests": 1,
        "input_tokens": 0,
        "output_tokens": 512,
    }
    return point_replica(PointQuery(**{**launch, **changes}), FITTED)[0]  # type: ignore[arg-type]  # by name


def longer_context_s(launch: Replica, requests: int) -> float:
    short = decode_step(launch, requests, 0).attention_s
    return decode_step(launch, requests, 131_072).attention_s - short


def test_triton_attention_waits_for_its_longest_block() -> None:
    # 15 layers, one head of 256 a rank, fp8: 15 * 2 * 256 * 131,072 = 1.007 GB in 8 blocks.
    triton = replica(attention_backend="triton")
    alone_s = 1.007e9 / 8 / FITTED.block_bytes_per_s
    assert longer_context_s(triton, 1) == pytest.approx(alone_s, rel=0.01)
    # Eight requests fill more of the card, and each waits as long.
    assert longer_context_s(triton, 8) == pytest.approx(alone_s, rel=0.10)
    assert longer_context_s(replica(), 1) < alone_s / 20


def test_linear_attention_is_bound_by_the_vector_units_where_memory_is_fast() -> None:
    # 48 layers of 48 heads of 128 * 128: 37.7 M elements, six operations each, 144 MiB of fp32
    # beside 2.8 MiB of the convolution, read and written.
    dense = {"model": "Qwen/Qwen3.6-27B", "num_gpus": 1, "tp_size": 1, "dtype": "bf16"}
    for gpu in ("b200", "rtx_pro_6000"):
        launch = replica(gpu=gpu, **dense)
        step = decode_step(launch, 100, 0)
        bandwidth = launch.speed.memory_bytes_per_s * FITTED.cache_stream
        moved_s = 100 * 2 * 146.8 * 2**20 / bandwidth
        updates_s = 100 * 6 * 37.75e6 / (launch.speed.vector_flops * FITTED.state_vector)
        assert step.attention_s == pytest.approx((moved_s**2 + updates_s**2) ** 0.5, rel=0.01)
        assert (updates_s > 0.6 * moved_s) == (gpu == "b200")


def test_old_releases_launch_layers_and_multiply_fp8_experts_slower() -> None:
    fp8 = {"gpu": "b200", "dtype": "fp8"}
    old = decode_step(replica(sglang_version="0.5.8", **fp8), 16, 1024)
    new = decode_step(replica(sglang_version="0.5.9", **fp8), 16, 1024)
    assert old.experts_s == pytest.approx(new.experts_s / FITTED.old_fp8_experts)
    layers_s = new.overhead_s - FITTED.step_s
    assert old.overhead_s - FITTED.step_s == pytest.approx(layers_s * FITTED.old_layer)
    assert old.dense_s == new.dense_s
