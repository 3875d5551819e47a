"""Fixtures that several layers share."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from ray_head import Head, ray_head

from schemas.completion import Completion, Turn
from schemas.prompt import Message, SamplingParams

_SAMPLING = SamplingParams(
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    min_p=None,
    presence_penalty=None,
    repetition_penalty=None,
    max_tokens=64,
    seed=7,
)
_TURN = Turn(
    reasoning_text="hm",
    answer_text="seven",
    finish_reason="stop",
    prompt_tokens=5,
    completion_tokens=3,
    reasoning_tokens=1,
    prompt_token_ids=None,
    completion_token_ids=None,
    generation_boundary=None,
    duration_s=0.25,
)
_COMPLETION = Completion(
    row_id="a",
    sample_index=0,
    messages=(
        Message(role="user", content="3 + 4?"),
        Message(role="assistant", content="seven", reasoning_content="hm"),
    ),
    turns=(_TURN,),
    status="ok",
    finish_reason="stop",
    error_kind=None,
    error_text=None,
    model="m",
    thinking=True,
    engine="fake",
    engine_release="1",
    plan=None,
    sampling=_SAMPLING,
    attempt=1,
    flags=(),
    quality_retries=0,
    worker_id="w0",
    content_hash="0123456789abcdef",
    started_at_s=1000.0,
    finished_at_s=1000.25,
    carried={},
)
_ERROR = {
    "turns": (),
    "status": "error",
    "finish_reason": None,
    "error_kind": "empty_text",
    "error_text": "the text is empty",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side (`make test`) there are two rows of tests, each in one process and in order.

    All that start Ray are in one: two Rays on one machine get in each other's way.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            row = "ray" if item.get_closest_marker("ray") else "others"
            item.add_marker(pytest.mark.xdist_group(row))


def pytest_collection_finish() -> None:
    """What was collected stays to the end: no garbage collection has to walk it again."""
    gc.freeze()


@pytest.fixture
def completion() -> Callable[..., Completion]:
    """Builds a finished row: `completion("a", attempt=2)`, or with `error=True` an error row."""

    def build(row_id: str, *, error: bool = False, **changes: object) -> Completion:
        values = {**(_ERROR if error else {}), "row_id": row_id, **changes}
        return replace(_COMPLETION, **values)  # type: ignore[arg-type]

    return build


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    """A Ray cluster that runs and jobs share; one of their own would take each of them 4 s."""
    with ray_head() as running:
        yield running
