"""Rules that a rate keeps at every point: more requests never slow it, and no peak is exceeded."""

from dataclasses import replace
from random import Random

import pytest

from pipeline.errors import PlanError
from pipeline.models.dtypes import load_model_as
from pipeline.planner.cards import gpu_keys, gpu_named
from pipeline.planner.rate.kernels import FITTED, PEAKS
from pipeline.planner.rate.point import PointQuery, point_replica, rate_at_point
from pipeline.planner.rate.readings.offsets import NO_OFFSETS
from pipeline.planner.rate.readings.traits import ENGINES
from pipeline.planner.rate.throughput import Workload, rate_at

MODELS = (
    ("Qwen/Qwen3.6-27B", ("bf16", "fp8", "nvfp4")),
    ("Qwen/Qwen3-32B", ("bf16", "fp8", "int4")),
    ("Qwen/Qwen3-8B", ("bf16", "fp8")),
    ("Qwen/Qwen3.5-397B-A17B", ("bf16", "fp8", "nvfp4")),
    ("deepseek-ai/DeepSeek-V3", ("fp8", "nvfp4")),
    ("deepseek-ai/DeepSeek-V3.2", ("fp8",)),
    ("zai-org/GLM-5", ("fp8", "nvfp4")),
    ("openai/gpt-oss-120b", ("mxfp4",)),
    ("meta-llama/Meta-Llama-3.1-70B", ("bf16", "fp8", "nvfp4")),
    ("moonshotai/Kimi-K2.5", ("int4", "nvfp4")),
    ("MiniMaxAI/MiniMax-M2.5", ("fp8",)),
)


def questions(count: int) -> list[PointQuery]:
    """Random points on random cards, with and without MTP."""
    random = Random(20_261_201)
    found: list[PointQuery] = []
    while len(found) < count:
        name, dtypes = random.choice(MODELS)
        tp = random.choice((1, 2, 4, 8))
        query = PointQuery(
            model=load_model_as(name, random.choice(dtypes)),
            gpu=random.choice(tuple(gpu_keys())),
            num_gpus=tp,
            tp_size=tp,
            running_requests=2 ** random.uniform(0, 9),
            input_tokens=random.choice((0, 100, 1000, 8000, 30_000)),
            output_tokens=random.choice((100, 1000, 8000)),
            accept_length=random.choice((None, None, None, 2.5)),
            engine=random.choice(ENGINES),
            kv_format=random.choice((None, "fp8", "bf16")),
        )
        try:
            point_replica(query, FITTED)
        except PlanError:
            continue
        found.append(query)
    return found


QUESTIONS = questions(150)


def total(query: PointQuery) -> float:
    return rate_at_point(query).tokens_per_s_per_gpu.p50


def test_more_requests_never_give_fewer_tokens_and_each_gets_no_more() -> None:
    for query in QUESTIONS:
        more = replace(query, running_requests=1.5 * query.running_requests)
        gained = total(more) / total(query)
        assert 0.9999 <= gained <= 1.5001, query


def test_longer_contexts_and_wider_caches_never_give_more_tokens() -> None:
    for query in QUESTIONS:
        longer = replace(query, input_tokens=query.input_tokens + 2000)
        assert total(longer) <= 1.0001 * total(query), query
        wide, narrow = (replace(query, kv_format=name) for name in ("bf16", "fp8"))
        assert total(wide) <= 1.0001 * total(narrow), query


def test_no_rate_exceeds_what_the_peaks_of_the_card_allow() -> None:
    for query in QUESTIONS:
        replica, replicas = point_replica(query, FITTED)
        work = Workload(
            prompt_tokens_mean=query.input_tokens, output_tokens_mean=query.output_tokens,
            output_tokens_cv=0.0,
        )  # fmt: skip
        ideal = replace(replica, kernels=PEAKS, offsets=NO_OFFSETS)
        running = query.running_requests / replicas
        most = rate_at(ideal, running, work, accept_length=query.accept_length).tokens_per_s
        found = rate_at(replica, running, work, accept_length=query.accept_length).tokens_per_s
        assert found <= 1.0001 * most, query


@pytest.mark.parametrize("gpu", ["b200", "rtx_pro_6000", "h200"])
def test_a_read_of_the_weights_and_the_cache_bounds_the_rate_by_hand(gpu: str) -> None:
    # Llama-3.1-70B in bf16 over 2 cards: 70.6 B parameters without the embedding of 1.05 B; a
    # context of 1,500 tokens is 80 layers x 2 x 8 heads x 128 x 2 B = 0.328 MB a token.
    query = PointQuery(
        model=load_model_as("meta-llama/Meta-Llama-3.1-70B", "bf16"), gpu=gpu, num_gpus=2,
        tp_size=2, running_requests=32, input_tokens=1000, output_tokens=1000, engine="trtllm",
    )  # fmt: skip
    read = 2 * 69.5e9 + 32 * 1500 * 0.328e6
    speed = point_replica(query, FITTED)[0].speed
    assert gpu_named(gpu).name == point_replica(query, FITTED)[0].gpu
    assert total(query) < 32 / (read / 2 / speed.memory_bytes_per_s) / 2
