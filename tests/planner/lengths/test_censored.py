"""The mean length while requests still run, on replayed streams and on cases done by hand."""

import math
import statistics
from collections import Counter
from dataclasses import replace
from random import Random
from statistics import NormalDist

import pytest

from pipeline.errors import PlanError
from pipeline.planner.lengths.censored import _agreed, length_estimate, updated_lengths
from pipeline.planner.lengths.lengths import log_normal_cut, output_lengths
from pipeline.planner.lengths.log_normal_fit import Counts, LogNormalFit, log_normal_fit
from pipeline.planner.lengths.shapes import (
    LogNormalCut,
    binned,
    cv_of,
    mean_remaining,
    moment,
    moment_cut_at,
    survival,
)
from pipeline.planner.lengths.survival import (
    LengthEstimate,
    _variance,
    curve_estimate,
    observed_lengths,
)
from tests.scores.replay_lengths import MEAN_TOKENS, log_normal_draw, replayed, stream


def estimated(finished: list[int], running: list[int], limit: int) -> LengthEstimate:
    found = length_estimate(finished, running, limit)
    assert found is not None
    return found


@pytest.mark.parametrize("cv", [0.6, 0.9, 1.2, 1.6])
def test_the_mean_is_within_a_tenth_after_three_batches(cv: float) -> None:
    """Half of all streams are: with 240 completions of CV 1.2, chance alone makes 7 %."""
    limit = 32_768
    shape = log_normal_cut(MEAN_TOKENS, cv, limit)
    figures = replayed(log_normal_draw(shape), moment(shape, 1), limit, 80, 240, seeds=40)
    assert len(figures) == 40
    assert statistics.median(abs(figure.estimate - 1) for figure in figures) < 0.10
    assert abs(statistics.mean(figure.estimate for figure in figures) - 1) < 0.04
    assert sum(figure.covers() for figure in figures) >= 35


def test_the_finished_alone_say_half_after_one_batch() -> None:
    limit = 32_768
    shape = log_normal_cut(MEAN_TOKENS, 1.2, limit)
    figures = replayed(log_normal_draw(shape), moment(shape, 1), limit, 80, 80, seeds=40)
    assert statistics.mean(figure.naive for figure in figures) < 0.55
    assert abs(statistics.mean(figure.estimate for figure in figures) - 1) < 0.06


def test_a_stream_starts_a_request_for_each_that_finishes() -> None:
    seen = stream(lambda random: random.randint(1, 9), 5, 12, seed=1)
    assert (len(seen.finished), len(seen.running)) == (12, 4)


def test_the_curve_by_hand() -> None:
    # Ten start. Ends at 1 (of 10: 0.9), 3 (of 8, one was lost sight of at 2: 0.7875) and at 4 (all
    # of the 7: 0). Area: 1 x 1 + 2 x 0.9 + 1 x 0.7875 = 3.5875.
    # Variance by Greenwood: right of 1 lie 2.5875, right of 3 0.7875, right of 4 nothing:
    # 2.5875^2 / (10 x 9) + 0.7875^2 / (8 x 7) = 0.07439 + 0.01107 = 0.08546, root 0.2923.
    found = curve_estimate(observed_lengths(Counter([1, 3, *[4] * 7]), Counter([2]), 100))
    assert found is not None
    assert found.mean_tokens == pytest.approx(3.5875)
    assert found.mean_relative_error * found.mean_tokens == pytest.approx(0.2923, abs=1e-3)
    assert found.at_limit_fraction == 0


def test_with_none_running_it_is_the_plain_mean() -> None:
    found = estimated([10, 20, 30, 40], [], 100)
    assert found.mean_tokens == pytest.approx(25)
    # E[o^2] = 750, 750 / 625 - 1 = 0.2
    assert found.cv == pytest.approx(0.2**0.5)


def test_those_that_the_limit_ended_are_told_apart() -> None:
    found = estimated([10, 20, 50, 50], [], 50)
    assert found.mean_tokens == pytest.approx(32.5)
    assert found.at_limit_fraction == pytest.approx(0.5)
    all_there = estimated([50] * 20, [25] * 4, 50)
    assert (all_there.mean_tokens, all_there.at_limit_fraction) == (50, 1)


