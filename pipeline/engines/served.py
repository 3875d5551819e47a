"""The engines of a run: process, client and tokenizer put together behind one seam.

Three kinds answer a request in the same way. `embedded` and `sglang` own a process on loopback with
a key of its own; `endpoint` has an address and no power over what stands behind it.
"""

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pipeline.engines import embedded
from pipeline.engines.gpus import visible_cards
from pipeline.engines.health import StartWatch, Watch
from pipeline.engines.ladder import Again, Stop
from pipeline.engines.launch import LaunchHistory
from pipeline.engines.remedies import Step
from pipeline.engines.server import EngineProcess, free_port, installed_release, node_lock
from pipeline.errors import ConfigError, EngineError, EngineGivenUpError
from pipeline.models.thinking import family, template_kwargs
from pipeline.models.tokenizer import TokenCounter, gguf_token_counter, model_token_counter
from pipeline.planner.sglang.failures import Cause, failure_cause
from pipeline.planner.sglang.metrics import engine_load
from pipeline.run_file import check_launch
from pipeline.store.bucket import open_folder
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.config import RunFile
from schemas.progress import Supply
from schemas.prompt import Longest, Message, Request, SamplingParams, most_tokens

if TYPE_CHECKING:
    from pipeline.engines.client import ChatClient

