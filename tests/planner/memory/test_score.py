"""The planner keeps to its thresholds on every case that the repository carries."""

from tests.scores import score_planner as score


def test_launches_with_logged_figures_are_within_the_thresholds() -> None:
    found = score.memory_thresholds(list(score.scored_memory()))
    assert [threshold.line() for threshold in found if not threshold.kept] == []


def test_launches_known_to_run_or_fail_are_within_the_thresholds() -> None:
    found = score.cell_thresholds(list(score.scored_cells()))
    assert [threshold.line() for threshold in found if not threshold.kept] == []
