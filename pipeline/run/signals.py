"""Signals that stop a driver: exit before engines run, be noted while they do."""

import signal
from collections.abc import Callable

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def exit_on_signals(log: Callable[[str], None]) -> None:
    """Exit at once and release the folder: until engines run there is nothing to drain."""

    def leave(number: int, _: object) -> None:
        log(f"event=stopped by={signal.Signals(number).name} nothing was started")
        raise SystemExit(128 + number)

    for number in _heeded():
        signal.signal(number, leave)


def catch_signals() -> list[int]:
    """Return the list of signals that arrive from here on; Ray has its own handlers until then."""
    caught: list[int] = []
    for number in _heeded():
        signal.signal(number, lambda received, _: caught.append(received))
    return caught


def _heeded() -> list[signal.Signals]:
    """Return the stop signals that the parent does not have ignored, as `nohup` does SIGHUP."""
    return [n for n in _STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
