"""An engine of the run: its process, client and tokenizer behind one interface.

Three kinds answer a request alike. `embedded` and `sglang` own a process on loopback with a key of
its own; `endpoint` has an address and cannot restart what runs there.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pipeline.chat_template.rendering import ChatTemplate, prompt_text
from pipeline.chat_template.source import NoTemplate, gguf_template, launch_template
from pipeline.engines import embedded
from pipeline.engines.gpus import visible_cards
from pipeline.engines.health import Watch
from pipeline.engines.ladder import Again, Stop
from pipeline.engines.launch import LaunchHistory
from pipeline.engines.process.server import EngineProcess, installed_release
from pipeline.engines.startup import (
    TRIAL,
    Address,
    StartProbe,
    embedded_address,
    first_on_this_node,
    start_embedded,
    start_sglang,
)
from pipeline.engines.vitals import Vitals, vitals_of
from pipeline.errors import (
    ConfigError,
    EngineError,
    EngineGivenUpError,
    EngineUnfitError,
    PortTakenError,
)
from pipeline.models.files import end_token_ids
from pipeline.models.thinking import THINK, facts_by_name
from pipeline.models.tokenizer import (
    TokenCounter,
    gguf_token_counter,
    model_token_counter,
    model_token_texts,
)
from pipeline.planner.sglang.failures import Cause, failure_cause
from pipeline.planner.sglang.metrics import engine_load
from pipeline.planner.sglang.wordings import CauseKind
from pipeline.run_file import check_launch
from pipeline.store.bucket import open_folder
from pipeline.untrusted.parsing import UnreadableError, json_object
from schemas.chat_template import TemplateFacts
from schemas.completion import Interruption, Outcome
from schemas.config.run_file import RunFile
from schemas.plan import EngineTrial
from schemas.progress import Supply
from schemas.prompt import Longest, Message, Request, most_tokens
from schemas.session import Breach

if TYPE_CHECKING:
    from pipeline.engines.client import ChatClient
    from pipeline.engines.wire.continuing import Continuing
    from pipeline.engines.wire.contract import Contract, KnownModel


@dataclass(slots=True, kw_only=True)
class ServedEngine:
    """Engine of one worker; `start` may be called again after the engine was lost."""

    config: RunFile
    worker_number: int
    log_path: Path
    name: str = ""
    release: str | None = None
    context_length: int | None = None
    log: Callable[[str], None] = print
    template: TemplateFacts | None = None
    """Facts of the model's chat template; None: those of its name."""
    longest_prompts: Longest | None = None
    """Longest prompts by number of turns, which the context has to hold; None if unknown."""
    accepted_breaches: frozenset[Breach] = frozenset()
    """Faults of its first answers with which the run goes on."""
    _launch: LaunchHistory | None = None
    _effective_requests: int | None = None
    _process: EngineProcess | None = None
    _client: "ChatClient | None" = None
    _counter: TokenCounter | None = None
    _vitals: Vitals = field(init=False)

    def __post_init__(self) -> None:
        self._vitals = vitals_of(self.config, self.worker_number, self.log)

    @property
    def max_running_requests(self) -> int:
        """Requests that the engine reports to run at once, else those of the run file."""
        return self._effective_requests or self.config.engine.max_running_requests

    @property
    def where(self) -> str:
        """Address of an endpoint, or the engine's name."""
        engine = self.config.engine
        return engine.base_urls[self.worker_number] if engine.kind == "endpoint" else self.name

    @property
    def plan(self) -> str | None:
        """Launch flags of an SGLang engine, once they are chosen."""
        return self._launch.text if self._launch is not None and self._launch.is_begun else None

    @property
    def starved(self) -> str | None:
        """Shortage of an engine that runs far fewer requests than it could."""
        return self._vitals.watch.shortage if self._vitals.watch is not None else None

    @property
    def card(self) -> str | None:
        """The planner's name of the card that the engine was planned for."""
        return self._launch.card if self._launch is not None else None

    @property
    def trial(self) -> EngineTrial | None:
        """Plans that an SGLang engine may try, and the one that it runs."""
        return self._launch.trial if self._launch is not None else None

    async def start(self) -> None:
        """Return when a request can be answered.

        Raises EngineError when the engine ends or stays silent, and EngineGivenUpError when no
        other start will help.
        """
        match self.config.engine.kind:
            case "sglang":
                await self._start_sglang()
            case "embedded":
                await self.stop()
                await self._start_embedded()
            case "endpoint":
                await self.stop()
                await self._open_endpoint()

    async def generate(self, request: Request) -> Outcome:
        """Send one request; an engine that is not started interrupts it."""
        if self._client is None:
            return Interruption(cause="the engine is not started", connection_failed=True)
        return await self._vitals.send(self._client, request)

    async def probe(self, request: Request | None, *, within_s: float) -> Outcome | None:
        """Send a request, or a short one of ours. Return None when it is accepted and takes longer.

        The request is cancelled then, and its answer lost.
        """
        sending = asyncio.create_task(self.generate(request or TRIAL))
        try:
            await asyncio.wait({sending}, timeout=within_s)
            return sending.result() if sending.done() else None
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def fitted(self, request: Request) -> Request:
        """Return the request, without its first part where this engine cannot continue it."""
        return request if self._client is None else self._client.fitted(request)

    async def abort_all(self) -> bool:
        """End all requests with what they have. Return False where that is nothing."""
        return self._client is not None and await self._client.abort_all()

    async def is_alive(self) -> bool:
        """Return whether the process runs and the server answers."""
        if self._client is None or (self._process is not None and not self._process.is_running):
            return False
        if self._vitals.is_hung:
            return False
        try:
            await self._client.context_length()
        except EngineError:
            return False
        return True

    async def metrics_page(self) -> str | None:
        """Return an SGLang engine's metrics page; an endpoint's would count other users too."""
        if self.config.engine.kind != "sglang" or self._client is None:
            return None
        return await self._client.page("/metrics")

    async def trouble(self, supply: Supply) -> str | None:
        """Return why an engine that seems to run must be restarted, or None."""
        watch, client = self._vitals.watch, self._client
        if watch is None or client is None:
            return None
        if self._process is not None and not self._process.is_running:
            return "its process is gone"
        match self.config.engine.kind:
            case "endpoint":
                return await self._vitals.silence(supply)
            case "embedded":
                assert self._process is not None
                ticks = self._process.activity().cpu_ticks
                return self._vitals.standstill(supply, cpu_ticks=ticks)
            case "sglang":
                return await self._trouble_of_sglang(watch, client, supply)

    async def _trouble_of_sglang(
        self, watch: Watch, client: "ChatClient", supply: Supply
    ) -> str | None:
        page = await client.page("/metrics")
        load, now_s = engine_load(page) if page else None, monotonic()
        watch.observe_hang(now_s=now_s, load=load, in_flight=supply.in_flight)
        shortage = watch.observe_starvation(
            now_s=now_s, load=load, supply=supply, cap=self.max_running_requests
        )
        if shortage is not None:
            power = await asyncio.to_thread(_power_text)
            self.log(f"event=starved engine={self.worker_number} why={shortage!r}{power}")
        return watch.hang

    def prompt_tokens_at_least(self, messages: Sequence[Message]) -> int:
        """Return a lower bound of the prompt's tokens: its texts by the model's tokenizer, or 0.

        Texts that fit by their bytes alone are not counted.
        """
        if self.context_length is None or most_tokens(messages) <= self.context_length:
            return 0
        if self._counter is None:
            self._counter = token_counter(self.config)
        if not self._counter.is_exact:
            return 0
        try:
            return sum(self._counter.count_text(message.content) for message in messages)
        except ConfigError:
            # The model's own tokenizer fails on this text; the server says what it makes of it.
            return 0

    def use_plan(self, words: Sequence[str]) -> None:
        """Have the next start of an SGLang engine try other flags, once it is stopped."""
        if self._launch is not None:
            self._launch.try_plan(words)

    async def stop(self) -> None:
        """Close the client and end the process."""
        await self._vitals.end()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._process is not None:
            await self._process.stop()
            self._process = None

    # -- endpoint and embedded

    async def _open_endpoint(self) -> None:
        self.name = "endpoint"
        url = self.config.engine.base_urls[self.worker_number].rstrip("/")
        self._client = self._new_client(Address(base_url=url, api_key=endpoint_key(self.config)))
        probe = self._new_probe()
        await self._read_server(probe, self._client)
        if self._vitals.is_hung:
            # Its pages answer all the while.
            await probe.first_turn(self._client)
            self._vitals.is_hung = False
        self._vitals.begin(self._client)

    async def _start_embedded(self) -> None:
        self.name, self.release = "llama.cpp", embedded.release()
        with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "address"
            self._process = start_embedded(self.config, file, self.log_path)
            probe = self._new_probe()
            address = embedded_address(self._process, await probe.written(file))
        self._client = await self._client_of_own(probe, address)
        await self._read_server(probe, self._client)
        await probe.first_turn(self._client)
        self._vitals.begin(self._client)

    async def _read_server(self, probe: StartProbe, client: "ChatClient") -> None:
        served, configured = await probe.context_length(client), self.config.engine.context_length
        self.context_length = configured or served
        if self.config.engine.kind == "sglang":
            # A step down may have cut the run file's context.
            self.context_length = served or configured
        self.release = self.release or await client.release()
        await _note_server(client, self.release)

    # -- SGLang

    async def _start_sglang(self) -> None:
        """Start SGLang; after a failure follow the ladder until it runs or nothing is left."""
        launch = self._launch = self._launch or self._new_launch()
        if self._vitals.watch is not None:
            if self._vitals.watch.num_answers:
                launch.note_served()
            await self._follow_failure(launch, self._vitals.watch.hang)
        await self.stop()
        if not launch.is_begun:
            await self._begin(launch)
        while not await self._came_up(launch):
            continue

    def _new_launch(self) -> LaunchHistory:
        return LaunchHistory(
            config=self.config,
            folder=open_folder(self.config.output.folder),
            log=self.log,
            release=self.config.planner.sglang_version,
            longest_prompts=self.longest_prompts,
        )

    async def _begin(self, launch: LaunchHistory) -> None:
        python = self.config.engine.python
        if python is not None:
            installed = await asyncio.to_thread(installed_release, python)
            launch.release = installed or launch.release
        launch.begin(await asyncio.to_thread(visible_cards))

    async def _came_up(self, launch: LaunchHistory) -> bool:
        """Start once. Return False when another start is due, after a failure or not."""
        try:
            async with first_on_this_node(self.config, self.log):
                self._process, address = start_sglang(
                    self.config, launch.arguments(), self.log_path
                )
                self.name, probe = "sglang", self._new_probe()
                self._client = await self._client_of_own(probe, address)
                await self._read_server(probe, self._client)
                trial = await probe.first_turn(self._client)
                if not launch.lengthen_context(trial.prompt_tokens):
                    await self._note_up(launch, self._process, self._client)
                    return True
            await self.stop()
        except EngineUnfitError:
            raise
        except EngineError as error:
            if self._process is None:
                raise EngineGivenUpError(str(error)) from None
            kind: CauseKind = "port" if isinstance(error, PortTakenError) else "watchdog"
            symptom = str(error) if self._process.is_running else None
            await self._follow_failure(launch, symptom, kind)
        return False

    async def _note_up(
        self, launch: LaunchHistory, process: EngineProcess, client: "ChatClient"
    ) -> None:
        """Read what the engine settled for, and limit the requests in flight to it."""
        from pipeline.engines.wire.transport import raise_file_limit

        page = await client.page("/server_info") or await client.page("/get_server_info")
        text = await asyncio.to_thread(process.log_text)
        effective = launch.note_up(text, _mapping(page))
        self._effective_requests = min(effective, raise_file_limit())
        self._vitals.begin(client)

    async def _follow_failure(
        self, launch: LaunchHistory, symptom: str | None, kind: CauseKind = "watchdog"
    ) -> None:
        """End the engine and do what the ladder says. Raises EngineGivenUpError at its end."""
        assert self._process is not None
        cause, text = _failure(self._process, symptom, kind)
        await self.stop()
        match launch.note_end(cause, text, now_s=monotonic()):
            case Stop(reason=reason):
                raise EngineGivenUpError(reason)
            case Again(wait_s=wait_s):
                await asyncio.sleep(wait_s)

    # -- parts

    def _new_probe(self) -> StartProbe:
        return StartProbe(config=self.config.engine, process=self._process)

    async def _client_of_own(self, probe: StartProbe, address: Address) -> "ChatClient":
        """Return a client once the engine's own process listens at its address."""
        assert address.port is not None
        await probe.held(address.port)
        return self._new_client(address)

    def _new_client(self, address: Address) -> "ChatClient":
        # The driver checks engines and never calls one: it starts 0.3 s sooner without the library.
        from pipeline.engines.client import ChatClient

        config, engine = self.config, self.config.engine
        facts = self.template or facts_by_name(config.model)
        kwargs = facts.thinking_kwargs(thinking=config.thinking)
        return ChatClient(
            base_url=address.base_url,
            api_key=address.api_key,
            model=engine.served_model_name or config.model,
            template_kwargs={**kwargs, **config.chat_template_kwargs},
            opens_in_prompt=facts.opens_thinking(thinking=config.thinking),
            return_token_ids=engine.return_token_ids and engine.kind != "embedded",
            timeout_s=config.request_timeout_s,
            further_fields=config.request,
            template=facts,
            continuing=_continuing(config, self._launch, facts, self.log),
            check_peer=address.port.check if address.port is not None else None,
            contract=contract_with(config, facts, accepted=self.accepted_breaches, log=self.log),
        )


