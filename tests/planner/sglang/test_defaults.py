"""Chunk, CUDA graphs and static fraction that SGLang derives from the card's memory."""

import pytest

from pipeline.planner.cards import gpu_of
from pipeline.planner.sglang.defaults import (
    CardDefaults,
    card_defaults,
    decode_buckets,
    default_fraction,
    prefill_buckets,
    priced_prefill_graphs,
)
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.inputs import LaunchInputs, launch_inputs
from pipeline.planner.sglang.releases import rules_for
from tests.fakes.launches import catalogue_model, settings_of

DENSE, SMALL = "Qwen/Qwen3-32B", "Qwen/Qwen3-8B"
MLA, KIMI_K25, SPARSE = "deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2.5", "zai-org/GLM-5-FP8"
GDN, NEXT = "Qwen/Qwen3.6-27B", "Qwen/Qwen3-Next-80B-A3B-Instruct"
MAMBA2, MOE = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen/Qwen3-30B-A3B"
EAGLE = "--speculative-algorithm EAGLE --speculative-draft-model-path d"


def inputs(line: str, gib: float = 80, name: str = DENSE, version: str = "0.5.23") -> LaunchInputs:
    """A launch on a card of that memory."""
    flags, rules = parse_launch_line(line.split()), rules_for(version)[0]
    return launch_inputs(flags, catalogue_model(name), gpu_of("", gib), rules)


# --- chunk and decode graphs ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "line", "chunk", "max_bs"),
    [
        # nvidia-smi shows 0.56 % more: 20 GiB are the border of 19.89 GiB of torch.
        (19.8, "", 2048, 8), (20, "", 4096, 48), (34, "", 4096, 48), (34, "--tp 4", 4096, 160),
        (35, "", 4096, 32), (35, "--tp 3", 4096, 32), (59, "--tp 4", 4096, 160),
        (60, "", 8192, 256), (60, "--tp 4", 8192, 512), (159, "", 8192, 256),
        (160, "", 16384, 512),
    ],
)  # fmt: skip
def test_sizes_follow_the_cards_memory(gib: float, line: str, chunk: int, max_bs: int) -> None:
    assert card_defaults(inputs(line, gib)) == CardDefaults(
        chunk_tokens=chunk, decode_max_bs=max_bs
    )


def test_small_cards_had_smaller_sizes_before_0_5_21() -> None:
    one, four = inputs("", 24, version="0.5.19"), inputs("--tp 4", 24, version="0.5.19")
    assert card_defaults(one) == CardDefaults(chunk_tokens=2048, decode_max_bs=24)
    assert card_defaults(four) == CardDefaults(chunk_tokens=2048, decode_max_bs=80)


@pytest.mark.parametrize(
    ("line", "version", "chunk", "max_bs"),
    [
        ("--chunked-prefill-size 1000", "0.5.23", 1000, 256),
        ("--chunked-prefill-size -1", "0.5.23", -1, 256),
        ("--cuda-graph-max-bs 300", "0.5.23", 8192, 300),
        ("--cuda-graph-bs 1 2 7", "0.5.23", 8192, 7),
        ("--cuda-graph-bs [1,9]", "0.5.23", 8192, 9),
        ("--cuda-graph-bs none", "0.5.23", 8192, 256),
        ("--cuda-graph-max-bs 300 --max-running-requests 20", "0.5.23", 8192, 300),
        ("--max-running-requests 20", "0.5.23", 8192, 20),
        ("--max-running-requests 600", "0.5.23", 8192, 256),
        ("--max-running-requests 20", "0.5.22", 8192, 256),
    ],
)
def test_flags_outrank_the_cards_sizes(line: str, version: str, chunk: int, max_bs: int) -> None:
    assert card_defaults(inputs(line, version=version)) == CardDefaults(
        chunk_tokens=chunk, decode_max_bs=max_bs
    )


