"""A run's own records in its folder: `run.json`, `manifest.jsonl` and the copy of the run file."""

from dataclasses import dataclass, field, replace

from pipeline.errors import ConfigError, ResumeError
from pipeline.store.folder import Folder
from pipeline.store.layout import check_layout
from pipeline.store.run_folder import DATA, LOGS, MANIFEST_FILE, RUN_FILE, RUN_FILE_COPY, STAGING
from pipeline.untrusted.parsing import UNREADABLE
from schemas.completion import COMPLETION_SCHEMA, OPTIONAL_COLUMNS
from schemas.config.reader import stored_run_file
from schemas.config.run_file import RunFile
from schemas.manifest import (
    CanaryEvent,
    ManifestRecord,
    Part,
    RunIdentity,
    RunManifest,
    RunRecord,
    event_line,
)

# -- the run


def write_run(folder: Folder, record: RunRecord) -> None:
    """Write `run.json`, and create the sub-folders of a fresh folder."""
    make_sub_folders(folder)
    folder.write_whole(RUN_FILE, record.to_json().encode())


def make_sub_folders(folder: Folder) -> None:
    """Create the sub-folders that every session writes to; those that are there stay."""
    for name in (DATA, STAGING, LOGS):
        folder.make(name)


def read_run(folder: Folder) -> RunRecord | None:
    """Read the folder's run; None for a fresh folder. Raises ResumeError when it is unreadable."""
    if not folder.exists(RUN_FILE):
        return None
    try:
        return RunRecord.from_json(folder.read(RUN_FILE).decode())
    except UNREADABLE as error:
        raise ResumeError(f"{folder.place(RUN_FILE)}: not a run record: {error}") from None


def check_has_run(folder: Folder) -> RunRecord:
    """Read the folder's run. Raises ConfigError where there is no folder, or no run in it."""
    if (fault := folder.fault()) is not None:
        raise ConfigError(f"{folder.where}: {fault}; expected the output.folder of a run")
    check_layout(folder)
    if (record := read_run(folder)) is None:
        raise ConfigError(f"{folder.where}: no run here: it has no {RUN_FILE}")
    return record


def check_identity(record: RunRecord, identity: RunIdentity, *, accept_drift: bool) -> list[str]:
    """List the settings that differ from the folder's run, one line each.

    Raises ResumeError with those lines unless `accept_drift`.
    """
    lines = [
        f"{name}: the run in this folder has {ours!r}, the run file says {theirs!r}"
        for name, ours, theirs in record.identity.differences(identity)
    ]
    if lines and not accept_drift:
        raise ResumeError(
            "\n".join(lines) + "\nthe data set would mix rows of both settings; use another "
            "output.folder, or --accept-drift to go on"
        )
    return lines


def check_columns(record: RunRecord) -> None:
    """Raise ResumeError when the folder's parts have other columns than this version writes."""
    ours, theirs = set(COMPLETION_SCHEMA.names), set(record.columns)
    if differing := (ours ^ theirs) - (OPTIONAL_COLUMNS - theirs):
        names = ", ".join(sorted(differing))
        raise ResumeError(
            f"output.folder: its parts were written by another version of this project, with other "
            f"columns ({names}); finish it with that version, or use another folder"
        )


# -- the manifest


def list_in_manifest(folder: Folder, record: ManifestRecord) -> None:
    """Append one event to the manifest."""
    folder.append_line(MANIFEST_FILE, event_line(record))


def read_manifest(folder: Folder) -> RunManifest:
    """Read the manifest with every row id; unreadable lines are counted and left out."""
    manifest = RunManifest()
    manifest.fold_lines(folder.read_lines(MANIFEST_FILE))
    return manifest


def check_has_begun(folder: Folder, manifest: RunManifest) -> None:
    """Raise ConfigError when the manifest lists no session."""
    if manifest.sessions:
        return
    if manifest.unreadable_lines:
        where = f"{folder.place(MANIFEST_FILE)} line {manifest.unreadable_lines[0]}"
        raise ConfigError(f"{where}: found no event of a run, and no session in any other line")
    raise ConfigError(f"{folder.where}: the run here has not begun: it has read no prompts yet")


@dataclass(slots=True, kw_only=True)
class RunHistory(RunManifest):
    """The manifest without row ids, plus what later events replaced: for reports and status.

    A row uses 8 bytes here; its id and hash would use about 150. A manifest of a million rows is
    read line by line in a few MB.
    """

    first_listed_s: dict[str, float] = field(default_factory=dict)
    """Time when each part's rows were first published; taking rows back lists the rest again."""
    canaries: list[CanaryEvent] = field(default_factory=list)

    def fold(self, event: dict[str, object]) -> None:
        is_canary = event.get("event") == "canary"
        RunManifest.fold(self, event)
        if is_canary and self.canary is not None:
            self.canaries.append(self.canary)

    def _add(self, part: Part) -> None:
        RunManifest._add(self, part)  # noqa: SLF001 - slots make the class anew: no bare super()
        # The same empty string for every row: each costs one reference.
        light = replace(part, row_ids=("",) * part.num_rows, sample_indexes=(), content_hashes=())
        self.parts[part.name] = light
        for listed in (self.session_parts, self.canary_parts):
            if listed and listed[-1] is part:
                listed[-1] = light
        self.first_listed_s.setdefault(part.name, part.published_at_s)


def read_history(folder: Folder) -> RunHistory:
    """Read the manifest without row ids; unreadable lines are counted and left out."""
    history = RunHistory()
    history.fold_lines(folder.read_lines(MANIFEST_FILE))
    return history


# -- the run file's copy


def write_run_file(folder: Folder, config: RunFile) -> None:
    """Keep the session's run file for reports; it contains no secret."""
    folder.write_whole(RUN_FILE_COPY, config.model_dump_json(indent=1).encode())


def read_run_file_copy(folder: Folder) -> RunFile | None:
    """Read the run file of the last session; None where no readable one was kept."""
    if not folder.exists(RUN_FILE_COPY):
        return None
    return stored_run_file(folder.read(RUN_FILE_COPY))
