"""The run file: all keys with their types, bounds and defaults.

Unknown keys are refused. The models are frozen: a run file is resolved once and then only read.
"""

import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import yaml
from pydantic import BaseModel, Field, JsonValue, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from pipeline.errors import ConfigError
from schemas.quality_config import QualityConfig
from schemas.section import Section

EngineKind = Literal["embedded", "endpoint", "sglang"]
EnginePlan = Literal["auto", "off"]
PromptShape = Literal["messages", "conversations", "prompt"]

_LONGEST_VALUE_SHOWN = 60
# Integer widths of the output's `sampling` column.
_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
_VARIABLE = {"env": r"[^=\s*\0]+", "pass_env": r"[^=\s*\0]+\*?|\*"}
_SECRET_NAME = re.compile(r"(?i)(^|_)(token|secret|password|api_?key|access_?key)$")
_OUR_FLAGS = frozenset({"--host", "--port", "--api-key"})


def is_url(where: str) -> bool:
    """Return true for the URL of an object store, false for a local path."""
    return "://" in where


class PromptsConfig(Section):
    """Location and columns of the prompts."""

    path: str
    """A parquet or JSON-lines file, a folder of them, a saved data set, or a hub name.

    A file or folder may be in an object store: `s3://bucket/prompts.parquet`.
    """
    name: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    column: str | None = None
    """Column to read. Null: the first of `messages`, `conversations` and `prompt` that exists."""
    shape: PromptShape | None = None
    """Format of `column`. Null: by the column's name, else by its values."""
    system_prompt: str | None = None
    """System turn for conversations that have none."""
    system_column: str | None = None
    """Column with each row's system prompt. Null: `system_prompt` or `system` if present."""
    id_column: str | None = None
    """Column with unique row ids. Null: a hash of each row's content is its id."""
    keep_columns: list[str] = []
    limit: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_columns_differ(self) -> Self:
        repeated = [name for name in self.keep_columns if self.keep_columns.count(name) > 1]
        if repeated:
            raise ValueError(
                f"keep_columns: {repeated[0]!r} is listed twice; list each column once"
            )
        return self


class SamplingConfig(Section):
    """Sampling parameters of every request; null leaves the engine's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.6
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = 20
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT32)] = 4096
    seed: Annotated[int, Field(ge=0, le=_MAX_INT64)] | None = 7
    """Base of each request's own seed; null sends no seed."""