# --- the static fraction ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "line", "fraction"),
    [
        # r = 512 + 1.5 x 8192 + 128 + 2 x 256 + 8 x 58 = 13,904 MiB of 97,887
        ("rtx-pro-6000", "--tp 1", 0.858),
        ("rtx-pro-6000", "--tp 4", 0.849),
        ("h100", "--tp 1", 0.830),
        ("h100", "--tp 8", 0.812),
        ("h200", "--tp 4", 0.897),
        ("b200", "--tp 8", 0.849),
        ("b300", "--tp 1", 0.902),
        ("rtx-5090", "--tp 1", 0.777),
        ("l40s", "--tp 4", 0.829),
    ],
)
def test_default_fraction_of_a_text_model(gpu: str, line: str, fraction: float) -> None:
    assert settings_of(DENSE, line, gpu).mem_fraction_static == fraction


@pytest.mark.parametrize(
    ("line", "name", "version", "reserved"),
    [
        # 80 GiB, chunk 8192, 256 decode graphs, 58 prefill graphs: 512 + 12,288 + 128 + 512 + 464
        ("", DENSE, "0.5.23", 13_904),
        ("--tp 2 --pp-size 4", DENSE, "0.5.23", 512 + 12_288 + 1024 + 512),
        ("--disable-cuda-graph", DENSE, "0.5.23", 512 + 12_288 + 128),
        # Without the prefill graphs the 10 GiB floor is close: 512 + 3072 + 128 + 512.
        ("--chunked-prefill-size 512 --disable-prefill-cuda-graph", DENSE, "0.5.23", 10_240),
        # Chunked prefill off: --max-prefill-tokens counts, and no prefill graph is reserved for.
        ("--chunked-prefill-size -1", DENSE, "0.5.23", 512 + 1.5 * 16_384 + 128 + 512),
        ("--chunked-prefill-size -1 --max-prefill-tokens 10000", DENSE, "0.5.23",
         512 + 15_000 + 128 + 512),
        # Attention data parallelism: 3 per graph and rank, 1.5 more above 300 graphs.
        ("--tp 2 --dp 2 --enable-dp-attention", DENSE, "0.5.23",
         512 + 12_288 + 256 + 512 + 3 * 256 * 2 + 464),
        ("--tp 2 --dp 2 --enable-dp-attention --cuda-graph-max-bs 301", DENSE, "0.5.23",
         512 + 12_288 + 256 + 602 + 3 * 301 * 2 + 1.5 * 301 * 2 + 464),
        ("--tp 2 --dp 2 --enable-dp-attention --cuda-graph-max-bs 300", DENSE, "0.5.23",
         512 + 12_288 + 256 + 600 + 3 * 300 * 2 + 464),
        # Latent attention has one reserve for its prefill graphs.
        ("", MLA, "0.5.23", 512 + 12_288 + 128 + 512 + 1536),
        # DeepEP: 1024 with breakable prefill graphs, and 2048 for decode graphs.
        ("--moe-a2a-backend deepep", MOE, "0.5.23", 13_904 + 1024 + 2048),
        ("--moe-a2a-backend deepep --disable-cuda-graph", MOE, "0.5.23", 512 + 12_288 + 128),
        ("--moe-a2a-backend megamoe", MOE, "0.5.23", 13_904),
        ("--moe-a2a-backend deepep", MOE, "0.5.13", 512 + 12_288 + 128 + 512),
        # Up to 0.5.13 drafts have a reserve, and disabled decode graphs count all the same.
        (EAGLE, DENSE, "0.5.13", 13_904 + 4096),
        ("--speculative-algorithm STANDALONE --speculative-draft-model-path d", DENSE, "0.5.13",
         13_904 + 6144),
        ("--speculative-algorithm NGRAM", DENSE, "0.5.13", 13_904),
        (EAGLE, DENSE, "0.5.14", 13_904),
        ("--disable-cuda-graph", DENSE, "0.5.13", 13_904),
    ],
)  # fmt: skip
def test_reserves_of_the_default_fraction(
    line: str, name: str, version: str, reserved: float
) -> None:
    launch = inputs(line, 80, name, version)
    sizes = card_defaults(launch)
    graphs = priced_prefill_graphs(launch, sizes.chunk_tokens)
    smi_mib = launch.gpu.smi_mib
    expected = round((smi_mib - reserved) / smi_mib, 3)
    assert default_fraction(launch, sizes, graphs) == expected


