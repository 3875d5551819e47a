"""A simulated engine with known rate and lengths, as its worker would report it.

A fixed number of requests run at the same pace, and a new one starts as another ends. Time moves
by one span at once.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from pipeline.live.log import LiveLog
from pipeline.live.meter import rounded
from pipeline.planner.lengths.shapes import LengthShape
from schemas.progress import LiveSpan
from tests.fakes.drawn_lengths import sampled_length

_SPAN_S = 30.0


@dataclass(slots=True, kw_only=True)
class Truth:
    """True figures of the engine."""

    running_requests: int
    cap_requests: int
    tokens_per_s: float
    shape: LengthShape
    prompt_tokens: float
    accept_length: float | None = None
    noise: float = 0.01
    """Relative noise of the rate of one span."""


def replay(
    log: LiveLog, truth: Truth, *, engine: str, completions: int, every: int, seed: int
) -> Iterator[int]:
    """Fill the log as the coordinator does; yield the number finished after each `every`."""
    random = Random(seed)
    pace = truth.tokens_per_s / truth.running_requests
    flight = [[sampled_length(truth.shape, random), 0.0] for _ in range(truth.running_requests)]
    now_s = finished = told = 0.0
    while finished < completions:
        tokens = pace * _SPAN_S * random.gauss(1, truth.noise)
        ended = []
        for place, (length, written) in enumerate(flight):
            so_far = written + tokens
            while so_far >= length:
                ended.append(rounded(int(length)))
                so_far -= length
                length = sampled_length(truth.shape, random)
            flight[place] = [length, so_far]
        rate = tokens * truth.running_requests / _SPAN_S
        log.add(
            engine,
            LiveSpan(
                duration_s=_SPAN_S,
                engine_age_s=now_s,
                cap_requests=truth.cap_requests,
                running_requests=truth.running_requests,
                tokens_per_s=rate,
                prompt_tokens_per_s=len(ended) * truth.prompt_tokens / _SPAN_S,
                accept_length=truth.accept_length,
                counted_by="engine",
                finished=tuple(Counter(ended).items()),
                running=tuple(Counter(rounded(int(written)) for _, written in flight).items()),
            ),
            now_s=log.began_at_s + now_s + _SPAN_S,
        )
        now_s += _SPAN_S
        finished += len(ended)
        if finished - told >= every:
            told = finished
            yield int(finished)
