"""SGLang's own counters, from the text of its `/metrics` page. Pure.

Names are those of SGLang's observability/metrics_collector.py, release 0.5.23. Older releases have
no `realtime_tokens_total`: there the throughput gauge stands in for the counter of tokens.
"""

import re
from dataclasses import dataclass

_LINE = re.compile(r"^sglang:(\w+)(\{[^}]*\})? ([-+.\deE]+|NaN)$", re.MULTILINE)
_MODE = re.compile(r'\bmode="(\w+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """One reading, summed over the ranks that tell."""

    running_requests: float
    decoded_tokens: float | None
    """So far, finished or not; None before the release that counts them."""
    prefilled_tokens: float | None
    """So far, hits of the prefix cache left out."""
    tokens_per_s: float
    """The engine's gauge of the last moments."""
    accept_length: float | None
    """Tokens that a verify step keeps; None with MTP off."""


def engine_counters(page: str) -> EngineCounters | None:
    """None for a page that has no metrics of SGLang's."""
    sums: dict[str, float] = {}
    highest: dict[str, float] = {}
    for name, labels, value in _LINE.findall(page):
        mode = _MODE.search(labels)
        key = f"{name}/{mode[1]}" if mode else name
        sums[key] = sums.get(key, 0.0) + float(value)
        highest[key] = max(highest.get(key, 0.0), float(value))
    if "num_running_reqs" not in sums:
        return None
    return EngineCounters(
        running_requests=sums["num_running_reqs"],
        decoded_tokens=sums.get("realtime_tokens_total/decode"),
        prefilled_tokens=sums.get("realtime_tokens_total/prefill_compute"),
        tokens_per_s=sums.get("gen_throughput", 0.0),
        # 0 with MTP off, and before the first verify step.
        accept_length=highest.get("spec_accept_length") or None,
    )
