"""The engines of a run: process, client and tokenizer put together behind one seam.

Three kinds answer a request in the same way. `embedded` and `sglang` own a process on loopback with
a key of its own; `endpoint` has an address and no power over what stands behind it.
"""

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from pipeline.engines import embedded
from pipeline.engines.client import ChatClient, server_release
from pipeline.engines.server import EngineProcess, free_port
from pipeline.engines.thinking import family, template_kwargs
from pipeline.engines.tokens import (
    TokenCounter,
    gguf_token_counter,
    model_token_counter,
    most_tokens,
)
from pipeline.errors import ConfigError, EngineError
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.config import RunFile
from schemas.prompt import Message, Request, SamplingParams

_READY_TIMEOUT_S = {"embedded": 120.0, "endpoint": 20.0, "sglang": 1800.0}
# sglang: a large checkpoint from a cold network disk, and kernels compiled on first use.
_READY_POLL_S = 0.1
_DEADLINE_BASE_S = 60.0


@dataclass(slots=True, kw_only=True)
class ServedEngine:
    """One engine of the run. `start` may be called again after the engine was lost."""

    config: RunFile
    worker_number: int
    log_path: Path
    name: str = ""
    release: str | None = None
    context_length: int | None = None
    _process: EngineProcess | None = None
    _client: ChatClient | None = None
    _scratch: Path | None = None
    _counter: TokenCounter | None = field(default=None)

    @property
    def max_running_requests(self) -> int:
        return self.config.engine.max_running_requests

    async def start(self) -> None:
        """Return when a request can be answered.

        Raises EngineError when the engine ends or stays silent for `ready_timeout_s`.
        """
        await self.stop()
        kind = self.config.engine.kind
        starting = {
            "embedded": self._start_embedded,
            "sglang": self._start_sglang,
            "endpoint": self._open_endpoint,
        }
        await starting[kind]()
        await self._wait_until_ready()

    async def generate(self, request: Request) -> Outcome:
        if self._client is None:
            return Interruption(cause="the engine is not started", connection_failed=True)
        return await self._client.generate(request)

    async def is_alive(self) -> bool:
        """Whether the engine could still answer: its process runs, its address takes calls."""
        if self._client is None or (self._process is not None and not self._process.is_running):
            return False
        try:
            await self._client.facts()
        except EngineError:
            return False
        return True

    async def metrics_page(self) -> str | None:
        """The counters of an engine of ours that has such a page; an endpoint serves others too."""
        if self.config.engine.kind != "sglang" or self._client is None:
            return None
        return await self._client.page("/metrics")

    def prompt_tokens_at_least(self, messages: Sequence[Message]) -> int:
        """A lower bound of the prompt's tokens: the texts by the model's tokenizer, or 0.

        Texts that fit whatever the tokenizer says are not counted.
        """
        if self.context_length is None or most_tokens(messages) <= self.context_length:
            return 0
        if self._counter is None:
            self._counter = token_counter(self.config)
        if not self._counter.is_exact:
            return 0
        return sum(self._counter.count_text(message.content) for message in messages)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._process is not None:
            await self._process.stop()
            self._process = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    # -- starting

    async def _start_embedded(self) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="engine-"))
        address_file, key = self._scratch / "address", secrets.token_urlsafe(24)
        engine = self.config.engine
        self._process = EngineProcess(
            command=embedded.command(engine, model=self.config.model, address_file=address_file),
            env={**engine.env, "EMBEDDED_API_KEY": key},
            log_path=self.log_path,
            secret=key,
        )
        self._process.start()
        deadline_s = monotonic() + self._ready_timeout_s
        while not address_file.exists():
            self._check_process(deadline_s)
            await asyncio.sleep(_READY_POLL_S)
        self.name, self.release = "llama.cpp", embedded.release()
        self._client = self._chat_client(f"{address_file.read_text()}/v1", key)

    async def _start_sglang(self) -> None:
        engine, port, key = self.config.engine, free_port(), secrets.token_urlsafe(24)
        address = ["--host", "127.0.0.1", "--port", str(port), "--api-key", key]
        served = ["--served-model-name", engine.served_model_name or self.config.model]
        running = ["--max-running-requests", str(engine.max_running_requests)]
        length = ["--context-length", str(engine.context_length)] if engine.context_length else []
        ours = [*served, *running, *length, *address]
        self._process = EngineProcess(
            command=[
                str(engine.python),
                *("-m", "sglang.launch_server", "--model-path", self.config.model),
                *_without_given(ours, engine.flags),
                *engine.flags,
            ],
            env=engine.env,
            log_path=self.log_path,
            secret=key,
        )
        self._process.start()
        self.name = "sglang"
        self._client = self._chat_client(f"http://127.0.0.1:{port}/v1", key)

    async def _open_endpoint(self) -> None:
        engine = self.config.engine
        url = engine.base_urls[self.worker_number].rstrip("/")
        self.name = "endpoint"
        self._client = self._chat_client(url, endpoint_key(self.config))

    async def _wait_until_ready(self) -> None:
        assert self._client is not None
        deadline_s = monotonic() + self._ready_timeout_s
        while True:
            try:
                facts = await self._client.facts()
                break
            except EngineError as error:
                self._check_process(deadline_s, str(error))
                await asyncio.sleep(_READY_POLL_S)
        self.context_length = self.config.engine.context_length or facts.context_length
        self.release = self.release or await server_release(
            self._client.base_url, self._client.api_key
        )
        if self._process is not None:
            await self._first_answer(deadline_s)

    async def _first_answer(self, deadline_s: float) -> None:
        """An engine of ours is ready when it has generated; its health page proves less."""
        while True:
            outcome = await self.generate(_TRIAL)
            if isinstance(outcome, Turn):
                return
            why = outcome.text if isinstance(outcome, Refusal) else outcome.cause
            if isinstance(outcome, Refusal):
                raise EngineError(f"the engine refuses a trial request: {why}")
            self._check_process(deadline_s, why)
            await asyncio.sleep(_READY_POLL_S)

    def _check_process(self, deadline_s: float, last_error: str = "it does not listen") -> None:
        if self._process is not None and not self._process.is_running:
            raise EngineError(self._process.how_it_ended())
        if monotonic() > deadline_s:
            raise EngineError(f"not ready within {self._ready_timeout_s:.0f} s: {last_error}")

    @property
    def _ready_timeout_s(self) -> float:
        engine = self.config.engine
        return engine.ready_timeout_s or _READY_TIMEOUT_S[engine.kind]

    def _chat_client(self, base_url: str, key: str) -> ChatClient:
        config, engine = self.config, self.config.engine
        kwargs = template_kwargs(config.model, thinking=config.thinking)
        return ChatClient(
            base_url=base_url,
            api_key=key,
            model=engine.served_model_name or config.model,
            template_kwargs={**kwargs, **config.chat_template_kwargs},
            opens_in_prompt=config.thinking and family(config.model).opens_in_prompt,
            return_token_ids=engine.return_token_ids and engine.kind != "embedded",
            timeout_s=request_timeout_s(config),
        )


