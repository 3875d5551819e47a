"""The catalogue of cards: names, memory, speed and prices."""

import pytest

from pipeline.errors import PlanError
from pipeline.planner.cards import (
    gpu_keys,
    gpu_named,
    gpu_of,
    gpu_of_memory,
    gpu_reported,
    listed_prices,
    speed_known,
    speed_of,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx-pro-6000", "RTX PRO 6000 Blackwell"),
        ("rtxpro6000", "RTX PRO 6000 Blackwell"),
        ("RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell"),
        ("B200 180GB", "B200"),
        ("H100-SXM", "H100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("DGX Spark (GB10)", "DGX Spark (GB10)"),
        ("A100-SXM4-40GB", "A100 40GB"),
        ("A100 40 GB", "A100 40GB"),
        ("a100", "A100 80GB"),
        ("5090", "GeForce RTX 5090"),
        ("h20", "H20 96GB"),
        ("NVIDIA H20-141GB", "H20 141GB"),
        ("AMD Instinct MI300X", "Instinct MI300X"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "RTX PRO 6000 Blackwell Max-Q",
        ),
        ("rtx-pro-6000-max-q", "RTX PRO 6000 Blackwell Max-Q"),
        ("RTXPRO6000-MaxQ", "RTX PRO 6000 Blackwell Max-Q"),
        # A spelling with the memory counts more than `a100 pcie`, which has 80 GB.
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
    ],
)
def test_card_is_known_by_any_of_its_spellings(text: str, name: str) -> None:
    assert gpu_named(text).name == name


@pytest.mark.parametrize("key", gpu_keys())
def test_key_of_a_card_names_that_card(key: str) -> None:
    gpu = gpu_named(key)
    assert gpu.known
    assert gpu_named(gpu.name) == gpu
    assert 0.97 < gpu.total_bytes / (gpu.smi_mib << 20) < 1.001


def test_unknown_card_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"^unknown GPU 'voodoo'; known: .*h200"):
        gpu_named("voodoo")
    with pytest.raises(PlanError, match=r"^unknown GPU 'h209'; the nearest: .*h20.*; known: "):
        gpu_named("h209")
    with pytest.raises(PlanError, match="unknown GPU 'rtx'"):
        gpu_named("rtx")


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("rtx-6000", "rtx-pro-6000, rtx-pro-6000-max-q"),
        ("6000", "rtx-pro-6000, rtx-pro-6000-max-q"),
        ("80gb", "a100-80gb, h100, h800"),
        ("h100 h200", "h100, h200"),
    ],
)
def test_name_of_several_cards_is_refused_with_the_choices(text: str, choices: str) -> None:
    with pytest.raises(PlanError) as refused:
        gpu_named(text)
    assert str(refused.value) == f"{text!r} may be any of several GPUs; name one: {choices}"


