"""Parts of a step whose size is worked out by hand, on the launches that readings speak of."""

import pytest

from pipeline.models.dtypes import load_model_as
from pipeline.planner.rate.kernels import FITTED
from pipeline.planner.rate.point import PointQuery, point_replica
from pipeline.planner.rate.replica import Replica
from pipeline.planner.rate.step_time import modelled_step as decode_step


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
    launch |= changes
    launch["model"] = load_model_as(str(launch["model"]), str(launch.pop("dtype")))
    return point_replica(PointQuery(**launch), FITTED)[0]  # type: ignore[arg-type]  # by name


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


# Llama-3.1-70B over four stages of one RTX PRO 6000 each, 48 requests in 4 micro-batches of 12.
STAGED = {
    "model": "meta-llama/Meta-Llama-3.1-70B", "num_gpus": 4, "tp_size": 1, "pp_size": 4,
    "dtype": "bf16",
}  # fmt: skip


def test_stage_reads_its_layers_once_for_each_micro_batch() -> None:
    step = decode_step(replica(**STAGED), 48, 0)
    # 80 layers of 855.7 M parameters and a head of 128,256 x 8,192: 20 layers and a quarter of the
    # head on a mean stage, (20 x 855.7 M + 262.7 M) x 2 B = 34.75 GB, read for 4 micro-batches.
    read_s = 4 * 34.75e9 / (1.792e12 * FITTED.weight_stream)
    assert step.dense_s == pytest.approx(read_s, rel=0.02)
    # A step of its own on every stage, for every micro-batch, and 20 layers of launches.
    assert step.overhead_s == pytest.approx(4 * (FITTED.step_s + 20 * FITTED.layer_s), rel=0.01)
    assert step.communication_s == 0


def test_last_stage_has_the_head_and_the_others_wait_for_it() -> None:
    step = decode_step(replica(**STAGED), 48, 0)
    # 128,256 x 8,192 x 2 B = 2.10 GB: 1.39 ms more on the last stage, three quarters of it over the
    # mean, four times a round: 4.18 ms, longer than the host's turn of 3 ms.
    read_s = 2.101e9 / (1.792e12 * FITTED.weight_stream)
    assert step.idle_s == pytest.approx(4 * 0.75 * read_s, rel=0.02)


def test_stages_hand_over_two_tensors() -> None:
    step = decode_step(replica(**STAGED), 48, 0)
    # 2 tensors x 12 requests x 8,192 x 2 B = 393 KB over PCIe's 50 GB/s beside two latencies; four
    # micro-batches
    sent_s = 393e3 / (50e9 * FITTED.link)
    latency_s = 2 * FITTED.pcie_all_reduce_s
    assert step.hand_over_s == pytest.approx(4 * (latency_s + sent_s), rel=0.01)


def test_one_request_keeps_one_stage_busy_at_a_time() -> None:
    staged = decode_step(replica(**STAGED), 1, 0)
    assert staged.idle_s > 2.9 * (staged.step_s() - staged.idle_s)
    # Two requests take the same round, and give twice the tokens.
    assert decode_step(replica(**STAGED), 2, 0).step_s() == pytest.approx(staged.step_s(), rel=1e-3)


def test_tensor_ranks_of_a_stage_add_up_its_layers_alone() -> None:
    two_by_two = {**STAGED, "tp_size": 2, "pp_size": 2}
    step = decode_step(replica(**two_by_two), 48, 0)
    whole = decode_step(replica(**{**STAGED, "tp_size": 2, "pp_size": 1}), 24, 0)
    # Two micro-batches of 24 over 40 of 80 layers: the same all-reduces a round.
    assert step.communication_s == pytest.approx(whole.communication_s)


def test_dense_step_is_the_soft_maximum_of_reading_and_multiplying() -> None:
    # Qwen3-32B: 31.2 B parameters in the layers and a head of 0.78 B read, 2 operations each
    launch = replica(model="Qwen/Qwen3-32B", gpu="h200", num_gpus=1, tp_size=1, dtype="bf16")
    params = sum(load.params for load in launch.dense)
    assert params == pytest.approx(31.98e9, rel=0.01)
    read_s = 2 * params / (4.8e12 * FITTED.weight_stream)
    multiplied_s = 2 * 200 * params / (launch.speed.bf16_flops * FITTED.gemm)
    expected_s = (read_s**2 + multiplied_s**2) ** 0.5
    assert decode_step(launch, 200, 0).dense_s == pytest.approx(expected_s)


def weights(launch: Replica, weight_class: str) -> tuple[float, float]:
    """Bytes and parameters of one class that are read whole."""
    loads = [load for load in launch.dense if load.weight_class == weight_class]
    return sum(load.bytes for load in loads), sum(load.params for load in loads)


