"""The sections of a run that goes on for days: retries, leases, output, cluster and events."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from schemas.config.engine import check_variable_name
from schemas.config.section import PathText, Section


class RetryConfig(Section):
    """Retries of requests that failed through no fault of their row."""

    max_attempts: Annotated[int, Field(ge=1)] = 6
    """Attempts at one request; then its row fails, and a resume retries it."""
    backoff_initial_s: Annotated[float, Field(ge=0)] = 0.5
    """Wait before the second attempt; it doubles with each further one."""
    backoff_max_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest wait between attempts."""
    retry_after_max_s: Annotated[float, Field(ge=0)] = 120.0
    """Longest Retry-After of a server that is honoured."""


class WorkConfig(Section):
    """Shards and leases."""

    shard_rows: Annotated[int, Field(ge=1)] = 64
    """Rows of one lease."""
    lease_ttl_s: Annotated[float, Field(ge=2)] = 60.0
    """A worker loses its leases after this long without a heartbeat."""
    max_shard_losses: Annotated[int, Field(ge=1)] = 10
    """Lost workers of one shard before its rows fail."""


OutputMode = Literal["shared", "private"]


class OutputConfig(Section):
    """The folder that a run writes."""

    folder: PathText
    """A path that all nodes share, or a prefix in an object store: `s3://bucket/run`."""
    flush_interval_s: Annotated[float, Field(gt=0)] | None = None
    """Longest time from a row's end to its part in `data/`; a journal of 64 MiB becomes a part
    sooner. Null: a minute for a worker's first part, then twice as long each time, up to an hour. A
    row is durable in `staging/` within a second, in an object store within ten."""
    mode: OutputMode = "shared"
    """private: only this user can read the folder and what is in it (0700, files 0600), and exports
    of it. shared: as the umask says. In an object store the bucket's policy decides."""

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode == "private" and "://" in self.folder:
            raise ValueError("mode: found private; an object store's own policy decides, drop it")
        return self


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return host and port of a Ray cluster's address; None for what is no address."""
    matched = re.fullmatch(r"(?:ray://)?(\[[0-9A-Fa-f:]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    port = int(matched[2]) if matched else 0
    if matched is None or not 0 < port < 65536:
        return None
    return matched[1].strip("[]"), port


class ClusterConfig(Section):
    """The Ray cluster."""

    address: str | None = None
    """Address of Ray. Null: the cluster of the surrounding Ray job, else a new local Ray."""
    min_engines: Annotated[int, Field(ge=1)] = 1
    """Engines that must be ready before rows are leased; the others join when ready."""
    drain_timeout_s: Annotated[float, Field(gt=0)] = 2.0
    """Time to flush after SIGTERM. `ray job stop` kills after 3 s by default."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address not in (None, "auto") and host_and_port(address) is None:
            raise PydanticCustomError("address", "it should be HOST:PORT, ray://HOST:PORT or auto")
        return address


class EventsConfig(Section):
    """Notices of the run's events."""

    webhook_env: Annotated[str, Field(min_length=1)] | None = None
    """Environment variable with the URL to post to. Null: no webhook."""

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        check_variable_name("webhook_env", self.webhook_env)
        return self
