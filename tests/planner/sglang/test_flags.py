"""Launch lines as people paste them, and what SGLang's defaults make of them."""

import pytest

from pipeline.errors import PlanError
from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.plan import RefusedPlan, plan_launch
from pipeline.planner.sglang.defaults import decode_buckets, prefill_buckets
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line, renaming_of, spelled_for
from pipeline.planner.sglang.layout import layout_name
from pipeline.planner.sglang.releases import rules_for
from schemas.plan import LaunchPlan, ModelFacts


def parse(line: str) -> LaunchFlags:
    """Flags of a line split at spaces."""
    return parse_launch_line(line.split())


@pytest.mark.parametrize("flag", ["--json-model-override-args", "--unknown-to-all"])
def test_json_behind_an_equals_sign_stays_as_it_is(flag: str) -> None:
    text = '{"rope_scaling": {"factor": 2.0}, "note": "--tp-size"}'
    flags = parse_launch_line([f"{flag}={text}", "--tp-size=2"])
    assert flags.number("tp-size") == 2
    assert text in (flags.text(flag[2:]), *(aside.partition(" ")[2] for aside in flags.set_aside))


def facts(name: str) -> ModelFacts:
    """A model of the catalogue."""
    return load_model(name)


def planned(
    name: str, line: str, gpu: str = "h200", version: str = "0.5.23"
) -> LaunchPlan | RefusedPlan:
    """The forecast or the refusal of a line."""
    flags = parse(line)
    return plan_launch(facts(name), gpu_named(gpu), flags, version=version)


def settings(name: str, line: str, gpu: str = "h200", version: str = "0.5.23") -> LaunchPlan:
    """The forecast of a line that is not refused."""
    made = planned(name, line, gpu, version)
    assert isinstance(made, LaunchPlan), made
    return made


# --- parsing ----------------------------------------------------------------------------------

PASTED = [
    "--model-path Q/M --tp-size 2 --mem-fraction-static 0.8",
    "python -m sglang.launch_server --model-path Q/M --tp 2 --mem-fraction-static=0.8",
    "python3 -m sglang.launch_server --model Q/M --tensor-parallel-size=2 --mem-frac 0.8",
    "sglang serve Q/M --tp 2 --mem-fraction-static 0.8",
    "sglang serve --model-path Q/M --tp 2 --mem-fraction-static 0.8",
    "FOO=1 BAR=x=y python -m sglang.launch_server --model-path Q/M --tp 2 --mem-fraction-static .8",
    "env FOO=1 BAR=x=y sglang serve Q/M --tp 2 --mem-fraction-static 0.8",
    "/opt/venv/bin/python3 -m sglang.launch_server --model-path Q/M --tp 1 --tp 2 --mem-frac 0.8",
]


@pytest.mark.parametrize("line", PASTED)
def test_every_way_to_paste_a_line_gives_the_same_flags(line: str) -> None:
    flags = parse(line)
    assert flags.model_path == "Q/M"
    assert flags.number("tp-size") == 2
    assert flags.fraction("mem-fraction-static") == 0.8
    assert flags.set_aside == ()


def test_continuation_backslashes_and_quotes_are_read_as_a_shell_reads_them() -> None:
    text = "python -m sglang.launch_server \\\n  --model-path 'Q/M' \\\n  --tp 2  # cards\n"
    assert parse_launch_line([text]).number("tp-size") == 2
    assert parse_launch_line(["--model-path", "Q/M", "\\", "--tp", "2"]).number("tp-size") == 2


def test_environment_assignments_are_kept() -> None:
    flags = parse("SGLANG_ENABLE_SPEC_V2=1 sglang serve Q/M")
    assert flags.switched_on("SGLANG_ENABLE_SPEC_V2")
    assert not flags.switched_on("SGLANG_OTHER")


def test_old_and_new_spellings_meet() -> None:
    old = parse("--mamba-scheduler-strategy extra_buffer --cuda-graph-max-bs 8")
    new = "--mamba-radix-cache-strategy extra_buffer --cuda-graph-max-bs-decode 8"
    assert old == parse(new)


def test_a_json_value_stays_one_value() -> None:
    line = ["--deepep-config", '{"normal_dispatch": {"num_sms": 96}}', "--tp", "2"]
    assert parse_launch_line(line).text("deepep-config").startswith("{")


