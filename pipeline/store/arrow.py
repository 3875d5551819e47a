"""Settings of pyarrow for the processes that only read and write parts."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa


class _Hidden(MetaPathFinder):
    """Report pandas as not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is hidden from pyarrow", name=fullname)
        return None


def spare_pandas() -> None:
    """Keep pyarrow from importing pandas, which costs 0.5 s of CPU and 60 MB in each process.

    pyarrow imports it when it first makes an array of a list, to recognise pandas' own types, and
    remembers the outcome (measured: pyarrow 26, pandas 3, 2026-12). Not for processes that read
    prompts: `datasets` reads CSV through pandas. pandas itself can still be imported.
    """
    hidden = _Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        pa.array([None])
    finally:
        sys.meta_path.remove(hidden)