_TRIAL = Request(
    row_id="trial",
    sample_index=0,
    turn_index=0,
    messages=(Message(role="user", content="Say hello."),),
    sampling=SamplingParams(
        temperature=0.6,
        top_p=0.95,
        top_k=None,
        min_p=None,
        presence_penalty=None,
        repetition_penalty=None,
        max_tokens=2,
        seed=None,
    ),
)


def request_timeout_s(config: RunFile) -> float:
    """The deadline of one request: long enough for `max_tokens` at the slowest rate allowed for."""
    engine = config.engine
    if engine.request_timeout_s is not None:
        return engine.request_timeout_s
    return _DEADLINE_BASE_S + config.sampling.max_tokens / engine.min_tokens_per_s


def endpoint_key(config: RunFile) -> str:
    """The endpoints' key from the environment. Raises ConfigError when the variable is not set."""
    name = config.engine.api_key_env
    if name is None:
        return "none"
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"engine.api_key_env: the environment has no variable {name}")
    return key


def token_counter(config: RunFile) -> TokenCounter:
    if config.engine.kind == "embedded":
        return gguf_token_counter(embedded.model_file(config.engine))
    return model_token_counter(config.model)


def check_engine(config: RunFile) -> None:
    """What can be known to be wrong before anything starts. Raises ConfigError."""
    engine = config.engine
    if engine.kind == "embedded":
        embedded.release()
        embedded.model_file(engine)
    if engine.kind == "endpoint":
        endpoint_key(config)
    if engine.kind == "sglang" and not Path(str(engine.python)).exists():
        raise ConfigError(f"engine.python: no file {engine.python}")


def _without_given(ours: list[str], flags: list[str]) -> list[str]:
    """Our flag-value pairs less those that the run file gives itself; address and key stay ours."""
    given = {flag.partition("=")[0] for flag in flags}
    pairs = zip(ours[::2], ours[1::2], strict=True)
    return [text for pair in pairs if pair[0] not in given for text in pair]
