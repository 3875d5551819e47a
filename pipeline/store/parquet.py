"""Parquet files of an output folder, read in parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.parquet as pq

from pipeline.store.folder import Folder


@contextmanager
def opened_parquet(folder: Folder, name: str, **options: object) -> Iterator[Any]:
    """The `ParquetFile` of a name in the folder, with pyarrow's own options.

    Raises FileNotFoundError, and pyarrow's errors for what is no parquet.
    """
    with folder.open_input(name) as source, pq.ParquetFile(source, **options) as file:
        yield file
