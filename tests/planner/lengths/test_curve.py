"""Survival of requests on a grid, against the closed forms."""

import pytest

from pipeline.planner.lengths.curve import SurvivalCurve
from pipeline.planner.lengths.lengths import log_normal_cut
from pipeline.planner.lengths.shapes import (
    SampledLengths,
    mean_emitted,
    mean_remaining,
    moment,
    survival,
)

LOG_NORMAL = log_normal_cut(2500.0, 1.2, 32_768)
TWO = SampledLengths(bin_means=(100.0, 2000.0), weights=(0.25, 0.75), limit_tokens=10_000)


@pytest.mark.parametrize("tokens", [10.0, 900.0, 2500.0, 12_000.0, 30_000.0])
def test_curve_of_a_log_normal_is_its_survival(tokens: float) -> None:
    curve = SurvivalCurve.of(LOG_NORMAL)
    assert curve.survival(tokens) == pytest.approx(survival(LOG_NORMAL, tokens), rel=0.01)
    assert curve.mean_left(tokens) == pytest.approx(mean_remaining(LOG_NORMAL, tokens), rel=0.01)


def test_means_of_a_curve_are_those_of_its_lengths() -> None:
    curve = SurvivalCurve.of(LOG_NORMAL)
    assert curve.mean == pytest.approx(moment(LOG_NORMAL, 1), rel=0.002)
    assert curve.mean_steady_left == pytest.approx(mean_emitted(LOG_NORMAL), rel=0.002)


def test_steps_of_sampled_lengths_stay_steps() -> None:
    curve = SurvivalCurve.of(TWO)
    assert (curve.survival(99.0), curve.survival(100.0), curve.survival(1999.0)) == (1, 0.75, 0.75)
    assert curve.mean == pytest.approx(0.25 * 100 + 0.75 * 2000)
    assert curve.outlives(0.0, 100.0) == pytest.approx(0.75)
    assert curve.outlives(500.0, 1499.0) == pytest.approx(1.0)
    assert curve.mean_left(500.0) == pytest.approx(1500.0)


def test_request_beyond_all_lengths_lives_as_long_again() -> None:
    curve = SurvivalCurve.of(TWO)
    assert not curve.is_beyond(1999.0)
    assert curve.is_beyond(3000.0)
    assert curve.outlives(3000.0, 3000.0) == pytest.approx(0.5)
    assert curve.outlives(3000.0, 7000.0) == 0.0, "the limit ends it"
