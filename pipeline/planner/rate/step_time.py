"""Seconds of one decode step, and of one prefill, from what a GPU must read and multiply.

A roofline by parts: each part is the soft maximum of its memory time and its arithmetic time, and
the parts add up. The constants are in `Kernels`; `make estimate-fit` fits them to published
readings. This module knows one replica; how many run, and for how long, is decided above it.
"""

import math

from pipeline.planner.rate.replica import ExpertLoad, Replica, WeightClass, WeightLoad
from pipeline.planner.rate.stages import round_s
from pipeline.planner.rate.traffic import RequestTraffic, request_traffic
from pipeline.planner.sglang.layout import stage_layers
from schemas.estimate import StepParts
from schemas.plan import (
    GqaCache,
    NoSpeculation,
    PlanSettings,
)

# Readings of B200 with 0.5.6 to 0.5.8 are 1.5 to 3 times as slow as those of 0.5.9 and later.
_FASTER_SINCE = (0, 5, 9)
_HANDED_OVER = 2  # tensors: hidden states and residual. layer_boundary/residual/batch.py, 0.5.23
_TRITON_KV_SPLITS = 8  # triton_attention_num_kv_splits, exec_.py, 0.5.23


def decode_step(replica: Replica, requests: float, context_tokens: float) -> StepParts:
    """The step in which `requests` of the replica, `context_tokens` each, all get a token.

    With speculation: one verify step of all draft tokens, and the draft's own steps.
    """
    if replica.ranks.pp_size > 1:
        return _pipeline_round(replica, requests, context_tokens)
    return _one_pass(replica, replica.dense, requests, context_tokens)


def turns(replica: Replica, requests: float) -> float:
    """Micro-batches with something in them."""
    return max(min(float(replica.ranks.micro_batches), requests), 1.0)


def _one_pass(
    replica: Replica, dense: tuple[WeightLoad, ...], requests: float, context_tokens: float
) -> StepParts:
    """All layers, one after the other."""
    verified, steps = _verified(replica.settings)
    each = requests / replica.ranks.attention_dp_size
    traffic = request_traffic(
        replica.model, replica.settings, replica.ranks, context_tokens, replica.state_slot_bytes
    )
    tokens = each * verified
    return StepParts(
        dense_s=_dense_s(replica, dense, tokens),
        experts_s=_experts_s(replica, replica.experts, tokens),
        attention_s=_attention_s(replica, traffic, each, verified),
        communication_s=_communication_s(replica, tokens),
        overhead_s=_overhead_s(replica),
        draft_s=steps * _draft_step_s(replica, each) if steps else 0.0,
    )


def _pipeline_round(replica: Replica, requests: float, context_tokens: float) -> StepParts:
    """Every micro-batch once through all stages; the last one has the head and the draft as well.

    Each part is a mean stage's, over all micro-batches.
    """
    stages, layers = replica.ranks.pp_size, replica.model.layers
    micro_batches = turns(replica, requests)
    batch = requests / micro_batches
    body = tuple(load for load in replica.dense if load not in replica.head)
    whole = _one_pass(replica, body, batch, context_tokens)
    tokens = batch / replica.ranks.attention_dp_size * _verified(replica.settings)[0]
    head_s = _dense_s(replica, replica.head, tokens)
    hand_over_s = _hand_over_s(replica, tokens)
    every_stage_s = replica.kernels.step_s + hand_over_s
    layers_s = whole.step_s() - whole.draft_s - replica.kernels.step_s
    stages_s = [every_stage_s + layers_s * held / layers for held in stage_layers(layers, stages)]
    stages_s[-1] += head_s + whole.draft_s
    of_a_stage = micro_batches / stages
    return StepParts(
        dense_s=of_a_stage * (whole.dense_s + head_s),
        experts_s=of_a_stage * whole.experts_s,
        attention_s=of_a_stage * whole.attention_s,
        communication_s=of_a_stage * whole.communication_s,
        overhead_s=of_a_stage * (whole.overhead_s + (stages - 1) * replica.kernels.step_s),
        draft_s=of_a_stage * whole.draft_s,
        hand_over_s=micro_batches * hand_over_s,
        idle_s=round_s(stages_s, micro_batches) - of_a_stage * sum(stages_s),
    )


def _hand_over_s(replica: Replica, tokens: float) -> float:
    """Hidden states and residual, in 16 bits, to the next stage; each tensor-parallel rank sends
    its slice, and the slices are gathered there. residual/batch.py: to_pp; parallel_state.py."""
    kernels, speed, tp = replica.kernels, replica.speed, replica.ranks.tp_size
    latency_s = kernels.nvlink_all_reduce_s if speed.nvlink else kernels.pcie_all_reduce_s
    size = _HANDED_OVER * tokens * replica.model.hidden_size * 2
    # Of the whole, a rank gets one slice from the other stage and the rest from its own.
    return _HANDED_OVER * latency_s * (1 if tp == 1 else 2) + size / (
        speed.link_bytes_per_s * kernels.link
    )


