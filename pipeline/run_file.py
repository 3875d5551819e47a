"""A run file → what the estimate is asked: model, load, limits and cards."""

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from pipeline.errors import ConfigError, PlanError
from pipeline.models.facts import model_facts
from pipeline.models.files import find_model, read_model
from pipeline.planner.cards import gpu_named, gpu_of_memory, gpu_with_memory
from pipeline.planner.estimate.estimate import EstimateQuery, PricedGroup
from pipeline.planner.lengths.lengths import LengthModel, configured_lengths, longest_output
from pipeline.planner.memory.plan import ExpectedLengths
from pipeline.planner.rate.ranking import Load
from pipeline.planner.rate.search import HardwareOption, SearchLimits
from pipeline.planner.rate.throughput import accept_odds
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from pipeline.planner.sglang.releases import rules_for
from schemas.config import HardwareConfig, RunFile
from schemas.estimate import PromptLengths
from schemas.plan import Gpu, ModelFacts
from schemas.prompt import Longest

_TEMPLATE_TOKENS = 1024
# assumed: more than most chat templates add of their own, such as a system prompt where there is
# none; the engine's first answer tells what it is
_LEAST_CONTEXT_TOKENS = 8192
# assumed: a first question and the longest template have room in it, and it costs next to nothing
_CONTEXT_STEP_TOKENS = 1024

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


def users_flags(config: RunFile) -> LaunchFlags:
    """The run file's own flags, with the settings that it gives under names of its own."""
    flags = _written_flags(config)
    given: dict[str, str | None] = {}
    if "max_running_requests" in config.engine.model_fields_set:
        given["max-running-requests"] = str(config.engine.max_running_requests)
    if config.engine.context_length is not None:
        given["context-length"] = str(config.engine.context_length)
    return flags.changed({name: text for name, text in given.items() if not flags.has(name)})


def _written_flags(config: RunFile) -> LaunchFlags:
    environment = [f"{name}={value}" for name, value in config.engine.env.items()]
    return parse_launch_line([*environment, *config.engine.flags, "--model-path", config.model])


def plan_base(config: RunFile, context_tokens: int | None) -> LaunchFlags:
    """What every plan of the run keeps: its own flags, and a context where it gives none.

    What an engine of another kind is told under names of its own is no word on SGLang's.
    """
    given = users_flags(config) if config.engine.kind == "sglang" else _written_flags(config)
    if context_tokens is None or given.has("context-length"):
        return given
    return given.changed({"context-length": str(context_tokens)})


def given_context_tokens(config: RunFile) -> int | None:
    """The context that the run file gives; None: the launch takes what the prompts need."""
    if config.engine.kind == "sglang":
        return users_flags(config).number("context-length")
    return config.engine.context_length if config.engine.kind == "endpoint" else None


def check_launch(config: RunFile) -> None:
    """What no launch can be made of, told before anything starts. Raises ConfigError."""
    try:
        stray = parse_launch_line(config.engine.flags).stray
        users_flags(config)
    except PlanError as error:
        raise ConfigError(f"engine.flags: {error}") from None
    if stray:
        raise ConfigError(f"engine.flags: found {stray[0]!r}, which belongs to no flag")
    for number, entry in enumerate(config.hardware):
        try:
            _run_files_card(entry)
        except PlanError as error:
            raise ConfigError(f"hardware.{number}.gpu: {error}") from None
    if config.planner.model_config_path is not None:
        try:
            read_model(Path(config.planner.model_config_path))
        except PlanError as error:
            raise ConfigError(f"planner.model_config_path: {error}") from None


def needed_context_tokens(
    config: RunFile, model: ModelFacts | None, longest: Longest | None, *, template_tokens: int = 0
) -> int | None:
    """The shortest context in which no row is refused or cut before its budget; None: unknown.

    Every turn is reckoned with the largest budget that a try of it may have, and every byte of a
    prompt as a token. `template_tokens` is what the chat template adds, where an engine has told
    it. SGLang takes a request whose prompt and budget are the context together
    (tokenizer_manager.py, 0.5.23).
    """
    if model is None or not longest:
        return None
    budget = config.most_completion_tokens
    needed = max(tokens + turns * budget for turns, tokens in longest)
    needed += max(template_tokens, _TEMPLATE_TOKENS)
    rounded = -(-needed // _CONTEXT_STEP_TOKENS) * _CONTEXT_STEP_TOKENS
    return min(max(rounded, _LEAST_CONTEXT_TOKENS), model.context_length)


def load_of(config: RunFile) -> Load:
    """What the run file says of its requests, with the usual prompt and the prior's lengths."""
    lengths, told = config.lengths, config.estimate
    odds = None
    if told.accept_length is not None:
        odds = accept_odds(told.accept_length, told.draft_tokens)
    return Load(
        prompt_tokens_mean=lengths.prompt_tokens_mean or ExpectedLengths().prompt_tokens,
        lengths=configured_lengths(
            lengths.output_tokens_mean,
            lengths.output_tokens_cv,
            thinking=config.thinking,
            limit_tokens=longest_output(
                lengths.output_tokens_mean,
                lengths.output_tokens_cv,
                config.sampling.max_tokens,
                max_tokens_given="max_tokens" in config.sampling.model_fields_set,
            ),
            source="lengths section of the run file",
        ),
        accept_odds=odds,
    )


def _limits(config: RunFile) -> SearchLimits:
    planner = config.planner
    return SearchLimits(
        mtp=planner.allow_mtp,
        prefix_cache=planner.allow_prefix_cache,
        attention_dp=planner.allow_attention_dp,
        pipeline=planner.allow_pipeline,
        kv_dtype=planner.allow_kv_dtype,
        state_dtype=planner.allow_state_dtype,
    )


def run_model(config: RunFile, config_path: Path | None = None) -> ModelFacts:
    """The model by its config file, else by its name, with what the launch line overrides in it."""
    planner = config.planner
    path = config_path or (Path(planner.model_config_path) if planner.model_config_path else None)
    files = read_model(path) if path else find_model(config.model)
    overrides = users_flags(config).text("json-model-override-args", "{}")
    try:
        changed = json.loads(overrides)
    except json.JSONDecodeError as error:
        raise PlanError(f"--json-model-override-args is not JSON: {error.msg}") from None
    return model_facts(
        config.model,
        {**files.config, **changed},
        hf_quant=files.hf_quant,
        weights_format=planner.weights_format,
        checkpoint_bytes=files.checkpoint_bytes,
    )


def _run_files_card(entry: HardwareConfig) -> Gpu:
    if entry.memory_gib is None:
        return gpu_named(entry.gpu)
    try:
        return gpu_with_memory(gpu_named(entry.gpu), entry.memory_gib)
    except PlanError:
        return gpu_of_memory(entry.memory_gib, entry.gpu)
