"""Simulate one launch: load, size the pools, count requests, list the claims on the headroom.

`assess` follows the order of SGLang's own launch and stops where the engine would. It works on
expected figures; `verdict` repeats it with better and worse ones to see how sure it is.
"""

import math
from dataclasses import dataclass, replace

from pipeline.planner.memory.headroom import HeadroomNeeds, headroom_needs
from pipeline.planner.memory.kv_cache import KvPool, TokenCost, kv_pool, token_cost
from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.memory.state_pool import NoStatePool, StatePool, state_pool
from pipeline.planner.memory.weights import (
    adapter_bytes,
    draft_weights,
    offloaded_bytes,
    peak_bytes,
    target_bytes,
)
from pipeline.planner.sglang.defaults import text_only
from pipeline.planner.sglang.layout import Parallel, requests_at_once
from pipeline.planner.sglang.releases import ReleaseRules
from schemas.plan import (
    Gpu,
    LinearState,
    NoVision,
    PlanSettings,
    SlidingCache,
    Stage,
)
from schemas.units import GIB, MIB

_NOT_ENOUGH = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
CAPTURE_MESSAGE = (
    "Capture cuda graph failed: CUDA out of memory. Possible solutions: "
    "1. set --mem-fraction-static to a smaller value"
)
# Communicators of several ranks: what public logs lack beyond one rank's context. Over PCIe 0 at
# TP2 and 0.1-0.2 GiB at TP4 and TP8; over NVLink 1.0 on eight H20 (2026-05) and 1.8 on eight H200
# (2025-10); 2.2-2.3 on four and eight Blackwell cards (2025).
_PCIE_COMMUNICATORS_BYTES = 150 * MIB
_NVLINK_COMMUNICATORS_BYTES = 1150 * MIB
_BLACKWELL_COMMUNICATORS_BYTES = 2048 * MIB
RUNTIME_MESSAGE = "torch.OutOfMemoryError: CUDA out of memory, at the first large prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """Memory before the pools are sized."""

    free_before_bytes: int
    weights_bytes: int
    draft_resident_bytes: int
    draft_freed_bytes: int
    draft_first: bool
    peak_bytes: int = 0
    """Weights while they load, where that is more than what stays."""
    adapters_bytes: int = 0

    def available_bytes(self) -> int:
        """Return the free memory when the pools are sized."""
        free = self.free_before_bytes - self.weights_bytes - self.adapters_bytes
        if self.draft_first:
            free -= self.draft_resident_bytes + self.draft_freed_bytes
        return free

    def with_more_free(self, more_bytes: int) -> "LoadFigures":
        """Return the figures of a launch whose weights leave `more_bytes` more free."""
        return replace(self, weights_bytes=self.weights_bytes - more_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The launch fails while loading or sizing the pools."""

    stage: Stage
    message: str
    load: LoadFigures
    rest_bytes: float
    slots: int
    intermediate_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The pools of a launch, before its headroom is known."""

    load: LoadFigures
    cost: TokenCost
    states: NoStatePool | StatePool
    pool: KvPool
    running: int
    limited_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The pools fit, and `headroom_bytes` are left for everything else.

    `at_once` requests of the `running` fit in the micro-batches of a pipeline.
    """

    load: LoadFigures
    cost: TokenCost
    states: NoStatePool | StatePool
    pool: KvPool
    running: int
    at_once: int
    limited_by: str
    headroom_bytes: int
    needs: HeadroomNeeds


def assess(launch: ResolvedLaunch) -> Stopped | Sized:
    """Run a launch until it fails or is sized."""
    return assess_loaded(launch, load_figures(launch))


def assess_loaded(launch: ResolvedLaunch, load: LoadFigures) -> Stopped | Sized:
    """Run a launch from the end of loading until it fails or is sized."""
    pools = pools_of(launch, load)
    return pools if isinstance(pools, Stopped) else _sized(launch, pools)


def pools_of(launch: ResolvedLaunch, load: LoadFigures) -> Stopped | Pools:
    """Run a launch from the end of loading until it fails or has its pools."""
    stopped = _load_failure(launch, load)
    if stopped:
        return stopped
    available = load.available_bytes()
    rest = available - load.free_before_bytes * (1 - launch.settings.mem_fraction_static)
    rest -= multimodal_reserve_bytes(launch)
    states: NoStatePool | StatePool = NoStatePool(rest_bytes=rest)
    if isinstance(launch.model.state, LinearState):
        states = state_pool(launch, launch.model.state, rest)
    stopped = _sizing_failure(launch, load, rest, states)
    if stopped:
        return stopped
    return _kv_sized(launch, load, states)


