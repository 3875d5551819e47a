"""The time left: work over rate while the queue lasts, then the last requests one by one."""

import math
from dataclasses import replace

import pytest

from pipeline.live.course import RowsLeft
from pipeline.live.time_left import TimeLeft, time_left
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
    # The slowest has 400 tokens left, both have 600: two of 100 places are taken for 300 tokens on
    # average, as 6 tokens in all places: 400 x 0.05 + 6 x 0.05 = 20.3 s
    left = time_left(rows(2, [600, 800]), [ENGINES], lost_fraction=0.0)
    assert seconds(left) == pytest.approx(20.3, rel=0.05)
    assert left.tokens == pytest.approx(600, rel=0.01)


def test_requests_have_gone_on_since_their_engines_were_heard() -> None:
    # 200 tokens later the one at 800 has ended, and the other has 200 left.
    late = time_left(rows(1, [600, 800], tokens_since=200.0), [ENGINES], lost_fraction=0.0)
    assert seconds(late) < 0.7 * seconds(time_left(rows(2, [600, 800]), [ENGINES], lost_fraction=0))


def test_request_that_has_outlived_the_short_ones_is_a_long_one() -> None:
    # Half of the rows write 100 tokens, half 2,000: one at 500 has 1,500 left, and a fresh one is
    # either. Alone it takes 1,500 x 0.05 = 75 s, and 15 x 0.05 s for its share of the places.
    lengths = sampled([100.0, 2000.0])
    left = time_left(rows(1, [500], lengths=lengths), [ENGINES], lost_fraction=0.0)
    assert seconds(left) == pytest.approx(75.8, rel=0.05)


def test_turns_of_a_row_follow_each_other() -> None:
    # A row of three turns at its first token has up to 3,000 tokens to go, not 1,000.
    one = time_left(rows(1, [0]), [ENGINES], lost_fraction=0.0)
    three = time_left(rows(1, [0], turns=3.0), [ENGINES], lost_fraction=0.0)
    assert seconds(one) == pytest.approx(50.5, rel=0.03)
    assert 1.5 * seconds(one) < seconds(three) < 3.1 * seconds(one)


def test_request_beyond_all_lengths_is_expected_to_be_overdue_as_long_again() -> None:
    # It has 4,000 tokens where the longest had 1,000: the median of what follows is the time of
    # 3,000 in a full batch, since that it is alone does not help it.
    left = time_left(rows(1, [4000]), [ENGINES], lost_fraction=0.0)
    assert left.days.p10 < left.days.p50 < left.days.p90
    assert seconds(left) == pytest.approx(3000 * 0.1, rel=0.1)


def test_request_that_hangs_ends_at_its_deadline_and_is_made_again() -> None:
    # At 10 tokens/s the deadline is at 2,000 tokens. Overdue by 200 at 1,200, it hangs in four of
    # five cases, and then for 20 s more in half of them; in one of five of these it hangs for the
    # 80 s that are left and writes 1,000 again.
    hanging = rows(1, [1200], deadline_s=200.0)
    left = time_left(hanging, [ENGINES], lost_fraction=0.0)
    assert 10 < seconds(left) < 20
    assert left.days.p90 * SECONDS_PER_DAY == pytest.approx(800 * 0.1 + 1000 * 0.05, rel=0.1)


def test_rows_in_flight_are_those_that_are_open_where_none_waits() -> None:
    # Ten ran when last reported, and by their tokens all have ended since; four have not. They are
    # about to end: no other row starts.
    left = time_left(rows(4, [900] * 10, tokens_since=150.0), [ENGINES], lost_fraction=0.0)
    assert seconds(left) < 20


def test_many_requests_a_little_over_all_lengths_are_slow_and_hang_not() -> None:
    # Their tokens are known within a few percent.
    left = time_left(rows(40, [1020] * 40), [ENGINES], lost_fraction=0.0)
    assert seconds(left) < 40


def test_requests_hang_as_long_as_those_that_hung_before() -> None:
    # All earlier ones that outlived the length of 1,000 timed out at 3,000 and were made again.
    hanging = rows(1, [2000], finished=1000, interrupted={3000: 20})
    left = time_left(hanging, [ENGINES], lost_fraction=0.0)
    assert seconds(left) == pytest.approx(1000 * 0.1 + 1000 * 0.05, rel=0.05)


def test_few_of_many_rows_that_hang_prolong_the_end() -> None:
    # Of 100 rows that start now, about one hangs until 10,000 tokens and then writes 1,000.
    fresh = rows(100, [0] * 100, finished=1000)
    calm = time_left(fresh, [ENGINES], lost_fraction=0.0)
    hanging = replace(fresh, interrupted={10_000: 10})
    stormy = time_left(hanging, [ENGINES], lost_fraction=0.0)
    assert stormy.days.p90 > 4 * calm.days.p90
    assert stormy.days.p10 < 1.3 * calm.days.p10


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
