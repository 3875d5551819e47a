"""Deviations of a running engine from its forecast: each input on its own, with its cause."""

from dataclasses import replace

import pytest

from pipeline.live.deviations import deviations
from pipeline.live.forecast import Forecast
from schemas.estimate import Deviation, LiveReading
from tests.fakes.forecast import FORECAST, rate_at
from tests.fakes.forecast import steady_reading as reading

# A step of 80 writes 80 x 2.6 tokens in 100 ms: 2,080 tokens/s.
WITH_MTP = replace(FORECAST, accept_length=2.6, tokens_per_s_at=lambda running: running * 2.6 / 0.1)


def found(*readings: LiveReading, forecast: Forecast = FORECAST) -> list[Deviation]:
    return list(deviations(readings, forecast))


def inputs(*readings: LiveReading, forecast: Forecast = FORECAST) -> list[str]:
    return [deviation.input for deviation in found(*readings, forecast=forecast)]


def test_readings_as_predicted_deviate_in_nothing() -> None:
    assert inputs() == []
    assert inputs(reading()) == []
    assert inputs(reading(tokens_per_s=1.2 * rate_at(80))) == []


# --- running requests --------------------------------------------------------------------------


def test_few_running_requests_are_reported_with_their_cause() -> None:
    few = reading(running_requests=48.0, cap_requests=48, tokens_per_s=rate_at(48))
    (deviation,) = found(few)
    assert (deviation.input, deviation.predicted, deviation.measured) == (
        "running_requests",
        80,
        48,
    )
    assert "runs 48 requests at once (cap 48), 80 expected: the cap is too low" in (
        deviation.sentence
    )
    (held,) = found(replace(few, cap_requests=80))
    assert "KV pool" in held.sentence


@pytest.mark.parametrize(("running", "reported"), [(56.0, []), (55.9, ["running_requests"])])
def test_batch_is_another_one_below_seven_tenths(running: float, reported: list[str]) -> None:
    few = reading(running_requests=running, cap_requests=56, tokens_per_s=rate_at(running))
    assert inputs(few) == reported


# --- step time ---------------------------------------------------------------------------------


def test_slow_step_is_told_apart_from_a_small_batch() -> None:
    (slow,) = found(reading(tokens_per_s=0.6 * rate_at(80)))
    assert slow.input == "step_time"
    # 80 x 0.95 / 1,111 = 68.4 ms, and 114 ms at 0.6 of the rate
    assert slow.predicted == pytest.approx(0.0684, abs=0.0001)
    assert slow.measured == pytest.approx(0.114, abs=0.0002)
    assert "takes 114 ms, longer than the 68.4 ms expected" in slow.sentence
    (fast,) = found(reading(tokens_per_s=1.6 * rate_at(80)))
    assert "shorter than the 68.4 ms" in fast.sentence


@pytest.mark.parametrize(("factor", "reported"), [(1.47, []), (1.49, ["step_time"])])
def test_step_is_outside_beyond_its_band(factor: float, reported: list[str]) -> None:
    # sd root(0.2^2 + 0.05^2 / 10) = 0.2006; e^(1.96 x 0.2006) = 1.4817
    assert inputs(reading(tokens_per_s=rate_at(80) / factor)) == reported


# --- accept length -----------------------------------------------------------------------------


def test_short_accept_length_is_not_a_slow_step() -> None:
    # 1.8 tokens kept: 80 x 1.8 / 0.1 = 1,440 tokens/s.
    (short,) = found(reading(accept_length=1.8, tokens_per_s=1440.0), forecast=WITH_MTP)
    assert (short.input, short.predicted, short.measured) == ("accept_length", 2.6, 1.8)
    assert "is 1.8 tokens, 2.6 expected: MTP gains less" in short.sentence
    (long,) = found(reading(accept_length=3.6, tokens_per_s=2880.0), forecast=WITH_MTP)
    assert "MTP gains more" in long.sentence
    assert inputs(reading(accept_length=2.5, tokens_per_s=2000.0), forecast=WITH_MTP) == []


@pytest.mark.parametrize(("accept", "reported"), [(2.06, []), (2.05, ["accept_length"])])
def test_accept_length_is_outside_beyond_its_band(accept: float, reported: list[str]) -> None:
    # 2.6 / e^(1.96 x 0.12) = 2.055
    kept = reading(accept_length=accept, tokens_per_s=80 * accept / 0.1)
    assert inputs(kept, forecast=WITH_MTP) == reported