def load_figures(launch: ResolvedLaunch) -> LoadFigures:
    """Return free memory and weights, by the calibration where it has them."""
    known = launch.calibration
    draft = draft_weights(launch)
    resident, freed = draft.resident_bytes, draft.freed_bytes
    if known and known.draft_weights_bytes is not None and resident:
        freed = min(freed, known.draft_weights_bytes)
        resident = known.draft_weights_bytes - freed
    free = launch.gpu.total_bytes - context_bytes(launch.gpu, launch.ranks)
    if known and known.free_before_load_bytes is not None:
        free = known.free_before_load_bytes
    weights = target_bytes(launch) - offloaded_bytes(launch)
    if known and known.weights_bytes is not None:
        weights = known.weights_bytes
    return LoadFigures(
        free_before_bytes=free,
        weights_bytes=weights,
        draft_resident_bytes=resident,
        draft_freed_bytes=freed,
        draft_first=launch.rules.draft_loads_before_pool,
        peak_bytes=peak_bytes(launch),
        adapters_bytes=adapter_bytes(launch),
    )


def context_bytes(gpu: Gpu, ranks: Parallel) -> int:
    """Bytes of CUDA context, driver and communicators before the weights are loaded."""
    if gpu.unified_memory or ranks.tp_size * ranks.pp_size == 1:
        return gpu.context_bytes
    if not gpu.nvlink:
        return gpu.context_bytes + _PCIE_COMMUNICATORS_BYTES
    if gpu.compute_capability in (100, 103):
        return gpu.context_bytes + _BLACKWELL_COMMUNICATORS_BYTES
    return gpu.context_bytes + _NVLINK_COMMUNICATORS_BYTES


def multimodal_reserve_bytes(launch: ResolvedLaunch) -> int:
    """Bytes that the pool leaves free for images, by release and transport."""
    if isinstance(launch.model.vision, NoVision) or text_only(launch.flags):
        return 0
    flags, rules = launch.flags, launch.rules
    transport = flags.text("mm-feature-transport")
    switch = "SGLANG_USE_CUDA_IPC_TRANSPORT"
    if transport in ("cuda_ipc", "cuda_vmm") or flags.switched_on(switch):
        return rules.multimodal_ipc_reserve_mib * MIB
    is_off = transport == "cpu" or (flags.variable(switch) and not flags.switched_on(switch))
    if is_off and rules.multimodal_reserve_mib == rules.multimodal_ipc_reserve_mib:
        # The release takes the GPU's transport by default, and reserves for it alone.
        return 0
    return rules.multimodal_reserve_mib * MIB


def _load_failure(launch: ResolvedLaunch, load: LoadFigures) -> Stopped | None:
    over = max(load.weights_bytes, load.peak_bytes) - load.free_before_bytes
    if over > 0:
        return _stopped("weights", load_message(launch.gpu, over), load)
    if load.draft_first and load.available_bytes() < 0:
        message = draft_load_message(launch.gpu, -load.available_bytes())
        return _stopped("draft_weights", message, load)
    return None


def _stopped(
    stage: Stage,
    message: str,
    load: LoadFigures,
    rest: float = 0.0,
    slots: int = 0,
    intermediate: int = 0,
) -> Stopped:
    return Stopped(
        stage=stage,
        message=message,
        load=load,
        rest_bytes=rest,
        slots=slots,
        intermediate_bytes=intermediate,
    )


def _sizing_failure(
    launch: ResolvedLaunch, load: LoadFigures, rest: float, states: NoStatePool | StatePool
) -> Stopped | None:
    settings, rules = launch.settings, launch.rules
    if isinstance(states, StatePool):
        slots, verify = states.slots, states.intermediate_bytes
        if slots <= 0 and rules.verify_reserve != "all_requests_first":
            message = slots_message(slots, rest, states.slot_bytes)
            return _stopped("state_pool", message, load, rest, slots, verify)
        if states.rest_bytes <= 0 or slots <= 0:
            stage: Stage = "state_pool" if rest > 0 else "pool"
            message = rest_message(rules, settings, load)
            return _stopped(stage, message, load, states.rest_bytes, slots, verify)
        return None
    if rest <= 0:
        return _stopped("pool", rest_message(rules, settings, load), load, rest)
    return None


def _kv_sized(
    launch: ResolvedLaunch, load: LoadFigures, states: NoStatePool | StatePool
) -> Stopped | Pools:
    settings = launch.settings
    cost = token_cost(launch)
    pool = kv_pool(cost, int(states.rest_bytes), settings)
    slots = states.slots if isinstance(states, StatePool) else 0
    verify = states.intermediate_bytes if isinstance(states, StatePool) else 0
    if pool.tokens <= 0:
        message = kv_message(settings)
        return _stopped("pool", message, load, states.rest_bytes, slots, verify)
    cache = launch.model.cache
    if (
        isinstance(cache, SlidingCache)
        and pool.swa_tokens <= cache.window_tokens + settings.page_size
    ):
        message = window_message(pool.swa_tokens, cache.window_tokens, settings)
        return _stopped("pool", message, load, states.rest_bytes, slots, verify)
    running, limited_by = running_requests(launch, pool, states)
    if running <= 0:
        ratio = states.slots_per_request if isinstance(states, StatePool) else 1
        message = no_requests_message(slots, ratio)
        return _stopped("state_pool", message, load, states.rest_bytes, slots, verify)
    return Pools(
        load=load, cost=cost, states=states, pool=pool, running=running, limited_by=limited_by
    )


