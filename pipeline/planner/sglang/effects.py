"""Effects of flags on memory: none, one that the planner models, or one that it does not.

Invariant: every flag of a line is one of the three, or is unknown to the release; none is ignored
in silence. The lists lie in `data/flag_effects.json`, by name or by pattern.
"""

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from pipeline.planner.sglang.flags import LaunchFlags, known_by_release, spellings_of
from pipeline.planner.sglang.releases import NEWEST, OLDEST, Release, ReleaseRules

_DATA = Path(__file__).with_name("data") / "flag_effects.json"

# Flags that the planner reads.
MODELLED = frozenset(
    {
        "attention-backend", "attn-cp-size", "attn-dp-size", "chunked-prefill-size",
        "context-length", "cpu-offload-gb", "cuda-graph-backend-decode",
        "cuda-graph-backend-prefill", "cuda-graph-bs-decode", "cuda-graph-bs-prefill",
        "cuda-graph-config", "cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill", "dcp-size",
        "decode-attention-backend", "disable-cuda-graph", "disable-decode-cuda-graph",
        "disable-hybrid-swa-memory", "disable-overlap-schedule", "disable-piecewise-cuda-graph",
        "disable-prefill-cuda-graph", "disable-radix-cache", "disaggregation-mode", "dp-size",
        "dsa-decode-backend", "dsa-prefill-backend", "dtype", "enable-deterministic-inference",
        "enable-dp-attention", "enable-dp-lm-head", "enable-flashinfer-allreduce-fusion",
        "enable-hierarchical-cache", "enable-linear-replayssm-spec", "enable-lora",
        "enable-piecewise-cuda-graph", "enable-symm-mem", "enable-two-batch-overlap",
        "enforce-piecewise-cuda-graph", "ep-num-redundant-experts", "hicache-ratio",
        "hicache-size", "json-model-override-args", "kv-cache-dtype", "language-model-only",
        "language-only", "lora-paths", "lora-target-modules", "mamba-full-memory-ratio",
        "mamba-radix-cache-strategy", "mamba-ssm-dtype", "mamba-track-interval",
        "max-lora-rank", "max-loras-per-batch", "max-mamba-cache-size", "max-prefill-tokens",
        "max-running-requests", "max-total-tokens", "mem-fraction-static", "mm-feature-transport",
        "moe-a2a-backend", "moe-dense-tp-size", "moe-runner-backend", "page-size",
        "pp-async-batch-depth", "pp-max-micro-batch-size", "pp-size", "quantization",
        "speculative-algorithm", "speculative-dflash-block-size", "speculative-draft-model-path",
        "speculative-dspark-block-size", "speculative-eagle-topk", "speculative-num-draft-tokens",
        "speculative-num-steps", "swa-full-tokens-ratio", "tp-size",
    }
)  # fmt: skip


def doubts_of_flags(flags: LaunchFlags, rules: ReleaseRules) -> Iterator[str]:
    """Yield a line for each flag whose effect on memory is not in the forecast."""
    for name in dict.fromkeys(name for name, _ in flags.values):
        why = _not_modelled(name)
        if why is not None:
            yield f"--{name} changes memory ({why}), and is not in this forecast"
    for unknown in _gone(flags, rules):
        yield f"{unknown} is not known in SGLang {rules.label}, and is not in this forecast"


@cache
def _not_modelled(name: str) -> str | None:
    """Return what a flag changes that is not modelled; None for a flag without such an effect."""
    if name in MODELLED:
        return None
    no_effect, not_modelled = _effects()
    if any(fnmatchcase(name, pattern) for pattern in no_effect):
        return None
    found = (why for pattern, why in not_modelled.items() if fnmatchcase(name, pattern))
    return next(found, "perhaps: its effect is not known here")


@cache
def _effects() -> tuple[tuple[str, ...], Mapping[str, str]]:
    lists = json.loads(_DATA.read_text())
    return tuple(lists["no_effect"]), lists["not_modelled"]


# --- flags that a release does not know -------------------------------------------------------


def unknown_flags(flags: LaunchFlags, rules: ReleaseRules) -> tuple[str, ...]:
    """Return the flags that the release's parser does not have, with their values."""
    return (*flags.set_aside, *_gone(flags, rules))


def _gone(flags: LaunchFlags, rules: ReleaseRules) -> Iterator[str]:
    for name in dict.fromkeys(name for name, _ in flags.values):
        if not _is_known(spellings_of(name), rules.release):
            yield f"--{name}"


def refusal_of_unknown(flags: LaunchFlags, rules: ReleaseRules) -> str:
    """Return what SGLang's parser says, or "" where it is not certain that it refuses the line.

    Of a release outside those that were read, or one that is only known by its date, no flag is
    called unknown. Where none is named, a flag that some release has is not.
    """
    if rules.naming == "inexact" or not OLDEST <= rules.release <= NEWEST:
        return ""
    unknown = flags.set_aside if rules.naming == "none" else unknown_flags(flags, rules)
    return f"error: unrecognized arguments: {' '.join(unknown)}" if unknown else ""


def _is_known(names: tuple[str, ...], release: Release) -> bool:
    """Tell if the parser of the next release read, before or after, has one of the spellings."""
    read = known_by_release()
    before = max((each for each in read if each <= release), default=None)
    after = min((each for each in read if each >= release), default=None)
    if before is None or after is None:
        # Flags of releases before the first that was read went unrecorded.
        return True
    return any(name in read[each] for name in names for each in (before, after))