def test_accept_length_is_compared_only_where_both_sides_have_one() -> None:
    assert inputs(reading(accept_length=1.0)) == []
    assert inputs(reading(tokens_per_s=2080.0), forecast=WITH_MTP) == []


# --- prefill -----------------------------------------------------------------------------------


def test_more_prompt_tokens_are_reported_as_prefill() -> None:
    # 1,140 prompt tokens/s are five times those expected, a quarter of GPU time.
    rate = rate_at(80) * 0.75 / 0.95
    (deviation,) = found(reading(prompt_tokens_per_s=1140.0, tokens_per_s=rate))
    assert deviation.input == "prefill_share"
    assert deviation.predicted == pytest.approx(0.05)
    assert deviation.measured == pytest.approx(0.25)
    assert "prefill uses 25 % of GPU time, 5 % expected: prompts are longer" in deviation.sentence


def test_fewer_prompt_tokens_than_expected_are_reported_too() -> None:
    heavy = replace(FORECAST, prefill_share=0.25, prefill_s_per_token=0.25 / 1140)
    # Decoding has 0.95 of the time where 0.75 were expected.
    light = reading(prompt_tokens_per_s=228.0, tokens_per_s=rate_at(80) * 0.95 / 0.75)
    (deviation,) = found(light, forecast=heavy)
    assert "5 % of GPU time, 25 % expected: prompts are shorter" in deviation.sentence


@pytest.mark.parametrize(
    ("prompt_tokens_per_s", "reported"),
    [
        # 0.05 of the time is expected. 0.079 is less than 0.03 away, 0.081 lies within the band of
        # e^(1.96 x 0.25) = 1.63 times, 0.083 beyond it.
        (0.079 / 0.05 * 228, []),
        (0.081 / 0.05 * 228, []),
        (0.083 / 0.05 * 228, ["prefill_share"]),
    ],
)
def test_prefill_matters_from_three_percent_of_the_time_on(
    prompt_tokens_per_s: float, reported: list[str]
) -> None:
    assert inputs(reading(prompt_tokens_per_s=prompt_tokens_per_s)) == reported


def test_expected_prefill_follows_the_rate() -> None:
    # Half the batch: 40 / 0.052 = 769 tokens/s of 1,111, so 0.69 of the prefill.
    small = reading(running_requests=40.0, tokens_per_s=rate_at(40), prompt_tokens_per_s=1140.0)
    prefill = [each for each in found(small) if each.input == "prefill_share"]
    assert prefill[0].predicted == pytest.approx(0.05 * 0.6923, rel=1e-3)


# --- drift -------------------------------------------------------------------------------------


def past() -> list[LiveReading]:
    return [reading(start_s=1000.0 * n, end_s=1000.0 * n + 900) for n in range(1, 9)]


def test_engine_that_slows_down_is_compared_with_its_own_past() -> None:
    # Within the forecast's band, outside that of the earlier readings.
    late = reading(start_s=20_000.0, end_s=20_900.0, tokens_per_s=0.8 * rate_at(80))
    (drift,) = found(*past(), late)
    assert drift.input == "step_time"
    # 80 / 1,111 = 72 ms, 80 / 889 = 90 ms
    assert drift.predicted == pytest.approx(0.072, rel=1e-3)
    assert drift.measured == pytest.approx(0.090, rel=1e-3)
    assert "worker-0 has become slower: 889 tokens/s with 80 running requests, 1,111" in (
        drift.sentence
    )
    (faster,) = found(*past(), replace(late, tokens_per_s=1.25 * rate_at(80)))
    assert "has become faster: 1,389 tokens/s" in faster.sentence


def test_each_engine_has_its_own_latest_reading() -> None:
    slow = {"start_s": 20_000.0, "end_s": 20_900.0, "tokens_per_s": 0.8 * rate_at(80)}
    drifts = found(*past(), reading(**slow), reading(**slow, engine="worker-1"))
    assert [drift.sentence.partition(" ")[0] for drift in drifts] == ["worker-0", "worker-1"]
    # A reading that overlaps it is not an earlier one.
    assert (
        found(reading(), reading(start_s=1400.0, end_s=2300.0, tokens_per_s=0.8 * rate_at(80)))
        == []
    )
