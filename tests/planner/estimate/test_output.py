"""The estimate as JSON and as a table: digits, units, marks, and 120 columns."""

import json
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from pipeline.planner.estimate import figures as figures
from pipeline.planner.estimate.answers import cheapest, fastest
from pipeline.planner.estimate.output import (
    estimate_json,
    estimate_text,
    ranking_bill,
    warnings_by_text,
)
from schemas.estimate import AsLaunched, Band, Price
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
        "stands on public readings: 3 of models of this kind on this card"
    )
    assert lines[at + 5].strip() == (
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
    assert len(re.findall("stale", flat)) == 1
    assert "2 of 6 prices are stale: more than 90 days old, or without a date; give" in flat
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


def test_answers_count_spot_and_say_so() -> None:
    lines = estimate_text(EXAMPLE).splitlines()
    # 0.92 of 0.90 days, and $1.71 of $4.89, are left of the price on demand.
    [cheap] = [line for line in lines if line.startswith("cheapest")]
    assert cheap.startswith("cheapest  7 x B200, spot: 0.92 days (0.66-1.3), $260 ($180-360)")
    assert "preemptions are counted, $4.9" in estimate_text(EXAMPLE)
    [quick] = [line for line in lines if line.startswith("fastest")]
    assert quick.startswith("fastest   7 x B200, on demand: 0.90 days (0.65-1.2), $740")
    assert "; cheapest output token first, on demand" in "\n".join(lines)


def test_option_that_cannot_run_is_never_an_answer_and_ranks_apart() -> None:
    other = replace(EXAMPLE.options[0], option="8 x Other", cannot_run="Other: no engine here")
    assert cheapest([other]) is None
    assert fastest([other, EXAMPLE.options[2]]) == fastest([EXAMPLE.options[2]])
    lines = estimate_text(replace(EXAMPLE, options=(EXAMPLE.options[0], other))).splitlines()
    apart = lines.index("for comparison only, ranked apart")
    assert lines[apart + 1] == "  Other: no engine here"
    ranked = [number for number, line in enumerate(lines) if line.startswith("  1 ")]
    assert [number > apart for number in ranked] == [False, True]
    assert lines[ranked[1]].endswith("8 x Other")


def test_fastest_option_needs_no_price() -> None:
    unpriced = option("64 x B200", (replace(B200, num_gpus=64, replicas=64),), ())
    options = (*EXAMPLE.options, unpriced)
    quick, cheap = fastest(options), cheapest(options)
    assert quick is not None
    assert cheap is not None
    assert (quick.option, quick.price_kind, quick.usd) == ("64 x B200", None, None)
    assert (cheap.option, cheap.price_kind) == ("7 x B200", "spot")
    assert estimate_json(replace(EXAMPLE, options=options))["fastest"]["option"] == "64 x B200"


def test_own_launch_line_is_beside_the_best_plan() -> None:
    slow = replace(EXAMPLE.options[2], days=Band(p10=12, p50=16.2, p90=20))
    launched = (
        AsLaunched(option=slow.option, estimate=slow, reason=""),
        AsLaunched(option="7 x B200", estimate=None, reason="pool: not enough memory"),
        AsLaunched(option="4 x L40S", estimate=None, reason="weights: too large"),
    )
    text = " ".join(estimate_text(replace(EXAMPLE, as_launched=launched)).split())
    assert (
        "4 x RTX PRO 6000 Blackwell: as you launch it: 16 days, $990 on demand; as planned: "
        "6.1 days, $990 on demand" in text
    )
    assert "as you launch it, it does not start: pool: not enough memory; as planned: 0.90" in text
    assert "4 x L40S: as you launch it, it does not start: weights: too large" in text
    values = estimate_json(replace(EXAMPLE, as_launched=launched))["as_launched"]
    assert [item["estimate"] is None for item in values] == [False, True, True]
    assert values[0]["estimate"]["days"]["p50"] == 16.2
    assert values[0]["estimate"]["plans"][0]["total_gib"] == pytest.approx(94.97, abs=0.01)


def test_run_that_fits_nowhere_still_has_its_reasons() -> None:
    text = estimate_text(replace(EXAMPLE, options=(), assumptions=()))
    assert "no option runs this model" in text
    assert "8 x L4: TP 8 is the least" in text


def test_warning_stands_once_with_all_its_options() -> None:
    found = warnings_by_text(EXAMPLE.options)
    host = next(text for text in found if text.startswith("host"))
    assert found[host] == (EXAMPLE.options[1].option, EXAMPLE.options[2].option)
    assert len([text for text in found if "the KV pool overflows" in text]) == 1
