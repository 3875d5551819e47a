"""The catalogue of cards, and the card that a name means.

A card has two totals: `smi_mib`, from which SGLang derives its defaults, and `total_bytes`, which
CUDA can allocate. Nothing here knows about models or launches.
"""

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import PlanError
from schemas.estimate import GpuSpeed, PriceKind
from schemas.plan import Gpu
from schemas.units import GIB

_DATA = Path(__file__).with_name("data") / "gpus.json"
# Bandwidth of a PCIe 5 x16 slot between cards. measured: peer writes on RTX PRO 6000 boards, 53-56
# GB/s on one socket and 39-51 across two (rtx6kpro, 2026-05-17)
_PCIE_GB_PER_S = 50
# nvidia-smi's total over torch's; 1.004 to 1.0065 on the cards where both are known
_SMI_PER_TORCH = 1.0056
# Totals of one card differ by less between drivers; memory sizes of one name by far more.
_SAME_MEMORY_FRACTION = 0.02
# Above every score for a part of a card's name
_FROM_WHOLE_NAME = 500
# assumed: the median of the listed cards, which lie between 0.44 and 0.78
_UNLISTED_CONTEXT_BYTES = int(0.65 * GIB)
# Words in the names of vendors and cloud catalogues that distinguish no cards
_NOISE = {"nvidia", "geforce", "amd", "instinct", "gpu", "tensor", "core", "edition", "card"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Price of one provider."""

    kind: PriceKind
    low_usd_per_gpu_hour: float
    high_usd_per_gpu_hour: float
    source: str
    date: str
    """Empty where it is unknown."""


def gpu_named(text: str) -> Gpu:
    """Return the card that `text` names, in any unambiguous spelling. Raises PlanError."""
    words = _words(text)
    cards = _catalogue()
    scores = {key: _score(words, names) for key, (_, names) in cards.items()}
    best = max(scores.values())
    if best <= 0:
        near = difflib.get_close_matches(_dashed(text), cards, n=3, cutoff=0.5)
        hint = f"; the nearest: {', '.join(near)}" if near else ""
        raise PlanError(f"unknown GPU {text!r}{hint}; known: {', '.join(sorted(cards))}")
    matching = _alike(words) if best < _FROM_WHOLE_NAME else _with_score(scores, best)
    if len(matching) > 1:
        raise PlanError(f"{text!r} may be any of several GPUs; name one: {', '.join(matching)}")
    return cards[matching[0]][0]


def gpu_key(gpu: Gpu) -> str | None:
    """Return the short name of a card of the catalogue; None for another one."""
    return next((key for key, (listed, _) in _catalogue().items() if listed.name == gpu.name), None)


def _alike(words: frozenset[str]) -> list[str]:
    """Return the cards that have a spelling with all of these words, which are only a part."""
    cards = _catalogue().items()
    return [key for key, (_, names) in cards if any(words <= name for name in names)]


def _with_score(scores: Mapping[str, int], score: int) -> list[str]:
    return [key for key, found in scores.items() if found == score]


def gpu_of(name: str, memory_gib: float | None) -> Gpu:
    """Return the card of a name and, where one is given, of another memory size.

    With a memory size the name may be unlisted, or "". Raises PlanError otherwise.
    """
    if memory_gib is None:
        return gpu_named(name)
    try:
        return gpu_with_memory(gpu_named(name), memory_gib)
    except PlanError:
        return gpu_of_memory(memory_gib, name)


def gpu_reported(name: str, smi_mib: int) -> Gpu:
    """Return the card that a driver reports: the catalogue's where name and memory agree."""
    gpu = gpu_of(name, smi_mib / 1024 / _SMI_PER_TORCH)
    if not gpu.known:
        return gpu
    listed = gpu_named(name)
    return listed if abs(listed.smi_mib - smi_mib) <= _SAME_MEMORY_FRACTION * smi_mib else gpu


def gpu_of_memory(gib: float, name: str = "") -> Gpu:
    """Return a card that the catalogue lacks, known by its memory alone. Raises PlanError."""
    if not 0 < gib < math.inf:
        raise PlanError(f"--gpu-memory-gib must be above 0, got {gib}")
    return Gpu(
        name=name or f"unlisted GPU with {gib:g} GiB",
        # assumed: Hopper, whose defaults are between those of other cards
        compute_capability=90,
        smi_mib=int(gib * 1024 * _SMI_PER_TORCH),
        total_bytes=int(gib * GIB),
        context_bytes=_UNLISTED_CONTEXT_BYTES,
        nvlink=True,
        unified_memory=False,
        known=False,
    )


def gpu_with_memory(gpu: Gpu, gib: float) -> Gpu:
    """Return the card with another amount of memory. Raises PlanError."""
    other = gpu_of_memory(gib, gpu.name)
    return replace(gpu, smi_mib=other.smi_mib, total_bytes=other.total_bytes)


def speed_of(gpu: Gpu) -> GpuSpeed:
    """Return the card's bandwidths and FLOPS. Raises PlanError for an unlisted card."""
    entry = _entries_by_name().get(gpu.name)
    if entry is None:
        raise PlanError(
            f"no speed is known for {gpu.name!r}; known: {', '.join(sorted(_catalogue()))}"
        )
    speed = entry["speed"]
    nvlink = speed["nvlink_gb_per_s"] > 0
    link = speed["nvlink_gb_per_s"] if nvlink else min(speed["pcie_gb_per_s"], _PCIE_GB_PER_S)
    return GpuSpeed(
        vendor="amd" if gpu.name.startswith("Instinct") else "nvidia",
        memory_bytes_per_s=speed["memory_gb_per_s"] * 1e9,
        bf16_flops=speed["bf16_tflops"] * 1e12,
        fp8_flops=(speed["fp8_tflops"] or 0) * 1e12,
        fp4_flops=(speed["fp4_tflops"] or 0) * 1e12,
        vector_flops=speed["vector_tflops"] * 1e12,
        link_bytes_per_s=link * 1e9,
        nvlink=nvlink,
        vcpus_per_gpu=entry["node_vcpus_per_gpu"],
        source=speed["source"],
    )


def speed_known(gpu: Gpu) -> bool:
    """Return True for a card whose speed is listed."""
    return gpu.name in _entries_by_name()


def listed_prices(gpu: Gpu) -> tuple[Listing, ...]:
    """Return all listings of the card; none for an unlisted card."""
    entry = _entries_by_name().get(gpu.name, {})
    return tuple(Listing(**listing) for listing in entry.get("prices", ()))


def gpu_keys() -> tuple[str, ...]:
    """Return the short names of all cards in the catalogue."""
    return tuple(_catalogue())


@cache
def _entries_by_name() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(_DATA.read_text())["gpus"]}


