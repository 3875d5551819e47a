"""Properties of any launch: parts sum to the total, more memory never gives fewer tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named, gpu_of_memory, gpu_with_memory
from pipeline.planner.memory.plan import RefusedPlan, plan_launch
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from schemas.plan import Gpu, LaunchPlan, ModelFacts
from schemas.units import GIB

MODELS = (
    "Qwen/Qwen3-32B", "Qwen/Qwen3.6-27B", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash", "openai/gpt-oss-20b", "moonshotai/Kimi-K3",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "MiniMaxAI/MiniMax-M3",
)  # fmt: skip
CARDS = ("rtx-5090", "rtx-pro-6000", "h100", "h200", "b200", "b300", "dgx-spark")
RELEASES = ("0.5.10", "0.5.12", "0.5.13", "0.5.14", "0.5.17", "0.5.19", "0.5.23")
MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)

_FACTS: dict[str, ModelFacts] = {}


def facts(name: str) -> ModelFacts:
    """A model of the catalogue, read once."""
    if name not in _FACTS:
        _FACTS[name] = load_model(name)
    return _FACTS[name]


@st.composite
def lines(draw: st.DrawFn) -> LaunchFlags:
    """Launch lines that people could write."""
    words = f"--model-path x --tp {draw(st.sampled_from((1, 2, 4, 8, 16)))}"
    for flag, values in (
        ("mem-fraction-static", ("0.6", "0.8", "0.9", "0.95")),
        ("chunked-prefill-size", ("1024", "8192", "32768")),
        ("max-running-requests", ("1", "48", "512")),
        ("context-length", ("4096", "32768")),
        ("kv-cache-dtype", ("fp8_e4m3", "bfloat16")),
        ("page-size", ("1", "64")),
        ("mamba-ssm-dtype", ("bfloat16", "float32")),
        ("max-total-tokens", ("50000",)),
    ):
        value = draw(st.sampled_from((None, *values)))
        if value is not None:
            words += f" --{flag} {value}"
    for switch in ("--disable-radix-cache", "--disable-cuda-graph", MTP):
        if draw(st.booleans()):
            words += f" {switch}"
    return parse_launch_line(words.split())


def plan(name: str, gpu: Gpu, flags: LaunchFlags, version: str) -> LaunchPlan | None:
    """The forecast, or nothing where SGLang refuses the line."""
    made = plan_launch(facts(name), gpu, flags, version=version)
    return None if isinstance(made, RefusedPlan) else made


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(CARDS), lines(), st.sampled_from(RELEASES))
def test_rows_sum_to_the_card(name: str, card: str, flags: LaunchFlags, version: str) -> None:
    gpu = gpu_named(card)
    made = plan(name, gpu, flags, version)
    if made is None:
        return
    assert sum(row.bytes for row in made.budget.rows) == made.budget.total_bytes == gpu.total_bytes
    assert made.verdict == "fits" or made.stage or made.warnings
    assert (made.verdict == "fits") <= (made.capacity.max_running_requests > 0)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.integers(min_value=24, max_value=280),
    st.integers(min_value=1, max_value=64),
    lines(),
    st.sampled_from(RELEASES),
)
def test_more_memory_never_gives_fewer_tokens(
    name: str, gib: int, more: int, flags: LaunchFlags, version: str
) -> None:
    # The fraction is given: its default, like the chunk, follows the card's size in steps.
    fixed = flags.changed({"mem-fraction-static": "0.85", "chunked-prefill-size": "4096"})
    base = gpu_named("h200")
    small = plan(name, gpu_with_memory(base, gib), fixed, version)
    large = plan(name, gpu_with_memory(base, gib + more), fixed, version)
    if small is None or large is None:
        return
    assert large.capacity.state_slots >= small.capacity.state_slots
    if large.intermediate_state_bytes <= small.intermediate_state_bytes:
        assert large.capacity.max_total_num_tokens >= small.capacity.max_total_num_tokens


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(CARDS), lines(), st.sampled_from(RELEASES))
def test_argv_parses_back_to_the_same_plan(
    name: str, card: str, flags: LaunchFlags, version: str
) -> None:
    again = parse_launch_line(flags.argv())
    assert again == flags
    assert plan(name, gpu_named(card), again, version) == plan(
        name, gpu_named(card), flags, version
    )


@settings(derandomize=True, max_examples=100, deadline=None)
@given(lines(), st.sampled_from(RELEASES))
def test_halving_the_context_never_gives_fewer_tokens(flags: LaunchFlags, version: str) -> None:
    gpu = gpu_of_memory(80)
    long = plan("Qwen/Qwen3-32B", gpu, flags.changed({"context-length": "32768"}), version)
    short = plan("Qwen/Qwen3-32B", gpu, flags.changed({"context-length": "16384"}), version)
    if long is None or short is None:
        return
    assert short.capacity.max_total_num_tokens >= long.capacity.max_total_num_tokens
    assert short.weights_bytes == long.weights_bytes <= 70 * GIB