def prefill_s(replica: Replica, prompt_tokens: float) -> float:
    """Device seconds of one prompt; without stages, what it takes from the replica's decoding."""
    if prompt_tokens <= 0:
        return 0.0
    kernels, adp = replica.kernels, replica.ranks.attention_dp_size
    seconds = sum(
        _product_s(replica, load.weight_class, load.params * prompt_tokens, load.gathered)
        for load in replica.dense
        if load not in replica.head  # one token of the prompt asks for it
    )
    seconds += sum(
        _product_s(
            replica,
            load.weight_class,
            load.params * prompt_tokens * load.experts_per_token / load.experts,
            gathered=True,
        )
        for load in replica.experts
    )
    half = request_traffic(replica.model, replica.settings, replica.ranks, prompt_tokens / 2, 0.0)
    # Over a prompt the states are updated in chunks, by matrix products.
    attention = (half.flops + half.state_flops) * prompt_tokens
    seconds += attention / (replica.speed.bf16_flops * kernels.attention_gemm)
    if replica.ranks.tp_size > 1:
        seconds += _all_reduces(replica) * _transfer_s(replica, prompt_tokens * adp)
    if replica.ranks.pp_size > 1:
        seconds += (replica.ranks.pp_size - 1) * _hand_over_s(replica, prompt_tokens)
    return seconds / adp + kernels.prefill_s


def _product_s(
    replica: Replica, kind: WeightClass, params_times_tokens: float, gathered: bool
) -> float:
    """A prefill's matrix products with the weights of one load."""
    share = replica.kernels.prefill_gemm * _product_share(replica, kind)
    tokens = params_times_tokens * (replica.ranks.attention_dp_size if gathered else 1)
    return 2 * tokens / (_flops(replica, kind) * share)


# --- loads ------------------------------------------------------------------------------------


def _verified(settings: PlanSettings) -> tuple[int, int]:
    """Tokens that a step verifies, and steps of the draft before it."""
    if isinstance(settings.speculation, NoSpeculation):
        return 1, 0
    return settings.speculation.num_draft_tokens, settings.speculation.steps


# --- the parts --------------------------------------------------------------------------------


def _dense_s(replica: Replica, loads: tuple[WeightLoad, ...], tokens: float) -> float:
    kernels, adp = replica.kernels, replica.ranks.attention_dp_size
    memory = arithmetic = 0.0
    for load in loads:
        narrow = _narrow(replica, load.weight_class)
        stream = replica.speed.memory_bytes_per_s * kernels.weight_stream * narrow
        memory += load.bytes / stream + _widening_s(replica, load.weight_class, load.params)
        seen = tokens * (adp if load.gathered else 1)
        peak = _flops(replica, load.weight_class) * kernels.gemm
        peak *= _product_share(replica, load.weight_class)
        arithmetic += 2 * seen * load.params / peak
    return math.hypot(memory, arithmetic)


def _experts_s(replica: Replica, loads: tuple[ExpertLoad, ...], tokens: float) -> float:
    kernels = replica.kernels
    tokens *= replica.ranks.attention_dp_size
    memory = arithmetic = 0.0
    for load in loads:
        narrow = _narrow(replica, load.weight_class)
        share = load.experts_per_token / load.experts
        # Experts that at least one of the tokens is sent to, were routing uniform.
        touched = 1 - (1 - share) ** (max(tokens, 1.0) ** kernels.routing)
        stream = replica.speed.memory_bytes_per_s * kernels.expert_stream * narrow
        stream *= _release_share(replica, load.weight_class)
        widened = _widening_s(replica, load.weight_class, load.params)
        memory += touched * (load.bytes / stream + widened)
        peak = _flops(replica, load.weight_class) * kernels.expert_gemm
        peak *= _product_share(replica, load.weight_class)
        peak *= _release_share(replica, load.weight_class)
        arithmetic += 2 * tokens * share * load.params / peak
    return math.hypot(memory, arithmetic)


def _attention_s(
    replica: Replica, traffic: RequestTraffic, requests: float, verified: int
) -> float:
    return _cache_s(replica, traffic, requests, verified) + _state_s(
        replica, traffic, requests, verified
    )


def _cache_s(replica: Replica, traffic: RequestTraffic, requests: float, verified: int) -> float:
    kernels, speed = replica.kernels, replica.speed
    memory = requests * traffic.kv_bytes / (speed.memory_bytes_per_s * kernels.cache_stream)
    arithmetic = requests * verified * traffic.flops / (speed.bf16_flops * kernels.attention_gemm)
    return math.hypot(memory, arithmetic, _longest_block_s(replica, traffic))


