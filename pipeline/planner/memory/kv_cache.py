"""Bytes per token in the KV pool, and the tokens that fit in a budget.

Source: SGLang model_executor/pool_configurator.py, 0.5.23; other releases by `ReleaseRules`.
`kv_pool` rounds down as the engine does, and leaves the judgement of small pools to `sizing`.
"""

from dataclasses import dataclass

from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.sglang.layout import Parallel, largest_share
from schemas.plan import (
    BlockSparseCache,
    BuiltInDraft,
    CompressedCache,
    GqaCache,
    KvLayout,
    MlaCache,
    ModelFacts,
    NoSpeculation,
    PlanSettings,
    SlidingCache,
    SparseMlaCache,
    Speculation,
)

_ELEMENT_BYTES = {
    "bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0,
    # 8-bit elements with one e8m0 scale per 32; 4-bit elements with one scale per 16
    "mxfp8": 1.0 + 1 / 32, "fp4_e2m1": 0.5 + 1 / 16, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip

# DeepSeek-V4 latents: 448 fp8 values, 64 rotary values in bf16, 8 scale bytes; pages of 256
# tokens (fewer when compressed) are padded to 576 bytes. mem_cache/deepseek_v4_memory_pool.py.
_V4_SLOT_BYTES = 448 + 64 * 2 + 8
_V4_PAGE_TOKENS = 256
_V4_PAD_BYTES = 576
_V4_INDEX_BYTES = 128 + 4
# Running compressor states in fp32: value and gate, for the latent (512) and, at ratio 4 whose
# windows overlap, for two windows and the index key (128) as well.
_C4_STATE_BYTES = 2 * 2 * (512 + 128) * 4
_C128_STATE_BYTES = 2 * 512 * 4

# environ.py: SGLANG_SWA_EVICTION_INTERVAL
_EVICTION_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """Tokens of the pool. `bytes` is the pool's allocation, spare page included."""

    tokens: int
    swa_tokens: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """Bytes per token: those that SGLang prices the pool by, and draft KV that it leaves out."""

    priced_bytes: float
    unpriced_draft_bytes: float
    fixed_bytes: int
    swa_ratio: float
    swa_bytes: float
    swa_fixed_tokens: int
    spare_bytes: float


def token_cost(launch: ResolvedLaunch) -> TokenCost:
    """Price one token of `max_total_num_tokens` on one GPU."""
    cache = launch.model.cache
    if isinstance(cache, CompressedCache):
        return _compressed_cost(launch, cache)
    capped = _request_capped_cost(launch, cache) if isinstance(cache, SlidingCache) else None
    if capped is not None:
        return capped
    stage = _stage(launch)
    target = layout_bytes(cache, launch.ranks, _element(launch), launch.settings) * stage
    if isinstance(cache, SparseMlaCache) and not launch.rules.shared_index_elided:
        reused = cache.layers - cache.index_layers
        target += reused * index_bytes(cache) * stage
    ratio, swa = _swa_ratio(launch, default=0.8), 0.0
    if isinstance(cache, SlidingCache):
        swa = _window_bytes(launch, cache)
        target += ratio * swa
    priced, unpriced = _draft_cost(launch)
    return TokenCost(
        priced_bytes=target + priced,
        unpriced_draft_bytes=unpriced,
        fixed_bytes=0,
        swa_ratio=ratio,
        swa_bytes=swa,
        swa_fixed_tokens=0,
        spare_bytes=target,
    )


def _stage(launch: ResolvedLaunch) -> float:
    """Return the largest pipeline stage's share of the layers that cache every token."""
    cache = launch.model.cache
    layers = cache.full.layers if isinstance(cache, SlidingCache) else cache.layers
    return largest_share(layers, launch.model.layers, launch.ranks.pp_size)


def _window_bytes(launch: ResolvedLaunch, cache: SlidingCache) -> float:
    """Bytes per token of the window layers on the largest pipeline stage."""
    stage = largest_share(cache.window.layers, launch.model.layers, launch.ranks.pp_size)
    return gqa_bytes(cache.window, launch.ranks, _element(launch)) * stage


def _swa_ratio(launch: ResolvedLaunch, *, default: float) -> float:
    """Window-pool tokens per full-pool token: --swa-full-tokens-ratio, or SGLang's default."""
    given = launch.flags.fraction("swa-full-tokens-ratio")
    return default if given is None else given


def _element(launch: ResolvedLaunch) -> float:
    return element_bytes(launch.settings.kv_cache_dtype)


def kv_pool(cost: TokenCost, budget_bytes: int, settings: PlanSettings) -> KvPool:
    """Size the pool: whole pages within the budget, at most --max-total-tokens."""
    page = settings.page_size
    room = budget_bytes - cost.fixed_bytes
    tokens = int(room // cost.priced_bytes) if cost.priced_bytes > 0 else 0
    tokens = tokens // page * page
    if settings.max_total_tokens is not None:
        tokens = min(tokens, settings.max_total_tokens // page * page)
    swa = int(tokens * cost.swa_ratio) // page * page if cost.swa_bytes else 0
    swa = cost.swa_fixed_tokens or swa
    size = tokens * cost.priced_bytes + page * cost.spare_bytes + cost.fixed_bytes
    return KvPool(tokens=tokens, swa_tokens=swa, bytes=int(size) if tokens > 0 else 0)


def element_bytes(kv_cache_dtype: str) -> float:
    """Return the bytes of one stored element, scales included."""
    return _ELEMENT_BYTES.get(kv_cache_dtype, 2.0)


def gqa_bytes(cache: GqaCache, ranks: Parallel, element: float) -> float:
    """Bytes per token of keys and values. Each rank has at least one whole head."""
    heads = max(1, cache.kv_heads // max(ranks.attention_tp_size // ranks.dcp_size, 1))
    return heads * (cache.head_dim + cache.v_head_dim) * cache.layers * element


def layout_bytes(cache: KvLayout, ranks: Parallel, element: float, settings: PlanSettings) -> float:
    """Bytes per token of the target's full-length layers."""
    if isinstance(cache, GqaCache):
        return gqa_bytes(cache, ranks, element)
    if isinstance(cache, SlidingCache):
        return gqa_bytes(cache.full, ranks, element)
    if isinstance(cache, MlaCache):
        return (cache.kv_lora_rank + cache.rope_dim) * cache.layers * element
    if isinstance(cache, SparseMlaCache):
        index = index_bytes(cache) * cache.index_layers
        return latent_elements(cache, settings) * cache.layers * element + index
    if isinstance(cache, BlockSparseCache):
        heads = max(1, cache.kv_heads // ranks.attention_tp_size)
        main = heads * 2 * cache.head_dim * cache.layers * element
        index_values = cache.index_key_layers + 2 * cache.index_key_value_layers
        # The index stays in the model's type. memory_pool.py: get_minimax_sparse_index_dtype.
        return main + index_values * cache.index_dim * 2
    raise AssertionError(cache)


def latent_elements(cache: SparseMlaCache, settings: PlanSettings) -> float:
    """Count the elements of a sparse model's latent; Hopper's scaled fp8 layout stores 656 bytes.

    kv_cache_configurator.py: calculate_mla_kv_cache_dim, 0.5.23.
    """
    raw = cache.kv_lora_rank + cache.rope_dim
    if settings.scaled_latent:
        return cache.kv_lora_rank + cache.kv_lora_rank / 128 * 4 + cache.rope_dim * 2
    return raw


def index_bytes(cache: SparseMlaCache) -> float:
    """Bytes of one index key: fp8 values, and one fp32 scale per 128."""
    return cache.index_head_dim + cache.index_head_dim / 128 * 4


# --- a window pool sized by requests ----------------------------------------------------------


def _request_capped_cost(launch: ResolvedLaunch, cache: SlidingCache) -> TokenCost | None:
    """Price tokens where SGLang sizes the window pool by requests; None where it does not.

    SWARequestCapPoolConfigurator: without a prefix cache the window pool holds the windows of the
    given requests, and the full layers get the rest.
    """
    settings = launch.settings
    requests = settings.max_running_requests
    applies = (
        launch.rules.swa_request_cap
        and cache.full.layers > 0
        and settings.disable_radix_cache
        and settings.chunked_prefill_size > 0
    )
    if not applies or requests is None:
        return None
    page = settings.page_size
    drafted, allocated = 1, page
    if not isinstance(settings.speculation, NoSpeculation):
        drafted = settings.speculation.num_draft_tokens
        allocated = 2 * max(settings.speculation.steps * settings.speculation.topk, drafted)
    each = cache.window_tokens + _EVICTION_TOKENS * drafted + page + allocated
    rows = each * max(1, requests // launch.ranks.attention_dp_size)
    rows += 2 * settings.chunked_prefill_size + page
    rows = -(-rows // page) * page
    window = _window_bytes(launch, cache)
    full = gqa_bytes(cache.full, launch.ranks, _element(launch)) * _stage(launch)
    return TokenCost(
        priced_bytes=full,
        unpriced_draft_bytes=0.0,
        fixed_bytes=int(rows * window),
        swa_ratio=0.0,
        swa_bytes=window,
        swa_fixed_tokens=rows,
        spare_bytes=full,
    )


# --- draft ------------------------------------------------------------------------------------


def _draft_cost(launch: ResolvedLaunch) -> tuple[float, float]:
    """Bytes per token of draft KV: priced by the pool, and only allocated later."""
    speculation = launch.settings.speculation
    if isinstance(speculation, NoSpeculation) or speculation.algorithm == "NGRAM":
        return 0.0, 0.0
    if speculation.algorithm in ("DFLASH", "DSPARK"):
        # Every release prices block drafts from the draft's own geometry.
        return float(int(_block_draft_bytes(launch.ranks))), 0.0
    # An EAGLE head has one layer of the target's shape.
    layers = _draft_layers(launch.model) if speculation.built_in else 1
    size = _one_layer_bytes(launch) * layers
    priced = launch.rules.draft_kv_priced and _layers_known(launch.model, speculation)
    return (float(int(size)), 0.0) if priced else (0.0, size)


def _block_draft_bytes(ranks: Parallel) -> float:
    """Bytes per token. assumed: five layers of 8 KV heads of 128 in bf16, as published."""
    return max(1, 8 // ranks.attention_tp_size) * 2 * 128 * 5 * 2.0


def _layers_known(model: ModelFacts, speculation: Speculation) -> bool:
    """Return whether SGLang can read the draft's layer count, from a draft path or the config."""
    if speculation.draft_path:
        return True
    return isinstance(model.draft, BuiltInDraft) and model.draft.declared


def _draft_layers(model: ModelFacts) -> int:
    return model.draft.layers if isinstance(model.draft, BuiltInDraft) else 1


def _one_layer_bytes(launch: ResolvedLaunch) -> float:
    """Bytes per token of one full-length layer."""
    cache, ranks, element = launch.model.cache, launch.ranks, _element(launch)
    if isinstance(cache, SparseMlaCache):
        return latent_elements(cache, launch.settings) * element + index_bytes(cache)
    layers = cache.full.layers if isinstance(cache, SlidingCache) else cache.layers
    return layout_bytes(cache, ranks, element, launch.settings) / max(layers, 1)


# --- DeepSeek-V4 ------------------------------------------------------------------------------


def v4_slot_bytes(ratio: int) -> float:
    """Bytes of one latent, with its part of the page's padding."""
    page = _V4_PAGE_TOKENS // max(ratio, 1)
    padded = -(-page * _V4_SLOT_BYTES // _V4_PAD_BYTES) * _V4_PAD_BYTES
    return padded / page


def _compressed_cost(launch: ResolvedLaunch, cache: CompressedCache) -> TokenCost:
    """Price DeepSeek-V4's tokens: DSV4PoolConfigurator. Tensor parallelism divides none of it."""
    rules, swa_ratio = launch.rules, _swa_ratio(launch, default=0.1)
    speculative = not isinstance(launch.settings.speculation, NoSpeculation)
    if rules.v4_c128_state == "per_token":
        full, swa = _compressed_per_token(cache, speculative=speculative, swa_ratio=swa_ratio)
        fixed = 0
    else:
        price = _compressed_paged if rules.v4_padded_pages else _compressed_plain
        full, swa = price(cache, speculative=speculative, swa_ratio=swa_ratio)
        fixed = _c128_fixed_bytes(launch, cache, speculative=speculative)
    stage = _stage(launch)
    return TokenCost(
        priced_bytes=full * stage,
        unpriced_draft_bytes=0.0,
        fixed_bytes=int(fixed * stage),
        swa_ratio=swa_ratio,
        swa_bytes=swa * stage,
        swa_fixed_tokens=0,
        spare_bytes=full * stage,
    )


def _compressed_paged(
    cache: CompressedCache, *, speculative: bool, swa_ratio: float
) -> tuple[float, float]:
    """Price tokens from 0.5.21 on: padded pages of 256, ratio-128 states outside the price."""
    ring4 = 16 if speculative else 8
    swa = v4_slot_bytes(0) * cache.layers
    swa += ring4 / _V4_PAGE_TOKENS * _C4_STATE_BYTES * cache.c4_layers
    full = swa_ratio * swa
    full += cache.c4_layers * (v4_slot_bytes(4) + _V4_INDEX_BYTES) / 4
    full += cache.c128_layers * v4_slot_bytes(128) / 128
    growth = (cache.layers + 1) / cache.layers if speculative else 1.0
    return full * growth, swa * growth


def _compressed_plain(
    cache: CompressedCache, *, speculative: bool, swa_ratio: float
) -> tuple[float, float]:
    """Price tokens of 0.5.15 to 0.5.20: no padding, pages of 128, ratio-128 states outside."""
    ring4 = 16 if speculative else 8
    swa = float(_V4_SLOT_BYTES * cache.layers)
    swa += ring4 / 128 * _C4_STATE_BYTES * cache.c4_layers
    full = swa_ratio * swa
    full += cache.c4_layers * (_V4_SLOT_BYTES + _V4_INDEX_BYTES) / 4
    full += cache.c128_layers * _V4_SLOT_BYTES / 128
    growth = (cache.layers + 1) / cache.layers if speculative else 1.0
    return full * growth, swa * growth


def _compressed_per_token(
    cache: CompressedCache, *, speculative: bool, swa_ratio: float
) -> tuple[float, float]:
    """Price tokens up to 0.5.14: no padding, window pages of 128, all states in the price."""
    ring4, ring128 = (16, 256) if speculative else (8, 128)
    swa = float(_V4_SLOT_BYTES * cache.listed_layers)
    swa += ring4 / 128 * _C4_STATE_BYTES * cache.c4_layers
    swa += ring128 / 128 * _C128_STATE_BYTES * cache.c128_layers
    full = swa_ratio * swa
    full += cache.c4_layers * (_V4_SLOT_BYTES + _V4_INDEX_BYTES) / 4
    full += cache.c128_layers * _V4_SLOT_BYTES / 128
    growth = (cache.listed_layers + 1) / cache.listed_layers if speculative else 1.0
    return full * growth, swa * growth


def _c128_fixed_bytes(launch: ResolvedLaunch, cache: CompressedCache, *, speculative: bool) -> int:
    ring = 256 if speculative else 128
    requested = launch.settings.max_running_requests or 256
    requests = max(1, requested // launch.ranks.attention_dp_size)
    rows = (requests + 1) * ring + ring + 1
    rows = -(-rows // 128) * 128
    return rows * _C128_STATE_BYTES * cache.c128_layers
