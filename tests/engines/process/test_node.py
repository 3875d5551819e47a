"""Turns of engines on one machine."""

from pathlib import Path

from pipeline.engines.process.node import node_lock


def test_node_lock_has_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "one"
    with node_lock(path) as first, node_lock(path) as second:
        assert (first, second) == (True, False)
    with node_lock(path) as again:
        assert again