def test_lengths_that_are_no_log_normal_are_left_to_the_curve() -> None:
    # Exponential: the log-normal's tail is far too long, and its mean 40 % high.
    def draw(random: Random) -> int:
        return max(1, min(32_768, round(random.expovariate(1 / MEAN_TOKENS))))

    figures = replayed(draw, MEAN_TOKENS, 32_768, 80, 240, seeds=20)
    assert statistics.median(abs(figure.estimate - 1) for figure in figures) < 0.15
    seen = stream(draw, 80, 240, seed=1)
    fit = observed_lengths(Counter(seen.finished), Counter(seen.running), 32_768).fit()
    assert fit is not None
    shape = LogNormalCut(mu=fit.mu, sigma=fit.sigma, limit_tokens=32_768)
    assert moment(shape, 1) > 1.2 * MEAN_TOKENS


def test_too_few_say_nothing() -> None:
    assert length_estimate([], [100] * 80, 32_768) is None
    assert length_estimate([10, 12], [100] * 80, 32_768) is None
    with pytest.raises(PlanError, match="running lengths: -3 tokens found"):
        length_estimate([10], [-3], 100)


def test_the_fit_is_the_textbook_one_where_all_ended() -> None:
    # Logs of 1, e^2: the likeliest mu is their mean, sigma^2 their mean square distance.
    fit = log_normal_fit([(100, 3), (400, 3)], [])
    assert fit is not None
    # ln 100 = 4.6052, ln 400 = 5.9915: mean 5.2983, sigma 0.6931; var mu = sigma^2 / 6, and
    # var sigma = sigma^2 / 12.
    assert fit.mu == pytest.approx(5.2983, abs=1e-4)
    assert fit.sigma == pytest.approx(0.6931, abs=1e-4)
    assert fit.covariance[0] == pytest.approx(0.6931**2 / 6, rel=1e-3)
    assert fit.covariance[2] == pytest.approx(0.6931**2 / 12, rel=1e-3)
    assert log_normal_fit([(100, 9)], []) is None


def test_a_tail_that_nothing_bounds_is_cut_at_the_limit() -> None:
    # Seven of one or two tokens, 80 at 30,000: a spread that no log-normal of text has.
    found = estimated([1, 1, 1, 2, 2, 2, 2], [30_000] * 80, 32_768)
    assert 25_000 < found.mean_tokens < 32_768


def test_a_prior_gives_way_as_completions_come_in() -> None:
    prior = output_lengths(2000, 1.2, 32_768, "run file", mean_relative_error=0.1)

    def estimate(error: float, mean: float = 2400) -> LengthEstimate:
        return LengthEstimate(
            mean_tokens=mean, mean_relative_error=error, cv=1.0, at_limit_fraction=0.01,
            finished=100, running=80, shape=binned([mean], 32_768),
        )  # fmt: skip

    # Equally sure: halfway in the logarithm, root(2,000 x 2,400) = 2,191, and 0.1 / root 2.
    even = updated_lengths(prior, estimate(0.1), "run file and 100 completions").summary
    assert even.mean_tokens == pytest.approx(2191, abs=1)
    assert even.mean_relative_error == pytest.approx(0.0707, abs=1e-4)
    sure = updated_lengths(prior, estimate(0.01), "").summary
    assert sure.mean_tokens == pytest.approx(2400, rel=0.003)
    # Twice the prior: the prior is wrong, not unsure.
    contradicted = updated_lengths(prior, estimate(0.1, mean=4000), "").summary
    assert contradicted.mean_tokens == pytest.approx(4000, rel=0.02)


# --- the fit -----------------------------------------------------------------------------------


def log_likelihood(mu: float, sigma: float, ended: Counts, longer_than: Counts) -> float:
    normal = NormalDist(mu, sigma)
    total = sum(count * math.log(normal.pdf(math.log(tokens))) for tokens, count in ended)
    return total + sum(
        count * math.log(1 - normal.cdf(math.log(tokens))) for tokens, count in longer_than
    )


