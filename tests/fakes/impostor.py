"""An impostor: it takes a port of another's engine, keeps what it receives, and forges answers."""

import socket
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

_FORGED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@dataclass(slots=True)
class Impostor:
    """Listens on a port as soon as it can be taken, from outside the engine's processes."""

    port: int
    received: list[bytes] = field(default_factory=list)
    listens: threading.Event = field(default_factory=threading.Event)
    connections: int = 0
    _ends: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            while not self._took(listener):
                if self._ends.wait(0.001):
                    return
            self.listens.set()
            listener.settimeout(0.02)
            while not self._ends.is_set():
                self._serve(listener)

    def _took(self, listener: socket.socket) -> bool:
        try:
            listener.bind(("127.0.0.1", self.port))
            listener.listen()
        except OSError:
            return False
        return True

    def _serve(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        self.connections += 1
        with connection:
            connection.settimeout(0.5)
            try:
                data = connection.recv(65_536)
                self.received += [data] if data else []
                connection.sendall(_FORGED)
            except OSError:
                return