def test_max_q_card_has_the_memory_of_the_other_and_less_power() -> None:
    full, quiet = gpu_named("rtx-pro-6000"), gpu_named("rtx-pro-6000-max-q")
    assert quiet.total_bytes == full.total_bytes
    assert speed_of(quiet).memory_bytes_per_s == speed_of(full).memory_bytes_per_s
    # 300 W of 600: 110.1 of 125 TFLOPS.
    for rate in ("bf16_flops", "fp8_flops", "fp4_flops", "vector_flops"):
        share = getattr(speed_of(quiet), rate) / getattr(speed_of(full), rate)
        assert share == pytest.approx(0.8808, abs=0.001)
    # Nobody lists a price of its own.
    assert listed_prices(quiet) == ()
    assert gpu_reported("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887) == quiet


def test_memory_replaces_the_name_of_a_card() -> None:
    gpu = gpu_of_memory(48)
    assert (gpu.name, gpu.known) == ("unlisted GPU with 48 GiB", False)
    assert gpu.total_bytes == 48 << 30
    # 48 x 1024 x 1.0056 = 49,427.25 MiB
    assert gpu.smi_mib == 49_427
    assert gpu.compute_capability == 90


@pytest.mark.parametrize("gib", [-1, 0, float("inf"), float("nan")])
def test_memory_that_no_card_has_is_refused(gib: float) -> None:
    with pytest.raises(PlanError, match="--gpu-memory-gib must be above 0"):
        gpu_of_memory(gib)
    with pytest.raises(PlanError, match="--gpu-memory-gib must be above 0"):
        gpu_of("h200", gib)


def test_listed_card_with_another_memory_keeps_the_rest() -> None:
    b200 = gpu_named("b200")
    gpu = gpu_of("b200", 48)
    assert (gpu.name, gpu.compute_capability, gpu.known) == ("B200", 100, True)
    assert (gpu.total_bytes, gpu.smi_mib) == (48 << 30, 49_427)
    assert gpu.nvlink == b200.nvlink
    assert gpu_of("b200", None) == b200


def test_unlisted_card_needs_its_memory() -> None:
    gpu = gpu_of("voodoo", 48)
    assert (gpu.name, gpu.total_bytes, gpu.known) == ("voodoo", 48 << 30, False)
    assert gpu_of("", 48).name == "unlisted GPU with 48 GiB"
    with pytest.raises(PlanError, match="unknown GPU 'voodoo'"):
        gpu_of("voodoo", None)


@pytest.mark.parametrize(
    ("fraction", "is_listed"), [(0.979, False), (0.981, True), (1.0, True), (1.02, True),
                                (1.021, False)],
)  # fmt: skip
def test_reported_card_is_the_listed_one_within_two_percent(
    fraction: float, is_listed: bool
) -> None:
    # 0.981: |1 - 0.981| / 0.981 = 1.94 %; 0.979: 2.15 %; 1.02: 1.96 %; 1.021: 2.06 %
    b200 = gpu_named("b200")
    smi_mib = int(fraction * b200.smi_mib)
    gpu = gpu_reported("NVIDIA B200", smi_mib)
    assert (gpu == b200) is is_listed
    assert (gpu.name, gpu.known) == ("B200", True)
    if not is_listed:
        assert gpu.total_bytes / 2**20 == pytest.approx(smi_mib / 1.0056)


def test_reported_card_that_is_unlisted_has_its_memory() -> None:
    gpu = gpu_reported("Voodoo 5", 49_427)
    assert (gpu.name, gpu.known) == ("Voodoo 5", False)
    assert gpu.total_bytes / 2**30 == pytest.approx(48, rel=1e-4)


# --- speed and prices -------------------------------------------------------------------------


def test_speed_is_in_bytes_and_flops() -> None:
    speed = speed_of(gpu_named("h200"))
    assert (speed.vendor, speed.nvlink) == ("nvidia", True)
    assert speed.memory_bytes_per_s == 4.8e12
    assert speed.link_bytes_per_s == 450e9
    assert (speed.bf16_flops, speed.fp8_flops) == (989e12, 1978e12)
    assert speed.vector_flops == 67e12
    # Hopper has no fp4.
    assert speed.fp4_flops == 0
    assert speed_of(gpu_named("b200")).fp4_flops == 9e15


def test_card_without_nvlink_is_linked_by_its_slot() -> None:
    speed = speed_of(gpu_named("rtx-pro-6000"))
    assert not speed.nvlink
    # measured between cards; the slot alone would give 64 GB/s.
    assert speed.link_bytes_per_s == 50e9
    assert speed.vcpus_per_gpu == 30
    # A PCIe 4 slot gives less than that.
    assert speed_of(gpu_named("rtx-3090")).link_bytes_per_s == 32e9


def test_vendor_follows_the_name() -> None:
    assert speed_of(gpu_named("mi300x")).vendor == "amd"


def test_unlisted_card_has_neither_speed_nor_prices() -> None:
    gpu = gpu_of_memory(80, "voodoo")
    assert not speed_known(gpu)
    assert speed_known(gpu_named("h200"))
    assert listed_prices(gpu) == ()
    with pytest.raises(PlanError, match=r"no speed is known for 'voodoo'; known: a100-40gb, "):
        speed_of(gpu)


def test_prices_are_listed_by_kind_with_their_source() -> None:
    listings = listed_prices(gpu_named("h100"))
    assert {"on_demand", "spot"} <= {listing.kind for listing in listings}
    assert all(0 < one.low_usd_per_gpu_hour <= one.high_usd_per_gpu_hour for one in listings)
    assert all(listing.source for listing in listings)
