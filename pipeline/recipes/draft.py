"""Draft a run file: from the prompts as they are, a model, and the cards to plan for.

What is not known is assumed, and each assumption is listed for the user. The text is a valid run
file: it is parsed before it is returned.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from pipeline.dataset.lengths import input_size
from pipeline.dataset.prompts import read_prompts
from pipeline.dataset.sources.source import open_source
from pipeline.errors import ConfigError, PlanError
from pipeline.planner.rate.ranking import RatedPlan, rated_search
from pipeline.planner.rate.search import HardwareOption, SearchQuery
from pipeline.planner.sglang.releases import NEWEST
from pipeline.recipes.flags import engine_flags
from pipeline.recipes.schema import SCHEMA_FILE
from pipeline.run_file import (
    needed_context_tokens,
    plan_base,
    run_load,
    run_model,
    search_limits,
    usd_per_gpu_hour,
)
from schemas.config.reader import parse_run_file, run_file_of
from schemas.config.requests import PromptsConfig
from schemas.config.run_file import RunFile
from schemas.estimate import InputSize

# Enough rows for a mean length; a file of any size is looked at in seconds.
_MOST_ROWS_READ = 20_000
_ALPACA = {"instruction", "input", "output"}
# Columns of single questions, most telling first. The reader knows those of conversations itself.
_QUESTION_COLUMNS = (
    "question", "query", "problem", "instruction", "user", "user_prompt", "input", "text",
    "content",
)  # fmt: skip
# Words that YAML 1.1 reads as something other than text.
_YAML_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
_THINKING_MAX_TOKENS = 32_768
_EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
_EMBEDDED_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftQuery:
    """Choices of the user, and what was found on this machine."""

    prompts: str
    model: str | None
    hardware: HardwareOption | None
    endpoint: str | None
    sglang_python: str | None
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Text of a run file, and its assumptions, one sentence each."""

    text: str
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """Lines of the section `engine` and of those that belong to it."""

    lines: tuple[str, ...]
    assumptions: tuple[str, ...] = ()


def draft_run_file(query: DraftQuery, *, today: date) -> Draft:
    """Draft a run file.

    Raises ConfigError for prompts that cannot be read, with the reader's own line.
    """
    prompts, other_columns = _prompts_section(query.prompts)
    values = _least_values(query, prompts)
    run = run_file_of(values, "init")
    size = input_size(run)
    budget = run.sampling.limit_tokens
    engine = _engine(query, run, size, today)
    lines = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"# {_prompts_seen(size, budget)}",
        "prompts:",
        *(f"  {key}: {_scalar(value)}" for key, value in prompts.items()),
        *_columns_hint(other_columns),
        f"model: {_scalar(run.model)}",
        *(() if run.thinking else ("thinking: false",)),
        "sampling:",
        f"  {{temperature: 0.6, top_p: 0.95, top_k: 20, max_tokens: {budget}}}",
        *engine.lines,
        "output:",
        f"  folder: {_scalar(query.folder)}",
    ]
    text = "\n".join(lines) + "\n"
    parse_run_file(text, "init")
    return Draft(text=text, assumptions=(*_about_lengths(query, size), *engine.assumptions))


# --- the prompts ------------------------------------------------------------------------------


