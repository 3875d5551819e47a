"""SGLang's compiled CPU kernels, as far as a dense model on `torch_native` attention calls them.

The compiled package is not on the package index. Any other kernel can be imported, and says its
name when it is called.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    requests: Any, table: Any, starts: Any, ends: Any, slots: Any, _width: int
) -> None:
    """Write each request's new cache slots into its row of the table, one after the other."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = max(0, end - start)
        table[request, start : start + count] = slots[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"the CPU stand-in has no kernel {name}")

    return missing
