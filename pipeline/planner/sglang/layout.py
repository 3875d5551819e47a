"""The layout of a launch: how its ranks and pipeline stages divide the model."""

import math
from dataclasses import dataclass

from pipeline.planner.sglang.flags import LaunchFlags


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of the parallel groups of one launch."""

    tp_size: int
    pp_size: int
    micro_batches: int
    """Micro-batches in the pipeline at once: one per stage, and the async depth."""
    largest_micro_batch: int | None
    """Requests of one micro-batch; None divides the running requests evenly."""
    attention_dp_size: int
    attention_tp_size: int
    dcp_size: int
    dense_tp_size: int
    all_to_all: str
    redundant_experts: int
    dp_lm_head: bool


def parallel_of(flags: LaunchFlags) -> Parallel:
    """Return the layout; data parallelism divides attention only where it is switched on."""
    tp = max(flags.number("tp-size") or 1, 1)
    dp = max(flags.number("dp-size") or 1, 1)
    adp = dp if flags.has("enable-dp-attention") else 1
    adp = max(flags.number("attn-dp-size") or adp, 1)
    cp = max(flags.number("attn-cp-size") or 1, 1)
    pp = max(flags.number("pp-size") or 1, 1)
    return Parallel(
        tp_size=tp,
        pp_size=pp,
        micro_batches=pp + (flags.number("pp-async-batch-depth") or 0) if pp > 1 else 1,
        largest_micro_batch=flags.number("pp-max-micro-batch-size"),
        attention_dp_size=adp,
        attention_tp_size=max(tp // adp // cp, 1),
        dcp_size=max(flags.number("dcp-size") or 1, 1),
        dense_tp_size=flags.number("moe-dense-tp-size") or tp,
        all_to_all=flags.text("moe-a2a-backend", "none"),
        redundant_experts=flags.number("ep-num-redundant-experts") or 0,
        dp_lm_head=flags.has("enable-dp-lm-head"),
    )


def cards_of(flags: LaunchFlags) -> int:
    """Return the cards that one launch uses: its ranks, and as often as `--dp-size` copies them.

    Ranks that share attention are no copies.
    """
    ranks = parallel_of(flags)
    return ranks.tp_size * ranks.pp_size * copies_of(flags)


def copies_of(flags: LaunchFlags) -> int:
    """Return the data-parallel copies of the model in one launch."""
    return 1 if flags.has("enable-dp-attention") else max(flags.number("dp-size") or 1, 1)


def tensor_ranks_of(flags: LaunchFlags, num_gpus: int) -> int:
    """Return the tensor-parallel ranks of one stage of a launch on all cards."""
    return flags.number("tp-size") or max(num_gpus // (flags.number("pp-size") or 1), 1)


def layout_name(flags: LaunchFlags, num_gpus: int = 1) -> str:
    """Return the layout's name: tensor-parallel ranks, and stages if several (4, or 1-pp4)."""
    stages, ranks = flags.number("pp-size") or 1, tensor_ranks_of(flags, num_gpus)
    return f"{ranks}-pp{stages}" if stages > 1 else str(ranks)


def no_overlap(flags: LaunchFlags) -> bool:
    """Return True where the scheduler waits for each step, as it always does in a pipeline.

    overrides.py: _pipeline_parallel_overlap_disable, 0.5.23.
    """
    return flags.has("disable-overlap-schedule") or (flags.number("pp-size") or 1) > 1


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage; the last ones get one more where it does not divide.

    distributed/utils.py, 0.5.23.
    """
    each, remainder = divmod(layers, stages)
    return tuple(each + (stage >= stages - remainder) for stage in range(stages))


def largest_share(layers: int, model_layers: int, stages: int) -> float:
    """Return the largest stage's fraction of `layers`, spread evenly over the model's layers.

    It limits every stage: states by the largest stage's share, tokens by the smallest pool
    (kv_cache_configurator.py: _handle_max_mamba_cache, _apply_token_constraints).
    """
    if stages == 1 or layers == 0:
        return 1.0
    largest = math.ceil(model_layers / stages)
    return min(math.ceil(largest * layers / model_layers), layers) / layers


def requests_at_once(
    running_requests: int, stages: int, micro_batches: int, largest_micro_batch: int | None
) -> int:
    """Return how many of the running requests fit in the pipeline's micro-batches.

    scheduler.py: pp_max_micro_batch_size, get_num_allocatable_reqs.
    """
    if stages == 1:
        return running_requests
    each = largest_micro_batch or max(running_requests // stages, 1)
    return min(running_requests, each * micro_batches)
