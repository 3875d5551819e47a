"""The format of a checkpoint's weights: bytes per parameter, by module.

`checkpoint_format` makes rules of a quantisation config, the model's name or `--weights-format`;
`bytes_per_param` applies them to one tensor group. Nothing here knows about parallelism.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from pipeline.errors import PlanError
from pipeline.models.quantisation import config_format
from schemas.plan import CheckpointFormat, FormatRule, TensorGroup, WeightFormat

# Bytes per parameter of the formats whose group size is fixed
_PLAIN_BYTES: dict[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    # one fp32 scale per tensor or channel: negligible
    "fp8": 1.0,
    # one fp32 scale per 128 x 128 block: 4 / 16384
    "fp8-block": 1.0 + 4 / 16384,
    # one e8m0 byte per 32 values
    "mxfp8": 1.0 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
    # one e4m3 byte per 16 values; the scale of the tensor is negligible
    "nvfp4": 0.5 + 1 / 16,
}
FORMATS: tuple[str, ...] = get_args(WeightFormat)

_FAMILY = {
    "fp8": "fp8", "fp8-block": "fp8", "int4-awq": "int4", "int4-gptq": "int4", "int4": "int4",
}  # fmt: skip

# Formats by a part of the model's name; the first match counts, so `mxfp4` is before `fp4`.
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
    """Return the bytes of one parameter of this group on the device."""
    if group.fixed_bytes_per_param:
        return group.fixed_bytes_per_param
    return _format_bytes(format_of(group, checkpoint), checkpoint.group_size)


def format_of(group: TensorGroup, checkpoint: CheckpointFormat) -> WeightFormat:
    """Return the format of a group: of the first rule that matches, else by the scope."""
    if checkpoint.base == "fp32":
        return "fp32"
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
    stated: str | None,
    moe: bool,
) -> CheckpointFormat:
    """Return the format that the config declares, unless `stated` or the name contradict it.

    `stated` is the user's `--weights-format`; it outranks the name. Raises PlanError for an unknown
    one. Without config, statement and format in the name, the weights are bf16.
    """
    if stated is not None and stated not in FORMATS:
        raise PlanError(f"--weights-format {stated!r} is not one of {', '.join(FORMATS)}")
    expected = stated or name_format(name)
    declared = config_format(config, hf_quant)
    head_rules = _head_rules(name)
    if declared is not None and (expected is None or _agree(expected, declared)):
        return replace(declared, rules=head_rules + declared.rules)
    if expected is None or expected == "bf16":
        return _plain("bf16", "as told" if stated else "no quantisation config")
    by_name = _by_default(expected, name, moe, "as told" if stated else "read from the name")
    return replace(by_name, rules=head_rules + by_name.rules)


def name_format(name: str) -> WeightFormat | None:
    """Return the format in a checkpoint's name, if there is one."""
    tail = name.rsplit("/", 1)[-1].lower()
    for pattern, fmt in _NAME_FORMATS:
        if re.search(pattern, tail):
            if fmt == "fp8" and name.lower().startswith(("qwen/", "zai-org/", "minimaxai/")):
                return "fp8-block"
            return fmt
    return None


# Those that SGLang makes itself from a plain checkpoint; the others are stored by another program.
# SGLang 0.5.23, layers/quantization/: fp8.py, w8a8_fp8.py, w8a8_int8.py, mxfp8.py
QUANTISED_ON_LOAD = ("fp8", "w8a8_fp8", "w8a8_int8", "mxfp8")


def with_base(checkpoint: CheckpointFormat, fmt: WeightFormat, source: str) -> CheckpointFormat:
    """Return a plain checkpoint in another format."""
    return replace(checkpoint, base=fmt, source=source)


def online_format(checkpoint: CheckpointFormat, quantization: str) -> CheckpointFormat:
    """Return the format after `--quantization`, which quantises a plain checkpoint on load."""
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
    return _plain(fmt, f"--quantization {quantization}")


def _format_bytes(fmt: WeightFormat, group_size: int) -> float:
    if fmt in _PLAIN_BYTES:
        return _PLAIN_BYTES[fmt]
    # an fp16 or bf16 scale per group; AWQ and GPTQ add packed 4-bit zeros
    zeros = 0.5 / group_size if fmt in ("int4-awq", "int4-gptq") else 0.0
    return 0.5 + 2 / group_size + zeros


def _agree(expected: str, declared: CheckpointFormat) -> bool:
    """Return True where the config declares a format of the expected family."""
    kinds = {declared.base, *(rule.format for rule in declared.rules)} - {"bf16"}
    return _FAMILY.get(expected, expected) in {_FAMILY.get(kind, kind) for kind in kinds}


def _head_rules(name: str) -> tuple[FormatRule, ...]:
    """Return the rule for names which state that the output head is in bf16."""
    if re.search(r"bf16[-_]?lm[-_]?head", name.lower()):
        return (FormatRule(pattern="lm_head", format="bf16"),)
    return ()


def _plain(fmt: WeightFormat, source: str) -> CheckpointFormat:
    return CheckpointFormat(
        base=fmt, rules=(), scope="linears", group_size=128, fp8_kv_cache=False, source=source
    )


def _by_default(fmt: WeightFormat | str, name: str, moe: bool, source: str) -> CheckpointFormat:
    """Return the usual coverage of a format of which only the name is known."""
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
    """Return True where a config's pattern covers the module `name`, such as `layers.#.…`."""
    full = f"model.{name}"
    if pattern.startswith("re:"):
        return re.match(pattern[3:], full.replace("#", "0")) is not None
    tail = re.sub(r"^.*?(?=layers\.#)", "", pattern) if "layers.#" in pattern else pattern
    if tail in ("layers.#*", "layers.#.*", "layers.#"):
        # A whole layer that is excluded is the draft layer, or a leading dense one.
        return name.startswith("mtp.") or ".mlp.dense" in name
    for candidate in (name, full, name.removeprefix("layers.#.")):
        if tail == candidate or fnmatch.fnmatchcase(candidate, tail):
            return True
        if fnmatch.fnmatchcase(f"{candidate}.weight", tail) or tail.startswith(f"{candidate}."):
            return True
    return "." not in tail and "*" not in tail and name.rsplit(".", 1)[-1] == tail
