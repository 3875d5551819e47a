"""SGLang's behaviour by release: one table, used by the rest of the planner.

A rule is a field of `ReleaseRules`, a release is a row. Only this module and `flags` know release
numbers. A release whose source was not read has the rules of the nearest older one that was.
"""

import re
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Literal

Release = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRules:
    """Rules of one release. Each comment names the SGLang file that the rules below are from."""

    release: Release
    # mem_cache/kv_cache_configurator.py (older: model_executor/model_runner_kv_cache_mixin.py):
    # what is reserved for verify states, and for how many requests
    verify_reserve: Literal["all_requests_first", "joint", "joint_padded"]
    # server_args.py, up to 0.5.13: reserved in the default fraction for EAGLE and STANDALONE
    speculation_reserve_mib: int
    standalone_reserve_mib: int
    # managers/scheduler.py: init_model_worker
    draft_loads_before_pool: bool
    # model_executor/pool_configurator.py
    draft_kv_priced: bool
    # arg_groups/mamba_hook.py (older: server_args.py)
    auto_mamba_strategy: Literal["no_buffer", "extra_buffer"]
    speculation_needs_extra_buffer: bool
    # model_runner_kv_cache_mixin.py / kv_cache_configurator.py: resolve_max_num_reqs
    requests_clamped_by: Literal["estimate", "half_tokens"]
    # kv_cache_configurator.py: mm_runtime_reservation_gb
    multimodal_reserve_mib: int
    multimodal_ipc_reserve_mib: int
    # arg_groups/cuda_graph_hook.py; "piecewise" graphs are off for multimodal models and V4.
    # "opt_in" up to 0.5.9: two public logs of default launches (0.5.6, 0.5.8) have no reserve.
    prefill_graphs: Literal["opt_in", "piecewise", "breakable"]
    mla_prefill_graph_tokens: int
    # whether models with plain latent attention, or Nemotron-H, have their prefill captured
    latent_prefill_graphs: bool
    # arg_groups/memory_hook.py: the tier of 20-35 GiB cards
    small_card_chunk: int
    small_card_graph_bs: tuple[int, int]
    graphs_follow_requests: bool
    # mem_cache: DSV4PoolConfigurator
    v4_c128_state: Literal["per_token", "fixed"]
    # whether its pages are padded to 576 bytes
    v4_padded_pages: bool
    # arg_groups/model_overrides/nemotron_h.py: Nemotron-H on Blackwell
    mamba2_trtllm_attention: bool
    # layers/attention/dsv4/indexer.py, on compute capability 12.x
    v4_indexer_sm120: Literal["unsupported", "torch_fp32", "tilelang"]
    v4_indexer_row_chunks: bool
    # layers/quantization: Marlin keeps the fp32 scales of DeepSeek-V4's experts beside its own
    v4_marlin_keeps_both: bool
    # pool_configurator.py: SWAChunkCap, later SWARequestCap
    swa_request_cap: bool
    # pool_configurator.py: the scaled fp8 latent is priced at its real size
    scaled_latent_priced: bool
    # pool_configurator.py: layers that reuse another's selection keep no index keys
    shared_index_elided: bool
    # arg_groups/overrides.py: GLM's fp8 latent on compute capability 12.x is the scaled one
    glm_sm120_scaled_latent: bool
    # logits_processor: one logits buffer per process instead of one per graph
    shared_logits_buffer: bool
    # SGLANG_ENABLE_SPEC_V2; without the switch, speculation always overlaps
    spec_v2_switch: bool
    label: str
    # how the release was named: a build may have rules of its own
    naming: Literal["exact", "inexact", "none"]


