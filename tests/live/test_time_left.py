"""The time left: work over rate while the queue lasts, then the last requests one by one."""

import math
from dataclasses import replace

import pytest

from pipeline.live.time_left import RowsLeft, TimeLeft, time_left
from pipeline.planner.lengths.lengths import LengthModel, output_lengths
from pipeline.planner.lengths.shapes import SampledLengths
from pipeline.planner.rate.errors import RateGroup
from schemas.units import SECONDS_PER_DAY

# Two engines, 50 requests each at 10 tokens/s; one alone runs at 20.
ENGINES = RateGroup(
    name="engines", replicas=2, gpus_per_replica=1, tokens_per_s=500.0, running_requests=50.0,
    small_step_s=0.05, load_s=0.0, spreads=(),
)  # fmt: skip
ONE_LENGTH = output_lengths(1000.0, 0.0, 10_000, "stated", mean_relative_error=0.0)


def rows(rows_open: int, running: list[int], **changes: object) -> RowsLeft:
    given = RowsLeft(
        rows_open=rows_open, running=running, tokens_since=0.0, turns=1.0, lengths=ONE_LENGTH
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def seconds(left: TimeLeft) -> float:
    return left.days.p50 * SECONDS_PER_DAY


def sampled(lengths: list[float], limit_tokens: int = 10_000) -> LengthModel:
    shape = SampledLengths(
        bin_means=tuple(lengths), weights=(1 / len(lengths),) * len(lengths),
        limit_tokens=limit_tokens,
    )  # fmt: skip
    return replace(ONE_LENGTH, shape=shape)


def test_queue_is_worked_off_at_the_engines_rate() -> None:
    # 100 rows run, on average half done; 1,900 wait. Until the queue is empty: (1,900 x 1,000 +
    # 100 x 500 - 100 x 500) / 1,000 = 1,900 s. The last row then has all 1,000 tokens left: half of
    # them in a full batch at 10 tokens/s, the step otherwise that of one alone:
    # 1,000 x 0.05 + 500 x 0.05 = 75 s.
    running = list(range(5, 1000, 10))
    left = time_left(rows(2000, running), [ENGINES], lost_fraction=0.0)
    assert seconds(left) == pytest.approx(1975, rel=0.02)
    assert left.tokens == pytest.approx(1_950_000, rel=0.01)


def test_last_requests_end_at_their_own_lengths() -> None:
    # The slowest has 400 tokens left, the mean is 300: 400 x 0.05 + 300 x 0.05 = 35 s
    left = time_left(rows(2, [600, 800]), [ENGINES], lost_fraction=0.0)
    assert seconds(left) == pytest.approx(35, rel=0.03)
    assert left.tokens == pytest.approx(600, rel=0.01)


def test_requests_have_gone_on_since_their_engines_were_heard() -> None:
    # 200 tokens later the one at 800 has ended, and the other has 200 left.
    late = time_left(rows(1, [600, 800], tokens_since=200.0), [ENGINES], lost_fraction=0.0)
    assert seconds(late) < 0.7 * seconds(time_left(rows(2, [600, 800]), [ENGINES], lost_fraction=0))


def test_request_that_has_outlived_the_short_ones_is_a_long_one() -> None:
    # Half of the rows write 100 tokens, half 2,000: one at 500 has 1,500 left, and a fresh one is
    # either. 1,500 x 0.05 + 1,500 x 0.05 = 150 s
    lengths = sampled([100.0, 2000.0])
    left = time_left(rows(1, [500], lengths=lengths), [ENGINES], lost_fraction=0.0)
    assert seconds(left) == pytest.approx(150, rel=0.05)


def test_turns_of_a_row_follow_each_other() -> None:
    # A row of three turns at its first token has up to 3,000 tokens to go, not 1,000.
    one = time_left(rows(1, [0]), [ENGINES], lost_fraction=0.0)
    three = time_left(rows(1, [0], turns=3.0), [ENGINES], lost_fraction=0.0)
    assert seconds(one) == pytest.approx(100, rel=0.03)
    assert 1.5 * seconds(one) < seconds(three) < 3.1 * seconds(one)


def test_request_beyond_all_lengths_is_expected_to_go_on_as_long_again() -> None:
    # It has 5,000 tokens where the longest had 1,000: the median of what follows is 5,000.
    left = time_left(rows(1, [4000]), [ENGINES], lost_fraction=0.0)
    assert left.days.p10 < left.days.p50 < left.days.p90
    assert seconds(left) == pytest.approx(4000 * 0.1, rel=0.1)


def test_uncertain_mean_widens_the_band_and_hardly_moves_its_middle() -> None:
    unsure = replace(ONE_LENGTH, summary=replace(ONE_LENGTH.summary, mean_relative_error=0.3))
    sure = time_left(rows(2000, [500] * 100), [ENGINES], lost_fraction=0.0)
    wide = time_left(rows(2000, [500] * 100, lengths=unsure), [ENGINES], lost_fraction=0.0)
    assert seconds(wide) == pytest.approx(seconds(sure), rel=0.03)
    # 1.2816 x hypot(0.3, 0.05) either way
    log_width = math.log(wide.days.p90 / wide.days.p10) / 2
    assert log_width == pytest.approx(1.2816 * math.hypot(0.3, 0.05), rel=0.06)


def test_interruptions_rarely_hit_a_short_rest_and_surely_a_long_one() -> None:
    short, long = rows(2000, [500] * 100), rows(2_000_000, [500] * 100)
    for given, slower in ((short, 1.0), (long, 1 / 0.9)):
        none = time_left(given, [ENGINES], lost_fraction=0.0)
        some = time_left(given, [ENGINES], lost_fraction=0.1)
        assert seconds(some) == pytest.approx(slower * seconds(none), rel=0.03)
        assert some.days.p90 > none.days.p90


def test_rates_of_all_groups_add_up() -> None:
    twice = [ENGINES, replace(ENGINES, name="others")]
    alone = time_left(rows(4000, [500] * 100), [ENGINES], lost_fraction=0.0)
    both = time_left(rows(4000, [500] * 200), twice, lost_fraction=0.0)
    assert both.tokens_per_s.p50 == pytest.approx(2 * alone.tokens_per_s.p50)
    assert seconds(both) == pytest.approx(seconds(alone) / 2, rel=0.05)
