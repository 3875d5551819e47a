"""How a checkpoint stores its weights: bytes a parameter, by module.

`checkpoint_format` reads a quantisation config (or a name, or the user's word) into rules;
`bytes_per_param` applies them to one tensor group. It knows nothing about parallelism.
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any, get_args

from pipeline.errors import PlanError
from pipeline.models.quantisation import config_format
from schemas.plan import CheckpointFormat, FormatRule, TensorGroup, WeightFormat

# Bytes a parameter that do not depend on the group size.
_PLAIN_BYTES: dict[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    # one fp32 scale a tensor or a channel: nothing worth counting
    "fp8": 1.0,
    # one fp32 scale a 128 x 128 block: 4 / 16384
    "fp8-block": 1.0 + 4 / 16384,
    # one e8m0 byte a 32 values
    "mxfp8": 1.0 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
    # one e4m3 byte a 16 values; the tensor scale is not worth counting
    "nvfp4": 0.5 + 1 / 16,
}
FORMATS: tuple[str, ...] = get_args(WeightFormat)

_FAMILY = {
    "fp8": "fp8", "fp8-block": "fp8", "int4-awq": "int4", "int4-gptq": "int4", "int4": "int4",
}  # fmt: skip

# What a name says, the first match wins; `MXFP4` must be seen before `FP4`.
_NAME_FORMATS: tuple[tuple[str, WeightFormat], ...] = (
    (r"nvfp4", "nvfp4"),
    (r"mxfp4", "mxfp4"),
    (r"mxfp8", "mxfp8"),
    (r"awq", "int4-awq"),
    (r"gptq", "int4-gptq"),
    (r"autoround|auto-round|w4a16|int4|4bit", "int4"),
    (r"(?<![a-z])fp4", "nvfp4"),
    (r"(?<![a-z])fp8", "fp8"),
    (r"(?<![a-z])bf16(?!-lm)", "bf16"),
)


def bytes_per_param(group: TensorGroup, checkpoint: CheckpointFormat) -> float:
    """Bytes that one parameter of this group takes on the device."""
    if group.fixed_bytes_per_param:
        return group.fixed_bytes_per_param
    return _format_bytes(format_of(group, checkpoint), checkpoint.group_size)


def format_of(group: TensorGroup, checkpoint: CheckpointFormat) -> WeightFormat:
    """The format of a group: the first rule that matches, else what the scope says."""
    if not group.quantizable:
        return "bf16"
    for rule in checkpoint.rules:
        if any(_matches(rule.pattern, name) for name in group.names):
            return rule.format
    if checkpoint.scope == "listed":
        return "bf16"
    if checkpoint.scope == "experts" and group.shard != "expert":
        return "bf16"
    if group.shard == "head" or group.shard == "vision":
        return "bf16"
    return checkpoint.base


def checkpoint_format(
    name: str,
    config: Mapping[str, Any],
    hf_quant: Mapping[str, Any] | None,
    *,
    told: str | None,
    moe: bool,
) -> CheckpointFormat:
    """The user's word first, then the config where it agrees, then the name, then bf16."""
    if told is not None and told not in FORMATS:
        raise PlanError(f"--weights-format {told!r} is not one of {', '.join(FORMATS)}")
    said = told or name_format(name)
    found = config_format(config, hf_quant)
    head_rules = _head_rules(name)
    if found is not None and (said is None or _agree(said, found)):
        return _with_rules(found, head_rules)
    if said is None or said == "bf16":
        source = "as told" if told else "no quantisation config"
        return _plain("bf16", source)
    source = "as told" if told else "read from the name"
    return _with_rules(_by_default(said, name, moe, source), head_rules)


def name_format(name: str) -> WeightFormat | None:
    """The format that a checkpoint's name ends in, if it does."""
    tail = name.rsplit("/", 1)[-1].lower()
    for pattern, fmt in _NAME_FORMATS:
        if re.search(pattern, tail):
            if fmt == "fp8" and name.lower().startswith(("qwen/", "zai-org/", "minimaxai/")):
                return "fp8-block"
            return fmt
    return None


