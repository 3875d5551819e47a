"""Run file and cards of the node → what an engine is launched with, before any was.

Flags of the run file stand; what they leave open is planned for the card that is really there. A
model or card that the planner does not know leaves the launch as the run file has it, and says so.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.engines.gpus import Card, planned_card
from pipeline.engines.ladder import Rate, Setting, running_requests
from pipeline.errors import ConfigError, PlanError
from pipeline.planner.hardware import gpu_named, gpu_of_memory, gpu_with_memory, speed_known
from pipeline.planner.launch_flags import LaunchFlags, parse_launch_line
from pipeline.planner.launch_plan import ExpectedLengths
from pipeline.planner.lengths import configured_lengths, longest_output
from pipeline.planner.model_facts import model_facts
from pipeline.planner.model_files import find_model, read_model
from pipeline.planner.parallel import tensor_ranks_of
from pipeline.planner.plan_rate import plan_tokens_per_s
from pipeline.planner.rated_plans import Load, ranking_rate
from pipeline.planner.search import Candidate, HardwareOption, SearchLimits, best_plans
from pipeline.planner.throughput import accept_odds
from schemas.config import HardwareConfig, RunFile
from schemas.plan import Calibration, Gpu, ModelFacts

Longest = Sequence[tuple[int, int]]
"""Turns to generate → the most tokens that a row of so many can ask with, answers left out."""

_TEMPLATE_TOKENS = 1024
# assumed: more than most chat templates add of their own, such as a system prompt where there is
# none; the engine's first answer tells what it is
_LEAST_CONTEXT_TOKENS = 8192
# assumed: a first question and the longest template have room in it, and it costs next to nothing
_CONTEXT_STEP_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLaunch:
    """The flags to begin with, and why they were not planned if they were not."""

    flags: LaunchFlags
    setting: Setting
    unplanned: str | None


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


def launch_setting(
    config: RunFile, cards: Sequence[Card], release: str | None, longest: Longest | None = None
) -> tuple[Setting, str | None]:
    """What plans stand on, and why there can be none."""
    reasons = []
    try:
        model: ModelFacts | None = run_model(config)
    except PlanError as error:
        model, reasons = None, [str(error)]
    gpu = _gpu(config, tuple(cards))
    if gpu is None:
        reasons.append("no card is known: neither NVML nor nvidia-smi nor `hardware` tells one")
    rate, rate_unit = _rate(config, model, gpu)
    setting = Setting(
        model=model,
        gpu=gpu,
        num_gpus=max(1, config.engine.gpus_per_worker or len(cards)),
        version=release or config.planner.sglang_version,
        lengths=load_of(config).expected(),
        least_context_tokens=needed_context_tokens(config, model, longest),
        may_change_state_dtype=config.planner.allow_state_dtype,
        users_flags=frozenset(name for name, _ in users_flags(config).values),
        rate=rate,
        rate_unit=rate_unit,
    )
    return setting, "; ".join(reasons) or None


def first_launch(
    config: RunFile, setting: Setting, unplanned: str | None, calibration: Calibration | None
) -> FirstLaunch:
    """The best launch of one engine on its cards; the run file's own where none can be planned."""
    given = users_flags(config)
    if config.engine.plan == "off" or unplanned or setting.model is None or setting.gpu is None:
        return FirstLaunch(flags=given, setting=setting, unplanned=unplanned)
    try:
        # A context that is chosen for its memory would refuse long rows.
        base = plan_base(config, setting.least_context_tokens or setting.model.context_length)
        if calibration is not None and not base.has("tp-size"):
            # What was measured holds for one layout alone.
            base = base.changed({"tp-size": str(tensor_ranks_of(base, setting.num_gpus))})
        load = load_of(config)
        found = best_plans(
            setting.model,
            (HardwareOption(gpu=setting.gpu, count=setting.num_gpus),),
            setting.lengths,
            _limits(config),
            base=base,
            version=setting.version,
            output_tokens_cv=load.lengths.summary.cv,
            calibrations={setting.gpu.name: calibration} if calibration else None,
            rank=partial(_of_one_engine, load=load),
            most=1,
        )
    except PlanError as error:
        bare = plan_base(config, setting.least_context_tokens)
        return FirstLaunch(flags=bare, setting=setting, unplanned=str(error))
    return FirstLaunch(
        flags=_as_planned(given, found[0].plan.argv), setting=setting, unplanned=None
    )


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


def _of_one_engine(candidate: Candidate, load: Load) -> float:
    """One engine takes all cards that it is given: copies of it do not count."""
    if not speed_known(candidate.launch.gpu):
        return candidate.requests_a_replica
    return ranking_rate(candidate, load)


def _rate(config: RunFile, model: ModelFacts | None, gpu: Gpu | None) -> tuple[Rate, str]:
    """What plans are priced by: tokens/s where the card's speed is known."""
    if model is None or gpu is None or not speed_known(gpu):
        return running_requests, "requests at once"
    rate = partial(plan_tokens_per_s, model=model, gpu=gpu, load=load_of(config))
    return rate, "tokens/s"


def _as_planned(given: LaunchFlags, argv: tuple[str, ...]) -> LaunchFlags:
    """The planned flags, with what only SGLang knows of the run file's line."""
    planned = parse_launch_line(argv)
    return LaunchFlags(
        model_path=given.model_path,
        values=planned.values,
        env=given.env,
        set_aside=given.set_aside,
    )


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


def _gpu(config: RunFile, cards: tuple[Card, ...]) -> Gpu | None:
    """The card as the node tells it, else as the run file does, if that names one kind alone."""
    measured = planned_card(cards)
    if measured is not None or len(config.hardware) != 1:
        return measured
    return _run_files_card(config.hardware[0])


def _run_files_card(entry: HardwareConfig) -> Gpu:
    if entry.memory_gib is None:
        return gpu_named(entry.gpu)
    try:
        return gpu_with_memory(gpu_named(entry.gpu), entry.memory_gib)
    except PlanError:
        return gpu_of_memory(entry.memory_gib, entry.gpu)
