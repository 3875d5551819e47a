"""Warnings about a launch, and the log lines to expect from it."""

from pipeline.planner.memory.headroom import largest_indexer_bytes, uses_torch_indexer
from pipeline.planner.memory.kv_cache import KvPool
from pipeline.planner.memory.launch import ResolvedLaunch, other_overrides
from pipeline.planner.memory.sizing import Sized, Stopped
from pipeline.planner.memory.state_pool import StatePool
from pipeline.planner.memory.weights import adapter_doubt, has_adapters, offloaded_bytes
from schemas.plan import CompressedCache, GqaCache, SlidingCache, SparseMlaCache
from schemas.units import GIB

# assumed: hosts have this much memory free
_LARGE_CHECKPOINT_GIB = 200


def launch_warnings(launch: ResolvedLaunch, outcome: Stopped | Sized) -> tuple[str, ...]:
    """List warnings for the reader; none of them changes the verdict."""
    notes = [*_indexer(launch, outcome), *_host_cache(launch, outcome), *_loading(launch, outcome)]
    settings = launch.settings
    if settings.max_running_requests_source.startswith("SGLang") and isinstance(outcome, Sized):
        asked = settings.max_running_requests
        v4 = isinstance(launch.model.cache, CompressedCache)
        line = f"Setting max_running_requests to {asked}" if v4 else f"reset to {asked}"
        notes.append(
            f"max_running_requests is {asked} by {settings.max_running_requests_source} "
            f"('{line}' in the log): an upper limit; {outcome.running} run at once"
        )
    if isinstance(outcome, Sized) and outcome.pool.tokens < settings.context_length:
        notes.append(
            f"the KV pool has {outcome.pool.tokens} tokens, fewer than --context-length "
            f"{settings.context_length}: SGLang refuses longer requests"
        )
    if isinstance(outcome, Sized) and outcome.cost.unpriced_draft_bytes:
        notes.append(
            "SGLang does not count the draft's KV when it sizes the pool, so it uses headroom; to "
            "have it counted, pass the model's own path as --speculative-draft-model-path"
        )
    notes += _of_flags(launch, outcome)
    notes += _micro_batches(launch, outcome)
    if launch.gpu.unified_memory:
        notes.append(
            "unified memory: the system's OOM killer can end a launch that fits on the card"
        )
    return tuple(notes)


def _of_flags(launch: ResolvedLaunch, outcome: Stopped | Sized) -> list[str]:
    notes = []
    if has_adapters(launch):
        notes.append(adapter_doubt(launch))
    if offloaded := offloaded_bytes(launch):
        notes.append(f"--cpu-offload-gb keeps {offloaded / GIB:.1f} GiB of weights on the host")
    if fields := other_overrides(launch.flags):
        notes.append(
            f"--json-model-override-args changes {', '.join(fields)}, which is not in this forecast"
        )
    if outcome.load.peak_bytes > outcome.load.weights_bytes:
        notes.append(
            f"--quantization {launch.flags.text('quantization')} of this checkpoint needs "
            f"{outcome.load.peak_bytes / GIB:.1f} GiB while it loads: parameters are created in 16 "
            f"bits first"
        )
    return notes


