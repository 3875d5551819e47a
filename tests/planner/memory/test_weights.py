"""Bytes of weights on one rank, worked out by hand for each kind of tensor."""

from dataclasses import replace

import pytest

from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.launch import ResolvedLaunch, resolve_launch
from pipeline.planner.memory.sizing import Stopped, assess
from pipeline.planner.memory.weights import (
    LOAD_RESIDUE_BYTES,
    adapter_bytes,
    draft_weights,
    offloaded_bytes,
    peak_bytes,
    rank_share,
    target_bytes,
)
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.releases import rules_for
from schemas.plan import CheckpointFormat, Moe, Shard
from schemas.units import GIB
from tests.fakes.launches import MTP, catalogue_model, launch_of, with_one_group

DP = "--tp 8 --dp-size 2 --enable-dp-attention"


@pytest.mark.parametrize(
    ("shard", "line", "share"),
    [
        ("attention", "--tp 8", 1 / 8),
        ("attention", DP, 1 / 4),
        ("mlp", DP, 1 / 8),
        ("vision", DP, 1 / 8),
        ("expert", "--tp 8", 1 / 8),
        # 32 of 256 experts are kept twice
        ("expert", "--tp 8 --ep-num-redundant-experts 32", 9 / 64),
        ("dense_mlp", "--tp 8", 1 / 8),
        ("dense_mlp", "--tp 8 --moe-dense-tp-size 2", 1 / 2),
        ("shared_expert", "--tp 8", 1 / 8),
        ("shared_expert", "--tp 8 --moe-a2a-backend deepep", 1.0),
        ("embedding", "--tp 8", 1 / 8),
        ("embedding", DP, 1.0),
        ("head", DP, 1 / 8),
        ("head", f"{DP} --enable-dp-lm-head", 1 / 4),
        ("replicated", "--tp 8", 1.0),
    ],
)
def test_share_of_one_rank(shard: Shard, line: str, share: float) -> None:
    model = with_one_group("deepseek-ai/DeepSeek-V3", shard, 1)
    launch = launch_of(model, line)
    assert rank_share(model.tensors[0], model, launch.ranks) == pytest.approx(share)


def test_rank_has_at_least_one_whole_kv_head() -> None:
    # 4 KV heads over 8 ranks: a quarter each
    model = with_one_group("Qwen/Qwen3.6-27B", "kv", 1)
    ranks = launch_of(model, "--tp 8").ranks
    assert rank_share(model.tensors[0], model, ranks) == 1 / 4


def test_repacked_experts_leave_two_percent_behind() -> None:
    # 1e9 weights of half a byte and two bytes per 128
    model = with_one_group("deepseek-ai/DeepSeek-V3", "expert", 10**9)
    four_bits = CheckpointFormat(
        base="int4", rules=(), scope="linears", group_size=128, fp8_kv_cache=False, source="test"
    )
    launch = launch_of(replace(model, format=four_bits))
    assert target_bytes(launch) == pytest.approx(515_625_000 * 1.02 + LOAD_RESIDUE_BYTES, abs=1)
    bf16 = launch_of(replace(model, format=replace(four_bits, base="bf16")))
    assert target_bytes(bf16) == 2 * 10**9 + LOAD_RESIDUE_BYTES


def test_checkpoint_size_replaces_the_computed_one_and_is_divided_over_ranks() -> None:
    model = replace(with_one_group("Qwen/Qwen3-32B", "mlp", 10**9), checkpoint_bytes=3 * 10**9)
    assert target_bytes(launch_of(model)) == 3 * 10**9 + LOAD_RESIDUE_BYTES
    assert target_bytes(launch_of(model, "--tp 4")) == 750_000_000 + LOAD_RESIDUE_BYTES
    # Quantised while it is loaded, the file's size says nothing.
    quantised = launch_of(model, "--quantization fp8")
    assert target_bytes(quantised) == 10**9 + LOAD_RESIDUE_BYTES


@pytest.mark.parametrize(
    ("line", "version", "gpu", "scale_bytes"),
    [
        ("", "0.5.23", "b300", 1),
        ("", "0.5.14", "b300", 1),
        ("", "0.5.14", "h200", 4),
        ("", "0.5.17", "h200", 1),
        # Marlin by default, which keeps both
        ("", "0.5.14", "rtx-pro-6000", 5),
        ("", "0.5.18", "rtx-pro-6000", 1),
        ("--moe-runner-backend marlin", "0.5.15", "b300", 5),
        ("--moe-runner-backend marlin", "0.5.16", "b300", 1),
        ("--moe-runner-backend flashinfer_mxfp4", "0.5.14", "rtx-pro-6000", 1),
        ("--moe-runner-backend triton", "0.5.23", "b300", 4),
        ("--moe-a2a-backend megamoe", "0.5.14", "b300", 1),
    ],
)
def test_runner_decides_on_the_width_of_v4_expert_scales(
    line: str, version: str, gpu: str, scale_bytes: int
) -> None:
    model = catalogue_model("deepseek-ai/DeepSeek-V4-Flash")
    experts = tuple(group for group in model.tensors if group.shard == "expert")
    alone = replace(model, tensors=experts, rotary_bytes=0)
    launch = launch_of(alone, line, gpu=gpu, version=version)
    params = sum(group.params for group in experts)
    # half a byte, and one scale for 32 values
    each = 0.5 + scale_bytes / 32
    assert target_bytes(launch) == pytest.approx(params * each + LOAD_RESIDUE_BYTES, abs=1)


