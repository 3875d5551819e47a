"""Gated delta rule and short convolution in torch, a token at a time.

The states are the engine's own pools, indexed by slot; a slot below zero is padding. While drafts
are checked the pools stay as they are, and the state behind each draft goes to a buffer beside.
"""

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

_SMALL = 1e-6


# -- the convolution


def causal_conv1d_fn_cpu(
    x: Any, weight: Any, bias: Any, *, query_start_loc: Any, cache_indices: Any,
    has_initial_state: Any, conv_states: Any, activation: str | None, **_others: Any,
) -> Any:  # fmt: skip
    """Prefill: [channels, tokens] of all requests, one behind the other."""
    out = torch.zeros_like(x)
    bounds = query_start_loc.tolist()
    for n, (start, end) in enumerate(pairwise(bounds)):
        slot = int(cache_indices[n])
        if end == start or slot < 0:
            continue
        before = conv_states[slot] * bool(has_initial_state[n])
        window = torch.cat([before, x[:, start:end]], dim=1).float()
        out[:, start:end] = _convolved(window[None], weight, bias, activation)[0].to(x.dtype)
        conv_states[slot] = window[:, -conv_states.shape[-1] :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Any, conv_states: Any, weight: Any, bias: Any = None, activation: str | None = None, *,
    conv_state_indices: Any, intermediate_conv_window: Any = None,
    intermediate_state_indices: Any = None, **_others: Any,
) -> Any:  # fmt: skip
    """Decode: [requests, channels], or [requests, channels, drafts] while drafts are checked."""
    tokens = x if x.dim() == 3 else x[..., None]
    slots = conv_state_indices.long()
    window = torch.cat([conv_states[slots.clamp(min=0)], tokens], dim=2).float()
    out = _convolved(window, weight, bias, activation).to(x.dtype)
    width = conv_states.shape[-1]
    if intermediate_conv_window is None:
        used = slots >= 0
        conv_states[slots[used]] = window[used, :, -width:].to(conv_states.dtype)
    else:
        rows = intermediate_state_indices.long()
        for step in range(tokens.shape[2]):
            behind = window[:, :, step + 1 : step + 1 + width]
            intermediate_conv_window[rows, step] = behind.to(intermediate_conv_window.dtype)
    # What asks for it views it as one row of channels a token.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out if x.dim() == 3 else out[..., 0]


def _convolved(window: Any, weight: Any, bias: Any, activation: str | None) -> Any:
    channels = weight.shape[0]
    bias = None if bias is None else bias.float()
    out = functional.conv1d(window, weight.float().view(channels, 1, -1), bias, groups=channels)
    return functional.silu(out) if activation else out


# -- the delta rule


def chunk_gated_delta_rule_cpu(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, initial_state_indices: Any,
    cu_seqlens: Any, **_others: Any,
) -> tuple[Any, None, None]:  # fmt: skip
    """Prefill: [1, tokens, heads, size] of all requests; their slots are brought up to date."""
    query, key = _keys_of_all_heads(q[0], k[0], v.shape[2])
    decay, strength = g.view(-1, v.shape[2]).float(), beta.view(-1, v.shape[2]).float()
    out = torch.zeros_like(v)
    bounds = cu_seqlens.tolist()
    for n, (start, end) in enumerate(pairwise(bounds)):
        slot = int(initial_state_indices[n])
        if end == start or slot < 0:
            continue
        state = initial_state[slot].float()
        for at in range(start, end):
            state, out[0, at] = _step(
                state, query[at], key[at], v[0, at].float(), decay[at], strength[at]
            )
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *, A_log: Any,  # noqa: N803 - SGLang's name for it
    dt_bias: Any, q: Any, k: Any, v: Any, a: Any, b: Any,
    initial_state_source: Any, initial_state_indices: Any, cu_seqlens: Any,
    disable_state_update: bool = False, intermediate_states_buffer: Any = None,
    intermediate_state_indices: Any = None, **_others: Any,
) -> Any:  # fmt: skip
    """Decode one token of each request, or check the same number of drafts of each."""
    num_requests, heads = len(cu_seqlens) - 1, v.shape[2]
    query, key = _keys_of_all_heads(q[0], k[0], heads)
    decay, strength = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    slots = initial_state_indices[:num_requests].long()
    state = initial_state_source[slots.clamp(min=0)].float()
    by_request = [
        one.reshape(num_requests, -1, *one.shape[1:]).unbind(1)
        for one in (query, key, v[0].float(), decay[0], strength[0])
    ]
    outs = []
    for step, token in enumerate(zip(*by_request, strict=True)):
        state, out = _step(state, *token)
        outs.append(out)
        if intermediate_states_buffer is not None:
            rows = intermediate_state_indices[:num_requests].long()
            intermediate_states_buffer[rows, step] = state.to(intermediate_states_buffer.dtype)
    if not disable_state_update:
        used = slots >= 0
        initial_state_source[slots[used]] = state[used].to(initial_state_source.dtype)
    return torch.stack(outs, 1).reshape(v.shape).to(v.dtype)


def fused_gdn_gating_cpu(log_rate: Any, a: Any, b: Any, dt_bias: Any) -> tuple[Any, Any]:
    """The logarithm of what a token leaves of the state, and how strongly it writes."""
    decay = -log_rate.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _keys_of_all_heads(q: Any, k: Any, num_value_heads: int) -> tuple[Any, Any]:
    """Queries and keys of length one, as many as there are value heads."""
    each = num_value_heads // q.shape[1]
    query, key = (
        (x.float() * (x.float().square().sum(-1, keepdim=True) + _SMALL).rsqrt())
        .repeat_interleave(each, 1)
        for x in (q, k)
    )  # fmt: skip
    return query * q.shape[-1] ** -0.5, key


def _step(state: Any, q: Any, k: Any, v: Any, decay: Any, strength: Any) -> tuple[Any, Any]:
    """One token: forget, correct what the key recalls towards its value, read with the query."""
    state = state * decay.exp()[..., None, None]
    recalled = torch.einsum("...kv,...k->...v", state, k)
    correction = (v - recalled) * strength[..., None]
    state = state + k[..., None] * correction[..., None, :]
    return state, torch.einsum("...kv,...k->...v", state, q)


# -- the speculation's end


def scatter_with_mask(
    pool: Any, behind_drafts: Any, slots: Any, steps: Any, rows: Any = None
) -> None:
    """In all layers, put the state behind the last kept draft in place; a step below zero: none."""
    used = steps >= 0
    sources = torch.arange(len(steps)) if rows is None else rows.long()
    found = behind_drafts[:, sources[used], steps[used].long()]
    pool[:, slots[used].long()] = found.to(pool.dtype)
