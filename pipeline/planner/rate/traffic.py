"""Bytes and operations of one decode step on a request's own memory: KV cache and state.

Everything is per GPU. Sources: the pool layouts of `kv_cache` and `state_pool`; the absorbed MLA
form of DeepSeek-V2 (arXiv:2405.04434); the token selection of DeepSeek-V3.2 and V4.
"""

from dataclasses import dataclass

from pipeline.planner.memory.kv_cache import (
    element_bytes,
    gqa_bytes,
    index_bytes,
    latent_elements,
    layout_bytes,
    v4_slot_bytes,
)
from pipeline.planner.sglang.layout import Parallel
from schemas.plan import (
    BlockSparseCache,
    CompressedCache,
    GqaCache,
    LinearState,
    MlaCache,
    ModelFacts,
    PlanSettings,
    SlidingCache,
    SparseMlaCache,
)

# One index key of DeepSeek-V4: 128 fp8 values and an fp32 scale. deepseek_v4_memory_pool.py, 0.5.23
_V4_INDEX_BYTES = 128 + 4
_V4_LATENT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTraffic:
    """Traffic of one request in one step, on one GPU.

    A step reads `state_bytes` once and writes them once. `flops` are the operations of attention
    for one new token; `index_flops` those of scoring all keys, where attention selects tokens;
    `state_flops` those on the state, outside the tensor cores.
    """

    kv_bytes: float
    state_bytes: float
    flops: float
    index_flops: float
    state_flops: float


def request_traffic(
    model: ModelFacts,
    settings: PlanSettings,
    ranks: Parallel,
    context_tokens: float,
    state_slot_bytes: float,
) -> RequestTraffic:
    """Return the traffic of a request with `context_tokens` of context."""
    kv, flops = _attention(model, settings, ranks, context_tokens)
    state_flops = 0.0
    if isinstance(model.state, LinearState) and model.state.kind != "conv":
        state = model.state
        # The state is decayed, updated and read: three passes of two operations per element.
        elements = state.layers * state.heads * state.head_dim * state.state_dim
        state_flops = 6.0 * elements / ranks.attention_tp_size
    return RequestTraffic(
        kv_bytes=kv,
        state_bytes=state_slot_bytes,
        flops=flops,
        index_flops=_index_flops(model, context_tokens),
        state_flops=state_flops,
    )


def prompt_flops(
    model: ModelFacts, settings: PlanSettings, ranks: Parallel, prompt_tokens: float
) -> float:
    """Return the operations of attention on a whole prompt; a token sees half of it on average."""
    context = prompt_tokens / 2
    _, flops = _attention(model, settings, ranks, context)
    if isinstance(model.cache, MlaCache) and model.cache.expanded_dim:
        # A prompt expands its latent vectors; only decoding uses the absorbed form.
        heads = max(model.heads / ranks.attention_tp_size, 1.0)
        flops = 2 * heads * model.cache.expanded_dim * context * model.cache.layers
    return flops * prompt_tokens


def _index_flops(model: ModelFacts, context: float) -> float:
    """Count the scores of one token against all keys. Every tensor-parallel rank computes them."""
    cache = model.cache
    if not isinstance(cache, SparseMlaCache):
        return 0.0
    return 2 * cache.index_heads * cache.index_head_dim * context * cache.index_layers


def _attention(
    model: ModelFacts, settings: PlanSettings, ranks: Parallel, context: float
) -> tuple[float, float]:
    """Return bytes read and operations, over all layers with a KV cache."""
    cache = model.cache
    heads = max(model.heads / ranks.attention_tp_size, 1.0)
    element = element_bytes(settings.kv_cache_dtype)
    chosen = min(context, model.sparse_topk_tokens or context)
    if isinstance(cache, GqaCache):
        bytes_read = layout_bytes(cache, ranks, element, settings) * context
        return bytes_read, _gqa_flops(cache, heads, context)
    if isinstance(cache, SlidingCache):
        near = min(context, cache.window_tokens)
        bytes_read = gqa_bytes(cache.full, ranks, element) * context
        bytes_read += gqa_bytes(cache.window, ranks, element) * near
        flops = _gqa_flops(cache.full, heads, context) + _gqa_flops(cache.window, heads, near)
        return bytes_read, flops
    if isinstance(cache, MlaCache):
        bytes_read = layout_bytes(cache, ranks, element, settings) * context
        return bytes_read, _latent_flops(cache, heads, context)
    if isinstance(cache, SparseMlaCache):
        latents = latent_elements(cache, settings) * cache.layers * element * chosen
        keys = index_bytes(cache) * cache.index_layers * context
        return latents + keys, _latent_flops(cache, heads, chosen)
    if isinstance(cache, BlockSparseCache):
        return _block_sparse(cache, ranks, element, heads, context, chosen)
    return _compressed(cache, heads, context, model.sparse_topk_tokens)


def _gqa_flops(cache: GqaCache, heads: float, context: float) -> float:
    # queries times keys, then weights times values; two operations each
    return 2 * heads * (cache.head_dim + cache.v_head_dim) * context * cache.layers


def _latent_flops(cache: MlaCache | SparseMlaCache, heads: float, context: float) -> float:
    return 2 * heads * (2 * cache.kv_lora_rank + cache.rope_dim) * context * cache.layers


def _block_sparse(
    cache: BlockSparseCache,
    ranks: Parallel,
    element: float,
    heads: float,
    context: float,
    chosen: float,
) -> tuple[float, float]:
    sparse_layers = cache.index_key_layers + cache.index_key_value_layers
    dense_layers = cache.layers - sparse_layers
    kv_heads = max(1, cache.kv_heads // ranks.attention_tp_size)
    a_token = kv_heads * 2 * cache.head_dim * element
    tokens = sparse_layers * chosen + dense_layers * context
    keys = sparse_layers * cache.index_dim * 2 * context
    return a_token * tokens + keys, 4 * heads * cache.head_dim * tokens


def _compressed(
    cache: CompressedCache, heads: float, context: float, topk: int
) -> tuple[float, float]:
    """Count a window per layer, and the selected latents of 4 tokens or all latents of 128."""
    near = min(context, cache.window_tokens)
    fours = min(context / 4, topk or context)
    all128 = context / 128
    latents = cache.layers * near * v4_slot_bytes(0)
    latents += cache.c4_layers * fours * v4_slot_bytes(4)
    latents += cache.c128_layers * all128 * v4_slot_bytes(128)
    keys = cache.c4_layers * context / 4 * _V4_INDEX_BYTES
    tokens = cache.layers * near + cache.c4_layers * fours + cache.c128_layers * all128
    return latents + keys, 4 * heads * _V4_LATENT * tokens
