"""The benchmark of the client runs, at a hundredth of its size and without Ray."""

import re
from pathlib import Path

import pytest

from tests.benchmarks.client import __main__ as benchmark
from tests.benchmarks.client.workload import Workload, delays, row_id


def test_table_has_a_line_for_each_client(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    benchmark.main(["--scale", "0.01", "--only", "at once", "--clients", "ideal", "openai"])
    printed = capsys.readouterr().out
    assert "4 x 64 in flight, answers at once: 200 rows of 600 tokens" in printed
    ideal, openai = re.findall(r"^  (?:ideal|openai) .*$", printed, re.MULTILINE)
    assert ideal.endswith("200 requests")
    assert openai.endswith("200 requests")
    assert " 1.00 " in ideal
    # The client that keeps nothing but parses costs more CPU than the one that does not.
    assert cpu_ms(openai) > cpu_ms(ideal) > 0


def test_interpreter_that_is_not_there_is_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--datatrove", str(tmp_path / "python")])
    assert ended.value.code == 2
    assert "--datatrove: no program at" in capsys.readouterr().err


def cpu_ms(line: str) -> float:
    return float(line.split()[6])


def test_delays_have_the_median_of_the_workload_and_are_the_same_each_time() -> None:
    load = Workload(num_rows=1, num_servers=1, in_flight=1, median_s=2.0)
    first = delays(load.median_s)
    assert first == delays(load.median_s)
    assert sorted(first)[len(first) // 2] == pytest.approx(2.0, rel=0.01)
    assert row_id(7) == "row-000007"
