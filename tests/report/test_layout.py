"""The pages in a real browser: whole, legible and without network, on a desk and on a phone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from pipeline.report.estimate_page import estimate_page
from pipeline.report.page import report_page
from pipeline.report.report import run_report
from pipeline.store.folder import LocalFolder
from schemas.estimate import AsLaunched
from schemas.progress import RunState
from tests.fakes.browser import SCHEMES, OpenedPage, opened
from tests.fakes.example_estimate import EXAMPLE, many_options
from tests.fakes.example_run import write_example_run
from tests.fakes.page_reading import parsed

PHONE, DESK = 390, 1280


def assert_is_well_laid_out(shown: OpenedPage) -> None:
    """Check both widths and colour schemes, also with all folded parts unfolded."""
    for is_unfolded in (False, True):
        if is_unfolded:
            shown.unfold()
        for width in (DESK, PHONE):
            for scheme in SCHEMES:
                shown.show(width=width, scheme=scheme)
                found = {kind: places for kind, places in shown.faults().items() if places}
                assert not found, (width, scheme, is_unfolded)
    assert shown.logged == []
    assert shown.requests == []


def run_page(folder: Path, num_engines: int, state: RunState = "running") -> str:
    now_s = write_example_run(
        LocalFolder(folder), num_parts=40, num_engines=num_engines, error_parts=range(3)
    )
    return report_page(run_report(LocalFolder(folder), now_s=now_s, state=state))


@pytest.mark.parametrize(
    ("num_engines", "state"), [(1, "running"), (8, "done"), (8, "failed"), (64, "running")]
)
def test_report_is_well_laid_out(
    num_engines: int, state: RunState, browser: Browser, tmp_path: Path
) -> None:
    page = run_page(tmp_path / "out", num_engines, state)
    charts = [e for e in parsed(page).elements if e.attributes.get("role") == "img"]
    # Five or six plots over time, two histograms, three categories, bars of time and dollars.
    assert len(charts) >= 14
    with opened(browser, page) as shown:
        assert_is_well_laid_out(shown)


def test_report_of_a_run_that_has_just_begun_is_well_laid_out(
    browser: Browser, tmp_path: Path
) -> None:
    folder = LocalFolder(tmp_path / "out")
    now_s = write_example_run(folder, num_parts=0)
    for name in ("live-readings.jsonl", "live.json", "events.jsonl"):
        folder.remove(name)
    with opened(browser, report_page(run_report(folder, now_s=now_s, state="running"))) as shown:
        assert_is_well_laid_out(shown)


@pytest.mark.parametrize("num_engines", [1, 8, 64])
def test_estimate_is_well_laid_out(num_engines: int, browser: Browser) -> None:
    options = tuple(
        replace(
            option,
            plans=tuple(
                replace(plan, replicas=num_engines, num_gpus=num_engines) for plan in option.plans
            ),
        )
        for option in EXAMPLE.options
    )
    with opened(browser, estimate_page(replace(EXAMPLE, options=options))) as shown:
        assert_is_well_laid_out(shown)


def test_estimate_of_forty_options_is_well_laid_out(browser: Browser) -> None:
    estimate = many_options(40)
    launched = tuple(
        AsLaunched(option=option.option, estimate=option, reason="") for option in estimate.options
    )
    apart = replace(estimate.options[0], option="8 x Other", cannot_run="Other: no engine here")
    estimate = replace(estimate, options=(*estimate.options, apart), as_launched=launched, unfit=())
    with opened(browser, estimate_page(estimate)) as shown:
        assert_is_well_laid_out(shown)


@pytest.mark.parametrize(
    ("style", "fault"),
    [
        ("h1 { width: 400px }", "too_wide"),
        ("h1 { height: 5px; overflow: hidden }", "clipped"),
        (".tile > small { width: 500px }", "outside_their_card"),
        (".chart { height: 0 }", "hidden"),
        ("table { margin-left: -20px }", "hidden"),
        (".panel { max-width: 70px } h3 { font-size: 60px }", "broken_words"),
        (".chart .x { left: 0 !important }", "overlapping_labels"),
        ("body { --soft: #777f8a }", "faint"),
    ],
)
def test_fault_of_the_layout_is_found(
    style: str, fault: str, browser: Browser, example_page: str
) -> None:
    """The checks above can fail: a page without faults gets one."""
    with opened(browser, spoilt(example_page, style), width=PHONE) as shown:
        assert shown.faults()[fault]


@pytest.fixture(scope="module")
def example_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_page(tmp_path_factory.mktemp("run") / "out", 3)


def spoilt(page: str, style: str) -> str:
    assert "</style>" in page
    return page.replace("</style>", f"{style}</style>", 1)


@pytest.mark.parametrize(
    ("change", "noted"),
    [
        (lambda page: page.replace("<h1>", '<h1><img src="http://elsewhere.test/x.png">'), True),
        (lambda page: page.replace("<h1>", "<script>1</script><h1>"), True),
        (lambda page: page, False),
    ],
)
def test_request_or_script_that_the_page_forbids_is_noted(
    change: Callable[[str], str], noted: bool, browser: Browser, example_page: str
) -> None:
    with opened(browser, change(example_page)) as shown:
        assert bool(shown.logged) == noted


def test_request_that_leaves_the_page_is_noted(browser: Browser) -> None:
    page = '<!doctype html><img src="http://elsewhere.test/x.png">'
    with opened(browser, page) as shown:
        assert shown.requests == ["http://elsewhere.test/x.png"]
