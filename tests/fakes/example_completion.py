"""Finished row, which tests copy with changes."""

from schemas.completion import Completion, Turn
from schemas.prompt import Message, SamplingParams

SAMPLING = SamplingParams(
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    min_p=None,
    presence_penalty=None,
    repetition_penalty=None,
    max_tokens=64,
    seed=7,
)
TURN = Turn(
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
COMPLETION = Completion(
    row_id="a",
    sample_index=0,
    messages=(
        Message(role="user", content="3 + 4?"),
        Message(role="assistant", content="seven", reasoning_content="hm"),
    ),
    turns=(TURN,),
    status="ok",
    finish_reason="stop",
    error_kind=None,
    error_text=None,
    model="m",
    thinking=True,
    engine="fake",
    engine_release="1",
    plan=None,
    sampling=SAMPLING,
    attempt=1,
    flags=(),
    quality_retries=0,
    worker_id="w0",
    content_hash="0123456789abcdef",
    started_at_s=1000.0,
    finished_at_s=1000.25,
    carried={},
)
ERROR = {
    "turns": (),
    "status": "error",
    "finish_reason": None,
    "error_kind": "empty_text",
    "error_text": "the text is empty",
}
