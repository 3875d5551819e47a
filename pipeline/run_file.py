"""Translate a run file into the planner's words: model, cards, limits, load, flags, context.

Plan, estimate, launch and the live estimate all read the run file through this module.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from pipeline.errors import ConfigError, PlanError
from pipeline.models.files import generation_config, load_model, read_model
from pipeline.planner.cards import gpu_named, gpu_of
from pipeline.planner.estimate.estimate import EstimateQuery, PricedGroup
from pipeline.planner.estimate.prices import prices_of
from pipeline.planner.launch_text import launch_words
from pipeline.planner.lengths.lengths import LengthModel, configured_lengths, longest_output
from pipeline.planner.memory.plan import ExpectedLengths
from pipeline.planner.rate.ranking import Load
from pipeline.planner.rate.search import HardwareOption, SearchLimits
from pipeline.planner.rate.throughput import accept_odds
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from pipeline.planner.sglang.releases import rules_for
from schemas.config.planning import HardwareConfig
from schemas.config.reader import run_file_of
from schemas.config.run_file import RunFile
from schemas.estimate import InputSize
from schemas.plan import Calibration, ModelFacts
from schemas.prompt import Longest, RowBudgets

# assumed: more than most chat templates add, such as a system prompt of their own; an engine's
# first answer shows the true number
_TEMPLATE_TOKENS = 1024
# assumed: enough for a short question and the longest template, at next to no cost
_LEAST_CONTEXT_TOKENS = 8192
_CONTEXT_STEP_TOKENS = 1024

# The parameters that SGLang takes from the file: model_config.py, get_default_sampling_params,
# 0.5.23.
_MODEL_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# A card's name -> the user's own price per GPU-hour, on demand and on spot.
OwnPrices = Mapping[str, tuple[float | None, float | None]]


# --- the estimate ---------------------------------------------------------------------------


def estimate_query(
    run: RunFile,
    size: InputSize,
    lengths: LengthModel,
    *,
    today: date,
    calibrations: Mapping[str, Calibration] | None = None,
) -> EstimateQuery:
    """Translate the run file into the estimate's query. Raises PlanError for an unknown model.

    `calibrations` are by the name of the card. Where `size.longest` is None, the context is what
    prompts of the usual length need.
    """
    model, version = run_model(run), run.planner.sglang_version
    return EstimateQuery(
        model=model,
        num_completions=size.num_completions,
        prompts=size.prompts,
        load=run_load(run, prompt_tokens_mean=size.prompts.mean_tokens, lengths=lengths),
        limits=search_limits(run),
        base=plan_base(run, needed_context_tokens(run, model, size.longest)),
        version=version,
        release_known=not rules_for(version)[1],
        storage_bytes_per_s=run.estimate.storage_gb_per_s * 1e9,
        hours_between_preemptions=run.estimate.hours_between_preemptions,
        calibrations=calibrations or {},
        today=today,
    )


def own_launch_of(run: RunFile, words: Sequence[str]) -> LaunchFlags:
    """Parse the user's own launch line of the run's model. Raises PlanError for another model."""
    line = parse_launch_line(launch_words(words))
    if line.model_path not in ("", run.model):
        raise PlanError(
            f"the launch line has --model-path {line.model_path}, the run file model: {run.model}"
        )
    return replace(line, model_path=run.model)


def with_row_budgets(run: RunFile, budgets: RowBudgets | None) -> RunFile:
    """Return the run file with the largest token budget of any row as `sampling.max_tokens`."""
    if budgets is None:
        return run
    own, largest = run.sampling.limit_tokens, budgets.largest
    most = largest if budgets.are_all_set else max(own, largest)
    return run.model_copy(update={"sampling": run.sampling.model_copy(update={"max_tokens": most})})


def with_planner_settings(run: RunFile, **settings: str | Path | None) -> RunFile:
    """Return the run file with these keys of its `planner` section replaced, where one is given."""
    given = {name: str(value) for name, value in settings.items() if value}
    return run.model_copy(update={"planner": run.planner.model_copy(update=given)})


def configured_group(entry: HardwareConfig, prices: OwnPrices) -> PricedGroup:
    """Return one entry of the run file's hardware, at the user's own price where there is one."""
    # Only cards of the catalogue have a speed to estimate with.
    gpu_named(entry.gpu)
    gpu = gpu_of(entry.gpu, entry.memory_gib)
    usd, spot = prices.get(gpu.name, (entry.usd_per_gpu_hour, entry.spot_usd_per_gpu_hour))
    hardware = HardwareOption(gpu=gpu, count=entry.count)
    return PricedGroup(hardware=hardware, own_usd=usd, own_spot_usd=spot)


def configured_hardware(run: RunFile) -> tuple[HardwareOption, ...]:
    """Return the cards of the run file. Raises PlanError where it lists none."""
    if not run.hardware:
        raise PlanError("the run file has no hardware section: list cards as {gpu, count}")
    return tuple(
        HardwareOption(gpu=gpu_of(entry.gpu, entry.memory_gib), count=entry.count)
        for entry in run.hardware
    )


def usd_per_gpu_hour(
    run: RunFile, hardware: Iterable[HardwareOption], *, today: date
) -> dict[str, float]:
    """Return prices by card: the run file's own, else the catalogue's on demand.

    Raises PlanError where the run file gives one card two prices.
    """
    own: dict[str, float | None] = {}
    for entry in run.hardware:
        name, usd = gpu_of(entry.gpu, entry.memory_gib).name, entry.usd_per_gpu_hour
        if own.setdefault(name, usd) != usd:
            raise PlanError(
                f"hardware: {name} has two prices, usd_per_gpu_hour {own[name]} and {usd}; "
                "give each card one"
            )
    prices = {}
    for option in hardware:
        listed = prices_of(option.gpu, today, own_usd=own.get(option.gpu.name))
        if listed and listed[0].kind != "spot":
            prices[option.gpu.name] = listed[0].usd_per_gpu_hour
    return prices


# --- flags and context ----------------------------------------------------------------------


def users_flags(config: RunFile) -> LaunchFlags:
    """Return the run file's flags, including settings that it gives under keys of its own."""
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
    """Return the flags that every plan of the run keeps, with a context where it gives none.

    Keys such as `engine.context_length` count only for SGLang engines.
    """
    given = users_flags(config) if config.engine.kind == "sglang" else _written_flags(config)
    if context_tokens is None or given.has("context-length"):
        return given
    return given.changed({"context-length": str(context_tokens)})