_0_5_10 = ReleaseRules(
    release=(0, 5, 10),
    verify_reserve="all_requests_first",
    speculation_reserve_mib=4096,
    standalone_reserve_mib=6144,
    draft_loads_before_pool=False,
    draft_kv_priced=False,
    auto_mamba_strategy="no_buffer",
    speculation_needs_extra_buffer=True,
    requests_clamped_by="estimate",
    multimodal_reserve_mib=0,
    multimodal_ipc_reserve_mib=0,
    prefill_graphs="piecewise",
    mla_prefill_graph_tokens=2048,
    latent_prefill_graphs=True,
    small_card_chunk=2048,
    small_card_graph_bs=(24, 80),
    graphs_follow_requests=False,
    v4_c128_state="per_token",
    v4_padded_pages=False,
    mamba2_trtllm_attention=False,
    v4_indexer_sm120="unsupported",
    v4_indexer_row_chunks=False,
    v4_marlin_keeps_both=True,
    swa_request_cap=False,
    scaled_latent_priced=False,
    shared_index_elided=False,
    glm_sm120_scaled_latent=False,
    shared_logits_buffer=False,
    spec_v2_switch=True,
    label="0.5.10",
    naming="exact",
)


def _changed(rules: ReleaseRules, release: Release, **changes: object) -> ReleaseRules:
    values: dict[str, object] = {name: getattr(rules, name) for name in ReleaseRules.__slots__}
    values.update(changes, release=release, label=".".join(map(str, release)))
    return ReleaseRules(**values)  # type: ignore[arg-type]  # the names are the fields' own


_0_5_13 = _changed(_0_5_10, (0, 5, 13), verify_reserve="joint", v4_indexer_sm120="torch_fp32")
_0_5_14 = _changed(
    _0_5_13,
    (0, 5, 14),
    speculation_reserve_mib=0,
    standalone_reserve_mib=0,
    draft_loads_before_pool=True,
    draft_kv_priced=True,
    auto_mamba_strategy="extra_buffer",
    speculation_needs_extra_buffer=False,
    requests_clamped_by="half_tokens",
    swa_request_cap=True,
    spec_v2_switch=False,
)
_0_5_15 = _changed(
    _0_5_14,
    (0, 5, 15),
    prefill_graphs="breakable",
    latent_prefill_graphs=False,
    v4_c128_state="fixed",
    shared_logits_buffer=True,
)
_0_5_16 = _changed(_0_5_15, (0, 5, 16), verify_reserve="joint_padded", v4_marlin_keeps_both=False)
_0_5_17 = _changed(
    _0_5_16,
    (0, 5, 17),
    multimodal_reserve_mib=1124,
    multimodal_ipc_reserve_mib=1124,
    glm_sm120_scaled_latent=True,
    scaled_latent_priced=True,
    v4_indexer_sm120="tilelang",
)
_0_5_18 = _changed(_0_5_17, (0, 5, 18), multimodal_reserve_mib=100)
_0_5_19 = _changed(
    _0_5_18,
    (0, 5, 19),
    latent_prefill_graphs=True,
    mamba2_trtllm_attention=True,
    shared_index_elided=True,
)
_0_5_21 = _changed(
    _0_5_19,
    (0, 5, 21),
    small_card_chunk=4096,
    small_card_graph_bs=(48, 160),
    v4_indexer_row_chunks=True,
    v4_padded_pages=True,
)
_0_5_23 = _changed(
    _0_5_21,
    (0, 5, 23),
    graphs_follow_requests=True,
    mla_prefill_graph_tokens=8192,
)

_UNREAD = _changed(_0_5_10, (0, 0, 0), prefill_graphs="opt_in")

