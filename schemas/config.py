"""What the user asks for: the run file, read safely and validated.

Every key is known, typed and bounded here; an unknown key is refused. The models are frozen: a
run file is resolved once and then only read. This module knows nothing of what is done with it.
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
_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
# The widths in which the output's `sampling` column holds these figures.
_VARIABLE = {"env": r"[^=\s*\0]+", "pass_env": r"[^=\s*\0]+\*?|\*"}
_SECRET_NAME = re.compile(r"(?i)(^|_)(token|secret|password|api_?key|access_?key)$")
_OUR_FLAGS = frozenset({"--host", "--port", "--api-key"})


def is_url(where: str) -> bool:
    """Whether it is the URL of a place in an object store and no path."""
    return "://" in where


class PromptsConfig(Section):
    """Where the prompts are and which columns they stand in."""

    path: str
    """A parquet or JSON-lines file, a folder of them, a saved data set, or a hub name.

    A file or folder may be in an object store: `s3://bucket/prompts.parquet`.
    """
    name: str | None = None
    """The configuration of a hub data set."""
    split: str = "train"
    column: str | None = None
    """Recognised when null: `messages`, `conversations` or `prompt`, in this order."""
    shape: PromptShape | None = None
    """How `column` is to be read. Null: by the column's name, else by its values."""
    system_prompt: str | None = None
    """Put in front of every conversation that has no system turn of its own."""
    system_column: str | None = None
    """A column with each row's system prompt. Null: `system_prompt` or `system` if present."""
    id_column: str | None = None
    """Null: rows are named by a hash of their content."""
    keep_columns: list[str] = []
    limit: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _kept_columns_differ(self) -> Self:
        if len(set(self.keep_columns)) < len(self.keep_columns):
            raise ValueError("keep_columns: the same column stands there twice")
        return self


class SamplingConfig(Section):
    """Passed to the engine with every request; null leaves the engine's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.6
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = 20
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT32)] = 4096
    seed: Annotated[int, Field(ge=0, le=_MAX_INT64)] | None = 7
    """Each request's own seed is derived from it; null sends none."""


