"""Recovery: put an output folder in order after any crash.

Journals of earlier sessions become parts. Rows beyond a canary that failed are discarded: they were
kept back until it passed.

Invariant: afterwards `data/` contains complete parts of this run and nothing else, each listed, and
no row is in two of them. A listed part outranks an unlisted one. Whatever else is found goes to
`quarantine/`, where nothing is ever deleted.
"""

import dataclasses
from dataclasses import dataclass, field

import pyarrow as pa

from pipeline.dataset.journal import JournalName, Journals, journals_in
from pipeline.dataset.parts import discard, footer_of, part_from, publish, unlist
from pipeline.dataset.run_record import list_in_manifest, make_sub_folders, read_manifest
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA, MANIFEST_FILE, QUARANTINE, STAGING
from schemas.manifest import Part, RunManifest, RunRecord

_RowKey = str | tuple[str, int]
"""A row id, with its sample index unless that is 0: a million bare strings use half the memory."""


def _row_key(row_id: str, sample_index: int) -> _RowKey:
    return (row_id, sample_index) if sample_index else row_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The published parts of a folder in order, and what had to be mended."""

    parts: tuple[Part, ...]
    reports: tuple[str, ...]
    """Lines on each thing that a clean stop does not leave behind."""


def recover(folder: Folder, record: RunRecord, *, now_s: float) -> Recovery:
    """Publish what is finished in `staging/`, parts and journals, and quarantine foreign files.

    Parts that are listed but missing or damaged are unlisted, so that their rows are done again.
    """
    make_sub_folders(folder)
    folder.end_last_line(MANIFEST_FILE)
    manifest = read_manifest(folder)
    run = _Recovering(folder=folder, record=record, now_s=now_s)
    run.reports += [
        f"{MANIFEST_FILE} line {number} cannot be read and is left out"
        for number in manifest.unreadable_lines
    ]
    run.check_published(manifest)
    run.publish_staged()
    has_failed = manifest.canary is not None and manifest.canary.verdict == "failed"
    run.publish_journals(is_kept_back=has_failed)
    return Recovery(parts=tuple(run.parts), reports=tuple(run.reports))


@dataclass(slots=True, kw_only=True)
class _Recovering:
    folder: Folder
    record: RunRecord
    now_s: float
    parts: list[Part] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    claimed: set[_RowKey] = field(default_factory=set)
    """Rows of `parts`."""

    def check_published(self, manifest: RunManifest) -> None:
        present = self.folder.sizes(DATA)
        for name, part in manifest.parts.items():
            if name not in present:
                unlist(self.folder, name)
                self.reports.append(
                    f"{DATA}/{name} is listed but gone; its {part.num_rows} rows are done again"
                )
        # Listed parts first: of a part and its copy, the listed one stays.
        for name in sorted(present, key=lambda name: (name not in manifest.parts, name)):
            self._check(name, present[name], manifest.parts.get(name))

    def _check(self, name: str, size_bytes: int, listed: Part | None) -> None:
        if listed and listed.size_bytes == size_bytes and self._claim(listed):
            self.parts.append(listed)
            return
        path = f"{DATA}/{name}"
        part = self._own_part(path)
        if not isinstance(part, Part):
            self._quarantine(path, part, listed)
        elif not self._claim(part):
            self._quarantine(path, "contains rows that another part has", listed)
        else:
            adopted = dataclasses.replace(part, published_at_s=self.now_s)
            list_in_manifest(self.folder, adopted)
            self.parts.append(adopted)
            if listed:
                self.reports.append(f"{path} was listed again from its rows")

    def publish_staged(self) -> None:
        for name in self.folder.names(STAGING):
            path = f"{STAGING}/{name}"
            if name.endswith(".tmp"):
                self.folder.remove(path)
                continue
            if JournalName.parsed(name) is not None:
                continue
            part = self._own_part(path)
            if not isinstance(part, Part):
                self._quarantine(path, part, None)
            elif self._claim(part):
                self.parts.append(publish(self.folder, part, now_s=self.now_s))
            else:
                # The same rows were published under a later lease.
                discard(self.folder, part)

    def publish_journals(self, *, is_kept_back: bool) -> None:
        """Publish the rows of journals that no part has; discard those that are kept back."""
        journals = Journals(folder=self.folder, run_id=self.record.run_id)
        for name in journals_in(self.folder):
            try:
                keys = [_row_key(*pair) for pair in journals.row_keys(name)]
            except (ValueError, IsADirectoryError) as error:
                why = "is a folder" if isinstance(error, OSError) else str(error)
                self.reports.append(f"{name.path} {why}; it is left there")
                continue
            if is_kept_back and name.kind == "rows":
                if keys:
                    self.reports.append(
                        f"{name.path} has {len(keys)} rows beyond a canary that failed; discarded"
                    )
            else:
                self._publish_journal(journals, name, keys)
            journals.remove(name)

    def _publish_journal(self, journals: Journals, name: JournalName, keys: list[_RowKey]) -> None:
        met: set[_RowKey] = set()
        published = []
        for position, key in enumerate(keys):
            if key in self.claimed or key in met:
                published.append(position)
            met.add(key)
        part = journals.stage(name, without=published)
        if part is not None:
            assert self._claim(part)
            self.parts.append(publish(self.folder, part, now_s=self.now_s))

    def _claim(self, part: Part) -> bool:
        """Claim the part's rows, all or none; False when one of them is claimed already."""
        pairs = zip(part.row_ids, part.sample_indexes, strict=True)
        keys = {_row_key(row_id, sample) for row_id, sample in pairs}
        if len(keys) < part.num_rows or not self.claimed.isdisjoint(keys):
            return False
        self.claimed |= keys
        return True

    def _own_part(self, path: str) -> Part | str:
        """The part in a file, from its footer and rows, or why it is not a part of this run."""
        try:
            with opened_parquet(self.folder, path) as file:
                footer = footer_of(file)
                if footer is None:
                    return "is not a part of this run"
                table = file.read(columns=["row_id", "sample_index", "content_hash"])
            if footer["run_id"] != self.record.run_id:
                return "belongs to another run"
            if footer["name"] != path.rpartition("/")[2]:
                return f"is a copy of {footer['name']}"
            return part_from(table, footer, self.folder.size_bytes(path))
        except (pa.ArrowException, OSError, ValueError):
            return "is truncated or not a parquet file"
        except (KeyError, TypeError):
            # It has our footer key, and a footer or columns that are not ours.
            return "is not a part of this run"

    def _quarantine(self, path: str, why: str, listed: Part | None) -> None:
        name = path.rpartition("/")[2]
        self.folder.make(QUARANTINE)
        target, number = f"{QUARANTINE}/{name}", 1
        while self.folder.exists(target):
            target, number = f"{QUARANTINE}/{name}.{number}", number + 1
        self.folder.move(path, target)
        if listed:
            unlist(self.folder, name)
        again = f"; its {listed.num_rows} rows are done again" if listed else ""
        self.reports.append(f"{path} {why}; moved to {target}{again}")
