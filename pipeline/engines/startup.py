"""Start an engine's process and wait, while it shows signs of life, for its first answer.

An engine of ours is ready when it has generated; its health page proves less.
"""

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from pipeline.engines import embedded
from pipeline.engines.health import StartWatch
from pipeline.engines.process.command import start_of_program, through_launcher
from pipeline.engines.process.environment import passed_environment
from pipeline.engines.process.node import node_lock
from pipeline.engines.process.port import EnginePort, free_port
from pipeline.engines.process.server import EngineProcess
from pipeline.errors import EngineError, EngineUnfitError
from pipeline.models.files import has_weights
from pipeline.store.own_folder import own_temporary_folder
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.config.engine import EngineConfig
from schemas.config.run_file import RunFile
from schemas.prompt import Message, Request, SamplingParams

if TYPE_CHECKING:
    from pipeline.engines.client import ChatClient

# A large checkpoint from a cold network disk and kernels compiled on first use take hours on bad
# days, so SGLang's silence is timed and not its start.
_READY_TIMEOUT_S = {"embedded": 120.0, "endpoint": 20.0, "sglang": float("inf")}
_READY_POLL_S = 0.1
# A server that is overloaded is not asked more often.
_TRIAL_POLL_S = {"embedded": 0.1, "endpoint": 1.0, "sglang": 0.1}
# assumed: a model of 1 TB arrives in two to three hours
_NODE_PATIENCE_S = 4 * 3600.0
_NODE_REPORT_S = 300.0
_NODE_POLL_S = 0.5
_LIFE_POLL_S = 5.0
# assumed: a compiler may use the CPU for an hour without a line, as do ranks that wait for a lost
# peer
_BUSY_SILENCE_FACTOR = 6.0

TRIAL = Request(
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


# --- starting a process -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Base URL of an engine, and the key that it accepts."""

    base_url: str
    api_key: str
    port: EnginePort | None = None
    """Port of an engine of ours; an endpoint is the user's own to trust."""


def start_sglang(
    config: RunFile, flags: Sequence[str], log_path: Path
) -> tuple[EngineProcess, Address]:
    """Start SGLang's server on a free port. Raises EngineError when its command does not exist."""
    engine, number = config.engine, free_port()
    # Hexadecimal: a parser would take a leading dash for a flag.
    key = secrets.token_hex(24)
    command = engine.command or [str(engine.python), "-m", "sglang.launch_server"]
    name = ["--served-model-name", engine.served_model_name or config.model]
    address = ["--host", "127.0.0.1", "--port", str(number)]
    program_at = start_of_program(command) if engine.command else 1
    if program_at is not None:
        command = through_launcher(command, program_at)
    else:
        # A container's process is started by another; nothing but the command line reaches it.
        address += ["--api-key", key]
    process = EngineProcess(
        command=[
            *command,
            *("--model-path", config.model),
            *_without_given([*name, *address], flags),
            *flags,
            *([] if "--enable-metrics" in flags else ["--enable-metrics"]),
        ],
        # Ray numbers cards as the driver does; CUDA's own default puts the fastest first.
        env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **engine.env},
        log_path=log_path,
        secret=key,
        inherited=_inherited(config, has_model=has_weights(config.model)),
    )
    process.start()
    return process, _address(process, number, accepts_user=engine.listener == "user")


def _inherited(config: RunFile, *, has_model: bool) -> dict[str, str]:
    ours = (config.engine.api_key_env, config.events.webhook_env)
    return passed_environment(
        os.environ,
        config.engine.pass_env,
        withheld=[name for name in ours if name],
        has_model=has_model,
    )


def _address(process: EngineProcess, port: int, *, accepts_user: bool = False) -> Address:
    return Address(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key=process.secret,
        port=EnginePort(number=port, processes=process.processes, accepts_user=accepts_user),
    )


def _without_given(ours: list[str], flags: Sequence[str]) -> list[str]:
    """Return our flag-value pairs less those that the run file gives itself."""
    given = {flag.partition("=")[0] for flag in flags}
    pairs = zip(ours[::2], ours[1::2], strict=True)
    return [text for pair in pairs if pair[0] not in given for text in pair]


def start_embedded(config: RunFile, address_file: Path, log_path: Path) -> EngineProcess:
    """Start llama.cpp's server, which writes its address to a file."""
    process = EngineProcess(
        command=embedded.command(config.engine, model=config.model, address_file=address_file),
        env=config.engine.env,
        log_path=log_path,
        secret=secrets.token_hex(24),
        inherited=_inherited(config, has_model=True),
    )
    process.start()
    return process


def embedded_address(process: EngineProcess, url: str) -> Address:
    """Return the address that llama.cpp's server wrote, for example `http://127.0.0.1:4711`."""
    return _address(process, int(url.rpartition(":")[2]))