def _continuing(
    config: RunFile, launch: LaunchHistory | None, facts: TemplateFacts, log: Callable[[str], None]
) -> "Continuing | None":
    """Return what continues turns on an SGLang engine; None for others."""
    from pipeline.engines.wire.continuing import Continuing

    engine = config.engine
    if engine.kind != "sglang" or not engine.return_token_ids:
        return None
    flags = launch.flags if launch is not None else None
    drafted = flags.number("speculative-num-draft-tokens") if flags is not None else None
    return Continuing(
        model=config.model,
        tags=facts.tags or THINK,
        tokens_per_step=max(1, drafted or 1),
        further_fields=config.request,
        log=log,
    )


def _failure(process: EngineProcess, symptom: str | None, kind: CauseKind) -> tuple[Cause, str]:
    """Return the cause of a failure and the log that shows it.

    The symptom, of the given kind, counts where the log names no cause, as with an engine that
    hangs.
    """
    text, status = process.log_text(), process.status
    cause = failure_cause(text, status=status, kernel_kills=process.kernel_kills)
    if symptom is not None and cause.kind in ("unknown", "killed"):
        evidence = (symptom, *cause.evidence)
        cause = Cause(kind=kind, stage=cause.stage, summary=symptom, evidence=evidence)
    return cause, text


