"""Cost of a run: the price, the cards, and the reason if there is none."""

from dataclasses import astuple
from datetime import date

import pytest

from pipeline.report.spending import NoSpending, Spending, spending
from schemas.config.run_file import RunFile
from schemas.estimate import Band

TODAY = date(2026, 9, 21)
B200 = {"gpu": "b200", "usd_per_gpu_hour": 4.2}
PRO = {"gpu": "rtx-pro-6000", "usd_per_gpu_hour": 1.1}


def spent(
    *hardware: dict[str, object],
    slots: tuple[str, ...] = ("w0", "w1", "w2"),
    cards: dict[str, str] | None = None,
    left_s: Band | None = None,
    **engine: object,
) -> Spending | NoSpending:
    """Price two hours on engines of two GPUs each."""
    sglang = {"kind": "sglang", "python": "python", "count": None, "gpus": 2}
    config = RunFile.model_validate(
        {
            "prompts": {"path": "p.parquet"},
            "model": "m",
            "output": {"folder": "out"},
            "hardware": list(hardware),
            "engine": engine or sglang,
        }
    )
    return spending(
        config, slots=slots, cards=cards or {}, ran_s=7200.0, left_s=left_s, today=TODAY
    )


def test_list_price_replaces_a_missing_own_price_and_has_a_date() -> None:
    cost = spent({"gpu": "b200"})
    assert isinstance(cost, Spending)
    (card,) = cost.cards
    assert (card.gpu, card.num_gpus, card.gpu_hours) == ("B200", 6, 12.0)
    assert card.price.kind == "on_demand"
    assert card.price.source != "your own price"
    assert card.price.date
    assert cost.usd_so_far == pytest.approx(12 * card.price.usd_per_gpu_hour)


def test_engines_on_several_cards_are_added_up_at_the_price_of_each() -> None:
    cards = {"w0": "B200", "w1": "RTX PRO 6000 Blackwell", "w1r2": "NVIDIA RTX PRO 6000 Blackwell",
             "w2": "b200"}  # fmt: skip
    cost = spent(B200, PRO, cards=cards, left_s=Band(p10=1800.0, p50=3600.0, p90=7200.0))
    assert isinstance(cost, Spending)
    assert [(card.gpu, card.num_gpus) for card in cost.cards] == [
        ("B200", 4),
        ("RTX PRO 6000 Blackwell", 2),
    ]
    assert [card.usd_so_far for card in cost.cards] == pytest.approx([2 * 4 * 4.2, 2 * 2 * 1.1])
    assert cost.gpu_hours == 12.0
    assert cost.usd_so_far == pytest.approx(33.6 + 4.4)
    # An hour of 4 x $4.20 and 2 x $1.10 is the middle.
    assert cost.usd_to_go is not None
    assert astuple(cost.usd_to_go) == pytest.approx((9.5, 19.0, 38.0))


def test_card_that_an_engine_reports_overrides_the_run_file() -> None:
    cost = spent(B200, cards=dict.fromkeys(("w0", "w1", "w2"), "RTX PRO 6000"))
    assert isinstance(cost, Spending)
    assert [card.gpu for card in cost.cards] == ["RTX PRO 6000 Blackwell"]
    assert cost.cards[0].price.kind == "on_demand"


def test_card_that_no_engine_reports_is_the_only_one_of_the_run_file() -> None:
    cost = spent(B200, cards={"w0": "B200"})
    assert isinstance(cost, Spending)
    assert cost.cards[0].num_gpus == 6


def test_cards_behind_endpoints_are_those_of_the_run_file() -> None:
    urls = ["http://127.0.0.1:9/v1"]
    cost = spent({**B200, "count": 8}, slots=("w0",), kind="endpoint", base_urls=urls)
    assert isinstance(cost, Spending)
    assert cost.cards[0].num_gpus == 8
    assert cost.usd_so_far == pytest.approx(2 * 8 * 4.2)


def test_card_that_the_catalogue_lacks_has_its_own_price() -> None:
    cost = spent({"gpu": "Frobnicator 9", "memory_gib": 64, "usd_per_gpu_hour": 2})
    assert isinstance(cost, Spending)
    assert cost.cards[0].gpu == "Frobnicator 9"
    assert cost.usd_so_far == pytest.approx(24.0)


@pytest.mark.parametrize(
    ("hardware", "more", "why"),
    [
        ([], {}, "w0 has not reported its card, and the run file's hardware names none"),
        ([], {"slots": ()}, "no engine has published, and the run file's hardware names none"),
        (
            [B200, PRO],
            {},
            "w0 has not reported its card, and the run file's hardware names 2 kinds",
        ),
        (
            [B200, PRO],
            {"cards": {"w0": "B200"}},
            "w1 has not reported its card, and the run file's hardware names 2 kinds",
        ),
        (
            [B200, {**B200, "usd_per_gpu_hour": 5}],
            {},
            "the run file's hardware has several prices for B200",
        ),
        (
            [{"gpu": "gb200"}],
            {},
            "no price of GB200 is known: set its usd_per_gpu_hour in hardware",
        ),
        ([B200], {"kind": "embedded"}, "embedded engines run on CPUs"),
    ],
)
def test_unknown_cost_has_a_reason(
    hardware: list[dict[str, object]], more: dict[str, object], why: str
) -> None:
    assert spent(*hardware, **more) == NoSpending(why=why)  # type: ignore[arg-type]


def test_folder_without_its_run_file_has_no_dollars() -> None:
    cost = spending(None, slots=(), cards={}, ran_s=1.0, left_s=None, today=TODAY)
    assert cost == NoSpending(why="the folder has no copy of the run file")


def test_engines_on_several_cards_need_a_number_of_gpus() -> None:
    urls = ["http://127.0.0.1:9/v1", "http://127.0.0.1:8/v1"]
    cost = spent(cards={"w0": "B200", "w1": "H200"}, slots=("w0", "w1"), kind="endpoint",
                 base_urls=urls)  # fmt: skip
    assert cost == NoSpending(why="engines run on several cards, and engine.gpus is not given")


def test_two_machines_with_one_card_do_not_say_how_many_gpus_are_used() -> None:
    cost = spent(B200, B200, slots=("w0",), kind="endpoint", base_urls=["http://127.0.0.1:9/v1"])
    assert cost == NoSpending(why="the run file does not say how many GPUs its engines use")


def test_run_without_an_estimate_has_no_cost_to_go() -> None:
    cost = spent(B200)
    assert isinstance(cost, Spending)
    assert cost.usd_to_go is None
