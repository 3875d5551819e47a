"""Plans that an engine may try: from the search, with a forecast, and back from one that fails."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.engines.ladder import Again
from pipeline.engines.launch import LaunchHistory
from pipeline.planner.sglang.failures import Cause
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import TRIALS_FILE
from schemas.config.run_file import RunFile
from schemas.plan import CardResult, EngineTrial, results_text

Begin = Callable[..., LaunchHistory]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    """Begins the launch of an engine: `begin(trial="auto")`."""

    def make(gpu: str = "RTX PRO 6000", **engine: object) -> LaunchHistory:
        config = RunFile.model_validate(
            {
                "prompts": {"path": "unused"},
                "model": "Qwen/Qwen3.6-27B",
                "output": {"folder": str(tmp_path)},
                "hardware": [{"gpu": gpu}],
                "planner": {"sglang_version": "0.5.23"},
                "engine": {"kind": "sglang", "gpus": 1, "command": ["c"], **engine},
            }
        )
        launch = LaunchHistory(config=config, folder=LocalFolder(tmp_path), log=lambda line: None)
        launch.begin(())
        return launch

    return make


def trial_of(launch: LaunchHistory) -> EngineTrial:
    assert launch.trial is not None
    return launch.trial


def test_distinct_plans_of_the_search_may_be_tried_and_the_best_forecast_runs(begin: Begin) -> None:
    launch = begin(trial={"plans": 5})
    trial = trial_of(launch)
    assert len({option.name for option in trial.options}) == len(trial.options) == 5
    rates = [option.tokens_per_s for option in trial.options]
    assert rates == sorted(rates, reverse=True)
    assert trial.running == trial.options[0].name
    assert begin().text == launch.text
    # MTP's accept length is assumed, so its forecast is less certain.
    sds = {"speculative" in option.name: option.log_sd for option in trial.options}
    assert sds[True] > sds[False]


@pytest.mark.parametrize(
    "engine", [{}, {"trial": "off"}, {"trial": False}, {"trial": "auto", "plan": "off"}]
)
def test_nothing_is_tried_without_the_users_wish(begin: Begin, engine: dict[str, object]) -> None:
    assert begin(**engine).trial is None


def test_plan_that_fails_before_it_is_up_gives_way_to_the_former_one(begin: Begin) -> None:
    launch = begin(trial="auto")
    former, trial = launch.text, trial_of(launch)
    launch.note_up("", {})
    launch.try_plan(trial.options[1].words)
    assert launch.text != former
    assert trial_of(launch).running == trial.options[1].name
    cause = Cause(kind="flag", stage="start", summary="unknown flag", evidence=())
    assert isinstance(launch.note_end(cause, "", now_s=0.0), Again)
    assert launch.text == former
    assert trial_of(launch).running == trial.options[0].name
    assert trial_of(launch).failed == (trial.options[1].name,)


def test_plan_that_was_up_is_blamed_for_its_own_failures_alone(begin: Begin) -> None:
    launch = begin(trial="auto")
    former, second = launch.text, trial_of(launch).options[1]
    launch.try_plan(second.words)
    launch.note_up("", {})
    tried = launch.text
    killed = Cause(kind="killed", stage="serving", summary="killed", evidence=())
    launch.note_end(killed, "", now_s=0.0)
    assert (launch.text, trial_of(launch).failed) == (tried, ())
    crash = Cause(kind="speculation", stage="serving", summary="assertion", evidence=())
    launch.note_end(crash, "", now_s=1.0)
    assert (launch.text, trial_of(launch).failed) == (former, (second.name,))


def test_next_session_starts_with_the_plan_that_engines_ended_on(
    begin: Begin, tmp_path: Path
) -> None:
    trial = trial_of(begin(trial="auto"))
    best = trial.options[2]
    result = CardResult(card=trial.card, best=best.name, plans=())
    other = CardResult(card="B200", best=trial.options[1].name, plans=())
    (tmp_path / TRIALS_FILE).write_text(results_text((other, result)))
    again = trial_of(begin(trial="auto"))
    assert (again.running, again.options) == (best.name, trial.options)
    (tmp_path / TRIALS_FILE).write_text("[1]")
    assert trial_of(begin(trial="auto")).running == trial.options[0].name
