"""Readings of a running engine: what they do to the band, and which input they contradict."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.live.forecast import live_update, updated_group
from pipeline.live.offset import MeasuredRate, anchored, rate_offset
from pipeline.live.readings import Forecast, steady_readings
from pipeline.planner.estimate.job_time import job_time, whole_job
from pipeline.planner.lengths.lengths import output_lengths
from pipeline.planner.rate.errors import RateGroup, Spread
from schemas.estimate import LiveReading

# Seconds a token of a request: 32 ms alone, half a millisecond for each that runs beside it.
BASE_S, SLOPE_S = 0.032, 0.0005


def rate_at(running: float) -> float:
    return running / (BASE_S + SLOPE_S * running)


FORECAST = Forecast(
    running_requests=80.0,
    tokens_per_s_at=rate_at,  # 80 / 0.072 = 1,111
    accept_length=None,
    prefill_share=0.05,
    prefill_s_per_token=0.05 / 228,  # 1,111 / 2,500 requests a second of 512 tokens: 228 tokens/s
    mean_residence_s=180.0,
    rate_log_sd=0.2,
    step_log_sd=0.2,
    accept_log_sd=0.12,
)


def reading(**changes: object) -> LiveReading:
    """One steady quarter of an hour, as the dry run has it."""
    given_fields = {
        "engine": "worker-0", "start_s": 600.0, "end_s": 1500.0, "engine_age_s": 180.0,
        "cap_requests": 80,
        "running_requests": 80.0, "tokens_per_s": rate_at(80), "accept_length": None,
        "prompt_tokens_per_s": 228.0, **changes,
    }  # fmt: skip
    return LiveReading(**given_fields)  # type: ignore[arg-type]


def inputs(*readings: LiveReading, forecast: Forecast = FORECAST) -> list[str]:
    return [found.input for found in live_update(readings, forecast).disagreements]


# --- one offset --------------------------------------------------------------------------------


def test_an_anchor_moves_the_rate_by_how_well_each_is_known() -> None:
    # Prior sd 0.2; an anchor at half the batch, sd 0.08, 30 % above the prediction: weight
    # 0.04 / (0.04 + 0.0064) = 0.862, so e^(0.862 x ln 1.3) = e^0.2262 = 1.254; sd 0.0743.
    anchor = MeasuredRate(running_requests=40, tokens_per_s=1300, predicted_tokens_per_s=1000)
    found = anchored(anchor, 80, prior_sd=0.2)
    assert math.exp(found.mean) == pytest.approx(1.254, abs=0.001)
    assert found.sd == pytest.approx(0.0743, abs=0.0001)


@pytest.mark.parametrize(("target", "distance_sd"), [(42, 0.02), (80, 0.08), (150, 0.13), (8, 0.2)])
def test_a_far_anchor_says_less(target: float, distance_sd: float) -> None:
    anchor = MeasuredRate(running_requests=40, tokens_per_s=1300, predicted_tokens_per_s=1000)
    # 1 / sd^2 = 1 / 0.2^2 + 1 / distance^2
    expected = 1 / math.sqrt(1 / 0.04 + 1 / distance_sd**2)
    assert anchored(anchor, target, prior_sd=0.2).sd == pytest.approx(expected)


def test_many_readings_at_another_batch_stay_as_far_away() -> None:
    point = MeasuredRate(
        running_requests=40, tokens_per_s=1300, predicted_tokens_per_s=1000, independent=10
    )
    few = rate_offset([point], 80, prior_sd=0.2, look_sd=0.05)
    many = rate_offset([point] * 1000, 80, prior_sd=0.2, look_sd=0.05)
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
    found = rate_offset(points, 40, prior_sd=0.2, look_sd=0.05, predicted_at_target=rate_at(40))
    # Prior 0 weighs 1 % beside a line known to 2 %.
    assert found.mean == pytest.approx(math.log(0.65) * 0.99, abs=0.002)
    outside = rate_offset(points, 100, prior_sd=0.2, look_sd=0.05, predicted_at_target=rate_at(100))
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
            independent=looks,
        )
        for running, ratio, looks in given_points
    ]  # fmt: skip
    found = rate_offset(points, target, prior_sd=0.2, look_sd=0.05)
    ratios = [0.0, *(point.log_ratio() for point in points)]
    assert found.sd <= 0.2 + 1e-9
    assert min(ratios) - 1e-9 <= found.mean <= max(ratios) + 1e-9


# --- which readings count ----------------------------------------------------------------------


def test_filling_up_and_the_tail_do_not_count() -> None:
    filling = reading(engine_age_s=0.0, tokens_per_s=300.0)
    tail = reading(start_s=9000.0, end_s=9100.0, running_requests=12.0, tokens_per_s=300.0)
    steady = reading()
    kept = steady_readings([filling, steady, tail], mean_residence_s=180)
    assert kept == (steady,)
    # An engine that never runs what it may is steady at what it does run.
    low = reading(running_requests=50.0)
    assert steady_readings([low], mean_residence_s=180) == (low,)


def test_without_steady_readings_the_dry_run_stands() -> None:
    update = live_update([reading(engine_age_s=0.0)], FORECAST)
    assert (update.log_offset, update.log_sd, update.independent_readings) == (0, 0.2, 0)
    assert update.disagreements == ()
    option = group()
    assert updated_group(option, update) is option


# --- the band ----------------------------------------------------------------------------------


def group() -> RateGroup:
    prior = Spread(name="rate model", value="", source="", measure="", log_sd=0.25)
    return RateGroup(
        name="4 x RTX PRO 6000", replicas=4, gpus_per_replica=1, tokens_per_s=rate_at(80),
        running_requests=80.0, small_step_s=0.037, load_s=60.0, spreads=(prior,),
    )  # fmt: skip


def test_a_quarter_of_an_hour_narrows_the_band() -> None:
    # Ten looks of 90 s: root(0.02^2 + 0.05^2 / 10) = 0.026; 256 prompts of CV 1.2 know their mean
    # to 7.5 %: with availability p90 / p10 falls from 1.9 to 1.3.
    lengths = output_lengths(2500, 1.2, 32_768, "run file")
    dry = job_time(whole_job(902_087, lengths), [group()]).days
    update = live_update([reading(tokens_per_s=0.8 * rate_at(80))], FORECAST)
    assert update.independent_readings == pytest.approx(10)
    assert update.log_sd == pytest.approx(0.0253, abs=0.0005)
    assert update.tokens_per_s.p50 == pytest.approx(0.8 * rate_at(80), rel=0.01)
    pilot = output_lengths(2500, 1.2, 32_768, "pilot", mean_relative_error=0.075)
    live = job_time(whole_job(902_087, pilot), [updated_group(group(), update)], started=True)
    assert dry.p90 / dry.p10 == pytest.approx(2.0, abs=0.15)
    assert live.days.p90 / live.days.p10 == pytest.approx(1.27, abs=0.05)
    assert "measured rate of 4 x RTX PRO 6000" in {part.name for part in live.assumptions}


def test_the_rate_is_that_of_the_cap_an_engine_has_had_last() -> None:
    before = reading(cap_requests=40, running_requests=40.0, tokens_per_s=rate_at(40))
    after = reading(start_s=2000.0, end_s=2900.0)
    update = live_update([before, after], FORECAST)
    assert update.running_requests == 80
    assert update.disagreements == ()


# --- what disagrees ----------------------------------------------------------------------------


def test_readings_as_predicted_contradict_nothing() -> None:
    assert inputs(reading()) == []
    assert inputs(reading(tokens_per_s=1.2 * rate_at(80))) == []


def test_few_running_requests_are_told_with_their_cause() -> None:
    few = reading(running_requests=48.0, cap_requests=48, tokens_per_s=rate_at(48))
    update = live_update([few], FORECAST)
    assert [found.input for found in update.disagreements] == ["running_requests"]
    found = update.disagreements[0]
    assert (found.predicted, found.measured) == (80, 48)
    assert "48 requests run in an engine that may run 48, 80 were expected" in found.sentence
    assert "max_running_requests" in found.sentence
    held = live_update([replace(few, cap_requests=80)], FORECAST).disagreements[0]
    assert "KV pool" in held.sentence


def test_a_slow_step_is_told_apart_from_a_small_batch() -> None:
    slow = live_update([reading(tokens_per_s=0.6 * rate_at(80))], FORECAST)
    assert [found.input for found in slow.disagreements] == ["step_time"]
    # 80 x 0.95 / 1,111 = 68.4 ms, and 114 ms at 0.6 of the rate
    assert slow.disagreements[0].predicted == pytest.approx(0.0684, abs=0.0001)
    assert slow.disagreements[0].measured == pytest.approx(0.114, abs=0.0002)
    assert "takes 114 ms, longer than the 68.4 ms expected" in slow.disagreements[0].sentence


def test_a_short_accept_length_is_not_a_slow_step() -> None:
    # A step of 80 writes 80 x 2.6 tokens in 100 ms: 2,080 tokens/s; with 1.8 kept, 1,440.
    forecast = replace(
        FORECAST, accept_length=2.6, tokens_per_s_at=lambda running: running * 2.6 / 0.1
    )
    found = live_update([reading(accept_length=1.8, tokens_per_s=1440.0)], forecast).disagreements
    assert [part.input for part in found] == ["accept_length"]
    assert "1.8 tokens a step are kept, 2.6 were expected" in found[0].sentence
    assert inputs(reading(accept_length=2.5, tokens_per_s=2000.0), forecast=forecast) == []


def test_more_prompt_tokens_are_told_as_prefill() -> None:
    # 1,140 prompt tokens/s are five times those expected, a quarter of device time.
    rate = rate_at(80) * 0.75 / 0.95
    found = live_update([reading(prompt_tokens_per_s=1140.0, tokens_per_s=rate)], FORECAST)
    assert [part.input for part in found.disagreements] == ["prefill_share"]
    assert "prefill takes 25 % of device time, 5 % were expected" in (
        found.disagreements[0].sentence
    )


def test_an_engine_that_slows_down_is_told_against_its_own_past() -> None:
    # Within the dry run's band, outside that of the readings before.
    past = [reading(start_s=1000.0 * hour, end_s=1000.0 * hour + 900) for hour in range(1, 9)]
    late = reading(start_s=20_000.0, end_s=20_900.0, tokens_per_s=0.8 * rate_at(80))
    found = live_update([*past, late], FORECAST).disagreements
    assert [part.input for part in found] == ["step_time"]
    assert "worker-0 has become slower: 889 tokens/s with 80 running, 1,111" in found[0].sentence
