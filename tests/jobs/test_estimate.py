"""`python -m jobs.estimate` as a person runs it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.estimate import main
from pipeline.planner.cards import gpu_keys
from pipeline.planner.estimate.figures import two_figures

ROOT = Path(__file__).resolve().parents[2]
RUN = """\
prompts: {path: PROMPTS}
model: Qwen/Qwen3.6-27B
output: {folder: out}
sampling: {max_tokens: 32768}
lengths: {prompt_tokens_mean: 512, output_tokens_mean: 2529, output_tokens_cv: 1.2}
"""
COUNT = ("--completions", "902087")


def run_file(tmp_path: Path, text: str = RUN) -> str:
    """A run file over three prompts."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "tell me of the sea " * n, "written": 40 * n} for n in (1, 2, 3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tmp_path / "run.yaml"
    run.write_text(text.replace("PROMPTS", str(prompts)))
    return str(run)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the command prints when all is well."""
    assert main(argv) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a mistake gets."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--html", "page.html"),
        ("--completions", "5"),
        ("--set", "model=x"),
        ("--lengths-from", "x"),
        ("--calibration", "x"),
    ],
)
def test_option_that_an_update_does_not_read_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, value: str
) -> None:
    said = refused(capsys, "--update-from", str(tmp_path), flag, value)
    assert said.startswith(f"estimate: {flag}: not with --update-from")


@pytest.mark.parametrize("command", [(*COUNT, "--hardware", "b200:7"), None])
def test_reader_that_has_had_enough_gets_no_traceback(
    tmp_path: Path, command: tuple[str, ...] | None
) -> None:
    words = ["jobs.plan", "--gpu", "b200", "--", "--model-path", "Qwen/Qwen3.6-27B"]
    if command is not None:
        words = ["jobs.estimate", run_file(tmp_path), *command]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", *words], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_options_come_cheapest_first_and_add_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--hardware", "b200:7", "--hardware", "rtx-pro-6000:4")
    found = json.loads(printed(capsys, run_file(tmp_path), *COUNT, *options, "--json"))
    assert {option["option"] for option in found["options"]} == {
        "7 x B200", "4 x RTX PRO 6000 Blackwell",
    }  # fmt: skip
    prices = [option["bills"][0]["usd_per_million_tokens"]["p50"] for option in found["options"]]
    assert prices == sorted(prices)
    for option in found["options"]:
        days, hours = option["days"], option["gpu_hours"]
        assert days["p10"] < days["p50"] < days["p90"]
        assert hours["p50"] == pytest.approx(days["p50"] * 24 * option["num_gpus"])
        shares = [item["variance_share"] for item in option["assumptions"]]
        assert sum(shares) == pytest.approx(1)
        assert shares == sorted(shares, reverse=True)
        (plan,) = option["plans"]
        assert plan["running_requests"] <= plan["cap_requests"]
        assert plan["limited_by"] == "state slots and KV pool"
    assert len(found["assumptions"]) == 3


def test_own_price_replaces_the_listed_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--hardware", "b200:7", "--price", "b200=2.5/1.0")
    found = json.loads(printed(capsys, run_file(tmp_path), *COUNT, *options, "--json"))
    own, spot = found["options"][0]["bills"]
    assert (own["price"]["kind"], own["price"]["usd_per_gpu_hour"]) == ("own", 2.5)
    assert (spot["price"]["kind"], spot["price"]["usd_per_gpu_hour"]) == ("spot", 1.0)
    assert not own["price"]["stale"]


def test_own_launch_line_is_estimated_beside_the_best_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = (run_file(tmp_path), *COUNT, "--hardware", "rtx-pro-6000:4")
    line = ("--", "python", "-m", "sglang.launch_server", "--mem-fraction-static", "0.80")
    text = printed(capsys, *words, *line)
    shown = re.search(r"as you launch it: ([\d.]+) days.*as planned: ([\d.]+) days", text)
    assert shown is not None
    (launched,) = json.loads(printed(capsys, *words, "--json", *line))["as_launched"]
    assert two_figures(launched["estimate"]["days"]["p50"]) == shown[1]
    assert float(shown[1]) > float(shown[2])
    assert json.loads(printed(capsys, *words, "--json"))["as_launched"] == []


@pytest.mark.parametrize(
    ("own", "line", "said"),
    [
        ((), ("--model-path", "Qwen/Qwen3-8B"), "the launch line has --model-path Qwen/Qwen3-8B"),
        (("--point",), ("--tp", "2"), "a launch line after -- is estimated for a run file alone"),
        ((), ("--tp", "two"), "argument --tp-size: invalid int value: 'two'"),
    ],
)
def test_launch_line_that_cannot_be_estimated_is_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    own: tuple[str, ...],
    line: tuple[str, ...],
    said: str,
) -> None:
    words = (run_file(tmp_path), *COUNT, "--hardware", "b200:1")
    assert said in refused(capsys, *words, *own, "--", *line)


def test_mixed_cards_are_fed_from_one_queue(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = (
        "--hardware", "rtx-pro-6000:4", "--hardware", "b200:2",
        "--hardware", "rtx-pro-6000:4+b200:2",
    )  # fmt: skip
    found = json.loads(printed(capsys, run_file(tmp_path), *COUNT, *options, "--json"))
    rates = {option["option"]: option["tokens_per_s"]["p50"] for option in found["options"]}
    alone = rates["4 x RTX PRO 6000 Blackwell"] + rates["2 x B200"]
    assert rates["4 x RTX PRO 6000 Blackwell + 2 x B200"] == pytest.approx(alone, rel=0.03)


def test_each_kind_of_card_loses_its_own_time_on_spot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = (
        "--hardware", "rtx-pro-6000:4", "--hardware", "b200:4",
        "--hardware", "rtx-pro-6000:4+b200:4", "--hardware", "b200:4+rtx-pro-6000:4",
        "--price", "rtx-pro-6000=/1", "--price", "b200=/3",
    )  # fmt: skip
    found = json.loads(printed(capsys, run_file(tmp_path), *COUNT, *options, "--json"))
    bills = {option["option"]: option["bills"][0] for option in found["options"]}
    lost = {
        name: bill["preemption_usd"] / (bill["usd"]["p50"] - bill["preemption_usd"])
        for name, bill in bills.items()
    }
    slow, quick = lost["4 x RTX PRO 6000 Blackwell"], lost["4 x B200"]
    mixed = lost["4 x RTX PRO 6000 Blackwell + 4 x B200"]
    assert slow != pytest.approx(quick, rel=0.1)
    # As many cards of each; those at three dollars weigh three times those at one.
    assert mixed == pytest.approx(slow / 4 + 3 * quick / 4)
    assert lost["4 x B200 + 4 x RTX PRO 6000 Blackwell"] == pytest.approx(mixed)


def test_release_that_is_none_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = (*COUNT, "--hardware", "b200:1", "--sglang-version")
    assert "'banana' names no release" in printed(capsys, run_file(tmp_path), *options, "banana")
    assert "names no release" not in printed(capsys, run_file(tmp_path), *options, "0.5.23")


def test_prompts_are_counted_where_no_mean_is_stated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_file(tmp_path, RUN.replace("prompt_tokens_mean: 512, ", ""))
    found = json.loads(printed(capsys, run, "--hardware", "b200:1", "--json"))
    assert found["num_completions"] == 3
    assert found["prompt_lengths"]["sampled"] == 3
    # "tell me of the sea " is 19 bytes; 4 bytes a token and 5 a message: 10, 15 and 20.
    assert found["prompt_lengths"]["mean_tokens"] == pytest.approx(15, abs=0.5)


def test_lengths_come_from_a_column_or_a_pilot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = "lengths: {prompt_tokens_mean: 512, output_tokens_column: written}"
    text = RUN[: RUN.index("lengths:")] + lengths
    run = run_file(tmp_path, text)
    found = json.loads(printed(capsys, run, "--hardware", "b200:1", "--json"))
    assert found["output_lengths"]["mean_tokens"] == 80  # 40, 80 and 120
    turns = [[{"completion_tokens": tokens}] for tokens in (100, 200, 600)]
    (tmp_path / "pilot" / "data").mkdir(parents=True)
    pq.write_table(pa.table({"turns": turns}), tmp_path / "pilot" / "data" / "part.parquet")
    pilot = ("--lengths-from", str(tmp_path / "pilot"))
    found = json.loads(printed(capsys, run, "--hardware", "b200:1", "--json", *pilot))
    assert found["output_lengths"]["mean_tokens"] == 300
    assert "pilot" in found["output_lengths"]["source"]


@pytest.mark.parametrize("turns", [["a", "b"], [[1, 2], [3]], [[{"tokens": 3}]], [None]])
def test_pilot_without_turns_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, turns: list[object]
) -> None:
    pq.write_table(pa.table({"turns": turns}), tmp_path / "part.parquet")
    pilot = ("--hardware", "b200:1", "--lengths-from", str(tmp_path))
    err = refused(capsys, run_file(tmp_path), *COUNT, *pilot)
    assert f"{tmp_path}/part.parquet: column turns: found " in err
    assert err.count("\n") == 1


def pilot_lengths(
    capsys: pytest.CaptureFixture[str], folder: Path, *turns: tuple[int, str]
) -> dict[str, Any]:
    rows = [[{"completion_tokens": tokens, "finish_reason": why}] for tokens, why in turns]
    pq.write_table(pa.table({"turns": rows}), folder / "part.parquet")
    pilot = ("--hardware", "b200:1", "--lengths-from", str(folder), "--json")
    found = json.loads(printed(capsys, run_file(folder), *COUNT, *pilot))
    return dict(found["output_lengths"])


def test_pilot_that_a_lower_limit_cut_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    some = pilot_lengths(capsys, tmp_path, *[(40, "stop")] * 20, *[(40, "length")] * 10)
    assert "10 of 30 were cut at the pilot's lower limit" in some["source"]
    whole = pilot_lengths(capsys, tmp_path, *[(40, "stop")] * 2)
    assert "lower limit" not in whole["source"]


def test_pilot_whose_rows_are_nearly_all_cut_knows_little(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    all_cut = pilot_lengths(capsys, tmp_path, *[(256, "length")] * 400)
    # Nothing is known but the run file's mean of 2,529 and its error.
    assert all_cut["mean_tokens"] == pytest.approx(2529, rel=0.02)
    assert all_cut["mean_relative_error"] == pytest.approx(0.10, rel=0.05)
    assert "were cut" in all_cut["source"]
    few_ended = [(60 + 10 * place, "stop") for place in range(12)]
    nearly = pilot_lengths(capsys, tmp_path, *few_ended, *[(256, "length")] * 388)
    # The mean of all lengths as they were cut is 252 ± 0.6 %.
    assert nearly["mean_tokens"] > 1000
    assert nearly["mean_relative_error"] > 0.05


def test_thinking_decides_the_prior(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = RUN[: RUN.index("lengths:")] + "lengths: {prompt_tokens_mean: 512}\n"

    def mean(thinking: str) -> float:
        run = run_file(tmp_path, text + f"thinking: {thinking}\n")
        out = printed(capsys, run, *COUNT, "--hardware", "b200:1", "--json")
        return float(json.loads(out)["output_lengths"]["mean_tokens"])

    assert mean("true") > 4 * mean("false")


def test_text_and_page_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "cost.html"
    out = printed(capsys, run_file(tmp_path), *COUNT, "--hardware", "b200:7", "--html", str(page))
    assert "7 x B200" in out
    assert "what widens the band most" in out
    assert "<title>" in page.read_text()


def test_catalogue_is_ranked_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--hardware", "all", "--gpus", "1", "--json")
    found = json.loads(printed(capsys, run_file(tmp_path), *COUNT, *options))
    names = {item["option"] for item in found["options"]}
    unfit = {item["option"]: item["reason"] for item in found["unfit"]}
    assert {"1 x B200", "1 x RTX PRO 6000 Blackwell"} <= names
    assert "no plan fits" in unfit["1 x L4"]
    assert len(names) + len(unfit) == len(gpu_keys())


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--hardware", "b2000:7"), "unknown GPU 'b2000'; the nearest: b200"),
        (("--hardware", "b200"), "expected GPU:COUNT"),
        (("--hardware", "b200:0"), "expected GPU:COUNT"),
        (("--hardware", "b200:1", "--hardware", "B200:1"), "is listed twice"),
        (("--hardware", "b200:1", "--price", "b200=cheap"), "expected GPU=USD"),
        (("--hardware", "b200:1", "--price", "b200=-1"), "expected GPU=USD"),
        (("--hardware", "b200:1", "--price", "h100=2"), "--price h100=2: no option has H100 80GB"),
        (("--hardware", "b200:1", "--price", "b200=2", "--price", "B200=3"), "priced twice"),
        (("--hardware", "b200:7,h100:1"), "--hardware b200:7,h100:1: expected GPU:COUNT"),
        (("--hardware", "b200:7+"), "--hardware b200:7+: expected GPU:COUNT"),
        (("--hardware", "b200:9999999"), "--hardware b200:9999999: found 9999999 cards"),
        (("--gpus", "9999999", "--hardware", "all"), "--gpus: found 9999999"),
        (
            ("--set", "hardware=[{gpu: b200, usd_per_gpu_hour: 2}, {gpu: B200}]"),
            "1 x B200 is listed twice",
        ),
        (("--set", "hardware=[{gpu: voodoo, memory_gib: 80}]"), "unknown GPU 'voodoo'"),
        (("--hardware", "b200:1", "--set", "lengths.prompt_tokens_mean=.inf"), "finite number"),
        (("--set", "hardware=[{gpu: b200, usd_per_gpu_hour: .inf}]"), "finite number"),
        (("--hardware", "b200:1", "--completions", "0"), "--completions: found 0"),
        (("--hardware", "all", "--gpus", "0"), "--gpus: found 0"),
        (("--hardware", "b200:1", "--lengths-from", "/nowhere"), "no parquet file"),
        (("--hardware", "b200:1", "--set", "lengths.output_tokens_mean=40000"), "40,000"),
        (("--hardware", "b200:1", "--html", "/nowhere/x.html"), "cannot write"),
        ((), "name an option with --hardware"),
    ],
)  # fmt: skip
def test_mistake_gets_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: tuple[str, ...], said: str
) -> None:
    completions = () if "--completions" in argv else COUNT
    err = refused(capsys, run_file(tmp_path), *completions, *argv)
    assert said in err
    assert "--gpu-memory-gib" not in err  # a flag of jobs.plan alone
    assert err.count("\n") == 1


def test_model_that_fits_nowhere_says_why_for_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_file(tmp_path, RUN.replace("Qwen/Qwen3.6-27B", "deepseek-ai/DeepSeek-V3"))
    err = refused(capsys, run, *COUNT, "--hardware", "l4:8", "--hardware", "rtx-4090:4")
    assert "fits on no option" in err
    assert "8 x L4: " in err
    assert "4 x GeForce RTX 4090: " in err


def test_empty_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = run_file(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("")
    assert "no row" in refused(capsys, run, "--hardware", "b200:1")


def test_column_that_holds_no_number_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = "lengths: {prompt_tokens_mean: 512, output_tokens_column: prompt}"
    run = run_file(tmp_path, RUN[: RUN.index("lengths:")] + lengths)
    err = refused(capsys, run, *COUNT, "--hardware", "b200:1")
    assert "row 1, column prompt: found 'tell me of the sea '" in err


def test_unpriced_card_is_ranked_last(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--hardware", "gb300:4", "--hardware", "b200:4", "--json")
    found = json.loads(printed(capsys, run_file(tmp_path), *COUNT, *options))
    assert [option["option"] for option in found["options"]] == ["4 x B200", "4 x GB300"]
    assert found["options"][1]["bills"] == []
    assert "no price for GB300 is known" in found["options"][1]["warnings"][-1]


# --- one point --------------------------------------------------------------------------------

POINT = (
    "--point", "--model", "Qwen/Qwen3.6-27B", "--gpu", "b200", "--running-requests", "64",
    "--input-tokens", "512", "--output-tokens", "2529", "--dtype", "bf16",
)  # fmt: skip


def test_point_gives_the_step_and_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *POINT, "--json"))
    assert sum(found["step_parts_s"].values()) == pytest.approx(found["step_s"])
    band = found["tokens_per_s_per_gpu"]
    assert band["p10"] < band["p50"] < band["p90"]
    # 64 requests, each 512 + 2,529 / 2 tokens; no request waits for another.
    decode = 64 / found["step_s"] * (1 - found["prefill_share"])
    assert band["p50"] == pytest.approx(decode)
    text = printed(capsys, *POINT)
    assert "step" in text
    assert f"tokens/s per GPU  {two_figures(band['p50'])} (" in text


@pytest.mark.parametrize(
    ("word", "same"),
    [("AWQ INT4", "int4-awq"), ("bf16 + fp8 KV", "bf16"), ("nvfp4 (w4a16)", "nvfp4-w4a16")],
)
def test_formats_are_known_as_people_write_them(
    capsys: pytest.CaptureFixture[str], word: str, same: str
) -> None:
    of_word, of_same = (printed(capsys, *POINT, "--dtype", name, "--json") for name in (word, same))
    assert of_word == of_same


def test_gpus_of_one_point_share_its_requests(capsys: pytest.CaptureFixture[str]) -> None:
    one = json.loads(printed(capsys, *POINT, "--json"))
    both = (*POINT[:6], "128", *POINT[7:], "--num-gpus", "2")
    two = json.loads(printed(capsys, *both, "--json"))
    assert two["tokens_per_s_per_gpu"] == one["tokens_per_s_per_gpu"]


def test_stages_of_a_point_have_a_wider_band_and_parts_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    two = json.loads(printed(capsys, *POINT, "--pp-size", "2", "--json"))
    plain = json.loads(printed(capsys, *POINT, "--tp-size", "2", "--json"))
    # The rate model's own error depends on the shares of the parts, which differ a little.
    assert two["log_sd"] ** 2 == pytest.approx(plain["log_sd"] ** 2 + 0.2**2, rel=0.3)
    assert two["running_requests_per_replica"] == 64
    parts = two["step_parts_s"]
    assert parts["hand_over"] > 0
    assert parts["idle"] > 0
    assert sum(parts.values()) == pytest.approx(two["step_s"])
    assert "hand-over" in printed(capsys, *POINT, "--pp-size", "2")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--pp-size", "2", "--num-gpus", "3"), "--pp-size: found 2; it must divide --num-gpus"),
        (("--pp-size", "0"), "--pp-size: found 0; it must be at least 1"),
        (("--pp-size", "2", "--mtp-accept-length", "2.6"), "PP + speculative decoding"),
        (("--running-requests", "0"), "--running-requests: found 0"),
        (("--tp-size", "2", "--num-gpus", "1"), "--tp-size: found 2"),
        (("--dtype", "fp3"), "--dtype: found 'fp3'; known: "),
        (("--mtp-accept-length", "5", "--draft-tokens", "4"), "and the 4 draft tokens"),
        (("--mtp-accept-length", "0.5"), "between 1 and the 4 draft tokens"),
        (("--mtp-accept-length", "17"), "between 1 and the 16 draft tokens"),
        (("--draft-tokens", "1"), "--draft-tokens: found 1"),
        (("--tp-size", "4", "--num-gpus", "8", "--dp-size", "8"), "--dp-size: found 8"),
        (("--tp-size", "2", "--num-gpus", "3"), "--num-gpus: found 3"),
        (("--output-tokens", "0"), "--output-tokens: found 0"),
        (("--running-requests", "nan"), "--running-requests: found nan"),
        (("--running-requests", "inf"), "--running-requests: found inf"),
        (("--input-tokens", "1e300"), "--input-tokens: found 1e+300"),
        (("--output-tokens", "inf"), "--output-tokens: found inf"),
        (("--output-cv", "-3"), "--output-cv: found -3"),
        (("--output-cv", "nan"), "--output-cv: found nan"),
        (("--num-gpus", "0"), "--num-gpus: found 0"),
        (("--dp-size", "4"), "--num-gpus: missing"),
        (("run.yaml",), "--point: found RUN.yaml run.yaml"),
        (("--html", "x.html"), "--point: found --html x.html"),
        (("--gpu", "h2000"), "unknown GPU 'h2000'; the nearest: h200"),
        (("--model", "no/such-model"), "no config known for model 'no/such-model'"),
    ],
)
def test_mistake_in_a_point_gets_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    changes: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    err = refused(capsys, *POINT, *changes)
    assert said in err
    assert err.count("\n") == 1


def test_point_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--gpu is missing" in refused(capsys, "--point", "--model", "Qwen/Qwen3.6-27B")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, runpy; sys.argv = ['estimate', '--help']\n"
        "try: runpy.run_module('jobs.estimate', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "bad = {'ray', 'datasets', 'pydantic', 'pyarrow', 'yaml'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- calibrations -----------------------------------------------------------------------------


def calibration(tmp_path: Path, **changes: object) -> str:
    """A saved calibration of one B200 whose weights left 100 GiB less than forecast."""
    values = {
        "model": "Qwen/Qwen3.6-27B", "gpu": "B200", "release": "0.5.23", "layout": "1",
        "free_before_load_bytes": 150 << 30, "weights_bytes": 51 << 30, **changes,
    }  # fmt: skip
    path = tmp_path / f"calibration-{len(list(tmp_path.iterdir()))}.json"
    path.write_text(json.dumps(values))
    return str(path)


def b200_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: str) -> dict[str, Any]:
    argv = (run_file(tmp_path), *COUNT, "--hardware", "b200:1", "--json", *argv)
    option: dict[str, Any] = json.loads(printed(capsys, *argv))["options"][0]
    return option


def test_calibration_sets_the_memory_of_its_layout_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assumed = b200_estimate(capsys, tmp_path)
    measured = b200_estimate(capsys, tmp_path, "--calibration", calibration(tmp_path))
    other = calibration(tmp_path, layout="2")
    assert measured["plans"][0]["cap_requests"] < assumed["plans"][0]["cap_requests"]
    # What the cap assumes is measured: it no longer widens the band.
    assert len(measured["assumptions"]) < len(assumed["assumptions"])
    assert b200_estimate(capsys, tmp_path, "--calibration", other) == assumed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "other"}, "the calibration is for model 'other', the launch for 'Qwen/"),
        ({"release": "0.5.20"}, "the calibration is for release '0.5.20', the launch for"),
        ({"gpu": "H200"}, "no option has H200"),
        ({"weights_bytes": "50"}, "weights_bytes = '50'; it must be bytes"),
    ],
)
def test_calibration_that_no_option_can_use_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = calibration(tmp_path, **changes)
    err = refused(capsys, run_file(tmp_path), *COUNT, "--hardware", "b200:1", "--calibration", path)
    assert path in err
    assert said in err


def test_second_calibration_of_a_card_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ("--calibration", calibration(tmp_path), "--calibration", calibration(tmp_path))
    err = refused(capsys, run_file(tmp_path), *COUNT, "--hardware", "b200:1", *files)
    assert "a second file for B200" in err
