"""A few streams of `make eta-score`, which the estimator must not miss by much."""

import statistics

import pytest

from tests.scores.score_eta import KINDS, Played, looks_at, played

# One of each sort: one length, wide lengths, stalls, a trend, turns, counters.
NAMES = (
    "one length", "log-normal 1.2", "two humps, counters", "stalls", "sorted input", "capped",
)  # fmt: skip


@pytest.fixture(scope="module")
def streams() -> list[Played]:
    return [played(name, seed) for name in NAMES for seed in (0, 1)]


def test_kinds_are_named_once() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.9, 0.97])
def test_half_of_the_figures_are_near_the_truth(streams: list[Played], share: float) -> None:
    factors = [look.factor() for look in looks_at(streams, share)]
    assert len(factors) == len(streams)
    assert statistics.median(factors) < 1.25
    assert max(factors) < 4


def test_band_holds_most_of_the_truths(streams: list[Played]) -> None:
    looks = [look for stream in streams for look in stream.looks if look.share >= 0.1]
    assert 0.6 < statistics.mean(look.hits() for look in looks) < 0.97
