"""A running job's estimate on replayed engines whose truth is known."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from jobs.estimate import main
from pipeline.dataset.run_record import list_in_manifest, write_run
from pipeline.live.estimate import Expectation, RowCounts, expectation, update
from pipeline.live.eta import LiveEta
from pipeline.live.log import LiveLog, LogKeeper, engine_seconds, read_live_log
from pipeline.live.update import Expected, NoDryRun
from pipeline.planner.lengths.lengths import log_normal_cut
from pipeline.planner.lengths.shapes import moment
from pipeline.planner.rate.throughput import rate_at
from pipeline.run_file import configured_group
from pipeline.store.folder import LocalFolder
from schemas.config import EngineConfig, HardwareConfig, LengthsConfig, RunFile
from schemas.estimate import RunUpdate
from schemas.live import LiveSpan
from schemas.manifest import RunIdentity, RunRecord, Session
from schemas.progress import Progress
from tests.fakes.simulated_engine import Truth, replay

TODAY = date(2026, 11, 30)
ROWS = 20_000


def run_file(folder: Path, **changes: object) -> RunFile:
    values: dict[str, object] = {
        "prompts": {"path": "prompts.jsonl"},
        "model": "Qwen/Qwen3.6-27B",
        "output": {"folder": str(folder)},
        "sampling": {"max_tokens": 32_768},
        "engine": {"kind": "sglang", "python": "python", "count": 2},
        "hardware": [{"gpu": "rtx-pro-6000", "count": 2, "usd_per_gpu_hour": 2.0}],
        "lengths": {
            "prompt_tokens_mean": 512.0, "output_tokens_mean": 2500.0, "output_tokens_cv": 1.2,
        },
    }  # fmt: skip
    return RunFile.model_validate(values | changes)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    return run_file(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def expected(config: RunFile) -> Expectation:
    found = expectation(LocalFolder(Path(config.output.folder)), config, today=TODAY)
    assert isinstance(found.dry_run, Expected), found.dry_run
    return found


def as_forecast(expected: Expectation, mean_tokens: float = 2500.0) -> Truth:
    """The engine just as the dry run has it."""
    assert isinstance(expected.dry_run, Expected)
    best = expected.dry_run.groups[0].best
    work = replace(expected.dry_run.load.workload(), output_tokens_mean=mean_tokens)
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
        found.append((done, update(log, config, rows, expected)))
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
            held += seen.days_left.p10 <= days <= seen.days_left.p90
            of += 1
            widths.append(seen.days_left.p90 / seen.days_left.p10)
        assert widths[-1] < 1.25
        assert widths[-1] < widths[0]
        assert found[-1][1].expected_days_left is not None
        assert found[-1][1].days_left.p50 > 1.3 * found[-1][1].expected_days_left.p50
    # 80 % of them, were they independent.
    assert held >= 0.6 * of


def test_dollars_to_go_are_those_of_all_cards(config: RunFile, expected: Expectation) -> None:
    truth = as_forecast(expected)
    (_, seen), *_ = updates(truth, config, expected, completions=400, every=400, seed=1)
    assert seen.usd_left is not None
    assert seen.usd_left.p50 == pytest.approx(seen.days_left.p50 * 24 * 2 * 2.0)
    assert seen.groups[0].engines == 1


# --- what disagrees ----------------------------------------------------------------------------


def disagreeing(truth: Truth, config: RunFile, expected: Expectation) -> set[str]:
    found = updates(truth, config, expected, completions=1500, every=1500, seed=5)
    return {each.input for each in found[-1][1].disagreements}


def test_run_as_forecast_contradicts_nothing(config: RunFile, expected: Expectation) -> None:
    assert disagreeing(as_forecast(expected), config, expected) == set()


def test_small_batch_is_told_as_that_alone(config: RunFile, expected: Expectation) -> None:
    assert isinstance(expected.dry_run, Expected)
    best = expected.dry_run.groups[0].best
    truth = as_forecast(expected)
    few = truth.running_requests // 2
    rate = rate_at(best.replica, few, expected.dry_run.load.workload()).tokens_per_s
    truth.running_requests, truth.cap_requests, truth.tokens_per_s = few, few, rate
    assert disagreeing(truth, config, expected) == {"running_requests"}


def test_slow_step_is_told_as_that_alone(config: RunFile, expected: Expectation) -> None:
    truth = as_forecast(expected)
    truth.tokens_per_s *= 0.55
    assert disagreeing(truth, config, expected) == {"step_time"}


def test_heavy_prompts_are_told_as_prefill_alone(config: RunFile, expected: Expectation) -> None:
    assert isinstance(expected.dry_run, Expected)
    best = expected.dry_run.groups[0].best
    truth = as_forecast(expected)
    truth.prompt_tokens = 4096.0
    work = replace(expected.dry_run.load.workload(), prompt_tokens_mean=4096.0)
    truth.tokens_per_s = rate_at(best.replica, truth.running_requests, work).tokens_per_s
    assert disagreeing(truth, config, expected) == {"prefill_share"}


def test_short_accept_length_is_told_as_that_alone(tmp_path: Path) -> None:
    mtp = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    flags = [*mtp.split(), "--speculative-num-draft-tokens", "4"]
    engine = {"kind": "sglang", "python": "python", "count": 2, "flags": flags}
    config = run_file(tmp_path, engine=engine)
    expected = expectation(LocalFolder(tmp_path), config, today=TODAY)
    assert isinstance(expected.dry_run, Expected)
    best = expected.dry_run.groups[0].best
    truth = as_forecast(expected)
    truth.accept_length = 2.6
    assert disagreeing(truth, config, expected) == set()
    truth.accept_length = 1.7
    work = expected.dry_run.load.workload()
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
    assert isinstance(own.dry_run, NoDryRun)
    assert why in own.dry_run.reason
    truth = as_forecast(expected)
    seen = updates(truth, config, own, completions=800, every=800, seed=2)[-1][1]
    assert seen.no_dry_run == own.dry_run.reason
    assert (seen.expected_days_left, seen.usd_left, seen.disagreements) == (None, None, ())
    assert seen.tokens_per_s.p50 == pytest.approx(truth.tokens_per_s, rel=0.05)


# --- the log -----------------------------------------------------------------------------------


def span(**changes: object) -> LiveSpan:
    given: dict[str, object] = {
        "duration_s": 30.0, "engine_age_s": 0.0, "cap_requests": 8, "running_requests": 8.0,
        "tokens_per_s": 100.0, "prompt_tokens_per_s": 10.0, "accept_length": None,
        "counted_by": "answers", "finished": ((100, 2),), "running": ((50, 8),), **changes,
    }  # fmt: skip
    return LiveSpan(**given)  # type: ignore[arg-type]


def test_log_stays_small_and_keeps_its_sums() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    for number in range(3000):
        told = span(engine_age_s=30.0 * number, tokens_per_s=100.0 + number % 2)
        log.add("w0", told, now_s=30.0 * (number + 1))
    readings = log.readings["w0"]
    assert len(readings) <= 120
    tokens = sum(each.tokens_per_s * (each.end_s - each.start_s) for each in readings)
    assert tokens == pytest.approx(30.0 * 3000 * 100.5)
    assert engine_seconds(log) == pytest.approx((90_000.0, 90_000.0))
    assert log.finished == {100: 6000}
    assert sorted(log.running_tokens()) == [50] * 8


def test_readings_of_two_launches_are_never_merged() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    for number in range(400):
        launch, within = divmod(number, 50)
        told = span(engine_age_s=30.0 * within, cap_requests=8 + launch)
        log.add("w0", told, now_s=1000.0 * launch + 30.0 * (number + 1))
    assert len({each.cap_requests for each in log.readings["w0"]}) == 8
    ran_s, passed_s = engine_seconds(log)
    assert passed_s - ran_s == pytest.approx(7 * 1000.0)


def test_log_comes_back_from_its_file_and_a_session_between_is_no_loss(tmp_path: Path) -> None:
    folder, config = LocalFolder(tmp_path), run_file(tmp_path)
    keeper = LogKeeper.opened(folder, config, now_s=1000.0)
    keeper.log.add("w0", span(), now_s=1040.0)
    keeper.write()
    again = LogKeeper.opened(folder, config, now_s=9000.0)
    assert list(again.log.running_tokens()) == []
    again.log.add("w0", span(), now_s=9035.0)
    again.write()
    log = read_live_log(folder)
    assert log is not None
    assert RunFile.model_validate(log.run_file) == config
    assert log.finished == {100: 4}
    assert engine_seconds(log) == pytest.approx((60.0, 60.0))


def test_worker_that_follows_a_dead_one_has_its_slot(tmp_path: Path) -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    log.add("w0", span(), now_s=30.0)
    log.add("w0r1", span(), now_s=100.0)
    assert len(list(log.running_tokens())) == 8
    assert engine_seconds(log) == pytest.approx((60.0, 100.0))


def test_spoilt_file_of_readings_does_not_stop_a_run(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.write_whole("live-readings.jsonl", b"{]\n")
    keeper = LogKeeper.opened(folder, run_file(tmp_path), now_s=1000.0)
    keeper.log.add("w0", span(), now_s=1040.0)
    keeper.write()
    log = read_live_log(folder)
    assert log is not None
    assert log.num_added == 1


def test_dry_run_is_of_the_launch_that_came_up(tmp_path: Path) -> None:
    folder, config = LocalFolder(tmp_path), run_file(tmp_path)
    engine = EngineConfig(kind="sglang", command=["c"], max_running_requests=3)
    config = config.model_copy(update={"engine": engine})
    launched = "--tp-size 2 --mem-fraction-static 0.80 --max-running-requests 3"
    as_it_runs = expectation(folder, config, today=TODAY, launched=launched).dry_run
    assert isinstance(as_it_runs, Expected)
    best = as_it_runs.groups[0].best
    assert best.replica.settings.tp_size == 2
    # How many run is what memory leaves, not what the launch was limited to.
    assert best.resident.cap_requests > 3


def test_dry_run_keeps_the_stages_of_the_launch_and_adds_none(tmp_path: Path) -> None:
    config = run_file(tmp_path)
    engine = config.engine.model_copy(update={"gpus": 2})
    config = config.model_copy(update={"engine": engine})
    for launched, layout in (("--pp-size 2", (1, 2)), ("--mem-fraction-static 0.8", (2, 1))):
        dry_run = expectation(LocalFolder(tmp_path), config, today=TODAY, launched=launched).dry_run
        assert isinstance(dry_run, Expected)
        settings = dry_run.groups[0].best.replica.settings
        assert (settings.tp_size, settings.pp_size) == layout


# --- calibrations of the run -------------------------------------------------------------------


def calibration(folder: LocalFolder, name: str, **changes: object) -> None:
    """What an engine of the run measured: 10 GiB less than the card should leave free."""
    values = {
        "model": "Qwen/Qwen3.6-27B", "gpu": "RTX PRO 6000 Blackwell",
        "release": "0.5.23", "layout": "1",
        "free_before_load_bytes": 84 << 30, "weights_bytes": 51 << 30, **changes,
    }  # fmt: skip
    folder.make("calibrations")
    folder.write_whole(f"calibrations/{name}.json", json.dumps(values).encode())


def expected_cap(folder: LocalFolder, config: RunFile, launched: str | None = None) -> float:
    expected = expectation(folder, config, today=TODAY, launched=launched).dry_run
    assert isinstance(expected, Expected), expected
    return expected.groups[0].best.resident.cap_requests


def test_engines_own_figures_replace_what_the_plan_assumes(
    tmp_path: Path, expected: Expectation
) -> None:
    folder, config = LocalFolder(tmp_path), run_file(tmp_path)
    assumed = expected_cap(folder, config)
    calibration(folder, "a")
    assert expected_cap(folder, config) < assumed
    measured = expectation(folder, config, today=TODAY).dry_run
    assert isinstance(measured, Expected)
    assert isinstance(expected.dry_run, Expected)
    # The cap is measured and widens no band.
    names = {spread.name for spread in measured.groups[0].rate.spreads}
    assert {each.name for each in expected.dry_run.groups[0].rate.spreads} - names == {
        "running requests"
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"}, {"gpu": "B200"}, {"release": "0.5.20"}, {"layout": "2"},
        {"weights_bytes": "51"},
    ],
)  # fmt: skip
def test_figures_of_another_launch_change_nothing(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    folder, config = LocalFolder(tmp_path), run_file(tmp_path)
    assumed = expected_cap(folder, config)
    calibration(folder, "a", **changes)
    folder.write_whole("calibrations/b.json", b"\xff{]")
    assert expected_cap(folder, config) == assumed


def test_figures_are_those_of_the_layout_that_came_up(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    config = run_file(tmp_path, hardware=[{"gpu": "rtx-pro-6000", "count": 2}])
    one, two = "--tp-size 1", "--tp-size 2"
    assumed = expected_cap(folder, config, one), expected_cap(folder, config, two)
    calibration(folder, "a", layout="2", weights_bytes=26 << 30)
    assert expected_cap(folder, config, one) == assumed[0]
    assert expected_cap(folder, config, two) < assumed[1]


# --- several kinds of cards --------------------------------------------------------------------


def test_engines_of_two_cards_are_two_groups_that_add_up(tmp_path: Path) -> None:
    config = run_file(tmp_path)
    cards = [HardwareConfig(gpu="rtx-pro-6000", count=1), HardwareConfig(gpu="b200", count=1)]
    hardware = [configured_group(card, {}) for card in cards]
    expected = expectation(LocalFolder(tmp_path), config, today=TODAY, hardware=hardware)
    assert isinstance(expected.dry_run, Expected)
    log = LiveLog(began_at_s=0.0, run_file={})
    rates = {}
    for engine, rated in zip(("w0", "w1"), expected.dry_run.groups, strict=True):
        truth = replace(as_forecast(expected), tokens_per_s=0.9 * rated.rate.tokens_per_s)
        truth.running_requests = round(rated.best.resident.running_requests)
        # As many as take the same time on each.
        ends = round(1.5 * truth.tokens_per_s)
        list(replay(log, truth, engine=engine, completions=ends, every=ends, seed=3))
        log.cards[engine] = rated.group.hardware.gpu.name
        rates[log.cards[engine]] = truth.tokens_per_s
    seen = update(log, config, RowCounts(rows_total=ROWS, rows_done=1600, rows_failed=0), expected)
    assert len(seen.groups) == 2
    assert {group.engines for group in seen.groups} == {1}
    assert seen.tokens_per_s.p50 == pytest.approx(sum(rates.values()), rel=0.05)


# --- the running job ---------------------------------------------------------------------------


def test_driver_takes_up_what_the_folder_says(tmp_path: Path) -> None:
    folder = filled_folder(tmp_path)
    config = run_file(tmp_path, engine={"kind": "embedded"}, sampling={"max_tokens": 200})
    config = config.model_copy(update={"lengths": LengthsConfig()})
    eta = LiveEta(folder=folder, config=config, today=TODAY)
    assert eta.look() is None
    progress = Progress(
        session_id="s", updated_at_s=1.0, state="running", rows_total=100, rows_done=30,
        rows_failed=0, rows_error=0, completion_tokens=0, last_publish_s=None, leases_lost=0,
        workers=(),
    )  # fmt: skip
    eta.follow(progress)
    first = eta.look()
    assert first is not None
    assert eta.days_left == first.days_left
    eta.follow(replace(progress, rows_done=90))
    later = eta.look()
    assert later is not None
    assert later.days_left.p50 < first.days_left.p50
    told = replace(progress, days_left=eta.days_left)
    assert Progress.from_json(told.to_json()) == told
    assert eta.events() == []


# --- the command -------------------------------------------------------------------------------


def filled_folder(tmp_path: Path) -> LocalFolder:
    """A folder as a stopped run leaves it, 30 of 100 rows done."""
    folder = LocalFolder(tmp_path)
    limits = {"sampling": {"max_tokens": 200}, "lengths": {}}
    config = run_file(tmp_path, engine={"kind": "embedded"}, **limits)
    record = RunRecord(
        run_id="r", created_at_s=0, identity=RunIdentity(settings={}), carried_schema=""
    )
    write_run(folder, record)
    session = Session(
        session_id="s", started_at_s=1000.0, rows_total=100, rows_done=30, rows_error=0,
        rows_outside_input=0,
    )  # fmt: skip
    list_in_manifest(folder, session)
    keeper = LogKeeper.opened(folder, config, now_s=1000.0)
    for number in range(10):
        told = span(engine_age_s=30.0 * number, finished=((60, 1), (90, 1), (120, 1)))
        keeper.log.add("w0", told, now_s=1030.0 + 30.0 * number)
    keeper.write()
    return folder


def test_command_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = filled_folder(tmp_path)
    assert main(["--update-from", str(folder.root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows_total"], found["rows_done"], found["completions_left"]) == (100, 30, 70)
    assert found["counted_by"] == "answers"
    assert found["tokens_per_s"]["p50"] == pytest.approx(100, rel=0.02)
    assert found["days_left"]["p10"] < found["days_left"]["p50"] < found["days_left"]["p90"]
    assert main(["--update-from", str(folder.root)]) == 0
    text = capsys.readouterr().out
    assert "time left" in text
    assert "none to compare with: embedded engines" in text


def test_folder_without_run_or_readings_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--update-from", str(tmp_path)]) == 2
    assert "no run here" in capsys.readouterr().err
    folder = filled_folder(tmp_path)
    folder.remove("live-readings.jsonl")
    assert main(["--update-from", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no readings here" in error
    assert error.count("\n") == 1
    folder.write_whole("live-readings.jsonl", b'{"record": "reading"}\n')
    assert main(["--update-from", str(tmp_path)]) == 2
    assert "live-readings.jsonl line 1" in capsys.readouterr().err
