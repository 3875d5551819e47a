"""Body of a chat-completions request. Pure: the fields, as the server gets them."""

from collections.abc import Mapping
from dataclasses import fields

from schemas.prompt import Message, Request, SamplingParams, message_extras

_SAMPLING_FIELDS = [field.name for field in fields(SamplingParams)]


def request_body(
    request: Request,
    *,
    model: str,
    template_kwargs: Mapping[str, object],
    return_token_ids: bool,
    further_fields: Mapping[str, object],
) -> dict[str, object]:
    """Return the body; a field without a value is left to the server.

    A continued turn is sent as token ids, from which SGLang generates on; it takes the messages for
    what else they decide.
    """
    own = {
        "model": model,
        "messages": [_message(message) for message in request.messages],
        "tools": list(request.tools) or None,
        **_sampling(request.sampling),
        **_continued(request),
        "chat_template_kwargs": dict(template_kwargs) or None,
        "return_token_ids": return_token_ids or None,
    }
    return {name: value for name, value in own.items() if value is not None} | dict(further_fields)


def _sampling(params: SamplingParams) -> dict[str, object]:
    values: dict[str, object] = {name: getattr(params, name) for name in _SAMPLING_FIELDS}
    if params.logit_bias is not None:
        values["logit_bias"] = {entry.token_id: entry.bias for entry in params.logit_bias}
    return values


def _continued(request: Request) -> dict[str, object]:
    """Return the ids of prompt and first part, and the budget that the latter leaves."""
    first, most = request.continues, request.sampling.max_tokens
    if first is None:
        return {}
    left = None if most is None else most - first.num_tokens
    ids = first.prompt_token_ids + first.completion_token_ids
    return {"input_ids": ids.tolist(), "max_tokens": left}


def _message(message: Message) -> dict[str, object]:
    return {"role": message.role, "content": message.content, **message_extras(message)}
