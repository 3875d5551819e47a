"""Bytes of weights on one GPU, by format and by how the ranks divide each tensor.

`target_bytes` is what "Load weight end" logs for the model, `draft_weights` for its draft.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.models.formats import QUANTISED_ON_LOAD, bytes_per_param, format_of
from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.sglang.defaults import text_only
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import Parallel, largest_share, parallel_of
from schemas.plan import (
    BuiltInDraft,
    CompressedCache,
    Dense,
    ModelFacts,
    Moe,
    NoSpeculation,
    Speculation,
    TensorGroup,
)
from schemas.units import GIB, MIB

# `mem usage` is a difference of free memory, so it includes allocator rounding and what loaders
# leave behind: 0.1 to 0.5 GiB per rank in public logs. assumed: the low end; the rest is in the
# uncertainty.
LOAD_RESIDUE_BYTES = 128 * MIB

_REPACKED = ("nvfp4", "int4", "int4-awq", "int4-gptq")
_REPACKING_FRACTION = 0.02

# Sizes of published drafts.
# Hugging Face file sizes quoted in public repositories: 3.8 GB and 3.7 GB.
_DRAFT_FILE_BYTES = {"dflash2": 3_850_000_000, "qwen3.8-27b-dspark": 3_700_000_000}
# assumed: five dense layers of the target's width, as in published DFLASH and DSPARK drafts
_BLOCK_DRAFT_LAYERS = 5
# assumed: the DSpark tail of a DeepSeek-V4 checkpoint, whose `compress_ratios` has 46 entries
# for 43 layers
_V4_DSPARK_LAYERS = 3
_ONE_RANK = parallel_of(LaunchFlags(model_path="", values=()))
# Reduced vocabulary of the published EAGLE-3 heads.
_EAGLE3_VOCAB = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """Draft weights on one GPU: those that stay, and the embedding and head that are freed."""

    resident_bytes: int
    freed_bytes: int


def target_bytes(launch: ResolvedLaunch) -> int:
    """Bytes of the model's own weights, draft excluded.

    `--torchao-config` quantises what is already on the device in bf16, so it changes nothing here
    (sglang#10736: Qwen3-Next as int8 does not load on one 96 GB card).
    """
    beside = launch.model.rotary_bytes + LOAD_RESIDUE_BYTES
    if launch.model.checkpoint_bytes and not launch.flags.text("quantization"):
        return _scaled_checkpoint(launch) + beside
    total = _sum(launch.model.tensors, launch) + _repacking_residue(launch)
    return int(total) + beside


def peak_bytes(launch: ResolvedLaunch) -> int:
    """Bytes of weights while they load: a checkpoint that is quantised on load is whole at first.

    SGLang 0.5.23, layers/quantization/fp8.py creates the parameters in 16 bits, and quantises them
    once all are read.
    """
    stored = launch.model.stored
    if stored is None or launch.flags.text("quantization") not in QUANTISED_ON_LOAD:
        return 0
    plain = replace(launch.model, format=stored.format)
    return target_bytes(replace(launch, model=plain))


def offloaded_bytes(launch: ResolvedLaunch) -> int:
    """Bytes of the layers' weights that `--cpu-offload-gb` keeps in host memory."""
    most = int((launch.flags.fraction("cpu-offload-gb") or 0) * GIB)
    if most <= 0:
        return 0
    layers = tuple(group for group in launch.model.tensors if group.layers > 1)
    return min(most, int(_sum(layers, launch)))


def _repacking_residue(launch: ResolvedLaunch) -> float:
    """Bytes that the allocator keeps after four-bit experts are repacked.

    Fitted: four public logs (R1 and GLM-5 NVFP4, Kimi-K2.5 and K2.6 int4) are 1-3.5 % of the
    experts' bytes above the computed size.
    """
    model = launch.model
    experts = tuple(
        group
        for group in model.tensors
        if group.shard == "expert" and format_of(group, model.format) in _REPACKED
    )
    return _REPACKING_FRACTION * _sum(experts, launch)


def draft_weights(launch: ResolvedLaunch) -> DraftWeights:
    """Size the draft; a built-in one first loads an embedding and a head of its own."""
    speculation = launch.settings.speculation
    if isinstance(speculation, NoSpeculation) or speculation.algorithm == "NGRAM":
        return DraftWeights(resident_bytes=0, freed_bytes=0)
    if speculation.built_in:
        return _built_in_draft(launch, speculation)
    size = _separate_draft_bytes(launch.model, launch.ranks, speculation)
    return DraftWeights(resident_bytes=size, freed_bytes=0)


def _built_in_draft(launch: ResolvedLaunch, speculation: Speculation) -> DraftWeights:
    model = launch.model
    if whole_model_drafts(launch):
        return DraftWeights(resident_bytes=target_bytes(launch), freed_bytes=0)
    assert isinstance(model.draft, BuiltInDraft)
    layers = _sum(model.draft.tensors, launch)
    if speculation.algorithm == "DSPARK":
        layers *= _V4_DSPARK_LAYERS / model.draft.layers
    vocabulary = [group for group in model.tensors if group.shard in ("embedding", "head")]
    # The draft keeps its copies in 16 bits until it shares the target's.
    copies = sum(2 * group.params * rank_share(group, model, launch.ranks) for group in vocabulary)
    return DraftWeights(resident_bytes=int(layers), freed_bytes=int(copies))


def whole_model_drafts(launch: ResolvedLaunch) -> bool:
    """Return whether the release loads the whole model again as the draft.

    Public report on GLM-5, 2026-03 (0.5.9): without spec V2, NEXTN loads the model twice.
    """
    return (
        launch.rules.spec_v2_switch
        and launch.model.architecture == "GlmMoeDsaForCausalLM"
        # off by default in 0.5.9 and 0.5.10.post1, on by 0.5.12.post1
        and not launch.flags.switched_on(
            "SGLANG_ENABLE_SPEC_V2", default=launch.rules.release >= (0, 5, 12)
        )
    )


def _separate_draft_bytes(model: ModelFacts, ranks: Parallel, speculation: Speculation) -> int:
    path = speculation.draft_path.lower()
    for name, size in _DRAFT_FILE_BYTES.items():
        if path.endswith(name):
            return size // ranks.tp_size
    hidden = model.hidden_size
    if speculation.algorithm in ("DFLASH", "DSPARK"):
        inner = _dense_width(model)
        # 32 query and 8 KV heads of 128 are the published shape
        layer = 3 * hidden * inner + hidden * 128 * (2 * 32 + 2 * 8)
        params = _BLOCK_DRAFT_LAYERS * (layer + hidden * hidden)
    else:
        inner = _dense_width(model)
        layer = 3 * hidden * inner + 2 * hidden * model.head_dim * model.heads * 2
        params = layer + 3 * hidden * hidden + _EAGLE3_VOCAB * hidden
    return 2 * params // ranks.tp_size


def _dense_width(model: ModelFacts) -> int:
    if isinstance(model.ffn, Dense):
        return model.ffn.intermediate_size
    return max(model.ffn.intermediate_size * model.ffn.experts_per_token, 3 * model.hidden_size)


def _sum(groups: tuple[TensorGroup, ...], launch: ResolvedLaunch) -> float:
    model, ranks = launch.model, launch.ranks
    total = 0.0
    ends: list[float] = []
    for group in groups:
        if group.shard == "vision" and text_only(launch.flags):
            continue
        size = group.params * rank_share(group, model, ranks)
        size *= _group_bytes(group, launch)
        if ranks.pp_size > 1 and group.shard in ("embedding", "head"):
            ends.append(size)
        else:
            total += size * _stage_share(group, model, ranks)
    return total + max(ends, default=0.0)


def _stage_share(group: TensorGroup, model: ModelFacts, ranks: Parallel) -> float:
    """Return the share of a group that the largest pipeline stage has."""
    return largest_share(group.layers, model.layers, ranks.pp_size) if group.layers > 1 else 1.0


def rank_share(group: TensorGroup, model: ModelFacts, ranks: Parallel) -> float:
    """Return the share of a group that one rank has."""
    """Return the share of a group that one rank has."""
    attention = 1 / ranks.attention_tp_size
    tensor = 1 / ranks.tp_size
    if group.shard == "attention":
        return attention
    if group.shard == "kv":
        # Fewer heads than ranks: each rank still holds a whole head.
        return max(attention, 1 / model.kv_heads)
    if group.shard == "expert":
        extra = ranks.redundant_experts / model.ffn.experts if isinstance(model.ffn, Moe) else 0
        return tensor * (1 + extra)
    if group.shard == "dense_mlp":
        return 1 / min(ranks.dense_tp_size, ranks.tp_size)
    if group.shard == "shared_expert":
        # Under an all-to-all backend every rank keeps the shared experts whole.
        return tensor if ranks.all_to_all in ("none", "") else 1.0
    if group.shard == "embedding":
        return 1.0 if ranks.attention_dp_size > 1 else tensor
    if group.shard == "head":
        return attention if ranks.dp_lm_head else tensor
    if group.shard in ("mlp", "vision"):
        return tensor
    return 1.0


def _group_bytes(group: TensorGroup, launch: ResolvedLaunch) -> float:
    model = launch.model
    plain = bytes_per_param(group, model.format)
    if group.shard != "expert" or format_of(group, model.format) != "mxfp4":
        return plain
    if not isinstance(model.cache, CompressedCache):
        return plain
    return 0.5 + _v4_scale_bytes(launch) / 32


def _v4_scale_bytes(launch: ResolvedLaunch) -> int:
    """Return the bytes of each scale of DeepSeek-V4's experts, one for 32 values.

    The loader widens the e8m0 scales to fp32; FlashInfer's runner puts the narrow ones back, and
    Marlin does, but up to 0.5.15 keeps both. MegaMoE reads them as they are stored. SGLang
    layers/quantization/mxfp4*.py, 0.5.12 - 0.5.23; layers/moe/mega_moe.py, 0.5.23.
    """
    narrow, wide = 1, 4
    if launch.flags.text("moe-a2a-backend") == "megamoe":
        return narrow
    runner = _v4_runner(launch)
    if runner.startswith("flashinfer"):
        return narrow
    if runner == "marlin":
        return narrow + wide if launch.rules.v4_marlin_keeps_both else narrow
    return wide


def _v4_runner(launch: ResolvedLaunch) -> str:
    """Return the runner of DeepSeek-V4's experts that SGLang chooses, or the given one."""
    runner = launch.flags.text("moe-runner-backend", "auto")
    if runner != "auto":
        return runner
    capability, rules = launch.gpu.compute_capability, launch.rules
    # server_args.py of 0.5.14 and arg_groups/overrides.py of 0.5.18
    if 120 <= capability < 130:
        return "marlin" if rules.v4_marlin_keeps_both else "flashinfer_mxfp4"
    # assumed, for others than Blackwell: wide scales up to 0.5.16
    is_wide = not 100 <= capability < 120 and rules.release < (0, 5, 17)
    return "auto" if is_wide else "flashinfer_mxfp4"


def _scaled_checkpoint(launch: ResolvedLaunch) -> int:
    """Scale the computed weights to the exact size of the files.

    The files also contain the draft layers, which the target does not load.
    """
    model = launch.model
    alone = replace(launch, ranks=_ONE_RANK)
    stored = tuple(g for g in model.tensors if "absorbed" not in g.names[0])
    draft = model.draft.tensors if isinstance(model.draft, BuiltInDraft) else ()
    ratio = model.checkpoint_bytes / (_sum(stored, alone) + _sum(draft, alone))
    return int(_sum(model.tensors, launch) * ratio)


# --- LoRA adapters ----------------------------------------------------------------------------
# For each layer and target module `max_loras_per_batch x rank x (in + out) x 2` bytes, divided by
# the tensor-parallel ranks, taken before the pools are sized. SGLang srt/lora/mem_pool.py, 0.5.23

_ADAPTERS_AT_ONCE = 8
# assumed, where the line gives no rank: that of most published adapters is 8 to 64
_ASSUMED_RANK = 64


def has_adapters(launch: ResolvedLaunch) -> bool:
    """Tell if the line serves adapters."""
    return launch.flags.has("enable-lora") or launch.flags.has("lora-paths")


def adapter_bytes(launch: ResolvedLaunch) -> int:
    """Return the bytes of the buffers; 0 without adapters."""
    if not has_adapters(launch):
        return 0
    flags = launch.flags
    at_once = flags.number("max-loras-per-batch") or _ADAPTERS_AT_ONCE
    rank = flags.number("max-lora-rank") or _ASSUMED_RANK
    wanted = {name for text in flags.words("lora-target-modules") for name in text.split(",")}
    widths = sum(width for name, width in _modules(launch) if not wanted or wanted & {name, "all"})
    return int(at_once * rank * widths * launch.model.layers * 2 / launch.ranks.tp_size)


def adapter_doubt(launch: ResolvedLaunch) -> str:
    """Return what is assumed of the adapters."""
    rank = "" if launch.flags.number("max-lora-rank") else f"rank {_ASSUMED_RANK} is assumed; "
    experts = "" if isinstance(launch.model.ffn, Dense) else ", and adapters of experts are not"
    return (
        f"LoRA buffers are in the forecast ({rank}all target modules that the line allows){experts}"
    )


def _modules(launch: ResolvedLaunch) -> Iterator[tuple[str, int]]:
    """Yield the linear modules of a layer with the sum of their inputs and outputs."""
    model = launch.model
    hidden, heads = model.hidden_size, model.heads * model.head_dim
    groups = model.kv_heads * model.head_dim
    yield from (("q_proj", hidden + heads), ("k_proj", hidden + groups))
    yield from (("v_proj", hidden + groups), ("o_proj", heads + hidden))
    if isinstance(model.ffn, Dense):
        inner = model.ffn.intermediate_size
        yield from ((name, hidden + inner) for name in ("gate_proj", "up_proj", "down_proj"))
