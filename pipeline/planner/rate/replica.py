"""A launch weighed for its steps: which weights one GPU reads, by format and kind.

`step_time` turns the loads of a `Replica` into seconds.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.models.formats import bytes_per_param, format_of
from pipeline.planner.cards import speed_of
from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.memory.state_pool import slot_bytes, ssm_dtype
from pipeline.planner.memory.weights import rank_share
from pipeline.planner.rate.errors import RateClass, rate_class_of
from pipeline.planner.rate.kernels import Kernels
from pipeline.planner.rate.readings.offsets import Offsets, offsets_for
from pipeline.planner.rate.readings.traits import Engine, traits_of
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import Parallel, parallel_of
from schemas.estimate import GpuSpeed
from schemas.plan import (
    BuiltInDraft,
    Gpu,
    LinearState,
    ModelFacts,
    Moe,
    PlanSettings,
    TensorGroup,
    WeightFormat,
)

WeightClass = Literal["bf16", "fp8", "fp4", "int4"]
_CLASSES: Mapping[WeightFormat, WeightClass] = {
    "fp32": "bf16", "bf16": "bf16", "fp8": "fp8", "fp8-block": "fp8", "mxfp8": "fp8",
    "mxfp4": "fp4", "nvfp4": "fp4", "int4-awq": "int4", "int4-gptq": "int4", "int4": "int4",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoad:
    """Weights of one class that a step reads whole, on one GPU.

    `gathered` weights see the tokens of all attention ranks, the others those of one rank.
    """

    weight_class: WeightClass
    bytes: float
    params: float
    gathered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Routed experts of all layers of a replica, on one GPU."""

    weight_class: WeightClass
    bytes: float
    params: float
    layers: int
    experts: int
    experts_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """The loads of one launch, with the card and the kernels that carry them."""

    model: ModelFacts
    settings: PlanSettings
    ranks: Parallel
    gpu: str
    speed: GpuSpeed
    kernels: Kernels
    rate_class: RateClass
    state_slot_bytes: float
    dense: tuple[WeightLoad, ...]
    experts: tuple[ExpertLoad, ...]
    draft: tuple[WeightLoad, ...]
    draft_experts: tuple[ExpertLoad, ...]
    head: tuple[WeightLoad, ...]
    offsets: Offsets
    """Corrections that readings give to the kernels' constants."""


def replica_of_launch(
    launch: ResolvedLaunch, kernels: Kernels, engine: Engine = "sglang"
) -> Replica:
    """Weigh a resolved launch, as `engine` would run it."""
    return replica_of(launch.model, launch.settings, launch.gpu, launch.flags, kernels, engine)


def replica_of(
    model: ModelFacts,
    settings: PlanSettings,
    gpu: Gpu,
    flags: LaunchFlags,
    kernels: Kernels,
    engine: Engine = "sglang",
) -> Replica:
    """Weigh a launch by its settings and flags. Raises PlanError for a card of unknown speed."""
    ranks = parallel_of(flags)
    dense, experts = _loads(model.tensors, model, ranks)
    head, _ = _loads(_head(model), model, ranks)
    draft: tuple[WeightLoad, ...] = ()
    draft_experts: tuple[ExpertLoad, ...] = ()
    if isinstance(model.draft, BuiltInDraft):
        draft, draft_experts = _loads(model.draft.tensors, model, ranks)
    slot = 0.0
    if isinstance(model.state, LinearState):
        slot = slot_bytes(model.state, ranks, ssm_dtype(flags, model.state))
    return Replica(
        model=model,
        settings=settings,
        ranks=ranks,
        gpu=gpu.name,
        speed=speed_of(gpu),
        kernels=kernels,
        rate_class=rate_class_of(model),
        state_slot_bytes=slot,
        dense=(*dense, *head),
        experts=experts,
        draft=draft,
        draft_experts=draft_experts,
        head=head,
        offsets=offsets_for(traits_of(model, gpu.name, engine)),
    )


def _loads(
    groups: tuple[TensorGroup, ...], model: ModelFacts, ranks: Parallel
) -> tuple[tuple[WeightLoad, ...], tuple[ExpertLoad, ...]]:
    """Sum the weights that a step reads, without the head where the groups are the model's."""
    sums: dict[tuple[WeightClass, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    experts = []
    head = _head(model) if groups is model.tensors else ()
    for group in groups:
        if not _is_read(group, model) or group in head:
            continue
        weight_class = _CLASSES[format_of(group, model.format)]
        params = group.params * rank_share(group, model, ranks)
        size = params * bytes_per_param(group, model.format)
        if group.shard == "expert" and isinstance(model.ffn, Moe):
            experts.append(
                ExpertLoad(
                    weight_class=weight_class,
                    bytes=size,
                    params=params,
                    layers=group.layers,
                    experts=model.ffn.experts,
                    experts_per_token=model.ffn.experts_per_token,
                )
            )
            continue
        gathered = group.shard in ("mlp", "dense_mlp", "shared_expert", "head")
        total = sums[weight_class, gathered]
        total[0] += size
        total[1] += params
    dense = tuple(
        WeightLoad(weight_class=weight_class, bytes=size, params=params, gathered=gathered)
        for (weight_class, gathered), (size, params) in sums.items()
    )
    return dense, tuple(experts)


def _head(model: ModelFacts) -> tuple[TensorGroup, ...]:
    """Return the output head; a tied embedding is read as one."""
    heads = tuple(group for group in model.tensors if group.shard == "head")
    return heads or tuple(group for group in model.tensors if group.shard == "embedding")


def _is_read(group: TensorGroup, model: ModelFacts) -> bool:
    """Return whether decoding reads the group. It reads kv_b's absorbed copy, not the original."""
    if group.shard == "vision" or any("kv_b_proj" in name for name in group.names):
        return False
    return group.shard != "embedding" or group in _head(model)