def test_an_unknown_flag_is_named_and_set_aside_with_its_values() -> None:
    flags = parse("--tp 2 --no-such-flag a b --page-size 64")
    assert flags.set_aside == ("--no-such-flag a b",)
    assert flags.number("page-size") == 64
    made = settings("Qwen/Qwen3-32B", "--tp 2 --no-such-flag a b")
    assert any("--no-such-flag a b" in note for note in made.assumptions)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp two", "argument --tp-size: invalid int value: 'two'"),
        ("--mem-fraction-static lots", "invalid float value: 'lots'"),
        ("--tp", "expected one argument"),
        ("--tp --page-size 1", "expected one argument"),
        ("--cuda-graph-bs", "expected at least one argument"),
    ],
)
def test_a_value_that_a_flag_cannot_hold_is_told_as_argparse_would(line: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse(line)


def test_argv_parses_to_the_same_flags() -> None:
    line = "--model-path Q/M --tp 2 --disable-radix-cache --cuda-graph-bs 1 2 4 --page-size 64"
    flags = parse(line)
    assert parse_launch_line(flags.argv()) == flags


def test_a_changed_line_keeps_the_rest() -> None:
    flags = parse("--model-path Q/M --tp 2 --disable-radix-cache")
    other = flags.changed({"tp-size": "4", "disable-radix-cache": None, "enable-metrics": ""})
    assert other.number("tp-size") == 4
    assert not other.has("disable-radix-cache")
    assert other.has("enable-metrics")
    assert isinstance(other, LaunchFlags)


# --- releases ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "label"),
    [
        (None, "0.5.23"),
        ("0.5.12.post1", "0.5.12"),
        ("v0.5.14", "0.5.14"),
        ("lmsysorg/sglang:v0.5.16-cu130", "0.5.16"),
        ("0.5.9", "0.5.9"),
        ("main 2026-05-22", "0.5.12"),
        ("main @1cf2b8c 2026-08-21", "0.5.19"),
        ("lmsysorg/sglang:nightly-dev-cu13-20260628-da802ddc", "0.5.15"),
        ("some custom build", "0.5.23"),
    ],
)
def test_a_release_is_read_from_tags_and_dates(version: str | None, label: str) -> None:
    assert rules_for(version)[0].label == label


def test_a_release_that_was_not_read_is_an_assumption() -> None:
    assert any("not read" in note for note in rules_for("0.4.9")[1])
    assert any("newer" in note for note in rules_for("0.5.40")[1])


# --- defaults ---------------------------------------------------------------------------------


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
    made = settings("Qwen/Qwen3-32B", line, gpu)
    assert made.settings.mem_fraction_static == fraction


def test_default_fraction_of_a_latent_model() -> None:
    # 1536 MiB stand in for the prefill buckets
    made = settings("moonshotai/Kimi-K2-Instruct", "--tp 8", "h200")
    assert made.settings.mem_fraction_static == 0.886


def test_default_fraction_of_a_multimodal_model() -> None:
    # 0.858 x 0.95 x (1 - 0.1 x (24 x 1152^2 / (24 x 1024^2) - 1)) = 0.858 x 0.92477
    made = settings("Qwen/Qwen3.6-27B", "", "rtx-pro-6000")
    assert made.settings.mem_fraction_static == pytest.approx(0.7934, abs=1e-4)
    text = settings("Qwen/Qwen3.6-27B", "--language-only", "rtx-pro-6000")
    assert text.settings.mem_fraction_static == 0.858


def test_speculation_lowers_the_default_up_to_0_5_13() -> None:
    # piecewise graphs are off for multimodal models: (97,887 - 13,440 - 4,096) / 97,887 = 0.821
    mtp = "--speculative-algorithm EAGLE --disable-radix-cache"
    made = settings("Qwen/Qwen3.6-27B", mtp, "rtx-pro-6000", "0.5.13")
    assert made.settings.mem_fraction_static == pytest.approx(0.759, abs=5e-4)


def test_small_cards_got_larger_defaults_in_0_5_21() -> None:
    old = settings("Qwen/Qwen3-8B", "", "rtx-5090", "0.5.19").settings
    new = settings("Qwen/Qwen3-8B", "", "rtx-5090", "0.5.21").settings
    assert (old.chunked_prefill_size, old.decode_graph_max_bs) == (2048, 24)
    assert (new.chunked_prefill_size, new.decode_graph_max_bs) == (4096, 48)


@pytest.mark.parametrize(("tokens", "count"), [(2048, 42), (4096, 50), (8192, 58), (16384, 74)])
def test_prefill_buckets(tokens: int, count: int) -> None:
    assert len(prefill_buckets(tokens)) == count


def test_decode_buckets_end_with_the_maximum() -> None:
    assert decode_buckets(10, speculative=False) == (1, 2, 4, 8, 10)
    assert decode_buckets(10, speculative=True) == (1, 2, 3, 4, 5, 6, 7, 8, 10)


