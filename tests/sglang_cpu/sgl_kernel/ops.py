"""What SGLang calls as `torch.ops.sgl_kernel.…` on a CPU: attention, its norms and gates, in torch.

`convert_weight_packed` is not among them: SGLang takes it for the sign of a CPU with AMX.
"""

from typing import Any

import torch
from torch.nn import functional

from .mamba import fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu

# -- attention over the paged cache


def extend_attention_cpu(
    q: Any, _k: Any, _v: Any, out: Any, keys: Any, values: Any, _k_scale: float, _v_scale: float,
    table: Any, requests: Any, lengths: Any, new: Any, starts: Any, _longest: int, scale: float,
    *_others: Any,
) -> None:  # fmt: skip
    """Each request's new tokens see what it holds, and those of them that stand before."""
    rows = zip(requests.tolist(), lengths.tolist(), new.tolist(), starts.tolist(), strict=True)
    for request, length, count, start in rows:
        if count:
            slots = table[request, :length].long()
            found = _attended(q[start : start + count], keys[slots], values[slots], scale)
            out[start : start + count] = found


def decode_attention_cpu(
    q: Any, keys: Any, values: Any, _k_scale: float, _v_scale: float, out: Any, k: Any, v: Any,
    new_slots: Any, _scratch: Any, table: Any, requests: Any, lengths: Any, scale: float,
    *_others: Any,
) -> None:  # fmt: skip
    """One token of each request; the kernel stores its key and value first."""
    if k is not None:
        keys[new_slots] = k.reshape(-1, *keys.shape[1:]).to(keys.dtype)
        values[new_slots] = v.reshape(-1, *values.shape[1:]).to(values.dtype)
    for n, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        slots = table[request, :length].long()
        out[n : n + 1] = _attended(q[n : n + 1], keys[slots], values[slots], scale)


def _attended(q: Any, keys: Any, values: Any, scale: float) -> Any:
    """Attention of the last tokens of a request, [tokens, heads, size]."""
    visible = torch.ones(len(q), len(keys)).tril(len(keys) - len(q)).bool()
    found = functional.scaled_dot_product_attention(
        *(one.transpose(0, 1)[None] for one in (q, keys.to(q.dtype), values.to(q.dtype))),
        attn_mask=visible, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return found[0].transpose(0, 1)


# -- norms and gates


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_and_gate: Any, k: Any, q_weight: Any, k_weight: Any, small: float, size: int, heads: int
) -> tuple[Any, Any, Any]:
    """Queries and gates stand in turn, head by head."""
    q, gate = q_and_gate.reshape(-1, heads, 2, size).unbind(2)
    normed, key = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, small, size)
    return normed, key, gate.reshape(-1, size).contiguous()


def fused_qk_gemma_rmsnorm_cpu(
    q: Any, k: Any, q_weight: Any, k_weight: Any, small: float, size: int
) -> tuple[Any, Any]:
    """Head by head; Gemma's weights count from one."""
    return (
        _normed(q.reshape(-1, size), q_weight.float() + 1, small),
        _normed(k.reshape(-1, size), k_weight.float() + 1, small),
    )


def fused_rmsnorm_gated_cpu(x: Any, weight: Any, gate: Any, small: float) -> Any:
    """A norm, then a gate."""
    return _normed(x, weight.float(), small) * functional.silu(gate.float()).to(x.dtype)


def fused_sigmoid_mul_cpu(x: Any, gate: Any) -> None:
    """A gate, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Any, ba: Any, num_key_heads: int, num_value_heads: int, key_size: int, value_size: int
) -> tuple[Any, Any, Any, Any]:
    """The convolved part, the output's gate, and the two gates of the rule."""
    convolved = 2 * num_key_heads * key_size + num_value_heads * value_size
    mixed, gate = qkvz[:, :convolved], qkvz[:, convolved:]
    b, a = ba.chunk(2, dim=1)
    parts = mixed, gate.reshape(-1, num_value_heads, value_size), b, a
    return tuple(part.contiguous() for part in parts)  # type: ignore[return-value]


def _normed(x: Any, weight: Any, small: float) -> Any:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + small).rsqrt() * weight).to(x.dtype)


for _one in (
    decode_attention_cpu,
    extend_attention_cpu,
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
):
    setattr(torch.ops.sgl_kernel, _one.__name__, _one)