@cache
def _catalogue() -> dict[str, tuple[Gpu, tuple[frozenset[str], ...]]]:
    cards = {}
    for entry in json.loads(_DATA.read_text())["gpus"]:
        gpu = Gpu(
            name=entry["name"],
            compute_capability=entry["compute_capability"],
            smi_mib=entry["smi_mib"],
            total_bytes=int(entry["torch_total_gib"] * GIB),
            context_bytes=int(entry["context_gib"] * GIB),
            nvlink=entry["nvlink"],
            unified_memory=entry["unified_memory"],
            known=True,
        )
        spellings = (entry["key"], entry["name"], *entry["aliases"])
        cards[entry["key"]] = (gpu, tuple(_words(spelling) for spelling in spellings))
    return cards


def _dashed(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _words(text: str) -> frozenset[str]:
    """Split a name into words: `B200 180GB` like `b200-180gb`, `rtxpro6000` like `rtx pro 6000`."""
    spaced = re.sub(r"[^a-z0-9]+", " ", text.lower())
    spaced = re.sub(r"\b(rtx|pro|geforce)(?=[a-z0-9])", r"\1 ", spaced)
    spaced = re.sub(r"\b(rtx|pro|geforce)(?=[a-z0-9])", r"\1 ", spaced)
    spaced = re.sub(r"(\d+) gb\b|(\d+) gib\b", r"\1\2gb", spaced)
    return frozenset(spaced.split()) - _NOISE


def _score(words: frozenset[str], names: tuple[frozenset[str], ...]) -> int:
    """Return how well the words match one of the card's spellings; 0 is no match.

    A spelling and more words, as drivers report a card, counts more than a part of a spelling, and
    a spelling with the memory more than one without.
    """
    best = 0
    for name in names:
        if name == words:
            return 2 * _FROM_WHOLE_NAME
        if name and name <= words:
            memory = any(re.fullmatch(r"\d+gb", word) for word in name)
            best = max(best, _FROM_WHOLE_NAME + 10 * len(name) + memory - len(words - name))
        if words and words <= name and any(ch.isdigit() for word in words for ch in word):
            best = max(best, 5 * len(words) - len(name - words))
    return best
