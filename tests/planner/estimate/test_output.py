"""The estimate as JSON and as a table: digits, units, marks, and 120 columns."""

import json
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from pipeline.planner.estimate import figures as figures
from pipeline.planner.estimate.output import (
    estimate_json,
    estimate_text,
    ranking_bill,
    warnings_by_text,
)
from schemas.estimate import Band, Price
from tests.fakes.example_estimate import B200, EXAMPLE, RTX_PRO_6000, option, price


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0049, "0.0049"),
        (0.0996, "0.10"),
        (0.898, "0.90"),
        (0.996, "1.0"),
        (6.13, "6.1"),
        (9.96, "10"),
        (12.4, "12"),
        (99.6, "100"),
        (1083.0, "1,100"),
        (2_281_378_023.0, "2,300,000,000"),
    ],
)
def test_two_figures_are_two_also_where_rounding_adds_a_digit(value: float, text: str) -> None:
    assert figures.two_figures(value) == text


def test_band_is_one_figure_where_both_ends_read_alike() -> None:
    assert figures.days_span(Band(p10=5.58, p50=6.8, p90=8.21)) == "5.6-8.2 days"
    assert figures.days_span(Band(p10=6.11, p50=6.12, p90=6.13)) == "6.1 days"
    assert figures.usd_span(Band(p10=489.0, p50=610.2, p90=1020.0)) == "$490-1,000"
    assert figures.usd(610.2) == "$610"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (figures.hours(4.4), "4.4 h"),
        (figures.hours(0.18), "0.18 h"),
        (figures.hours(0.09), "5.4 min"),
        (figures.hours(0.0), "0 h"),
        (figures.percent(0.0), "0 %"),
        (figures.percent(0.0041), "0.4 %"),
        (figures.percent(0.0996), "10 %"),
        (figures.percent(0.46), "46 %"),
        (figures.average(6.25), "6.2"),
        (figures.average(82.4), "82"),
        (figures.gib(51 << 30), "51.00 GiB"),
        (figures.large_count(2_281_378_023), "2.3 billion"),
        (figures.large_count(999_600_000), "1.0 billion"),
        (figures.large_count(12_345), "12,000"),
        (figures.ratio(1.2), "1.2"),
        (figures.ratio(1.0), "1"),
        (figures.axis_figure(2.5), "2.5"),
        (figures.axis_figure(1250.0), "1,250"),
        (figures.milliseconds(0.0674), "67 ms"),
    ],
)
def test_units_are_printed_with_the_digits_that_are_known(text: str, expected: str) -> None:
    assert text == expected


def test_price_of_no_known_date_says_so_and_one_price_has_no_range() -> None:
    own = Price(
        kind="own", low_usd_per_gpu_hour=0.66, usd_per_gpu_hour=0.66, high_usd_per_gpu_hour=0.66,
        source="the run file", date="", stale=True,
    )  # fmt: skip
    assert figures.price_date(own) == "date not known"
    assert figures.hourly_span(own) == ""
    assert figures.hourly_span(price("on_demand", 4.0)) == "$3.12-6.20"


# --- JSON -------------------------------------------------------------------------------------


def leaves(record: object) -> list[Any]:
    """Every number and text of a record and of all below it; bytes are counted in GiB."""
    if is_dataclass(record):
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        if "bytes" in values:
            values["bytes"] /= 1 << 30
        return [leaf for value in values.values() for leaf in leaves(value)]
    if isinstance(record, tuple):
        return [leaf for value in record for leaf in leaves(value)]
    return [record]


def json_leaves(values: Any) -> list[Any]:  # noqa: ANN401  # any JSON value
    if isinstance(values, dict):
        return [leaf for value in values.values() for leaf in json_leaves(value)]
    if isinstance(values, list):
        return [leaf for value in values for leaf in json_leaves(value)]
    return [values]


def test_json_holds_every_value_of_the_record_in_full() -> None:
    values = json.loads(json.dumps(estimate_json(EXAMPLE)))
    found = json_leaves(values)
    for leaf in leaves(EXAMPLE):
        assert leaf in found, leaf
    first = values["options"][0]
    assert values["output_tokens"] == 902_087 * 2529
    assert first["days"]["p50"] == EXAMPLE.options[0].days.p50
    assert first["plans"][0]["total_gib"] == pytest.approx(178.35, abs=0.01)
    assert first["plans"][0]["step_s"]["whole"] == pytest.approx(0.0417)
    # 0.21 h x 7 cards x $4.89
    assert first["bills"][0]["tail_usd"] == pytest.approx(7.19, abs=0.005)


