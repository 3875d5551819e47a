"""A run whose engines do not answer as requested, from the command to its exit status."""

from pathlib import Path

import pytest

from tests.fakes.ray_head import Head
from tests.fakes.running import new_run, questions
from tests.fakes.scripted_server import ScriptedServer, serving

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow]


def test_run_stops_at_the_first_answer_without_token_ids_until_that_is_accepted(
    tmp_path: Path, head: Head
) -> None:
    with serving(ScriptedServer(token_ids="none")) as server:
        engine = {"kind": "endpoint", "base_urls": [server.url], "max_running_requests": 8}
        run = new_run(tmp_path, questions(40), head.address, engine=engine)
        stopped = run.finish()
        num_asked = server.num_requests
        assert stopped.code == 2, stopped.err
        assert "its answers have no token ids" in stopped.err.splitlines()[-1]
        assert "--accept-missing-token-ids" in stopped.err.splitlines()[-1]
        assert not run.ids()
        # Those that were in flight, and some that took their places.
        assert num_asked <= 16
        accepted = run.finish("--accept-missing-token-ids")
        assert accepted.code == 0, accepted.err
        assert accepted.err.count("event=engine_fault_accepted") == 1
    ids = {turns[0]["completion_token_ids"] for turns in run.published()["turns"].to_pylist()}
    assert (len(run.ids()), ids) == (40, {None})
