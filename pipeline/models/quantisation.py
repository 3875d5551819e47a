"""Quantisation configs of every method, parsed into a `CheckpointFormat`.

Lists of modules may be complete, or collapsed to patterns with `#` for the layer's number.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from schemas.plan import CheckpointFormat, FormatRule, WeightFormat


def config_format(
    config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None
) -> CheckpointFormat | None:
    """Return the format that a quantisation config declares, or None without one."""
    text = config.get("text_config") or {}
    quant = config.get("quantization_config") or text.get("quantization_config")
    modelopt = (hf_quant or {}).get("quantization")
    if modelopt:
        return _modelopt(modelopt, quant or {}, config)
    if not quant:
        return None
    method = str(quant.get("quant_method", "")).lower()
    if quant.get("quantized_layers") or method.startswith("modelopt") or "quant_algo" in quant:
        return _modelopt(quant, quant, config)
    if method == "fp8":
        return _fp8(quant, config)
    if method == "compressed-tensors":
        return _compressed_tensors(quant)
    if method == "mxfp4":
        return _format("mxfp4", _ignored(quant, "modules_to_not_convert"), quant, 32, "experts")
    if method in ("awq", "gptq", "auto-round", "autoround"):
        fmt: WeightFormat = "int4"
        if method in ("awq", "gptq"):
            fmt = "int4-awq" if method == "awq" else "int4-gptq"
        ignored = _ignored(quant, "modules_to_not_convert")
        return _format(fmt, ignored, quant, int(quant.get("group_size") or 128), "linears")
    if method == "mxfp8":
        return _format("mxfp8", _ignored(quant, "modules_to_not_convert"), quant, 32, "linears")
    return None


def multiplied_in_16_bits(config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None) -> bool:
    """Return True where four-bit weights are multiplied with 16-bit activations."""
    text = config.get("text_config") or {}
    quant = config.get("quantization_config") or text.get("quantization_config") or {}
    if any("W4A16" in str(part) for part in ((hf_quant or {}).get("quantization"), quant)):
        return True
    groups = quant.get("config_groups")
    if not isinstance(groups, Mapping):
        return False
    four_bit = [
        group
        for group in groups.values()
        if isinstance(group, Mapping) and (group.get("weights") or {}).get("num_bits") == 4
    ]
    return bool(four_bit) and not any(group.get("input_activations") for group in four_bit)


def _fp8(quant: Mapping[str, Any], config: Mapping[str, Any]) -> CheckpointFormat:
    base: WeightFormat = "fp8-block" if quant.get("weight_block_size") else "fp8"
    rules = _ignored(quant, "modules_to_not_convert")
    if str(config.get("expert_dtype", "")).lower() == "fp4":
        rules = (FormatRule(pattern="*mlp.experts*", format="mxfp4"), *rules)
    return CheckpointFormat(
        base=base,
        rules=rules,
        scope="linears",
        group_size=128,
        fp8_kv_cache=_declares_fp8_kv(quant),
        source="quantization_config",
    )


def _compressed_tensors(quant: Mapping[str, Any]) -> CheckpointFormat:
    groups: Mapping[str, Mapping[str, Any]] = quant.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    size = int(weights.get("group_size") or 128)
    kind = str(quant.get("format", "")).lower()
    fmt: WeightFormat = "int4"
    if "mxfp4" in kind:
        fmt = "mxfp4"
    elif "nvfp4" in kind:
        fmt = "nvfp4"
    elif weights.get("num_bits") == 8:
        fmt = "fp8"
    return _format(fmt, _ignored(quant, "ignore"), quant, size, "linears")


def _modelopt(
    modelopt: Mapping[str, Any], quant: Mapping[str, Any], config: Mapping[str, Any]
) -> CheckpointFormat:
    algo = str(modelopt.get("quant_algo") or quant.get("quant_algo") or "FP8").upper()
    ignored = _ignored(modelopt, "exclude_modules") or _ignored(quant, "ignore")
    listed = _listed(modelopt.get("quantized_layers") or quant.get("quantized_layers"))
    fp8_base = bool(quant.get("weight_block_size"))
    if algo == "MIXED_PRECISION" and not listed:
        listed = _groups_listed(quant)
    base = _algo_format(algo)
    scope: Literal["linears", "listed"] = "linears"
    if algo == "MIXED_PRECISION":
        # A mixed checkpoint on an FP8 base (DeepSeek-V4) lists only what differs from it.
        base, scope = ("fp8-block", "linears") if fp8_base else ("bf16", "listed")
        ignored = () if fp8_base else ignored
    return CheckpointFormat(
        base=base,
        rules=(*listed, *ignored),
        scope=scope,
        group_size=int(modelopt.get("group_size") or 16),
        fp8_kv_cache=_declares_fp8_kv(modelopt) or _declares_fp8_kv(quant),
        source="hf_quant_config" if modelopt is not quant else "quantization_config",
    )


def _algo_format(algo: str) -> WeightFormat:
    if "MXFP8" in algo:
        return "mxfp8"
    if "MXFP4" in algo:
        return "mxfp4"
    if "NVFP4" in algo or algo == "FP4":
        return "nvfp4"
    if "AWQ" in algo or "INT4" in algo or "W4A16" in algo:
        return "int4-awq"
    if "FP8_PB" in algo or "BLOCK" in algo:
        return "fp8-block"
    return "fp8"


def _listed(layers: Mapping[str, Any] | None) -> tuple[FormatRule, ...]:
    """Return the rules of `quantized_layers`: a module or pattern, and its algorithm."""
    if not layers:
        return ()
    entries = layers.get("patterns", layers) if layers.get("collapsed") else layers
    rules: dict[str, FormatRule] = {}
    for pattern, entry in entries.items():
        spec = entry.get("spec", entry) if isinstance(entry, Mapping) else {}
        algo = str(spec.get("quant_algo", "FP8")).upper()
        short = _generic(str(pattern))
        rules.setdefault(short, FormatRule(pattern=short, format=_algo_format(algo)))
    return tuple(rules.values())


def _groups_listed(quant: Mapping[str, Any]) -> tuple[FormatRule, ...]:
    """Return the rules of `config_groups` with explicit targets."""
    rules = []
    for group in (quant.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        fmt: WeightFormat = "fp8" if weights.get("num_bits") == 8 else "nvfp4"
        rules += [FormatRule(pattern=p, format=fmt) for p in _patterns(group.get("targets"))]
    return tuple(rule for rule in rules if rule.pattern != "Linear")


def _format(
    fmt: WeightFormat,
    rules: tuple[FormatRule, ...],
    quant: Mapping[str, Any],
    group_size: int,
    scope: Literal["linears", "experts"],
) -> CheckpointFormat:
    return CheckpointFormat(
        base=fmt,
        rules=rules,
        scope=scope,
        group_size=group_size,
        fp8_kv_cache=_declares_fp8_kv(quant),
        source="quantization_config",
    )


def _declares_fp8_kv(quant: Mapping[str, Any]) -> bool:
    if str(quant.get("kv_cache_quant_algo") or "").upper() == "FP8":
        return True
    scheme = quant.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8
    return str(scheme or "").upper() == "FP8"


def _ignored(quant: Mapping[str, Any], key: str) -> tuple[FormatRule, ...]:
    return tuple(
        dict.fromkeys(
            FormatRule(pattern=pattern, format="bf16") for pattern in _patterns(quant.get(key))
        )
    )


def _patterns(value: object) -> Sequence[str]:
    """Return the patterns of a list of modules, complete or collapsed."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return _patterns(value.get("patterns"))
    if isinstance(value, str):
        # A collapsed list may be abridged and printed as text.
        value = re.findall(r"'([^']+)'", value)
    if not isinstance(value, Sequence):
        return ()
    return [_generic(str(item)) for item in value]


def _generic(pattern: str) -> str:
    """Replace a layer's number with `#`: `model.layers.3.mlp` → `model.layers.#.mlp`.

    Regular expressions are returned unchanged.
    """
    if pattern.startswith("re:"):
        return pattern
    return re.sub(r"(?<=\.)\d+(?=\.|\*|$)", "#", pattern)
