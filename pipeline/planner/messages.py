"""The lines that SGLang prints when a launch fails, with this launch's figures.

mem_cache/kv_cache_configurator.py, model_executor/pool_configurator.py, 0.5.23; the wording of
older releases where the rules differ. Shortened to what identifies the line in a log.
"""

import math
from typing import TYPE_CHECKING

from pipeline.planner.sglang_rules import ReleaseRules
from schemas.plan import Gpu, PlanSettings

if TYPE_CHECKING:
    from pipeline.planner.assessment import LoadFigures

GIB = 1 << 30
_NOT_ENOUGH = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."


def load_message(gpu: Gpu, missing_bytes: int) -> str:
    """torch, while the weights are copied."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. GPU 0 has a total capacity of "
        f"{gpu.total_bytes / GIB:.2f} GiB (the weights need {missing_bytes / GIB:.2f} GiB more)"
    )


def draft_load_message(gpu: Gpu, missing_bytes: int) -> str:
    """torch, while the draft's weights are copied."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. GPU 0 has a total capacity of "
        f"{gpu.total_bytes / GIB:.2f} GiB (the draft needs {missing_bytes / GIB:.2f} GiB more)"
    )


def rest_message(rules: ReleaseRules, settings: PlanSettings, load: "LoadFigures") -> str:
    """Nothing is left for the KV cache."""
    if not rules.draft_loads_before_pool:
        return f"{_NOT_ENOUGH} Current value: mem_fraction_static={settings.mem_fraction_static:g}"
    lowest = 1 - load.available_bytes() / load.free_before_bytes
    return (
        f"ValueError: Loaded weights leave no GPU memory for the KV cache under "
        f"--mem-fraction-static={settings.mem_fraction_static:g}. Raise --mem-fraction-static "
        f"above {math.ceil(lowest * 1000) / 1000:.3f}"
    )


def kv_message(settings: PlanSettings) -> str:
    """The budget buys no token."""
    return f"{_NOT_ENOUGH} [Current value: {settings.mem_fraction_static:g}]"


def slots_message(slots: int, rest: float, slot_bytes: int) -> str:
    """The budget buys no state slot."""
    return (
        f"RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. "
        f"Computed max_mamba_cache_size={slots} (total_rest_memory={rest / GIB:.2f} GB, "
        f"mamba_cache_per_req={slot_bytes / (1 << 20):.2f} MB)"
    )


def no_requests_message(slots: int, ratio: int) -> str:
    """There are slots, but fewer than one request ties up."""
    return (
        f"RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any "
        f"requests. max_mamba_cache_size={slots}, mamba_ratio={ratio}, resulting max_num_reqs=0"
    )


def window_message(swa_tokens: int, window: int, settings: PlanSettings) -> str:
    """The window pool is smaller than one window."""
    return (
        f"ValueError: SWA pool ({swa_tokens} tokens) cannot hold even one request "
        f"(sliding window {window}, page size {settings.page_size})"
    )


CAPTURE_MESSAGE = (
    "Capture cuda graph failed: CUDA out of memory. Possible solutions: "
    "1. set --mem-fraction-static to a smaller value"
)
RUNTIME_MESSAGE = "torch.OutOfMemoryError: CUDA out of memory, at the first large prefill"
