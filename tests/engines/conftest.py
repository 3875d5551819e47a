"""Fixtures of the tests that start engines."""

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pipeline.engines.ladder import _WAIT_S
from tests.fakes.engine_site import MakeSite, new_site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSite]:
    """Return a builder of sites: `site(prompts, {"hang_after": 5}, plan="off", …)`."""
    for kind in _WAIT_S:
        monkeypatch.setitem(_WAIT_S, kind, 0.05)
    monkeypatch.setattr("pipeline.engines.startup._READY_POLL_S", 0.02)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    yield partial(new_site, tmp_path)
    gc.collect()
