"""Launch lines that SGLang refuses, and their neighbours that it accepts."""

import pytest

from tests.fakes.launches import refusal_of, settings_of

DENSE, SMALL = "Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"
GDN, NEXT = "Qwen/Qwen3.5-27B", "Qwen/Qwen3-Next-80B-A3B-Instruct"
MLA, V4 = "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V4-Flash"
EAGLE = "--speculative-algorithm EAGLE"
TREE = (
    f"{EAGLE} --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
)
PP_SPEC = "SGLANG_ENABLE_PP_SPEC=1 --pp-size 2"
TRACKED = "--mamba-radix-cache-strategy extra_buffer"


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (DENSE, "--mem-fraction-static 1.2", "must lie between 0 and 1, got 1.2"),
        (DENSE, "--mem-fraction-static 1", "must lie between 0 and 1, got 1"),
        (DENSE, "--mem-fraction-static 0", "must lie between 0 and 1, got 0"),
        (DENSE, "--page-size 0", "--page-size must be positive, got 0"),
        (DENSE, "--tp-size -1", "--tp-size must be positive, got -1"),
        (DENSE, "--max-total-tokens 0", "--max-total-tokens must be positive, got 0"),
        (DENSE, "--swa-full-tokens-ratio 0", "--swa-full-tokens-ratio must be positive, got 0"),
        (DENSE, "--mamba-full-memory-ratio -1", "must be positive, got -1"),
        (DENSE, "--chunked-prefill-size 1000 --page-size 64", "must be divisible by page_size"),
        (DENSE, "--tp 3", "64 attention heads are not divisible by the attention tensor-parall"),
        (
            DENSE,
            "--tp 8 --dp 3 --enable-dp-attention",
            "tp_size (8) must be divisible by dp_size (3)",
        ),
        # 24 heads divide by 8 and by 3, 4 key-value heads not by 3
        (
            GDN,
            "--tp 3",
            "4 key-value heads do not divide over the attention tensor-parallel size 3",
        ),
        (
            DENSE,
            "--context-length 40961",
            "(40961) is greater than the derived context_length (40960)",
        ),
        (DENSE, f"{EAGLE} --speculative-eagle-topk 1", "speculative_num_steps is unset"),
        (DENSE, f"{EAGLE} --speculative-num-draft-tokens 4", "speculative_num_steps is unset"),
        (V4, TREE, "DeepSeek-V4 supports only --speculative-eagle-topk 1"),
        (DENSE, f"--attention-backend trtllm_mha {TREE}", "The trtllm_mha attention backend"),
        (
            MLA,
            f"--tp 8 --attention-backend flashmla {TREE}",
            "speculative_eagle_topk(4) > 1 with page_size(64) > 1",
        ),
        (SMALL, "--pp-size 32", "28 layers are too few for 32 pipeline stages"),
        (DENSE, "--pp-size 2 --attn-cp-size 2", "PP is not supported with context parallelism"),
        (DENSE, "--pp-size 2 --pp-max-micro-batch-size -1", "positive integer or None, got -1"),
        (NEXT, "--pp-size 2", "Pipeline Parallel is not compatible with this model."),
        (GDN, f"--pp-size 2 {EAGLE}", "only supported on prefill nodes"),
        (GDN, f"{PP_SPEC} --speculative-algorithm NGRAM", "currently only supports EAGLE"),
        (
            DENSE,
            f"{PP_SPEC} --tp 2 --dp 2 --enable-dp-attention {EAGLE}",
            "not compatible with attention DP",
        ),
        (
            GDN,
            f"{TRACKED} --mamba-track-interval 100 --page-size 64",
            "100 must be divisible by page_size 64",
        ),
        (
            GDN,
            f"{TRACKED} {EAGLE} --speculative-num-steps 256",
            "mamba_track_interval 256 must be greater than or equal to",
        ),
        (
            GDN,
            f"{TRACKED} --mamba-track-interval 3 {EAGLE}",
            "3 must be greater than or equal to speculative_num_draft_tokens 4",
        ),
        (
            GDN,
            "--mamba-radix-cache-strategy no_buffer --page-size 16",
            "no_buffer needs page_size 1, and fa3 runs with page_size 16",
        ),
        (
            GDN,
            "--pp-size 2 --mamba-radix-cache-strategy extra_buffer_lazy",
            "requires the overlap schedule",
        ),
        (
            GDN,
            "--disable-overlap-schedule --mamba-radix-cache-strategy extra_buffer_lazy",
            "requires the overlap schedule",
        ),
    ],
)
def test_launch_is_refused(name: str, line: str, message: str) -> None:
    assert message in refusal_of(name, line)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (DENSE, "--mem-fraction-static 0.999"),
        (DENSE, "--page-size 1 --max-running-requests 1"),
        (DENSE, "--chunked-prefill-size 1024 --page-size 64"),
        (DENSE, "--chunked-prefill-size -1 --page-size 64"),
        # 8 key-value heads on 16 ranks: each is kept twice
        (DENSE, "--tp 16"),
        # The latent has no heads to divide.
        (MLA, "--tp 128"),
        (V4, "--tp 4"),
        (DENSE, "--context-length 40960"),
        (DENSE, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 --context-length 65536"),
        (DENSE, f"{EAGLE} --speculative-num-steps 3"),
        (DENSE, "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4"),
        (V4, f"{EAGLE} --speculative-num-steps 3 --speculative-eagle-topk 1"),
        (DENSE, f"--attention-backend triton --page-size 16 {TREE}"),
        (DENSE, f"--attention-backend fa3 --page-size 16 {TREE}"),
        (MLA, f"--tp 8 --attention-backend triton {TREE}"),
        (SMALL, "--pp-size 28"),
        (DENSE, "--pp-size 2 --pp-max-micro-batch-size 1"),
        (DENSE, "--attn-cp-size 2"),
        (GDN, f"{PP_SPEC} {EAGLE}"),
        (GDN, f"--pp-size 2 --disaggregation-mode prefill {EAGLE}"),
        (GDN, f"{TRACKED} {EAGLE} --speculative-num-steps 255"),
        (GDN, f"{TRACKED} --mamba-track-interval 4 {EAGLE}"),
        (GDN, f"{TRACKED} --mamba-track-interval 128 --page-size 64"),
        (GDN, "--mamba-radix-cache-strategy no_buffer"),
        (GDN, "--mamba-radix-cache-strategy extra_buffer_lazy"),
        (NEXT, ""),
    ],
)
def test_launch_next_to_a_refused_one_is_accepted(name: str, line: str) -> None:
    settings_of(name, line)


@pytest.mark.parametrize("version", ["0.5.10", "0.5.13"])
def test_speculation_needs_tracked_states_up_to_0_5_13(version: str) -> None:
    message = refusal_of(GDN, EAGLE, "h200", version)
    assert "Qwen3_5ForConditionalGeneration is not compatible with radix cache" in message
    assert settings_of(GDN, f"{EAGLE} --disable-radix-cache", "h200", version)
    assert settings_of(GDN, f"{EAGLE} {TRACKED}", "h200", version)
    assert settings_of(GDN, "", "h200", version)


@pytest.mark.parametrize("version", ["0.5.9", "0.5.14"])
def test_speculation_with_a_prefix_cache_is_accepted_otherwise(version: str) -> None:
    # Releases before 0.5.10 were not read: nothing is known to be refused there.
    assert settings_of(GDN, EAGLE, "h200", version)


def test_architectures_without_stages_are_known_for_0_5_23_alone() -> None:
    assert settings_of(NEXT, "--pp-size 2", "h200", "0.5.22").pp_size == 2
