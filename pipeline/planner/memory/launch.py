"""A launch whose flags are resolved: the record that sizing, rating and advice share."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.errors import PlanError
from pipeline.models.formats import online_format, with_base
from pipeline.planner.memory.changes import fraction_change
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.layout import Parallel, parallel_of
from pipeline.planner.sglang.releases import ReleaseRules
from pipeline.planner.sglang.settings import RefusedLaunch, resolved
from schemas.plan import (
    Calibration,
    Gpu,
    GqaCache,
    KvLayout,
    ModelFacts,
    PlanSettings,
    SlidingCache,
)

# SGLang 0.5.23, configs/model_config.py: get_dtype, and utils/hf_transformers_utils.py:
# CONTEXT_LENGTH_KEYS
_SINGLE = ("float", "float32")
_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length",
                 "max_position_embeddings")  # fmt: skip
_ROPE_KEYS = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLaunch:
    """A model on a card under one launch line, with SGLang's defaults filled in."""

    model: ModelFacts
    gpu: Gpu
    flags: LaunchFlags
    ranks: Parallel
    rules: ReleaseRules
    settings: PlanSettings
    calibration: Calibration | None

    def at_fraction(self, fraction: float) -> "ResolvedLaunch":
        """Return this launch with another memory fraction, on which no other setting depends."""
        return replace(
            self,
            flags=self.flags.changed(fraction_change(fraction)),
            settings=replace(self.settings, mem_fraction_static=fraction, mem_fraction_given=True),
        )


def resolve_launch(
    model: ModelFacts,
    gpu: Gpu,
    flags: LaunchFlags,
    rules: ReleaseRules,
    calibration: Calibration | None = None,
) -> ResolvedLaunch | RefusedLaunch:
    """Resolve a launch of the model as the flags change it, or return SGLang's refusal."""
    model = changed_by_flags(model, flags)
    settings = resolved(flags, model, gpu, rules)
    if isinstance(settings, RefusedLaunch):
        return settings
    return ResolvedLaunch(
        model=model,
        gpu=gpu,
        flags=flags,
        ranks=parallel_of(flags),
        rules=rules,
        settings=settings,
        calibration=calibration,
    )


# --- the model as the line changes it ---------------------------------------------------------


def changed_by_flags(model: ModelFacts, flags: LaunchFlags) -> ModelFacts:
    """Return the model as the flags change it. Raises PlanError for a config that is no JSON.

    A model that was changed before is changed from its files anew.
    """
    stored = model.stored or model
    launched = _changed(stored, flags)
    return stored if launched is stored else replace(launched, stored=stored)


def _changed(model: ModelFacts, flags: LaunchFlags) -> ModelFacts:
    if flags.text("dtype") in _SINGLE and model.format.base == "bf16":
        model = replace(model, format=with_base(model.format, "fp32", "--dtype float32"))
    if quantization := flags.text("quantization"):
        model = replace(model, format=online_format(model.format, quantization))
    if override := config_override(flags):
        model = replace(model, context_length=_context(model, override))
    if flags.has("disable-hybrid-swa-memory"):
        model = replace(model, cache=_without_window(model.cache))
    return model


def _without_window(cache: KvLayout) -> KvLayout:
    """Return the cache in which window layers keep all tokens, as the full ones."""
    if not isinstance(cache, SlidingCache):
        return cache
    full, window = cache.full, cache.window
    widths = [layer.kv_heads * (layer.head_dim + layer.v_head_dim) for layer in (full, window)]
    if widths[0] == widths[1]:
        return replace(full, layers=full.layers + window.layers)
    # One pool has one shape; the mean is as wide.
    values = full.layers * widths[0] + window.layers * widths[1]
    layers = full.layers + window.layers
    half = -(-values // (2 * layers * full.kv_heads))
    return GqaCache(layers=layers, kv_heads=full.kv_heads, head_dim=half, v_head_dim=half)


# --- the config's overrides -------------------------------------------------------------------


def config_override(flags: LaunchFlags) -> Mapping[str, object]:
    """Return the fields of `--json-model-override-args`; those of the text part are at the top."""
    text = flags.text("json-model-override-args")
    if not text:
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise PlanError(
            f"argument --json-model-override-args: expected a JSON object, found {text[:80]!r}"
        )
    inner = fields.pop("text_config", {})
    return {**fields, **(inner if isinstance(inner, dict) else {})}


def other_overrides(flags: LaunchFlags) -> list[str]:
    """Return the overridden fields that are not in the forecast."""
    return [name for name in config_override(flags) if name not in (*_CONTEXT_KEYS, *_ROPE_KEYS)]


def _context(model: ModelFacts, override: Mapping[str, object]) -> int:
    """Return the context as SGLang derives it: the config's length, stretched by its rope."""
    lengths = [override[key] for key in _CONTEXT_KEYS if isinstance(override.get(key), int)]
    length = next((each for each in lengths if isinstance(each, int)), model.context_length)
    for key in _ROPE_KEYS:
        rope = override.get(key)
        if isinstance(rope, Mapping):
            factor = rope.get("factor", 1)
            is_counted = "original_max_position_embeddings" in rope
            is_llama3 = rope.get("rope_type", rope.get("type")) == "llama3"
            if isinstance(factor, int | float) and not is_counted and not is_llama3:
                return int(length * factor)
    return length
