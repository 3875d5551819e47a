"""Checks of what a run needs, before anything is started: endpoints, folder, disk, seed.

A refused key or another model is the user's to fix. An endpoint that does not answer may come up
later: a run waits for it, and a dry run reports it.
"""

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.engines.served import endpoint_key
from pipeline.errors import ConfigError
from pipeline.run_file import users_flags
from pipeline.store.folder import Folder
from pipeline.untrusted.parsing import UnreadableError, json_object
from schemas.config.run_file import RunFile
from schemas.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.engines.wire.pages import Offer

# Flags with which SGLang uses a request's seed: sampling_batch_info.py and server_args.py, 0.5.23.
_SEEDED_FLAGS = ("enable-deterministic-inference", "rl-on-policy-target")
# assumed: four bytes of text and four of token id; compression leaves room for the prompts
_BYTES_PER_TOKEN = 8

_SEED_IGNORED = (
    "sampling.seed: SGLang ignores it without --enable-deterministic-inference, so a row that is "
    "generated again gets another answer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """Findings about the endpoints of a run."""

    silent: tuple[str, ...] = ()
    """A line for each endpoint that does not answer."""
    num_endpoints: int = 0
    ignores_seed: bool = False
    """An endpoint is an SGLang server that ignores seeds."""


def bypass_proxy() -> None:
    """Let requests of this process to engines on this machine bypass any proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))


# -- endpoints


def check_endpoints(config: RunFile) -> EndpointReport:
    """Request each endpoint's models. Raises ConfigError for a refused key or another model."""
    if config.engine.kind != "endpoint":
        return EndpointReport()
    bypass_proxy()
    offers = asyncio.run(_offers(config))
    faults = [fault for offer in offers if (fault := _fault(config, offer)) is not None]
    if faults:
        raise ConfigError("\n".join(faults))
    return EndpointReport(
        silent=tuple(f"{offer.base_url} does not answer: {offer.silence}" for offer in offers
                     if offer.silence is not None),
        num_endpoints=len(offers),
        ignores_seed=config.sampling.seed is not None
        and any(_ignores_seed(offer.server_info) for offer in offers),
    )  # fmt: skip


async def _offers(config: RunFile) -> "Sequence[Offer]":
    # The library needs half a second to import.
    from pipeline.engines.wire.pages import offer_of

    key = endpoint_key(config)
    urls = [url.rstrip("/") for url in config.engine.base_urls]
    return await asyncio.gather(*(offer_of(url, key) for url in urls))


def _fault(config: RunFile, offer: "Offer") -> str | None:
    if offer.status in (401, 403):
        named = config.engine.api_key_env
        key = f"the key in {named}" if named else "a request without a key"
        return (
            f"engine.api_key_env: {offer.base_url} refuses {key} (HTTP {offer.status}); expected "
            "the variable of a key that it accepts"
        )
    wanted = config.engine.served_model_name or config.model
    if not offer.models or wanted in offer.models:
        return None
    field = "engine.served_model_name" if config.engine.served_model_name else "model"
    offered = ", ".join(map(repr, offer.models))
    remedy = "set engine.served_model_name to the name that it has there"
    return f"{field}: {offer.base_url} offers {offered}, not {wanted!r}; {remedy}"


def _ignores_seed(server_info: str | None) -> bool:
    try:
        facts = json_object(server_info or "{}")
    except UnreadableError:
        # Another server's page.
        return False
    names = [flag.replace("-", "_") for flag in _SEEDED_FLAGS]
    if names[0] not in facts:
        return False
    return not any(facts.get(name) for name in names)


def seed_warning(config: RunFile, report: EndpointReport) -> str | None:
    """Return a line where the engines ignore the seed that the run file gives."""
    if config.sampling.seed is None:
        return None
    if config.engine.kind == "sglang":
        flags = users_flags(config)
        is_used = any(flags.has(name) for name in _SEEDED_FLAGS)
        return None if is_used else _SEED_IGNORED
    return _SEED_IGNORED if report.ignores_seed else None


# -- the output folder


def check_writable(folder: Folder) -> None:
    """Raise ConfigError where the folder cannot be created or written; nothing is written."""
    if folder.is_remote:
        return
    path = Path(folder.where)
    existing = _nearest_existing(path)
    if not existing.is_dir():
        raise ConfigError(f"output.folder: cannot create {path}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output.folder: cannot write to {existing}: permission denied")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """Free bytes of the output folder's disk, and an estimate of what the run writes."""

    free_bytes: int
    expected_bytes: int

    @property
    def is_short(self) -> bool:
        return self.free_bytes < self.expected_bytes

    @property
    def text(self) -> str:
        free, expected = self.free_bytes / GIB, self.expected_bytes / GIB
        return f"{free:,.1f} GiB free, about {expected:,.1f} GiB expected"


def disk_space(folder: Folder, num_tokens: float) -> DiskSpace | None:
    """Compare the free disk with what rows of so many tokens need; None for an object store."""
    if folder.is_remote:
        return None
    free = shutil.disk_usage(_nearest_existing(Path(folder.where))).free
    return DiskSpace(free_bytes=free, expected_bytes=round(num_tokens * _BYTES_PER_TOKEN))


def _nearest_existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())
