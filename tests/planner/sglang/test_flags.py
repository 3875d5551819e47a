"""Launch lines as people paste them, parsed to flags and back."""

import pytest

from pipeline.errors import PlanError
from pipeline.planner.sglang.flags import (
    LaunchFlags,
    graphs_of,
    parse_launch_line,
    renaming_of,
    spelled_for,
)


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
    flags = parse_launch_line([text])
    assert (flags.model_path, flags.number("tp-size")) == ("Q/M", 2)
    assert flags.stray == ("python", "-m", "sglang.launch_server")
    assert parse_launch_line(["--tp 2 \\\r\n --dp 2"]).number("dp-size") == 2
    assert parse_launch_line(["--model-path", "Q/M", "\\", "--tp", "2"]).number("tp-size") == 2


def test_environment_assignments_are_kept() -> None:
    flags = parse("export A=x=y _b2= SGLANG_ENABLE_SPEC_V2=1 sglang serve Q/M --tp 2 C=3")
    assert flags.env == (("A", "x=y"), ("_b2", ""), ("SGLANG_ENABLE_SPEC_V2", "1"))
    assert (flags.variable("A"), flags.variable("C"), flags.variable("C", "d")) == ("x=y", "", "d")
    assert flags.model_path == "Q/M"


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), ("true", True), ("YES", True), ("y", True), ("0", False), ("off", False)],
)
def test_environment_switch_is_read_as_sglang_reads_it(value: str, on: bool) -> None:
    flags = parse(f"S={value} E= python -m sglang.launch_server")
    assert flags.switched_on("S") is on
    assert flags.switched_on("S", default=True) is on
    # An empty or absent switch has its default.
    assert not flags.switched_on("E")
    assert flags.switched_on("E", default=True)
    assert not flags.switched_on("OTHER")


def test_old_and_new_spellings_are_one_flag() -> None:
    old = parse("--mamba-scheduler-strategy extra_buffer --cuda-graph-max-bs 8")
    new = "--mamba-radix-cache-strategy extra_buffer --cuda-graph-max-bs-decode 8"
    assert old == parse(new)


def test_json_value_stays_one_value() -> None:
    line = ["--deepep-config", '{"normal_dispatch": {"num_sms": 96}}', "--tp", "2"]
    assert parse_launch_line(line).text("deepep-config").startswith("{")


def test_unknown_flag_is_set_aside_with_its_values() -> None:
    flags = parse("--tp 2 --no-such-flag a b --page-size 64")
    assert flags.set_aside == ("--no-such-flag a b",)
    assert flags.number("page-size") == 64
    assert parse("--nor-this=x y").set_aside == ("--nor-this x",)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("dtyp", "dtype"),
        ("tensor-parallel", "tp-size"),
        ("speculative-draft-model", "speculative-draft-model-path"),
        ("moe-a2a", "moe-a2a-backend"),
        # argparse would take three letters too; a pasted line with them is more likely mistyped.
        ("dty", None),
        ("page-size-", None),
        ("disable-c", None),
    ],
)
def test_prefix_that_fits_one_flag_alone_is_that_flag(word: str, key: str | None) -> None:
    flags = parse(f"--{word} 2")
    if key is None:
        assert flags.set_aside == (f"--{word} 2",)
    else:
        assert flags.values == ((key, ("2",)),)


def test_words_that_belong_to_no_flag_are_stray() -> None:
    flags = parse("sglang serve Q/M --tp 2 x -- --page-size 1 -y 3 --disable-radix-cache z")
    # "serve" is followed by one model; SGLang's parser would refuse a second one.
    assert flags.model_path == "Q/M"
    assert parse("--tp 2 x -- --page-size 1 -y 3").stray == ("x", "--", "-y", "3")
    assert parse("python -m sglang.launch_server --tp 2").stray == (
        "python",
        "-m",
        "sglang.launch_server",
    )


