"""Session plan: the settings that a driver gives to its actors."""

from dataclasses import dataclass, field
from typing import Literal

from schemas.chat_template import TemplateFacts
from schemas.config.run_file import RunFile

Breach = Literal[
    "missing_token_ids", "unparsed_reasoning", "other_prompt", "other_text", "no_end_token"
]
"""Fault of an engine's set-up, which its first answers show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of judged rows, and of those with each flag."""

    num_rows: int = 0
    num_errors: int = 0
    num_turns: int = 0
    completion_tokens: int = 0
    flag_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPlan:
    """Rest of the canary that this session must run."""

    rows_left: int
    """Rows to draw from the open ones."""
    tally: Tally
    """Counts of the canary's rows in earlier sessions."""
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """Settings of one session, fixed once the driver has recovered the folder."""

    root: str
    """Path or URL of the output folder."""
    config: RunFile
    run_id: str
    session_id: str
    token: str
    """Token of the driver's lock; publishing stops when the lock has another one."""
    frozen_name: str
    carried_schema: str
    own_schema: str
    """Arrow schema of the columns before the carried ones, which all parts of a run share."""
    rows_error: int
    template: TemplateFacts
    """Facts of the model's chat template: its thinking and its system turns."""
    rows_depend_on: str = ""
    """Hash of the settings that rows depend on, and of the chat template."""
    canary: CanaryPlan | None = None
    """Canary of the session; None if there is none, or it is over."""
    accepted_shares: dict[str, float] = field(default_factory=dict)
    """Shares above their limits that the user has accepted."""
    accepted_breaches: frozenset[Breach] = frozenset()
    """Faults of engines with which the run goes on."""
