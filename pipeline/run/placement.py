"""Places for workers on Ray's nodes, and the claims on them.

Invariant: all GPUs of one worker are on one node, and stay the worker's until it is abandoned, so
that a worker that starts again finds them free. This module knows nothing about rows.
"""

import math
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from schemas.config.engine import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Node and GPUs of a worker."""

    node: str
    node_id: str
    gpus: tuple[str, ...]


def this_place() -> Place:
    """Return the place of the calling actor."""
    context = ray.get_runtime_context()
    node_id = context.get_node_id()
    return Place(
        node=node_name(socket.gethostname(), node_id),
        node_id=node_id,
        gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
    )


@dataclass(frozen=True, slots=True)
class Hold:
    """A worker's claim on CPUs and GPUs: a placement group when it has several GPUs."""

    engine: EngineConfig
    group: Any | None

    def actor_options(self, num_workers: int = 1) -> dict[str, object]:
        """Return what Ray needs to know of a process with so many workers."""
        options: dict[str, object] = {
            "num_cpus": self.engine.cpus * num_workers,
            "num_gpus": self.engine.gpus_per_worker,
        }
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=0
            )
        return options

    def release(self) -> None:
        if self.group is not None:
            remove_placement_group(self.group)


def hold(engine: EngineConfig) -> Hold:
    """Claim a place. Ray grants it when one is free, and another when its node is lost."""
    if engine.gpus_per_worker <= 1:
        return Hold(engine, None)
    bundle = {"CPU": engine.cpus, "GPU": float(engine.gpus_per_worker)}
    bundle = {name: amount for name, amount in bundle.items() if amount}
    return Hold(engine, placement_group([bundle], strategy="STRICT_PACK"))


def workers_per_process(engine: EngineConfig, *, is_private: bool) -> int:
    """Return how many workers share a process.

    A worker of an endpoint is only a client, and on a Ray of the run's own all are on one node: a
    process for each CPU is enough. measured: a process more costs 3 CPU-seconds and 120 MB.
    """
    is_only_client = engine.kind == "endpoint" and not engine.gpus_per_worker
    if not is_only_client or not is_private or engine.num_workers is None:
        return 1
    return math.ceil(engine.num_workers / (os.cpu_count() or 1))


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Schedule an actor on the node of the calling process, or nowhere."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster and its resources, in use or not."""

    name: str
    resources: dict[str, float]

    @property
    def num_gpus(self) -> float:
        return self.resources.get("GPU", 0.0)


def alive_nodes() -> dict[str, Node]:
    """Return the live nodes by Ray's id."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {
        node["NodeID"]: Node(
            name=node_name(node["NodeManagerHostname"], node["NodeID"]),
            resources=node["Resources"],
        )
        for node in nodes
        if node["Alive"]
    }


def node_changes(before: Mapping[str, Node], after: Mapping[str, Node]) -> list[str]:
    """Return a log line for each node that was lost and each that joined."""
    lost = [f"event=node_lost node={before[n].name!r}" for n in before if n not in after]
    joined = [node for node_id, node in after.items() if node_id not in before]
    return lost + [f"event=node_joined node={n.name!r} gpus={n.num_gpus:g}" for n in joined]


def draining_nodes() -> set[str]:
    """Return the nodes that will be taken away, after SIGTERM or by their autoscaler.

    Ray has no public call for it; its trainer uses this one (2.60, ray/train/v2/_internal).
    """
    ask = getattr(ray._private.state.state, "get_draining_nodes", dict)  # noqa: SLF001
    return set(ask())


def node_name(hostname: str, node_id: str) -> str:
    """Return a node's name for people: two nodes of Ray may share a machine."""
    return f"{hostname} {node_id[:8]}"


def num_places(nodes: Iterable[Node], engine: EngineConfig) -> int:
    """Count the workers that fit on these nodes when they are empty."""
    cpus, gpus = engine.cpus, engine.gpus_per_worker
    return sum(places_on(node.resources, cpus=cpus, gpus=gpus) for node in nodes)


def places_on(resources: dict[str, float], *, cpus: float, gpus: int) -> int:
    """Count the workers of `cpus` and `gpus` that fit on a node with these resources."""
    by_gpus = int(resources.get("GPU", 0) // gpus)
    return min(by_gpus, int(resources.get("CPU", 0) // cpus)) if cpus else by_gpus


def free_resources() -> str:
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU"
