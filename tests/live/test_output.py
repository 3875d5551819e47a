"""The estimate of a running job as text."""

from dataclasses import replace

import pytest

from pipeline.live.output import time_left, update_json, update_text
from schemas.estimate import (
    Assumption,
    Band,
    Deviation,
    GroupUpdate,
    OutputLengths,
    Price,
    RunUpdate,
)


def band(middle: float) -> Band:
    return Band(p10=0.8 * middle, p50=middle, p90=1.3 * middle)


def lengths(mean: float) -> OutputLengths:
    return OutputLengths(
        mean_tokens=mean, cv=1.2, limit_tokens=32_768, at_limit_fraction=0.02,
        mean_relative_error=0.03, source="x",
    )  # fmt: skip


GROUP = GroupUpdate(
    name="2 x H200", engines=2, running_requests=80.0, tokens_per_s=band(5000.0),
    accept_length=2.4, independent_readings=12.0, expected_running_requests=96.0,
    expected_tokens_per_s=band(6000.0), expected_accept_length=2.6, deviations=(),
)  # fmt: skip
UPDATE = RunUpdate(
    model="m", rows_total=1000, rows_done=400, completions_left=600.0, tokens_left=1_500_000.0,
    output_lengths=lengths(2500.0), expected_output_lengths=lengths(2000.0),
    completions_seen=400, running_seen=160, groups=(GROUP,), tokens_per_s=band(5000.0),
    availability=Band(p10=0.9, p50=0.96, p90=0.98), days_left=band(2.0),
    expected_days_left=band(1.6), expected_whole_days=band(3.2), usd_left=band(300.0),
    price=Price(
        kind="own", usd_per_gpu_hour=2.0, source="your own price", date="2026-11-30", stale=False,
        low_usd_per_gpu_hour=2.0, high_usd_per_gpu_hour=2.0,
    ),
    counted_by="engine", no_dry_run=None, deviations=(), assumptions=(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (1.5, "1.5 days (1.2-2.0)"),
        (1.4, "34 h (27-44)"),
        (1.4 / 24, "84 min (67-110)"),
        (1.4 / 1440, "84 s (67-110)"),
        (0.1 / 86_400, "0.10 s (0.080-0.13)"),
    ],
)
def test_time_left_is_in_the_unit_of_its_size(days: float, text: str) -> None:
    assert time_left(band(days)) == text


def test_finished_run_has_no_time_left() -> None:
    assert time_left(Band(p10=0.0, p50=0.0, p90=0.0)) == "none"


def test_measured_figures_are_followed_by_those_of_the_plan() -> None:
    text = " ".join(update_text(UPDATE).split())
    assert "m: 400 of 1,000 rows done, 600 completions and 1.5 million tokens left" in text
    assert "time left 2.0 days (1.6-2.6); plan 1.6 days (1.3-2.1)" in text
    assert "at $2.00 per GPU-hour (your own price, 2026-11-30)" in text
    assert "2 x H200, 2 running: 4,000-6,500 tokens/s; plan 4,800-7,800" in text
    assert "80 requests in each; plan 96; accept length 2.4; plan 2.6; 12 independent" in text
    assert "2,500 tokens ± 3 %, CV 1.2 by 400 finished and 160 running; plan 2,000" in text
    assert "available 0.96 of the time (0.90-0.98)" in text
    assert "plan every measurement is within its band" in text
    assert "counted by" not in text
    assert "deviates" not in text


def test_text_says_what_deviates_and_what_is_missing() -> None:
    deviation = Deviation(input="step_time", predicted=1.0, measured=2.0, sentence="too slow")
    text = update_text(replace(UPDATE, deviations=(deviation,)))
    assert "deviates   step time: too slow" in text
    assert "within its band" not in text
    alone = replace(
        GROUP, expected_tokens_per_s=None, expected_running_requests=None,
        expected_accept_length=None, independent_readings=0.0,
    )  # fmt: skip
    unplanned = replace(
        UPDATE, groups=(alone,), expected_days_left=None, usd_left=None, price=None,
        counted_by="answers", no_dry_run="no card",
    )  # fmt: skip
    text = " ".join(update_text(unplanned).split())
    assert "time left 2.0 days (1.6-2.6) engines" in text
    assert "4,000-6,500 tokens/s; 80 requests in each; accept length 2.4; no steady reading" in text
    assert "counted by completions, because the engines export no counters" in text
    assert "plan none to compare with: no card" in text
    assert "$" not in text


def test_three_assumptions_are_shown_and_lines_fit_120_columns() -> None:
    parts = tuple(
        Assumption(name=f"part {n}", value="v " * 40, source="s", measure="m", variance_share=0.2)
        for n in range(4)
    )
    text = update_text(replace(UPDATE, assumptions=parts))
    assert "depends on part 2 (20 % of the band): v" in text
    assert "part 3" not in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_json_has_every_field() -> None:
    values = update_json(UPDATE)
    assert values["groups"][0]["tokens_per_s"] == {"p10": 4000.0, "p50": 5000.0, "p90": 6500.0}
    assert set(values) == set(RunUpdate.__slots__)
