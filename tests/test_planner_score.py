"""The planner keeps to its thresholds on every case that the repository carries."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def score() -> ModuleType:
    """The scoring command, loaded from its file: `tests` is not a package."""
    path = Path(__file__).with_name("score_planner.py")
    spec = importlib.util.spec_from_file_location("score_planner", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["score_planner"] = module
    spec.loader.exec_module(module)
    return module


def test_launches_with_logged_figures_are_within_the_thresholds(score: ModuleType) -> None:
    found = score.memory_thresholds(list(score.scored_memory()))
    assert [threshold.line() for threshold in found if not threshold.kept] == []


def test_launches_known_to_run_or_fail_are_within_the_thresholds(score: ModuleType) -> None:
    found = score.cell_thresholds(list(score.scored_cells()))
    assert [threshold.line() for threshold in found if not threshold.kept] == []
