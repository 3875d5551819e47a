"""Cards of the node: from NVML, from `nvidia-smi`, by CUDA_VISIBLE_DEVICES, for the planner."""

import sys
from pathlib import Path

import pytest

from pipeline.engines.gpus import Card, planned_card, shared_cards, visible_cards
from schemas.units import MIB

SMI = """\
0, GPU-aaaa1111, NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 97248, 12.0, 85.20, 600.00
1, GPU-bbbb2222, NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 60100, 12.0, 310.50, 600.00
2, GPU-cccc3333, NVIDIA B200, 183359, 182600, 10.0, [N/A], 1000.00
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `nvidia-smi` on the PATH that prints the file beside it."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\ncat "{tmp_path}/answer" && exit $(cat "{tmp_path}/status")\n')
    script.chmod(0o755)
    (tmp_path / "answer").write_text(SMI)
    (tmp_path / "status").write_text("0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return tmp_path


def test_cards_are_read_from_nvidia_smi(smi: Path) -> None:
    cards = visible_cards()
    assert [card.index for card in cards] == [0, 1, 2]
    assert cards[0] == Card(
        index=0,
        uuid="GPU-aaaa1111",
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        total_mib=97887,
        free_mib=97248,
        compute_capability=120,
        power_w=85.2,
        power_limit_w=600.0,
    )
    assert cards[2].power_w is None


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("2,0", [2, 0]),
        ("GPU-bbbb", [1]),
        ("", []),
        ("0,7,1", [0]),
        ("MIG-0f-1", []),
    ],
)
def test_cards_are_those_that_ray_gave(
    smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, seen: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [card.index for card in visible_cards()] == seen


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "9"),
        ("0, GPU-a, NVIDIA A100-SXM4-80GB MIG 1g.10gb, [N/A], [N/A], 8.0, [N/A], [N/A]", "0"),
        ("", "0"),
    ],
)
def test_driver_that_tells_nothing_leaves_it_to_the_run_file(
    smi: Path, answer: str, status: str
) -> None:
    (smi / "answer").write_text(answer)
    (smi / "status").write_text(status)
    assert visible_cards() == ()
    assert planned_card(()) is None


def test_no_driver_leaves_it_to_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert visible_cards() == ()


def test_launch_is_planned_for_the_card_with_the_least_free_memory(smi: Path) -> None:
    cards = visible_cards()
    alone = planned_card(cards[:1])
    assert alone is not None
    assert alone.name.startswith("RTX PRO 6000")
    assert alone.compute_capability == 120
    # All of it is free, so that torch's own total, 94.97 GiB, is the smaller figure.
    assert 94.9 < alone.total_bytes / 2**30 < 95.0
    shared = planned_card(cards[:2])
    assert shared is not None
    assert shared.total_bytes == 60100 * MIB
    assert [card.index for card in shared_cards(cards)] == [1]


def test_card_that_the_catalogue_lacks_is_known_by_its_memory(smi: Path) -> None:
    row = "0, GPU-a, NVIDIA Quux 9000, 131072, 130900, 13.0, 10.00, 900.00"
    (smi / "answer").write_text(row)
    card = planned_card(visible_cards())
    assert card is not None
    assert (card.name, card.compute_capability, card.known) == ("NVIDIA Quux 9000", 130, False)
    assert card.smi_mib == 131072


NVML = '''
class NVMLError(Exception):
    """Any of the library's errors."""

class Memory:
    total, free = 97887 << 20, 97000 << 20

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetCudaComputeCapability(handle): return (12, 0)
def nvmlDeviceGetUUID(handle): return b"GPU-%d" % handle
def nvmlDeviceGetName(handle): return "NVIDIA RTX PRO 6000"
def nvmlDeviceGetPowerUsage(handle): return 85200
def nvmlDeviceGetEnforcedPowerLimit(handle): raise NVMLError
'''


def test_nvml_is_asked_first_where_it_is_installed(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    (smi / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(str(smi))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (card,) = visible_cards()
    assert (card.uuid, card.free_mib, card.power_w) == ("GPU-1", 97000, 85.2)
    assert card.power_limit_w is None
    sys.modules.pop("pynvml")


def test_nvml_without_a_driver_gives_way_to_nvidia_smi(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    (smi / "pynvml.py").write_text(NVML.replace("nvmlInit(): pass", "nvmlInit(): raise NVMLError"))
    monkeypatch.syspath_prepend(str(smi))
    assert len(visible_cards()) == 3
    sys.modules.pop("pynvml")
