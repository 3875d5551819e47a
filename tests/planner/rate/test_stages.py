"""Rounds of a pipeline: by hand, and against a ring of micro-batches that is run event by event."""

import random

import pytest

from pipeline.planner.rate.stages import TURN_ON_HOST_S, prefill_taken_s, round_s


def test_round_waits_for_the_slowest_stage_or_for_its_own_tokens() -> None:
    # Equal stages of 10 ms: one micro-batch takes 40 ms around, and then its turn on the host.
    assert round_s([0.010] * 4, 4) == pytest.approx(0.040 + TURN_ON_HOST_S)
    # A last stage of 14 ms takes 4 x 14 ms, longer than 3 x 10 + 14 ms around.
    assert round_s([0.010, 0.010, 0.010, 0.014], 4) == pytest.approx(0.056)
    # One micro-batch more than stages hides the host, at the price of a fifth turn.
    assert round_s([0.010] * 4, 5) == pytest.approx(0.050)
    # A single request leaves three stages idle at any time.
    assert round_s([0.010] * 4, 1) == pytest.approx(0.040 + TURN_ON_HOST_S)


def test_rare_short_prompt_takes_its_micro_batch_one_turn() -> None:
    # 60 ms through four stages are no more than a round of 80 ms: nobody waits, and a quarter of
    # the requests miss one token, worth 80 / 4 = 20 ms.
    taken = prefill_taken_s(
        alone_s=0.060, chunks=1, stages=4, micro_batches=4, step_s=0.080, ending=1e-4
    )
    assert taken == pytest.approx(0.020, rel=0.01)


def test_rare_long_prompt_holds_up_all_stages() -> None:
    # 200 ms around instead of 80, and a turn: 120 + 20 ms.
    taken = prefill_taken_s(
        alone_s=0.200, chunks=1, stages=4, micro_batches=4, step_s=0.080, ending=1e-4
    )
    assert taken == pytest.approx(0.140, rel=0.01)


def test_chunks_of_one_prompt_fill_the_pipeline() -> None:
    # 29 chunks and 3 more turns to drain, a quarter of 29 each: 8 s x 32 / (29 x 4) = 2.207 s
    taken = prefill_taken_s(
        alone_s=8.0, chunks=29, stages=4, micro_batches=4, step_s=0.080, ending=1e-4
    )
    assert taken == pytest.approx(2.207 - 0.060, rel=0.01)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("ending", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("prompt_s", [0.05, 0.4])
def test_prompts_cost_what_a_ring_run_event_by_event_says(
    stages: int, ending: float, prompt_s: float
) -> None:
    turn_s = 0.02
    taken = prefill_taken_s(
        alone_s=prompt_s, chunks=1, stages=stages, micro_batches=stages,
        step_s=stages * turn_s, ending=ending,
    )  # fmt: skip
    # Decoding a request's tokens takes `1 / ending` turns of its micro-batch.
    said = 1 / (taken + turn_s / ending)
    assert said == pytest.approx(_prompts_a_second(stages, ending, prompt_s, turn_s), rel=0.12)


def _prompts_a_second(stages: int, ending: float, prompt_s: float, turn_s: float) -> float:
    """A ring whose micro-batches go round in order; one with prompts to do does them alone."""
    chance = random.Random(7)
    free_s = [0.0] * stages
    back_s, waiting = [0.0] * stages, [0] * stages
    done = 0
    for turn in range(20_000):
        batch = turn % stages
        each_s = waiting[batch] * prompt_s / stages or turn_s
        done += waiting[batch]
        at_s = back_s[batch]
        for stage in range(stages):
            at_s = free_s[stage] = max(at_s, free_s[stage]) + each_s
        back_s[batch] = at_s
        waiting[batch] = 0 if waiting[batch] else _poisson(chance, ending)
    return done / max(free_s)


def _poisson(chance: random.Random, mean: float) -> int:
    count, at = 0, chance.expovariate(1.0)
    while at < mean:
        count, at = count + 1, at + chance.expovariate(1.0)
    return count
