"""Linear-attention state slots, and the states that speculative verification adds to them.

Source: SGLang mem_cache/kv_cache_configurator.py: _handle_max_mamba_cache, 0.5.17 - 0.5.23, and its
predecessors in earlier releases.
"""

from dataclasses import dataclass

from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import Parallel, largest_share, no_overlap
from schemas.plan import LinearState, NoSpeculation, PlanSettings

_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2}
# bf16 unless SGLANG_MAMBA_CONV_DTYPE is set.
_CONV_BYTES = 2
# Default of --linear-replayssm-cache-len; only KDA reads it.
_REPLAY_WINDOW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NoStatePool:
    """The model keeps no recurrent state; the whole budget goes to KV."""

    rest_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePool:
    """State slots, their bytes and those of the verify states, and the budget left for KV."""

    slots: int
    slots_per_request: int
    slot_bytes: int
    state_bytes: int
    intermediate_bytes: int
    rest_bytes: float


def slot_bytes(state: LinearState, ranks: Parallel, ssm_dtype: str) -> int:
    """Bytes of one request's state over all linear layers, on one GPU.

    configs/mamba_utils.py, 0.5.23.
    """
    tp = ranks.attention_tp_size
    ssm = _DTYPE_BYTES.get(ssm_dtype, 4)
    if state.kind == "conv":
        per_layer = (state.head_dim // tp) * (state.conv_kernel - 1) * _CONV_BYTES
        return per_layer * state.layers
    width = state.heads * state.head_dim
    if state.kind == "kda":
        columns = (width + 2 * state.groups * state.state_dim) // tp
    else:
        groups = state.groups
        if groups % tp:
            # Groups that the ranks do not divide are padded until every rank has the same number.
            groups += tp - groups if groups < tp else tp - groups % tp
        columns = (width + 2 * groups * state.state_dim) // tp
    conv = columns * (state.conv_kernel - 1) * _CONV_BYTES
    heads = max(state.heads // tp, 1)
    return (conv + heads * state.head_dim * state.state_dim * ssm) * state.layers


def ssm_dtype(flags: LaunchFlags, state: LinearState) -> str:
    """Type of the recurrent state: flag, then environment, then config."""
    given = flags.text("mamba-ssm-dtype") or flags.variable("SGLANG_MAMBA_SSM_DTYPE")
    return given or state.ssm_dtype


def slots_per_request(flags: LaunchFlags, settings: PlanSettings) -> int:
    """Count the slots that a running request occupies: _calculate_mamba_ratio."""
    if settings.disable_radix_cache:
        return 1
    if settings.mamba_strategy == "no_buffer":
        return 3
    lazy = settings.mamba_strategy == "extra_buffer_lazy" or no_overlap(flags)
    skip = flags.switched_on("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK")
    return 3 + (1 if lazy else 2) - (1 if skip else 0)


def memory_ratio(flags: LaunchFlags) -> float:
    """Bytes of states per byte of KV: --mamba-full-memory-ratio."""
    given = flags.fraction("mamba-full-memory-ratio")
    return 0.9 if given is None else given


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateDemand:
    """Sizes and counts that a launch fixes before its state budget is known."""

    slot_bytes: int
    slots_per_request: int
    # Tokens whose states are kept until a verify step is settled; 0 without speculation.
    verify_tokens: int
    # --max-running-requests of one attention rank.
    requests: int | None
    # Slots that the flags fix, whatever the budget.
    fixed_slots: int | None
    # A request runs in each slot: no prefix cache, and no number of slots given.
    every_slot_runs: bool
    # --mamba-full-memory-ratio.
    bytes_per_kv_byte: float
    replay_bytes: int
    spare_slots: int


def state_pool(launch: ResolvedLaunch, state: LinearState, budget_bytes: float) -> StatePool:
    """Size the state pool. With `slots` or `rest_bytes` at 0 or below, the engine fails."""
    demand = _demand(launch, state)
    if launch.rules.verify_reserve == "all_requests_first":
        return _verify_states_first(demand, budget_bytes)
    return _joint(demand, budget_bytes)


def _demand(launch: ResolvedLaunch, state: LinearState) -> _StateDemand:
    flags, settings, ranks = launch.flags, launch.settings, launch.ranks
    # A pipeline stage holds its own layers' part of a slot; all are priced as the largest.
    stage = largest_share(state.layers, launch.model.layers, ranks.pp_size)
    requested = settings.max_running_requests
    requests = max(1, requested // ranks.attention_dp_size) if requested is not None else None
    given = flags.number("max-mamba-cache-size")
    if given is not None:
        fixed: int | None = given // ranks.attention_dp_size
    else:
        fixed = requests if settings.disable_radix_cache else None
    return _StateDemand(
        slot_bytes=int(slot_bytes(state, ranks, ssm_dtype(flags, state)) * stage),
        slots_per_request=slots_per_request(flags, settings),
        verify_tokens=_verify_tokens(launch, state),
        requests=requests,
        fixed_slots=fixed,
        every_slot_runs=settings.disable_radix_cache and given is None,
        bytes_per_kv_byte=memory_ratio(flags),
        replay_bytes=_replay_bytes(launch, state, requests or 1),
        spare_slots=1 if launch.rules.verify_reserve == "joint_padded" else 0,
    )


def _verify_states_first(demand: _StateDemand, budget_bytes: float) -> StatePool:
    """Size the pool up to 0.5.12: the verify states of all requested requests come off first."""
    intermediate = demand.slot_bytes * (demand.requests or 0) * demand.verify_tokens
    rest = budget_bytes - intermediate
    slots = demand.fixed_slots
    if slots is None:
        slots = int(_state_budget(demand, rest) // demand.slot_bytes)
    return StatePool(
        slots=slots,
        slots_per_request=demand.slots_per_request,
        slot_bytes=demand.slot_bytes,
        state_bytes=max(slots, 0) * demand.slot_bytes,
        intermediate_bytes=intermediate,
        rest_bytes=rest - slots * demand.slot_bytes,
    )


def _joint(demand: _StateDemand, budget_bytes: float) -> StatePool:
    """Size the pool from 0.5.13 on: slots and their verify states share one budget."""
    verify, spare = demand.verify_tokens, demand.spare_slots
    budget = _state_budget(demand, budget_bytes)
    if demand.fixed_slots is not None:
        slots = demand.fixed_slots
    elif verify:
        budget -= demand.slot_bytes * spare * (1 + verify)
        slots = int(budget // (demand.slot_bytes * (1 + verify / demand.slots_per_request)))
    else:
        budget = budget - demand.replay_bytes - demand.slot_bytes * spare
        slots = int(budget // demand.slot_bytes)
    running = min(demand.requests or 1, slots // demand.slots_per_request) if slots > 0 else 0
    if demand.every_slot_runs:
        running = slots
    intermediate = demand.slot_bytes * (running + spare) * verify
    states = (max(slots, 0) + spare) * demand.slot_bytes
    return StatePool(
        slots=slots,
        slots_per_request=demand.slots_per_request,
        slot_bytes=demand.slot_bytes,
        state_bytes=states,
        intermediate_bytes=intermediate + demand.replay_bytes,
        rest_bytes=budget_bytes - intermediate - states - demand.replay_bytes,
    )


def _state_budget(demand: _StateDemand, budget_bytes: float) -> float:
    """Return the states' share of what states and KV divide."""
    ratio = demand.bytes_per_kv_byte
    return budget_bytes * ratio / (1 + ratio)


def _verify_tokens(launch: ResolvedLaunch, state: LinearState) -> int:
    speculation = launch.settings.speculation
    if isinstance(speculation, NoSpeculation) or _uses_replay(launch, state):
        return 0
    if launch.flags.text("disaggregation-mode") == "prefill":
        return 0
    return speculation.num_draft_tokens


def _uses_replay(launch: ResolvedLaunch, state: LinearState) -> bool:
    """Return whether a replay ring takes the place of the verify states."""
    return launch.flags.has("enable-linear-replayssm-spec") and state.kind in ("gdn", "kda")


def _replay_bytes(launch: ResolvedLaunch, state: LinearState, requests: int) -> int:
    """Bytes of the replay rings: configs/mamba_utils.py: replayssm_ring_bytes_per_req, 0.5.23."""
    speculation, tp = launch.settings.speculation, launch.ranks.attention_tp_size
    if isinstance(speculation, NoSpeculation) or not _uses_replay(launch, state):
        return 0
    window = speculation.num_draft_tokens if state.kind == "gdn" else _REPLAY_WINDOW
    heads, key_heads = max(state.heads // tp, 1), max(state.groups // tp, 1)
    values = heads * state.head_dim * _CONV_BYTES
    keys = key_heads * state.state_dim * _CONV_BYTES
    gates = heads * 4 * (1 if state.kind == "gdn" else state.state_dim)
    per_layer = window * (2 * values + 2 * keys + gates)
    return per_layer * state.layers * (requests + 1)
