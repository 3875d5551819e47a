"""An engine's own lines → its figures, or the one cause that it ended of. Pure.

SGLang's last lines are symptoms: a rank fails, the others lose their peer, the parent hears SIGQUIT
and kills the tree. So causes are ranked: the line that names one wins over lines that only tell
that something died, wherever they stand. No other module reads an engine's error texts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.errors import PlanError
from pipeline.planner.sglang.calibration import LogReadings, readings
from pipeline.planner.sglang.flags import renaming_of
from pipeline.planner.sglang.wordings import (
    CAUSES,
    DEATHS,
    HARMLESS,
    OOM,
    SYMPTOM,
    CauseKind,
    LaunchStage,
    Pattern,
)

LAUNCH_MARK = "--- launch "
"""Begins the line that the worker writes to the log before each start."""

_MOST_EVIDENCE_LINES = 6
_MOST_LINE_CHARACTERS = 300
_MOST_QUOTED_CHARACTERS = 140
_MOST_LINES_READ_BACK = 6000
# A py-spy dump of a stuck engine has some hundred lines a rank, an argparse usage some 600.
_LINES_OF_OTHER_RANKS = 120
# assumed: what other ranks print in the second or two before they follow
_OTHERS_MEMORY_GIB = 1.0
# assumed: display and monitoring processes hold less on a server's card
_FREE_BEFORE_FRACTION = 0.88
# SGLang itself calls ranks unbalanced below 0.9; contexts and communicators take up to 0.04.


@dataclass(frozen=True, slots=True, kw_only=True)
class OomFigures:
    """What torch says when an allocation fails, in GiB; None where a wording lacks it."""

    tried_gib: float | None
    free_gib: float | None
    total_gib: float | None
    others_gib: float
    """Held by other processes on the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an engine ended."""

    kind: CauseKind
    stage: LaunchStage
    """How far the launch had come."""
    summary: str
    evidence: tuple[str, ...]
    oom: OomFigures | None = None
    flag: str | None = None
    """The flag that was refused, without dashes."""


# -- figures


def figures(log: str) -> LogReadings | None:
    """The figures of the log's last launch; None when it printed none."""
    try:
        return readings(last_launch(log))
    except PlanError:
        return None


def last_launch(log: str) -> str:
    """The log from the last start on."""
    mark = log.rfind(f"\n{LAUNCH_MARK}")
    return log[mark + 1 :] if mark >= 0 else log


# -- the cause


def failure_cause(log: str, *, status: int | None = None, kernel_kills: int = 0) -> Cause:
    """The one cause of an engine's end.

    `status` is the exit status of its process, 128 + n for signal n, None while it runs;
    `kernel_kills` says how often the kernel killed for memory since the start.
    """
    lines = last_launch(log).splitlines()
    staged = list(_staged(lines))
    found = _first_by_rank(staged)
    if found is None:
        return _without_words(staged, status, kernel_kills)
    at, kind = found
    stage = staged[at].stage
    oom = _oom_near(lines, at)
    kind = _refined(kind, stage, oom, lines, at)
    if kind == "killed" and kernel_kills:
        kind = "host_memory"
    return Cause(
        kind=kind,
        stage=stage,
        summary=_summary(kind, stage, oom, lines[at]),
        evidence=_evidence(lines, at),
        oom=oom,
        flag=_refused_flag(lines[at]) if kind == "flag" else None,
    )


def _first_by_rank(staged: "list[_Line]") -> tuple[int, CauseKind] | None:
    """The first line of the strongest kind of cause behind the last sign of work.

    Another rank may still print a batch behind the error, so causes are sought a little before it
    too; far before it they were survived, or were no failures.
    """
    start = max(0, len(staged) - _MOST_LINES_READ_BACK)
    worked = max((i for i, line in enumerate(staged) if _WORKS.search(line.text)), default=start)
    nearby = max(start, worked - _LINES_OF_OTHER_RANKS)
    return (
        _match(staged, worked, CAUSES)
        or _match(staged, nearby, CAUSES)
        or _match(staged, worked, DEATHS)
    )


def _match(
    staged: "list[_Line]", begin: int, patterns: "tuple[Pattern, ...]"
) -> tuple[int, CauseKind] | None:
    for kind, pattern in patterns:
        for at in range(begin, len(staged)):
            text = staged[at].text
            if pattern.search(text) and not HARMLESS.search(text):
                return at, kind
    return None


# -- stages


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    stage: LaunchStage


_RANK = re.compile(r"^\[[^\]]*?\b((?:DP\d+ )?(?:PP\d+ )?TP\d+)\b")
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d[^\]]*\]")
_WORKS = re.compile(r"\b(?:Decode|Prefill) batch\b")


