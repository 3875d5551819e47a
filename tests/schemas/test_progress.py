"""Reports of workers and coordinator."""

import pytest

from schemas.progress import slot_of


@pytest.mark.parametrize(
    ("worker", "slot"), [("w0", "w0"), ("w12r3", "w12"), ("worker", "worker"), ("r2", "r2")]
)
def test_worker_hired_again_has_the_place_of_the_first(worker: str, slot: str) -> None:
    assert slot_of(worker) == slot
