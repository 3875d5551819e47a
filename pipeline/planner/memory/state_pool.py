"""Linear-attention state slots, and what verifying several tokens at once adds to them.

SGLang mem_cache/kv_cache_configurator.py: _handle_max_mamba_cache, 0.5.17 - 0.5.23, and its
forerunners. `state_pool` returns either a pool or the engine's failure.
"""

from dataclasses import dataclass

from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import Parallel, largest_share, no_overlap
from pipeline.planner.sglang.releases import ReleaseRules
from schemas.plan import (
    LinearState,
    NoSpeculation,
    PlanSettings,
    Speculation,
)

_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2}
_CONV_BYTES = 2  # bf16 unless SGLANG_MAMBA_CONV_DTYPE says otherwise
_REPLAY_WINDOW = 16  # --linear-replayssm-cache-len, for KDA


@dataclass(frozen=True, slots=True, kw_only=True)
class NoStatePool:
    """The model keeps no recurrent state; the whole budget goes to KV."""

    rest_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePool:
    """Slots, what they and the verify states take, and what is left for KV."""

    slots: int
    slots_per_request: int
    slot_bytes: int
    state_bytes: int
    intermediate_bytes: int
    rest_bytes: float


def slot_bytes(state: LinearState, ranks: Parallel, ssm_dtype: str) -> int:
    """One request's state over all linear layers, on one GPU. configs/mamba_utils.py, 0.5.23."""
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
            # Groups that do not divide are repeated until every rank has one.
            groups += tp - groups if groups < tp else tp - groups % tp
        columns = (width + 2 * groups * state.state_dim) // tp
    conv = columns * (state.conv_kernel - 1) * _CONV_BYTES
    heads = max(state.heads // tp, 1)
    return (conv + heads * state.head_dim * state.state_dim * ssm) * state.layers


def ssm_dtype(flags: LaunchFlags, state: LinearState) -> str:
    """The state's type: flag, environment, config, float32."""
    given = flags.text("mamba-ssm-dtype") or flags.variable("SGLANG_MAMBA_SSM_DTYPE")
    return given or state.ssm_dtype


def slots_per_request(flags: LaunchFlags, settings: PlanSettings) -> int:
    """How many slots a running request ties up: _calculate_mamba_ratio."""
    if settings.disable_radix_cache:
        return 1
    skip = flags.switched_on("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK")
    if settings.mamba_strategy == "no_buffer":
        return 3
    tracking = 2
    if settings.mamba_strategy == "extra_buffer_lazy" or no_overlap(flags):
        tracking = 1
    return 3 + tracking - (1 if skip else 0)


def state_pool(
    state: LinearState,
    rest_bytes: float,
    flags: LaunchFlags,
    settings: PlanSettings,
    ranks: Parallel,
    rules: ReleaseRules,
    model_layers: int,
) -> StatePool:
    """The pool that a rest buys. `slots` at or below 0 is the engine's failure."""
    # A pipeline stage holds its own layers' part of a slot; all are priced as the largest.
    stage = largest_share(state.layers, model_layers, ranks.pp_size)
    per_slot = int(slot_bytes(state, ranks, ssm_dtype(flags, state)) * stage)
    ratio = slots_per_request(flags, settings)
    verify = _verify_tokens(flags, settings, state)
    asked = settings.max_running_requests
    requests = max(1, asked // ranks.attention_dp_size) if asked is not None else None
    replay = _replay_bytes(flags, settings, state, ranks, requests)
    if rules.verify_reserve == "all_requests_first":
        return _reserve_first(rest_bytes, flags, ranks, per_slot, ratio, verify, requests, settings)
    pad = 1 if rules.verify_reserve == "joint_padded" else 0
    return _joint(
        rest_bytes, flags, ranks, per_slot, ratio, verify, requests, settings, pad, replay
    )


def _reserve_first(
    rest: float,
    flags: LaunchFlags,
    ranks: Parallel,
    per_slot: int,
    ratio: int,
    verify: int,
    requests: int | None,
    settings: PlanSettings,
) -> StatePool:
    """Up to 0.5.12: the verify states of every requested request come off first."""
    intermediate = per_slot * (requests or 0) * verify
    rest -= intermediate
    given = flags.number("max-mamba-cache-size")
    if given is not None:
        slots = given // ranks.attention_dp_size
    elif settings.disable_radix_cache and requests is not None:
        slots = requests
    else:
        rho = memory_ratio(flags)
        slots = int(rest * rho / (1 + rho) // per_slot)
    return StatePool(
        slots=slots,
        slots_per_request=ratio,
        slot_bytes=per_slot,
        state_bytes=max(slots, 0) * per_slot,
        intermediate_bytes=intermediate,
        rest_bytes=rest - slots * per_slot,
    )


def _joint(
    rest: float,
    flags: LaunchFlags,
    ranks: Parallel,
    per_slot: int,
    ratio: int,
    verify: int,
    requests: int | None,
    settings: PlanSettings,
    pad: int,
    replay: int,
) -> StatePool:
    """From 0.5.13: slots and their verify states share one budget; `pad` is the spare slot."""
    given = flags.number("max-mamba-cache-size")
    rho = memory_ratio(flags)
    share = rest * rho / (1 + rho)
    if given is not None:
        slots = given // ranks.attention_dp_size
    elif settings.disable_radix_cache and requests is not None:
        slots = requests
    elif verify:
        budget = share - per_slot * pad * (1 + verify)
        slots = int(budget // (per_slot * (1 + verify / ratio)))
    else:
        slots = int((share - replay - per_slot * pad) // per_slot)
    running = min(requests or 1, slots // ratio) if slots > 0 else 0
    if settings.disable_radix_cache and given is None:
        running = slots
    intermediate = per_slot * (running + pad) * verify
    states = (max(slots, 0) + pad) * per_slot
    return StatePool(
        slots=slots,
        slots_per_request=ratio,
        slot_bytes=per_slot,
        state_bytes=states,
        intermediate_bytes=intermediate + replay,
        rest_bytes=rest - intermediate - states - replay,
    )


def memory_ratio(flags: LaunchFlags) -> float:
    """--mamba-full-memory-ratio: bytes of states for each byte of KV."""
    given = flags.fraction("mamba-full-memory-ratio")
    return 0.9 if given is None else given


def _verify_tokens(flags: LaunchFlags, settings: PlanSettings, state: LinearState) -> int:
    """Tokens whose states are kept until a verify step is settled; 0 where none are."""
    if isinstance(settings.speculation, NoSpeculation):
        return 0
    if flags.text("disaggregation-mode") == "prefill":
        return 0
    if flags.has("enable-linear-replayssm-spec") and state.kind in ("gdn", "kda"):
        return 0
    return settings.speculation.num_draft_tokens


def _replay_bytes(
    flags: LaunchFlags,
    settings: PlanSettings,
    state: LinearState,
    ranks: Parallel,
    requests: int | None,
) -> int:
    """The compact replay ring that stands in for verify states.

    configs/mamba_utils.py: replayssm_ring_bytes_per_req, 0.5.23.
    """
    if not flags.has("enable-linear-replayssm-spec") or state.kind not in ("gdn", "kda"):
        return 0
    if not isinstance(settings.speculation, Speculation):
        return 0
    window = settings.speculation.num_draft_tokens if state.kind == "gdn" else _REPLAY_WINDOW
    heads = max(state.heads // ranks.attention_tp_size, 1)
    key_heads = max(state.groups // ranks.attention_tp_size, 1)
    values = heads * state.head_dim * _CONV_BYTES
    keys = key_heads * state.state_dim * _CONV_BYTES
    gates = heads * 4 * (1 if state.kind == "gdn" else state.state_dim)
    per_layer = window * (2 * values + 2 * keys + gates)
    return per_layer * state.layers * ((requests or 1) + 1)
