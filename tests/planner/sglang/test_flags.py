"""Launch lines as people paste them, and what SGLang's defaults make of them."""

import pytest

from pipeline.errors import PlanError
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line, renaming_of, spelled_for


def parse(line: str) -> LaunchFlags:
    """Flags of a line split at spaces."""
    return parse_launch_line(line.split())


@pytest.mark.parametrize("flag", ["--json-model-override-args", "--unknown-to-all"])
def test_json_behind_an_equals_sign_stays_as_it_is(flag: str) -> None:
    text = '{"rope_scaling": {"factor": 2.0}, "note": "--tp-size"}'
    flags = parse_launch_line([f"{flag}={text}", "--tp-size=2"])
    assert flags.number("tp-size") == 2
    assert text in (flags.text(flag[2:]), *(aside.partition(" ")[2] for aside in flags.set_aside))


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
