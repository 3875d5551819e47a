"""Round times of pipeline stages (`--pp-size`), from SGLang 0.5.23.

The running requests are divided into micro-batches, one per stage and `--pp-async-batch-depth`
more. They go round the stages in a fixed order; each stage works on one at a time, and a
micro-batch starts its next token only when the last stage has sent the previous one
(scheduler_pp_mixin.py: event_loop_pp).
"""

import math
from collections.abc import Sequence

# Wait of one micro-batch between two rounds: its tokens go to the host, which makes and launches
# the next batch, and no overlap schedule hides that (overrides.py:
# _pipeline_parallel_overlap_disable). assumed: between the 2 ms that SGLang's overlap schedule
# saved (a tenth of a step of Llama 8B, sglang#1738) and the 4 ms of another engine that scheduled
# between steps (vllm#6854)
TURN_ON_HOST_S = 3e-3
_LEAST_CHANCE = 1e-9


def round_s(stages_s: Sequence[float], micro_batches: float) -> float:
    """Return the time of a round, in which every running request gets a token.

    It is bound by the slowest stage, which works on all micro-batches, or by the way of one
    micro-batch through all stages.
    """
    return max(micro_batches * max(stages_s), sum(stages_s) + TURN_ON_HOST_S)


def prefill_taken_s(
    *,
    alone_s: float,
    chunks: int,
    stages: int,
    micro_batches: float,
    step_s: float,
    ending: float,
) -> float:
    """Estimate the seconds of a replica's decoding that one prompt costs.

    `alone_s` is its time through all stages, `step_s` that of a round without prompts, and `ending`
    the requests of a micro-batch that end in a round, each followed by a prompt. A prompt uses its
    micro-batch's turn and delays those behind it, which cannot pass: a round lasts as long as its
    fullest micro-batch, and prompts in different micro-batches of it go together. Chunks of one
    prompt follow each other through the stages.
    """
    turn_s = step_s / micro_batches
    if not alone_s or not ending:
        return alone_s
    prompts = _prompts_a_turn(ending)
    lap_s = alone_s * (chunks + stages - 1) / (chunks * stages)
    mean_s = _mean_round_s(step_s, lap_s, prompts, micro_batches)
    # However the prompts fall, each stage works through its part of them.
    mean_s = max(mean_s, micro_batches * prompts * alone_s / stages)
    return mean_s / (micro_batches * prompts) - turn_s / ending


def _prompts_a_turn(ending: float) -> float:
    """Solve x e^x = ending for the mean prompts that a micro-batch starts per turn.

    A turn with a prompt decodes nothing; the chance of a turn without one is e^-x.
    """
    guess = math.log1p(ending)
    for _ in range(20):
        grown = guess * math.exp(guess)
        guess -= (grown - ending) / (math.exp(guess) * (guess + 1))
    return guess


def _mean_round_s(step_s: float, lap_s: float, prompts: float, micro_batches: float) -> float:
    """Average the fullest micro-batch's lap over Poisson counts; a plain round is the least."""
    chance = below = math.exp(-prompts)
    at_most = math.pow(below, micro_batches)
    mean_s, count = at_most * step_s, 0
    while 1 - at_most > _LEAST_CHANCE:
        count += 1
        chance *= prompts / count
        below = min(below + chance, 1.0)
        reached = math.pow(below, micro_batches)
        mean_s += (reached - at_most) * max(step_s, count * lap_s)
        at_most = reached
        if chance < _LEAST_CHANCE and count > prompts:
            break
    return mean_s