def _sized(launch: ResolvedLaunch, pools: Pools) -> Sized:
    needs = headroom_needs(launch, pools.cost, pools.pool.tokens, pools.running)
    known, ranks = launch.calibration, launch.ranks
    if known and known.graph_bytes is not None:
        needs = needs.with_logged_graphs(known.graph_bytes)
    return Sized(
        load=pools.load,
        cost=pools.cost,
        states=pools.states,
        pool=pools.pool,
        running=pools.running,
        at_once=requests_at_once(
            pools.running, ranks.pp_size, ranks.micro_batches, ranks.largest_micro_batch
        ),
        limited_by=pools.limited_by,
        headroom_bytes=_headroom_bytes(pools.load, pools.states, pools.pool),
        needs=needs,
    )


def running_requests(
    launch: ResolvedLaunch, pool: KvPool, states: NoStatePool | StatePool
) -> tuple[int, str]:
    """Return max_running_requests of one data-parallel rank, and what limits it.

    kv_cache_configurator.py: resolve_max_num_reqs.
    """
    settings = launch.settings
    estimate = min(max(int(pool.tokens / settings.context_length * 512), 2048), 4096)
    requested = settings.max_running_requests
    if requested is None:
        options = [(estimate, "SGLang's own limit"), (pool.tokens // 2, "KV tokens")]
    else:
        each = max(1, requested // launch.ranks.attention_dp_size)
        options = [(each, "max_running_requests")]
        if launch.rules.requests_clamped_by == "estimate":
            options.append((estimate, "SGLang's own limit"))
        else:
            options.append((pool.tokens // 2, "KV tokens"))
    if isinstance(states, StatePool):
        options.append((states.slots // states.slots_per_request, "state slots"))
    return min(options)


def _headroom_bytes(load: LoadFigures, states: NoStatePool | StatePool, pool: KvPool) -> int:
    """Return the memory free after the pools and once the draft is settled in it."""
    free = load.available_bytes() - pool.bytes
    if isinstance(states, StatePool):
        free -= states.state_bytes + states.intermediate_bytes
    if load.draft_first:
        return free + load.draft_freed_bytes
    return free - load.draft_resident_bytes


def load_message(gpu: Gpu, missing_bytes: int) -> str:
    """Return torch's message while it copies the weights."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. GPU 0 has a total capacity of "
        f"{gpu.total_bytes / GIB:.2f} GiB (the weights need {missing_bytes / GIB:.2f} GiB more)"
    )


def draft_load_message(gpu: Gpu, missing_bytes: int) -> str:
    """Return torch's message while it copies the draft's weights."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. GPU 0 has a total capacity of "
        f"{gpu.total_bytes / GIB:.2f} GiB (the draft needs {missing_bytes / GIB:.2f} GiB more)"
    )


def rest_message(rules: ReleaseRules, settings: PlanSettings, load: LoadFigures) -> str:
    """Return the message where nothing is left for the KV cache."""
    if not rules.draft_loads_before_pool:
        return f"{_NOT_ENOUGH} Current value: mem_fraction_static={settings.mem_fraction_static:g}"
    lowest = 1 - load.available_bytes() / load.free_before_bytes
    return (
        f"ValueError: Loaded weights leave no GPU memory for the KV cache under "
        f"--mem-fraction-static={settings.mem_fraction_static:g}. Raise --mem-fraction-static "
        f"above {math.ceil(lowest * 1000) / 1000:.3f}"
    )


def kv_message(settings: PlanSettings) -> str:
    """Return the message where not one token fits."""
    return f"{_NOT_ENOUGH} [Current value: {settings.mem_fraction_static:g}]"


def slots_message(slots: int, rest: float, slot_bytes: int) -> str:
    """Return the message where not one state slot fits."""
    return (
        f"RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. "
        f"Computed max_mamba_cache_size={slots} (total_rest_memory={rest / GIB:.2f} GB, "
        f"mamba_cache_per_req={slot_bytes / MIB:.2f} MB)"
    )


def no_requests_message(slots: int, ratio: int) -> str:
    """Return the message where there are fewer slots than one request occupies."""
    return (
        f"RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any "
        f"requests. max_mamba_cache_size={slots}, mamba_ratio={ratio}, resulting max_num_reqs=0"
    )


def window_message(swa_tokens: int, window: int, settings: PlanSettings) -> str:
    """Return the message where the window pool is smaller than one window."""
    return (
        f"ValueError: SWA pool ({swa_tokens} tokens) cannot hold even one request "
        f"(sliding window {window}, page size {settings.page_size})"
    )
