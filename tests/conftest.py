"""Fixtures of several rooms."""

import gc
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from schemas.completion import Completion
from tests.fakes.example_completion import COMPLETION, ERROR
from tests.fakes.ray_head import Head, ray_head

# No test waits for the hub; processes that tests start inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure() -> None:
    """Take Ctrl-C, which a shell's background jobs ignore, and with them every run they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # noqa: ANN401  # xdist's
    """Schedule the tests of `make test` file by file, and all that start Ray as one queue.

    Heads of Ray that start at the same time on one machine interfere. Groups by mark would be
    simpler, but do not work with pytest 9.2 (pytest-xdist 3.8, issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    # In the order of collection, which begins with the longest queue.
    config.option.loadscopereorder = False
    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = lambda test: queue_of(config.rootpath, test.partition("::")[0])
    return scheduling


@cache
def queue_of(root: Path, file: str) -> str:
    """Return the name of the queue that a test file is in."""
    return "ray" if "pytest.mark.ray" in (root / file).read_text() else file


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes after their argument: compressed ones hold the time, so each process differs."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the tests that start Ray: their queue is the longest."""
    items.sort(key=lambda item: queue_of(config.rootpath, item.nodeid.partition("::")[0]) != "ray")


def pytest_collection_finish() -> None:
    """Exempt the collected tests, which live to the end, from garbage collection."""
    gc.freeze()


@pytest.fixture
def completion() -> Callable[..., Completion]:
    """Return a builder of rows: `completion("a", attempt=2)`, an error row with `error=True`."""

    def build(row_id: str, *, error: bool = False, **changes: object) -> Completion:
        values = {**(ERROR if error else {}), "row_id": row_id, **changes}
        return replace(COMPLETION, **values)  # type: ignore[arg-type]

    return build


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Start a real S3-compatible server on loopback, with a bucket `sets`."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    request = urllib.request.Request(f"http://{host}:{port}/sets", method="PUT")
    urllib.request.urlopen(request).close()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty prefix there; the keys are in the environment, as for users."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "loopback")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "loopback-secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    endpoint = quote(s3_endpoint, safe="")
    return f"s3://sets{tmp_path}?endpoint_override={endpoint}&region=us-east-1"


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    """Start a Ray cluster that tests share, since each start takes 4 s."""
    with ray_head() as running:
        yield running
