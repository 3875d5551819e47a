"""A run on a head and three nodes of Ray's: one joins, one is called back, one is killed."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

from tests.fakes.running import Run, ended, free_port, new_run, questions, wait_until
from tests.fakes.scripted_server import Reply, ScriptedServer, answer, serving

pytestmark = pytest.mark.ray

GPUS_A_NODE, TP = 4, 2
# Six workers need 50 s for them before the delay ends.
NUM_ROWS = 600


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A head without GPUs, where the driver is; the nodes of the test come to it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        with contextlib.ExitStack() as stack:
            stack.callback(cluster.shutdown)
            cluster.add_node(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=80_000_000,
                dashboard_agent_listen_port=free_port(),
            )
            yield cluster


def join(nodes: Cluster, number: int = 1) -> list[Any]:
    return [
        nodes.add_node(wait=False, num_cpus=4, num_gpus=GPUS_A_NODE, object_store_memory=80_000_000)
        for _ in range(number)
    ]


def workers(run: Run) -> list[dict[str, Any]]:
    """Return the workers with an engine that is up, as in `live.json`."""
    live = run.folder / "live.json"
    reports = json.loads(live.read_text())["workers"] if live.exists() else []
    return [report for report in reports if report["state"] in ("running", "idle")]


def on(run: Run, node: Any) -> set[str]:  # noqa: ANN401 - Ray's own class for it is private
    return {report["worker_id"] for report in workers(run) if report["node_id"] == node.node_id}


def call_back(nodes: Cluster, node: Any) -> None:  # noqa: ANN401
    """Drain a node as `ray start` does when it gets SIGTERM."""
    deadline_ms = int(1000 * (time.time() + 30))
    accepted, _ = GcsClient(address=nodes.address).drain_node(
        node.node_id, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "test", deadline_ms
    )
    assert accepted


def test_nodes_that_go_cost_no_row_and_one_that_joins_gets_workers(
    tmp_path: Path, nodes: Cluster
) -> None:
    delay_s = [2.0]

    def slow_at_first(request: dict[str, Any], number: int) -> Reply:
        return replace(answer(request, number), delay_s=delay_s[0])

    with serving(ScriptedServer(script=slow_at_first)) as server:
        # One server under eight names: an engine for each group of two GPUs.
        urls = [server.url.replace("/v1", f"/{number}/v1") for number in range(6)]
        run = new_run(
            tmp_path,
            questions(NUM_ROWS),
            nodes.address,
            engine={"kind": "endpoint", "base_urls": urls, "gpus": TP, "max_running_requests": 4},
            cluster={"min_engines": 2},
            work={"shard_rows": 16},
        )
        first, second = join(nodes, 2)
        process = run.start()
        wait_until(lambda: len(workers(run)) >= 2 or process.poll() is not None)
        # The run is on its way with the four groups that two nodes hold.
        join(nodes)
        wait_until(lambda: len(workers(run)) == 6 or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        placed = [(r["node_id"], gpu) for r in workers(run) for gpu in r["gpus"]]
        assert len(set(placed)) == len(placed) == 3 * GPUS_A_NODE
        leaving, lost = on(run, second), on(run, first)
        assert len(lost) == len(leaving) == GPUS_A_NODE / TP
        call_back(nodes, second)
        wait_until(lambda: not on(run, second) or process.poll() is not None)
        nodes.remove_node(first, allow_graceful=False)
        delay_s[0] = 0.0
        result = ended(process)
    assert result.code == 0, result.err
    for worker_id in leaving:
        assert f"event=worker_ended worker={worker_id} cause='its node leaves'" in result.err
    for worker_id in lost:
        assert f"event=worker_ended worker={worker_id} cause='its " in result.err
    assert sorted(run.ids()) == [f"q{number:05d}" for number in range(NUM_ROWS)]