def _staged(lines: list[str]) -> Iterator[_Line]:
    """Each line with the stage of the rank that wrote it; a traceback belongs to the line above."""
    stages: dict[str, LaunchStage] = {}
    loads: dict[str, int] = {}
    rank = ""
    furthest: LaunchStage = "start"
    for text in lines:
        found = _RANK.match(text)
        if found:
            rank = found[1]
        elif _STAMP.match(text):
            rank = ""
        stage = _next_stage(text, stages.get(rank, "start"), loads, rank)
        stages[rank] = stage
        if _ORDER.index(stage) > _ORDER.index(furthest):
            furthest = stage
        # The parent of ranks loads nothing itself: its lines stand where they are.
        yield _Line(text, furthest if stage == "start" else stage)


_ORDER: tuple[LaunchStage, ...] = (
    "start", "weights", "draft_weights", "pools", "capture", "ready", "serving",
)  # fmt: skip


def _next_stage(text: str, stage: LaunchStage, loads: dict[str, int], rank: str) -> LaunchStage:
    if "Load weight begin" in text:
        loads[rank] = loads.get(rank, 0) + 1
        return "weights" if loads[rank] == 1 else "draft_weights"
    if "Load weight end" in text or _POOL_LINE.search(text):
        return "pools"
    if _CAPTURE_BEGIN.search(text):
        return "capture"
    if "max_total_num_tokens=" in text or "fired up and ready" in text:
        return "serving" if stage == "serving" else "ready"
    return "serving" if _WORKS.search(text) else stage


_POOL_LINE = re.compile(
    r"(?:KV|Mamba) Cache is allocated|Memory pool end|Use sliding window memory"
)
_CAPTURE_BEGIN = re.compile(
    r"Capture .*(?:cuda graph|CUDA graph|draft extend) begin", re.IGNORECASE
)


def _refined(
    kind: CauseKind, stage: LaunchStage, oom: OomFigures | None, lines: list[str], at: int
) -> CauseKind:
    """Memory that ran out is named by the stage that asked for it, or by who else holds it."""
    if kind == "graph_capture" and oom is None:
        kind = _inside_capture(lines[at : at + 12])
    if kind not in ("runtime", "graph_capture", "pool", "state_pool"):
        return kind
    if stage not in ("ready", "serving") and _others_hold_memory(lines[: at + 12], oom):
        return "unbalanced"
    if kind != "runtime":
        return kind
    by_stage: dict[LaunchStage, CauseKind] = {
        "start": "weights",
        "weights": "weights",
        "draft_weights": "draft_weights",
        "pools": "pool",
        "capture": "graph_capture",
    }
    return by_stage.get(stage, "runtime")


def _inside_capture(lines: list[str]) -> CauseKind:
    """What stopped a capture: memory, unless the error says that the card cannot run the kernel."""
    for kind, pattern in CAUSES:
        if kind in ("kernel", "gpu_fault", "nccl") and any(map(pattern.search, lines)):
            return kind
    return "graph_capture"


def _others_hold_memory(lines: list[str], oom: OomFigures | None) -> bool:
    if oom is not None and oom.others_gib >= _OTHERS_MEMORY_GIB:
        return True
    text = "\n".join(lines)
    if "The memory capacity is unbalanced" in text:
        return True
    begin = re.search(r"Load weight begin\. avail mem=(\d+\.?\d*) GB", text)
    total = oom.total_gib if oom else None
    return bool(begin and total and float(begin[1]) < _FREE_BEFORE_FRACTION * total)


# -- figures of a failed allocation

_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)"
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_FREE_NEW = re.compile(rf"of which {_SIZE} is free")
_FREE_OLD = re.compile(rf"; {_SIZE} free")
_TOTAL_NEW = re.compile(rf"total capac(?:i)?ty of {_SIZE}")
_TOTAL_OLD = re.compile(rf"{_SIZE} total capacity")
_OTHER = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_OURS = re.compile(rf"this process has {_SIZE} memory in use")
_GIB_OF = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


def _oom_near(lines: list[str], at: int) -> OomFigures | None:
    """Figures from around the line at hand: the fullest wording of those that tell a size."""
    near = (lines[at], *lines[at + 1 : at + 12], *reversed(lines[max(0, at - 40) : at]))
    told = [text for text in near if OOM.search(text) and _TRIED.search(text)]
    whole = [text for text in told if _FREE_NEW.search(text) or _FREE_OLD.search(text)]
    return _oom_figures((whole or told)[0]) if told else None


def _oom_figures(text: str) -> OomFigures:
    processes = [_gib(found) for found in _OTHER.finditer(text)]
    # In a container torch does not know itself among the card's processes: one of them is its own.
    others = sum(processes) if _OURS.search(text) else sum(processes) - max(processes, default=0.0)
    return OomFigures(
        tried_gib=_size(text, _TRIED),
        free_gib=_size(text, _FREE_NEW, _FREE_OLD),
        total_gib=_size(text, _TOTAL_NEW, _TOTAL_OLD),
        others_gib=round(others, 3),
    )


