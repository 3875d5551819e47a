"""Headroom: the memory that the pools leave free, and everything that must fit in it.

Fixed items follow from shapes. Activations and graphs are estimates, each with the public figure
that it was fitted to. `verdict` compares the sum with the headroom.
"""

from dataclasses import dataclass

from pipeline.planner.memory.kv_cache import TokenCost
from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.sglang.defaults import decode_buckets
from pipeline.planner.sglang.layout import Parallel
from schemas.plan import (
    CompressedCache,
    Gpu,
    HeadroomItem,
    LinearState,
    ModelFacts,
    Moe,
    NoSpeculation,
    PlanSettings,
    SparseMlaCache,
    Speculation,
)
from schemas.units import GIB, MIB

# FlashInfer's workspace, and the models to which SGLang gives a larger one.
# environ.py: SGLANG_FLASHINFER_WORKSPACE_SIZE; flashinfer_backend.py, 0.5.23.
_FLASHINFER_BYTES = 384 * MIB
_FLASHINFER_LARGE_BYTES = 512 * MIB
_FLASHINFER_LARGE = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM")
_DETERMINISTIC_BYTES = 2 * GIB
_TRTLLM_MHA_BYTES = 512 * MIB
_TRTLLM_MLA_BYTES = 150 * MIB
# memory_hook.py: SGLANG_SYMM_MEM_PREALLOC_GB_SIZE, 0.5.23
_SYMMETRIC_BYTES = 4 * GIB

# Kernels' modules, cuBLAS workspaces and fragmentation that appear with the first forwards.
# assumed: Qwen3-0.6B on a 16 GB card ends 0.6 GiB below pool end with 0.11 GiB of graphs and
# 0.4 GiB of workspace (public log, SGLang 0.4.10); several ranks add communicators' buffers.
_RUNTIME_BYTES = 300 * MIB
_RUNTIME_RANKS_BYTES = 400 * MIB
_RUNTIME_RANKS_PCIE_BYTES = 100 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomNeeds:
    """Items that must fit in the headroom, grouped by when they are allocated."""

    fixed: tuple[HeadroomItem, ...]
    capture: tuple[HeadroomItem, ...]
    serving: tuple[HeadroomItem, ...]

    def before_capture_bytes(self) -> int:
        """Return the bytes in use when graph capture ends."""
        return _sum(self.fixed) + _sum(self.capture)

    def total_bytes(self) -> int:
        """Return the bytes in use at the first full prefill chunk."""
        return self.before_capture_bytes() + _sum(self.serving)

    def estimated_bytes(self) -> int:
        """Return the bytes that are estimated rather than computed from shapes."""
        return _sum(self.capture) + _sum(self.serving)

    def with_logged_graphs(self, size: int) -> "HeadroomNeeds":
        """Replace the estimate of graph memory by the size in a log."""
        logged = HeadroomItem(name="graphs", bytes=size, source="the engine's log")
        return HeadroomNeeds(fixed=self.fixed, capture=(logged,), serving=self.serving)

    def items(self) -> tuple[HeadroomItem, ...]:
        """List all items in the order of their allocation."""
        return (*self.fixed, *self.capture, *self.serving)


def headroom_needs(
    launch: ResolvedLaunch, cost: TokenCost, tokens: int, running: int
) -> HeadroomNeeds:
    """List the claims on the headroom, for a pool of `tokens` and `running` requests."""
    fixed = [
        _request_table(launch.settings, running),
        _item("draft KV that the pool does not price", tokens * cost.unpriced_draft_bytes,
              "pool_configurator.py: eagle_draft_num_layers"),
        *_attention_workspaces(launch, running),
        *_communication_buffers(launch),
        *_all_to_all(launch),
        *_host_processes(launch.gpu),
        _item("runtime: kernel modules, cuBLAS, communicators",
              _runtime_bytes(launch), "assumed from public logs"),
    ]  # fmt: skip
    capture = [*_decode_graphs(launch, running), *_prefill_graphs(launch)]
    serving = [
        _item("activations of one prefill chunk", activation_bytes(launch),
              "estimated from layer shapes"),
        _item("sparse indexer logits", indexer_bytes(launch),
              "layers/attention/dsv4/indexer.py, dsa_indexer.py"),
        _item("sparse indexer logits at long context", _chunked_indexer_bytes(launch),
              "layers/attention/dsv4/indexer.py"),
    ]  # fmt: skip
    return HeadroomNeeds(
        fixed=_positive(fixed), capture=_positive(capture), serving=_positive(serving)
    )


