"""How pipeline stages share layers, turns and requests: `--pp-size`, read from SGLang 0.5.23.

The running requests are dealt out to micro-batches, one a stage and `--pp-async-batch-depth` more.
They go round the stages in a fixed order, each stage working on one at a time, and a micro-batch
starts its next token only when the last stage has sent the one before (scheduler_pp_mixin.py:
event_loop_pp). Every stage keeps the keys, values and states of its own layers for all of them, in
one pool. This module knows seconds and counts, neither models nor cards.
"""

import math
from collections.abc import Sequence

# What one micro-batch waits for between two rounds: its tokens come to the host, the next batch is
# made and launched, and no overlap schedule hides that (overrides.py:
# _pipeline_parallel_overlap_disable). assumed: between the 2 ms that the overlap schedule saved at
# its coming (a tenth of a step of Llama 8B, sglang#1738) and the 4 ms of another engine that
# scheduled between steps (vllm#6854)
TURN_ON_HOST_S = 3e-3
_LEAST_CHANCE = 1e-9


# --- what a stage holds -----------------------------------------------------------------------


# --- a round: every running request gets a token ----------------------------------------------


def round_s(stages_s: Sequence[float], micro_batches: float) -> float:
    """The slowest stage with one micro-batch after the other, or one micro-batch all around.

    With fewer requests than stages there are fewer micro-batches than stages, and all wait.
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
    """Seconds of a replica's decoding that one prompt takes.

    `alone_s` is its way through all stages, `step_s` a round without prompts, and `ending` the
    requests of a micro-batch that end in a round, each of them followed by a prompt. A prompt takes
    its micro-batch's turn, and holds up those behind it, which cannot pass it: a round lasts as
    long as its fullest micro-batch needs to get around, and prompts of one round in different
    micro-batches pass together. Chunks of one prompt follow each other through the stages.
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
    """Mean prompts that a micro-batch starts a turn: x e^x = ending, as a turn with a prompt in it
    decodes nothing, and that chance is e^-x."""
    guess = math.log1p(ending)
    for _ in range(20):
        grown = guess * math.exp(guess)
        guess -= (grown - ending) / (math.exp(guess) * (guess + 1))
    return guess


def _mean_round_s(step_s: float, lap_s: float, prompts: float, micro_batches: float) -> float:
    """The mean over Poisson counts of the fullest micro-batch's lap, at least a plain round."""
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
