"""SessionPlan: what one driver tells its actors."""

from dataclasses import dataclass
from pathlib import Path

from schemas.config import RunFile


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """All that the actors need to know, fixed when the driver has put the folder in order."""

    root: Path
    config: RunFile
    run_id: str
    session_id: str
    token: str
    """The driver's hold on the folder; publishing stops when the lock bears another."""
    frozen_name: str
    carried_schema: str
    rows_error: int
