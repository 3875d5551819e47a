"""Row numbers and the names under which rows outlive a session."""

from pathlib import Path

from pipeline.run.row_names import RowNames
from pipeline.store.folder import LocalFolder
from tests.fakes.desk import frozen, prompts_of


def names(folder: Path, *, num_prompts: int = 4, samples: int = 3) -> RowNames:
    the_frozen = frozen(LocalFolder(folder), prompts_of(num_prompts))
    return RowNames(
        folder=LocalFolder(folder), frozen_name=the_frozen.name, samples_per_prompt=samples
    )


def test_row_is_named_by_its_prompt_and_sample(tmp_path: Path) -> None:
    assert names(tmp_path).names_of([0, 2, 3, 11]) == [
        ("q000", 0),
        ("q000", 2),
        ("q001", 0),
        ("q003", 2),
    ]


def test_counts_return_under_the_numbers_of_their_rows(tmp_path: Path) -> None:
    counts = {("q001", 2): 5, ("q003", 0): 1}
    assert names(tmp_path).by_number(counts) == {5: 5, 9: 1}


def test_rows_that_the_session_does_not_have_are_left_out(tmp_path: Path) -> None:
    counts = {("q009", 0): 1, ("q001", 3): 1, ("q001", 0): 2}
    assert names(tmp_path).by_number(counts) == {3: 2}


def test_no_counts_need_no_prompts(tmp_path: Path) -> None:
    none = RowNames(folder=LocalFolder(tmp_path), frozen_name="gone", samples_per_prompt=1)
    assert none.by_number({}) == {}
