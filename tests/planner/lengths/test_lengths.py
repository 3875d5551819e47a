"""Completion lengths: a stated mean and CV are those of what is written, cut at the limit."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PlanError
from pipeline.planner.lengths.contexts import (
    p99_of_summed_contexts,
    retraction_risk,
)
from pipeline.planner.lengths.lengths import (
    PRIOR_MEAN_ERROR,
    configured_lengths,
    lengths_from_sample,
    log_normal_cut,
    longest_output,
    nearest_log_normal_cut,
    output_lengths,
    prior_lengths,
)
from pipeline.planner.lengths.shapes import (
    LengthShape,
    LogNormalCut,
    SampledLengths,
    at_limit_fraction,
    cv_of,
    log_of_normal_cdf,
    longest_of,
    longest_remaining,
    mean_emitted,
    mean_remaining,
    moment,
    moment_cut_at,
    normal_cdf,
    survival,
)
from tests.fakes.drawn_lengths import sampled_length


def drawn(shape: LengthShape, count: int, seed: int = 1) -> list[float]:
    random = Random(seed)
    return [sampled_length(shape, random) for _ in range(count)]


# --- a stated mean and CV ----------------------------------------------------------------------


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.floats(min_value=2, max_value=30_000),
    st.floats(min_value=0.0, max_value=3.0),
    st.sampled_from((2048, 8192, 32_768, 262_144)),
)
def test_cut_lengths_have_the_stated_mean_and_cv_or_are_refused(
    mean: float, cv: float, limit: int
) -> None:
    try:
        shape = log_normal_cut(mean, cv, limit)
    except PlanError:
        # No length of a mean m under a limit L spreads wider than nothing and L: CV^2 = L/m - 1.
        assert mean > limit or cv > 0.7 * math.sqrt(limit / mean - 1)
        return
    assert mean <= limit
    assert cv <= math.sqrt(limit / mean - 1) + 1e-9
    assert moment(shape, 1) == pytest.approx(mean, rel=1e-6)
    assert cv_of(shape) == pytest.approx(cv, abs=1e-5)


def test_a_wide_limit_leaves_the_textbook_log_normal() -> None:
    # sigma^2 = ln(1 + 0.6^2) = 0.3075, mu = ln 2,500 - 0.3075 / 2 = 7.824 - 0.154 = 7.670
    shape = log_normal_cut(2500, 0.6, 10_000_000)
    assert shape.sigma**2 == pytest.approx(0.3075, abs=1e-4)
    assert shape.mu == pytest.approx(7.6703, abs=1e-4)


def test_the_closed_forms_are_those_of_drawn_lengths() -> None:
    shape = log_normal_cut(2500, 1.0, 8192)
    lengths = drawn(shape, 100_000)
    mean = sum(lengths) / len(lengths)
    assert mean == pytest.approx(2500, rel=0.01)
    assert sum(length == 8192 for length in lengths) / len(lengths) == pytest.approx(
        at_limit_fraction(shape), abs=0.003
    )
    assert sum(length > 3000 for length in lengths) / len(lengths) == pytest.approx(
        survival(shape, 3000), abs=0.005
    )
    rest = [length - 3000 for length in lengths if length > 3000]
    assert mean_remaining(shape, 3000) == pytest.approx(sum(rest) / len(rest), rel=0.02)


def test_equal_lengths_are_a_cv_of_zero() -> None:
    shape = output_lengths(1024, 0, 1024, "the bench").shape
    assert moment(shape, 1) == pytest.approx(1024)
    assert at_limit_fraction(shape) == 1
    assert survival(shape, 1023) == 1
    assert survival(shape, 1024) == 0
    assert longest_remaining(shape, 1) == pytest.approx(512, rel=1e-4)


@pytest.mark.parametrize(
    ("mean", "cv", "limit", "said"),
    [
        (5000, 1.0, 4096, "a mean of 5,000 tokens found, more than 0 and at most the limit of 4,0"),
        (0, 1.0, 4096, "a mean of 0 tokens found"),
        (math.nan, 1.0, 4096, "a mean of nan tokens found"),
        (2500, -1.0, 4096, "a CV of -1 found, 0 or more expected"),
        (2500, 1.2, 4096, "a CV of 1.2 found; a mean of 2,500 under a limit of 4,096 tokens leave"),
        (4096, 0.1, 4096, "leaves at most 0.00"),
        (10, 1.0, 0, "a limit of 0 found"),
    ],
)
def test_lengths_that_cannot_be_are_refused_in_one_line(
    mean: float, cv: float, limit: int, said: str
) -> None:
    with pytest.raises(PlanError) as refused:
        output_lengths(mean, cv, limit, "run file")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_measured_pair_that_no_log_normal_has_is_given_the_nearest() -> None:
    shape = nearest_log_normal_cut(2500, 1.2, 4096)
    assert moment(shape, 1) == pytest.approx(2500)
    assert 0.7 < cv_of(shape) < math.sqrt(4096 / 2500 - 1)


# --- a prior, a sample -------------------------------------------------------------------------


def test_the_limit_cuts_a_prior() -> None:
    wide = prior_lengths(thinking=True, limit_tokens=1_000_000).summary
    narrow = prior_lengths(thinking=True, limit_tokens=4096).summary
    assert wide.mean_tokens == pytest.approx(2500, rel=0.001)
    assert wide.cv == pytest.approx(1.2, rel=0.01)
    assert narrow.mean_tokens < 2000
    assert 0.1 < narrow.at_limit_fraction < 0.2
    assert "assumed: thinking" in narrow.source
    plain = prior_lengths(thinking=False, limit_tokens=32_768).summary
    assert plain.mean_tokens == pytest.approx(500, rel=0.001)


def test_what_the_limit_ends_is_not_in_doubt() -> None:
    def error(limit: int) -> float:
        return prior_lengths(thinking=True, limit_tokens=limit).summary.mean_relative_error

    # Cut at 2 tokens all are at the limit, whatever the prior; at a million, none are.
    assert error(2) == pytest.approx(0, abs=0.001)
    assert error(1_000_000) == pytest.approx(PRIOR_MEAN_ERROR, rel=0.001)
    # 10 % longer lengths before the cut at 4,096: the cut mean moves by so much of that.
    longer = LogNormalCut(
        mu=math.log(2500 * 1.01) - math.log1p(1.44) / 2,
        sigma=math.sqrt(math.log1p(1.44)),
        limit_tokens=4096,
    )
    plain = prior_lengths(thinking=True, limit_tokens=4096)
    moved = moment(longer, 1) / plain.summary.mean_tokens - 1
    assert error(4096) == pytest.approx(PRIOR_MEAN_ERROR * moved / 0.01, rel=0.02)
    # A stated mean at the limit cannot be too low.
    assert output_lengths(4096, 0.0, 4096, "run file").summary.mean_relative_error == 0
    near = output_lengths(4000, 0.0, 4096, "run file").summary
    assert near.mean_relative_error == pytest.approx(0.024)


def test_a_sample_is_counted() -> None:
    # The 900 is cut to 400, one of four at the limit. Mean 250, variance (150^2 + 50^2 + 50^2 +
    # 150^2) / 3 = 16,667, CV 129.1 / 250 = 0.516.
    sample = lengths_from_sample([100, 200, 300, 900], 400, "pilot")
    assert sample.summary.mean_tokens == 250
    assert sample.summary.cv == pytest.approx(0.5164, abs=1e-4)
    assert sample.summary.at_limit_fraction == 0.25
    # Four lengths do not know their own spread: CV 1 over 2 = 50 %.
    assert sample.summary.mean_relative_error == 0.5


def test_the_error_of_a_large_sample_is_its_cv_over_root_n() -> None:
    # CV 1.2 and 1,000 lengths: 1.2 / 31.6 = 3.8 %
    lengths = [round(length) for length in drawn(log_normal_cut(2500, 1.2, 32_768), 1000)]
    summary = lengths_from_sample(lengths, 32_768, "pilot").summary
    assert summary.mean_relative_error == pytest.approx(0.038, rel=0.15)


def test_bins_keep_the_mean_and_nearly_the_spread_of_a_sample() -> None:
    lengths = [round(length) for length in drawn(log_normal_cut(2500, 1.2, 32_768), 50_000)]
    sample = lengths_from_sample(lengths, 32_768, "pilot")
    assert isinstance(sample.shape, SampledLengths)
    assert len(sample.shape.bin_means) == 400
    assert moment(sample.shape, 1) == pytest.approx(sample.summary.mean_tokens)
    assert cv_of(sample.shape) == pytest.approx(sample.summary.cv, rel=0.02)
    assert longest_remaining(sample.shape, 80) == pytest.approx(
        longest_remaining(log_normal_cut(2500, 1.2, 32_768), 80), rel=0.05
    )
    assert sum(drawn(sample.shape, 20_000)) / 20_000 == pytest.approx(2500, rel=0.04)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([], "pilot: 0 completion lengths found"),
        ([7], "pilot: 1 completion lengths found, at least 2 expected"),
        ([5, -1], "pilot: a completion of -1 tokens found"),
        ([0, 0], "pilot: 2 completions of 0 tokens found"),
    ],
)
def test_a_sample_that_says_nothing_is_refused(lengths: list[int], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        lengths_from_sample(lengths, 4096, "pilot")


@pytest.mark.parametrize(
    ("count", "error"),
    [
        # CV 0.5 x root(count / (count - 1)); below 30 lengths at least CV 1.
        (28, 1 / 28**0.5),
        (30, 0.5 * (30 / 29) ** 0.5 / 30**0.5),
    ],
)
def test_error_of_a_sample_assumes_the_priors_spread_below_thirty(count: int, error: float) -> None:
    # Half 50 and half 150: mean 100, deviation 50.
    lengths = [50] * (count // 2) + [150] * (count // 2)
    assert lengths_from_sample(lengths, 4096, "p").summary.mean_relative_error == pytest.approx(
        error
    )


# --- the run file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "cv", "thinking", "expected_mean", "expected_cv"),
    [
        (None, None, True, 2500, 1.2),
        (None, None, False, 500, 1.0),
        (800.0, None, True, 800, 1.2),
        (800.0, None, False, 800, 1.0),
        (None, 0.5, True, 2500, 0.5),
        (None, 0.5, False, 500, 0.5),
        (800.0, 0.0, True, 800, 0.0),
    ],
)
def test_prior_fills_in_what_the_run_file_omits(
    mean: float | None, cv: float | None, thinking: bool, expected_mean: float, expected_cv: float
) -> None:
    summary = configured_lengths(
        mean, cv, thinking=thinking, limit_tokens=1_000_000, source="run file"
    ).summary
    assert summary.mean_tokens == pytest.approx(expected_mean, rel=0.001)
    assert summary.cv == pytest.approx(expected_cv, rel=0.01, abs=1e-6)
    is_prior = mean is None and cv is None
    assert (summary.source == "run file") != is_prior
    assert summary.mean_relative_error == pytest.approx(0.35 if is_prior else 0.10, rel=1e-3)


def test_default_limit_grows_with_stated_lengths() -> None:
    # 1,000 x (1 + 6 x 1.2) = 8,200; with a stated CV of 0.5 4,000.
    assert longest_output(1000.0, None, 4096, max_tokens_given=False) == 8200
    assert longest_output(1000.0, 0.5, 4096, max_tokens_given=False) == 4096
    assert longest_output(1000.0, 0.5, 1024, max_tokens_given=False) == 4000
    assert longest_output(1000.0, None, 4096, max_tokens_given=True) == 4096
    assert longest_output(None, None, 4096, max_tokens_given=False) == 4096


# --- one formula, three shapes -----------------------------------------------------------------


def test_moments_of_each_shape_by_hand() -> None:
    sample = SampledLengths(
        bin_means=(10.0, 20.0, 40.0), weights=(0.5, 0.25, 0.25), limit_tokens=40
    )
    # 5 + 5 + 10; cut at 15: 5 + 3.75 + 3.75; squares 50 + 100 + 400.
    assert moment(sample, 1) == 20
    assert moment_cut_at(sample, 1, 15) == 12.5
    assert moment(sample, 2) == 550
    assert moment_cut_at(sample, 1, 0) == 0
    assert cv_of(sample) == pytest.approx((550 / 400 - 1) ** 0.5)
    assert [survival(sample, tokens) for tokens in (9, 10, 39, 40)] == [1, 0.5, 0.25, 0]
    assert at_limit_fraction(sample) == 0.25
    assert at_limit_fraction(replace(sample, limit_tokens=41)) == 0
    # Of those longer than 15, 0.5: (20 - 12.5) / 0.5.
    assert mean_remaining(sample, 15) == 15
    assert mean_remaining(sample, 40) == 0
    # 550 / 40
    assert mean_emitted(sample) == 13.75
    equal = LogNormalCut(mu=math.log(30), sigma=0.0, limit_tokens=40)
    assert moment_cut_at(equal, 2, 20) == pytest.approx(400)
    assert moment_cut_at(equal, 2, 35) == pytest.approx(900)
    assert (survival(equal, 0), survival(equal, 29), survival(equal, 31)) == (1, 1, 0)
    # A cut above the limit is the limit.
    wide = LogNormalCut(mu=3.0, sigma=1.0, limit_tokens=40)
    assert moment_cut_at(wide, 1, 100) == moment(wide, 1)
    assert (survival(wide, 0), survival(wide, 40)) == (1, 0)


def test_longest_of_two_by_hand() -> None:
    # Of two drawn from 10 and 40 alike, the longer is 40 three times in four: 32.5.
    sample = SampledLengths(bin_means=(10.0, 40.0), weights=(0.5, 0.5), limit_tokens=40)
    assert longest_of(sample, 2) == pytest.approx(32.5, abs=0.1)
    assert longest_of(sample, 1) == pytest.approx(25, abs=0.1)


def test_normal_tail_is_known_where_it_underflows() -> None:
    assert normal_cdf(0) == 0.5
    assert normal_cdf(1.2816) == pytest.approx(0.9, abs=1e-4)
    assert normal_cdf(-10) == pytest.approx(7.62e-24, rel=1e-3)
    assert log_of_normal_cdf(-1.0) == pytest.approx(math.log(0.158655), rel=1e-5)
    for z in (-29.9, -30.1, -50.0):
        # The density over -z, but for a part 1 / z^2.
        mills = -z * z / 2 - math.log(-z * math.sqrt(2 * math.pi))
        assert log_of_normal_cdf(z) == pytest.approx(mills, rel=3e-6)


# --- what running requests hold ----------------------------------------------------------------


def test_the_mean_context_is_length_biased() -> None:
    # (1 + 1.2^2) / 2 = 1.22 times the mean, not half of it
    shape = log_normal_cut(2500, 1.2, 32_768)
    assert mean_emitted(shape) / 2500 == pytest.approx(1.22, abs=0.001)
    assert mean_emitted(log_normal_cut(2500, 0, 32_768)) == pytest.approx(1250)


def test_the_fullest_of_100_moments_is_that_of_drawn_batches() -> None:
    # CV / sqrt(48) = 17 %, times 2.33 = 1.40 times the mean. What a moment sees of lengths of CV
    # 1.2 has itself a CV of about 1.4, and is skewed: 1.50.
    shape = log_normal_cut(2500, 1.2, 32_768)
    random = Random(3)
    lengths = drawn(shape, 50_000)
    seen = random.choices(lengths, weights=lengths, k=48 * 4000)
    sums = sorted(
        sum(random.random() * length for length in seen[start : start + 48])
        for start in range(0, len(seen), 48)
    )
    stated = p99_of_summed_contexts(48, shape, 0)
    assert stated == pytest.approx(sums[int(0.99 * len(sums))], rel=0.03)
    assert stated / (48 * mean_emitted(shape)) == pytest.approx(1.5, abs=0.02)


def test_retraction_is_a_risk_where_the_pool_is_no_more_than_the_mean() -> None:
    shape = log_normal_cut(2500, 1.2, 32_768)
    mean = 48 * (512 + mean_emitted(shape))
    assert retraction_risk(mean, 48, shape, 512)
    assert not retraction_risk(2 * mean, 48, shape, 512)
    equal = log_normal_cut(2500, 0, 32_768)
    assert not retraction_risk(48 * 512 + 48 * 2500, 48, equal, 512)


def test_the_last_of_many_running_requests_writes_on_for_long() -> None:
    shape = log_normal_cut(2500, 1.2, 32_768)
    random = Random(4)
    lengths = drawn(shape, 50_000)
    seen = random.choices(lengths, weights=lengths, k=80 * 1000)
    longest = [
        max(random.random() * length for length in seen[start : start + 80])
        for start in range(0, len(seen), 80)
    ]
    assert longest_remaining(shape, 80) == pytest.approx(sum(longest) / len(longest), rel=0.02)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    st.floats(min_value=0.1, max_value=1.5),
    st.integers(min_value=1, max_value=500),
    st.integers(min_value=1, max_value=500),
)
def test_more_requests_have_a_longer_last_one_within_the_limit(
    cv: float, some: int, more: int
) -> None:
    shape = log_normal_cut(2500, cv, 32_768)
    last = longest_remaining(shape, some)
    assert last <= longest_remaining(shape, some + more) <= 32_768
    assert longest_of(shape, 1) == pytest.approx(2500, rel=0.01)
    assert longest_of(shape, some) <= 32_768


def test_a_shape_needs_no_solver() -> None:
    # Half of all lengths are over e^mu.
    assert survival(LogNormalCut(mu=7.0, sigma=1.0, limit_tokens=32_768), math.exp(7)) == 0.5
