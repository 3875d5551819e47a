"""Seconds of one decode step, and of one prefill, from the bytes that a GPU reads and multiplies.

A roofline by parts: each part is the soft maximum of its memory time and its arithmetic time, and
the parts add up. The constants are in `Kernels`; `make estimate-fit` fits them to published
readings. What these readings say beyond the constants, as of one model on one card, is a factor on
the time of each part. It is the same at every batch, so a longer step stays longer, and no part
takes less than the card's peaks allow.
"""

import math
from dataclasses import replace

from pipeline.planner.rate.kernels import PEAKS
from pipeline.planner.rate.replica import ExpertLoad, Replica, WeightClass, WeightLoad
from pipeline.planner.rate.stages import round_s
from pipeline.planner.rate.traffic import RequestTraffic, prompt_flops, request_traffic
from pipeline.planner.sglang.layout import stage_layers
from schemas.estimate import StepParts
from schemas.plan import (
    GqaCache,
    NoSpeculation,
    PlanSettings,
)

# Readings of B200 with 0.5.6 to 0.5.8 are 1.5 to 3 times as slow as those of 0.5.9 and later.
_FASTER_SINCE = (0, 5, 9)
# Tensors between stages: hidden states and residual. layer_boundary/residual/batch.py, 0.5.23
_HANDED_OVER = 2
# No constant is a larger share of a peak, so factors above it need no comparison with the peaks.
_NEAR_PEAK = 0.9
# Cards below multiply 16-bit numbers slowly enough that their memory keeps the tensor cores fed:
# A100, L40S, RTX PRO 6000; those above are H100 and later.
_LOW_PEAK_FLOPS = 500e12
# triton_attention_num_kv_splits, exec_.py, 0.5.23
_TRITON_KV_SPLITS = 8


def decode_step(replica: Replica, requests: float, context_tokens: float) -> StepParts:
    """Time a step in which `requests`, each of `context_tokens`, get their next token.

    With speculation it is one verify step of all draft tokens, and the draft's own steps.
    """
    step = modelled_step(replica, requests, context_tokens)
    weights, attention, overhead, communication, _ = replica.offsets.time_factors
    dense_s, experts_s, draft_s = (
        weights * seconds for seconds in (step.dense_s, step.experts_s, step.draft_s)
    )
    attention_s, communication_s = (
        attention * step.attention_s,
        communication * step.communication_s,
    )
    hand_over_s = communication * step.hand_over_s
    if min(weights, attention, communication) < _NEAR_PEAK:
        least = modelled_step(replace(replica, kernels=PEAKS), requests, context_tokens)
        dense_s, experts_s = max(dense_s, least.dense_s), max(experts_s, least.experts_s)
        draft_s, attention_s = max(draft_s, least.draft_s), max(attention_s, least.attention_s)
        communication_s = max(communication_s, least.communication_s)
        hand_over_s = max(hand_over_s, least.hand_over_s)
    offset = StepParts(
        dense_s=dense_s,
        experts_s=experts_s,
        attention_s=attention_s,
        communication_s=communication_s,
        overhead_s=overhead * step.overhead_s,
        draft_s=draft_s,
        hand_over_s=hand_over_s,
    )
    # Stages wait for one another in proportion to their work.
    busy_s = step.step_s() - step.idle_s
    return replace(offset, idle_s=step.idle_s * offset.step_s() / busy_s) if step.idle_s else offset


def modelled_step(replica: Replica, requests: float, context_tokens: float) -> StepParts:
    """Time a step from the kernels' constants alone."""
    if replica.ranks.pp_size > 1:
        return _pipeline_round(replica, requests, context_tokens)
    return _one_pass(replica, replica.dense, requests, context_tokens)


def turns(replica: Replica, requests: float) -> float:
    """Count the micro-batches that have a request."""
    return max(min(float(replica.ranks.micro_batches), requests), 1.0)


