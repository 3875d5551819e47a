"""Serve the report of a run on loopback: `GET /` renders the page from the folder anew.

Only this machine can connect, and no request changes anything: all others are answered with 404.
A folder that cannot be read is one line on the page, which reloads itself.
"""

import html
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import ConfigError
from pipeline.report.page import REFRESH_S, report_page
from pipeline.report.report import Report, run_report
from pipeline.report.rows.figures import RowFigures
from pipeline.store.folder import Folder

LOOPBACK = "127.0.0.1"
# A page of another site could reach this server by a name of its own that resolves to loopback.
_OUR_NAMES = ("127.0.0.1", "localhost")
_IDLE_CONNECTION_S = 30.0


@dataclass(slots=True)
class LivePage:
    """Page of a run, as its folder is at each call. Parts are read once."""

    folder: Folder
    clock: Callable[[], float]
    _rows: RowFigures = field(default_factory=RowFigures)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def render(self) -> str:
        """Return the page. Raises ConfigError for a folder without a readable run."""
        with self._lock:
            if self._rows.num_unreadable:
                self._rows = RowFigures()
            report = self._report()
            if self._rows.num_parts > report.figures.status.num_parts:
                # The folder was emptied or replaced: the counts include rows of its former parts.
                self._rows = RowFigures()
                report = self._report()
            return report_page(report)

    def _report(self) -> Report:
        try:
            return run_report(self.folder, now_s=self.clock(), rows=self._rows)
        except OSError as error:
            place = error.filename or self.folder.where
            reason = error.strerror or error
            raise ConfigError(f"{place}: cannot be read: {reason}") from None


class PageServer(ThreadingHTTPServer):
    """HTTP server on loopback whose only resource is the page."""

    def __init__(self, render: Callable[[], str], *, port: int, log: Callable[[str], None]) -> None:
        """Listen on the port; 0 is any free one. Raises ConfigError if it cannot be used.

        `log` gets one line for each load for which `render` raises ConfigError.
        """
        self.render = render
        self.log = log
        try:
            super().__init__((LOOPBACK, port), _PageRequest)
        except OSError as error:
            raise ConfigError(
                f"--port: cannot listen on {LOOPBACK}:{port}: {error.strerror}"
            ) from None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  # the base's
        """Ignore browsers that leave before the answer; any other error is a bug."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _PageRequest(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _IDLE_CONNECTION_S

    def do_GET(self) -> None:
        if self.path != "/" or not self._is_for_us():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            self._answer(HTTPStatus.OK, self.server.render())
        except ConfigError as error:
            line = " ".join(str(error).split())
            self.server.log(line)
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, _error_page(line))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer 404 also to methods other than GET, for which the base class has 501."""
        is_unknown = code == HTTPStatus.NOT_IMPLEMENTED
        super().send_error(HTTPStatus.NOT_FOUND if is_unknown else code, None, explain)

    def log_message(self, *_: object) -> None:
        """Log no requests: the terminal shows the address and what goes wrong."""

    def _is_for_us(self) -> bool:
        return urlsplit(f"//{self.headers.get('Host', '')}").hostname in _OUR_NAMES

    def _answer(self, status: HTTPStatus, page: str) -> None:
        body = page.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


def _error_page(line: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>Report of a run</title></head><body><p>{html.escape(line)}</p></body></html>\n"
    )