class EngineConfig(Section):
    """What answers the requests, and how many of it."""

    kind: EngineKind = "embedded"
    count: Annotated[int, Field(ge=1)] | None = 1
    """Engines to start, one worker each. Null: as many as the cluster's GPUs hold, and more when
    nodes join. An `endpoint` run has one worker a base URL instead."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 16
    """Requests in flight, per engine. sglang: where it is not given, what the launch and the
    engine say; 16 where neither does."""
    base_urls: list[str] = []
    api_key_env: str | None = None
    """Name of the environment variable that holds the endpoints' key."""
    served_model_name: str | None = None
    """The name that the server knows the model by. Null: `model`."""
    context_length: Annotated[int, Field(ge=16)] | None = None
    """Tokens of prompt and completion together. Null: as the server says; embedded: 2048."""
    return_token_ids: bool = True
    """Ask for the engine's own token ids. Turn off for a server that refuses unknown fields."""
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Null: 60 s and `max_tokens` at `min_tokens_per_s`."""
    min_tokens_per_s: Annotated[float, Field(gt=0)] = 4.0
    ready_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time to the first good answer. Null: 120 s embedded, 20 s endpoint; sglang as long as it
    shows life."""
    start_silence_s: Annotated[float, Field(gt=0)] = 600.0
    """sglang: a start whose log, CPU and disk counters stand still for so long is given up."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """sglang: an engine with requests and without a new token for so long is hung."""
    lost_after_s: Annotated[float, Field(gt=0)] = 60.0
    """An endpoint that does not answer for so long is given up."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Starts of one engine of ours that may follow without a finished row between."""
    max_consecutive_failures: Annotated[int, Field(ge=1)] = 500
    """Failed tries in a row, without one answer, after which an engine is given up."""
    max_deaths_in_flight: Annotated[int, Field(ge=1)] = 3
    """A row in flight at so many deaths of its engine is tried alone, at the end, and blamed for
    the next. Where more than eight are, they are tried sixteen at a time before that."""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs a worker claims from Ray."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs a worker claims from Ray. Null: 1 for sglang, else 0."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of one embedded engine. Null: the machine's cores shared out."""
    model_file: str | None = None
    """A GGUF file for the embedded engine. Null: SmolLM2-135M-Instruct from its wheel."""
    python: str | None = None
    """The interpreter that SGLang is installed in."""
    command: list[str] = []
    """What starts SGLang's server instead, a container for example; flags are put behind it."""
    flags: list[str] = []
    """Flags of `sglang.launch_server`, as on its command line."""
    plan: EnginePlan = "auto"
    """auto: what `flags` leave open is planned for the card that the worker has, and a failed
    start steps down; off: `flags` as they are, and nothing else."""
    env: dict[str, str] = {}
    """Environment variables to set for the engine's process. No secrets: they come by name."""
    pass_env: list[str] | None = None
    """Variables of the worker that the engine may see, `NCCL_*` for a prefix. Null: all but
    PYTHONPATH. What a process cannot do without is always passed."""

    @field_validator("plan", mode="before")
    @classmethod
    def _off_is_a_word_here(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _launch_can_be_started_so(self) -> Self:
        for name in ("env", "pass_env"):
            for variable in getattr(self, name) or ():
                if not re.fullmatch(_VARIABLE[name], variable):
                    # Without what follows the sign: it may be a secret.
                    shown = re.sub("=.*", "=…", variable, flags=re.DOTALL)
                    raise ValueError(f"{name}: found {shown!r}; expected a variable's name")
        if self.flags and not self.flags[0].startswith("--"):
            raise ValueError(f"flags: found {self.flags[0]!r}; a flag begins with --")
        for variable in self.env:
            if _SECRET_NAME.search(variable):
                raise ValueError(
                    f"env: {variable} is a secret by its name, and the run file is kept with the "
                    f"rows; export it instead, and name it in pass_env where that is given"
                )
        for word in self.flags:
            if word.partition("=")[0] in _OUR_FLAGS:
                # Without its value: it may be a key.
                raise ValueError(
                    f"flags: found {word.partition('=')[0]}; each worker sets it for its engine"
                )
        if self.command and not self.command[0].strip():
            raise ValueError("command: its first word is empty; it names what is started")
        return self

    @model_validator(mode="after")
    def _kinds_have_what_they_need(self) -> Self:
        _check_variable_name("api_key_env", self.api_key_env)
        if self.kind == "endpoint" and not self.base_urls:
            raise ValueError("base_urls: found none; kind 'endpoint' needs at least one URL")
        if self.kind != "endpoint" and self.base_urls:
            raise ValueError(f"base_urls: only for kind 'endpoint'; this is kind {self.kind!r}")
        if self.kind == "sglang" and self.python is None and not self.command:
            raise ValueError(
                "python: found null; kind 'sglang' needs the interpreter's path, or a command"
            )
        if self.python is not None and self.command:
            raise ValueError("command: found one beside python; give one of them")
        for url in self.base_urls:
            _check_url(url)
        if len({url.rstrip("/") for url in self.base_urls}) < len(self.base_urls):
            raise ValueError("base_urls: the same URL stands there twice")
        if self.count is None and self.kind != "endpoint" and not self.gpus_per_worker:
            raise ValueError("count: found null, which counts by GPUs; these engines claim none")
        return self

    @property
    def num_workers(self) -> int | None:
        """None: as many as the cluster holds."""
        return len(self.base_urls) if self.kind == "endpoint" else self.count

    @property
    def gpus_per_worker(self) -> int:
        if self.gpus is not None:
            return self.gpus
        return 1 if self.kind == "sglang" else 0


def _check_variable_name(field: str, name: str | None) -> None:
    # What was found is not shown: it may be the secret itself.
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{field}: it should be the name of an environment variable")


def _check_url(url: str) -> None:
    # First of all, so that no other message shows the key.
    if "@" in url:
        raise ValueError("base_urls: a URL holds a user or key; name it in api_key_env")
    if "?" in url or "#" in url:
        raise ValueError("base_urls: a URL ends before '?'; a key is named in api_key_env")
    if not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", url):
        raise ValueError(
            f"base_urls: found {url!r}; each starts with http:// or https:// and a host"
        )


class RetryConfig(Section):
    """Tries of one request that failed through no fault of its row."""

    max_attempts: Annotated[int, Field(ge=1)] = 6
    backoff_initial_s: Annotated[float, Field(ge=0)] = 0.5
    backoff_max_s: Annotated[float, Field(gt=0)] = 30.0
    retry_after_max_s: Annotated[float, Field(ge=0)] = 120.0
    """The longest wait that a server's Retry-After is granted."""


class WorkConfig(Section):
    """How rows are handed out."""

    shard_rows: Annotated[int, Field(ge=1)] = 64
    lease_ttl_s: Annotated[float, Field(ge=2)] = 60.0
    """A worker silent for so long has lost its leases."""
    max_shard_losses: Annotated[int, Field(ge=1)] = 10
    """Times that a shard may lose its worker before its rows are set aside as failed."""


class OutputConfig(Section):
    folder: str
    """A path that every node sees, or a prefix in an object store: `s3://bucket/run`."""
    flush_interval_s: Annotated[float, Field(gt=0)] = 15.0


class ClusterConfig(Section):
    address: str | None = None
    """Null: the cluster of the Ray job that this is part of, else a local Ray of its own."""
    min_engines: Annotated[int, Field(ge=1)] = 1
    """Engines that must be ready before rows are handed out; the others join when they are."""
    drain_timeout_s: Annotated[float, Field(gt=0)] = 2.0
    """Time to flush after SIGTERM. `ray job stop` kills after 3 s unless it is told otherwise."""


class EventsConfig(Section):
    """Who is told of what happens to the run."""

    webhook_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable that holds the URL to post to. Null: nobody is told."""

    @model_validator(mode="after")
    def _it_is_a_name(self) -> Self:
        _check_variable_name("webhook_env", self.webhook_env)
        return self


class HardwareConfig(Section):
    """Cards of one kind in one machine, for the planner to choose among."""

    gpu: Annotated[str, Field(min_length=1)]
    """A card of the catalogue, in any usual spelling."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Instead of the catalogue's figure, or for a card that it lacks."""
    usd_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None
    """Your own price. Null: the catalogue's listed prices."""
    spot_usd_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None


class LengthsConfig(Section):
    """Lengths to expect, in tokens. The limit is `sampling.max_tokens`."""

    prompt_tokens_mean: Annotated[float, Field(gt=0)] | None = None
    """Null: counted from a sample of the prompts."""
    output_tokens_mean: Annotated[float, Field(gt=0)] | None = None
    """Of completions as written, cut at the limit. Null: 2500 thinking, 500 not, before the cut."""
    output_tokens_cv: Annotated[float, Field(ge=0, le=5)] | None = None
    """Standard deviation over mean. Null: 1.2 thinking, 1.0 not."""
    output_tokens_column: str | None = None
    """A column of the prompts that holds the length of each completion, from an earlier run."""


class EstimateConfig(Section):
    """What the estimate assumes beyond the plan."""

    accept_length: Annotated[float, Field(ge=1, le=16)] | None = None
    """Tokens that a verify step keeps with `draft_tokens`, measured. Null: 2.6 of 4, assumed."""
    draft_tokens: Annotated[int, Field(ge=2, le=16)] = 4
    storage_gb_per_s: Annotated[float, Field(gt=0)] = 1.0
    """10^9 bytes a second at which one replica's weights are read."""
    hours_between_preemptions: Annotated[float, Field(gt=0)] = 12.0
    """Of one node on spot."""

    @model_validator(mode="after")
    def _no_more_is_kept_than_drafted(self) -> Self:
        if self.accept_length is not None and self.accept_length > self.draft_tokens:
            raise ValueError(
                f"accept_length: found {self.accept_length:g}; it must not exceed the "
                f"{self.draft_tokens} draft_tokens"
            )
        return self


class PlannerConfig(Section):
    """What `jobs.plan` may try. The last two switches can change what the model writes."""

    sglang_version: str | None = None
    """Null: the newest release that the planner knows."""
    model_config_path: str | None = None
    """A config.json or its folder. Null: found by the model's name."""
    weights_format: str | None = None
    allow_mtp: bool = True
    allow_prefix_cache: bool = True
    allow_attention_dp: bool = True
    allow_pipeline: bool = True
    allow_kv_dtype: bool = False
    allow_state_dtype: bool = False


class RunFile(Section):
    """The whole run file. `prompts.path`, `model` and `output.folder` have no default."""

    prompts: PromptsConfig
    model: Annotated[str, Field(min_length=1)]
    thinking: bool = True
    reasoning_in_history: bool = False
    """Feed the reasoning of earlier turns back to the model."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Added to every request, after the model family's own word for thinking."""
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
    def _enough_engines_can_come(self) -> Self:
        most, least = self.engine.num_workers, self.cluster.min_engines
        if most is not None and least > most:
            raise ValueError(f"cluster.min_engines: found {least}; the run has {most} engines")
        return self

    @property
    def most_completion_tokens(self) -> int:
        """The largest budget of one request, that of the last try of a cut turn included."""
        quality = self.quality
        cut = (quality.cut_in_thinking, quality.cut_in_answer)
        # A turn that was cut and loops is asked again for the loop, and has the larger budget too.
        asks_again = any(flag.enabled and flag.policy == "retry" for flag in quality.flags())
        if not asks_again or not any(flag.enabled for flag in cut):
            return self.sampling.max_tokens
        growth = quality.budget_factor ** (quality.max_attempts - 1)
        return min(_MAX_INT32, int(self.sampling.max_tokens * growth))


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """The run file at `path` with `key.path=value` overrides applied.

    Raises ConfigError with a line for each mistake: the file, the field, what was found, what is
    allowed, and the nearest known key for an unknown one.
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
    """A run file that was kept as plain values. Raises ConfigError, a line for each mistake."""
    try:
        return RunFile.model_validate(values)
    except ValidationError as error:
        lines = [f"{source}: {_mistake(details)}" for details in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def kept_run_file(text: bytes) -> RunFile | None:
    """Parse the run file that a session kept; None where a release with other keys wrote it."""
    try:
        return RunFile.model_validate_json(text)
    except ValidationError:
        return None


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where the plain loader keeps the last."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = str(super().construct_scalar(node))
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise yaml.constructor.ConstructorError(
                None, None, "text with half of a surrogate pair", node.start_mark
            )
        return text

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # the plain loader says so
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_MERGE_TAG = "tag:yaml.org,2002:merge"


def _parsed(text: str) -> object:
    """Plain values. Raises YAMLError alone."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a subclass of SafeLoader
    except (ValueError, LookupError) as error:
        # The library lets through what reading a value raises: 2026-02-30 looks like a date.
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