def test_fit_maximizes_the_likelihood_of_censored_lengths() -> None:
    ended, longer_than = [(100, 4), (300, 5), (900, 2)], [(200, 3), (1000, 6)]
    fit = log_normal_fit(ended, longer_than)
    assert fit is not None
    best = log_likelihood(fit.mu, fit.sigma, ended, longer_than)
    for d_mu, d_sigma in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01), (0.01, 0.01)):
        assert log_likelihood(fit.mu + d_mu, fit.sigma + d_sigma, ended, longer_than) < best
    # The covariance is the inverse of the negative second derivatives, here by difference.
    step = 1e-3

    def second(a: tuple[int, int], b: tuple[int, int]) -> float:
        def at(i: int, j: int) -> float:
            d_mu, d_sigma = (i * a[0] + j * b[0]) * step, (i * a[1] + j * b[1]) * step
            return log_likelihood(fit.mu + d_mu, fit.sigma + d_sigma, ended, longer_than)

        return -(at(1, 1) - at(1, -1) - at(-1, 1) + at(-1, -1)) / (4 * step**2)

    mm, ms, ss = second((1, 0), (1, 0)), second((1, 0), (0, 1)), second((0, 1), (0, 1))
    determinant = mm * ss - ms * ms
    assert fit.covariance == pytest.approx(
        (ss / determinant, -ms / determinant, mm / determinant), rel=0.01
    )


def test_four_completions_do_not_fix_a_fit_and_five_do() -> None:
    assert log_normal_fit([(100, 2), (400, 2)], [(50, 9)]) is None
    assert log_normal_fit([(100, 2), (400, 3)], [(50, 9)]) is not None


def test_mean_is_the_fits_where_the_curve_agrees() -> None:
    shape = log_normal_cut(MEAN_TOKENS, 1.2, 32_768)
    state = stream(log_normal_draw(shape), 80, 240, seed=2)
    observed = observed_lengths(Counter(state.finished), Counter(state.running), 32_768)
    curve, fit = curve_estimate(observed), observed.fit()
    assert curve is not None
    assert fit is not None
    cut = LogNormalCut(mu=fit.mu, sigma=fit.sigma, limit_tokens=32_768)
    found = estimated(list(state.finished), list(state.running), 32_768)
    assert curve.mean_tokens != moment(cut, 1)
    assert (found.mean_tokens, found.cv) == (moment(cut, 1), cv_of(cut))
    # Everything else is the curve's.
    assert found == replace(curve, mean_tokens=found.mean_tokens, cv=found.cv)


@pytest.mark.parametrize(("distance", "is_fit"), [(0.69, True), (0.71, False)])
def test_fit_is_used_within_seven_tenths_of_the_curves_error(distance: float, is_fit: bool) -> None:
    # The log-normal's mean is e^(7 + 1/2) under a limit that cuts nothing.
    fit = LogNormalFit(mu=7.0, sigma=1.0, covariance=(0.0, 0.0, 0.0))
    mean = math.exp(7.5)
    curve = LengthEstimate(
        mean_tokens=mean / (1 + 0.1 * distance), mean_relative_error=0.1, cv=1.0,
        at_limit_fraction=0.0, finished=100, running=80, shape=binned([1000, 2000], 32_768),
    )  # fmt: skip
    found = _agreed(curve, fit, 100_000_000)
    assert (found.mean_tokens == pytest.approx(mean, rel=1e-6)) == is_fit
    assert (found is curve) != is_fit


def test_variance_of_a_figure_follows_from_both_errors() -> None:
    # 3 mu + 5 sigma: 9 x 0.02 + 2 x 3 x 5 x 0.003 + 25 x 0.01 = 0.52
    fit = LogNormalFit(mu=7.0, sigma=1.0, covariance=(0.02, 0.003, 0.01))
    assert _variance(fit, lambda mu, sigma: 3 * mu + 5 * sigma) == pytest.approx(0.52)


