"""A cluster of nodes with addresses of their own, in network namespaces of this machine.

Run by `make test-cluster`, as root, on Linux with iproute2; not a part of the suite. Every node is
started by jobs/deploy/node.sh and started again when it ends, as a supervisor would; the job is
submitted by `ray job submit`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.running import ROOT, Run, engine_pids, new_run, questions
from tests.fakes.scripted_model import write_scripted_model

NUM_ROWS = 150_000
# More than are done before the head is killed; the job after it is given fewer.
_ROWS_AFTER = 4_000
GPUS_A_NODE, TP = 4, 2
_BRIDGE, _NET = "rgbr0", "10.213.77"
_WAIT_S = 180.0


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout


@dataclass(slots=True)
class Node:
    """A namespace with an address on the bridge, and the Ray that runs in it."""

    number: int
    supervisor: "subprocess.Popen[bytes] | None" = None

    @property
    def name(self) -> str:
        return f"rgn{self.number}"

    @property
    def address(self) -> str:
        return f"{_NET}.{10 + self.number}"

    def make(self) -> None:
        ip("netns", "add", self.name)
        outside, inside = f"rgo{self.number}", f"rgi{self.number}"
        ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        ip("link", "set", outside, "master", _BRIDGE, "up")
        ip("link", "set", inside, "netns", self.name)
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", inside)
        ip("-n", self.name, "link", "set", inside, "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def start(self, head: "Node", *options: str) -> None:
        role = "head" if self is head else "worker"
        own = [] if self is head else [f"--node-ip-address={self.address}"]
        options = ("--object-store-memory=80000000", *own, *options)
        script = 'hostname "$0"; while true; do "$@"; sleep 1; done'
        node = [str(ROOT / "jobs/deploy/node.sh"), role, head.address, *options]
        self.supervisor = subprocess.Popen(
            self.command("unshare", "--uts", "bash", "-c", script, self.name, *node),
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """As when the machine loses its power: everything in it at once."""
        while pids := ip("netns", "pids", self.name).split():
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        if self.supervisor is not None:
            self.supervisor.wait()

    def ask_to_leave(self) -> None:
        """SIGTERM to `ray start`, as when a machine is called back."""
        [pid] = [
            pid
            for pid in ip("netns", "pids", self.name).split()
            if b"start\0--block" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(int(pid), signal.SIGTERM)

    def cut_off(self) -> None:
        ip("link", "set", f"rgo{self.number}", "down")

    def let_back(self) -> None:
        ip("link", "set", f"rgo{self.number}", "up")


def _environment() -> dict[str, str]:
    """With Ray's token in the home, which all nodes share."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "RAY_AUTH_MODE": "token"}