def _size(text: str, *patterns: re.Pattern[str]) -> float | None:
    found = next((match for pattern in patterns if (match := pattern.search(text))), None)
    return round(_gib(found), 4) if found else None


def _gib(found: re.Match[str]) -> float:
    return float(found[1]) * _GIB_OF[found[2]]


# -- a flag that was refused


def _refused_flag(line: str) -> str | None:
    """The flag that the argument parser refuses; what is refused for its value is told in full."""
    refused = re.search(r"(?:unrecognized arguments|ambiguous option|argument):? --?([\w-]+)", line)
    return refused[1] if refused else None


# -- words


def _without_words(staged: "list[_Line]", status: int | None, kernel_kills: int) -> Cause:
    """Nothing in the log names a cause: the exit status is all there is."""
    stage = staged[-1].stage if staged else "start"
    told = [line.text for line in staged if line.text.strip() and not SYMPTOM.search(line.text)]
    evidence = tuple(_cut(text) for text in told[-3:])
    if kernel_kills:
        kind: CauseKind = "host_memory"
    elif status in (128 + 9, 128 + 15, -9, -15):
        kind = "killed"
    elif status in (128 + 6, 128 + 7, 128 + 11, -6, -7, -11):
        kind = "gpu_fault"
    else:
        kind = "unknown"
    return Cause(kind=kind, stage=stage, summary=_silent_summary(kind, status), evidence=evidence)


def _silent_summary(kind: CauseKind, status: int | None) -> str:
    if kind == "host_memory":
        return "the kernel killed the engine for host memory"
    return f"the engine ended without a word, with status {status}"


_WORDS: dict[CauseKind, str] = {
    "weights": "the weights do not fit on the card",
    "draft_weights": "the draft's weights do not fit beside the model's",
    "pool": "the memory fraction leaves nothing for the KV pool",
    "state_pool": "the memory fraction leaves too few state slots",
    "graph_capture": "memory ran out while CUDA graphs were captured",
    "runtime": "the card's memory ran out while serving",
    "unbalanced": "another process holds memory of the card",
    "kernel": "CUDA, the driver or a kernel does not go with this card",
    "gpu_fault": "the GPU or a kernel on it failed",
    "flag": "SGLang refuses a flag",
    "model_missing": "the model or its tokenizer is not found, or not known to this release",
    "hub_refused": "the hub refuses access to the model",
    "hub_unreachable": "the hub cannot be reached",
    "port": "a port is taken",
    "host_memory": "the machine's own memory ran out",
    "nccl": "the GPUs lost each other (NCCL)",
    "disk_full": "a disk is full",
    "watchdog": "the engine was stuck and its own watchdog ended it",
    "killed": "the engine was killed from outside",
    "unknown": "the engine failed",
}


def _summary(kind: CauseKind, stage: LaunchStage, oom: OomFigures | None, line: str) -> str:
    words = _WORDS[kind]
    if oom is not None and oom.tried_gib is not None:
        parts = [f"tried {oom.tried_gib:g} GiB"]
        if oom.free_gib is not None and oom.total_gib is not None:
            parts.append(f"{oom.free_gib:g} of {oom.total_gib:g} GiB free")
        if oom.others_gib:
            parts.append(f"{oom.others_gib:g} GiB held by others")
        return f"{words} ({', '.join(parts)})"
    if kind == "flag" and (hint := renaming_of(_refused_flag(line) or "")):
        return f"{words}: {hint}"
    if kind in ("killed", "watchdog", "unknown"):
        words = f"{words} at stage {stage!r}"
    return f"{words}: {_bare(line)}"


def _bare(line: str) -> str:
    """The line without its time stamp, short enough for one line of ours."""
    return _cut(_STAMP.sub("", line).strip())[:_MOST_QUOTED_CHARACTERS]


def _evidence(lines: list[str], at: int) -> tuple[str, ...]:
    """The last figure before the failure, the line that names it, and what followed."""
    before = [text for text in lines[max(0, at - 200) : at] if _FIGURE.search(text)][-1:]
    after = [text for text in lines[at + 1 : at + 12] if text.strip() and not SYMPTOM.search(text)]
    return tuple(_cut(text) for text in _capped([*before, lines[at], *after]))


_FIGURE = re.compile(r"avail mem=|max_total_num_tokens=|Cache is allocated|#running-req")


def _capped(lines: Iterable[str]) -> list[str]:
    return list(lines)[:_MOST_EVIDENCE_LINES]


def _cut(text: str) -> str:
    text = text.strip()
    if len(text) <= _MOST_LINE_CHARACTERS:
        return text
    return text[: _MOST_LINE_CHARACTERS - 3] + "..."