def _runtime_bytes(launch: ResolvedLaunch) -> int:
    gpu = launch.gpu
    size = _RUNTIME_BYTES
    if launch.ranks.tp_size > 1:
        small = not gpu.nvlink and gpu.smi_mib < 40 * 1024
        size += _RUNTIME_RANKS_PCIE_BYTES if small else _RUNTIME_RANKS_BYTES
    if block_draft(launch.settings):
        # A second model with its own kernels. Fitted with the 5090 launches in _prefill_graphs.
        size += _RUNTIME_BYTES
    return size


def block_draft(settings: PlanSettings) -> bool:
    """Return whether a draft model of several layers proposes whole blocks."""
    speculation = settings.speculation
    return isinstance(speculation, Speculation) and speculation.algorithm in ("DFLASH", "DSPARK")


def _host_processes(gpu: Gpu) -> list[HeadroomItem]:
    """Reserve unified memory for the engine's host processes and the file cache.

    assumed: 12 GiB. Public launches on a DGX Spark run at a fraction of 0.80 and are killed by the
    system at 0.85; these fractions leave 22.5 and 16.9 GiB.
    """
    if not gpu.unified_memory:
        return []
    return [_item("host processes in unified memory", 12 * GIB, "assumed from public logs")]


def _item(name: str, size: float, source: str) -> HeadroomItem:
    return HeadroomItem(name=name, bytes=int(size), source=source)


def _sum(items: tuple[HeadroomItem, ...]) -> int:
    return sum(item.bytes for item in items)


def _positive(items: list[HeadroomItem]) -> tuple[HeadroomItem, ...]:
    return tuple(item for item in items if item.bytes > 0)


def _request_table(settings: PlanSettings, running: int) -> HeadroomItem:
    """Size req_to_token: one int32 row per request, padded. memory_pool.py, 0.5.23."""
    extra = 4
    if isinstance(settings.speculation, Speculation):
        extra += settings.speculation.num_draft_tokens
    rows = running + 1
    size = rows * (settings.context_length + extra) * 4
    return _item("request-to-token table", size, "memory_pool.py: ReqToTokenPool")


def _attention_workspaces(launch: ResolvedLaunch, running: int) -> list[HeadroomItem]:
    backend = launch.settings.attention_backend
    if backend == "flashinfer":
        return _flashinfer_workspaces(launch, running)
    if backend == "trtllm_mha":
        return [_item("TRT-LLM attention workspace", _TRTLLM_MHA_BYTES, "trtllm_mha_backend.py")]
    if launch.model.uses_mla:
        return [_item("MLA attention workspace", _TRTLLM_MLA_BYTES, "trtllm_mla_backend.py")]
    return []


def _flashinfer_workspaces(launch: ResolvedLaunch, running: int) -> list[HeadroomItem]:
    settings = launch.settings
    large = launch.model.architecture in _FLASHINFER_LARGE
    size = _FLASHINFER_LARGE_BYTES if large else _FLASHINFER_BYTES
    if launch.flags.has("enable-deterministic-inference"):
        size = _DETERMINISTIC_BYTES
    verified = verify_tokens(settings)
    rows = min(settings.decode_graph_max_bs, max(running, 1)) * verified
    # int32 indices, and the byte mask that verification needs
    indices = rows * settings.context_length * (5 if verified > 1 else 4)
    return [
        _item("FlashInfer workspace", size, "flashinfer_backend.py"),
        _item("FlashInfer graph indices", min(indices, 2 * GIB), "flashinfer_backend.py"),
    ]


