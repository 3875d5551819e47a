"""Benchmarks at less than a hundredth of their size: they end and print a figure for each step."""

import re
from pathlib import Path

import pytest

from tests.benchmarks import coordinator, export_rows, million_prompts, planner, report_rows


def test_coordinator_works_through_its_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = ["--rows", "10000", "--engines", "10", "--rows-a-part", "50"]
    assert coordinator.main([*rows, "--folder", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "start with 0 of 10,000 rows done" in out
    done = re.findall(r"start with ([\d,]+) of 10,000 rows done", out)[-1]
    assert 9000 <= int(done.replace(",", "")) < 10_000
    assert "rows a second through all of these" in out


def test_export_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_rows, "_PART_ROWS", 50)
    rows = ["--rows", "200", "--row-bytes", "2000", "--format", "tokens"]
    assert export_rows.main([*rows, "--folder", str(tmp_path)]) == 0
    assert re.search(r"tokens: exit 0 after .* peak memory \d+ MiB", capfd.readouterr().out)


def test_planner_is_timed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_TRIES", 1)
    assert planner.main() == 0
    assert len(re.findall(r"[\d.]+ ms", capfd.readouterr().out)) == 3


def test_report_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_rows, "_PART_ROWS", 50)
    assert report_rows.main(["--rows", "500", "--folder", str(tmp_path)]) == 0
    numbers = re.findall(r"([\d,]+) rows: [\d.]+ s, page", capfd.readouterr().out)
    first, again = (int(number.replace(",", "")) for number in numbers)
    assert again - first == 50 * report_rows._LATER_PARTS


@pytest.mark.slow
@pytest.mark.ray
def test_run_with_many_prompts_is_measured_stopped_and_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rows", "20000", "--seconds", "2", "--folder", str(tmp_path)]
    assert million_prompts.main(arguments) == 0
    done = re.findall(r"coordinator \d+ MiB; (\d+) of 20000 rows done", capfd.readouterr().out)
    first, resumed = map(int, done)
    assert 0 < first < resumed < 20_000