def test_tail_beyond_the_curve_is_that_of_the_cut_fit() -> None:
    # 8 of 20 ended, 12 still run at 800 tokens.
    observed = observed_lengths(Counter({100: 4, 300: 4}), Counter({800: 12}), 4096)
    curve, fit = curve_estimate(observed), observed.fit()
    assert curve is not None
    assert fit is not None
    shape = LogNormalCut(mu=fit.mu, sigma=fit.sigma, limit_tokens=4096)
    beyond = (moment(shape, 1) - moment_cut_at(shape, 1, 800)) / survival(shape, 800)
    # 1 until 100, 16 of 20 until 300, 12 of 20 until 800 and beyond.
    area = 100 + 0.8 * 200 + 0.6 * 500
    assert curve.mean_tokens == pytest.approx(area + 0.6 * beyond)
    squares = 100**2 + 0.8 * (300**2 - 100**2) + 0.6 * 800**2 - 0.6 * 300**2
    tail = (moment(shape, 2) - moment_cut_at(shape, 2, 800)) / survival(shape, 800)
    second = squares + 0.6 * tail
    assert curve.cv == pytest.approx(math.sqrt(second / curve.mean_tokens**2 - 1))
    at_limit = survival(shape, 4095.999999) / survival(shape, 800)
    assert curve.at_limit_fraction == pytest.approx(0.6 * at_limit, rel=1e-6)
    assert (curve.finished, curve.running) == (8, 12)
    # Its error: the fit's, 0.3 + 0.7 x 0.6 = 72 % of the tail, and Greenwood's terms of both steps.
    right = [0.8 * 200 + 0.6 * 500 + 0.6 * beyond, 0.6 * 500 + 0.6 * beyond]
    greenwood = right[0] ** 2 * 4 / (20 * 16) + right[1] ** 2 * 4 / (16 * 12)
    known = greenwood + (0.72 * 0.6 * beyond) ** 2
    error = curve.mean_relative_error * curve.mean_tokens
    assert error**2 > known

    def excess(mu: float, sigma: float) -> float:
        moved = LogNormalCut(mu=mu, sigma=sigma, limit_tokens=4096)
        return (moment(moved, 1) - moment_cut_at(moved, 1, 800)) / survival(moved, 800)

    assert error**2 == pytest.approx(known + 0.36 * _variance(fit, excess), rel=1e-6)


@pytest.mark.parametrize(("distance", "weight"), [(0.27, 0.5), (0.29, 0.29**2 / 0.0941)])
def test_prior_is_contradicted_beyond_the_95_percent_band(distance: float, weight: float) -> None:
    # 1.96 x root(0.1^2 + 0.1^2) = 0.2772; a prior that is 0.29 off counts as known to 0.29:
    # 0.0841 / (0.0841 + 0.01) of the way.
    prior = output_lengths(2000, 1.2, 32_768, "run file", mean_relative_error=0.1)
    estimate = LengthEstimate(
        mean_tokens=2000 * math.exp(distance), mean_relative_error=0.1, cv=1.0,
        at_limit_fraction=0.01, finished=100, running=80, shape=binned([1000, 2000], 32_768),
    )  # fmt: skip
    found = updated_lengths(prior, estimate, "both").summary
    assert found.mean_tokens == pytest.approx(2000 * math.exp(weight * distance))
    assert (found.cv, found.at_limit_fraction, found.source) == (1.0, 0.01, "both")


def test_prior_fills_the_tail_while_many_outlive_the_curve() -> None:
    # 20 short ones have ended and 80 run on at 300 tokens: four in five outlive the curve.
    ended, running = Counter([90, 95, 100, 105, 110] * 4), Counter({300: 80})
    prior = log_normal_cut(2500, 1.2, 32_768)
    observed = observed_lengths(ended, running, 32_768)
    alone, both = curve_estimate(observed), curve_estimate(observed, prior)
    assert alone is not None
    assert both is not None
    assert both.tail_share == pytest.approx(0.8)
    # Up to 300 tokens 20 x 100 / 100 + 0.8 x 300 = 260; beyond, the mean of the fit's tail and of
    # what the prior's completions of more than 300 tokens have left.
    fitted = (alone.mean_tokens - 260) / 0.8
    expected = 260 + 0.8 * (fitted + mean_remaining(prior, 300)) / 2
    assert both.mean_tokens == pytest.approx(expected)
    found = length_estimate(ended.elements(), running.elements(), 32_768, prior)
    assert found == both, "the fit to the short ones alone does not decide"


def test_prior_is_silent_once_few_outlive_the_curve() -> None:
    # 90 of 100 have ended: what the longest ten write is the curve's and its tail's.
    ended, running = [100 + n for n in range(90)], [250] * 10
    prior = log_normal_cut(20_000, 0.5, 32_768)
    alone = length_estimate(ended, running, 32_768)
    assert length_estimate(ended, running, 32_768, prior) == alone


def test_tail_of_two_kinds_of_answers_is_that_of_the_longer_kind() -> None:
    # Answers of 200 to 400 tokens, and of 3,000 to 5,000: a log-normal that is fitted to both has
    # a tail of tens of thousands. One that is still running at 5,000 has not.
    short, long = list(range(200, 400)), list(range(3000, 5000, 20))
    found = length_estimate([*short, *long], [5000, 5000, 5000], 32_768)
    assert found is not None
    assert found.shape.bin_means[-1] < 16_000
