"""Claims on the headroom, worked out by hand."""

from dataclasses import replace

import pytest

from pipeline.planner.memory.headroom import (
    activation_bytes,
    headroom_needs,
    indexer_bytes,
    largest_indexer_bytes,
)
from pipeline.planner.memory.kv_cache import token_cost
from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.memory.sizing import multimodal_reserve_bytes
from schemas.units import GIB, MIB
from tests.fakes.launches import MTP, launch_of

QWEN, DEEPSEEK, V4 = "Qwen/Qwen3-32B", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V4-Flash"


def needs(launch: ResolvedLaunch, running: int = 64) -> dict[str, int]:
    """Bytes by name, for a pool of 100,000 tokens."""
    items = headroom_needs(launch, token_cost(launch), 100_000, running).items()
    return {item.name: item.bytes for item in items}


def test_request_table_has_a_row_per_request_and_a_spare_one() -> None:
    plain = needs(launch_of(QWEN, "--context-length 4096"))
    assert plain["request-to-token table"] == 65 * (4096 + 4) * 4
    drafted = needs(launch_of("Qwen/Qwen3.6-27B", f"--context-length 4096 {MTP}"))
    assert drafted["request-to-token table"] == 65 * (4096 + 4 + 4) * 4


def test_flashinfer_workspace_and_graph_indices() -> None:
    line = "--attention-backend flashinfer --context-length 4096"
    made = needs(launch_of(QWEN, line))
    assert made["FlashInfer workspace"] == 512 * MIB
    assert made["FlashInfer graph indices"] == 64 * 4096 * 4
    assert needs(launch_of("openai/gpt-oss-20b", line))["FlashInfer workspace"] == 384 * MIB
    fixed = needs(launch_of(QWEN, f"{line} --enable-deterministic-inference"))
    assert fixed["FlashInfer workspace"] == 2 * GIB
    # four verified tokens, and a mask of one byte more
    drafted = needs(launch_of("Qwen/Qwen3.6-27B", f"{line} {MTP}"), running=8)
    assert drafted["FlashInfer graph indices"] == 8 * 4 * 4096 * 5


def test_graphs_of_models_with_latent_attention_have_a_fixed_allowance() -> None:
    launch = launch_of(DEEPSEEK, "--tp 8", gpu="b200")
    captured = replace(launch, settings=replace(launch.settings, prefill_graph_buckets=10))
    assert needs(captured)["prefill graphs"] == 1536 * MIB
    assert "prefill graphs' activations" not in needs(captured)
    dense = launch_of(QWEN)
    captured = replace(dense, settings=replace(dense.settings, prefill_graph_buckets=10))
    assert needs(captured)["prefill graphs"] == 80 * MIB
    assert needs(captured)["prefill graphs' activations"] == activation_bytes(dense) // 2
    eager = replace(dense, settings=replace(dense.settings, prefill_graph_buckets=0))
    assert "prefill graphs" not in needs(eager)


def test_logits_of_the_largest_graph_are_whole_on_every_rank() -> None:
    # 64 rows x 151,936 x 4 B
    assert needs(launch_of(QWEN))["logits buffer"] == 64 * 151_936 * 4
    assert needs(launch_of(QWEN, "--tp 4"))["logits buffer"] == 64 * 151_936 * 4
    assert "logits buffer" not in needs(launch_of(QWEN, "--disable-cuda-graph"))


def test_graphs_of_draft_and_verify_are_six_tenths_of_the_decode_graphs() -> None:
    made = needs(launch_of("Qwen/Qwen3.6-27B", MTP))
    assert made["draft and verify graphs"] == int(made["decode graphs"] * 0.6)
    assert "draft and verify graphs" not in needs(launch_of("Qwen/Qwen3.6-27B"))