def _one_pass(
    replica: Replica, dense: tuple[WeightLoad, ...], requests: float, context_tokens: float
) -> StepParts:
    """Time all layers on the replica's ranks, without pipeline stages."""
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
    """Time one round of all micro-batches; the last stage also has the head and the draft.

    Each part is that of a mean stage, over all micro-batches.
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
    stages_s = [every_stage_s + layers_s * count / layers for count in stage_layers(layers, stages)]
    stages_s[-1] += head_s + whole.draft_s
    per_stage = micro_batches / stages
    return StepParts(
        dense_s=per_stage * (whole.dense_s + head_s),
        experts_s=per_stage * whole.experts_s,
        attention_s=per_stage * whole.attention_s,
        communication_s=per_stage * whole.communication_s,
        overhead_s=per_stage * (whole.overhead_s + (stages - 1) * replica.kernels.step_s),
        draft_s=per_stage * whole.draft_s,
        hand_over_s=micro_batches * hand_over_s,
        idle_s=round_s(stages_s, micro_batches) - per_stage * sum(stages_s),
    )


def _hand_over_s(replica: Replica, tokens: float) -> float:
    """Time to send hidden states and residual, in 16 bits, to the next stage.

    Each tensor-parallel rank sends its slice, and the receivers gather them. residual/batch.py:
    to_pp; parallel_state.py.
    """
    kernels, speed, tp = replica.kernels, replica.speed, replica.ranks.tp_size
    latency_s = kernels.nvlink_all_reduce_s if speed.nvlink else kernels.pcie_all_reduce_s
    size = _HANDED_OVER * tokens * replica.model.hidden_size * 2
    # A rank receives one slice from the previous stage and the rest from its own.
    return _HANDED_OVER * latency_s * (1 if tp == 1 else 2) + size / (
        speed.link_bytes_per_s * kernels.link
    )


def prefill_s(replica: Replica, prompt_tokens: float, together: float = 1.0) -> float:
    """Return the device time of one prompt; without stages, decoding stops for it.

    `together` prompts are prefilled at once and share the launches.
    """
    if prompt_tokens <= 0:
        return 0.0
    factor = replica.offsets.time_factors[-1]
    seconds = factor * modelled_prefill_s(replica, prompt_tokens, together)
    if factor >= _NEAR_PEAK:
        return seconds
    peaks = replace(replica, kernels=PEAKS)
    return max(seconds, modelled_prefill_s(peaks, prompt_tokens, together))


def modelled_prefill_s(replica: Replica, prompt_tokens: float, together: float = 1.0) -> float:
    """Time a prompt from the kernels' constants alone."""
    kernels, adp = replica.kernels, replica.ranks.attention_dp_size
    seconds = sum(
        _product_s(replica, load.weight_class, load.params * prompt_tokens, load.gathered)
        for load in replica.dense
        # Only the last token of a prompt uses the head.
        if load not in replica.head
    )
    seconds += sum(
        _product_s(
            replica,
            load.weight_class,
            load.params * prompt_tokens * load.experts_per_token / load.experts,
            gathered=True,
            experts=True,
        )
        for load in replica.experts
    )
    model, settings, ranks = replica.model, replica.settings, replica.ranks
    half = request_traffic(model, settings, ranks, prompt_tokens / 2, 0.0)
    # Over a prompt the states are updated in chunks, by matrix products.
    attention = prompt_flops(model, settings, ranks, prompt_tokens)
    attention += half.state_flops * prompt_tokens
    seconds += attention / (replica.speed.bf16_flops * kernels.attention_gemm)
    seconds += half.index_flops * prompt_tokens / _index_flops_per_s(replica)
    if replica.ranks.tp_size > 1:
        seconds += _all_reduces(replica) * _transfer_s(replica, prompt_tokens * adp)
    if replica.ranks.pp_size > 1:
        seconds += (replica.ranks.pp_size - 1) * _hand_over_s(replica, prompt_tokens)
    # No graph holds a prefill's launches.
    launches_s = kernels.prefill_s + kernels.prefill_launches * _overhead_s(replica)
    return seconds / adp + launches_s / together


def _product_s(
    replica: Replica,
    weight_class: WeightClass,
    params_times_tokens: float,
    gathered: bool,
    *,
    experts: bool = False,
) -> float:
    """Time a prefill's matrix products with the weights of one load."""
    share = _prefill_share(replica, experts=experts) * _narrow_prefill(replica, weight_class)
    tokens = params_times_tokens * (replica.ranks.attention_dp_size if gathered else 1)
    return 2 * tokens / (_flops(replica, weight_class) * share)


def _prefill_share(replica: Replica, *, experts: bool) -> float:
    """Return the share of the peak that a prompt's products with 16-bit weights reach."""
    kernels = replica.kernels
    dense = kernels.prefill_gemm
    if replica.speed.bf16_flops < _LOW_PEAK_FLOPS:
        dense = kernels.prefill_gemm_low_peak
    # Experts see fewer rows each, on every card alike.
    return dense * kernels.prefill_expert_gemm / kernels.prefill_gemm if experts else dense


def _narrow_prefill(replica: Replica, weight_class: WeightClass) -> float:
    """Return the part of prefill's share that products with weights of a class reach."""
    kernels = replica.kernels
    widened = _is_widened(replica, weight_class)
    part = {
        "bf16": 1.0,
        "fp8": kernels.fp8_prefill,
        "fp4": kernels.widened_prefill if widened else kernels.fp4_prefill,
        "int4": kernels.int4_prefill,
    }[weight_class]
    return part * _vendor_share(replica)


def _verified(settings: PlanSettings) -> tuple[int, int]:
    """Return the tokens that a step verifies, and the draft's steps before it."""
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
        rows = tokens * (adp if load.gathered else 1)
        peak = _flops(replica, load.weight_class) * kernels.gemm
        peak *= _product_share(replica, load.weight_class)
        arithmetic += 2 * rows * load.params / peak
    return math.hypot(memory, arithmetic)


