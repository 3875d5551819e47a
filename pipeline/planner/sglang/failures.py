"""Classifies an engine's log: its figures, or the one cause of its failure. Pure.

SGLang's last lines are symptoms: one rank fails, the others lose their peer, the parent receives
SIGQUIT and kills the process tree. So causes are ranked: a line that names a cause outranks lines
that only report a death, wherever they are. No other module reads an engine's error texts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import PlanError
from pipeline.planner.sglang.calibration import LogReadings, readings
from pipeline.planner.sglang.flags import renaming_of
from pipeline.planner.sglang.wordings import (
    CAUSES,
    DEATHS,
    HARMLESS,
    OOM,
    SPECULATION_FRAME,
    STATE_FRAME,
    SYMPTOM,
    CauseKind,
    LaunchStage,
    Pattern,
)

# Start of the line that the worker writes to the log before each launch
LAUNCH_MARK = "--- launch "

_MOST_EVIDENCE_LINES = 6
_MOST_LINE_CHARACTERS = 300
_MOST_QUOTED_CHARACTERS = 140
# A py-spy dump of a stuck engine has about 100 lines per rank, an argparse usage about 600.
_MOST_LINES_READ_BACK = 6000
# assumed: what other ranks print in the second or two before they fail too
_LINES_OF_OTHER_RANKS = 120
_TRACEBACK = "Traceback (most recent call last)"
# assumed: a frame is a line or two with its source, and a scheduler's stack 100 deep at most
_MOST_FRAME_LINES = 400
# assumed: display and monitoring processes use less on a server's card
_OTHERS_MEMORY_GIB = 1.0
# SGLang itself calls ranks unbalanced below 0.9; contexts and communicators use up to 0.04.
_FREE_BEFORE_FRACTION = 0.88

# Lines of a log: who wrote them, and what stage they show
_STAGES: tuple[LaunchStage, ...] = (
    "start", "weights", "draft_weights", "pools", "capture", "ready", "serving",
)  # fmt: skip
_RANK = re.compile(r"^\[[^\]]*?\b((?:DP\d+ )?(?:PP\d+ )?TP\d+)\b")
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d[^\]]*\]")
_WORKS = re.compile(r"\b(?:Decode|Prefill) batch\b")
_POOL_LINE = re.compile(
    r"(?:KV|Mamba) Cache is allocated|Memory pool end|Use sliding window memory"
)
_CAPTURE_BEGIN = re.compile(
    r"Capture .*(?:cuda graph|CUDA graph|draft extend) begin", re.IGNORECASE
)
# Lines with a figure worth quoting before the failure
_FIGURE = re.compile(r"avail mem=|max_total_num_tokens=|Cache is allocated|#running-req")

# Sizes in the messages of torch: of 2.3 and later, and of older releases
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)"
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_FREE_NEW = re.compile(rf"of which {_SIZE} is free")
_FREE_OLD = re.compile(rf"; {_SIZE} free")
_TOTAL_NEW = re.compile(rf"total capac(?:i)?ty of {_SIZE}")
_TOTAL_OLD = re.compile(rf"{_SIZE} total capacity")
_OTHER = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_OURS = re.compile(rf"this process has {_SIZE} memory in use")
_GIB_OF = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}

_WORDS: dict[CauseKind, str] = {
    "weights": "the weights do not fit on the card",
    "draft_weights": "the draft's weights do not fit next to the model's",
    "pool": "the memory fraction leaves nothing for the KV pool",
    "state_pool": "the memory fraction leaves too few state slots",
    "graph_capture": "memory ran out while CUDA graphs were captured",
    "runtime": "the card's memory ran out while serving",
    "tokens_ran_out": "the KV pool had no room for the tokens of a batch",
    "pool_leak": "SGLang lost track of the slots of its pools",
    "speculation": "SGLang crashed inside speculative decoding",
    "state_path": "SGLang crashed inside linear attention",
    "unbalanced": "another process uses memory of the card",
    "kernel": "CUDA, the driver or a kernel does not support this card",
    "gpu_fault": "the GPU or a kernel on it failed",
    "flag": "SGLang rejects a flag",
    "model_missing": "the model or its tokenizer is not found, or not known to this release",
    "hub_refused": "the hub refuses access to the model",
    "hub_unreachable": "the hub is unreachable",
    "port": "a port is in use",
    "host_memory": "the node ran out of host memory",
    "nccl": "the GPUs lost each other (NCCL)",
    "disk_full": "a disk is full",
    "watchdog": "the engine hung and its own watchdog stopped it",
    "killed": "the engine was killed from outside",
    "unknown": "the engine failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OomFigures:
    """Figures that torch prints when an allocation fails; None where its wording lacks one."""

    tried_gib: float | None
    free_gib: float | None
    total_gib: float | None
    others_gib: float
    """Used by other processes on the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The cause of an engine's failure."""

    kind: CauseKind
    stage: LaunchStage
    """The stage that the launch had reached."""
    summary: str
    evidence: tuple[str, ...]
    oom: OomFigures | None = None
    flag: str | None = None
    """The flag that was refused, without dashes."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line and how far the rank that wrote it had come."""

    text: str
    stage: LaunchStage