def test_buffers_between_ranks() -> None:
    line = "--tp 8 --enable-symm-mem --enable-flashinfer-allreduce-fusion"
    made = needs(launch_of(QWEN, line))
    assert made["symmetric memory"] == 4 * GIB
    assert made["fused all-reduce buffers"] == 2 * 2048 * 5120 * 2 * 8
    alone = needs(launch_of(QWEN, "--enable-flashinfer-allreduce-fusion"))
    assert "fused all-reduce buffers" not in alone


def test_dispatch_buffers_of_experts() -> None:
    assert needs(launch_of(DEEPSEEK, "--tp 8 --moe-a2a-backend deepep"))["DeepEP buffers"] == (
        2 * GIB
    )
    mega = launch_of(DEEPSEEK, "--tp 8 --moe-a2a-backend megamoe", gpu="b200")
    # 1024 tokens x top 8 x 7168 x (1 + 2) B
    assert needs(mega)["MegaMoE buffers"] == 1024 * 8 * 7168 * 3
    assert "DeepEP buffers" not in needs(launch_of(DEEPSEEK, "--tp 8"))
    assert "DeepEP buffers" not in needs(launch_of(QWEN, "--tp 8 --moe-a2a-backend deepep"))


@pytest.mark.parametrize(
    ("line", "gpu", "mib"),
    [
        ("", "h200", 300),
        ("--tp 2", "h200", 700),
        ("--tp 2", "rtx-pro-6000", 700),
        ("--tp 2", "rtx-5090", 400),
        ("--speculative-algorithm DFLASH --speculative-draft-model-path x/dflash2", "h200", 600),
    ],
)
def test_runtime_grows_with_ranks_and_a_second_model(line: str, gpu: str, mib: int) -> None:
    name = "runtime: kernel modules, cuBLAS, communicators"
    assert needs(launch_of(QWEN, line, gpu=gpu))[name] == mib * MIB


def test_host_processes_share_unified_memory() -> None:
    assert needs(launch_of(QWEN, gpu="dgx-spark"))["host processes in unified memory"] == 12 * GIB
    assert "host processes in unified memory" not in needs(launch_of(QWEN))


def test_activations_of_a_dense_layer() -> None:
    chunk = "--chunked-prefill-size 8192"
    # a token: 6 x 5120 x 2 + 3 x 64 x 128 x 2 and 2 x 5120 x 2 + 3 x 25,600 x 2 B
    assert activation_bytes(launch_of(QWEN, chunk)) == 8192 * (110_592 + 174_080)
    # attention and feed-forward halved: 61,440 + 24,576 and 20,480 + 76,800
    assert activation_bytes(launch_of(QWEN, f"{chunk} --tp 2")) == 8192 * (86_016 + 97_280)
    # without chunks, SGLang's 16,384 prefill tokens; or the context, where that is less
    whole = "--chunked-prefill-size -1"
    assert activation_bytes(launch_of(QWEN, whole)) == 16_384 * (110_592 + 174_080)
    short = launch_of(QWEN, f"{whole} --context-length 4096")
    assert activation_bytes(short) == 4_096 * (110_592 + 174_080)


def test_activations_of_linear_attention() -> None:
    # 48 heads x 128 = 6144 columns and 16 groups x 128 = 2048; 24 query heads x 256:
    # 2 x (2 x 6144 + 2 x 2048) x 2 + 2 x 6144 x 2 = 90,112; 6144 x 128 x 4 / 64 = 49,152;
    # 6 x 5120 x 2 + 3 x 24 x 256 x 2 = 98,304; 2 x 5120 x 2 + 3 x 17,408 x 2 = 124,928
    launch = launch_of("Qwen/Qwen3.6-27B", "--chunked-prefill-size 8192")
    assert activation_bytes(launch) == 8192 * (90_112 + 49_152 + 98_304 + 124_928)