def _prompts_section(path: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the keys that read these prompts, and the columns that they do not use."""
    keys = {"path": path}
    config = PromptsConfig(path=path)
    columns = open_source(config, []).columns
    chosen = _question_keys(columns)
    if chosen is not None and not _is_known(config):
        keys |= chosen
    stream = read_prompts(PromptsConfig.model_validate(keys))
    used = {*stream.columns.column.split(", "), stream.columns.system_column}
    if "template" not in keys:
        keys["column"] = stream.columns.column
    return keys, tuple(name for name in columns if name not in used)


def _is_known(config: PromptsConfig) -> bool:
    """Return whether the reader recognises a column by itself."""
    try:
        read_prompts(config)
    except ConfigError:
        return False
    return True


def _question_keys(columns: tuple[str, ...]) -> dict[str, str] | None:
    if set(columns) >= _ALPACA:
        return {"template": "{instruction}\n\n{input}"}
    by_name = {name.lower(): name for name in columns}
    for known in _QUESTION_COLUMNS:
        if known in by_name:
            return {"column": by_name[known]}
    return {"column": columns[0]} if len(columns) == 1 else None


def _columns_hint(columns: tuple[str, ...]) -> tuple[str, ...]:
    if not columns:
        return ()
    named = ", ".join(_scalar(name) for name in columns[:8])
    return (f"  # keep_columns: [{named}]   # carries these to the output",)


def _prompts_seen(size: InputSize, budget: int) -> str:
    more = " in the first rows" if size.num_completions >= _MOST_ROWS_READ else ""
    return (
        f"Completions to generate: {size.num_completions:,}{more}, of at most {budget:,} tokens; "
        f"prompts have {size.prompts.mean_tokens:,.0f} on average."
    )


def _about_lengths(query: DraftQuery, size: InputSize) -> tuple[str, ...]:
    texts = [f"prompt lengths: {size.prompts.source}"]
    if query.model is None and query.endpoint is None:
        texts.append(
            f"model: none given, so {_EMBEDDED_MODEL} on this machine's CPU, to try the run file"
        )
    return tuple(texts)


# --- the engines ------------------------------------------------------------------------------


def _least_values(query: DraftQuery, prompts: Mapping[str, str]) -> dict[str, object]:
    """Return a run file that can be planned with; how its engines start is left open."""
    embedded = query.model is None and query.endpoint is None
    return {
        "prompts": {**prompts, "limit": _MOST_ROWS_READ},
        "model": query.model or ("default" if query.endpoint else _EMBEDDED_MODEL),
        "thinking": not embedded,
        "sampling": {"max_tokens": _EMBEDDED_MAX_TOKENS if embedded else _THINKING_MAX_TOKENS},
        "output": {"folder": query.folder},
    }


def _engine(query: DraftQuery, run: RunFile, size: InputSize, today: date) -> _Engine:
    if query.endpoint is not None:
        return _endpoint(query.endpoint)
    if query.model is None:
        return _Engine(
            lines=("engine: {kind: embedded, count: 1, max_running_requests: 8}",),
        )
    if query.hardware is None:
        reason = "no card here and none named, so flags are planned when the run starts"
        return _Engine(
            lines=_sglang_lines(query, None, note="as many as the cluster has GPUs"),
            assumptions=(f"engine.flags: {reason}; name cards with --gpu to see them now",),
        )
    try:
        plan = _best_plan(run, size, query.hardware, today)
    except PlanError as error:
        return _Engine(
            lines=_sglang_lines(query, None, note="not planned, see below"),
            assumptions=(f"engine.flags: not planned: {error}",),
        )
    summary = (
        f"engine.flags: {plan.found.replicas} engines, {plan.found.requests_in_all:,} requests at "
        f"once, {plan.tokens_per_s:,.0f} tokens/s forecast; completions of "
        f"{run_load(run).lengths.summary.mean_tokens:,.0f} tokens on average are assumed"
    )
    return _Engine(lines=_sglang_lines(query, plan), assumptions=(summary,))


def _endpoint(url: str) -> _Engine:
    return _Engine(
        lines=(
            "engine:",
            "  kind: endpoint",
            f"  base_urls: [{_scalar(url)}]",
            "  max_running_requests: 64     # requests in flight on each server",
            "  # api_key_env: API_KEY       # variable with the servers' key",
        ),
        assumptions=("engine.max_running_requests: 64, which most servers batch",),
    )


def _best_plan(run: RunFile, size: InputSize, hardware: HardwareOption, today: date) -> RatedPlan:
    model = run_model(run)
    base = plan_base(run, needed_context_tokens(run, model, size.longest))
    search = rated_search(
        SearchQuery(
            model=model, options=(hardware,), limits=search_limits(run), base=base,
            version=run.planner.sglang_version,
        ),
        run_load(run, prompt_tokens_mean=size.prompts.mean_tokens),
        usd_per_gpu_hour=usd_per_gpu_hour(run, (hardware,), today=today),
        most=1,
    )  # fmt: skip
    return search.plans[0]


def _sglang_lines(query: DraftQuery, plan: RatedPlan | None, *, note: str = "") -> tuple[str, ...]:
    """Return the section of engines that this project starts, with the plan's flags."""
    release = ".".join(map(str, NEWEST))
    lines = ["engine:", "  kind: sglang"]
    if query.sglang_python is not None:
        lines.append(f"  python: {_scalar(query.sglang_python)}")
    else:
        lines += [
            f"  # Starts SGLang {release} on each node; or name its interpreter: `python: PATH`.",
            "  command: [python3, -m, sglang.launch_server]",
        ]
    if plan is None:
        lines.append(f"  count: null   # {note}")
        return tuple(lines)
    ranks = plan.replica.ranks
    lines += [
        f"  count: {plan.found.replicas}",
        f"  gpus: {ranks.tp_size * ranks.pp_size}   # of one engine",
        f"  max_running_requests: {plan.found.candidate.requests_a_replica}",
        "  flags:",
        *(
            f"    - {_scalar(flag)}"
            for flag in engine_flags(plan.found.candidate.launch.flags, NEWEST)
        ),
    ]
    gpu = plan.found.hardware.gpu.name
    lines.append(f"hardware: [{{gpu: {_scalar(gpu)}, count: {plan.found.hardware.count}}}]")
    return tuple(lines)


def _scalar(value: str) -> str:
    """Write text as YAML: JSON's quotes are YAML's, and plain words need none."""
    is_plain = value.replace("-", "").replace("/", "").replace("_", "").replace(".", "").isalnum()
    is_text = value[:1].isalpha() or value.startswith("/")
    return value if is_plain and is_text and value.lower() not in _YAML_WORDS else json.dumps(value)
