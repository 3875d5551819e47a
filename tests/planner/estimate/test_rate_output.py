"""Rates as JSON and text: a search's table and its lines about MTP and pipeline stages."""

from dataclasses import replace

import pytest

from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.estimate.rate_output import search_json, search_text
from pipeline.planner.lengths.lengths import output_lengths
from pipeline.planner.rate.ranking import Load, RatedSearch, rated_search
from pipeline.planner.rate.search import HardwareOption, SearchLimits, SearchQuery
from pipeline.planner.sglang.flags import parse_launch_line
from schemas.estimate import RateCurve
from schemas.units import GIB

MODEL = "Qwen/Qwen3.6-27B"
LOAD = Load(prompt_tokens_mean=512, lengths=output_lengths(2529, 1.2, 32_768, "stated"))


@pytest.fixture(scope="module")
def search() -> RatedSearch:
    """Launches for two cards of one kind, priced."""
    query = SearchQuery(
        model=load_model(MODEL),
        options=(HardwareOption(gpu=gpu_named("b200"), count=2),),
        limits=SearchLimits(),
        base=parse_launch_line(["--model-path", MODEL]),
    )
    return rated_search(query, LOAD, usd_per_gpu_hour={"B200": 3.6}, most=4)


def text(search: RatedSearch, *, assumed: bool = False) -> str:
    return search_text(MODEL, LOAD, search, context_is_assumed=assumed)


def test_json_holds_each_plan_with_its_rate_rank_and_price(search: RatedSearch) -> None:
    rows = search_json(search)
    rates = [row["tokens_per_s"] for row in rows]
    assert [row["tokens_per_s_rank"] for row in rows] == [
        1 + sorted(rates, reverse=True).index(rate) for rate in rates
    ]
    for row, plan in zip(rows, search.plans, strict=True):
        assert (row["gpu_count"], row["replicas"]) == (2, plan.found.replicas)
        running = plan.resident.running_requests * plan.found.replicas
        assert row["running_requests"] == pytest.approx(running)
        # Two cards at $3.60 an hour are $0.002 a second.
        assert row["usd_per_million_tokens"] == pytest.approx(0.002 / row["tokens_per_s"] * 1e6)
        assert row["mtp_break_even_requests"] == search.break_even_requests


def test_table_has_a_row_for_each_plan_with_what_the_headroom_leaves(search: RatedSearch) -> None:
    lines = text(search).splitlines()
    head = next(n for n, line in enumerate(lines) if "usd/M" in line)
    for number, plan in enumerate(search.plans, start=head + 1):
        cells = lines[number].split()
        needs = sum(item.bytes for item in plan.found.plan.headroom_items)
        left_gib = (plan.found.plan.headroom_bytes - needs) / GIB
        assert cells[0] == f"{plan.usd_per_million_tokens:.3f}"
        assert cells[1] == f"{plan.tokens_per_s:,.0f}"
        assert cells[4:6] == [f"{plan.found.replicas}", f"{left_gib:.1f}"]
        assert "2 x B200: " in lines[number]


def test_plan_without_a_price_has_a_dash(search: RatedSearch) -> None:
    bare = tuple(replace(plan, usd_per_million_tokens=None) for plan in search.plans)
    lines = text(replace(search, plans=bare)).splitlines()
    row = next(line for line in lines if "2 x B200: " in line)
    assert row.split()[0] == "-"


def test_assumed_context_is_said_once(search: RatedSearch) -> None:
    assert "assumed: the prompts are not here" in text(search, assumed=True)
    assert "assumed: the prompts are not here" not in text(search)


@pytest.mark.parametrize(
    ("break_even", "said"),
    [
        (None, "MTP is faster at every batch size; memory holds 20 per replica with it and 50"),
        (1, "MTP is slower at every batch size; "),
        (2, "MTP is faster below 2 running requests per replica; "),
    ],
)
def test_mtp_is_compared_by_its_break_even(
    search: RatedSearch, break_even: int | None, said: str
) -> None:
    curves = tuple(
        RateCurve(mtp=mtp, cap_requests=cap, points=()) for mtp, cap in ((True, 20), (False, 50))
    )
    both = replace(search, curves=curves, break_even_requests=break_even)
    assert said in text(both)
    assert "there is nothing to compare" in text(replace(both, curves=curves[:1]))


def test_stages_are_explained_where_a_plan_has_them(search: RatedSearch) -> None:
    assert "--pp-size: no published reading" not in text(search)
    best = search.plans[0]
    ranks = replace(best.replica.ranks, pp_size=2)
    staged = replace(best, replica=replace(best.replica, ranks=ranks))
    # e^-0.20 = 0.82: 18 % lower.
    assert "so they rank 18% lower" in text(replace(search, plans=(staged,)))
