"""Benchmarks at less than a hundredth of their size: they end and print a figure for each step."""

import re
from pathlib import Path

import pytest

from tests.benchmarks import coordinator, export_rows, planner


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