def test_own_price_ranks_before_on_demand_and_spot_comes_last() -> None:
    three = tuple(price(kind, 1.0) for kind in ("spot", "on_demand", "own"))
    for prices, kind in ((three, "own"), (three[:2], "on_demand"), (three[:1], "spot")):
        bill = ranking_bill(option("7 x B200", (B200,), prices))
        assert bill is not None
        assert bill.price.kind == kind
    assert ranking_bill(option("7 x B200", (B200,), ())) is None


def test_json_marks_the_one_bill_that_ranks() -> None:
    bills = estimate_json(EXAMPLE)["options"][0]["bills"]
    assert [(bill["price"]["kind"], bill["ranks"]) for bill in bills] == [
        ("on_demand", True),
        ("spot", False),
    ]


# --- text -------------------------------------------------------------------------------------


def row_after(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_table_has_one_row_an_option_with_its_band_beneath() -> None:
    lines = estimate_text(EXAMPLE).splitlines()
    at = lines.index(next(line for line in lines if line.startswith("  1 ")))
    # 77,600 s = 0.90 days, 7 x 4,200 = 29,400 tokens/s, 151 GPU-hours x $4.89 = $738
    assert lines[at].split() == [
        "1", "$0.32", "0.90", "29,000", "4,200", "150", "$740", "$260", "7", "x", "B200",
    ]  # fmt: skip
    assert lines[at + 1].split() == [
        "$0.24-0.44", "0.65-1.2", "22,000-39,000", "3,000-6,000", "110-210", "$530-1,000",
        "$180-360",
    ]  # fmt: skip
    assert lines[at + 2].strip() == (
        "TP 1 x 7 replicas, MTP off, prefix cache off; 268 of at most 297 requests run in each, "
        "limited by state slots"
    )
    assert lines[at + 4].strip() == (
        "of which start 0.18 h ($6.2), tail 0.21 h ($7.2), restarts 0.65 h ($22), "
        "preemptions $4.9 spot"
    )


def test_table_fits_120_columns_and_says_all() -> None:
    text = estimate_text(EXAMPLE)
    assert max(map(len, text.splitlines())) <= 120
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    flat = " ".join(text.split())
    for item in EXAMPLE.assumptions:
        assert f"{item.name}: {item.value} ({item.source})" in flat
        assert f"narrowed by: {item.measure}" in flat
    for unfit in EXAMPLE.unfit:
        assert f"{unfit.option}: {unfit.reason}" in flat
    assert len(re.findall(r"2026-06-11 STALE", flat)) == 2
    assert "2026-11-30 STALE" not in flat
    assert "$1.69 $1.32-2.62 on demand 2026-11-30 4 x RTX PRO 6000 Blackwell" in flat


def test_cards_of_two_kinds_have_a_rate_each() -> None:
    text = estimate_text(EXAMPLE)
    assert "by card" in row_after(text, "  2 ")
    assert "1,100 tokens/s a GPU (810-1,400)" in text
    assert "2 x B200: TP 1 x 2 replicas" in text


def test_long_names_and_texts_wrap_within_the_table() -> None:
    long = option("1,024 x " + "Very Long Name Of A Card " * 6, (RTX_PRO_6000,), ())
    text = estimate_text(replace(EXAMPLE, model="m" * 40 + "/" + "n" * 60, options=(long,)))
    assert max(map(len, text.splitlines())) <= 120
    assert "no price" in text
    assert "prices: none known; pass --price to see dollars" in text


def test_mtp_and_own_price_are_named() -> None:
    plan = replace(B200, mtp=True, num_draft_tokens=4, prefix_cache=True, replicas=1, tp_size=8)
    run = replace(EXAMPLE, options=(option("8 x B200", (plan,), (price("own", 2.0),)),))
    text = estimate_text(run)
    assert "TP 8 x 1 replica, MTP on (4 draft tokens), prefix cache on" in text
    assert "GPU-hours  own price  option" in text
    assert "preemptions" not in text


def test_run_that_fits_nowhere_still_has_its_reasons() -> None:
    text = estimate_text(replace(EXAMPLE, options=(), assumptions=()))
    assert "no option runs this model" in text
    assert "8 x L4: TP 8 is the least" in text


def test_warning_stands_once_with_all_its_options() -> None:
    found = warnings_by_text(EXAMPLE.options)
    host = next(text for text in found if text.startswith("host"))
    assert found[host] == (EXAMPLE.options[1].option, EXAMPLE.options[2].option)
    assert len([text for text in found if "the KV pool overflows" in text]) == 1
