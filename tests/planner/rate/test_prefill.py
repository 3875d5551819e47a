"""Time of a prompt, worked out by hand from the constants alone."""

import pytest

from pipeline.models.dtypes import load_model_as
from pipeline.planner.rate.kernels import FITTED
from pipeline.planner.rate.point import PointQuery, point_replica
from pipeline.planner.rate.replica import Replica
from pipeline.planner.rate.step_time import modelled_prefill_s, modelled_step
from pipeline.planner.rate.throughput import Workload, prompt_cost_s
from pipeline.planner.rate.traffic import prompt_flops, request_traffic


def replica(name: str, dtype: str, gpu: str, tp: int = 1) -> Replica:
    query = PointQuery(
        model=load_model_as(name, dtype), gpu=gpu, num_gpus=tp, tp_size=tp, running_requests=1,
        input_tokens=1000, output_tokens=1000,
    )  # fmt: skip
    return point_replica(query, FITTED)[0]


def launches_s(launch: Replica) -> float:
    step_s = modelled_step(launch, 1, 0).overhead_s
    return FITTED.prefill_s + FITTED.prefill_launches * step_s


def attention_s(launch: Replica, tokens: float) -> float:
    flops = prompt_flops(launch.model, launch.settings, launch.ranks, tokens)
    return flops / (launch.speed.bf16_flops * FITTED.attention_gemm)


@pytest.mark.parametrize(
    ("gpu", "share"),
    [("h200", FITTED.prefill_gemm), ("rtx_pro_6000", FITTED.prefill_gemm_low_peak)],
)
def test_prompt_is_multiplied_at_a_share_that_depends_on_the_peak(gpu: str, share: float) -> None:
    launch = replica("Qwen/Qwen3-32B", "bf16", gpu)
    # 31.2 B parameters in the layers; the head sees the last token alone
    params = sum(load.params for load in launch.dense) - sum(load.params for load in launch.head)
    assert params == pytest.approx(31.2e9, rel=0.01)
    expected_s = 2 * params * 4000 / (launch.speed.bf16_flops * share)
    expected_s += attention_s(launch, 4000) + launches_s(launch)
    assert modelled_prefill_s(launch, 4000) == pytest.approx(expected_s)


def test_experts_are_multiplied_at_a_share_of_their_own() -> None:
    launch = replica("Qwen/Qwen3-30B-A3B", "bf16", "h200")
    (experts,) = launch.experts
    dense = sum(load.params for load in launch.dense) - sum(load.params for load in launch.head)
    peak = launch.speed.bf16_flops
    # 8 of 128 experts a token
    expected_s = 2 * 4000 * dense / (peak * FITTED.prefill_gemm)
    expected_s += 2 * 4000 * experts.params / 16 / (peak * FITTED.prefill_expert_gemm)
    expected_s += attention_s(launch, 4000) + launches_s(launch)
    assert modelled_prefill_s(launch, 4000) == pytest.approx(expected_s)


def test_prompts_that_come_together_share_their_launches() -> None:
    launch = replica("Qwen/Qwen3-8B", "bf16", "h200")
    alone_s = modelled_prefill_s(launch, 500)
    shared_s = modelled_prefill_s(launch, 500, 4)
    assert alone_s - shared_s == pytest.approx(launches_s(launch) * 3 / 4)
    work = Workload(prompt_tokens_mean=500, output_tokens_mean=100, output_tokens_cv=0.0)
    # Of 400 requests of 100 tokens four end a step, and four prompts come.
    few, many = (prompt_cost_s(launch, running, work, 0.01, 1.0) for running in (50, 400))
    assert few / many == pytest.approx(alone_s / shared_s)


def test_a_prompt_expands_its_latent_vectors() -> None:
    launch = replica("deepseek-ai/DeepSeek-V3", "fp8", "h200", tp=8)
    # 16 of 128 heads, 61 layers: a key of 128 + 64 and a value of 128, 2 operations each, and half
    # of the prompt of 8,192 seen on average; decoding has 2 x 512 + 64 a head.
    flops = 2 * 16 * 320 * 61 * 4096 * 8192
    found = prompt_flops(launch.model, launch.settings, launch.ranks, 8192)
    assert found == pytest.approx(flops)
    decoded = request_traffic(launch.model, launch.settings, launch.ranks, 4096, 0.0).flops
    assert decoded == pytest.approx(2 * 16 * 1088 * 61 * 4096)


def test_a_layer_that_selects_tokens_scores_all_keys() -> None:
    launch = replica("zai-org/GLM-5", "fp8", "h200", tp=8)
    # 32 heads of 128 against 10,000 keys in each of 78 layers, on every rank
    traffic = request_traffic(launch.model, launch.settings, launch.ranks, 10_000, 0.0)
    assert traffic.index_flops == pytest.approx(2 * 32 * 128 * 10_000 * 78)
    plain = replica("deepseek-ai/DeepSeek-V3", "fp8", "h200", tp=8)
    assert request_traffic(plain.model, plain.settings, plain.ranks, 10_000, 0.0).index_flops == 0
    # 78 layers, 75 of them with experts
    overhead_s = FITTED.step_s + 78 * (FITTED.layer_s + FITTED.index_layer_s)
    overhead_s += 75 * FITTED.moe_layer_s
    assert modelled_step(launch, 1, 0).overhead_s == pytest.approx(overhead_s)
