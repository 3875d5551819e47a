"""The trend of lengths along the input."""

import pytest

from pipeline.live.trend import with_trend
from pipeline.planner.lengths.lengths import LengthModel, output_lengths
from schemas.estimate import LiveReading
from tests.fakes.forecast import steady_reading as reading

LENGTHS = output_lengths(1000.0, 0.5, 32_768, "stated")


# Ten minutes without an answer: six mean lengths.
SETTLED = reading(
    start_s=-600.0, end_s=0.0, engine_age_s=0.0, running_requests=8.0, tokens_per_s=80.0
)


def readings(means: list[float], finished: int = 100) -> list[LiveReading]:
    """Readings of one engine, long after its start: 8 requests at 10 tokens/s each."""
    return [SETTLED] + [
        reading(
            start_s=30.0 * n, end_s=30.0 * (n + 1), engine_age_s=600.0 + 30 * n,
            running_requests=8.0, tokens_per_s=80.0, finished=finished,
            finished_tokens=round(mean * finished),
        )
        for n, mean in enumerate(means)
    ]  # fmt: skip


def mean_left(means: list[float], *, waiting: int, finished: int = 100) -> LengthModel:
    return with_trend(LENGTHS, readings(means, finished), waiting=waiting, in_flight=8)


def test_input_without_order_keeps_its_lengths() -> None:
    assert mean_left([1000.0, 1030.0, 980.0, 1010.0, 990.0], waiting=500) == LENGTHS


def test_few_rows_show_no_trend_that_is_not_chance() -> None:
    # Means of two rows of CV 0.5 differ by 35 % anyway.
    assert mean_left([800.0, 900.0, 1000.0, 1200.0, 1300.0], waiting=20, finished=2) == LENGTHS


def test_rows_to_come_are_longer_where_the_input_is_sorted() -> None:
    # Half of 1,000 rows have ended, each 100 of them 10 % longer: a slope of ln 1.1 / 0.1 = 0.953.
    # Its error is 0.5 / sqrt(100 (2 x 0.2^2 + 2 x 0.1^2)) = 0.158, so the garrote leaves
    # 0.953 (1 - (2.5 x 0.158 / 0.953)^2) = 0.790. The rows so far were at 0.25 on average, the last
    # at 0.5; half of the trend to 0.75, the middle of the 492 of 500 that wait, is expected:
    # 1,000 exp(0.790 (0.25 + 0.5 x 0.25 x 0.984)) = 1,343.
    found = mean_left([826.0, 909.0, 1000.0, 1100.0, 1210.0], waiting=492)
    assert found.summary.mean_tokens == pytest.approx(1343, rel=0.005)
    assert found.summary.mean_relative_error > LENGTHS.summary.mean_relative_error


def test_sorted_from_long_to_short_is_the_other_way_round() -> None:
    found = mean_left([1210.0, 1100.0, 1000.0, 909.0, 826.0], waiting=492)
    assert found.summary.mean_tokens == pytest.approx(744.6, rel=0.005)


def ramp(start_s: float, *, running: float) -> list[LiveReading]:
    """Readings of an engine that was filled at once: its first answers are short."""
    means = (250, 400, 550, 650, 750, 820, 880, 920, 950, 970, 980, 990, 995, 1000)
    return [
        reading(
            start_s=start_s + 30.0 * n, end_s=start_s + 30.0 * (n + 1),
            engine_age_s=start_s + 30.0 * n, running_requests=running, tokens_per_s=10 * running,
            finished=60, finished_tokens=60 * mean,
        )
        for n, mean in enumerate(means)
    ]  # fmt: skip


def test_first_answers_are_short_without_any_trend() -> None:
    found = with_trend(LENGTHS, ramp(0.0, running=8.0), waiting=1000, in_flight=8)
    assert found.summary.mean_tokens == pytest.approx(1000, rel=0.01)


def test_engine_that_is_filled_again_after_its_canary_starts_over() -> None:
    readings = [*ramp(0.0, running=2.0), *ramp(420.0, running=8.0)]
    found = with_trend(LENGTHS, readings, waiting=1000, in_flight=8)
    assert found.summary.mean_tokens == pytest.approx(1000, rel=0.01)


def test_waves_after_a_start_are_no_trend() -> None:
    # Half of the answers are short: they come first, and then the long ones all at once.
    waves = (250, 260, 240, 2900, 255, 1400, 250, 1900)
    found = mean_left([float(mean) for mean in waves], waiting=8000, finished=60)
    assert found.summary.mean_tokens == pytest.approx(1000, rel=0.02)


def test_trend_is_trusted_for_as_far_again_as_it_has_been_seen() -> None:
    # 500 rows of a million: their slope says little of the end of the input.
    found = mean_left([826.0, 909.0, 1000.0, 1100.0, 1210.0], waiting=1_000_000)
    assert found.summary.mean_tokens < 1600


def test_nothing_left_has_no_trend() -> None:
    found = with_trend(LENGTHS, readings([826.0, 909.0, 1000.0, 1100.0]), waiting=0, in_flight=0)
    assert found == LENGTHS
