"""Page of an estimate: figures of the JSON, no requests, a layout that fits a phone."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Browser

from pipeline.planner.estimate.output import estimate_json
from pipeline.report.estimate_page import estimate_page, other_assumptions
from schemas.estimate import AsLaunched, Band, RunEstimate
from tests.fakes.browser import opened
from tests.fakes.example_estimate import EXAMPLE, many_options
from tests.fakes.page_reading import Figure, parsed

PHONE, DESK = 390, 1280
HOSTILE = "</title><script>document.title = 'taken'</script><img src=x onerror=alert(1)>\"'&amp;"


def at(values: Any, path: str) -> Any:  # noqa: ANN401  # any JSON value
    for key in path.split("."):
        values = values[int(key)] if isinstance(values, list | tuple) else values[key]
    return values


def value_of(figure: Figure, estimate: dict[str, Any]) -> float:
    options = {option["option"]: option for option in estimate["options"]}
    value = at(estimate if figure.option is None else options[figure.option], figure.path)
    assert isinstance(value, (int, float)), figure
    return value


def assert_shows(figure: Figure, value: float) -> None:
    """Compare to two significant digits for uncertain figures, else to the last one shown."""
    numbers = re.findall(r"-?[\d,]*\.?\d+", figure.text)
    assert len(numbers) == 1, figure
    shown = float(numbers[0].replace(",", "")) / (100 if "%" in figure.text else 1)
    decimals = len(numbers[0].partition(".")[2]) + (2 if "%" in figure.text else 0)
    unsure = figure.path.endswith(("p10", "p50", "p90", "preemption_usd"))
    digit = 10 ** (math.floor(math.log10(value)) - 1) if unsure else 10**-decimals
    assert abs(shown - value) <= digit / 2 * 1.000001, (figure, value)


def assert_figures_are_those_of_the_json(figures: Iterable[Figure], estimate: RunEstimate) -> None:
    values = estimate_json(estimate)
    figures = list(figures)
    for figure in figures:
        assert_shows(figure, value_of(figure, values))
    found = {(figure.option, figure.path) for figure in figures}
    assert not must_be_shown(values) - found


def must_be_shown(values: dict[str, Any]) -> set[tuple[str | None, str]]:
    wanted: set[tuple[str | None, str]] = {
        (None, "num_completions"),
        (None, "output_lengths.mean_tokens"),
        (None, "prompt_lengths.mean_tokens"),
        *((None, f"assumptions.{i}.variance_share") for i in range(len(values["assumptions"]))),
    }
    bands = ("p10", "p50", "p90")
    for option in values["options"]:
        paths = [f"{name}.{p}" for name in ("days", "tokens_per_s", "gpu_hours") for p in bands]
        for i in range(len(option["bills"])):
            paths += [f"bills.{i}.usd.{p}" for p in bands]
            paths += [f"bills.{i}.usd_per_million_tokens.{p}" for p in bands]
            paths += [f"bills.{i}.price.usd_per_gpu_hour"]
        for i, plan in enumerate(option["plans"]):
            paths += [f"plans.{i}.tokens_per_s_per_gpu.{p}" for p in bands]
            paths += [f"plans.{i}.{name}" for name in ("tp_size", "replicas", "cap_requests")]
            paths += [f"plans.{i}.{name}" for name in ("running_requests", "break_even_requests")]
            paths += [f"plans.{i}.budget.{row}.gib" for row in range(len(plan["budget"]))]
        wanted |= {(option["option"], path) for path in paths}
    return wanted


@pytest.fixture(scope="module")
def page() -> str:
    return estimate_page(EXAMPLE)


def test_figures_in_the_markup_are_those_of_the_json(page: str) -> None:
    assert_figures_are_those_of_the_json(parsed(page).figures, EXAMPLE)


def test_a_figure_that_differs_is_found(page: str) -> None:
    """Show that the check can fail: by a wrong digit on the page, and by a missing figure."""
    wrong = page.replace(">0.90<", ">0.91<")
    assert wrong != page
    with pytest.raises(AssertionError):
        assert_figures_are_those_of_the_json(parsed(wrong).figures, EXAMPLE)
    less = [figure for figure in parsed(page).figures if figure.path != "days.p90"]
    with pytest.raises(AssertionError):
        assert_figures_are_those_of_the_json(less, EXAMPLE)


def test_browser_shows_the_figures_and_runs_no_text(page: str, browser: Browser) -> None:
    with opened(browser, page) as shown:
        for width in (PHONE, DESK):
            shown.show(width=width)
            assert_figures_are_those_of_the_json(shown.figures(), EXAMPLE)
            assert_bars_are_to_scale(shown.bars())
    with opened(browser, estimate_page(replace(EXAMPLE, model=HOSTILE)), width=PHONE) as attacked:
        assert attacked.page.title() == f"Estimate: {HOSTILE}"
        assert attacked.width() == PHONE
        assert (attacked.requests, attacked.logged) == ([], [])
        assert_figures_are_those_of_the_json(attacked.figures(), EXAMPLE)


def assert_bars_are_to_scale(bars: list[dict[str, Any]]) -> None:
    """Check each end of each bar, with one scale for days and one for dollars."""
    values = estimate_json(EXAMPLE)
    options = {option["option"]: option for option in values["options"]}
    most_days = max(option["days"]["p90"] for option in values["options"])
    most_usd = max(b["usd"]["p90"] for option in values["options"] for b in option["bills"])
    assert len(bars) == sum(1 + len(option["bills"]) for option in values["options"])
    for bar in bars:
        band = at(options[bar["option"]], bar["path"])
        whole = most_days if bar["path"] == "days" else most_usd
        assert bar["solid"] == pytest.approx([0, band["p10"] / whole], abs=0.005)
        assert bar["band"] == pytest.approx([band["p10"] / whole, band["p90"] / whole], abs=0.005)
        assert sum(bar["tick"]) / 2 == pytest.approx(band["p50"] / whole, abs=0.005)


def test_nothing_on_the_page_is_loaded(page: str) -> None:
    elements = parsed(page).elements
    assert not {e.tag for e in elements} & {"script", "img", "iframe", "object", "embed", "base"}
    asked = [e.attributes[a] for e in elements for a in ("src", "href") if a in e.attributes]
    assert asked == ["data:,"]
    assert "url(" not in page
    assert "@import" not in page
    policy = next(e for e in elements if "http-equiv" in e.attributes)
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_texts_are_escaped_wherever_they_come_from() -> None:
    first = EXAMPLE.options[0]
    plan = first.plans[0]
    row = replace(plan.budget[1], name=HOSTILE, note=HOSTILE)
    hostile_plan = replace(plan, budget=(row,), argv=(HOSTILE,), limited_by=HOSTILE)
    bill = replace(first.bills[0], price=replace(first.bills[0].price, source=HOSTILE))
    option = replace(
        first, option=HOSTILE, plans=(hostile_plan,), warnings=(HOSTILE,), bills=(bill,)
    )
    assumption = replace(EXAMPLE.assumptions[0], name=HOSTILE, measure=HOSTILE)
    hostile = replace(
        EXAMPLE,
        model=HOSTILE,
        options=(option,),
        unfit=(replace(EXAMPLE.unfit[0], reason=HOSTILE),),
        assumptions=(assumption,),
    )
    reading = parsed(estimate_page(hostile))
    assert not [e for e in reading.elements if e.tag in ("script", "img")]
    assert not [e for e in reading.elements if "onerror" in e.attributes]
    assert reading.text.count("onerror=alert(1)") >= 9
    assert_figures_are_those_of_the_json(reading.figures, hostile)


def test_page_says_what_is_stale_unfit_and_warned_of(page: str) -> None:
    reading = parsed(page)
    assert reading.text.count("stale") == 1
    assert "2 of 6 prices are stale" in reading.text
    assert "8 x L4 TP 8 is the least that holds the weights" in reading.text
    assert "the KV pool overflows more than 1 % of the time" in reading.text
    assert "host: 3 physical cores a GPU" in reading.text
    for item in EXAMPLE.assumptions:
        assert f"Narrowed by {item.measure}" in reading.text


def test_cheapest_and_fastest_are_told_apart_where_they_differ() -> None:
    slow_first = replace(EXAMPLE, options=EXAMPLE.options[::-1])
    text = parsed(estimate_page(slow_first)).text
    assert "Cheapest per token 7 x B200 spot 0.92 days" in text
    assert "preemptions are counted, $4.9" in text
    assert "Fastest 7 x B200 on demand 0.90 days" in text
    alone = replace(EXAMPLE.options[0], bills=EXAMPLE.options[0].bills[:1])
    one = parsed(estimate_page(replace(EXAMPLE, options=(alone,)))).text
    assert "Cheapest per token, and fastest 7 x B200 on demand 0.90 days" in one


def test_cards_that_cannot_run_are_apart_and_no_dots() -> None:
    apart = replace(EXAMPLE.options[0], option="8 x Other", cannot_run="Other: no engine here")
    reading = parsed(estimate_page(replace(EXAMPLE, options=(*EXAMPLE.options, apart))))
    _, _, after = reading.text.partition("For comparison only")
    assert "Other: no engine here 1 option 18 x Other" in after
    dots = [e.attributes["data-dot"] for e in reading.elements if "data-dot" in e.attributes]
    assert len(dots) == 6
    assert not [dot for dot in dots if "Other" in dot]


def test_own_launch_line_is_beside_the_best_plan() -> None:
    slow = replace(EXAMPLE.options[2], days=Band(p10=12, p50=16.2, p90=20))
    launched = (
        AsLaunched(option=slow.option, estimate=slow, reason=""),
        AsLaunched(option="7 x B200", estimate=None, reason="pool: not enough memory"),
        *(AsLaunched(option=f"{n} x L4", estimate=None, reason="weights") for n in range(5)),
    )
    estimate = replace(EXAMPLE, as_launched=launched)
    reading = parsed(estimate_page(estimate))
    assert "as you launch it: 16 days" in reading.text
    assert "as planned: 6.1 days, $990 on demand" in reading.text
    assert "it does not start: pool: not enough memory" in reading.text
    assert "4 more options" in reading.text
    assert_figures_are_those_of_the_json(reading.figures, estimate)


def test_page_of_forty_options_folds_those_that_are_not_efficient(browser: Browser) -> None:
    estimate = many_options(40)
    page = estimate_page(estimate)
    reading = parsed(page)
    dots = [e for e in reading.elements if "data-dot" in e.attributes]
    assert len(dots) == 80
    assert re.search(r"\d+ more options", reading.text)
    with opened(browser, page) as shown:
        shown.show(width=PHONE)
        assert shown.page.evaluate("document.documentElement.scrollHeight") < 16_000


def test_page_of_options_without_prices_has_no_dollars() -> None:
    free = replace(EXAMPLE, options=(replace(EXAMPLE.options[0], bills=()),))
    reading = parsed(estimate_page(free))
    assert "$" not in reading.text
    assert "No price is known" in reading.text


def test_page_of_a_model_that_runs_nowhere_keeps_the_reasons() -> None:
    reading = parsed(estimate_page(replace(EXAMPLE, options=(), assumptions=())))
    assert "No option runs this model." in reading.text
    assert "8 x L4" in reading.text


def test_only_the_first_options_of_many_are_open() -> None:
    many = tuple(replace(EXAMPLE.options[0], option=f"{n} x B200") for n in range(1, 8))
    reading = parsed(estimate_page(replace(EXAMPLE, options=many)))
    folded = [e for e in reading.elements if e.attributes.get("class") == "option"]
    assert ["open" in e.attributes for e in folded] == [True] * 3 + [False] * 4


def test_bar_beyond_the_scale_is_marked_and_the_key_says_so() -> None:
    far = replace(EXAMPLE.options[0], option="1 x L4", days=Band(p10=90.0, p50=120.0, p90=200.0))
    page = estimate_page(replace(EXAMPLE, options=(*EXAMPLE.options, far)))
    assert page.count('class="bar days beyond"') == 1
    assert "continues beyond the scale" in page
    assert "continues beyond the scale" not in estimate_page(EXAMPLE)


def test_launch_line_is_quoted_for_a_shell() -> None:
    first = EXAMPLE.options[0]
    plan = replace(first.plans[0], argv=("python", "--json-model-override-args", '{"a": 1}'))
    text = parsed(estimate_page(replace(EXAMPLE, options=(replace(first, plans=(plan,)),)))).text
    assert "python --json-model-override-args '{\"a\": 1}'" in text


def test_mtp_plan_shows_its_draft_tokens_and_verify_states() -> None:
    first = EXAMPLE.options[0]
    states = replace(first.plans[0].budget[2], name="verify states")
    plan = replace(
        first.plans[0], mtp=True, num_draft_tokens=4, running_requests=44.5, budget=(states,)
    )
    run = replace(EXAMPLE, options=(replace(first, plans=(plan,)),))
    reading = parsed(estimate_page(run))
    assert "MTP on, 4 draft tokens" in reading.text
    assert "MTP on (the plan): at most 48 requests" in reading.text
    assert_figures_are_those_of_the_json(reading.figures, run)


def test_other_assumptions_stand_once_with_the_options_that_make_them() -> None:
    first, second, third = EXAMPLE.options
    own = replace(EXAMPLE.assumptions[1], value="x 0.6-1.7", variance_share=0.5)
    lighter = replace(first.assumptions[3], variance_share=0.02)
    run = replace(
        EXAMPLE,
        options=(
            first,
            replace(second, assumptions=(own, lighter)),
            replace(third, assumptions=(lighter,)),
        ),
    )
    heavy, availability, release = other_assumptions(run)
    assert (heavy.assumption.value, heavy.options) == ("x 0.6-1.7", (second.option,))
    assert availability.options == (first.option, second.option, third.option)
    assert (availability.lowest_share, availability.highest_share) == (0.02, 0.06)
    assert release.options == (first.option,)
