"""Webhook: posts events from a thread of its own, so that the run never waits for it.

The queue is bounded, deliveries are retried with back-off, and at its end a run waits for a limited
time. Dropped notices are counted and logged. The URL is a secret: it comes from the environment and
is in no message.
"""

import http.client
import json
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

from pipeline.errors import ConfigError
from schemas.config.running import EventsConfig

_MOST_QUEUED = 200
_MAX_ATTEMPTS = 6
_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 0.5, 15.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """JSON body of a post."""

    event: str
    run: str
    """Id of the run."""
    folder: str
    at_s: float
    """Seconds since 1970, UTC."""
    text: str
    rows_done: int
    rows_total: int
    worker: str | None = None
    eta_s: float | None = None
    """Time left, as in `jobs.status`; null while it is unknown."""


@dataclass(slots=True, kw_only=True)
class Webhook:
    """Queue of notices to a URL, and the thread that posts them."""

    url: str
    log: Callable[[str], None]
    backoff_first_s: float = _BACKOFF_FIRST_S
    num_lost: int = 0
    _queue: "queue.Queue[Notice | None]" = field(
        default_factory=lambda: queue.Queue(maxsize=_MOST_QUEUED)
    )
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def post(self, notice: Notice) -> None:
        """Queue a notice, or drop it if the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="webhook", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(notice)
        except queue.Full:
            self._drop(notice, "the queue is full")

    def close(self, wait_s: float) -> None:
        """Deliver the queue, within `wait_s` at most."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._stop.set()
        self._thread.join(wait_s)
        if self._thread.is_alive():
            self._stop.set()
            self.log(f"event=webhook_given_up after_s={wait_s:g}")

    def _deliver(self) -> None:
        while not self._stop.is_set():
            notice = self._queue.get()
            if notice is None:
                return
            self._deliver_one(notice)

    def _deliver_one(self, notice: Notice) -> None:
        problem = ""
        for number in range(_MAX_ATTEMPTS):
            wait_s = min(self.backoff_first_s * 2.0 ** (number - 1), _BACKOFF_MOST_S)
            if number and self._stop.wait(wait_s):
                return
            failure = _post(self.url, notice)
            if failure is None:
                return
            problem, is_temporary = failure
            if not is_temporary:
                break
        self._drop(notice, problem)

    def _drop(self, notice: Notice, why: str) -> None:
        self.num_lost += 1
        self.log(f"event=webhook_lost notice={notice.event} why={why!r}")


def webhook_of(config: EventsConfig, log: Callable[[str], None]) -> Webhook | None:
    """Create the run file's webhook. Raises ConfigError if its variable contains no URL."""
    if config.webhook_env is None:
        return None
    url = os.environ.get(config.webhook_env, "")
    if not url:
        raise ConfigError(
            f"events.webhook_env: the environment variable {config.webhook_env} is not set; "
            f"set it to the URL to post to"
        )
    # A secret from a file often ends with a line feed.
    url = url.strip()
    if not _is_url(url):
        # The value is not shown: it is a secret.
        raise ConfigError(
            f"events.webhook_env: the environment variable {config.webhook_env} contains no "
            f"valid URL; expected http:// or https:// and a host"
        )
    return Webhook(url=url, log=log)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: a notice that is sent on as GET reaches nobody, and its URL is a secret."""

    def redirect_request(self, *_: object) -> None:
        """Follow nothing, so that the answer counts as the error that it is."""


_OPENER = urllib.request.build_opener(_NoRedirects)


def _is_url(url: str) -> bool:
    """Check that a URL has a host, a port in range if any, and only printable ASCII."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_whole and all("!" <= character <= "~" for character in url)


def _post(url: str, notice: Notice) -> tuple[str, bool] | None:
    """Post a notice; on failure return the problem, and true if a retry may help."""
    request = urllib.request.Request(  # noqa: S310 - http or https, as checked
        url,
        data=json.dumps(asdict(notice)).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return f"HTTP {error.code}", error.code >= 500 or error.code in (408, 429)
    except (OSError, ValueError, http.client.HTTPException) as error:
        # No connection, a timeout, or no HTTP at the other end; a URL error wraps the cause.
        return type(getattr(error, "reason", error)).__name__, True
