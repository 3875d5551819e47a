"""The offset of the true rate from the predicted one, worked out by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.live.offset import MeasuredRate, rate_offset


def rate_at(running: float) -> float:
    """Predict tokens/s: 32 ms per token alone, 0.5 ms more for each other running request."""
    return running / (0.032 + 0.0005 * running)


def test_an_anchor_moves_the_rate_by_how_well_each_is_known() -> None:
    # Prior sd 0.2; an anchor at half the batch, sd 0.08, 30 % above the prediction: weight
    # 0.04 / (0.04 + 0.0064) = 0.862, so e^(0.862 x ln 1.3) = e^0.2262 = 1.254; sd 0.0743.
    anchor = MeasuredRate(running_requests=40, tokens_per_s=1300, predicted_tokens_per_s=1000)
    found = rate_offset([anchor], 80, prior_sd=0.2, reading_sd=0.0)
    assert math.exp(found.mean) == pytest.approx(1.254, abs=0.001)
    assert found.sd == pytest.approx(0.0743, abs=0.0001)


@pytest.mark.parametrize(("target", "distance_sd"), [(42, 0.02), (80, 0.08), (150, 0.13), (8, 0.2)])
def test_a_far_anchor_says_less(target: float, distance_sd: float) -> None:
    anchor = MeasuredRate(running_requests=40, tokens_per_s=1300, predicted_tokens_per_s=1000)
    # 1 / sd^2 = 1 / 0.2^2 + 1 / distance^2
    expected = 1 / math.sqrt(1 / 0.04 + 1 / distance_sd**2)
    assert rate_offset([anchor], target, prior_sd=0.2, reading_sd=0.0).sd == pytest.approx(expected)


def test_many_readings_at_another_batch_stay_as_far_away() -> None:
    point = MeasuredRate(
        running_requests=40, tokens_per_s=1300, predicted_tokens_per_s=1000, independent=10
    )
    few = rate_offset([point], 80, prior_sd=0.2, reading_sd=0.05)
    many = rate_offset([point] * 1000, 80, prior_sd=0.2, reading_sd=0.05)
    assert 0.07 < many.sd < few.sd


def test_two_batches_make_a_line_that_drops_the_predicted_slope() -> None:
    # True seconds a token: 0.040 + 0.001 b. At 20 and 60: 0.06 and 0.1 s; at 40 then 0.08 s, which
    # is 500 tokens/s where the prediction says 40 / 0.052 = 769: offset ln 0.65 = -0.431.
    points = [
        MeasuredRate(
            running_requests=running,
            tokens_per_s=running / (0.040 + 0.001 * running),
            predicted_tokens_per_s=rate_at(running),
        )
        for running in (20, 60)
    ]
    found = rate_offset(points, 40, prior_sd=0.2, reading_sd=0.05, predicted_at_target=rate_at(40))
    # Prior 0 weighs 1 % beside a line known to 2 %.
    assert found.mean == pytest.approx(math.log(0.65) * 0.99, abs=0.002)
    outside = rate_offset(
        points, 100, prior_sd=0.2, reading_sd=0.05, predicted_at_target=rate_at(100)
    )
    assert outside.sd > found.sd


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(min_value=1, max_value=512),
            st.floats(min_value=0.5, max_value=2),
            st.floats(min_value=0.1, max_value=100),
        ),
        max_size=6,
    ),
    st.floats(min_value=1, max_value=512),
)
def test_readings_only_narrow_and_never_reach_beyond_what_they_say(
    given_points: list[tuple[float, float, float]], target: float
) -> None:
    points = [
        MeasuredRate(
            running_requests=running, tokens_per_s=100 * ratio, predicted_tokens_per_s=100,
            independent=independent,
        )
        for running, ratio, independent in given_points
    ]  # fmt: skip
    found = rate_offset(points, target, prior_sd=0.2, reading_sd=0.05)
    ratios = [0.0, *(point.log_ratio() for point in points)]
    assert found.sd <= 0.2 + 1e-9
    assert min(ratios) - 1e-9 <= found.mean <= max(ratios) + 1e-9