def _mapping(page: str | None) -> dict[str, Any]:
    try:
        return json_object(page or "{}")
    except UnreadableError:
        # Another page of that name.
        return {}


async def _note_server(client: "ChatClient", release: str | None) -> None:
    """Note the release and, of SGLang, the parser of the thinking for the checks of answers."""
    if client.contract is None:
        return
    client.contract.release = release
    if (release or "").startswith("sglang"):
        parser = _mapping(await client.page("/server_info")).get("reasoning_parser")
        client.contract.reasoning_parser = parser if isinstance(parser, str) else None


def _power_text() -> str:
    """Print the cards' power draw as a share of their limits, where they report it."""
    shares = [
        card.power_w / card.power_limit_w
        for card in visible_cards()
        if card.power_w is not None and card.power_limit_w
    ]
    return f" power={sum(shares) / len(shares):.0%}" if shares else ""


# --- what the run file says of its engines ------------------------------------------------------


def endpoint_key(config: RunFile) -> str:
    """Return the endpoints' key. Raises ConfigError when its environment variable is not set."""
    name = config.engine.api_key_env
    if name is None:
        return "none"
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"engine.api_key_env: the environment has no variable {name}")
    return key


def token_counter(config: RunFile) -> TokenCounter:
    """Return a counter with the tokenizer of the model that the engine runs."""
    if config.engine.kind == "embedded":
        return gguf_token_counter(embedded.model_file(config.engine))
    return model_token_counter(config.model)