def online_format(checkpoint: CheckpointFormat, quantization: str) -> CheckpointFormat:
    """`--quantization` on a plain checkpoint: the engine quantises while it loads."""
    if checkpoint.base != "bf16" or checkpoint.rules:
        return checkpoint
    online: dict[str, WeightFormat] = {
        "fp8": "fp8", "w8a8_fp8": "fp8", "w8a8_int8": "fp8", "mxfp4": "mxfp4", "mxfp8": "mxfp8",
        "modelopt_fp8": "fp8", "modelopt_fp4": "nvfp4", "awq": "int4-awq", "gptq": "int4-gptq",
        "awq_marlin": "int4-awq", "gptq_marlin": "int4-gptq", "auto-round": "int4",
    }  # fmt: skip
    fmt = online.get(quantization)
    if fmt is None:
        return checkpoint
    return CheckpointFormat(
        base=fmt,
        rules=(),
        scope="linears",
        group_size=128,
        fp8_kv_cache=False,
        source=f"--quantization {quantization}",
    )


def _format_bytes(fmt: WeightFormat, group_size: int) -> float:
    if fmt in _PLAIN_BYTES:
        return _PLAIN_BYTES[fmt]
    # fp16 or bf16 scale a group; AWQ and GPTQ add packed 4-bit zeros
    zeros = 0.5 / group_size if fmt in ("int4-awq", "int4-gptq") else 0.0
    return 0.5 + 2 / group_size + zeros


def _agree(said: str, found: CheckpointFormat) -> bool:
    """Whether the config holds the same family of format as was said."""
    kinds = {found.base, *(rule.format for rule in found.rules)}
    return _FAMILY.get(said, said) in {_FAMILY.get(kind, kind) for kind in kinds - {"bf16"}}


def _head_rules(name: str) -> tuple[FormatRule, ...]:
    """Some repositories say in the name that the output head stays in bf16."""
    if re.search(r"bf16[-_]?lm[-_]?head", name.lower()):
        return (FormatRule(pattern="lm_head", format="bf16"),)
    return ()


def _with_rules(checkpoint: CheckpointFormat, first: tuple[FormatRule, ...]) -> CheckpointFormat:
    if not first:
        return checkpoint
    return CheckpointFormat(
        base=checkpoint.base,
        rules=first + checkpoint.rules,
        scope=checkpoint.scope,
        group_size=checkpoint.group_size,
        fp8_kv_cache=checkpoint.fp8_kv_cache,
        source=checkpoint.source,
    )


def _plain(fmt: WeightFormat, source: str) -> CheckpointFormat:
    return CheckpointFormat(
        base=fmt, rules=(), scope="linears", group_size=128, fp8_kv_cache=False, source=source
    )


def _by_default(fmt: WeightFormat | str, name: str, moe: bool, source: str) -> CheckpointFormat:
    """What a format usually covers when only its name is known."""
    base = next(known for known in get_args(WeightFormat) if known == fmt)
    experts_only = base == "mxfp4" or (base == "nvfp4" and moe)
    draft = (FormatRule(pattern="mtp*", format="bf16"),) if base in ("nvfp4", "mxfp4") else ()
    return CheckpointFormat(
        base=base,
        rules=draft,
        scope="experts" if experts_only and moe else "linears",
        group_size=32 if base == "int4" and "kimi" in name.lower() else 128,
        # NVIDIA's NVFP4 exports declare an FP8 KV cache; other sources do not
        fp8_kv_cache=base == "nvfp4" and name.lower().startswith("nvidia/"),
        source=source,
    )


def _matches(pattern: str, name: str) -> bool:
    """Whether a config's pattern covers the module `name`, written as `layers.#.…`."""
    full = f"model.{name}"
    if pattern.startswith("re:"):
        return re.match(pattern[3:], full.replace("#", "0")) is not None
    tail = re.sub(r"^.*?(?=layers\.#)", "", pattern) if "layers.#" in pattern else pattern
    if tail in ("layers.#*", "layers.#.*", "layers.#"):
        # A whole layer kept aside is the draft layer, or a leading dense one.
        return name.startswith("mtp.") or ".mlp.dense" in name
    for candidate in (name, full, name.removeprefix("layers.#.")):
        if tail == candidate or fnmatch.fnmatchcase(candidate, tail):
            return True
        if fnmatch.fnmatchcase(f"{candidate}.weight", tail) or tail.startswith(f"{candidate}."):
            return True
    return "." not in tail and "*" not in tail and name.rsplit(".", 1)[-1] == tail
