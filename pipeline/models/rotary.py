"""Rotary tables: sine and cosine of each position, whole on every GPU beside the weights.

Layers of the same dimensions and base share one table. Values are fp32 on GPUs. SGLang 0.5.23,
srt/layers/rotary_embedding/{base,factory,yarn}.py; for DeepSeek-V4 srt/models/deepseek_v4.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.models.attention_tensors import head_dim
from pipeline.models.fields import ConfigFields

_BYTES = 4
_YARN = ("yarn", "deepseek_yarn")
# Attention layers without positions, whatever the config says. SGLang srt/models/nemotron_h.py
_NO_POSITIONS = ("NemotronH",)
# Bases of further layers beside `rope_theta`, and the dimension of their heads if it differs.
_FURTHER_BASES = {
    "rope_local_base_freq": "",
    "swa_rope_theta": "swa_head_dim",
    "compress_rope_theta": "",
}
# Gemma-4 turns a part of the dimensions and has rows for all of them.
_WHOLE_ROW = "proportional"


@dataclass(frozen=True, slots=True)
class _Table:
    positions: int
    dims: int
    base: float


def rotary_table_bytes(fields: ConfigFields, architecture: str) -> int:
    """Return the bytes of all tables; 0 for a model that turns nothing.

    Rows are `positions x dims` in fp32: Gemma-4 has 262,144 x 256 and 262,144 x 512, 0.75 GiB,
    which a public log shows on an RTX 5090.
    """
    if architecture.startswith(_NO_POSITIONS):
        return 0
    return sum(table.positions * table.dims * _BYTES for table in set(_tables(fields)))


def _tables(fields: ConfigFields) -> Iterator[_Table]:
    scaling = {**fields.section("rope_scaling"), **fields.section("rope_parameters")}
    by_kind = {name: part for name, part in scaling.items() if isinstance(part, Mapping)}
    if by_kind:
        for kind, part in by_kind.items():
            full = fields.number("global_head_dim") if kind == "full_attention" else 0
            yield _table(fields, part, part.get("rope_theta"), full)
        return
    bases = fields.get("rope_theta", default=scaling.get("rope_theta"))
    for base in bases if isinstance(bases, list) else [bases]:
        if base is not None or scaling:
            yield _table(fields, scaling, base)
    for name, dim in _FURTHER_BASES.items():
        if (base := fields.get(name)) is not None:
            yield _table(fields, scaling, base, fields.number(dim) if dim else 0)


def _table(
    fields: ConfigFields, scaling: Mapping[str, Any], base: object, own_dim: int = 0
) -> _Table:
    return _Table(
        positions=_positions(fields, scaling),
        dims=_dims(fields, scaling, own_dim),
        base=float(base) if isinstance(base, int | float) else 0.0,
    )


def _positions(fields: ConfigFields, scaling: Mapping[str, Any]) -> int:
    longest = fields.need("max_position_embeddings", "seq_length", "max_seq_len")
    if scaling.get("rope_type", scaling.get("type")) in _YARN:
        original = scaling.get("original_max_position_embeddings") or longest
        return int(original * (scaling.get("factor") or 1))
    return longest


def _dims(fields: ConfigFields, scaling: Mapping[str, Any], own_dim: int) -> int:
    latent = fields.number("qk_rope_head_dim")
    if latent:
        return latent
    dim = own_dim or head_dim(fields)
    if scaling.get("rope_type") == _WHOLE_ROW:
        return dim
    named = fields.number("rotary_dim")
    if named and not own_dim:
        return named
    share = scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    return int(dim * share)
