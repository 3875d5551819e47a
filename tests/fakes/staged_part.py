"""A part made from rows themselves, where the product makes it from tables of them."""

from collections.abc import Sequence

import pyarrow as pa

from pipeline.dataset.columns import completion_table
from pipeline.dataset.parts import stage_table
from pipeline.store.folder import Folder
from schemas.completion import COMPLETION_SCHEMA, Completion
from schemas.manifest import Part


def stage_part(
    folder: Folder,
    name: str,
    completions: Sequence[Completion],
    *,
    run_id: str,
    carried_schema: pa.Schema,
    worker_id: str,
    own_schema: pa.Schema = COMPLETION_SCHEMA,
) -> Part:
    """Write `completions` to `staging/<name>`; nothing is visible yet."""
    table = completion_table(completions, carried_schema, own_schema)
    return stage_table(folder, name, table, run_id=run_id, worker_id=worker_id)
