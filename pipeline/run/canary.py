"""The canary of a session: whether one is due, and its verdict while its rows arrive.

A canary that passed, or that the user accepted, holds for as long as the settings that change rows
do. Its verdict falls as soon as the rows that are not yet done cannot change it.
"""

from dataclasses import dataclass, field

from pipeline.dataset.run_record import list_in_manifest, read_manifest
from pipeline.quality.canary import Excess, excesses, settings_fingerprint, tally_of
from pipeline.store.folder import Folder
from schemas.config.run_file import RunFile
from schemas.manifest import CanaryEvent, CanaryVerdict, Part, RunRecord, Session
from schemas.progress import CanaryState
from schemas.session import CanaryPlan, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryDue:
    """The canary's part in a session that starts."""

    plan: CanaryPlan | None = None
    """Rows still to be judged; None when there is no canary or it is over."""
    accepted: dict[str, float] = field(default_factory=dict)
    """Shares over their limits that the user accepted."""
    excesses: tuple[Excess, ...] = ()
    """Limits that earlier rows exceed: nothing may be started."""


def canary_due(
    folder: Folder,
    config: RunFile,
    record: RunRecord,
    session: Session,
    *,
    accept: bool,
    now_s: float,
) -> CanaryDue:
    """Decide whether this session has a canary, and list its start or verdict in the manifest."""
    manifest, settings = read_manifest(folder), settings_fingerprint(record.identity)
    event = manifest.canary
    if event is not None and event.settings != settings:
        event = None
    if event is not None and event.verdict in ("passed", "accepted"):
        return CanaryDue(accepted=event.shares)
    tally = tally_of(manifest.canary_parts) if event is not None else Tally()
    rows_open = session.rows_total - session.rows_done
    rows_left = min(rows_open, max(0, config.quality.canary_rows - tally.num_rows))
    over = excesses(tally, config, num_rows=tally.num_rows + rows_left) if tally.num_rows else ()

    def note(verdict: CanaryVerdict) -> None:
        noted = canary_event(verdict, over, session.session_id, settings, now_s=now_s)
        list_in_manifest(folder, noted)

    if accept:
        note("accepted")
        return CanaryDue(accepted=_shares(over))
    if not config.quality.canary_rows or not rows_open:
        return CanaryDue()
    if event is None:
        note("begun")
    if over:
        return CanaryDue(excesses=over)
    if not rows_left:
        note("passed")
        return CanaryDue()
    return CanaryDue(plan=CanaryPlan(rows_left=rows_left, tally=tally, settings=settings))


def canary_event(
    verdict: CanaryVerdict,
    over: tuple[Excess, ...],
    session_id: str,
    settings: str,
    *,
    now_s: float,
) -> CanaryEvent:
    """Build the manifest's entry of a verdict."""
    return CanaryEvent(
        session_id=session_id,
        verdict=verdict,
        settings=settings,
        shares=_shares(over),
        at_s=now_s,
    )


def _shares(over: tuple[Excess, ...]) -> dict[str, float]:
    return {excess.name: excess.found for excess in over}


@dataclass(slots=True, kw_only=True)
class CanaryGate:
    """Judges the canary's rows; all others are kept back until they have passed."""

    config: RunFile
    num_rows: int = 0
    """Rows of the canary, those of earlier sessions included."""
    tally: Tally = field(default_factory=Tally)
    """Rows judged so far."""
    state: CanaryState = "none"

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    def note_published(self, part: Part) -> None:
        if self.is_running:
            self.tally = tally_of([part], self.tally)

    def close_if_certain(self, *, is_complete: bool) -> tuple[Excess, ...] | None:
        """Pass or fail as soon as that is certain. Return the exceeded limits, None while it runs.

        `is_complete` says that no row of the canary is open: failed ones are missing for good.
        """
        num_rows = self.tally.num_rows if is_complete else self.num_rows
        over = excesses(self.tally, self.config, num_rows=num_rows)
        if not over and not is_complete:
            return None
        self.state = "failed" if over else "passed"
        return over
