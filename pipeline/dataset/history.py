"""A run's manifest without its row ids: what a report and a status need, for any number of rows.

A row costs 8 bytes here, where its id and hash cost some 150: a manifest of a million rows is read
line by line in a few MB.
"""

import json
from dataclasses import dataclass, field, replace

from pipeline.store.folder import Folder
from pipeline.store.run_folder import MANIFEST_FILE
from schemas.manifest import CanaryEvent, Part, RunManifest


@dataclass(slots=True, kw_only=True)
class RunHistory(RunManifest):
    """The manifest's events folded together, ids left out, with what came before the last word."""

    first_listed_s: dict[str, float] = field(default_factory=dict)
    """When each part's rows were first published; taking rows back lists the rest anew."""
    canaries: list[CanaryEvent] = field(default_factory=list)

    def fold(self, event: dict[str, object]) -> None:
        is_canary = event.get("event") == "canary"
        RunManifest.fold(self, event)
        if is_canary and self.canary is not None:
            self.canaries.append(self.canary)

    def _add(self, part: Part) -> None:
        RunManifest._add(self, part)  # noqa: SLF001 - slots make the class anew: no bare super()
        # One empty text for all rows: a reference each is all that they cost.
        light = replace(part, row_ids=("",) * part.num_rows, sample_indexes=(), content_hashes=())
        self.parts[part.name] = light
        for kept in (self.session_parts, self.canary_parts):
            if kept and kept[-1] is part:
                kept[-1] = light
        self.first_listed_s.setdefault(part.name, part.published_at_s)


def read_history(folder: Folder) -> RunHistory:
    """Lines that cannot be read are counted and left out, as everywhere."""
    history = RunHistory()
    for number, line in enumerate(folder.read_lines(MANIFEST_FILE), start=1):
        try:
            history.fold(json.loads(line))
        except (KeyError, TypeError, ValueError, AttributeError):
            history.unreadable_lines.append(number)
    return history
