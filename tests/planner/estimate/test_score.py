"""The estimate keeps to its thresholds on every reading that the repository carries."""

import pytest

from tests.scores.score_estimate import rate_thresholds, running_cells, running_thresholds
from tests.scores.throughput_readings import scored


@pytest.mark.slow
def test_rates_bands_and_anchors_are_within_the_thresholds() -> None:
    found = rate_thresholds(scored())
    assert [threshold.line() for threshold in found if not threshold.kept] == []


def test_running_batches_are_within_the_threshold() -> None:
    found = running_thresholds(running_cells())
    assert [threshold.line() for threshold in found if not threshold.kept] == []
