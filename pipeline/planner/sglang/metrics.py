"""SGLang's own counters and gauges, parsed from the text of its `/metrics` page. Pure.

Metric names are those of SGLang's observability/metrics_collector.py, release 0.5.23.
"""

import re
from dataclasses import dataclass

_LINE = re.compile(r"^sglang:(\w+)(\{[^}]*\})? ([-+.\deE]+|NaN)$", re.MULTILINE)
_MODE = re.compile(r'\bmode="(\w+)"')

# Releases without `realtime_tokens_total` count tokens of finished requests alone, so the gauges
# show the progress of those that still run.
_TOKEN_COUNTERS = ("realtime_tokens_total", "generation_tokens_total", "prompt_tokens_total")
_MOVING_GAUGES = ("num_used_tokens", "decode_sum_seq_lens", "gen_throughput")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Tokens that an engine has processed, summed over the ranks that report them."""

    running_requests: float
    decoded_tokens: float | None
    """Total since the start, running requests included; None where the release has no counter."""
    prefilled_tokens: float | None
    """Total since the start, without hits of the prefix cache; None as above."""
    tokens_per_s: float
    """The engine's gauge of recent decode throughput."""
    accept_length: float | None
    """Mean tokens kept per verify step; None with MTP off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Requests of an engine and the use of its pools, summed over ranks."""

    running: float
    queued: float
    retracted: float
    """Total since the start."""
    token_usage: float
    """Used fraction of the fullest rank's KV pool."""
    state_usage: float
    """Used fraction of the fullest rank's state pool."""
    progress: tuple[float, ...]
    """Figures of which at least one changes while tokens are generated."""


def engine_counters(page: str) -> EngineCounters | None:
    """Return the token counters of a page, or None where it has no metrics of SGLang."""
    sums, peaks = _sums_and_peaks(page)
    if "num_running_reqs" not in sums:
        return None
    return EngineCounters(
        running_requests=sums["num_running_reqs"],
        decoded_tokens=sums.get("realtime_tokens_total/decode"),
        prefilled_tokens=sums.get("realtime_tokens_total/prefill_compute"),
        tokens_per_s=sums.get("gen_throughput", 0.0),
        # 0 with MTP off, and before the first verify step.
        accept_length=peaks.get("spec_accept_length") or None,
    )


def engine_load(page: str) -> EngineLoad | None:
    """Return the load that a page reports, or None where it has no metrics of SGLang."""
    sums, peaks = _sums_and_peaks(page)
    if "num_running_reqs" not in sums:
        return None
    return EngineLoad(
        running=sums["num_running_reqs"],
        queued=sums.get("num_queue_reqs", 0.0),
        retracted=sums.get("num_retracted_requests_total", 0.0),
        token_usage=peaks.get("full_token_usage", peaks.get("token_usage", 0.0)),
        state_usage=peaks.get("mamba_usage", 0.0),
        progress=tuple(sums.get(name, 0.0) for name in (*_TOKEN_COUNTERS, *_MOVING_GAUGES)),
    )


def _sums_and_peaks(page: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return each metric's sum and maximum over its lines, one line per rank.

    A line with a `mode` label also counts under `name/mode`.
    """
    sums: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for name, labels, text in _LINE.findall(page):
        mode, value = _MODE.search(labels), float(text)
        for key in (name, f"{name}/{mode[1]}") if mode else (name,):
            sums[key] = sums.get(key, 0.0) + value
            peaks[key] = max(peaks.get(key, 0.0), value)
    return sums, peaks