def _micro_batches(launch: ResolvedLaunch, outcome: Stopped | Sized) -> list[str]:
    ranks = launch.ranks
    if ranks.pp_size == 1 or isinstance(outcome, Stopped):
        return []
    each = ranks.largest_micro_batch or max(outcome.running // ranks.pp_size, 1)
    note = (
        f"{ranks.pp_size} pipeline stages run {ranks.micro_batches} micro-batches of at most "
        f"{each} requests: {outcome.at_once} of {outcome.running} run at once; the overlap "
        f"schedule is off"
    )
    return [note]


def _indexer(launch: ResolvedLaunch, outcome: Stopped | Sized) -> list[str]:
    """Warn of the scratch that DeepSeek-V4 and V3.2 need outside the fraction, on every rank."""
    settings = launch.settings
    if uses_torch_indexer(launch):
        return [_torch_indexer(launch)]
    if not isinstance(launch.model.cache, CompressedCache | SparseMlaCache):
        return []
    size = largest_indexer_bytes(launch)
    headroom_bytes = outcome.headroom_bytes if isinstance(outcome, Sized) else 0
    if size <= headroom_bytes / 2:
        return []
    note = (
        f"the sparse indexer's logits are outside mem_fraction_static and are not divided by TP: "
        f"a full chunk at {settings.context_length} tokens of context uses {size / GIB:.1f} GiB; "
        f"lower --chunked-prefill-size or --context-length if prompts are that long"
    )
    return [note]


def _torch_indexer(launch: ResolvedLaunch) -> str:
    """Warn of the torch fallback, whose fp32 keys use 512 bytes per (row, column) pair."""
    chunk = launch.settings.chunked_prefill_size
    at_chunk = chunk * (chunk // 4) * 512 / GIB
    # n tokens in one chunk make n x n/4 pairs; a public failure ran out at 7.5 GiB.
    tokens = int((7.5 * GIB * 4 / 512) ** 0.5)
    return (
        f"the sparse indexer's scratch is outside mem_fraction_static and is not divided by TP: "
        f"its largest buffer reaches 7.5 GiB at about {tokens / 1000:.1f}k tokens in one chunk "
        f"({at_chunk:.1f} GiB at {chunk}); lower --chunked-prefill-size or use a release with "
        f"the TileLang indexer (0.5.17 and later)"
    )


def _loading(launch: ResolvedLaunch, outcome: Stopped | Sized) -> list[str]:
    """Warn of large checkpoints: they are mapped, so they pass through the host's file cache."""
    ranks = launch.ranks.tp_size * launch.ranks.pp_size
    size = outcome.load.weights_bytes * ranks / GIB
    if size < _LARGE_CHECKPOINT_GIB:
        return []
    note = (
        f"loading maps about {size:.0f} GiB of files: with less free host memory, ranks read them "
        f"more than once"
    )
    return [note]


def _host_cache(launch: ResolvedLaunch, outcome: Stopped | Sized) -> list[str]:
    """Size the hierarchical cache, host memory per rank: mem_cache/hiradix_cache.py, 0.5.23."""
    flags = launch.flags
    if not flags.has("enable-hierarchical-cache") or isinstance(outcome, Stopped):
        return []
    size = float(flags.text("hicache-size") or 0) * 1e9
    if size <= 0:
        ratio = flags.fraction("hicache-ratio") or 2.0
        size = outcome.pool.tokens * ratio * outcome.cost.priced_bytes
    ranks = launch.ranks.tp_size * launch.ranks.pp_size
    note = (
        f"the hierarchical cache needs {size / GIB:.1f} GiB of host memory per rank, "
        f"{size * ranks / GIB:.1f} GiB for {ranks} ranks, and 10 GiB that SGLang keeps free; "
        f"it saves nothing when every prompt is distinct"
    )
    return [note]


def log_lines(launch: ResolvedLaunch, outcome: Stopped | Sized, message: str) -> tuple[str, ...]:
    """List the launch's log lines in order. Sizes are in the log's "GB", which are GiB."""
    load = outcome.load
    free, weights = load.free_before_bytes / GIB, load.weights_bytes / GIB
    kind = launch.model.architecture
    end = f"type={kind}, avail mem={free - weights:.2f} GB, mem usage={weights:.2f} GB."
    lines = [f"Load weight begin. avail mem={free:.2f} GB", f"Load weight end. {end}"]
    draft = (load.draft_resident_bytes + load.draft_freed_bytes) / GIB
    if draft and load.draft_first:
        lines.append(
            f"Load weight end. (draft) avail mem={free - weights - draft:.2f} GB, "
            f"mem usage={draft:.2f} GB."
        )
    if isinstance(outcome, Stopped):
        return (*lines, message)
    lines += _pool_lines(launch, outcome)
    settings = launch.settings
    lines.append(
        f"max_total_num_tokens={outcome.pool.tokens}, "
        f"chunked_prefill_size={settings.chunked_prefill_size}, "
        f"max_prefill_tokens={settings.max_prefill_tokens}, "
        f"max_running_requests={outcome.running}, context_len={settings.context_length}"
    )
    if message:
        lines.append(message)
    return tuple(lines)


def _pool_lines(launch: ResolvedLaunch, outcome: Sized) -> list[str]:
    lines = []
    pooled = outcome.pool.bytes
    if isinstance(outcome.states, StatePool):
        states = outcome.states
        pooled += states.state_bytes + states.intermediate_bytes
        verify = f" intermediate state caches: {states.intermediate_bytes / GIB:.2f}GB"
        lines.append(
            f"Mamba Cache is allocated. max_mamba_cache_size: {states.slots}, "
            f"conv_state + ssm_state size: {states.state_bytes / GIB:.2f}GB"
            + (verify if states.intermediate_bytes else "")
        )
    lines.append(_kv_line(launch, outcome.pool))
    left = (outcome.load.available_bytes() - pooled) / GIB
    lines.append(f"Memory pool end. avail mem={left:.2f} GB")
    return lines


def _kv_line(launch: ResolvedLaunch, pool: KvPool) -> str:
    dtype = launch.settings.kv_cache_dtype.replace("fp8_", "float8_")
    head = f"KV Cache is allocated. dtype: torch.{dtype}, #tokens: {pool.tokens}"
    size = pool.bytes / GIB
    if isinstance(launch.model.cache, GqaCache):
        return f"{head}, K size: {size / 2:.2f} GB, V size: {size / 2:.2f} GB"
    if isinstance(launch.model.cache, SlidingCache):
        return (
            f"Use sliding window memory pool. full_layer_tokens={pool.tokens}, "
            f"swa_layer_tokens={pool.swa_tokens} ({size:.2f} GB)"
        )
    return f"{head}, KV size: {size:.2f} GB"
