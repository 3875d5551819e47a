"""Places for workers on nodes, by what the nodes have."""

import pytest

from pipeline.run.placement import (
    Node,
    node_changes,
    node_name,
    num_places,
    places_on,
    workers_per_process,
)
from schemas.config.engine import EngineConfig


@pytest.mark.parametrize(
    ("resources", "cpus", "gpus", "places"),
    [
        ({"CPU": 8.0, "GPU": 4.0}, 1.0, 2, 2),
        ({"CPU": 8.0, "GPU": 5.0}, 1.0, 2, 2),
        # CPUs are short: two workers of three.
        ({"CPU": 8.0, "GPU": 8.0}, 3.0, 1, 2),
        ({"CPU": 0.0, "GPU": 4.0}, 0.0, 1, 4),
        ({"CPU": 8.0}, 1.0, 1, 0),
        ({"GPU": 4.0}, 1.0, 1, 0),
    ],
)
def test_worker_needs_all_its_gpus_and_cpus_on_one_node(
    resources: dict[str, float], cpus: float, gpus: int, places: int
) -> None:
    assert places_on(resources, cpus=cpus, gpus=gpus) == places


def test_places_are_counted_node_by_node() -> None:
    engine = EngineConfig.model_validate(
        {"kind": "sglang", "command": ["sglang"], "gpus": 2, "cpus": 1}
    )
    nodes = [Node(name=f"n{number}", resources={"CPU": 8.0, "GPU": 3.0}) for number in range(3)]
    # Three GPUs hold one worker of two; the odd ones of several nodes do not make another.
    assert num_places(nodes, engine) == 3


def test_nodes_that_were_lost_and_joined_are_named() -> None:
    stays, goes = Node(name="a", resources={}), Node(name="b", resources={"GPU": 8.0})
    comes = Node(name="c", resources={"GPU": 4.0})
    assert node_changes({"1": stays, "2": goes}, {"1": stays, "3": comes}) == [
        "event=node_lost node='b'",
        "event=node_joined node='c' gpus=4",
    ]
    assert node_changes({"1": stays}, {"1": stays}) == []
    assert node_changes({}, {"1": stays}) == ["event=node_joined node='a' gpus=0"]


def test_nodes_of_one_machine_have_names_of_their_own() -> None:
    assert node_name("host", "0123456789abcdef") == "host 01234567"


@pytest.mark.parametrize(
    ("num_urls", "num_cpus", "is_private", "gpus", "together"),
    [
        (4, 2, True, 0, 2),
        (5, 2, True, 0, 3),
        (4, 16, True, 0, 1),
        # A cluster spreads its workers by their CPUs and GPUs, each in a process of its own.
        (4, 2, False, 0, 1),
        (4, 2, True, 1, 1),
    ],
)
def test_workers_of_endpoints_share_as_many_processes_as_there_are_cpus(
    monkeypatch: pytest.MonkeyPatch,
    num_urls: int,
    num_cpus: int,
    is_private: bool,
    gpus: int,
    together: int,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: num_cpus)
    urls = [f"http://host-{number}/v1" for number in range(num_urls)]
    engine = EngineConfig.model_validate({"kind": "endpoint", "base_urls": urls, "gpus": gpus})
    assert workers_per_process(engine, is_private=is_private) == together


def test_worker_with_an_engine_has_a_process_of_its_own() -> None:
    engine = EngineConfig.model_validate({"kind": "sglang", "command": ["sglang"], "count": 8})
    assert workers_per_process(engine, is_private=True) == 1
