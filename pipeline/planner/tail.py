"""What is lost at the end of a job: engines that run empty, shards that end apart."""

import math
from collections.abc import Sequence
from statistics import NormalDist

from pipeline.planner.length_shapes import (
    LengthShape,
    longest_of,
    longest_remaining,
    mean_emitted,
    moment,
)
from pipeline.planner.rate_groups import RateGroup, rate_of


def tail_seconds(completions: float, groups: Sequence[RateGroup], shape: LengthShape) -> float:
    """What the last requests take beyond their work at full rate.

    When the queue is empty, B requests run. With a step that grows evenly from s (alone) to f
    (full batch), the last one ends after s E[longest remaining] + (f - s) E[remaining]; at full
    rate the same work takes f E[remaining]. The difference is s times what the longest remaining
    is over the mean. In a job shorter than its batches, all start at once and the longest of all
    completions is the last.
    """
    resident = sum(group.replicas * group.running_requests for group in groups)
    part = min(1.0, completions / resident)
    remaining = moment(shape, 1) if part < 1 else mean_emitted(shape)
    ends = []
    for group in groups:
        requests = max(group.replicas * group.running_requests * part, 1.0)
        longest = (longest_of if part < 1 else longest_remaining)(shape, requests)
        slower_s = max(group.running_requests / group.tokens_per_s - group.small_step_s, 0.0)
        ends.append(group.small_step_s * longest + slower_s * part * remaining)
    return max(max(ends) - resident * part * remaining / rate_of(groups), 0.0)


def static_shard_penalty(num_completions: int, shards: int, cv: float) -> float:
    """How much longer the slowest of equal random shards takes than the mean one.

    One queue costs nothing of this; a split of input sorted by topic costs tens of percent.
    The mean of the largest of k normals by Blom's approximation.
    """
    if shards < 2:
        return 0.0
    largest = NormalDist().inv_cdf((shards - 0.375) / (shards + 0.25))
    return largest * cv / math.sqrt(num_completions / shards)