def _communication_buffers(launch: ResolvedLaunch) -> list[HeadroomItem]:
    ranks, items = launch.ranks, []
    if launch.flags.has("enable-symm-mem"):
        items.append(_item("symmetric memory", _SYMMETRIC_BYTES, "memory_hook.py"))
    if launch.flags.has("enable-flashinfer-allreduce-fusion") and ranks.tp_size > 1:
        # Two-shot buffers for chunk-sized messages. assumed: the size SGLang caps fusion at.
        size = 2 * 2048 * launch.model.hidden_size * 2 * ranks.tp_size
        items.append(_item("fused all-reduce buffers", size, "flashinfer_comm_fusion.py"))
    return items


def _all_to_all(launch: ResolvedLaunch) -> list[HeadroomItem]:
    """List the dispatch buffers of the expert-parallel backends."""
    model, backend = launch.model, launch.ranks.all_to_all
    if not isinstance(model.ffn, Moe) or backend in ("none", ""):
        return []
    if backend == "megamoe":
        per_rank = launch.flags.variable(
            "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK", "1024"
        )
        # tokens per rank x top-k; 1 byte of packed activations and 2 of bf16 results per value
        rows = int(per_rank if per_rank.isdigit() else 1024) * model.ffn.experts_per_token
        return [_item("MegaMoE buffers", rows * model.hidden_size * 3, "layers/moe/mega_moe.py")]
    # memory_hook.py grants DeepEP 2 GiB over the decode graphs.
    return [_item("DeepEP buffers", 2 * GIB, "memory_hook.py: reserve_for_deepep_a2a_mb")]


def _decode_graphs(launch: ResolvedLaunch, running: int) -> list[HeadroomItem]:
    settings, model = launch.settings, launch.model
    if not settings.decode_graph_max_bs:
        return []
    speculative = isinstance(settings.speculation, Speculation)
    max_bs = min(settings.decode_graph_max_bs, max(running, 1))
    buckets = len(decode_buckets(max_bs, speculative=speculative))
    # Fitted to public logs: 0.54 GiB of target and 0.21 GiB of draft graphs at TP8;
    # 1.93 GiB at 320 requests (DeepSeek-V4, 0.5.12, twice the kernels of other models).
    size = (100 + 8 * buckets + max_bs) * MIB
    size *= 2 if isinstance(model.cache, CompressedCache) else 1
    # Every rank gathers the logits of the whole vocabulary, in fp32.
    logits = max_bs * verify_tokens(settings) * model.vocab_size * 4
    items = [_item("decode graphs", size, "fitted to public logs")]
    if speculative:
        items.append(_item("draft and verify graphs", size * 0.6, "fitted to public logs"))
    return [*items, _item("logits buffer", logits, "logits_processor.py")]


def _prefill_graphs(launch: ResolvedLaunch) -> list[HeadroomItem]:
    buckets = launch.settings.prefill_graph_buckets
    if not buckets:
        return []
    # SGLang's own allowance: memory_hook.py: reserve_for_graph_mb.
    size = 1536 * MIB if launch.model.uses_mla else 8 * MIB * buckets
    graphs = _item("prefill graphs", size, "memory_hook.py: reserve_for_graph_mb")
    if launch.model.uses_mla:
        return [graphs]
    # The capture pool keeps activations of its own beside the eager ones.
    # Fitted: Qwen3.8-27B on an RTX 5090 at chunk 2048 needs 3.1-3.4 GiB of headroom with a
    # block draft and under 3.1 without; under 2.8 at chunk 1024.
    pool = activation_bytes(launch) / 2
    return [graphs, _item("prefill graphs' activations", pool, "fitted to public launches")]


def verify_tokens(settings: PlanSettings) -> int:
    """Count the tokens of a request that one step computes: 1, or the draft tokens."""
    if isinstance(settings.speculation, NoSpeculation):
        return 1
    return settings.speculation.num_draft_tokens


# --- activations ------------------------------------------------------------------------------


def activation_bytes(launch: ResolvedLaunch) -> int:
    """Bytes of one prefill chunk in the widest layer, in bf16."""
    model, settings, ranks = launch.model, launch.settings, launch.ranks
    chunk = settings.chunked_prefill_size
    if chunk <= 0:
        chunk = min(settings.max_prefill_tokens, settings.context_length)
    # Attention ranks gather their chunks before the experts.
    gathered = chunk * ranks.attention_dp_size
    hidden = model.hidden_size
    # A block draft reads the joined outputs of five layers.
    drafted = 2 * 5 * hidden * 2 if block_draft(settings) else 0
    own = (
        drafted
        + 6 * hidden * 2
        + _attention_token_bytes(model, ranks)
        + _state_token_bytes(model, ranks)
    )
    wide = 2 * hidden * 2 + _ffn_token_bytes(model, ranks)
    return int(chunk * own + gathered * wide)


