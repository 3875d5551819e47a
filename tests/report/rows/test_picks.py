"""Rows chosen for the page: seeded, bounded, and the same in any order of the parts."""

from collections import Counter
from random import Random

from pipeline.report.rows.picks import PartRows, Picks


def part(number: int, num_rows: int = 50, errors: tuple[int, ...] = ()) -> PartRows:
    return PartRows(
        part=f"{number:05d}.parquet",
        is_ok=[place not in errors for place in range(num_rows)],
        took_s=[float(number * 100 + place) for place in range(num_rows)],
        flagged=[(place, ["looping"]) for place in range(0, num_rows, 10)],
    )


def chosen(parts: list[PartRows]) -> Picks:
    picks = Picks()
    for rows in parts:
        picks.add(rows)
    return picks


def test_sample_has_twenty_rows_in_any_order_of_the_parts() -> None:
    parts = [part(number, errors=(3,)) for number in range(12)]
    picks = chosen(parts)
    assert len(set(picks.random)) == 20
    assert all(pick.place != 3 for pick in picks.random)
    Random(1).shuffle(parts)
    again = chosen(parts)
    assert (again.random, again.by_flag, again.errors) == (
        picks.random,
        picks.by_flag,
        picks.errors,
    )
    assert again.slowest == picks.slowest


def test_counts_are_those_of_all_rows() -> None:
    picks = chosen([part(number, errors=(1, 2)) for number in range(30)])
    assert (picks.num_ok, picks.num_errors) == (30 * 48, 60)
    assert picks.num_flagged == {"looping": 150}
    assert [len(picks.errors), len(picks.by_flag["looping"]), len(picks.slowest)] == [40, 3, 10]
    assert [(pick.part, pick.place) for pick in picks.slowest[:2]] == [
        ("00029.parquet", 49), ("00029.parquet", 48)
    ]  # fmt: skip


def test_every_row_is_as_likely_as_any_other() -> None:
    # 400 runs of 4 parts with 10 rows: 20 of 40 are chosen, so each about 200 times.
    times: Counter[tuple[int, int]] = Counter()
    for run in range(400):
        picks = chosen([part(run * 4 + number, num_rows=10) for number in range(4)])
        times.update((int(pick.part[:5]) % 4, pick.place) for pick in picks.random)
    assert len(times) == 40
    # 5 standard deviations of 10.
    assert all(150 < number < 250 for number in times.values())


def test_run_with_few_rows_has_all_of_them() -> None:
    picks = chosen([part(0, num_rows=4), part(1, num_rows=3)])
    assert len(picks.random) == 7
    assert len({(pick.part, pick.place) for pick in picks.all()}) == 7
