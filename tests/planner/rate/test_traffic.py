"""A request's traffic in one step, worked out by hand for each layout of the cache."""

import pytest

from pipeline.planner.rate.traffic import RequestTraffic, request_traffic
from tests.fakes.launches import launch_of


def traffic(name: str, context: float, line: str = "", gpu: str = "h200") -> RequestTraffic:
    launch = launch_of(name, line, gpu=gpu)
    return request_traffic(launch.model, launch.settings, launch.ranks, context, 1e6)


def test_full_attention_reads_every_token_and_is_divided_over_ranks() -> None:
    # 2 x 8 heads x 128 x 64 layers x 2 B; 2 x 64 heads x 256 x 64 layers
    whole = traffic("Qwen/Qwen3-32B", 1000)
    assert whole.kv_bytes == 262_144 * 1000
    assert whole.flops == 2 * 64 * 256 * 64 * 1000
    half = traffic("Qwen/Qwen3-32B", 1000, "--tp 2")
    assert (half.kv_bytes, half.flops) == (whole.kv_bytes / 2, whole.flops / 2)
    assert (whole.state_bytes, whole.state_flops) == (1e6, 0)


def test_window_layers_read_no_more_than_their_window() -> None:
    # gpt-oss-20b: 12 + 12 layers of 8 KV heads x 2 x 64 x 2 B, a window of 128; 64 query heads
    long, short = traffic("openai/gpt-oss-20b", 1000), traffic("openai/gpt-oss-20b", 100)
    assert long.kv_bytes == 24_576 * (1000 + 128)
    assert long.flops == 2 * 64 * 128 * 12 * (1000 + 128)
    assert short.kv_bytes == 24_576 * 200


def test_latent_attention_reads_one_latent_and_multiplies_twice_with_its_rank() -> None:
    # 576 x 61 x 2 B whatever the ranks; 2 x 16 heads x (2 x 512 + 64) x 61
    made = traffic("deepseek-ai/DeepSeek-V3", 1000, "--tp 8")
    assert made.kv_bytes == 70_272 * 1000
    assert made.flops == 2 * 16 * 1088 * 61 * 1000


def test_sparse_latent_attention_reads_selected_latents_and_all_index_keys() -> None:
    # 2048 latents of 576 x 2 B, and 132 B per token of context, in 61 layers
    made = traffic("deepseek-ai/DeepSeek-V3.2", 10_000, "--tp 8")
    assert made.kv_bytes == 61 * (2048 * 1152 + 10_000 * 132)
    assert made.flops == 2 * 16 * 1088 * 61 * 2048
    short = traffic("deepseek-ai/DeepSeek-V3.2", 1000, "--tp 8")
    assert short.kv_bytes == 61 * 1000 * (1152 + 132)


@pytest.mark.parametrize(("line", "heads", "queries"), [("", 4, 64), ("--tp 8", 1, 8)])
def test_block_sparse_attention_reads_selected_blocks(line: str, heads: int, queries: int) -> None:
    launch = launch_of("MiniMaxAI/MiniMax-M3", line)
    chosen = launch.model.sparse_topk_tokens
    assert 0 < chosen < 100_000
    made = traffic("MiniMaxAI/MiniMax-M3", 100_000, line)
    # 57 sparse layers and 3 full ones of 2 x 128 x 2 B per head; index keys of 128 x 2 B
    tokens = 57 * chosen + 3 * 100_000
    assert made.kv_bytes == heads * 512 * tokens + 57 * 256 * 100_000
    assert made.flops == 4 * queries * 128 * tokens


def test_compressed_attention_reads_a_window_and_its_latents() -> None:
    # Latents of 585 B (window), 585 B (ratio 4) and 864 B (ratio 128) with padding. At 1280 tokens:
    # 43 windows of 128, 21 layers of 320 latents (fewer than the 512 selected), 20 of 10.
    made = traffic("deepseek-ai/DeepSeek-V4-Flash", 1280, "--tp 4")
    keys = 21 * 320 * 132
    assert made.kv_bytes == 43 * 128 * 585 + 21 * 320 * 585 + 20 * 10 * 864 + keys
    assert made.flops == 4 * 16 * 512 * (43 * 128 + 21 * 320 + 20 * 10)


def test_state_is_passed_over_three_times() -> None:
    # 48 layers x 48 heads x 128 x 128, two operations each time
    assert traffic("Qwen/Qwen3.6-27B", 0).state_flops == 6 * 48 * 48 * 128 * 128
    assert traffic("Qwen/Qwen3.6-27B", 0, "--tp 2").state_flops == 3 * 48 * 48 * 128 * 128