def _attention_token_bytes(model: ModelFacts, ranks: Parallel) -> float:
    heads = model.heads / ranks.attention_tp_size
    # queries, gate or output, and the output projection's input
    return 3 * heads * model.head_dim * 2


def _state_token_bytes(model: ModelFacts, ranks: Parallel) -> float:
    state = model.state
    if not isinstance(state, LinearState) or state.kind == "conv":
        return 0.0
    width = state.heads * state.head_dim / ranks.attention_tp_size
    keys = state.groups * state.state_dim / ranks.attention_tp_size
    # projections, their convolved copies and gates; then one fp32 state per chunk of 64 tokens
    streams = 2 * (2 * width + 2 * keys) * 2 + 2 * width * 2
    states = width * state.state_dim * 4 / 64
    return streams + states


def _ffn_token_bytes(model: ModelFacts, ranks: Parallel) -> float:
    if isinstance(model.ffn, Moe):
        inner = model.ffn.intermediate_size / ranks.tp_size
        # the permuted input, gate and up, their product, and each expert's contribution
        return model.ffn.experts_per_token * (3 * inner + 2 * model.ffn.input_size) * 2
    return 3 * model.ffn.intermediate_size / ranks.dense_tp_size * 2


def indexer_bytes(launch: ResolvedLaunch) -> int:
    """Bytes of indexer scratch for a prompt that fills one chunk; each rank needs all of it."""
    rows = _chunk_rows(launch.settings)
    return _indexer_bytes_at(launch, rows, rows)


def largest_indexer_bytes(launch: ResolvedLaunch) -> int:
    """Bytes of indexer scratch at the longest context; 0 if the release cuts rows to fit."""
    if launch.rules.v4_indexer_row_chunks and isinstance(launch.model.cache, CompressedCache):
        return 0
    settings = launch.settings
    return _indexer_bytes_at(launch, _chunk_rows(settings), settings.context_length)


def _chunked_indexer_bytes(launch: ResolvedLaunch) -> int:
    """Bytes for releases that cut DeepSeek-V4's rows, which use up to a fifth of the headroom."""
    if not isinstance(launch.model.cache, CompressedCache):
        return 0
    if not launch.rules.v4_indexer_row_chunks:
        return 0
    settings = launch.settings
    rows = max(settings.chunked_prefill_size, 1)
    whole = _indexer_bytes_at(launch, rows, settings.context_length)
    allowed = 0.2 * launch.gpu.total_bytes * (1 - settings.mem_fraction_static)
    return int(min(whole, allowed))


def _chunk_rows(settings: PlanSettings) -> int:
    chunk = settings.chunked_prefill_size
    return min(chunk if chunk > 0 else settings.max_prefill_tokens, settings.context_length)


def _indexer_bytes_at(launch: ResolvedLaunch, rows: int, context_tokens: int) -> int:
    """Bytes for `rows` query tokens against a context: layers/attention/dsv4/indexer.py."""
    if isinstance(launch.model.cache, SparseMlaCache):
        # fp32 logits, one per pair of query token and context token
        return rows * context_tokens * 4
    if not isinstance(launch.model.cache, CompressedCache):
        return 0
    columns = context_tokens // 4
    if uses_torch_indexer(launch):
        # The torch path gathers 132 bytes, copies 128, widens keys to fp32 (512), scores (256).
        return rows * columns * (132 + 128 + 512 + 256 + 4)
    return rows * columns * 4


def uses_torch_indexer(launch: ResolvedLaunch) -> bool:
    """Return whether DeepSeek-V4's indexer runs in torch: on cards of 12.x before TileLang."""
    on_sm120 = launch.gpu.compute_capability // 10 == 12
    return (
        isinstance(launch.model.cache, CompressedCache)
        and on_sm120
        and launch.rules.v4_indexer_sm120 != "tilelang"
    )
