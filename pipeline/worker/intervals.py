"""Intervals at which a worker checks its rows, its leases and its engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Seconds between two checks. Tests shorten them."""

    tick_s: float = 0.25
    """Longest wait of the main loop when nothing happens."""
    heartbeat_s: float = 1.0
    commit_s: float | None = None
    """Least time between two commits of finished rows. None: as the folder allows."""
    idle_poll_s: float = 0.5
    """Wait before the next request for a lease after one was refused."""
    engine_check_s: float = 5.0
    restart_backoff_s: tuple[float, ...] = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
    """Wait before the n-th start in a row; the last value holds for all later ones."""

    def backoff_before_start_s(self, num_starts: int) -> float:
        """Return the wait after `num_starts` starts that finished no row."""
        return self.restart_backoff_s[min(num_starts, len(self.restart_backoff_s) - 1)]