def _longest_block_s(replica: Replica, traffic: RequestTraffic) -> float:
    """Triton cuts a request's keys and values in eight for each head, and no finer."""
    cache = replica.model.cache
    if replica.settings.attention_backend != "triton" or not isinstance(cache, GqaCache):
        return 0.0
    heads = max(1, cache.kv_heads // replica.ranks.attention_tp_size)
    blocks = heads * _TRITON_KV_SPLITS
    return traffic.kv_bytes / (blocks * replica.kernels.block_bytes_per_s)


def _state_s(replica: Replica, traffic: RequestTraffic, requests: float, verified: int) -> float:
    kernels, speed = replica.kernels, replica.speed
    # Verifying writes a state for every token, and copies the one that holds: read and write.
    passes = 2 if verified == 1 else 1 + verified + 2
    moved = requests * passes * traffic.state_bytes
    updates = requests * verified * traffic.state_flops
    return math.hypot(
        moved / (speed.memory_bytes_per_s * kernels.cache_stream),
        updates / (speed.vector_flops * kernels.state_vector),
    )


def _communication_s(replica: Replica, tokens: float) -> float:
    if replica.ranks.tp_size == 1:
        return 0.0
    kernels = replica.kernels
    latency = kernels.nvlink_all_reduce_s if replica.speed.nvlink else kernels.pcie_all_reduce_s
    seen = tokens * replica.ranks.attention_dp_size
    return _all_reduces(replica) * (latency + _transfer_s(replica, seen))


def _all_reduces(replica: Replica) -> int:
    """Two a layer; attention on whole ranks leaves the gather and the scatter of its experts."""
    if replica.ranks.attention_tp_size == 1:
        return replica.model.layers
    return 2 * replica.model.layers


def _transfer_s(replica: Replica, tokens: float) -> float:
    tp = replica.ranks.tp_size
    size = 2 * (tp - 1) / tp * tokens * replica.model.hidden_size * 2
    return size / (replica.speed.link_bytes_per_s * replica.kernels.link)


def _overhead_s(replica: Replica) -> float:
    kernels, model = replica.kernels, replica.model
    moe_layers = sum(load.layers for load in replica.experts)
    state_layers = getattr(model.state, "layers", 0)
    layers_s = (
        model.layers * kernels.layer_s
        + moe_layers * kernels.moe_layer_s
        + state_layers * kernels.state_layer_s
    )
    return kernels.step_s + layers_s * (kernels.old_layer if _is_old(replica) else 1.0)


def _draft_step_s(replica: Replica, requests: float) -> float:
    """One step of the draft: its layer, and the output head that picks its token."""
    return (
        _dense_s(replica, (*replica.draft, *replica.head), requests)
        + _experts_s(replica, replica.draft_experts, requests)
        + replica.kernels.draft_step_s
    )


def _narrow(replica: Replica, kind: WeightClass) -> float:
    kernels = replica.kernels
    vendor = 1.0 if replica.speed.vendor == "nvidia" else kernels.other_vendor
    narrow = {"bf16": 1.0, "fp8": kernels.fp8, "fp4": kernels.fp4, "int4": kernels.int4}[kind]
    return vendor * narrow


def _release_share(replica: Replica, kind: WeightClass) -> float:
    """Of what experts reach, what they reach in this release."""
    blackwell = replica.speed.fp4_flops > 0 and replica.speed.vendor == "nvidia"
    if kind == "fp8" and blackwell and _is_old(replica):
        return replica.kernels.old_fp8_experts
    return 1.0


def _is_old(replica: Replica) -> bool:
    release = tuple(int(part) for part in replica.settings.release.split("."))
    return release < _FASTER_SINCE


def _is_widened(replica: Replica, kind: WeightClass) -> bool:
    """Whether the weights are stored narrower than the type they are multiplied in."""
    return kind in ("int4", "fp4") and _flops(replica, kind) == replica.speed.bf16_flops


def _product_share(replica: Replica, kind: WeightClass) -> float:
    if _is_widened(replica, kind):
        kernels = replica.kernels
        return kernels.int4_gemm if kind == "int4" else kernels.widened_gemm
    return _narrow(replica, kind)


def _widening_s(replica: Replica, kind: WeightClass, params: float) -> float:
    if not _is_widened(replica, kind):
        return 0.0
    return params / (replica.speed.vector_flops * replica.kernels.widening)


def _flops(replica: Replica, kind: WeightClass) -> float:
    """The peak of the type that the product runs in: without such units, 16 bits."""
    speed = replica.speed
    if kind == "fp4" and not replica.model.multiplied_in_16_bits and speed.fp4_flops:
        return speed.fp4_flops
    if kind == "fp8" and speed.fp8_flops:
        return speed.fp8_flops
    return speed.bf16_flops