# Architectures whose `forward` passes tensors between stages, and those that are known not to:
# `pp_proxy_tensors` in models/*.py, 0.5.23. Older releases were not read for it. Qwen3.5 runs in
# stages since sglang#19670, and each stage loads only its own layers since sglang#21070 (2026-03).
_STAGES_READ: Release = (0, 5, 23)
_WITH_STAGES = frozenset(
    (
        "DeciLMForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
        "DeepseekV4ForCausalLM", "Gemma4ForConditionalGeneration", "Glm4MoeForCausalLM",
        "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "KimiK25ForConditionalGeneration",
        "KimiK3ForConditionalGeneration", "KimiLinearForCausalLM", "LlamaForCausalLM",
        "MiMoV2FlashForCausalLM", "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration", "MixtralForCausalLM", "NemotronHForCausalLM",
        "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    )
)  # fmt: skip
_WITHOUT_STAGES = frozenset(
    ("Llama4ForConditionalGeneration", "MiMoForCausalLM", "Qwen3NextForCausalLM")
)

_TABLE = (
    _UNREAD, _0_5_10, _0_5_13, _0_5_14, _0_5_15, _0_5_16, _0_5_17, _0_5_18, _0_5_19, _0_5_21,
    _0_5_23,
)  # fmt: skip
NEWEST: Release = _0_5_23.release
OLDEST: Release = _0_5_10.release

# The day each wheel was built, by the file dates inside; 0.5.11, 0.5.16, 0.5.18, 0.5.20 and 0.5.22
# are assumed to be between their neighbours. A build of day D from the main branch behaves like the
# first release built on D or later.
_BUILT: tuple[tuple[date, Release], ...] = (
    (date(2025, 4, 30), (0, 4, 6)),
    (date(2025, 8, 31), (0, 5, 1)),
    (date(2025, 12, 31), (0, 5, 7)),
    (date(2026, 3, 1), (0, 5, 9)),
    (date(2026, 4, 8), (0, 5, 10)),
    (date(2026, 5, 1), (0, 5, 11)),
    (date(2026, 5, 23), (0, 5, 12)),
    (date(2026, 6, 15), (0, 5, 13)),
    (date(2026, 6, 26), (0, 5, 14)),
    (date(2026, 7, 14), (0, 5, 15)),
    (date(2026, 7, 26), (0, 5, 16)),
    (date(2026, 8, 8), (0, 5, 17)),
    (date(2026, 8, 20), (0, 5, 18)),
    (date(2026, 9, 4), (0, 5, 19)),
    (date(2026, 9, 18), (0, 5, 20)),
    (date(2026, 10, 1), (0, 5, 21)),
    (date(2026, 10, 15), (0, 5, 22)),
    (date(2026, 10, 30), (0, 5, 23)),
)


def runs_in_stages(architecture: str, rules: ReleaseRules) -> bool:
    """Return True where the release is known to run the model with `--pp-size`."""
    return architecture in _WITH_STAGES and rules.release >= _STAGES_READ


def no_stages(architecture: str, rules: ReleaseRules) -> bool:
    """Return True where the release is known to refuse the model with `--pp-size`."""
    return architecture in _WITHOUT_STAGES and rules.release >= _STAGES_READ


# "0.5.16 + patches", "0.5.16.dev3", "0.5.16rc1": builds that may differ from the release
_PATCHED = re.compile(r"\s|\+|dev|rc|fork|patch", re.IGNORECASE)


@cache
def rules_for(version: str | None) -> tuple[ReleaseRules, tuple[str, ...]]:
    """Return the rules of a release, in any spelling, and what had to be assumed."""
    release, notes = _release_of(version)
    rules = next((row for row in reversed(_TABLE) if row.release <= release), _TABLE[0])
    label = ".".join(map(str, release))
    if release < OLDEST:
        notes = (*notes, f"releases before 0.5.10 were not read: {label} is planned as 0.5.10")
    elif release > NEWEST:
        notes = (*notes, f"{label} is newer than the newest release read: planned as 0.5.23")
    named = (version or "").strip()
    if not named:
        return _changed(rules, release, naming="none"), notes
    is_exact = not notes and not _PATCHED.search(named)
    return _changed(rules, release, naming="exact" if is_exact else "inexact"), notes


def _release_of(version: str | None) -> tuple[Release, tuple[str, ...]]:
    newest = ".".join(map(str, NEWEST))
    if version is None or not version.strip():
        return NEWEST, (f"no SGLang version given: planned as {newest}",)
    found = re.search(r"(?<![\d.])0\.(\d+)\.(\d+)", version)
    if found and int(found[1]) <= 5:
        return (0, int(found[1]), int(found[2])), ()
    day = _day(version)
    if day is not None:
        release = next((row for built, row in _BUILT if day <= built), NEWEST)
        label = ".".join(map(str, release))
        return release, (f"version {version!r} is read by its date as {label}",)
    return NEWEST, (f"version {version!r} names no release: planned as {newest}",)


def _day(version: str) -> date | None:
    found = re.search(r"(20\d\d)-?(\d\d)(?:-?(\d\d))?", version)
    if not found:
        return None
    try:
        return date(int(found[1]), int(found[2]), int(found[3] or 28))
    except ValueError:
        return None
