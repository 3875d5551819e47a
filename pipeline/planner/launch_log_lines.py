"""The lines to expect in the engine's log, with their figures, to hold against a real one."""

from pipeline.planner.assessment import Launch, Sized, Stopped
from pipeline.planner.kv_cache import KvPool
from pipeline.planner.state_pool import StatePool
from schemas.plan import GqaCache, SlidingCache

GIB = 1 << 30


def log_lines(launch: Launch, outcome: Stopped | Sized, message: str) -> tuple[str, ...]:
    """Launch lines in order; sizes in the log's "GB", which are GiB."""
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


def _pool_lines(launch: Launch, outcome: Sized) -> list[str]:
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


def _kv_line(launch: Launch, pool: KvPool) -> str:
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
