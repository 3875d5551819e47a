"""`python -m jobs.plan`, both forms, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.plan import main
from pipeline.planner.rate.ranking import UNBACKED_SHARE

ROOT = Path(__file__).resolve().parents[2]
MTP = [
    "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3",
    "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
]  # fmt: skip
QWEN = [
    "python", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3.6-27B",
    "--mem-fraction-static", "0.80", *MTP,
]  # fmt: skip
KEYS = {
    "verdict", "stage", "message", "gpu_total_gib", "free_before_load_gib", "weights_gib",
    "draft_weights_gib", "mem_fraction_static", "kv_bytes_per_token", "max_total_num_tokens",
    "kv_gib", "state_slots", "state_gib", "intermediate_state_gib", "max_running_requests",
    "requests_at_expected_length", "context_length", "chunked_prefill_size", "cuda_graph_max_bs",
    "slack_gib", "limited_by", "uncertainty", "assumptions", "advice", "release_profile",
}  # fmt: skip

RUN = """\
prompts: {path: prompts.parquet}
model: Qwen/Qwen3.6-27B
output: {folder: out}
hardware:
  - {gpu: rtx-pro-6000, count: 2}
lengths: {prompt_tokens_mean: 300, output_tokens_mean: 6000}
"""

LOG = """\
[2026-11-01 10:00:00 TP0] Memory baseline taken. mem usage=0.00 GB
[2026-11-01 10:00:01 TP0] Load weight begin. avail mem=93.80 GB
[2026-11-01 10:01:00 TP0] Load weight end. elapsed=59.0 s, type=Qwen3_5ForConditionalGeneration, \
avail mem=42.50 GB, mem usage=51.30 GB.
[2026-11-01 10:01:01 TP0] Load weight begin. avail mem=42.50 GB
[2026-11-01 10:01:09 TP0] Load weight end. elapsed=8.0 s, type=Qwen3_5MTP, avail mem=36.95 GB, \
mem usage=5.55 GB.
"""


def printed(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    """What the command prints when all is well."""
    assert main(argv) == status
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that the command prints when the user can mend what is wrong."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_json_has_every_key_of_the_interface(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys, "--gpu", "rtx-pro-6000", "--sglang-version", "0.5.12", "--json", "--", *QWEN,
        status=1,
    )  # fmt: skip
    made = json.loads(out)
    assert set(made) >= KEYS
    # the automatic strategy of 0.5.12 refuses MTP beside the prefix cache
    assert made["verdict"] == "does_not_fit"
    assert "no_buffer" in made["message"]
    # what would follow if the strategy it asks for were given: 48 x 4 x 0.14337 GiB of states
    assert made["stage"] == "state_pool"
    assert "Not enough memory" in made["message"].splitlines()[1]
    assert made["intermediate_state_gib"] == pytest.approx(27.53, abs=0.01)
    assert made["max_running_requests"] == 0
    assert made["advice"][0]["value"] == "extra_buffer"


def test_json_of_a_launch_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys, "--gpu", "RTX PRO 6000 Blackwell", "--sglang-version", "0.5.23", "--json", "--",
        *QWEN,
    )  # fmt: skip
    made = json.loads(out)
    assert set(made) >= KEYS
    assert made["verdict"] == "fits"
    assert made["stage"] is None
    assert (made["state_slots"], made["max_running_requests"]) == (31, 6)
    charged = sum(made["slack_charged_gib"].values())
    assert made["slack_left_gib"] == pytest.approx(made["slack_gib"] - charged, abs=0.02)
    assert sum(made["budget_gib"].values()) == pytest.approx(made["gpu_total_gib"], abs=0.02)


def test_the_table_adds_up_and_ends_with_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--gpu", "rtx-pro-6000", "--", *QWEN)
    for text in ("weights", "KV pool", "verify states", "left over", "card", "94.97  GiB", "fits"):
        assert text in out
    assert "Load weight begin. avail mem=94.19 GB" in out
    assert "max_total_num_tokens=" in out


def test_memory_may_stand_in_for_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys, "--gpu-memory-gib", "47.5", "--json", "--", "--model-path", "Qwen/Qwen3-8B"
    )
    assert json.loads(out)["gpu_total_gib"] == 47.5


def test_a_config_file_and_a_told_format(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = ("--gpu", "h100", "--json", "--model-config", str(tmp_path))
    plain = json.loads(printed(capsys, *base, "--", "--tp", "1"))
    small = json.loads(printed(capsys, *base, "--weights-format", "int4-awq", "--", "--tp", "1"))
    # 8.03e9 parameters in bf16; 6.98e9 of them in int4 of groups of 128
    assert plain["weights_gib"] == pytest.approx(14.96 + 0.125, abs=0.02)
    assert small["weights_gib"] == pytest.approx(
        (1.05e9 * 2 + 6.98e9 * (0.5 + 2.5 / 128)) / 2**30 + 0.125, abs=0.05
    )


def test_an_index_gives_exact_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": 16 * 2**30}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    base = ("--gpu", "h100", "--json", "--model-config", str(tmp_path))
    assert json.loads(printed(capsys, *base, "--", "--tp", "1"))["weights_gib"] == 16.125


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "h100"], "give a launch line after --"),
        (["--", "--model-path", "Qwen/Qwen3-8B"], "name the card"),
        (["--gpu", "voodoo", "--", "--model-path", "Qwen/Qwen3-8B"], "unknown GPU 'voodoo'"),
        (["--gpu", "h100", "--", "--tp", "2"], "names no model"),
        (["--gpu", "h100", "--", "--model-path", "Qwen/Qwen3-8B", "--tp", "x"], "invalid int"),
        (["--gpu", "h100", "--model-config", "none.json", "--", "--tp", "1"], "none.json"),
        (["--gpu", "h100", "run.yaml", "--", "--tp", "1"], "not both"),
        (["none.yaml"], "cannot read the run file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refused(capsys, *argv)


def test_a_config_that_is_not_json_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "config.json"
    bad.write_text("{")
    err = refused(capsys, "--gpu", "h100", "--model-config", str(bad), "--", "--tp", "1")
    assert "is not JSON" in err


# --- calibration ------------------------------------------------------------------------------


def test_a_cut_log_calibrates_and_is_kept_for_later(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log, kept = tmp_path / "engine.log", tmp_path / "kept.json"
    log.write_text(LOG)
    base = ("--gpu", "rtx-pro-6000", "--sglang-version", "0.5.23", "--json")
    out = printed(
        capsys, *base, "--calibrate-from", str(log), "--save-calibration", str(kept), "--", *QWEN
    )
    made = json.loads(out)
    assert made["free_before_load_gib"] == pytest.approx(93.80, abs=0.001)
    assert made["weights_gib"] == pytest.approx(51.30, abs=0.001)
    assert made["draft_weights_gib"] == pytest.approx(5.55, abs=0.001)
    off = {item["name"]: item["percent"] for item in made["differences"]}
    assert off["weights_gib"] == pytest.approx((51.14 / 51.30 - 1) * 100, abs=0.05)
    # rest = 93.80 x 0.8 - 51.30 - 5.55 - 0.098 = 18.09; x 0.9/1.9 = 8.57;
    # (8.57 - 0.717) // 0.258 = 30 slots
    assert made["state_slots"] == 30
    later = json.loads(printed(capsys, *base, "--calibration", str(kept), "--", *QWEN))
    assert later["max_total_num_tokens"] == made["max_total_num_tokens"]


def test_a_calibration_of_another_card_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"model": "Qwen/Qwen3.6-27B", "gpu": "H200", "release": "0.5.23"}))
    err = refused(capsys, "--gpu", "rtx-pro-6000", "--calibration", str(kept), "--", *QWEN)
    assert "the calibration is for gpu 'H200'" in err


def test_a_log_without_launch_lines_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    log.write_text("hello\n")
    err = refused(capsys, "--gpu", "rtx-pro-6000", "--calibrate-from", str(log), "--", *QWEN)
    assert "no launch line of SGLang" in err


# --- form 2 -----------------------------------------------------------------------------------


def test_a_run_file_gives_plans_best_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    plans = json.loads(printed(capsys, str(run), "--json"))
    # One kind of card in one number: the dearest token is the slowest.
    rates = [plan["tokens_per_s"] for plan in plans]
    # No reading has stages, so that these rank by less.
    ranked = [
        rate * (UNBACKED_SHARE if any("--pp-size" in word for word in plan["argv"]) else 1)
        for rate, plan in zip(rates, plans, strict=True)
    ]
    assert ranked == sorted(ranked, reverse=True)
    assert [plan["tokens_per_s_rank"] for plan in plans] == [
        1 + sum(other > rate for other in rates) for rate in rates
    ]
    assert all(plan["verdict"] == "fits" and set(plan) >= KEYS for plan in plans)
    assert plans[0]["argv"][:2] == ["--model-path", "Qwen/Qwen3.6-27B"]
    text = printed(capsys, str(run), "--most", "2")
    assert "the best, in full" in text


def test_a_run_file_without_hardware_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN.replace("hardware:\n  - {gpu: rtx-pro-6000, count: 2}\n", ""))
    assert "no hardware section" in refused(capsys, str(run))


def test_a_run_file_may_be_overridden(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    out = printed(capsys, str(run), "--json", "--set", "planner.allow_mtp=false")
    assert "--speculative-algorithm" not in out


# --- the process ------------------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, runpy; sys.argv = ['plan', '--help']\n"
        "try: runpy.run_module('jobs.plan', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "bad = {'ray', 'datasets', 'pydantic', 'pyarrow', 'yaml'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "RUN.yaml" in done.stdout


def test_form_1_needs_neither_ray_nor_pydantic() -> None:
    code = (
        "import sys; from jobs.plan import main\n"
        "assert main(['--gpu', 'h200', '--', '--model-path', 'Qwen/Qwen3-8B']) == 0\n"
        "bad = {'ray', 'datasets', 'pydantic', 'pyarrow', 'yaml'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        [
            "--gpu",
            "h100",
            "--",
            'sglang serve --model-path "Qwen/Qwen3-8B --tp 2',
        ],
        ["--gpu-memory-gib", "inf", "--", "--model-path", "Qwen/Qwen3-8B"],
    ],
)
def test_line_that_cannot_be_read_is_one_line(
    capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    assert main(line) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_config_override_of_the_launch_line_is_applied(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--gpu", "h100", "--json", "--", "--model-path", "Qwen/Qwen3-8B"]
    longer = ["--json-model-override-args", '{"max_position_embeddings": 131072}']
    made = json.loads(printed(capsys, *line, *longer, "--context-length", "131072"))
    assert (made["verdict"], made["context_length"]) == ("fits", 131_072)
    assert main([*line, "--json-model-override-args", "{bad"]) == 2
    assert "--json-model-override-args is not JSON" in capsys.readouterr().err
    assert main([*line, "--json-model-override-args", "[1]"]) == 2
    assert "--json-model-override-args is not a JSON object" in capsys.readouterr().err


def test_unknown_card_may_be_given_by_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu", "voodoo", "--", "--model-path", "Qwen/Qwen3-8B"]) == 2
    assert "or give its memory with --gpu-memory-gib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--most", "0"], "--most: found 0"),
        (["--prompt-tokens", "-5"], "--prompt-tokens: found -5"),
        (["--output-tokens", "0"], "--output-tokens: found 0"),
        (
            ["--set", "hardware=[{gpu: b200, usd_per_gpu_hour: 1}, {gpu: b200, count: 4}]"],
            "B200 has two prices, usd_per_gpu_hour 1.0 and None",
        ),
    ],
)
def test_mistake_in_a_search_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main([str(ROOT / "jobs" / "runs" / "qwen3.6-27b.yaml"), *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