def chat_template(config: RunFile) -> ChatTemplate | NoTemplate:
    """Find the chat template that the engines use. Raises ConfigError for one that is damaged."""
    if config.engine.kind == "embedded":
        return gguf_template(embedded.model_file(config.engine))
    flags = config.engine.flags if config.engine.kind == "sglang" else []
    return launch_template(config.model, flags)


def contract_with(
    config: RunFile,
    facts: TemplateFacts,
    *,
    accepted: frozenset[Breach],
    log: Callable[[str], None],
) -> "Contract | None":
    """Return the checks of a server's first answers; None for the engine of this project."""
    from pipeline.engines.wire.contract import Contract

    if config.engine.kind == "embedded":
        return None
    return Contract(
        wants_token_ids=config.engine.return_token_ids,
        requires_prompt_ids=config.engine.kind != "endpoint",
        read_model=lambda: known_model(config),
        tags=facts.tags or THINK,
        has_further_fields=bool(config.request),
        accepted=accepted,
        log=log,
    )


def known_model(config: RunFile) -> "KnownModel":
    """Read what is on this machine of the model that a server should run."""
    from pipeline.engines.wire.contract import KnownModel

    end_ids, texts = end_token_ids(config.model), model_token_texts(config.model)
    # Without the tokenizer, the template may not be on this machine either.
    template = chat_template(config) if texts is not None else None
    if not isinstance(template, ChatTemplate):
        return KnownModel(texts=texts, end_ids=end_ids)
    return KnownModel(texts=texts, end_ids=end_ids, prompt_of=partial(prompt_text, template))


def check_engine(config: RunFile) -> None:
    """Check the engine section before anything starts. Raises ConfigError."""
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
    if engine.python is not None and not os.access(engine.python, os.X_OK):
        raise ConfigError(f"engine.python: {engine.python} is not executable")
    check_launch(config)