def test_eagle_head_of_a_dense_model() -> None:
    # 3 x 5120 x 25,600 + 4 x 5120 x 128 x 64 + 3 x 5120 x 5120 + 32,000 x 5120 = 803,471,360
    head = "--tp 2 --speculative-algorithm EAGLE3 --speculative-draft-model-path x/eagle3"
    assert draft_weights(launch_of("Qwen/Qwen3-32B", head)).resident_bytes == 803_471_360


def test_eagle_head_of_experts_is_as_wide_as_those_of_a_token() -> None:
    head = "--tp 8 --speculative-algorithm EAGLE3 --speculative-draft-model-path x/eagle3"
    # DeepSeek-V3: 8 x 2048 is less than 3 x 7168 = 21,504
    # 3 x 7168 x 21,504 + 4 x 7168 x 56 x 128 + 3 x 7168 x 7168 + 32,000 x 7168 = 1,051,459,584
    narrow = draft_weights(launch_of("deepseek-ai/DeepSeek-V3", head))
    assert narrow.resident_bytes == 2 * 1_051_459_584 // 8
    wide = with_one_group("deepseek-ai/DeepSeek-V3", "expert", 1)
    assert isinstance(wide.ffn, Moe)
    wide = replace(wide, ffn=replace(wide.ffn, experts_per_token=16))
    # 16 x 2048 = 32,768: 3 x 7168 x 11,264 = 242,221,056 more
    assert draft_weights(launch_of(wide, head)).resident_bytes == 2 * 1_293_680_640 // 8


def test_published_block_draft_is_divided_over_ranks() -> None:
    draft = "--tp 2 --speculative-algorithm DFLASH --speculative-draft-model-path x/dflash2"
    assert draft_weights(launch_of("Qwen/Qwen3-32B", draft)).resident_bytes == 1_925_000_000
    # Five layers of 3 x 5120 x 25,600 + 5120 x 128 x 80 and five of 5120 x 5120, 2 B each
    other = draft.replace("dflash2", "other")
    params = 5 * (393_216_000 + 52_428_800 + 26_214_400)
    assert draft_weights(launch_of("Qwen/Qwen3-32B", other)).resident_bytes == params


def test_built_in_draft_loads_vocabulary_that_is_freed() -> None:
    draft = draft_weights(launch_of("deepseek-ai/DeepSeek-V3", f"--tp 8 {MTP}"))
    # embedding and head of 129,280 x 7168 in 16 bits over 8 ranks
    assert draft.freed_bytes == 2 * 2 * 129_280 * 7_168 // 8
    assert draft_weights(launch_of("deepseek-ai/DeepSeek-V3", "--tp 8")).freed_bytes == 0


# -- while loading, on the host, and adapters


def as_loaded(line: str, gpu: str = "h200") -> ResolvedLaunch:
    flags = parse_launch_line(line.split())
    rules = rules_for("0.5.23")[0]
    launch = resolve_launch(catalogue_model("Qwen/Qwen3-32B"), gpu_named(gpu), flags, rules, None)
    assert isinstance(launch, ResolvedLaunch)
    return launch


def test_checkpoint_that_is_quantised_on_load_is_whole_at_first() -> None:
    whole = target_bytes(as_loaded(""))
    quantised = as_loaded("--quantization fp8")
    assert peak_bytes(quantised) == whole > 1.8 * target_bytes(quantised)
    # stored by another program, and not quantised at all
    assert peak_bytes(as_loaded("--quantization awq")) == peak_bytes(as_loaded("")) == 0
    # 61 GiB in 16 bits on a card of 44 GiB, which would hold the 32 GiB that stay
    stopped = assess(as_loaded("--quantization fp8", "l40s"))
    assert isinstance(stopped, Stopped)
    assert stopped.stage == "weights"


def test_offloaded_weights_are_those_of_layers_at_most() -> None:
    assert offloaded_bytes(as_loaded("")) == 0
    assert offloaded_bytes(as_loaded("--cpu-offload-gb 20")) == 20 * GIB
    # All 64 layers: 32.76e9 parameters less 2 x 151,936 x 5120 of embedding and head, in 16 bits.
    assert offloaded_bytes(as_loaded("--cpu-offload-gb 500")) / GIB == pytest.approx(58.1, abs=0.2)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", 0),
        # In and out of a layer: q and o 2 x 13,312, k and v 2 x 6,144, gate, up, down 3 x 30,720:
        # 131,072; x 64 layers x rank 64 x 8 adapters x 2 bytes / TP 2
        ("--enable-lora --max-lora-rank 64 --tp 2", 131_072 * 64 * 64 * 8),
        ("--lora-paths a=b --max-lora-rank 16 --max-loras-per-batch 2", 131_072 * 64 * 16 * 2 * 2),
        ("--enable-lora --max-lora-rank 8 --lora-target-modules q_proj k_proj",
         (13_312 + 6_144) * 64 * 8 * 8 * 2),
    ],
)  # fmt: skip
def test_adapters_have_buffers_for_each_module(line: str, expected: int) -> None:
    assert adapter_bytes(as_loaded(line)) == expected


def test_wider_dtype_doubles_weights_and_cache() -> None:
    plain, wide = as_loaded(""), as_loaded("--dtype float32")
    assert target_bytes(wide) / target_bytes(plain) == pytest.approx(2, abs=0.01)
    assert wide.settings.kv_cache_dtype == "float32"
    assert as_loaded("--dtype half").settings == plain.settings
