"""Choose a port of loopback for an engine, and tell whether the engine itself listens on it.

Any user of the machine may listen on a port that is free, and an engine listens only once its
model is loaded. So no request is sent before the kernel names a process of ours as the listener,
and none over a connection that was made after that process had ended.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from pipeline.engines.process.counters import proc_text
from pipeline.errors import PortTakenError

# include/net/tcp_states.h: TCP_LISTEN
_LISTENS = "0A"
_LOOPBACK = IPv4Address("127.0.0.1")
_ROOT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningSocket:
    """A socket that accepts connections to loopback."""

    inode: int
    """The kernel gives it to no other socket while this one is open."""
    user: int


def free_port() -> int:
    """Return a port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening_sockets(port: int) -> tuple[ListeningSocket, ...]:
    """Return the sockets that may accept a connection to 127.0.0.1 at a port."""
    text = proc_text("/proc/net/tcp") + proc_text("/proc/net/tcp6")
    rows = [line.split() for line in text.splitlines()]
    return tuple(
        ListeningSocket(inode=int(row[9]), user=int(row[7]))
        for row in rows
        if len(row) > 9 and row[3] == _LISTENS and _accepts(row[1], port)
    )


def _accepts(address: str, port: int) -> bool:
    """Tell whether a kernel's address, as in `0100007F:1F90`, is that port of loopback, or all."""
    words, _, its_port = address.partition(":")
    if int(its_port, 16) != port:
        return False
    # Words of 32 bits in the machine's own order.
    numbers = [int(words[at : at + 8], 16) for at in range(0, len(words), 8)]
    host = ip_address(struct.pack(f"={len(numbers)}I", *numbers))
    if isinstance(host, IPv6Address):
        host = host.ipv4_mapped or host
    return host == _LOOPBACK or host.is_unspecified


# --- the listener -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class EnginePort:
    """A port that only an engine of ours may listen on."""

    number: int
    processes: Callable[[], Collection[int]]
    """Lists the engine's processes."""
    accepts_user: bool = False
    """Processes of this user or of root may listen, such as a container's."""
    _known: frozenset[int] = frozenset()
    """Inodes of sockets that belong to the engine."""
    _check: "asyncio.Task[bool] | None" = field(default=None)

    def is_held(self) -> bool:
        """Return whether the engine listens.

        Raises PortTakenError when somebody else does.
        """
        sockets = listening_sockets(self.number)
        inodes = frozenset(one.inode for one in sockets)
        if not inodes <= self._known:
            for one in self._foreign(sockets):
                raise PortTakenError(self._taken_text(one))
            self._known = inodes
        return bool(inodes)

    async def check(self) -> None:
        """Raise PortTakenError unless the engine has listened since before this call.

        Concurrent calls share a check that begins after them.
        """
        if self._check is not None and not self._check.done():
            # It may have begun too early.
            await asyncio.wait({self._check})
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(asyncio.to_thread(self.is_held))
        if not await asyncio.shield(self._check):
            raise PortTakenError(f"nothing listens on port {self.number}: the engine has ended")

    def _foreign(self, sockets: tuple[ListeningSocket, ...]) -> list[ListeningSocket]:
        """List the sockets of processes that may not listen here."""
        if self.accepts_user:
            return [one for one in sockets if one.user not in (_ROOT, os.getuid())]
        inodes = {inode for pid in self.processes() for inode in _socket_inodes(pid)}
        return [one for one in sockets if one.inode not in inodes]

    def _taken_text(self, foreign: ListeningSocket) -> str:
        return (
            f"port {self.number} is taken by another process (of user {foreign.user}), so nothing "
            "was sent there; if it is the engine in a container, set engine.listener: user"
        )


def _socket_inodes(pid: int) -> frozenset[int]:
    """List the sockets that a process has open; none of a process that is gone or not ours."""
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            kind, _, number = _link(entry).partition(":")
            if kind == "socket":
                found.add(int(number.strip("[]")))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return frozenset(found)
    return frozenset(found)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