def test_small_cards_have_no_floor() -> None:
    # 512 + 1.5 x 2048 + 128 + 2 x 8 = 3728 MiB, the least chunk counting as 2048
    launch = inputs("--chunked-prefill-size 100 --disable-prefill-cuda-graph", 16)
    assert default_fraction(launch, card_defaults(launch), 0) == round(
        1 - 3728 / launch.gpu.smi_mib, 3
    )


def test_default_fraction_of_a_multimodal_model() -> None:
    # 0.858 x 0.95 x (1 - 0.1 x (24 x 1152^2 / (24 x 1024^2) - 1)) = 0.858 x 0.924766
    made = settings_of(GDN, "", "rtx-pro-6000")
    assert made.mem_fraction_static == pytest.approx(0.858 * 0.924766, abs=1e-6)
    for flag in ("--language-only", "--language-model-only"):
        assert settings_of(GDN, flag, "rtx-pro-6000").mem_fraction_static == 0.858


def test_large_encoders_take_at_most_a_fifth_and_small_ones_give_a_twentieth() -> None:
    # Kimi-K2.5: 27 x 1152^2 / (24 x 1024^2) = 1.424, 1 - 0.0424 = 0.9576
    text = settings_of(KIMI_K25, "--language-only --tp 8", "b200").mem_fraction_static
    seen = settings_of(KIMI_K25, "--tp 8", "b200").mem_fraction_static
    assert seen / text == pytest.approx(0.95 * 0.957617, abs=1e-4)


# --- prefill graphs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "line", "version", "graphs"),
    [
        (DENSE, "", "0.5.23", 58),
        (DENSE, "--max-total-tokens 4096", "0.5.23", 50),
        (DENSE, "--max-total-tokens 99999", "0.5.23", 58),
        (DENSE, "--disable-prefill-cuda-graph", "0.5.23", 0),
        (DENSE, "--disable-piecewise-cuda-graph", "0.5.23", 0),
        (DENSE, "--disable-cuda-graph", "0.5.23", 0),
        (DENSE, "--disable-cuda-graph", "0.5.13", 58),
        (DENSE, "--cuda-graph-backend-prefill disabled", "0.5.23", 0),
        (DENSE, "--pp-size 2", "0.5.23", 0),
        (DENSE, "--pp-size 2 --cuda-graph-backend-prefill breakable", "0.5.23", 58),
        (DENSE, "--pp-size 2 --enforce-piecewise-cuda-graph", "0.5.23", 58),
        (DENSE, "--attn-cp-size 2", "0.5.23", 0),
        (DENSE, "--dcp-size 2", "0.5.23", 0),
        (DENSE, "--enable-two-batch-overlap", "0.5.23", 0),
        (DENSE, "--enable-two-batch-overlap", "0.5.13", 58),
        # A name with llama-2 in it is captured up to 4096 tokens.
        (DENSE, "--model-path x/Llama-2-7B", "0.5.23", 50),
        (DENSE, "", "0.5.9", 0),
        (DENSE, "--enable-piecewise-cuda-graph", "0.5.9", 58),
        ("deepseek-ai/DeepSeek-V4-Flash", "", "0.5.23", 0),
        # Latent attention: up to 2048 tokens, 8192 from 0.5.23; not captured 0.5.15 to 0.5.18.
        (MLA, "", "0.5.23", 58),
        (MLA, "", "0.5.21", 42),
        (MLA, "", "0.5.18", 0),
        (MLA, "", "0.5.13", 42),
        (SPARSE, "", "0.5.13", 0),
        (SPARSE, "", "0.5.14", 42),
        (MAMBA2, "", "0.5.18", 0),
        (MAMBA2, "", "0.5.19", 58),
        ("moonshotai/Kimi-K3", "", "0.5.23", 0),
        # Multimodal models: an allow-list from 0.5.15 on, none before.
        (GDN, "", "0.5.23", 58),
        (GDN, "", "0.5.13", 0),
        ("Qwen/Qwen3-VL-8B-Instruct", "", "0.5.23", 0),
        (KIMI_K25, "", "0.5.18", 42),
        (KIMI_K25, "--tp 2 --dp 2 --enable-dp-attention", "0.5.18", 0),
        (KIMI_K25, "--tp 2 --dp 2 --enable-dp-attention", "0.5.19", 42),
        # All-to-all backends.
        (MOE, "--moe-a2a-backend deepep", "0.5.23", 58),
        (MOE, "--moe-a2a-backend mooncake", "0.5.23", 0),
        (MOE, "--moe-a2a-backend deepep", "0.5.13", 0),
        (NEXT, "", "0.5.13", 0),
        (NEXT, "", "0.5.15", 58),
        (DENSE, "--tp 2 --dp 2 --enable-dp-attention", "0.5.13", 0),
        (DENSE, "--tp 2 --dp 2 --enable-dp-attention", "0.5.15", 58),
        (DENSE, "--enable-lora", "0.5.13", 0),
        (DENSE, "--cpu-offload-gb 1", "0.5.13", 0),
    ],
)
def test_prefill_graphs_that_the_fraction_reserves_for(
    name: str, line: str, version: str, graphs: int
) -> None:
    assert priced_prefill_graphs(inputs(line, 80, name, version), 8192) == graphs