def test_narrow_weights_stream_at_their_own_share() -> None:
    launch = replica(model="Qwen/Qwen3-32B", gpu="h200", num_gpus=1, tp_size=1, dtype="fp8")
    narrow, head = weights(launch, "fp8"), weights(launch, "bf16")
    stream = 4.8e12 * FITTED.weight_stream
    read_s = narrow[0] / (stream * FITTED.fp8) + head[0] / stream
    gemm, speed = FITTED.gemm, launch.speed
    multiplied_s = 2 * 50 * narrow[1] / (speed.fp8_flops * gemm * FITTED.fp8)
    multiplied_s += 2 * 50 * head[1] / (speed.bf16_flops * gemm)
    expected_s = (read_s**2 + multiplied_s**2) ** 0.5
    assert decode_step(launch, 50, 0).dense_s == pytest.approx(expected_s)


def test_experts_are_read_if_any_token_is_routed_to_them() -> None:
    # DeepSeek-V3 over 8 ranks: 8 of 256 experts per token
    launch = replica(
        model="deepseek-ai/DeepSeek-V3", gpu="h200", num_gpus=8, tp_size=8, dtype="fp8"
    )
    (load,) = launch.experts
    touched = 1 - (1 - 8 / 256) ** (32**FITTED.routing)
    read_s = touched * load.bytes / (4.8e12 * FITTED.expert_stream * FITTED.fp8_experts)
    peak = launch.speed.fp8_flops * FITTED.expert_gemm * FITTED.fp8_experts
    multiplied_s = 2 * 32 * (8 / 256) * load.params / peak
    expected_s = (read_s**2 + multiplied_s**2) ** 0.5
    assert decode_step(launch, 32, 0).experts_s == pytest.approx(expected_s)


def test_four_bit_integers_are_widened_and_multiplied_in_16_bits() -> None:
    launch = replica(model="Qwen/Qwen3-32B", gpu="h200", num_gpus=1, tp_size=1, dtype="int4")
    narrow, head = weights(launch, "int4"), weights(launch, "bf16")
    speed = launch.speed
    stream = 4.8e12 * FITTED.weight_stream
    read_s = narrow[0] / (stream * FITTED.int4) + head[0] / stream
    read_s += narrow[1] / (speed.vector_flops * FITTED.widening)
    peak = speed.bf16_flops * FITTED.gemm
    multiplied_s = 2 * 50 * (narrow[1] / (peak * FITTED.int4_gemm) + head[1] / peak)
    expected_s = (read_s**2 + multiplied_s**2) ** 0.5
    assert decode_step(launch, 50, 0).dense_s == pytest.approx(expected_s)


def test_ranks_add_up_twice_per_layer() -> None:
    launch = replica(model="Qwen/Qwen3-32B", gpu="h200", num_gpus=4, tp_size=4, dtype="bf16")
    # 64 layers; 2 x 3/4 of 32 tokens x 5120 x 2 B on the link
    sent_s = 2 * 0.75 * 32 * 5120 * 2 / (launch.speed.link_bytes_per_s * FITTED.link)
    expected_s = 2 * 64 * (FITTED.nvlink_all_reduce_s + sent_s)
    assert decode_step(launch, 32, 0).communication_s == pytest.approx(expected_s)


def test_attention_on_whole_ranks_adds_up_once_per_layer_over_all_tokens() -> None:
    launch = replica(
        model="deepseek-ai/DeepSeek-V3", gpu="h200", num_gpus=8, tp_size=8, dp_size=8, dtype="fp8"
    )
    # 61 layers; 2 x 7/8 of the 32 tokens of all ranks x 7168 x 2 B
    sent_s = 2 * 7 / 8 * 32 * 7168 * 2 / (launch.speed.link_bytes_per_s * FITTED.link)
    expected_s = 61 * (FITTED.nvlink_all_reduce_s + sent_s)
    assert decode_step(launch, 32, 0).communication_s == pytest.approx(expected_s)


def test_other_vendors_reach_less_of_their_bandwidth() -> None:
    launch = replica(model="Qwen/Qwen3-32B", gpu="mi300x", num_gpus=1, tp_size=1, dtype="bf16")
    bytes_read = sum(load.bytes for load in launch.dense)
    stream = launch.speed.memory_bytes_per_s * FITTED.weight_stream * FITTED.other_vendor
    assert decode_step(launch, 1, 0).dense_s == pytest.approx(bytes_read / stream, rel=0.02)


def test_cache_is_the_soft_maximum_of_reading_and_multiplying() -> None:
    launch = replica(model="Qwen/Qwen3-32B", gpu="h200", num_gpus=1, tp_size=1, dtype="bf16")
    # 20 requests x 1000 tokens x 262,144 B; 2 x 64 heads x 256 x 64 layers operations a token
    read_s = 20 * 1000 * 262_144 / (4.8e12 * FITTED.cache_stream)
    operations = 20 * 1000 * 2 * 64 * 256 * 64
    multiplied_s = operations / (launch.speed.bf16_flops * FITTED.attention_gemm)
    expected_s = (read_s**2 + multiplied_s**2) ** 0.5
    assert decode_step(launch, 20, 1000).attention_s == pytest.approx(expected_s)