_READY_TIMEOUT_S = {"embedded": 120.0, "endpoint": 20.0, "sglang": float("inf")}
# sglang: a large checkpoint from a cold network disk and kernels compiled on first use take hours
# on bad days, so that silence is timed, not the start.
_READY_POLL_S = 0.1
_LIFE_POLL_S = 5.0
_BUSY_SILENCE_FACTOR = 6.0
# assumed: a compiler may burn CPU for an hour without a line; ranks that wait for a lost peer too
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
    log: Callable[[str], None] = print
    longest_prompts: Longest | None = None
    """The run's prompts by their turns, where they are known: what the context has to hold."""
    _launch: LaunchHistory | None = None
    _effective_requests: int | None = None
    _watch: Watch | None = None
    _hung: str | None = None
    _answers: int = 0
    _answers_at_start: int = 0
    _is_ready: bool = False
    _trial_tokens: int | None = None
    """What the first question took, the chat template's own tokens with it."""
    _process: EngineProcess | None = None
    _client: "ChatClient | None" = None
    _start_watch: StartWatch = field(init=False)
    _next_look_s: float = 0.0
    _scratch: Path | None = None
    _counter: TokenCounter | None = field(default=None)

    @property
    def max_running_requests(self) -> int:
        """What the engine says that it runs at once, else what the run file wishes."""
        return self._effective_requests or self.config.engine.max_running_requests

    @property
    def plan(self) -> str | None:
        return self._launch.text if self._launch is not None and self._launch.is_begun else None

    @property
    def starved(self) -> str | None:
        """What the engine is short of, where it runs far fewer requests than it could."""
        return self._watch.shortage if self._watch is not None else None

    @property
    def card(self) -> str | None:
        """The planner's name of the card that it was planned for."""
        if self._launch is None or self._launch.setting is None or self._launch.setting.gpu is None:
            return None
        return self._launch.setting.gpu.name

    async def start(self) -> None:
        """Return when a request can be answered.

        Raises EngineError when the engine ends or stays silent, and EngineGivenUpError when no
        other start will help.
        """
        if self.config.engine.kind == "sglang":
            await self._start_on_the_ladder()
            return
        await self.stop()
        if self.config.engine.kind == "embedded":
            await self._start_embedded()
        else:
            await self._open_endpoint()
        await self._wait_until_ready()

    async def generate(self, request: Request) -> Outcome:
        if self._client is None:
            return Interruption(cause="the engine is not started", connection_failed=True)
        outcome = await self._client.generate(request)
        self._answers += not isinstance(outcome, Interruption)
        return outcome

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

    async def trouble(self, supply: Supply) -> str | None:
        """Why an engine of ours that seems to run has to be started again, or None."""
        if self.config.engine.kind != "sglang" or self._watch is None or self._client is None:
            return None
        if self._process is not None and not self._process.is_running:
            return "its process is gone"
        page = await self._client.page("/metrics")
        metrics, now_s = engine_load(page) if page else None, monotonic()
        self._hung = self._watch.observe_hang(
            now_s=now_s, metrics=metrics, in_flight=supply.in_flight, answers=self._answers
        )
        cap = self.max_running_requests
        short = self._watch.observe_starvation(now_s=now_s, metrics=metrics, supply=supply, cap=cap)
        if short is not None:
            power = await asyncio.to_thread(_power_text)
            self.log(f"event=starved engine={self.worker_number} why={short!r}{power}")
        return self._hung

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
        self._is_ready = False
        self._watch = None
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

    async def _start_on_the_ladder(self) -> None:
        """Start SGLang; after a failure as the ladder says, until it runs or nothing is left."""
        launch = self._launch = self._launch or self._new_launch()
        if self._is_ready:
            cause, text = self._cause()
            if self._answers > self._answers_at_start:
                launch.note_served()
            await self.stop()
            await self._heed(launch.note_end(cause, text))
        await self.stop()
        if not launch.is_begun:
            if self.config.engine.python is not None:
                python = self.config.engine.python
                told = await asyncio.to_thread(installed_release, python)
                launch.release = told or launch.release
            launch.begin(await asyncio.to_thread(visible_cards))
        while True:
            try:
                async with self._turn_on_this_node():
                    await self._start_sglang(launch)
                    await self._wait_until_ready()
                    if not launch.lengthen_context(self._trial_tokens):
                        await self._note_figures(launch)
                        return
                await self.stop()
            except EngineError as error:
                if self._process is None:
                    raise EngineGivenUpError(str(error)) from None
                cause, text = self._cause()
                if cause.kind in ("unknown", "killed") and self._process.is_running:
                    cause = _silent(str(error), cause)
                await self.stop()
                await self._heed(launch.note_end(cause, text))

    async def _heed(self, answer: Again | Step | Stop) -> None:
        if isinstance(answer, Stop):
            raise EngineGivenUpError(answer.reason)
        if isinstance(answer, Again):
            await asyncio.sleep(answer.wait_s)

    def _cause(self) -> tuple[Cause, str]:
        """Why the engine ended or has to end, and the log that tells it."""
        assert self._process is not None
        text, status = self._process.log_text(), self._process.status
        cause = failure_cause(text, status=status, kernel_kills=self._process.kernel_kills)
        if self._hung is not None and cause.kind in ("unknown", "killed"):
            cause = _silent(self._hung, cause)
        self._hung = None
        return cause, text

    def _new_launch(self) -> LaunchHistory:
        release = self.config.planner.sglang_version
        folder = open_folder(self.config.output.folder)
        return LaunchHistory(
            config=self.config,
            folder=folder,
            log=self.log,
            release=release,
            longest_prompts=self.longest_prompts,
        )

    async def _start_sglang(self, launch: LaunchHistory) -> None:
        engine, port = self.config.engine, free_port()
        key = secrets.token_hex(24)  # no dash at its beginning, which a parser takes for a flag
        address = ["--host", "127.0.0.1", "--port", str(port), "--api-key", key]
        served = ["--served-model-name", engine.served_model_name or self.config.model]
        given = launch.arguments()
        ours = [*served, *address]
        self._process = EngineProcess(
            command=[
                *(engine.command or [str(engine.python), "-m", "sglang.launch_server"]),
                *("--model-path", self.config.model),
                *_without_given(ours, given),
                *given,
                *([] if "--enable-metrics" in given else ["--enable-metrics"]),
            ],
            # Ray numbers cards as the driver does; CUDA's own default puts the fastest first.
            env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **engine.env},
            log_path=self.log_path,
            secret=key,
            pass_env=engine.pass_env,
        )
        process, self._process = self._process, None
        process.start()
        self._process = process
        self.name = "sglang"
        self._client = self._chat_client(f"http://127.0.0.1:{port}/v1", key)
        self._start_watch = StartWatch(
            silence_s=engine.start_silence_s,
            busy_silence_s=engine.start_silence_s * _BUSY_SILENCE_FACTOR,
        )

    async def _note_figures(self, launch: LaunchHistory) -> None:
        """Read what the engine settled for, and keep so many requests in flight."""
        from pipeline.engines.client import most_in_flight

        assert self._client is not None
        assert self._process is not None
        page = await self._client.page("/server_info")
        page = page or await self._client.page("/get_server_info")
        text = await asyncio.to_thread(self._process.log_text)
        effective = launch.note_up(text, _mapping(page))
        self._effective_requests = min(effective, most_in_flight())
        self._watch = Watch(hang_timeout_s=self.config.engine.hang_timeout_s)
        self._answers_at_start, self._is_ready = self._answers, True

    @asynccontextmanager
    async def _turn_on_this_node(self) -> AsyncIterator[None]:
        """Until one engine has come up here, starts wait for each other.

        The first fetches the model and compiles its kernels; the others find both in the caches.
        """
        key = f"{self.config.model}|{self.config.engine.python}|{self.config.engine.command}"
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"regenerate-{os.getuid()}"
        warm = folder / f"{name}.{self.config.output.folder.replace('/', '_')[-80:]}.warm"
        while not warm.exists():
            with node_lock(folder / f"{name}.lock") as is_held:
                if is_held:
                    yield
                    warm.touch()
                    return
            await asyncio.sleep(_READY_POLL_S * 5)
        yield

    async def _open_endpoint(self) -> None:
        engine = self.config.engine
        url = engine.base_urls[self.worker_number].rstrip("/")
        self.name = "endpoint"
        self._client = self._chat_client(url, endpoint_key(self.config))

    async def _wait_until_ready(self) -> None:
        """Until a real completion came back."""
        from pipeline.engines.client import server_release

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
        if self.config.engine.kind == "sglang":
            # A step down may have cut what the run file gives.
            self.context_length = facts.context_length or self.context_length
        self.release = self.release or await server_release(
            self._client.base_url, self._client.api_key
        )
        if self._process is not None:
            await self._first_answer(deadline_s)

    async def _first_answer(self, deadline_s: float) -> None:
        """An engine of ours is ready when it has generated; its health page proves less."""
        while True:
            outcome = await self._outcome_of_trial(deadline_s)
            if isinstance(outcome, Turn):
                self._trial_tokens = outcome.prompt_tokens
                return
            why = outcome.text if isinstance(outcome, Refusal) else outcome.cause
            if isinstance(outcome, Refusal):
                raise EngineError(f"the engine refuses a trial request: {why}")
            self._check_process(deadline_s, why)
            await asyncio.sleep(_READY_POLL_S)

    async def _outcome_of_trial(self, deadline_s: float) -> Outcome:
        """A first answer may compile kernels for long: the process is watched meanwhile."""
        trial = asyncio.create_task(self.generate(_TRIAL))
        try:
            while True:
                done, _ = await asyncio.wait({trial}, timeout=_LIFE_POLL_S)
                if done:
                    return trial.result()
                self._check_process(deadline_s, "the first request is not answered")
        finally:
            trial.cancel()
            await asyncio.gather(trial, return_exceptions=True)

    def _check_process(self, deadline_s: float, last_error: str = "it does not listen") -> None:
        if self._process is not None and not self._process.is_running:
            raise EngineError(self._process.how_it_ended())
        if monotonic() > deadline_s:
            raise EngineError(f"not ready within {self._ready_timeout_s:.0f} s: {last_error}")
        if self.config.engine.kind == "sglang":
            self._check_life(last_error)

    def _check_life(self, last_error: str) -> None:
        """Raises EngineError when nothing of a starting engine moves any more."""
        assert self._process is not None
        now_s = monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + min(_LIFE_POLL_S, self.config.engine.start_silence_s / 4)
        seen = self._process.activity()
        silence_s = self._start_watch.silence(
            now_s=now_s, log_bytes=seen.log_bytes, io_bytes=seen.io_bytes, cpu_ticks=seen.cpu_ticks
        )
        if silence_s is not None:
            raise EngineError(f"no sign of life for {silence_s:.0f} s at its start: {last_error}")

    @property
    def _ready_timeout_s(self) -> float:
        engine = self.config.engine
        return engine.ready_timeout_s or _READY_TIMEOUT_S[engine.kind]

    def _chat_client(self, base_url: str, key: str) -> "ChatClient":
        # The driver checks engines and asks none: it starts 0.3 s sooner without the library.
        from pipeline.engines.client import ChatClient

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
    """The deadline of one request: long enough for the largest budget at the slowest rate."""
    engine = config.engine
    if engine.request_timeout_s is not None:
        return engine.request_timeout_s
    return _DEADLINE_BASE_S + config.most_completion_tokens / engine.min_tokens_per_s


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
    if engine.kind != "sglang":
        return
    if engine.python is not None and not Path(engine.python).exists():
        raise ConfigError(f"engine.python: no file {engine.python}")
    check_launch(config)


def _without_given(ours: list[str], flags: list[str]) -> list[str]:
    """Our flag-value pairs less those that the run file gives itself; address and key stay ours."""
    given = {flag.partition("=")[0] for flag in flags}
    pairs = zip(ours[::2], ours[1::2], strict=True)
    return [text for pair in pairs if pair[0] not in given for text in pair]


def _silent(told: str, cause: Cause) -> Cause:
    """An engine that has to be ended although its log names nothing."""
    return Cause(kind="watchdog", stage=cause.stage, summary=told, evidence=cause.evidence)


def _mapping(page: str | None) -> dict[str, Any]:
    try:
        values = json.loads(page or "{}")
    except json.JSONDecodeError:
        # A page of that name that is no JSON tells nothing.
        return {}
    return values if isinstance(values, dict) else {}


def _power_text() -> str:
    """What the cards draw of what they may, where they tell it."""
    told = [
        card.power_w / card.power_limit_w
        for card in visible_cards()
        if card.power_w is not None and card.power_limit_w
    ]
    return f" power={sum(told) / len(told):.0%}" if told else ""
