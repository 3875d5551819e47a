"""Read the cards that this process may use, from NVML or `nvidia-smi`.

Without NVML's Python package, `nvidia-smi` is run; without both, nothing is known and the run file
has to name the card. Free memory is read before any engine of ours has loaded.
"""

import csv
import importlib
import importlib.util
import io
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import Any

from pipeline.planner.cards import gpu_reported
from schemas.plan import Gpu
from schemas.units import MIB

_SMI_TIMEOUT_S = 20.0
_FIELDS = "index,uuid,name,memory.total,memory.free,compute_cap,power.draw,power.limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Reading of one card; a value that the driver does not report is None."""

    index: int
    uuid: str
    name: str
    total_mib: int
    free_mib: int
    compute_capability: int | None
    power_w: float | None
    power_limit_w: float | None


def visible_cards() -> tuple[Card, ...]:
    """Return the cards of CUDA_VISIBLE_DEVICES in its order, or all; () if unknown."""
    found = _by_nvml() if importlib.util.find_spec("pynvml") else None
    cards = _by_nvidia_smi() if found is None else found
    return _visible(cards, os.environ.get("CUDA_VISIBLE_DEVICES"))


def planned_card(cards: tuple[Card, ...]) -> Gpu | None:
    """Return the card with the least free memory, for which a launch on all cards is planned.

    Its free memory replaces the catalogue's total, so the memory of other processes is not planned
    with. None without cards.
    """
    if not cards:
        return None
    card = min(cards, key=lambda one: one.free_mib)
    known = gpu_reported(card.name, card.total_mib)
    return replace(
        known,
        smi_mib=card.total_mib,
        total_bytes=min(known.total_bytes, card.free_mib * MIB),
        compute_capability=card.compute_capability or known.compute_capability,
    )


def shared_cards(cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """Return the cards on which other processes use more than a tenth of the memory."""
    return tuple(card for card in cards if card.free_mib < 0.9 * card.total_mib)


def _visible(cards: tuple[Card, ...], chosen: str | None) -> tuple[Card, ...]:
    """Select cards by index, UUID or the beginning of one; a MIG slice matches none."""
    if chosen is None:
        return cards
    found = []
    for word in filter(None, (part.strip() for part in chosen.split(","))):
        named = [
            card
            for card in cards
            if (word.isdigit() and card.index == int(word))
            or (word.startswith("GPU-") and card.uuid.startswith(word))
        ]
        if not named:
            # CUDA itself ignores everything from the first unknown name on.
            break
        found.append(named[0])
    return tuple(found)


# -- NVML


def _by_nvml() -> tuple[Card, ...] | None:
    """Read the cards, or None where the library fails; `nvidia-smi` may still work."""
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return tuple(_nvml_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _nvml_card(nvml: Any, index: int) -> Card:  # noqa: ANN401 - the package ships no types
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Card(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_mib=memory.total // MIB,
        free_mib=memory.free // MIB,
        compute_capability=major * 10 + minor,
        power_w=_watts(nvml, nvml.nvmlDeviceGetPowerUsage, handle),
        power_limit_w=_watts(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
    )


def _watts(nvml: Any, ask: Any, handle: Any) -> float | None:  # noqa: ANN401 - no types
    try:
        return float(ask(handle)) / 1000
    except nvml.NVMLError:
        # Not every card measures its power.
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# -- nvidia-smi


def _by_nvidia_smi() -> tuple[Card, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603 - nothing in it comes from outside
            command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        # The driver hangs; the engine's own start will show what is wrong.
        return ()
    if done.returncode:
        return ()
    rows = csv.reader(io.StringIO(done.stdout), skipinitialspace=True)
    cards = [_smi_card([field.strip() for field in row]) for row in rows if row]
    return tuple(card for card in cards if card is not None)


def _smi_card(row: list[str]) -> Card | None:
    """Parse a line of nvidia-smi; None where it lacks the memory, as with MIG or unified memory."""
    if len(row) != _FIELDS.count(",") + 1:
        return None
    index, uuid, name, total, free, capability, power, limit = row
    if not (index.isdigit() and total.isdigit() and free.isdigit()):
        return None
    return Card(
        index=int(index),
        uuid=uuid,
        name=name,
        total_mib=int(total),
        free_mib=int(free),
        compute_capability=_capability(capability),
        power_w=_number(power),
        power_limit_w=_number(limit),
    )


def _capability(text: str) -> int | None:
    major, dot, minor = text.partition(".")
    return int(major) * 10 + int(minor) if dot and (major + minor).isdigit() else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        # "[N/A]" or "[Not Supported]".
        return None
