"""Backends, pages, data types and limits that SGLang settles on where the line gives none."""

from dataclasses import replace

import pytest

from schemas.plan import LinearState
from tests.fakes.launches import catalogue_model, settings_of

DENSE = "Qwen/Qwen3-32B"
MLA, SPARSE = "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.2"
V4, GLM = "deepseek-ai/DeepSeek-V4-Flash", "zai-org/GLM-5-FP8"
GDN, NEXT = "Qwen/Qwen3.5-27B", "Qwen/Qwen3-Next-80B-A3B-Instruct"
MAMBA2 = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
GEMMA, GPT_OSS = "google/gemma-4-31B-it", "openai/gpt-oss-20b"
TRACKED = "--mamba-radix-cache-strategy extra_buffer"
EAGLE = "--speculative-algorithm EAGLE --speculative-draft-model-path d"
TREE = (
    f"{EAGLE} --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
)


@pytest.mark.parametrize(
    ("name", "gpu", "line", "backend", "page"),
    [
        (DENSE, "h200", "", "fa3", 1),
        (DENSE, "rtx-pro-6000", "", "flashinfer", 1),
        (DENSE, "a100", "", "flashinfer", 1),
        (DENSE, "b200", "", "trtllm_mha", 64),
        (DENSE, "b300", "", "trtllm_mha", 64),
        (DENSE, "b200", TREE, "flashinfer", 1),
        (V4, "b200", "", "dsv4", 256),
        (V4, "b200", "--page-size 64", "dsv4", 256),
        (SPARSE, "h200", "", "dsa", 64),
        (SPARSE, "h200", "--attention-backend nsa", "nsa", 64),
        (SPARSE, "h200", "--attention-backend triton --page-size 16", "triton", 16),
        (MLA, "h200", "", "fa3", 1),
        (MLA, "b200", "", "trtllm_mla", 64),
        ("moonshotai/Kimi-K2.5", "b200", "", "trtllm_mla", 64),
        (MLA, "rtx-pro-6000", "", "triton", 1),
        ("moonshotai/Kimi-K3", "b200", "", "flashinfer", 1),
        (GEMMA, "h200", "", "triton", 1),
        (GEMMA, "rtx-pro-6000", "", "triton", 1),
        (GEMMA, "b200", "", "trtllm_mha", 64),
        (GPT_OSS, "rtx-pro-6000", "", "triton", 1),
        (GPT_OSS, "h200", "", "fa3", 1),
        (MAMBA2, "b200", "", "trtllm_mha", 64),
        # Qwen hybrids on Blackwell leave the TRT-LLM backend, unless states are tracked.
        (NEXT, "b200", "", "triton", 1),
        (GDN, "b200", "", "triton", 1),
        (GDN, "b200", TRACKED, "trtllm_mha", 64),
        (GDN, "b200", "--disable-radix-cache", "trtllm_mha", 64),
        (GDN, "b200", "--speculative-algorithm EAGLE", "trtllm_mha", 64),
        (GDN, "b200", "--attention-backend trtllm_mha --disable-radix-cache", "trtllm_mha", 64),
    ],
)  # fmt: skip
def test_backend_and_its_page(name: str, gpu: str, line: str, backend: str, page: int) -> None:
    made = settings_of(name, line, gpu)
    assert (made.attention_backend, made.page_size) == (backend, page)


def test_nemotron_leaves_trtllm_before_0_5_19() -> None:
    assert settings_of(MAMBA2, "", "b200", "0.5.18").attention_backend == "flashinfer"