def given_context_tokens(config: RunFile) -> int | None:
    """Return the context that the run file gives; None lets the launch fit it to the prompts."""
    if config.engine.kind == "sglang":
        return users_flags(config).number("context-length")
    return config.engine.context_length if config.engine.kind == "endpoint" else None


def check_launch(config: RunFile) -> None:
    """Check flags, cards and the model's config before anything starts. Raises ConfigError."""
    try:
        stray = parse_launch_line(config.engine.flags).stray
        users_flags(config)
    except PlanError as error:
        raise ConfigError(f"engine.flags: {error}") from None
    if stray:
        raise ConfigError(f"engine.flags: found {stray[0]!r}, which belongs to no flag")
    for number, entry in enumerate(config.hardware):
        try:
            gpu_of(entry.gpu, entry.memory_gib)
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
    """Return the shortest context that no row outgrows, or None where that is unknown.

    Every turn counts with its largest token budget, and every byte of a prompt is an upper bound
    on its tokens. `template_tokens` is what the chat template adds, once an engine has reported
    it. SGLang accepts a request whose prompt and budget add up to the context
    (tokenizer_manager.py, 0.5.23).
    """
    if model is None or not longest:
        return None
    budget = config.most_completion_tokens
    needed = max(tokens + turns * budget for turns, tokens in longest)
    needed += max(template_tokens, _TEMPLATE_TOKENS)
    rounded = -(-needed // _CONTEXT_STEP_TOKENS) * _CONTEXT_STEP_TOKENS
    return min(max(rounded, _LEAST_CONTEXT_TOKENS), model.context_length)


# --- load, limits and model -----------------------------------------------------------------


def run_load(
    run: RunFile,
    *,
    prompt_tokens_mean: float | None = None,
    lengths: LengthModel | None = None,
) -> Load:
    """Return the load of the run; what is not given comes from the run file, else the prior."""
    accept_length = run.estimate.accept_length
    return Load(
        prompt_tokens_mean=prompt_tokens_mean
        or run.lengths.prompt_tokens_mean
        or ExpectedLengths().prompt_tokens,
        lengths=lengths or _stated_lengths(run),
        accept_odds=None
        if accept_length is None
        else accept_odds(accept_length, run.estimate.draft_tokens),
    )


def _stated_lengths(run: RunFile) -> LengthModel:
    lengths = run.lengths
    return configured_lengths(
        lengths.output_tokens_mean,
        lengths.output_tokens_cv,
        thinking=run.thinking,
        limit_tokens=output_limit_tokens(run),
        source="lengths section of the run file",
    )


def output_limit_tokens(run: RunFile) -> int:
    """Return `sampling.max_tokens` where it is given; its default must not cut stated lengths."""
    return longest_output(
        run.lengths.output_tokens_mean,
        run.lengths.output_tokens_cv,
        run.sampling.limit_tokens,
        max_tokens_given=run.sampling.max_tokens is not None
        and "max_tokens" in run.sampling.model_fields_set,
    )


def with_model_sampling(run: RunFile) -> RunFile:
    """Resolve `sampling: model`: keys that are not given come from the model's own file.

    Keys that the file lacks are left to the server, as the run file's null does. Raises ConfigError
    where the file cannot be found.
    """
    sampling = run.sampling
    if sampling.base is None:
        return run
    try:
        found = generation_config(run.model)
    except PlanError as error:
        raise ConfigError(f"sampling: {error}") from None
    if found is None:
        raise ConfigError(
            f"sampling: found no generation_config.json of {run.model!r}, neither in a folder of "
            "that name, nor in the hub's cache, nor on the hub; give the values instead"
        )
    own = {key: found.get(key) for key in _MODEL_SAMPLING if key not in sampling.model_fields_set}
    given = sampling.model_dump(exclude_unset=True, exclude={"base"})
    source = f"generation_config.json of {run.model}"
    return run_file_of({**run.model_dump(exclude_unset=True), "sampling": {**own, **given}}, source)


def search_limits(run: RunFile) -> SearchLimits:
    """Return what the search for a launch may change."""
    planner = run.planner
    return SearchLimits(
        mtp=planner.allow_mtp,
        prefix_cache=planner.allow_prefix_cache,
        attention_dp=planner.allow_attention_dp,
        pipeline=planner.allow_pipeline,
        kv_dtype=planner.allow_kv_dtype,
        state_dtype=planner.allow_state_dtype,
    )


def run_model(run: RunFile) -> ModelFacts:
    """Return the model's facts, with what `--json-model-override-args` changes in its config.

    The config is read from `planner.model_config_path`, else found by the model's name. Raises
    PlanError where neither gives one.
    """
    path = run.planner.model_config_path
    return load_model(
        run.model,
        config_path=Path(path) if path else None,
        weights_format=run.planner.weights_format,
        overrides=users_flags(run).text("json-model-override-args"),
    )