def test_last_value_of_a_flag_counts() -> None:
    flags = parse("--tp 1 --tp 2 --cuda-graph-bs 1 --cuda-graph-bs 2 4 --enable-metrics")
    assert (flags.text("tp-size"), flags.number("tp-size")) == ("2", 2)
    assert flags.words("cuda-graph-bs-decode") == ("2", "4")
    assert flags.text("cuda-graph-bs-decode") == "4"
    assert (flags.text("enable-metrics", "d"), flags.words("page-size")) == ("d", ())
    assert (flags.number("page-size"), flags.fraction("hicache-ratio")) == (None, None)
    assert flags.text("page-size", "d") == "d"


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--chunked-prefill-size -1", (("chunked-prefill-size", ("-1",)),)),
        ("--random-seed -1.5", (("random-seed", ("-1.5",)),)),
        ("--disable-radix-cache=x", (("disable-radix-cache", ()),)),
        ("--disable-radix-cache --tp +2", (("disable-radix-cache", ()), ("tp-size", ("+2",)))),
        ("--hicache-ratio .5", (("hicache-ratio", (".5",)),)),
        ("--hicache-ratio 5.", (("hicache-ratio", ("5.",)),)),
        ("--cuda-graph-bs 1 2 --tp 2", (("cuda-graph-bs-decode", ("1", "2")), ("tp-size", ("2",)))),
    ],
)
def test_values_of_a_flag(line: str, values: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    flags = parse(line)
    assert (flags.values, flags.stray) == (values, ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp two", "argument --tp-size: invalid int value: 'two'"),
        ("--mem-fraction-static lots", "invalid float value: 'lots'"),
        ("--tp", "expected one argument"),
        ("--tp --page-size 1", "expected one argument"),
        ("--tp=", "argument --tp-size: expected one argument"),
        ("--tp 1.5", "argument --tp-size: invalid int value: '1.5'"),
        ("--hicache-ratio 1e5", "invalid float value: '1e5'"),
        ("--served-model-name -x", "argument --served-model-name: expected one argument"),
        ("--cuda-graph-bs", "expected at least one argument"),
    ],
)
def test_wrong_value_is_refused_as_argparse_would(line: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse(line)


def test_argv_parses_to_the_same_flags() -> None:
    line = "--model-path Q/M --tp 2 --disable-radix-cache --cuda-graph-bs 1 2 4 --page-size 64"
    flags = parse(line)
    assert parse_launch_line(flags.argv()) == flags


def test_changed_line_keeps_the_rest() -> None:
    flags = parse("--model-path Q/M --tp 2 --disable-radix-cache")
    other = flags.changed({"tp-size": "4", "disable-radix-cache": None, "enable-metrics": ""})
    assert other.number("tp-size") == 4
    assert not other.has("disable-radix-cache")
    assert other.values == (("tp-size", ("4",)), ("enable-metrics", ()))
    assert other.model_path == "Q/M"
    assert parse("A=1 --no-such 2 x").changed({}) == parse("A=1 --no-such 2 x")
    assert parse("--tp 2 x").changed({}).stray == ()


def test_line_with_an_open_quote_is_refused() -> None:
    with pytest.raises(PlanError, match="the launch line cannot be read: No closing quotation"):
        parse_launch_line(["--tp 2 --model 'x"])


# --- names by release -------------------------------------------------------------------------


def test_arguments_are_spelled_as_an_older_release_knows_them() -> None:
    words = ("--mamba-radix-cache-strategy", "extra_buffer", "--cuda-graph-max-bs-decode", "16")
    assert spelled_for(words, (0, 5, 23)) == words
    assert spelled_for(words, (0, 5, 14)) == words
    assert spelled_for(words, (0, 5, 12)) == (
        "--mamba-scheduler-strategy",
        "extra_buffer",
        "--cuda-graph-max-bs",
        "16",
    )


def test_renaming_is_known_by_either_name() -> None:
    assert renaming_of("nsa-prefill-backend") == (
        "--nsa-prefill-backend is called --dsa-prefill-backend since SGLang 0.5.14; "
        "0.5.21 no longer knows it"
    )
    assert renaming_of("cuda-graph-bs-decode") == (
        "--cuda-graph-bs-decode is known since SGLang 0.5.14; before it is called --cuda-graph-bs"
    )
    assert renaming_of("mem-fraction-static") is None


# -- text as people have it

SCRIPT = """\
#!/bin/bash
set -euo pipefail
MODEL=Qwen/Qwen3-8B
TP=4
export MEM=0.${PERCENT:-85}
exec python3 -m sglang.launch_server --model-path "$MODEL" --tp ${TP} \\
  --mem-fraction-static $MEM --context-length $UNKNOWN_HERE_ONLY_ON_THE_HOST
"""
DOCKER = (
    "sudo docker run --gpus all --shm-size 32g -e HF_TOKEN=secret --env SGLANG_ENABLE_SPEC_V2=1 "
    "--env=NCCL_DEBUG=INFO -v /models:/models lmsysorg/sglang:v0.5.23 python3 -m "
    "sglang.launch_server --model-path Qwen/Qwen3-8B --tp-size 2"
)


def test_variables_that_a_script_sets_are_put_in() -> None:
    script = SCRIPT.replace(" --context-length $UNKNOWN_HERE_ONLY_ON_THE_HOST", "")
    flags = parse_launch_line([script])
    assert flags.model_path == "Qwen/Qwen3-8B"
    assert flags.number("tp-size") == 4
    assert dict(flags.values)["mem-fraction-static"] == ("0.85",)
    assert flags.set_aside == ()


def test_variable_that_nobody_sets_is_shown_as_it_is() -> None:
    with pytest.raises(PlanError, match=r"--context-length: .*\$UNKNOWN_HERE_ONLY_ON_THE_HOST"):
        parse_launch_line([SCRIPT])


def test_environment_of_docker_is_read_and_its_own_options_are_not_sglangs() -> None:
    for line in ([DOCKER], DOCKER.split()):
        flags = parse_launch_line(line)
        assert (flags.model_path, flags.number("tp-size")) == ("Qwen/Qwen3-8B", 2)
        assert dict(flags.env) == {
            "HF_TOKEN": "secret", "SGLANG_ENABLE_SPEC_V2": "1", "NCCL_DEBUG": "INFO",
        }  # fmt: skip
        assert flags.set_aside == ()


# -- lines as people paste them

_COMMAND = "python3 -m sglang.launch_server --model-path a/b --tp 2"


@pytest.mark.parametrize(
    "text",
    [
        f"CUDA_VISIBLE_DEVICES=0 nohup {_COMMAND} > server.log 2>&1 &",
        f"{_COMMAND} 2> err.log | tee --append log.txt",
        f"{_COMMAND} && curl --retry 9 localhost:30000/health",
        f"MODEL=a/b; TP=2; {_COMMAND.replace('a/b', '$MODEL').replace('2', '$TP')}",
        f"ssh node1 'cd /x && {_COMMAND}'",
        f'bash -c "{_COMMAND}"',
        'set -e\nARGS="--tp 2 --model-path a/b"\npython3 -m sglang.launch_server $ARGS',
        (
            "ARGS=(\n  --model-path a/b  # the model\n  --tp 2\n)\n"
            'python3 -m sglang.launch_server "${ARGS[@]}"'
        ),
    ],
)
def test_shell_around_a_command_is_not_its_own(text: str) -> None:
    flags = parse_launch_line([text])
    assert (flags.model_path, flags.values) == ("a/b", (("tp-size", ("2",)),))
    assert flags.set_aside == ()


# -- CUDA graphs


@pytest.mark.parametrize(
    ("line", "backend", "max_size", "sizes"),
    [
        ("", "", None, ()),
        ("--cuda-graph-max-bs-prefill 2048", "", 2048, ()),
        ("--piecewise-cuda-graph-max-tokens 2048", "", 2048, ()),
        ("--cuda-graph-bs-prefill 4 8 16", "", None, (4, 8, 16)),
        ("--disable-prefill-cuda-graph", "disabled", None, ()),
        ("--disable-cuda-graph", "disabled", None, ()),
        # the backend of a phase precedes the switches
        ("--disable-cuda-graph --cuda-graph-backend-prefill full", "full", None, ()),
        # and the JSON precedes the flags
        ('--cuda-graph-config {"prefill":{"max_bs":64}} --cuda-graph-max-bs-prefill 8', "", 64, ()),
        ('--cuda-graph-config {"prefill":{"backend":"disabled","bs":[1,2]}}', "disabled", None,
         (1, 2)),
        ('--cuda-graph-config {"decode":{"max_bs":64}}', "", None, ()),
    ],
)  # fmt: skip
def test_graphs_of_prefill_are_those_of_the_line(
    line: str, backend: str, max_size: int | None, sizes: tuple[int, ...]
) -> None:
    graphs = graphs_of(parse_launch_line(line.split()), "prefill")
    assert (graphs.backend, graphs.max_size, graphs.sizes) == (backend, max_size, sizes)


def test_graph_config_that_is_no_json_is_named() -> None:
    flags = parse_launch_line(["--cuda-graph-config", "{oops"])
    with pytest.raises(PlanError, match=r"--cuda-graph-config: expected a JSON object, found '\{o"):
        graphs_of(flags, "prefill")
