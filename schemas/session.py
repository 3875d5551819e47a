"""SessionPlan: what one driver tells its actors."""

from dataclasses import dataclass, field

from schemas.config import RunFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Rows that were judged, and how many of them bear each flag."""

    num_rows: int = 0
    num_errors: int = 0
    num_turns: int = 0
    completion_tokens: int = 0
    flag_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPlan:
    """What of the canary is still to be done in this session."""

    rows_left: int
    """Rows to draw from those that are open."""
    tally: Tally
    """Of the canary's rows in earlier sessions."""
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """All that the actors need to know, fixed when the driver has put the folder in order."""

    root: str
    """Path or URL of the output folder."""
    config: RunFile
    run_id: str
    session_id: str
    token: str
    """The driver's hold on the folder; publishing stops when the lock bears another."""
    frozen_name: str
    carried_schema: str
    rows_error: int
    canary: CanaryPlan | None = None
    """None: there is none, or it is over."""
    accepted_shares: dict[str, float] = field(default_factory=dict)
    """Shares over their limits that the user has accepted."""
