"""Usual remedies for an engine's end, where no plan can tell which of them is right. Pure."""

from collections.abc import Iterator, Mapping

from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.wordings import CauseKind

SLACK_KINDS = ("graph_capture", "runtime")
FRACTIONS_ALLOWED = (0.4, 0.97)

_BLIND_FRACTION = {"pool": 0.03, "state_pool": 0.03, "graph_capture": -0.04, "runtime": -0.04}


def usual_remedies(flags: LaunchFlags, kind: CauseKind) -> Iterator[Mapping[str, str | None]]:
    """Changes to the flags that a cause is usually met with, the first one first."""
    if kind == "nccl":
        yield {"disable-custom-all-reduce": ""}
    if kind == "host_memory" and flags.has("enable-hierarchical-cache"):
        yield dict.fromkeys(("enable-hierarchical-cache", "hicache-ratio", "hicache-size"))
    step = _BLIND_FRACTION.get(kind)
    if step is not None:
        value = round((flags.fraction("mem-fraction-static") or 0.85) + step, 2)
        if FRACTIONS_ALLOWED[0] <= value <= FRACTIONS_ALLOWED[1]:
            yield {"mem-fraction-static": f"{value:g}"}
    if kind in ("draft_weights", "state_pool", *SLACK_KINDS) and flags.has("speculative-algorithm"):
        names = [name for name, _ in flags.values if name.startswith("speculative-")]
        yield dict.fromkeys(names)
    if kind in SLACK_KINDS:
        yield {"cuda-graph-max-bs-decode": "16"}
        yield {"chunked-prefill-size": "2048"}
    if kind == "state_pool":
        # One slot a request instead of three or more.
        yield {"disable-radix-cache": "", "mamba-radix-cache-strategy": None}
    if kind in (*SLACK_KINDS, "state_pool"):
        requests = flags.number("max-running-requests") or 64
        if requests > 1:
            yield {"max-running-requests": str(requests // 2)}
