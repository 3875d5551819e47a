"""Read every published part whole, to find those that a disk or a copy has damaged."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from pipeline.dataset.run_record import read_manifest
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA
from schemas.manifest import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPart:
    """A published part, and what is wrong with its file; None for a sound one."""

    path: str
    num_rows: int
    damage: str | None


def check_parts(folder: Folder) -> Iterator[CheckedPart]:
    """Read the parts one row group at a time, with the checksums of their pages."""
    for part in read_manifest(folder).parts.values():
        path = f"{DATA}/{part.name}"
        yield CheckedPart(path=path, num_rows=part.num_rows, damage=_damage(folder, path, part))


def _damage(folder: Folder, path: str, part: Part) -> str | None:
    try:
        with opened_parquet(folder, path, page_checksum_verification=True) as file:
            rows = sum(file.read_row_group(n).num_rows for n in range(file.num_row_groups))
    except FileNotFoundError:
        return "the file is gone"
    except (OSError, pa.ArrowException) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None if rows == part.num_rows else f"{rows:,} rows, expected {part.num_rows:,}"