def test_no_prefill_graph_without_a_chunk() -> None:
    assert priced_prefill_graphs(inputs(""), -1) == 0
    assert priced_prefill_graphs(inputs(""), 0) == 0
    assert priced_prefill_graphs(inputs(""), 4) == 1


@pytest.mark.parametrize(
    ("name", "gpu", "line", "version", "graphs"),
    [
        (DENSE, "h200", "", "0.5.23", 58),
        # Each rank of attention data parallelism prefills a quarter of the chunk.
        (DENSE, "h200", "--tp 4 --dp 4 --enable-dp-attention", "0.5.23", 42),
        (MLA, "b200", "", "0.5.23", 0),
        (KIMI_K25, "b200", "", "0.5.23", 58),
        (MLA, "h200", "", "0.5.23", 58),
        (MLA, "h200", "--disable-prefill-cuda-graph", "0.5.23", 0),
        # TRT-LLM's experts bypass piecewise graphs; b200 has a chunk of 16,384: 74 graphs.
        (MOE, "h200", "", "0.5.13", 58),
        (MOE, "b200", "", "0.5.13", 0),
        (MOE, "b200", "--moe-runner-backend triton", "0.5.13", 74),
        (MOE, "h200", "--moe-runner-backend flashinfer_trtllm", "0.5.13", 0),
        (MOE, "h200", "--moe-runner-backend flashinfer_mxfp4", "0.5.13", 0),
        ("openai/gpt-oss-20b", "h200", "--moe-runner-backend flashinfer_mxfp4", "0.5.13", 58),
        (DENSE, "b200", "", "0.5.13", 74),
    ],
)
def test_prefill_graphs_that_are_captured(
    name: str, gpu: str, line: str, version: str, graphs: int
) -> None:
    assert settings_of(name, line, gpu, version).prefill_graph_buckets == graphs


@pytest.mark.parametrize(("tokens", "count"), [(2048, 42), (4096, 50), (8192, 58), (16384, 74)])
def test_number_of_prefill_graphs(tokens: int, count: int) -> None:
    assert len(prefill_buckets(tokens)) == count


def test_prefill_graphs_end_with_the_maximum() -> None:
    assert prefill_buckets(3) == ()
    assert prefill_buckets(10) == (4, 8, 10)
    assert prefill_buckets(64) == (4, 8, 12, 16, 20, 24, 28, 32, 48, 64)
    assert prefill_buckets(4608)[-3:] == (3840, 4096, 4608)
    assert prefill_buckets(600)[-4:] == (480, 512, 576, 600)


def test_decode_graphs_end_with_the_maximum() -> None:
    assert decode_buckets(10, speculative=False) == (1, 2, 4, 8, 10)
    assert decode_buckets(10, speculative=True) == (1, 2, 3, 4, 5, 6, 7, 8, 10)
    assert decode_buckets(544, speculative=False)[-4:] == (480, 496, 512, 544)
    assert decode_buckets(40, speculative=True)[-3:] == (30, 32, 40)
    assert decode_buckets(80, speculative=True)[-4:] == (60, 64, 72, 80)
    assert decode_buckets(290, speculative=True)[-4:] == (256, 272, 288, 290)
