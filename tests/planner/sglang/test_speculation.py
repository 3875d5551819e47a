"""Algorithm, steps and tokens of speculation, with SGLang's defaults."""

import pytest

from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.speculation import speculation_of
from schemas.plan import NoSpeculation, Speculation
from tests.fakes.launches import catalogue_model

MTP, PLAIN, LLAMA = "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3.1-8B"
V4 = "deepseek-ai/DeepSeek-V4-Flash"
STEPS, TOPK = "--speculative-num-steps", "--speculative-eagle-topk"
TOKENS = "--speculative-num-draft-tokens"


def speculation(line: str, name: str = MTP) -> NoSpeculation | Speculation:
    """The speculation of a line."""
    words = ["--model-path", name, *line.split()]
    return speculation_of(parse_launch_line(words), catalogue_model(name))


@pytest.mark.parametrize(
    ("name", "line", "shape"),
    [
        (MTP, "EAGLE", (3, 1, 4)),
        (MTP, "NEXTN", (3, 1, 4)),
        (LLAMA, "EAGLE3", (5, 4, 8)),
        (LLAMA, f"EAGLE {TOPK} 2 {TOKENS} 6", (5, 2, 6)),
        # A chain verifies all drafted tokens and one more, whatever the flag says.
        (MTP, f"EAGLE {STEPS} 5", (5, 1, 6)),
        (MTP, f"EAGLE {STEPS} 5 {TOKENS} 9", (5, 1, 6)),
        (MTP, f"EAGLE {STEPS} 5 {TOPK} 4 {TOKENS} 9", (5, 4, 9)),
        (MTP, f"EAGLE {STEPS} 5 {TOPK} 4", (5, 4, 6)),
        (MTP, "NGRAM", (12, 10, 12)),
        (MTP, f"NGRAM {STEPS} 2 {TOPK} 3 {TOKENS} 4", (2, 3, 4)),
        (MTP, "DFLASH", (16, 1, 16)),
        (MTP, "DFLASH --speculative-dflash-block-size 8", (8, 1, 8)),
        (MTP, f"DFLASH --speculative-dflash-block-size 8 {TOKENS} 5",
         (5, 1, 5)),
        (V4, "DSPARK", (7, 1, 8)),
        (V4, "DSPARK --speculative-dspark-block-size 5", (5, 1, 6)),
        (V4, f"DSPARK --speculative-dspark-block-size 5 {TOKENS} 4",
         (3, 1, 4)),
    ],
)  # fmt: skip
def test_steps_width_and_tokens(name: str, line: str, shape: tuple[int, int, int]) -> None:
    made = speculation(f"--speculative-algorithm {line}", name)
    assert isinstance(made, Speculation)
    assert (made.steps, made.topk, made.num_draft_tokens) == shape


def test_nextn_is_an_older_name_of_eagle() -> None:
    made = speculation("--speculative-algorithm nextn")
    assert isinstance(made, Speculation)
    assert (made.algorithm, made.draft_path) == ("EAGLE", "")


@pytest.mark.parametrize("line", ["", "--speculative-algorithm none"])
def test_speculation_is_off_without_an_algorithm(line: str) -> None:
    assert speculation(line) == NoSpeculation()


@pytest.mark.parametrize(
    ("name", "line", "built_in"),
    [
        (MTP, "EAGLE", True),
        (MTP, "EAGLE3", True),
        (PLAIN, "EAGLE", False),
        (MTP, f"NEXTN --speculative-draft-model-path {MTP}", True),
        (MTP, "EAGLE --speculative-draft-model-path x/DeepSeek-V3-NextN", True),
        (PLAIN, "EAGLE --speculative-draft-model-path x/Qwen-NextN", False),
        (MTP, "EAGLE --speculative-draft-model-path x/other", False),
        (MTP, "STANDALONE", False),
        (V4, "DSPARK", True),
        (V4, "DSPARK --speculative-draft-model-path x/y", False),
        (PLAIN, "DSPARK", False),
    ],
)
def test_draft_is_built_in_where_the_checkpoint_has_it(
    name: str, line: str, built_in: bool
) -> None:
    made = speculation(f"--speculative-algorithm {line}", name)
    assert isinstance(made, Speculation)
    assert made.built_in is built_in