@dataclass(slots=True)
class Site:
    """The bridge and its nodes; the first one is the head."""

    nodes: list[Node] = field(default_factory=list)

    def add(self, *options: str) -> Node:
        node = Node(len(self.nodes))
        node.make()
        self.nodes.append(node)
        node.start(self.nodes[0], *options)
        return node

    def ray(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command of Ray's on the head."""
        ray = str(Path(sys.executable).with_name("ray"))
        command = self.nodes[0].command(ray, *words)
        return subprocess.run(command, capture_output=True, text=True, env=_environment())

    def submit(self, name: str, run: Run, *arguments: str) -> None:
        submitted = self.ray(
            *("job", "submit", "--no-wait", "--submission-id", name, "--working-dir", str(ROOT)),
            *("--", sys.executable, "-m", "jobs.regenerate", str(run.run_file), *arguments),
        )
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr

    def log(self, name: str) -> str:
        return self.ray("job", "logs", name).stdout


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("HOME", str(tmp_path))
    with _bridge():
        built = Site()
        try:
            yield built
        finally:
            for node in built.nodes:
                node.let_back()
                node.kill()
                ip("netns", "del", node.name)


@contextmanager
def _bridge() -> Iterator[None]:
    ip("link", "add", _BRIDGE, "type", "bridge")
    ip("addr", "add", f"{_NET}.1/24", "dev", _BRIDGE)
    ip("link", "set", _BRIDGE, "up")
    try:
        yield
    finally:
        ip("link", "del", _BRIDGE)


def until(what: str, is_so: Callable[[], bool]) -> None:
    began_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - began_s < _WAIT_S, f"waited in vain: {what}"
        time.sleep(0.5)
    print(f"{time.strftime('%H:%M:%S')} {what} (after {time.monotonic() - began_s:.0f} s)")


def test_nodes_are_killed_cut_off_and_joined_and_the_head_restarted(
    tmp_path: Path, site: Site
) -> None:
    model_file = tmp_path / "scripted.gguf"
    write_scripted_model(model_file)
    engine = {"kind": "embedded", "count": None, "model_file": str(model_file), "gpus": TP}
    engine |= {"threads": 1, "max_running_requests": 1}
    run = new_run(
        tmp_path,
        questions(NUM_ROWS),
        engine=engine,
        work={"lease_ttl_s": 5, "shard_rows": 32},
        cluster={"min_engines": 2},
    )
    gpus = (f"--num-gpus={GPUS_A_NODE}", "--num-cpus=4")
    site.add("--num-gpus=0", "--num-cpus=2")
    until("the head takes jobs", lambda: site.ray("job", "list").returncode == 0)
    killed, cut, _ = (site.add(*gpus) for _ in range(3))
    until("three nodes have joined", lambda: "12.0 GPU" in site.ray("status").stdout)
    site.submit("first", run)
    until("six engines run", lambda: len(running(run)) == 6)

    killed.kill()
    until("the killed node is lost", lambda: "event=node_lost" in site.log("first"))
    assert run.status()["rows_done"] < NUM_ROWS

    on_cut = {str(report["worker_id"]) for report in reports(run) if is_on(report, cut)}
    assert len(on_cut) == GPUS_A_NODE / TP
    cut.cut_off()
    until("its leases are lost", lambda: says(site, "event=worker_silent", on_cut))
    cut.let_back()
    until("its late parts are fenced", lambda: says(site, "event=(leases_lost|stale_rows)", on_cut))

    joined = site.add(*gpus)
    until(
        "the node that joined has engines", lambda: sum(is_on(r, joined) for r in running(run)) == 2
    )
    leaving = {str(report["worker_id"]) for report in reports(run) if is_on(report, joined)}
    joined.ask_to_leave()
    until("it is asked to leave, and its workers end", lambda: has_left(site, leaving))

    assert 0 < run.status()["rows_done"] < NUM_ROWS - _ROWS_AFTER

    site.nodes[0].kill()
    site.nodes[0].start(site.nodes[0], "--num-gpus=0", "--num-cpus=2")
    until("the head is back", lambda: site.ray("job", "list").returncode == 0)
    rows_done = run.status()["rows_done"]
    num_rows = rows_done + _ROWS_AFTER
    site.submit("second", run, "--set", f"prompts.limit={num_rows}")
    until("the run goes on", lambda: run.status()["rows_done"] > rows_done)
    over = f"rows       {num_rows:,} of {num_rows:,} done, 0 of them error rows; 0 failed"
    until("the run is over", lambda: over in site.log("second"))
    assert sorted(run.ids()) == sorted(f"q{number:05d}" for number in range(num_rows))
    until("no engine is left", lambda: not engine_pids(run.folder))


def reports(run: Run) -> list[dict[str, object]]:
    found = run.status()["workers"] if (run.folder / "run.json").exists() else []
    return list(found)


def running(run: Run) -> list[dict[str, object]]:
    return [report for report in reports(run) if report["state"] == "running"]


def is_on(report: dict[str, object], node: Node) -> bool:
    return str(report["node"]).startswith(f"{node.name} ")


def says(site: Site, event: str, worker_ids: set[str]) -> bool:
    """Whether the first job's log has this event of each of the workers."""
    log = site.log("first")
    return all(re.search(rf"{event} worker={worker_id}\b", log) for worker_id in worker_ids)


def has_left(site: Site, worker_ids: set[str]) -> bool:
    log = site.log("first")
    return all(
        f"event=worker_ended worker={worker_id} cause='its node leaves'" in log
        for worker_id in worker_ids
    )