@asynccontextmanager
async def first_on_this_node(config: RunFile, log: Callable[[str], None]) -> AsyncIterator[None]:
    """Let one engine start at a time until one has come up on this node.

    The first downloads the model and compiles its kernels; the others find both in the caches.
    A turn that does not come for hours is no longer waited for. Raises ConfigError where another
    user has taken the folder of the locks.
    """
    key = f"{config.model}|{config.engine.python}|{config.engine.command}"
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = own_temporary_folder()
    warm = folder / f"{name}.{config.output.folder.replace('/', '_')[-80:]}.warm"
    began_s = monotonic()
    report_at_s = began_s + _NODE_REPORT_S
    while not warm.exists() and monotonic() < began_s + _NODE_PATIENCE_S:
        with node_lock(folder / f"{name}.lock") as is_held:
            if is_held:
                yield
                warm.touch()
                return
        if monotonic() > report_at_s:
            waited_s, report_at_s = monotonic() - began_s, report_at_s + _NODE_REPORT_S
            log(f"event=start_waits waited_s={waited_s:.0f} lock={str(folder / name)!r}")
        await asyncio.sleep(_NODE_POLL_S)
    yield


# --- waiting until it answers -------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class StartProbe:
    """Wait for one start to answer, for as long as its process shows signs of life."""

    config: EngineConfig
    process: EngineProcess | None
    """Process to watch; an endpoint has none."""
    _began_s: float = field(default_factory=monotonic)
    _watch: StartWatch = field(init=False)
    _next_look_s: float = 0.0

    def __post_init__(self) -> None:
        silence_s = self.config.start_silence_s
        self._watch = StartWatch(
            silence_s=silence_s, busy_silence_s=silence_s * _BUSY_SILENCE_FACTOR
        )

    async def written(self, file: Path) -> str:
        """Wait for a file that the engine writes. Raises EngineError as `check` does."""
        while (text := _text_if_written(file)) is None:
            self.check("it does not listen")
            await asyncio.sleep(_READY_POLL_S)
        return text

    async def held(self, port: EnginePort) -> None:
        """Wait until the engine listens on its port. Raises EngineError as `check` does.

        Raises PortTakenError when somebody else listens there.
        """
        while not await asyncio.to_thread(port.is_held):
            self.check("it does not listen")
            await asyncio.sleep(_READY_POLL_S)

    async def context_length(self, client: "ChatClient") -> int | None:
        """Wait until the server lists its models. Raises EngineError as `check` does."""
        while True:
            try:
                return await client.context_length()
            except EngineError as error:
                self.check(str(error))
                await asyncio.sleep(_READY_POLL_S)

    async def first_turn(self, client: "ChatClient") -> Turn:
        """Wait for a real completion. Raises EngineError when it is refused, or as `check` does."""
        while True:
            outcome = await self._trial_outcome(client)
            if isinstance(outcome, Turn):
                return outcome
            if isinstance(outcome, Refusal):
                raise EngineError(f"the engine refuses a trial request: {outcome.text}")
            if outcome.kind == "breach":
                raise EngineUnfitError(outcome.cause)
            self.check(outcome.cause)
            await asyncio.sleep(min(_TRIAL_POLL_S[self.config.kind], self._timeout_s))

    async def _trial_outcome(self, client: "ChatClient") -> Outcome:
        """Send one request and watch the process meanwhile: it may compile kernels for long."""
        trial = asyncio.create_task(client.generate(TRIAL))
        try:
            while True:
                done, _ = await asyncio.wait({trial}, timeout=_LIFE_POLL_S)
                if done:
                    return trial.result()
                self.check("the first request is not answered")
        finally:
            trial.cancel()
            await asyncio.gather(trial, return_exceptions=True)

    @property
    def _timeout_s(self) -> float:
        return self.config.ready_timeout_s or _READY_TIMEOUT_S[self.config.kind]

    def check(self, last_error: str) -> None:
        """Raise EngineError when the process has ended, is late, or shows no sign of life."""
        if self.process is not None and not self.process.is_running:
            raise EngineError(self.process.how_it_ended())
        if monotonic() - self._began_s > self._timeout_s:
            raise EngineError(f"not ready within {self._timeout_s:.0f} s: {last_error}")
        if self.process is not None and self.config.kind == "sglang":
            self._check_life(self.process, last_error)

    def _check_life(self, process: EngineProcess, last_error: str) -> None:
        now_s = monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + min(_LIFE_POLL_S, self.config.start_silence_s / 4)
        silence_s = self._watch.silence(process.activity(), now_s)
        if silence_s is not None:
            raise EngineError(f"no sign of life for {silence_s:.0f} s at its start: {last_error}")


# --- while it serves ----------------------------------------------------------------------------


@dataclass(slots=True)
class Trial:
    """A short request that tells an engine that is slow from one that hangs. One at a time."""

    _client: "ChatClient"
    _sent: "asyncio.Task[Outcome] | None" = None

    async def is_answered(self, within_s: float) -> bool:
        """Return whether the server says anything to it in time, be it that it is busy."""
        if self._sent is None or self._sent.done():
            self._sent = asyncio.create_task(self._client.generate(TRIAL))
        await asyncio.wait({self._sent}, timeout=within_s)
        if not self._sent.done():
            return False
        outcome = self._sent.result()
        return not (isinstance(outcome, Interruption) and outcome.connection_failed)

    async def cancel(self) -> None:
        if self._sent is not None:
            self._sent.cancel()
            await asyncio.gather(self._sent, return_exceptions=True)


def _text_if_written(file: Path) -> str | None:
    return file.read_text() if file.exists() else None