def test_activations_of_experts_gather_the_chunks_of_all_attention_ranks() -> None:
    # 6 x 7168 x 2 + 3 x 16 x 56 x 2 = 91,392; 2 x 7168 x 2 + 8 x (3 x 256 + 2 x 7168) x 2 = 270,336
    launch = launch_of(DEEPSEEK, "--tp 8 --chunked-prefill-size 8192")
    assert activation_bytes(launch) == 8192 * (91_392 + 270_336)
    # 4 attention ranks of 2: chunks of 2048, 64 heads each, gathered to 8192
    apart = "--tp 8 --dp-size 4 --enable-dp-attention --chunked-prefill-size 8192"
    own = 6 * 7168 * 2 + 3 * 64 * 56 * 2
    assert activation_bytes(launch_of(DEEPSEEK, apart)) == 2048 * own + 8192 * 270_336


def test_indexer_scratch_by_model_card_and_release() -> None:
    chunk = "--chunked-prefill-size 8192"
    sparse = launch_of("deepseek-ai/DeepSeek-V3.2", f"--tp 8 {chunk} --context-length 65536")
    assert indexer_bytes(sparse) == 8192 * 8192 * 4
    assert largest_indexer_bytes(sparse) == 8192 * 65_536 * 4
    # DeepSeek-V4 compresses four tokens into one column
    tiled = launch_of(V4, f"--tp 4 {chunk}", gpu="rtx-pro-6000", version="0.5.17")
    assert indexer_bytes(tiled) == 8192 * 2048 * 4
    torch = launch_of(V4, f"--tp 4 {chunk}", gpu="rtx-pro-6000", version="0.5.14")
    assert indexer_bytes(torch) == 8192 * 2048 * (132 + 128 + 512 + 256 + 4)
    hopper = launch_of(V4, f"--tp 4 {chunk}", version="0.5.14")
    assert indexer_bytes(hopper) == 8192 * 2048 * 4
    assert indexer_bytes(launch_of(QWEN, chunk)) == 0


def test_rows_that_are_cut_use_a_fifth_of_the_memory_outside_the_fraction() -> None:
    name = "sparse indexer logits at long context"
    line = "--tp 4 --chunked-prefill-size 8192 --mem-fraction-static 0.9"
    launch = launch_of(V4, line)
    assert launch.rules.v4_indexer_row_chunks
    assert largest_indexer_bytes(launch) == 0
    # 8192 x 1,048,576 / 4 x 4 B = 8 GiB, and a fifth of a tenth of the card is less
    assert needs(launch)[name] == int(0.2 * launch.gpu.total_bytes * (1 - 0.9))
    short = launch_of(V4, f"{line} --context-length 65536")
    assert needs(short)[name] == 8192 * 65_536
    # Without chunks a single row is counted.
    whole = replace(short, settings=replace(short.settings, chunked_prefill_size=-1))
    assert needs(whole)[name] == 65_536


@pytest.mark.parametrize(
    ("line", "version", "reserved_mib"),
    [
        # 0.5.17 takes the GPU's transport by default: 100 + 1024 MiB, a public log shows it.
        ("", "0.5.17", 1124),
        ("--mm-feature-transport cpu", "0.5.17", 0),
        ("SGLANG_USE_CUDA_IPC_TRANSPORT=0 --tp 1", "0.5.17", 0),
        ("", "0.5.18", 100),
        ("--mm-feature-transport cpu", "0.5.18", 100),
        ("--mm-feature-transport cuda_ipc", "0.5.18", 1124),
        ("SGLANG_USE_CUDA_IPC_TRANSPORT=1 --tp 1", "0.5.18", 1124),
        ("", "0.5.16", 0),
        ("--language-only", "0.5.17", 0),
    ],
)
def test_images_are_reserved_for_by_release_and_transport(
    line: str, version: str, reserved_mib: int
) -> None:
    launch = launch_of("Qwen/Qwen3.5-27B", line, version=version)
    assert multimodal_reserve_bytes(launch) == reserved_mib * MIB
