"""Lengths in classes: exact sums and maxima, classes that exceed neither."""

from pipeline.report.rows.lengths import LengthCounts, quantile


def test_no_figure_exceeds_the_longest_turn() -> None:
    # 4,096 is in the class 4,100, which no turn has.
    lengths = LengthCounts()
    lengths.add({4096: 9, 1000: 1})
    assert (lengths.most_tokens, lengths.quantile(0.95), max(lengths.counts)) == (4096, 4096, 4096)
    assert lengths.mean_tokens == 0.9 * 4096 + 100


def test_classes_have_three_digits() -> None:
    lengths = LengthCounts()
    lengths.add({12_345: 1, 12_349: 2, 20_000: 1, 999: 1})
    assert lengths.counts == {12_300: 3, 20_000: 1, 999: 1}
    assert lengths.turns == 5


def test_quantiles_of_counts() -> None:
    counts = {10: 5, 20: 4, 1000: 1}
    assert [quantile(counts, share) for share in (0.5, 0.9, 0.95, 1.0)] == [10, 20, 1000, 1000]
    assert (quantile({}, 0.5), LengthCounts().mean_tokens, LengthCounts().quantile(0.5)) == (
        0,
        0,
        0,
    )
