"""The section `engine`: which engines answer the requests, and how they are started."""

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from schemas.config.section import PathText, Section

EngineKind = Literal["embedded", "endpoint", "sglang"]
EnginePlan = Literal["auto", "off"]
EngineListener = Literal["own", "user"]
_VARIABLE = {"env": r"[^=\s*\0]+", "pass_env": r"[^=\s*\0]+\*?|\*"}
_SECRET_NAME = re.compile(r"(?i)(^|_)(token|secret|password|api_?key|access_?key)$")
_OUR_FLAGS = frozenset({"--host", "--port", "--api-key"})


class TrialConfig(Section):
    """Bounds of a trial of launch plans."""

    plans: Annotated[int, Field(ge=2, le=16)] = 4
    """Distinct plans, the one that the forecast ranks first included."""
    minutes: Annotated[float, Field(gt=0)] = 20.0
    """Longest time to read the rate of one plan."""


class EngineConfig(Section):
    """Engines that answer the requests."""

    kind: EngineKind = "embedded"
    """`embedded`: llama.cpp with a small model; `endpoint`: servers that are running;
    `sglang`: SGLang, which the worker starts, watches and stops."""
    count: Annotated[int, Field(ge=1)] | None = 1
    """Engines to start, one worker each. Null: as many as fit on the cluster's GPUs, and more as
    nodes join. An `endpoint` run has one worker per base URL instead."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 16
    """Requests in flight per engine. If not given, sglang uses the limit of the launch and the
    engine; 16 if neither has one."""
    base_urls: list[str] = []
    """endpoint: servers, one worker each, for example `http://127.0.0.1:30000/v1`."""
    api_key_env: str | None = None
    """Environment variable with the endpoints' API key."""
    served_model_name: str | None = None
    """Model name on the server. Null: `model`."""
    context_length: Annotated[int, Field(ge=16)] | None = None
    """Tokens of prompt and completion together. Null: the server's own; embedded: 2048."""
    return_token_ids: bool = True
    """Request the engine's token ids. Turn off for a server that has none: a run stops at its first
    answers without them."""
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time limit of a request. Null: 60 s plus the time for `max_tokens` at `min_tokens_per_s`, and
    longer, up to 16 times, for an engine that shows a slower rate."""
    min_tokens_per_s: Annotated[float, Field(gt=0)] = 4.0
    """Slowest generation of one request, for `request_timeout_s`, until the engine's own rate is
    known."""
    ready_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time limit for the first good answer. Null: 120 s embedded, 20 s endpoint; sglang: no limit
    while the start makes progress."""
    start_silence_s: Annotated[float, Field(gt=0)] = 600.0
    """sglang: a start times out after this long without a change in log, CPU or disk counters."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """An engine with requests is hung if for this long it has made no token (sglang), used no CPU
    (embedded), or answered nothing, not even a short request (endpoint)."""
    outage_patience_s: Annotated[float, Field(gt=0)] = 21_600.0
    """Longest wait for an engine that is busy or away: an endpoint that does not answer, or any
    engine that answers 429 or 503. Its rows go to others meanwhile."""
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
    model_file: PathText | None = None
    """GGUF file of the embedded engine. Null: SmolLM2-135M-Instruct from its wheel."""
    python: PathText | None = None
    """Python interpreter of the environment that SGLang is installed in."""
    command: list[str] = []
    """Command that starts SGLang's server instead, for example a container; flags are appended."""
    listener: EngineListener = "own"
    """Processes that may listen on the port of an engine that is started, and get its key and the
    prompts. own: its own; user: any of this user or of root, such as a container's, which `command`
    only asks for."""
    flags: list[str] = []
    """Flags of `sglang.launch_server`, as on its command line."""
    plan: EnginePlan = "auto"
    """auto: plan what `flags` leave open for the worker's card, and step down after a failed
    start; off: use `flags` as they are."""
    trial: TrialConfig | None = None
    """sglang with `plan: auto`: try the best plans of the search while the run goes on, one engine
    at a time, and have engines of the same card take over the fastest where that pays. A run that
    is too short to repay a trial has none. `{plans: 4, minutes: 20}`: plans to compare, and the
    longest time to read one; `auto`: these. Null or `off`: keep the forecast's first plan."""
    env: dict[str, str] = {}
    """Environment variables to set for the engine's process. Secrets are refused; export them."""
    pass_env: list[str] | None = None
    """Variables of the worker to pass to the engine, `NCCL_*` for a prefix, `*` for all. Null: all
    but PYTHONPATH and secrets; HF_TOKEN until the model is on disk. Variables that every process
    needs are always passed."""

    @field_validator("trial", mode="before")
    @classmethod
    def _trial_by_name(cls, value: object) -> object:
        """Accept `auto`, and `off`, which YAML reads as false."""
        if value == "auto":
            return {}
        if value in ("off", False, None):
            return None
        return value

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
        check_variable_name("api_key_env", self.api_key_env)
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
    def trial_plans(self) -> int:
        """Plans to choose from; 1 without a trial."""
        return self._bounds.plans if self._bounds is not None else 1

    @property
    def longest_reading_s(self) -> float | None:
        """Longest time to read the rate of a plan; None without a trial."""
        return self._bounds.minutes * 60 if self._bounds is not None else None

    @property
    def _bounds(self) -> TrialConfig | None:
        return self.trial if self.kind == "sglang" and self.plan == "auto" else None

    @property
    def gpus_per_worker(self) -> int:
        if self.gpus is not None:
            return self.gpus
        return 1 if self.kind == "sglang" else 0


def check_variable_name(field: str, name: str | None) -> None:
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
    try:
        # Reading the port checks it.
        has_port_zero = urlsplit(url).port == 0
    except ValueError:
        has_port_zero = True
    if has_port_zero:
        raise ValueError(f"base_urls: found {url!r}; expected a host, and a port from 1 to 65535")
