"""Read the kernel's counters of processes."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Counters of an engine and everything below it; any difference is a sign of life."""

    log_bytes: int
    io_bytes: int
    cpu_ticks: int


def processes_below(root: int) -> list[int]:
    """List every process below one, at any depth."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, frontier = [], [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def cpu_ticks(pid: int) -> int:
    fields = _stat_fields(pid)
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def io_bytes(pid: int) -> int:
    """Count bytes read and written by any call, on network file systems too."""
    lines = dict(line.split(": ") for line in proc_text(f"/proc/{pid}/io").splitlines())
    return int(lines.get("rchar", 0)) + int(lines.get("wchar", 0))


def kernel_kills() -> int:
    """Count the out-of-memory kills in this container or machine."""
    own = proc_text("/sys/fs/cgroup/memory.events")
    counted = re.findall(r"^oom_kill (\d+)$", own or proc_text("/proc/vmstat"), re.M)
    return sum(map(int, counted))


def proc_text(path: str) -> str:
    """Read a file of the kernel; empty where the process is gone or access is denied."""
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; none for a process that is gone."""
    return proc_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