@pytest.mark.parametrize(
    ("backend", "given", "page"),
    [
        ("trtllm_mha", 16, 16), ("trtllm_mha", 128, 128), ("trtllm_mha", 8, 64),
        ("trtllm_mla", 32, 32), ("trtllm_mla", 16, 64), ("cutedsl_mla", 64, 64),
        ("cutedsl_mla", 1, 64), ("flashmla", 1, 64), ("fa4", 1, 128), ("triton", 16, 16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("flag", ["--attention-backend", "--decode-attention-backend"])
def test_backends_accept_only_their_own_pages(
    flag: str, backend: str, given: int, page: int
) -> None:
    if flag == "--decode-attention-backend" and backend == "fa4":
        page = given
    line = f"--page-size {given} --attention-backend triton {flag} {backend}"
    assert settings_of(DENSE, line, "b200").page_size == page


def test_fa4_has_large_pages_on_datacenter_blackwell_alone() -> None:
    assert settings_of(DENSE, "--attention-backend fa4", "h200").page_size == 1
    assert settings_of(MLA, "--attention-backend fa4", "b200").page_size == 1


@pytest.mark.parametrize(
    ("name", "gpu", "line", "dtype"),
    [
        (DENSE, "h200", "", "bfloat16"),
        (DENSE, "h200", "--kv-cache-dtype bf16", "bfloat16"),
        (DENSE, "h200", "--kv-cache-dtype fp8_e5m2", "fp8_e5m2"),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", "h200", "", "fp8_e4m3"),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", "h200", "--kv-cache-dtype bf16", "bfloat16"),
        (V4, "h200", "--kv-cache-dtype bf16", "fp8_e4m3"),
        (SPARSE, "h200", "", "bfloat16"),
        (SPARSE, "b200", "", "fp8_e4m3"),
        (GPT_OSS, "b200", "", "bfloat16"),
    ],
)
def test_type_of_the_kv_cache(name: str, gpu: str, line: str, dtype: str) -> None:
    assert settings_of(name, line, gpu).kv_cache_dtype == dtype


@pytest.mark.parametrize(
    ("name", "gpu", "line", "version", "scaled"),
    [
        (SPARSE, "h200", "--kv-cache-dtype fp8_e4m3", "0.5.23", True),
        (SPARSE, "h200", "--kv-cache-dtype fp8_e4m3", "0.5.16", False),
        (SPARSE, "h200", "", "0.5.23", False),
        (SPARSE, "b200", "", "0.5.23", False),
        (SPARSE, "rtx-pro-6000", "", "0.5.23", False),
        (GLM, "rtx-pro-6000", "", "0.5.23", True),
        (GLM, "rtx-pro-6000", "--dsa-prefill-backend trtllm", "0.5.23", False),
        (GLM, "rtx-pro-6000", "--dsa-decode-backend trtllm", "0.5.23", False),
        (GLM, "b200", "", "0.5.23", False),
        (MLA, "h200", "--kv-cache-dtype fp8_e4m3", "0.5.23", False),
    ],
)
def test_fp8_latent_with_block_scales(
    name: str, gpu: str, line: str, version: str, scaled: bool
) -> None:
    assert settings_of(name, line, gpu, version).scaled_latent is scaled


@pytest.mark.parametrize(
    ("name", "line", "version", "strategy"),
    [
        (DENSE, "", "0.5.23", "none"),
        (GDN, "", "0.5.23", "extra_buffer"),
        (GDN, "", "0.5.13", "no_buffer"),
        (GDN, "--disable-radix-cache", "0.5.23", "radix_off"),
        (GDN, "--disable-overlap-schedule", "0.5.23", "no_buffer"),
        (GDN, "--mamba-radix-cache-strategy auto", "0.5.23", "extra_buffer"),
        (GDN, "--mamba-radix-cache-strategy no_buffer", "0.5.23", "no_buffer"),
        (GDN, f"{TRACKED} --disable-overlap-schedule", "0.5.23", "extra_buffer"),
    ],
)
def test_strategy_for_states_in_the_prefix_cache(
    name: str, line: str, version: str, strategy: str
) -> None:
    assert settings_of(name, line, "h200", version).mamba_strategy == strategy


def test_short_convolutions_track_no_states() -> None:
    model = catalogue_model(GDN)
    assert isinstance(model.state, LinearState)
    conv = replace(model, state=replace(model.state, kind="conv"))
    assert settings_of(conv).mamba_strategy == "no_buffer"


@pytest.mark.parametrize(
    ("name", "line", "requests", "source"),
    [
        (DENSE, "", None, "unset"),
        (DENSE, "--max-running-requests 9", 9, "given"),
        (DENSE, EAGLE, 48, "SGLang's default under speculation"),
        (DENSE, f"{EAGLE} --max-running-requests 64", 64, "given"),
        (V4, "", 256, "SGLang's default for DeepSeek-V4"),
    ],
)
def test_limit_of_running_requests(name: str, line: str, requests: int | None, source: str) -> None:
    made = settings_of(name, line)
    assert (made.max_running_requests, made.max_running_requests_source) == (requests, source)


def test_given_sizes_are_kept() -> None:
    line = (
        "--tp 4 --pp-size 2 --mem-fraction-static 0.7 --chunked-prefill-size 4096 "
        "--max-prefill-tokens 5000 --context-length 8192 --max-total-tokens 90000 "
        "--disable-radix-cache --disable-decode-cuda-graph"
    )
    made = settings_of(DENSE, line)
    assert (made.tp_size, made.pp_size, made.attention_dp_size) == (4, 2, 1)
    assert (made.mem_fraction_static, made.mem_fraction_given) == (0.7, True)
    assert (made.chunked_prefill_size, made.max_prefill_tokens) == (4096, 5000)
    assert (made.context_length, made.max_total_tokens) == (8192, 90000)
    assert made.disable_radix_cache
    assert made.decode_graph_max_bs == 0
    assert made.release == "0.5.23"


def test_defaults_of_sizes_that_are_not_given() -> None:
    made = settings_of(DENSE)
    assert (made.mem_fraction_given, made.disable_radix_cache) == (False, False)
    assert (made.chunked_prefill_size, made.max_prefill_tokens) == (8192, 16384)
    assert (made.context_length, made.max_total_tokens) == (40960, None)


def test_attention_data_parallelism_divides_the_chunk() -> None:
    line = "--tp 8 --dp 4 --enable-dp-attention"
    assert settings_of(DENSE, line).chunked_prefill_size == 2048
    assert settings_of(DENSE, "--tp 8 --dp 4").chunked_prefill_size == 8192
    off = f"{line} --chunked-prefill-size -1"
    assert settings_of(DENSE, off).chunked_prefill_size == -1


def test_assumptions_name_what_is_unknown() -> None:
    assert settings_of(DENSE, "--tp 2").assumptions == ()
    spark = settings_of("Qwen/Qwen3-8B", "", "dgx-spark").assumptions
    assert spark == ("the card shares the host's memory: what the system uses is not known",)
    unknown = settings_of(DENSE, "--no-such 1 --nor-this").assumptions
    assert unknown == ("flags that no known release has: --no-such 1, --nor-this",)