class EngineConfig(Section):
    """Engines that answer the requests."""

    kind: EngineKind = "embedded"
    count: Annotated[int, Field(ge=1)] | None = 1
    """Engines to start, one worker each. Null: as many as fit on the cluster's GPUs, and more as
    nodes join. An `endpoint` run has one worker per base URL instead."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 16
    """Requests in flight per engine. If not given, sglang uses the limit of the launch and the
    engine; 16 if neither has one."""
    base_urls: list[str] = []
    api_key_env: str | None = None
    """Environment variable with the endpoints' API key."""
    served_model_name: str | None = None
    """Model name on the server. Null: `model`."""
    context_length: Annotated[int, Field(ge=16)] | None = None
    """Tokens of prompt and completion together. Null: the server's own; embedded: 2048."""
    return_token_ids: bool = True
    """Request the engine's token ids. Turn off for a server that refuses unknown fields."""
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time limit of a request. Null: 60 s plus the time for `max_tokens` at `min_tokens_per_s`."""
    min_tokens_per_s: Annotated[float, Field(gt=0)] = 4.0
    ready_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time limit for the first good answer. Null: 120 s embedded, 20 s endpoint; sglang: no limit
    while the start makes progress."""
    start_silence_s: Annotated[float, Field(gt=0)] = 600.0
    """sglang: a start times out after this long without a change in log, CPU or disk counters."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """sglang: an engine with requests but no new token for this long is hung."""
    lost_after_s: Annotated[float, Field(gt=0)] = 60.0
    """An endpoint that does not answer for this long is abandoned."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one engine without a finished row in between."""
    max_consecutive_failures: Annotated[int, Field(ge=1)] = 500
    """Failed attempts in a row, without one answer, after which an engine is abandoned."""
    max_deaths_in_flight: Annotated[int, Field(ge=1)] = 3
    """A row that was in flight at this many deaths of its engine is retried alone at the end, and
    blamed for the next one. More than eight such rows are first retried in groups of sixteen."""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs that a worker reserves in Ray."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs that a worker reserves in Ray. Null: 1 for sglang, else 0."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of one embedded engine. Null: the machine's cores, shared equally."""
    model_file: str | None = None
    """GGUF file of the embedded engine. Null: SmolLM2-135M-Instruct from its wheel."""
    python: str | None = None
    """Python interpreter of the environment that SGLang is installed in."""
    command: list[str] = []
    """Command that starts SGLang's server instead, for example a container; flags are appended."""
    flags: list[str] = []
    """Flags of `sglang.launch_server`, as on its command line."""
    plan: EnginePlan = "auto"
    """auto: plan what `flags` leave open for the worker's card, and step down after a failed
    start; off: use `flags` as they are."""
    env: dict[str, str] = {}
    """Environment variables to set for the engine's process. Secrets are refused; export them."""
    pass_env: list[str] | None = None
    """Variables of the worker to pass to the engine, `NCCL_*` for a prefix. Null: all but
    PYTHONPATH. Variables that every process needs are always passed."""

    @field_validator("plan", mode="before")
    @classmethod
    def _off_from_yaml(cls, value: object) -> object:
        """Accept a bare `off`, which YAML reads as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _check_launch(self) -> Self:
        for name in ("env", "pass_env"):
            for variable in getattr(self, name) or ():
                if not re.fullmatch(_VARIABLE[name], variable):
                    # The value after the sign may be a secret.
                    shown = re.sub("=.*", "=…", variable, flags=re.DOTALL)
                    raise ValueError(f"{name}: found {shown!r}; expected the name of a variable")
        if self.flags and not self.flags[0].startswith("--"):
            raise ValueError(
                f"flags: found {self.flags[0]!r}; the first word must be a flag with --"
            )
        for variable in self.env:
            if _SECRET_NAME.search(variable):
                raise ValueError(
                    f"env: {variable} looks like a secret, and the run file is stored with the "
                    f"rows; export it instead, and list it in pass_env if that is given"
                )
        for word in self.flags:
            if word.partition("=")[0] in _OUR_FLAGS:
                # The value may be a key.
                raise ValueError(
                    f"flags: found {word.partition('=')[0]}; remove it, each worker sets its own"
                )
        if self.command and not self.command[0].strip():
            raise ValueError("command: the first word is empty; expected the program to start")
        return self

    @model_validator(mode="after")
    def _check_fields_of_kind(self) -> Self:
        _check_variable_name("api_key_env", self.api_key_env)
        if self.kind == "endpoint" and not self.base_urls:
            raise ValueError("base_urls: found none; kind 'endpoint' needs at least one URL")
        if self.kind != "endpoint" and self.base_urls:
            raise ValueError(
                f"base_urls: not for kind {self.kind!r}; remove them, or use kind 'endpoint'"
            )
        if self.kind == "sglang" and self.python is None and not self.command:
            raise ValueError(
                "python: found null; kind 'sglang' needs the path of an interpreter, or a command"
            )
        if self.python is not None and self.command:
            raise ValueError("command: found both command and python; give one of them")
        for url in self.base_urls:
            _check_url(url)
        if len({url.rstrip("/") for url in self.base_urls}) < len(self.base_urls):
            raise ValueError("base_urls: the same URL is listed twice; list each server once")
        if self.count is None and self.kind != "endpoint" and not self.gpus_per_worker:
            raise ValueError(
                "count: found null, but these engines use no GPUs to count by; give a number"
            )
        return self

    @property
    def num_workers(self) -> int | None:
        """Workers to start; None for as many as fit on the cluster."""
        return len(self.base_urls) if self.kind == "endpoint" else self.count

    @property
    def gpus_per_worker(self) -> int:
        if self.gpus is not None:
            return self.gpus
        return 1 if self.kind == "sglang" else 0


def _check_variable_name(field: str, name: str | None) -> None:
    # The value is not shown: it may be the secret itself.
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{field}: expected the name of an environment variable")


def _check_url(url: str) -> None:
    # Checked first, so that no other message shows the key.
    if "@" in url:
        raise ValueError("base_urls: a URL contains a user or key; use api_key_env instead")
    if "?" in url or "#" in url:
        raise ValueError(
            "base_urls: a URL contains '?' or '#'; remove that, and use api_key_env for a key"
        )
    if not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", url):
        raise ValueError(
            f"base_urls: found {url!r}; expected a URL with http:// or https:// and a host"
        )


class RetryConfig(Section):
    """Retries of requests that failed through no fault of their row."""

    max_attempts: Annotated[int, Field(ge=1)] = 6
    backoff_initial_s: Annotated[float, Field(ge=0)] = 0.5
    backoff_max_s: Annotated[float, Field(gt=0)] = 30.0
    retry_after_max_s: Annotated[float, Field(ge=0)] = 120.0
    """Longest Retry-After of a server that is honoured."""


class WorkConfig(Section):
    """Shards and leases."""

    shard_rows: Annotated[int, Field(ge=1)] = 64
    lease_ttl_s: Annotated[float, Field(ge=2)] = 60.0
    """A worker loses its leases after this long without a heartbeat."""
    max_shard_losses: Annotated[int, Field(ge=1)] = 10
    """Lost workers of one shard before its rows fail."""


class OutputConfig(Section):
    folder: str
    """A path that all nodes share, or a prefix in an object store: `s3://bucket/run`."""
    flush_interval_s: Annotated[float, Field(gt=0)] = 15.0


class ClusterConfig(Section):
    address: str | None = None
    """Address of Ray. Null: the cluster of the surrounding Ray job, else a new local Ray."""
    min_engines: Annotated[int, Field(ge=1)] = 1
    """Engines that must be ready before rows are leased; the others join when ready."""
    drain_timeout_s: Annotated[float, Field(gt=0)] = 2.0
    """Time to flush after SIGTERM. `ray job stop` kills after 3 s by default."""


class EventsConfig(Section):
    """Notices of the run's events."""

    webhook_env: Annotated[str, Field(min_length=1)] | None = None
    """Environment variable with the URL to post to. Null: no webhook."""

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        _check_variable_name("webhook_env", self.webhook_env)
        return self