def _experts_s(replica: Replica, loads: tuple[ExpertLoad, ...], tokens: float) -> float:
    kernels = replica.kernels
    tokens *= replica.ranks.attention_dp_size
    memory = arithmetic = 0.0
    for load in loads:
        narrow = _narrow(replica, load.weight_class, experts=True)
        share = load.experts_per_token / load.experts
        # Share of the experts that at least one token is routed to.
        touched = 1 - (1 - share) ** (max(tokens, 1.0) ** kernels.routing)
        stream = replica.speed.memory_bytes_per_s * kernels.expert_stream * narrow
        stream *= _release_share(replica, load.weight_class)
        widened = _widening_s(replica, load.weight_class, load.params)
        memory += touched * (load.bytes / stream + widened)
        peak = _flops(replica, load.weight_class) * kernels.expert_gemm
        peak *= _product_share(replica, load.weight_class, experts=True)
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
    arithmetic += requests * verified * traffic.index_flops / _index_flops_per_s(replica)
    return math.hypot(memory, arithmetic, _longest_block_s(replica, traffic))


def _index_flops_per_s(replica: Replica) -> float:
    """Return the rate at which keys are scored: in 8 bits where the card multiplies them."""
    speed = replica.speed
    return (speed.fp8_flops or speed.bf16_flops) * replica.kernels.index_gemm


def _longest_block_s(replica: Replica, traffic: RequestTraffic) -> float:
    """Time the longest block: Triton splits a request's keys and values in eight per head."""
    cache = replica.model.cache
    if replica.settings.attention_backend != "triton" or not isinstance(cache, GqaCache):
        return 0.0
    heads = max(1, cache.kv_heads // replica.ranks.attention_tp_size)
    blocks = heads * _TRITON_KV_SPLITS
    return traffic.kv_bytes / (blocks * replica.kernels.block_bytes_per_s)


def _state_s(replica: Replica, traffic: RequestTraffic, requests: float, verified: int) -> float:
    kernels, speed = replica.kernels, replica.speed
    # Verifying writes a state per token, and copies the accepted one: a read and a write.
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
    all_tokens = tokens * replica.ranks.attention_dp_size
    return _all_reduces(replica) * (latency + _transfer_s(replica, all_tokens))


def _all_reduces(replica: Replica) -> int:
    """Count the all-reduces: two per layer, or one where attention is not split over ranks."""
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
    index_layers = getattr(model.cache, "index_layers", 0)
    layers_s = (
        model.layers * kernels.layer_s
        + moe_layers * kernels.moe_layer_s
        + state_layers * kernels.state_layer_s
        + index_layers * kernels.index_layer_s
    )
    return kernels.step_s + layers_s * (kernels.old_layer if _is_old(replica) else 1.0)


def _draft_step_s(replica: Replica, requests: float) -> float:
    """Time one step of the draft: its layer, and the output head."""
    return (
        _dense_s(replica, (*replica.draft, *replica.head), requests)
        + _experts_s(replica, replica.draft_experts, requests)
        + replica.kernels.draft_step_s
    )


def _narrow(replica: Replica, weight_class: WeightClass, *, experts: bool = False) -> float:
    kernels = replica.kernels
    dense = {"bf16": 1.0, "fp8": kernels.fp8, "fp4": kernels.fp4, "int4": kernels.int4}
    routed = {
        "bf16": 1.0,
        "fp8": kernels.fp8_experts,
        "fp4": kernels.fp4_experts,
        "int4": kernels.int4_experts,
    }
    return _vendor_share(replica) * (routed if experts else dense)[weight_class]


def _vendor_share(replica: Replica) -> float:
    return 1.0 if replica.speed.vendor == "nvidia" else replica.kernels.other_vendor


def _release_share(replica: Replica, weight_class: WeightClass) -> float:
    """Return the part of their usual rate that experts reach in this release."""
    blackwell = replica.speed.fp4_flops > 0 and replica.speed.vendor == "nvidia"
    if weight_class == "fp8" and blackwell and _is_old(replica):
        return replica.kernels.old_fp8_experts
    return 1.0


def _is_old(replica: Replica) -> bool:
    release = tuple(int(part) for part in replica.settings.release.split("."))
    return release < _FASTER_SINCE


def _is_widened(replica: Replica, weight_class: WeightClass) -> bool:
    """Return whether weights are widened before they are multiplied."""
    return (
        weight_class in ("int4", "fp4")
        and _flops(replica, weight_class) == replica.speed.bf16_flops
    )


def _product_share(replica: Replica, weight_class: WeightClass, *, experts: bool = False) -> float:
    if _is_widened(replica, weight_class):
        kernels = replica.kernels
        return kernels.int4_gemm if weight_class == "int4" else kernels.widened_gemm
    return _narrow(replica, weight_class, experts=experts)


def _widening_s(replica: Replica, weight_class: WeightClass, params: float) -> float:
    if not _is_widened(replica, weight_class):
        return 0.0
    return params / (replica.speed.vector_flops * replica.kernels.widening)


def _flops(replica: Replica, weight_class: WeightClass) -> float:
    """Return the peak of the type that products run in; 16 bits where the card lacks the type."""
    speed = replica.speed
    if weight_class == "fp4" and not replica.model.multiplied_in_16_bits and speed.fp4_flops:
        return speed.fp4_flops
    if weight_class == "fp8" and speed.fp8_flops:
        return speed.fp8_flops
    return speed.bf16_flops
