"""Rounds of a pipeline: by hand, and against a ring of micro-batches that is run event by event."""

import random

import pytest

from pipeline.planner.rate.stages import TURN_ON_HOST_S, prefill_taken_s, round_s
from pipeline.planner.sglang.layout import largest_share, requests_at_once, stage_layers


def test_layers_that_are_over_go_to_the_last_stages() -> None:
    assert stage_layers(64, 4) == (16, 16, 16, 16)
    assert stage_layers(61, 4) == (15, 15, 15, 16)
    assert stage_layers(62, 4) == (15, 15, 16, 16)


def test_largest_stage_of_a_hybrid_model_holds_its_part_of_each_kind() -> None:
    # Qwen3.6-27B: 64 layers, every fourth of full attention. Three stages hold 21, 21 and 22; the
    # last has layers 42 to 63, of which 43, 47, ... 63 are full: 6 of 16, and 16 of 48 linear ones.
    assert largest_share(16, 64, 3) == 6 / 16
    # Any 22 layers in a row hold at most 17 linear ones: the bound that is planned with.
    assert largest_share(48, 64, 3) == 17 / 48
    assert largest_share(48, 64, 4) == 1 / 4
    assert largest_share(48, 64, 1) == 1


def test_micro_batches_take_whole_parts_of_the_running_requests() -> None:
    # 46 // 4 = 11 in each of 4 micro-batches; a fifth takes two more, and then the rows are out.
    assert requests_at_once(46, 4, 4, None) == 44
    assert requests_at_once(46, 4, 5, None) == 46
    assert requests_at_once(46, 4, 4, 8) == 32
    assert requests_at_once(3, 4, 4, None) == 3
    assert requests_at_once(46, 1, 1, None) == 46


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