class HardwareConfig(Section):
    """Cards of one kind in one machine, as an option for the planner."""

    gpu: Annotated[str, Field(min_length=1)]
    """Card of the catalogue, in any usual spelling."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of a card that is not in the catalogue, or instead of the catalogue's figure."""
    usd_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None
    """Your own price. Null: the catalogue's list prices."""
    spot_usd_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None


class LengthsConfig(Section):
    """Expected lengths in tokens. The limit is `sampling.max_tokens`."""

    prompt_tokens_mean: Annotated[float, Field(gt=0)] | None = None
    """Mean prompt. Null: counted on a sample of the prompts."""
    output_tokens_mean: Annotated[float, Field(gt=0)] | None = None
    """Mean completion, cut at the limit. Null: 2500 with thinking, 500 without, before the cut."""
    output_tokens_cv: Annotated[float, Field(ge=0, le=5)] | None = None
    """Standard deviation over mean. Null: 1.2 with thinking, 1.0 without."""
    output_tokens_column: str | None = None
    """Column of the prompts with the length of each completion in an earlier run."""


class EstimateConfig(Section):
    """Assumptions of the estimate beyond the plan."""

    accept_length: Annotated[float, Field(ge=1, le=16)] | None = None
    """Measured mean of tokens kept per verify step with `draft_tokens`. Null: 2.6 of 4, assumed."""
    draft_tokens: Annotated[int, Field(ge=2, le=16)] = 4
    storage_gb_per_s: Annotated[float, Field(gt=0)] = 1.0
    """Rate at which one replica reads its weights, in 10^9 bytes/s."""
    hours_between_preemptions: Annotated[float, Field(gt=0)] = 12.0
    """Mean time between preemptions of one spot node."""

    @model_validator(mode="after")
    def _check_accept_length(self) -> Self:
        if self.accept_length is not None and self.accept_length > self.draft_tokens:
            raise ValueError(
                f"accept_length: found {self.accept_length:g}; expected at most the "
                f"{self.draft_tokens} draft_tokens"
            )
        return self


class PlannerConfig(Section):
    """Options that `jobs.plan` may try. The last two switches can change the model's output."""

    sglang_version: str | None = None
    """Release to plan for. Null: the newest that the planner knows."""
    model_config_path: str | None = None
    """A config.json or its folder. Null: looked up by the model's name."""
    weights_format: str | None = None
    allow_mtp: bool = True
    allow_prefix_cache: bool = True
    allow_attention_dp: bool = True
    allow_pipeline: bool = True
    allow_kv_dtype: bool = False
    allow_state_dtype: bool = False


