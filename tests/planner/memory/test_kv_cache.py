"""Bytes per token and pool sizes, worked out by hand for each layout."""

import pytest

from pipeline.planner.memory.kv_cache import TokenCost, kv_pool, token_cost
from tests.fakes.launches import MTP, launch_of

PLAIN = TokenCost(
    priced_bytes=100.0, unpriced_draft_bytes=0.0, fixed_bytes=0, swa_ratio=0.8, swa_bytes=0.0,
    swa_fixed_tokens=0, spare_bytes=100.0,
)  # fmt: skip


def test_block_sparse_model_keeps_one_head_per_rank_beside_its_index_keys() -> None:
    # 4 heads x 2 x 128 x 60 layers x 2 B, and 57 layers of index keys of 128 x 2 B
    assert token_cost(launch_of("MiniMaxAI/MiniMax-M3")).priced_bytes == 122_880 + 14_592
    # 4 heads over 8 ranks: one head on each
    split = token_cost(launch_of("MiniMaxAI/MiniMax-M3", "--tp 8"))
    assert split.priced_bytes == 30_720 + 14_592
    fp8 = token_cost(launch_of("MiniMaxAI/MiniMax-M3", "--tp 2 --kv-cache-dtype fp8_e4m3"))
    assert fp8.priced_bytes == 30_720 + 14_592


def test_block_draft_has_at_least_one_head_per_rank() -> None:
    draft = "--speculative-algorithm DFLASH --speculative-draft-model-path x/dflash2"
    # 8 heads x 2 x 128 x 5 layers x 2 B = 20,480
    assert token_cost(launch_of("Qwen/Qwen3-32B", draft)).priced_bytes == 262_144 + 20_480
    split = token_cost(launch_of("Qwen/Qwen3-32B", f"--tp 16 {draft}"))
    assert split.priced_bytes == 32_768 + 2_560


def test_eagle_head_has_one_layer_of_the_target() -> None:
    head = "--speculative-algorithm EAGLE3 --speculative-draft-model-path x/eagle3"
    # 262,144 / 64 layers
    assert token_cost(launch_of("Qwen/Qwen3-32B", head)).priced_bytes == 262_144 + 4_096
    old = token_cost(launch_of("Qwen/Qwen3-32B", head, version="0.5.12"))
    assert (old.priced_bytes, old.unpriced_draft_bytes) == (262_144, 4_096)


def test_draft_of_a_sparse_model_has_latent_and_index_key() -> None:
    cost = token_cost(launch_of("deepseek-ai/DeepSeek-V3.2", f"--tp 8 {MTP}"))
    # 576 x 2 B and 132 B
    assert cost.priced_bytes + cost.unpriced_draft_bytes == 78_324 + 1_284


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        # (64 + 1) x 128 + 128 + 1 = 8,449 -> 67 x 128
        ("--max-running-requests 64", 8_576),
        # 32 requests per attention rank: 33 x 128 + 129 = 4,353 -> 35 x 128
        ("--max-running-requests 64 --tp 2 --dp-size 2 --enable-dp-attention", 4_480),
        # at least one request: 2 x 128 + 129 = 385 -> 4 x 128
        ("--max-running-requests 1 --tp 2 --dp-size 2 --enable-dp-attention", 512),
        # rings of 256 under speculation: 65 x 256 + 257 = 16,897 -> 133 x 128
        (f"--max-running-requests 64 {MTP}", 17_024),
        # 256 by default: 257 x 128 + 129 = 33,025 -> 259 x 128
        ("", 33_152),
    ],
)
def test_ratio_128_states_are_kept_for_every_request(line: str, rows: int) -> None:
    cost = token_cost(launch_of("deepseek-ai/DeepSeek-V4-Flash", line, gpu="b300"))
    assert cost.fixed_bytes == rows * 2 * 512 * 4 * 20


def test_pool_has_whole_pages_and_a_spare_one() -> None:
    settings = launch_of("Qwen/Qwen3-32B", "--page-size 64").settings
    # 1,000,000 B buy 10,000 tokens: 156 pages of 64, and one spare page of 6,400 B
    pool = kv_pool(PLAIN, 1_000_000, settings)
    assert (pool.tokens, pool.swa_tokens, pool.bytes) == (9_984, 0, 998_400 + 6_400)
    assert kv_pool(PLAIN, 6_399, settings).bytes == 0


def test_pool_is_capped_in_whole_pages() -> None:
    settings = launch_of("Qwen/Qwen3-32B", "--page-size 64 --max-total-tokens 5000").settings
    assert kv_pool(PLAIN, 1_000_000, settings).tokens == 78 * 64
    assert kv_pool(PLAIN, 320_000, settings).tokens == 50 * 64
