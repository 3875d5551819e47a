"""No change of the code moves an answer of the planner or the estimate unnoticed."""

import pytest

from tests.scores.kept_answers import answer, kept


@pytest.mark.parametrize(
    ("argv", "before"), [pytest.param(*case, id=f"question {n}") for n, case in enumerate(kept())]
)
def test_answer_is_the_kept_one(argv: list[str], before: dict[str, object]) -> None:
    assert answer(argv) == before, "a deliberate change? `make answers`, then read the diff"
