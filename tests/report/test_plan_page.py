"""Page of a plan, as `jobs.plan --html` writes it: memory, speed and commands, in both forms."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from jobs import plan
from tests.fakes.browser import SCHEMES, opened
from tests.fakes.page_reading import parsed

PHONE, DESK = 390, 1280
MODEL = ("--model-path", "Qwen/Qwen3.6-27B")
MTP = (
    "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3",
    "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
)  # fmt: skip
RUN = """\
prompts: {path: prompts.parquet}
model: Qwen/Qwen3.6-27B
output: {folder: out}
engine: {kind: sglang, command: [sglang], env: {NOTE: "a b"}}
hardware: [{gpu: rtx-pro-6000, count: 2}]
lengths: {prompt_tokens_mean: 512, output_tokens_mean: 2529, output_tokens_cv: 1.2}
"""


def page_of(tmp_path: Path, *words: str, status: int = 0) -> str:
    path = tmp_path / "plan.html"
    own, _, line = " ".join(words).partition(" -- ")
    cut = ["--", *line.split()] if line else []
    assert plan.main([*own.split(), "--html", str(path), *cut]) == status
    return path.read_text()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> str:
    line = " ".join((*MODEL, "--mem-fraction-static", "0.80", *MTP))
    words = ("--gpu", "rtx-pro-6000", "--sglang-version", "0.5.23", "--")
    return page_of(tmp_path_factory.mktemp("launch"), *words, line)


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("search")
    (folder / "run.yaml").write_text(RUN)
    return page_of(folder, str(folder / "run.yaml"), "--most", "5")


def gib(text: str) -> float:
    return float(text.removesuffix(" GiB"))


def test_memory_adds_up_row_by_row_to_what_is_left(launch: str) -> None:
    cells = re.findall(r'data-head="(When|Takes|Left then)"[^>]*>([^<]+)<', launch)
    rows = list(zip(cells[::3], cells[1::3], cells[2::3], strict=True))
    assert len(rows) > 10
    left = 94.97
    for (_, when), (_, takes), (_, then) in rows[:-1]:
        left -= gib(takes)
        assert gib(then) == pytest.approx(left, abs=0.06), when
    (_, when), (_, takes), (_, then) = rows[-1]
    assert (when, takes) == ("never", then)
    order = list(dict.fromkeys(when for (_, when), _, _ in rows))
    assert order[:3] == ["before loading", "loading", "setting up the pools"]


def test_advice_is_a_whole_command_to_copy(launch: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r'<pre class="copied"[^>]*>(.*?)</pre>', launch, re.DOTALL)
    lines = [re.findall("<span>(.*?)</span>", block) for block in blocks]
    assert len(lines) >= 3
    for line in lines:
        assert line[:3] == ["python", "-m", "sglang.launch_server"]
        capsys.readouterr()
        # Each is a launch line that the planner reads, and that fits.
        assert plan.main(["--gpu", "rtx-pro-6000", "--", *line]) == 0
        assert "\nfits\n" in capsys.readouterr().out


def test_speed_has_mtp_on_and_off_and_marks_the_launch(launch: str) -> None:
    text = parsed(launch).text
    assert "MTP on (the plan): at most" in text
    assert "MTP off: at most" in text
    # Six requests fit, and not all of them run at any time.
    assert re.search(r"expected on average: 5\.\d requests", text)
    assert launch.count("<polyline") == 2


def test_search_shows_what_each_launch_line_would_run(search: str) -> None:
    text = parsed(search).text
    assert len(re.findall(r"tokens/s in all, \$[\d.]+ per million tokens;", text)) == 5
    assert text.count("requests in each;") == 5
    assert text.count("NOTE='a b' python -m sglang.launch_server") == 6


def test_refused_launch_shows_why_and_what_lifts_it(tmp_path: Path) -> None:
    line = " ".join((*MODEL, *MTP))
    words = ("--gpu", "rtx-pro-6000", "--sglang-version", "0.5.12", "--")
    page = page_of(tmp_path, *words, line, status=1)
    text = parsed(page).text
    assert "does not fit" in text
    assert "Below is the launch with the flag that lifts the refusal" in text
    assert "--mamba-scheduler-strategy extra_buffer" in text


def test_card_of_unknown_speed_has_no_chart(tmp_path: Path) -> None:
    page = page_of(tmp_path, "--gpu-memory-gib", "95", "--", *MODEL)
    assert "<polyline" not in page
    assert "KV pool" in page


def test_text_of_the_user_is_escaped(tmp_path: Path) -> None:
    hostile = "X='<script>alert(1)</script>'"
    page = page_of(tmp_path, "--gpu", "b200", "--", hostile, *MODEL)
    assert not [element for element in parsed(page).elements if element.tag == "script"]
    assert "alert(1)" in parsed(page).text


@pytest.mark.parametrize("form", ["launch", "search", "small card"])
def test_page_is_well_laid_out(
    form: str, launch: str, search: str, browser: Browser, tmp_path: Path
) -> None:
    page = {"launch": launch, "search": search}.get(form)
    if page is None:
        page = page_of(tmp_path, "--gpu", "rtx-4090", "--", *MODEL, status=1)
    with opened(browser, page) as shown:
        for width in (DESK, PHONE):
            for scheme in SCHEMES:
                shown.show(width=width, scheme=scheme)
                found = {kind: places for kind, places in shown.faults().items() if places}
                assert not found, (width, scheme)
        assert (shown.requests, shown.logged) == ([], [])
