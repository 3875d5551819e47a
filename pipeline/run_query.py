"""A run file → what the estimate is asked: model, load, limits and cards."""

from collections.abc import Mapping
from datetime import date
from pathlib import Path

from pipeline.engines.launch_setting import (
    Longest,
    needed_context_tokens,
    plan_base,
    run_model,
)
from pipeline.planner.hardware import gpu_named, gpu_with_memory
from pipeline.planner.lengths import LengthModel
from pipeline.planner.rated_plans import Load
from pipeline.planner.run_estimate import EstimateQuery, PricedGroup
from pipeline.planner.search import HardwareOption, SearchLimits
from pipeline.planner.sglang_rules import rules_for
from pipeline.planner.throughput import accept_odds
from schemas.config import HardwareConfig, RunFile
from schemas.estimate import PromptLengths

OwnPrices = Mapping[str, tuple[float | None, float | None]]
"""A card's price of a GPU-hour and the one on spot, where the user names them."""


def estimate_query(
    run: RunFile,
    *,
    num_completions: int,
    prompts: PromptLengths,
    lengths: LengthModel,
    today: date,
    longest: Longest | None = None,
    model_config: Path | None = None,
    sglang_version: str | None = None,
) -> EstimateQuery:
    """The run file's words for the estimate. PlanError for a model that the planner cannot find.

    Without `longest` the context is what prompts of the usual length need.
    """
    planner, told = run.planner, run.estimate
    version = sglang_version or planner.sglang_version
    model = run_model(run, model_config)
    odds = None
    if told.accept_length is not None:
        odds = accept_odds(told.accept_length, told.draft_tokens)
    return EstimateQuery(
        model=model,
        num_completions=num_completions,
        prompts=prompts,
        load=Load(prompt_tokens_mean=prompts.mean_tokens, lengths=lengths, accept_odds=odds),
        limits=SearchLimits(
            mtp=planner.allow_mtp,
            prefix_cache=planner.allow_prefix_cache,
            attention_dp=planner.allow_attention_dp,
            pipeline=planner.allow_pipeline,
            kv_dtype=planner.allow_kv_dtype,
            state_dtype=planner.allow_state_dtype,
        ),
        base=plan_base(run, needed_context_tokens(run, model, longest)),
        version=version,
        release_known=not rules_for(version)[1],
        storage_bytes_per_s=told.storage_gb_per_s * 1e9,
        hours_between_preemptions=told.hours_between_preemptions,
        calibrations={},
        today=today,
    )


def configured_group(entry: HardwareConfig, prices: OwnPrices) -> PricedGroup:
    """One entry of the run file's hardware, at the user's own price where there is one."""
    gpu = gpu_named(entry.gpu)
    if entry.memory_gib is not None:
        gpu = gpu_with_memory(gpu, entry.memory_gib)
    usd, spot = prices.get(gpu.name, (entry.usd_per_gpu_hour, entry.spot_usd_per_gpu_hour))
    hardware = HardwareOption(gpu=gpu, count=entry.count)
    return PricedGroup(hardware=hardware, own_usd=usd, own_spot_usd=spot)
