"""Kept columns that sort rows into a few classes."""

from pipeline.report.rows.categories import Categories, CategoryRows


def rows(number: int, tokens: int = 100, flags: tuple[tuple[str, ...], ...] = ()) -> CategoryRows:
    return CategoryRows(num_rows=number, tokens={tokens: number}, flags=flags)


def add(categories: Categories, column: str, *values: str) -> None:
    if categories.is_candidate(column, values):
        for value in values:
            categories.add(column, value, rows(2))


def test_first_column_with_a_few_values_is_shown() -> None:
    categories = Categories()
    columns = ["question", "split", "level"]
    for number in range(3):
        assert categories.candidates(columns) == (columns if not number else ["split", "level"])
        add(categories, "question", *(f"a question {number} {n}" for n in range(20)))
        add(categories, "split", "train")
        add(categories, "level", "1", str(number + 2))
    shown = categories.shown()
    assert shown is not None
    column, counts = shown
    assert column == "level"
    assert {value: count.num_rows for value, count in counts.items()} == {
        "1": 6, "2": 2, "3": 2, "4": 2
    }  # fmt: skip
    assert counts["1"].lengths.mean_tokens == 100


def test_column_of_long_texts_is_none_however_few() -> None:
    categories = Categories()
    add(categories, "system", "x" * 61, "short")
    assert categories.shown() is None
    assert categories.candidates(["system"]) == []


def test_flags_of_each_value_are_counted() -> None:
    categories = Categories()
    assert categories.is_candidate("kind", ["a", "b"])
    categories.add("kind", "a", rows(5, flags=(("looping",), ("looping", "refusal"))))
    categories.add("kind", "b", rows(1))
    (_, counts) = categories.shown() or ("", {})
    assert (counts["a"].num_flagged, counts["a"].flags) == (2, {"looping": 2, "refusal": 1})
    assert counts["b"].num_flagged == 0
