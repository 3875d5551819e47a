"""Responses that are read without a server."""

import json
from array import array
from collections.abc import Sequence

import pytest

from pipeline.engines.wire.answers import outcome_of
from pipeline.engines.wire.transport import Response
from pipeline.models.thinking import THINK
from schemas.completion import Turn
from tests.fakes.scripted_server import completion_body


def turn_with_ids(ids: Sequence[object]) -> Turn:
    body = json.loads(completion_body("seven"))
    body["choices"][0]["response_token_ids"] = list(ids)
    response = Response(status=200, headers={}, content=json.dumps(body).encode())
    turn = outcome_of(response, duration_s=1.0, opens_in_prompt=False, tags=THINK)
    assert isinstance(turn, Turn)
    return turn


@pytest.mark.parametrize("ids", [[], [0], [1, 0, 151_645], [2**31 - 1, 127, 128, 2**24]])
def test_token_ids_are_packed_as_they_are(ids: list[int]) -> None:
    assert turn_with_ids(ids).completion_token_ids == array("i", ids)


@pytest.mark.parametrize(
    "wrong", [-1, -(2**31), 2**31, 2**32, 2**70, True, False, 1.0, 1.5, "1", None, [1], {}]
)
def test_list_with_a_value_that_is_no_token_id_is_left_out(wrong: object) -> None:
    assert turn_with_ids([5, wrong, 5]).completion_token_ids is None