class RunFile(Section):
    """The whole run file. `prompts.path`, `model` and `output.folder` are required."""

    prompts: PromptsConfig
    model: Annotated[str, Field(min_length=1)]
    thinking: bool = True
    reasoning_in_history: bool = False
    """Send the reasoning of earlier turns back to the model."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Added to every request, after the model family's own argument for thinking."""
    sampling: SamplingConfig = SamplingConfig()
    samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    engine: EngineConfig = EngineConfig()
    retry: RetryConfig = RetryConfig()
    work: WorkConfig = WorkConfig()
    output: OutputConfig
    cluster: ClusterConfig = ClusterConfig()
    events: EventsConfig = EventsConfig()
    hardware: list[HardwareConfig] = []
    lengths: LengthsConfig = LengthsConfig()
    planner: PlannerConfig = PlannerConfig()
    estimate: EstimateConfig = EstimateConfig()
    quality: QualityConfig = QualityConfig()

    @model_validator(mode="after")
    def _check_min_engines(self) -> Self:
        most, least = self.engine.num_workers, self.cluster.min_engines
        if most is not None and least > most:
            raise ValueError(
                f"cluster.min_engines: found {least}; expected at most the run's {most} engines"
            )
        return self

    @property
    def most_completion_tokens(self) -> int:
        """Largest token budget of one request, including the last attempt of a cut turn."""
        quality = self.quality
        cut = (quality.cut_in_thinking, quality.cut_in_answer)
        # A turn that was cut and loops is retried for the loop, also with the larger budget.
        has_retries = any(flag.enabled and flag.policy == "retry" for flag in quality.flags())
        if not has_retries or not any(flag.enabled for flag in cut):
            return self.sampling.max_tokens
        growth = quality.budget_factor ** (quality.max_attempts - 1)
        return min(_MAX_INT32, int(self.sampling.max_tokens * growth))


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read the run file at `path` and apply `key.path=value` overrides.

    Raises ConfigError with one line per mistake: the file, the field, the value found, what is
    allowed, and for an unknown key the nearest known one.
    """
    values = _mapping(path)
    for override in overrides:
        _apply_override(values, override)
    try:
        return RunFile.model_validate(values)
    except ValidationError as error:
        lines = [f"{path}: {_mistake(details)}" for details in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def run_file_of(values: Mapping[str, object], source: str) -> RunFile:
    """Parse a run file from plain values. Raises ConfigError with one line per mistake."""
    try:
        return RunFile.model_validate(values)
    except ValidationError as error:
        lines = [f"{source}: {_mistake(details)}" for details in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def stored_run_file(text: bytes) -> RunFile | None:
    """Parse the run file that a session stored; None if a release with other keys wrote it."""
    try:
        return RunFile.model_validate_json(text)
    except ValidationError:
        return None


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML loader that refuses repeated keys, where the plain one keeps the last."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = str(super().construct_scalar(node))
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise yaml.constructor.ConstructorError(
                None, None, "text contains half of a surrogate pair", node.start_mark
            )
        return text

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # the plain loader reports it
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice; keep one", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


_MERGE_TAG = "tag:yaml.org,2002:merge"


def _parsed(text: str) -> object:
    """Parse YAML into plain values. Raises YAMLError, and no other error."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a subclass of SafeLoader
    except (ValueError, LookupError) as error:
        # The library does not catch errors of single values: 2026-02-30 looks like a date.
        raise yaml.YAMLError(f"a value that cannot be read: {error}") from None
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None


def _mapping(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the run file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from None
    try:
        values = _parsed(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}:{where} not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {_shown(values)}; expected a mapping of keys to values")
    return values


def _apply_override(values: dict[str, object], override: str) -> None:
    key_path, equals, text = override.partition("=")
    keys = key_path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: expected key=value, for example sampling.top_p=0.9")
    try:
        value = _parsed(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: the value is not valid YAML") from None
    section: dict[str, object] = values
    for depth, key in enumerate(keys[:-1], start=1):
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            found = ".".join(keys[:depth])
            raise ConfigError(f"--set {override}: {found} is {_shown(inner)}, not a section")
        section = inner
    section[keys[-1]] = value


def _mistake(details: ErrorDetails) -> str:
    loc = tuple(part for part in details["loc"] if part != "[key]")
    field = ".".join(str(part) for part in loc)
    kind, found = details["type"], details["input"]
    if kind == "extra_forbidden":
        return f"{field}: unknown key{_nearest_key(loc)}"
    if kind == "missing":
        return f"{field}: missing; this key has no default"
    if kind == "value_error":
        return f"{field}.{details['msg'].removeprefix('Value error, ')}".removeprefix(".")
    if kind == "model_type":
        return f"{field}: found {_shown(found)}; it should be a section with keys of its own"
    expected = details["msg"][0].lower() + details["msg"][1:]
    return f"{field}: found {_shown(found)}; {expected.replace('input should', 'it should')}"


def _nearest_key(loc: tuple[int | str, ...]) -> str:
    known = list(_section_at(loc[:-1]).model_fields)
    near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known keys: {', '.join(known)}"


def _section_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = RunFile
    for part in loc:
        annotation = section.model_fields[str(part)].annotation
        for candidate in (annotation, *get_args(annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                section = candidate
    return section


def _shown(value: object) -> str:
    text = repr(value) if value is not None else "null"
    if len(text) > _LONGEST_VALUE_SHOWN:
        text = text[: _LONGEST_VALUE_SHOWN - 3] + "..."
    return f"{text} ({type(value).__name__})" if value is not None else text