def test_speculation_defaults() -> None:
    made = settings("deepseek-ai/DeepSeek-V3", "--tp 8 --speculative-algorithm NEXTN").settings
    assert made.max_running_requests == 48
    shape = made.speculation
    assert (shape.steps, shape.topk, shape.num_draft_tokens) == (3, 1, 4)  # type: ignore[union-attr]  # speculation is on


TREE = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 8"
)

# --- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "name"),
    [("", "4"), ("--tp 2", "2"), ("--pp-size 2", "2-pp2"), ("--tp 1 --pp-size 4", "1-pp4"),
     ("--pp-size 8", "1-pp8")],
)  # fmt: skip
def test_layout_of_a_launch_on_four_cards(line: str, name: str) -> None:
    assert layout_name(parse(line), 4) == name


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "line", "version", "message"),
    [
        ("Qwen/Qwen3-32B", "--tp 3", "0.5.23", "not divisible"),
        ("Qwen/Qwen3-32B", "--tp 8 --dp 3 --enable-dp-attention", "0.5.23", "must be divisible"),
        ("Qwen/Qwen3-32B", "--mem-fraction-static 1.2", "0.5.23", "between 0 and 1"),
        ("Qwen/Qwen3-32B", "--context-length 9999999", "0.5.23", "greater than the derived"),
        (
            "Qwen/Qwen3-32B",
            "--chunked-prefill-size 1000 --page-size 64",
            "0.5.23",
            "divisible by page_size",
        ),
        (
            "Qwen/Qwen3-32B",
            f"--attention-backend trtllm_mha --speculative-draft-model-path d {TREE}",
            "0.5.23",
            "trtllm_mha",
        ),
        (
            "deepseek-ai/DeepSeek-V4-Flash",
            f"--tp 4 {TREE}",
            "0.5.23",
            "topk 1",
        ),
        ("Qwen/Qwen3.6-27B", "--speculative-algorithm EAGLE", "0.5.12", "no_buffer"),
        (
            "Qwen/Qwen3.6-27B",
            "--mamba-track-interval 100 --page-size 64 --mamba-radix-cache-strategy extra_buffer",
            "0.5.23",
            "divisible by page_size",
        ),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "--pp-size 2", "0.5.23", "not compatible with this"),
        (
            "Qwen/Qwen3.6-27B",
            "--pp-size 2 --speculative-algorithm EAGLE",
            "0.5.23",
            "only supported on prefill nodes",
        ),
        (
            "Qwen/Qwen3.6-27B",
            "SGLANG_ENABLE_PP_SPEC=1 --pp-size 2 --speculative-algorithm NGRAM",
            "0.5.23",
            "only supports EAGLE",
        ),
        (
            "Qwen/Qwen3.6-27B",
            "--pp-size 2 --mamba-radix-cache-strategy extra_buffer_lazy",
            "0.5.23",
            "requires the overlap schedule",
        ),
        ("Qwen/Qwen3-0.6B", "--pp-size 32", "0.5.23", "too few for 32 pipeline stages"),
    ],
)
def test_what_sglang_refuses_is_told(name: str, line: str, version: str, message: str) -> None:
    made = planned(name, line, "h200", version)
    assert isinstance(made, RefusedPlan)
    assert message in made.message


def test_a_longer_context_may_be_allowed() -> None:
    line = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 --context-length 65536"
    assert settings("Qwen/Qwen3-32B", line).settings.context_length == 65536


def test_prefix_cache_with_speculation_is_allowed_from_0_5_14() -> None:
    assert settings("Qwen/Qwen3.6-27B", "--speculative-algorithm EAGLE", "h200", "0.5.14")


def test_drafts_in_stages_are_taken_where_the_environment_allows_them() -> None:
    line = "SGLANG_ENABLE_PP_SPEC=1 --pp-size 2 --speculative-algorithm EAGLE"
    assert settings("Qwen/Qwen3.6-27B", line).settings.pp_size == 2


# --- names by release -------------------------------------------------------------------------


def test_arguments_are_spelled_as_an_older_release_knows_them() -> None:
    words = ("--mamba-radix-cache-strategy", "extra_buffer", "--cuda-graph-max-bs-decode", "16")
    assert spelled_for(words, (0, 5, 23)) == words
    assert spelled_for(words, (0, 5, 12)) == (
        "--mamba-scheduler-strategy",
        "extra_buffer",
        "--cuda-graph-max-bs",
        "16",
    )


def test_renaming_is_told_from_either_side() -> None:
    assert "since SGLang 0.5.14" in str(renaming_of("nsa-prefill-backend"))
    assert "before it is called --cuda-graph-bs" in str(renaming_of("cuda-graph-bs-decode"))
    assert renaming_of("mem-fraction-static") is None
