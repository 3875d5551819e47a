"""The estimate of a running job on replayed engines whose truth is known."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.live.estimate import expectation
from pipeline.live.log import LiveLog
from pipeline.live.update import Expectation, Planned, RowCounts, Unplanned, run_update
from pipeline.planner.lengths.lengths import log_normal_cut
from pipeline.planner.lengths.shapes import moment
from pipeline.planner.rate.throughput import rate_at
from pipeline.run_file import configured_group
from pipeline.store.folder import LocalFolder
from schemas.config.planning import HardwareConfig
from schemas.config.run_file import RunFile
from schemas.estimate import RunUpdate
from tests.fakes.known import known
from tests.fakes.live_run import TODAY, run_file
from tests.fakes.simulated_engine import Truth, replay

ROWS = 20_000


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    return run_file(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def expected(config: RunFile) -> Expectation:
    found = expectation(LocalFolder(Path(config.output.folder)), config, today=TODAY)
    assert isinstance(found.plan, Planned), found.plan
    return found


def as_forecast(expected: Expectation, mean_tokens: float = 2500.0) -> Truth:
    """The engine just as the dry run has it."""
    assert isinstance(expected.plan, Planned)
    best = expected.plan.groups[0].best
    work = replace(expected.plan.load.workload(), output_tokens_mean=mean_tokens)
    running = round(best.resident.running_requests)
    return Truth(
        running_requests=running,
        cap_requests=best.resident.cap_requests,
        tokens_per_s=rate_at(best.replica, running, work).tokens_per_s,
        shape=log_normal_cut(mean_tokens, 1.2, 32_768),
        prompt_tokens=512.0,
    )


def updates(
    truth: Truth, config: RunFile, expected: Expectation, *, completions: int, every: int, seed: int
) -> list[tuple[int, RunUpdate]]:
    """The update after each so many completions of one engine."""
    log = LiveLog(began_at_s=0.0, run_file=config.model_dump(mode="json"))
    found = []
    steps = replay(log, truth, engine="w0", completions=completions, every=every, seed=seed)
    for done in steps:
        rows = RowCounts(rows_total=ROWS, rows_done=done, rows_failed=0)
        found.append((done, run_update(log, config, rows, expected)))
    return found


# --- the band ----------------------------------------------------------------------------------


def test_band_covers_the_truth_and_narrows(config: RunFile, expected: Expectation) -> None:
    # Completions are 40 % longer than the run file says and the engine is 15 % slower.
    truth = as_forecast(expected, 3500.0)
    truth.tokens_per_s *= 0.85
    held = of = 0
    for seed in range(3):
        found = updates(truth, config, expected, completions=1200, every=300, seed=seed)
        widths = []
        for done, seen in found:
            left_s = (ROWS - done) * moment(truth.shape, 1) / truth.tokens_per_s
            # The engine of the replay is never down; the estimate does not know that yet.
            days = left_s / 86_400 / seen.availability.p50
            held += known(seen.days_left).p10 <= days <= known(seen.days_left).p90
            of += 1
            widths.append(known(seen.days_left).p90 / known(seen.days_left).p10)
        # 1.2816 x 0.05 of it is what the rows to come may differ from those so far.
        assert widths[-1] < 1.3
        assert widths[-1] < widths[0]
        assert found[-1][1].expected_days_left is not None
        assert known(found[-1][1].days_left).p50 > 1.3 * found[-1][1].expected_days_left.p50
    # 80 % of them, were they independent.
    assert held >= 0.6 * of


def test_dollars_to_go_are_those_of_all_cards(config: RunFile, expected: Expectation) -> None:
    truth = as_forecast(expected)
    (_, seen), *_ = updates(truth, config, expected, completions=400, every=400, seed=1)
    assert seen.usd_left is not None
    assert seen.usd_left.p50 == pytest.approx(known(seen.days_left).p50 * 24 * 2 * 2.0)
    assert seen.groups[0].engines == 1


# --- what disagrees ----------------------------------------------------------------------------


def disagreeing(truth: Truth, config: RunFile, expected: Expectation) -> set[str]:
    found = updates(truth, config, expected, completions=1500, every=1500, seed=5)
    return {each.input for each in found[-1][1].deviations}


def test_run_as_forecast_contradicts_nothing(config: RunFile, expected: Expectation) -> None:
    assert disagreeing(as_forecast(expected), config, expected) == set()


def test_small_batch_is_told_as_that_alone(config: RunFile, expected: Expectation) -> None:
    assert isinstance(expected.plan, Planned)
    best = expected.plan.groups[0].best
    truth = as_forecast(expected)
    few = truth.running_requests // 2
    rate = rate_at(best.replica, few, expected.plan.load.workload()).tokens_per_s
    truth.running_requests, truth.cap_requests, truth.tokens_per_s = few, few, rate
    assert disagreeing(truth, config, expected) == {"running_requests"}


def test_slow_step_is_told_as_that_alone(config: RunFile, expected: Expectation) -> None:
    truth = as_forecast(expected)
    truth.tokens_per_s *= 0.5
    assert disagreeing(truth, config, expected) == {"step_time"}


def test_heavy_prompts_are_told_as_prefill_alone(config: RunFile, expected: Expectation) -> None:
    assert isinstance(expected.plan, Planned)
    best = expected.plan.groups[0].best
    truth = as_forecast(expected)
    truth.prompt_tokens = 4096.0
    work = replace(expected.plan.load.workload(), prompt_tokens_mean=4096.0)
    truth.tokens_per_s = rate_at(best.replica, truth.running_requests, work).tokens_per_s
    assert disagreeing(truth, config, expected) == {"prefill_share"}


def test_short_accept_length_is_told_as_that_alone(tmp_path: Path) -> None:
    mtp = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    flags = [*mtp.split(), "--speculative-num-draft-tokens", "4"]
    engine = {"kind": "sglang", "python": "python", "count": 2, "flags": flags}
    config = run_file(tmp_path, engine=engine)
    expected = expectation(LocalFolder(tmp_path), config, today=TODAY)
    assert isinstance(expected.plan, Planned)
    best = expected.plan.groups[0].best
    truth = as_forecast(expected)
    truth.accept_length = 2.6
    assert disagreeing(truth, config, expected) == set()
    truth.accept_length = 1.7
    work = expected.plan.load.workload()
    slow = rate_at(best.replica, truth.running_requests, work, accept_length=1.7)
    truth.tokens_per_s = slow.tokens_per_s
    assert disagreeing(truth, config, expected) == {"accept_length"}


# --- without a dry run -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engine": {"kind": "embedded"}}, "embedded"),
        ({"model": "nobody/knows-it"}, "nobody/knows-it"),
        ({"hardware": []}, "names no card"),
        ({"hardware": [{"gpu": "b200"}, {"gpu": "h200"}]}, "2 kinds of cards"),
    ],
)
def test_measured_figures_stand_alone_where_there_is_no_dry_run(
    tmp_path: Path, expected: Expectation, changes: dict[str, object], why: str
) -> None:
    config = run_file(tmp_path, **changes)
    own = expectation(LocalFolder(tmp_path), config, today=TODAY)
    assert isinstance(own.plan, Unplanned)
    assert why in own.plan.reason
    truth = as_forecast(expected)
    seen = updates(truth, config, own, completions=800, every=800, seed=2)[-1][1]
    assert seen.no_dry_run == own.plan.reason
    assert (seen.expected_days_left, seen.usd_left, seen.deviations) == (None, None, ())
    assert known(seen.tokens_per_s).p50 == pytest.approx(truth.tokens_per_s, rel=0.05)


# --- several kinds of cards --------------------------------------------------------------------


def test_engines_of_two_cards_are_two_groups_that_add_up(tmp_path: Path) -> None:
    config = run_file(tmp_path)
    cards = [HardwareConfig(gpu="rtx-pro-6000", count=1), HardwareConfig(gpu="b200", count=1)]
    hardware = [configured_group(card, {}) for card in cards]
    expected = expectation(LocalFolder(tmp_path), config, today=TODAY, hardware=hardware)
    assert isinstance(expected.plan, Planned)
    log = LiveLog(began_at_s=0.0, run_file={})
    rates = {}
    for engine, rated in zip(("w0", "w1"), expected.plan.groups, strict=True):
        truth = replace(as_forecast(expected), tokens_per_s=0.9 * rated.rate.tokens_per_s)
        truth.running_requests = round(rated.best.resident.running_requests)
        # As many as take the same time on each.
        ends = round(1.5 * truth.tokens_per_s)
        list(replay(log, truth, engine=engine, completions=ends, every=ends, seed=3))
        log.cards[engine] = rated.group.hardware.gpu.name
        rates[log.cards[engine]] = truth.tokens_per_s
    seen = run_update(
        log, config, RowCounts(rows_total=ROWS, rows_done=1600, rows_failed=0), expected
    )
    assert len(seen.groups) == 2
    assert {group.engines for group in seen.groups} == {1}
    assert known(seen.tokens_per_s).p50 == pytest.approx(sum(rates.values()), rel=0.05)
