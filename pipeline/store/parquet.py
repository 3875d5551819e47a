"""Parquet files of an output folder, read in pieces."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.parquet as pq

from pipeline.store.folder import Folder


@contextmanager
def opened_parquet(folder: Folder, name: str, **options: object) -> Iterator[Any]:
    """Open a parquet file of the folder, with options of pyarrow's `ParquetFile`.

    Raises FileNotFoundError, and pyarrow's errors for a file that is not parquet.
    """
    with folder.open_input(name) as source, pq.ParquetFile(source, **options) as file:
        yield file