# -- figures


def figures(log: str) -> LogReadings | None:
    """Return the figures of the log's last launch, or None where it printed none."""
    try:
        return readings(last_launch(log))
    except PlanError:
        return None


def last_launch(log: str) -> str:
    """Return the log from the last launch on."""
    mark = log.rfind(f"\n{LAUNCH_MARK}")
    return log[mark + 1 :] if mark >= 0 else log


# -- the cause


def failure_cause(log: str, *, status: int | None = None, kernel_kills: int = 0) -> Cause:
    """Return the one cause of an engine's failure.

    `status` is the exit status of its process, 128 + n for signal n, or None while it runs.
    `kernel_kills` counts the processes that the kernel has killed for memory since the launch.
    """
    lines = last_launch(log).splitlines()
    staged = list(_staged(lines))
    match = _strongest(staged)
    if match is None:
        return _cause_by_status(staged, status, kernel_kills)
    at, kind = match
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


def _strongest(staged: list[_Line]) -> tuple[int, CauseKind] | None:
    """Find the first line of the strongest cause after the last sign of work.

    Another rank may print a batch after the error, so a few lines before that are searched too.
    Errors far before it were survived.
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
    staged: list[_Line], begin: int, patterns: tuple[Pattern, ...]
) -> tuple[int, CauseKind] | None:
    for kind, pattern in patterns:
        for at in range(begin, len(staged)):
            text = staged[at].text
            if pattern.search(text) and not HARMLESS.search(text):
                return at, kind
    return None


# -- stages


def _staged(lines: list[str]) -> Iterator[_Line]:
    """Yield each line with the stage of its rank; a traceback has the rank of the line above."""
    stages: dict[str, LaunchStage] = {}
    loads: dict[str, int] = {}
    rank = ""
    furthest: LaunchStage = "start"
    for text in lines:
        prefix = _RANK.match(text)
        if prefix:
            rank = prefix[1]
        elif _STAMP.match(text):
            rank = ""
        stage = _next_stage(text, stages.get(rank, "start"), loads, rank)
        stages[rank] = stage
        if _STAGES.index(stage) > _STAGES.index(furthest):
            furthest = stage
        # The parent loads nothing itself: its lines have the stage of its furthest rank.
        yield _Line(text, furthest if stage == "start" else stage)


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


def _refined(
    kind: CauseKind, stage: LaunchStage, oom: OomFigures | None, lines: list[str], at: int
) -> CauseKind:
    """Attribute a failure by what is near it: the stage, other processes, or the traceback."""
    if kind == "flag" and stage == "serving" and not _is_of_parser(lines[at]):
        # Flags are checked before an engine serves; its assertions may have the same words.
        kind = "unknown"
    if kind == "unknown":
        return _path_of_exception(lines, at)
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


def _is_of_parser(line: str) -> bool:
    return _refused_flag(line) is not None


def _path_of_exception(lines: list[str], at: int) -> CauseKind:
    """Return the part of the scheduler that raised: the innermost frame that is of one."""
    for line in reversed(lines[max(0, at - _MOST_FRAME_LINES) : at]):
        if _TRACEBACK in line:
            break
        if STATE_FRAME.search(line):
            return "state_path"
        if SPECULATION_FRAME.search(line):
            return "speculation"
    return "unknown"


def _inside_capture(lines: list[str]) -> CauseKind:
    """Return the cause of a failed capture: memory, unless a kernel cannot run on the card."""
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


def _oom_near(lines: list[str], at: int) -> OomFigures | None:
    """Return the figures near a line, from the most complete wording that has a size."""
    near = (lines[at], *lines[at + 1 : at + 12], *reversed(lines[max(0, at - 40) : at]))
    sized = [text for text in near if OOM.search(text) and _TRIED.search(text)]
    complete = [text for text in sized if _FREE_NEW.search(text) or _FREE_OLD.search(text)]
    return _oom_figures((complete or sized)[0]) if sized else None


def _oom_figures(text: str) -> OomFigures:
    processes = [_gib(size) for size in _OTHER.finditer(text)]
    # In a container torch lists itself among the other processes: the largest is its own.
    others = sum(processes) if _OURS.search(text) else sum(processes) - max(processes, default=0.0)
    return OomFigures(
        tried_gib=_size(text, _TRIED),
        free_gib=_size(text, _FREE_NEW, _FREE_OLD),
        total_gib=_size(text, _TOTAL_NEW, _TOTAL_OLD),
        others_gib=round(others, 3),
    )


def _size(text: str, *patterns: re.Pattern[str]) -> float | None:
    size = next((match for pattern in patterns if (match := pattern.search(text))), None)
    return round(_gib(size), 4) if size else None


def _gib(size: re.Match[str]) -> float:
    return float(size[1]) * _GIB_OF[size[2]]


# -- refused flags


def _refused_flag(line: str) -> str | None:
    """Return the flag that the argument parser rejects."""
    refused = re.search(r"(?:unrecognized arguments|ambiguous option|argument):? --?([\w-]+)", line)
    return refused[1] if refused else None


# -- words


def _cause_by_status(staged: list[_Line], status: int | None, kernel_kills: int) -> Cause:
    """Return the cause by the exit status, where nothing in the log names one."""
    stage = staged[-1].stage if staged else "start"
    lines = [line.text for line in staged if line.text.strip() and not SYMPTOM.search(line.text)]
    evidence = tuple(_cut(text) for text in lines[-3:])
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
    return f"the engine exited with status {status} and logged no error"


def _summary(kind: CauseKind, stage: LaunchStage, oom: OomFigures | None, line: str) -> str:
    words = _WORDS[kind]
    if oom is not None and oom.tried_gib is not None:
        parts = [f"tried {oom.tried_gib:g} GiB"]
        if oom.free_gib is not None and oom.total_gib is not None:
            parts.append(f"{oom.free_gib:g} of {oom.total_gib:g} GiB free")
        if oom.others_gib:
            parts.append(f"{oom.others_gib:g} GiB used by others")
        return f"{words} ({', '.join(parts)})"
    if kind == "flag" and (hint := renaming_of(_refused_flag(line) or "")):
        return f"{words}: {hint}"
    if kind in ("killed", "watchdog", "unknown"):
        words = f"{words} at stage {stage!r}"
    return f"{words}: {_bare(line)}"


def _bare(line: str) -> str:
    """Return the line without its time stamp, cut to fit into one line of ours."""
    return _cut(_STAMP.sub("", line).strip())[:_MOST_QUOTED_CHARACTERS]


def _evidence(lines: list[str], at: int) -> tuple[str, ...]:
    """Return the last figure before the failure, the line that names it, and what followed."""
    before = [text for text in lines[max(0, at - 200) : at] if _FIGURE.search(text)][-1:]
    after = [text for text in lines[at + 1 : at + 12] if text.strip() and not SYMPTOM.search(text)]
    return tuple(_cut(text) for text in [*before, lines[at], *after][:_MOST_EVIDENCE_LINES])


def _cut(text: str) -> str:
    text = text.strip()
    if len(text) <= _MOST_LINE_CHARACTERS:
        return text
    return text[: _MOST_LINE_CHARACTERS - 3] + "..."
