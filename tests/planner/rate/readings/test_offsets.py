"""What readings say of other launches, worked out by hand and on the readings that ship."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest

from pipeline.models.dtypes import load_model_as
from pipeline.planner.rate.readings.offsets import (
    LEVELS,
    NO_OFFSETS,
    Posterior,
    offsets_for,
    support_of,
)
from pipeline.planner.rate.readings.stored import (
    EFFECTS_FILE,
    PARTS,
    Anchor,
    Effects,
    readings,
    stored_effects,
)
from pipeline.planner.rate.readings.traits import Traits, traits_of
from tests.scores.throughput_readings import Reading, reading_of

HERE = Traits(
    engine="sglang", vendor="nvidia", card="H200", kind="Gqa dense", family="64 x 5120",
    model="Qwen3-32B", format="bf16",
)  # fmt: skip
ELSEWHERE = Traits(
    engine="vllm", vendor="nvidia", card="B200", kind="Mla experts", family="61 x 7168",
    model="DeepSeek-V3", format="fp8",
)  # fmt: skip
ALL_WEIGHTS = (1.0, 0.0, 0.0, 0.0, 0.0)


def anchor(log_ratio: float, traits: Traits = HERE, weight: float = 1.0) -> Anchor:
    return Anchor(
        traits=traits, log_ratio=log_ratio, shares=ALL_WEIGHTS, weight=weight, source="here",
        date="2026-11-30",
    )  # fmt: skip


def posterior(*anchors: Anchor, **level_sds: float) -> Posterior:
    """A posterior of effects on all parts alike, with a noise of 0.1."""
    sds = {level: (level_sds.get(level.replace(" ", "_"), 0.0),) * len(PARTS) for level in LEVELS}
    return Posterior(anchors, Effects(anchors=anchors, level_sds=sds, noise_sd=0.1, scale=1.0))


def test_offset_of_a_pair_is_the_shrunken_mean_of_its_readings() -> None:
    found = posterior(anchor(0.2), anchor(0.4), pair=0.2).offsets(HERE)
    # 0.04 / (0.04 + 0.01 / 2) of the mean 0.3
    assert found.means[0] == pytest.approx(0.3 * 0.04 / 0.045)
    assert found.time_factors[0] == pytest.approx(math.exp(-found.means[0]))
    # what is left open, 0.04 x 0.005 / 0.045, beside the noise of one reading
    assert found.log_sd(ALL_WEIGHTS) ** 2 == pytest.approx(0.04 * 0.005 / 0.045 + 0.01)


def test_readings_of_the_same_card_count_by_the_cards_part_of_the_variance() -> None:
    other = replace(ELSEWHERE, card="H200")
    found = posterior(anchor(0.3, other), card=0.1, pair=0.2).offsets(HERE)
    # card alone is shared: 0.01 of 0.01 + 0.04 + 0.01
    assert found.means[0] == pytest.approx(0.3 * 0.01 / 0.06)
    assert found.log_sd(ALL_WEIGHTS) ** 2 == pytest.approx(0.05 - 0.01 * 0.01 / 0.06 + 0.01)


def test_readings_without_a_common_trait_say_nothing() -> None:
    found = posterior(anchor(0.3, ELSEWHERE), card=0.1, engine=0.1, pair=0.2).offsets(HERE)
    assert found.means == (0.0,) * len(PARTS)
    assert found.log_sd(ALL_WEIGHTS) ** 2 == pytest.approx(0.01 + 0.01 + 0.04 + 0.01)


def test_an_outlier_counts_by_its_weight() -> None:
    plain = posterior(anchor(0.0), anchor(1.0), pair=0.2).offsets(HERE)
    weighed = posterior(anchor(0.0), anchor(1.0, weight=0.1), pair=0.2).offsets(HERE)
    assert plain.means[0] == pytest.approx(0.5 * 0.04 / 0.045)
    assert 0 < weighed.means[0] < 0.3 * plain.means[0]


def test_a_vendor_without_readings_of_a_kind_is_wide() -> None:
    here = offsets_for(HERE).log_sd(ALL_WEIGHTS)
    amd = replace(HERE, vendor="amd", card="Instinct MI300X")
    # 0.3 of the vendor on top of what is open on a card of the readings' own
    assert offsets_for(amd).log_sd(ALL_WEIGHTS) ** 2 > here**2 + 0.9 * 0.3**2
    alone = posterior(anchor(0.1, amd), vendor=0.3)
    assert alone.offsets(HERE).means[0] == 0.0
    assert alone.offsets(amd).means[0] == pytest.approx(0.1 * 0.09 / 0.10)


def test_models_count_by_their_shapes() -> None:
    names = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3")
    r1, v3 = (traits_of(load_model_as(name, "fp8"), "H200", "sglang") for name in names)
    assert (r1.family, r1.kind, r1.format) == (v3.family, v3.kind, v3.format)
    assert r1.model != v3.model
    tuned = traits_of(load_model_as("nvidia/DeepSeek-V3.1-NVFP4", "nvfp4"), "H200", "sglang")
    assert (tuned.family, tuned.format) == (v3.family, "nvfp4")


def test_support_names_the_nearest_readings_first_and_each_once() -> None:
    on_another_card = replace(HERE, card="H100 80GB")
    anchors = [
        anchor(0.1), anchor(0.1, replace(HERE, format="fp8")), anchor(0.1, on_another_card),
        replace(anchor(0.1, on_another_card), date=None), anchor(0.1, ELSEWHERE),
    ]  # fmt: skip
    found = support_of(HERE, anchors)
    assert [(each.relation.split(" in ")[0], each.readings) for each in found] == [
        ("this model, card, format and engine", 1), ("this model on this card", 1),
        ("this model on other cards", 2),
    ]  # fmt: skip
    assert (found[2].first_date, found[2].last_date) == ("2026-11-30", "2026-11-30")
    assert support_of(HERE, [anchor(0.1)] * 30 + anchors[2:])[1:] == ()


# --- the readings that ship ---------------------------------------------------------------------


def test_each_reading_has_a_source_and_a_date_or_none() -> None:
    for row in readings():
        assert row["source"], row["id"]
        assert row["date"] is None or row["date"].startswith("20"), row["id"]


# Every twelfth: the others are built the same way.
ROWS = json.loads(EFFECTS_FILE.read_text())["rows"]
SAMPLE = tuple(zip(ROWS, stored_effects().anchors, strict=True))[::12]


@cache
def sample() -> list[tuple[Reading, Anchor]]:
    rows = {row["id"]: row for row in readings()}
    return [
        (reading_of({"kind": "measured", **rows[stored[0]]}), known) for stored, known in SAMPLE
    ]


def test_stored_effects_are_those_of_the_constants_and_the_readings() -> None:
    apart = []
    for item, stored in sample():
        assert item.traits() == stored.traits, item.row["id"]
        error, shares = item.error_and_shares()
        means = item.replica.offsets.means
        offset = sum(share * mean for share, mean in zip(shares, means, strict=True))
        apart.append(abs(error + offset - stored.log_ratio))
    # Only where a peak bounds a part does the first order not hold.
    assert sorted(apart)[int(0.9 * len(apart))] < 0.05
    assert max(apart) < 0.15


def test_readings_move_the_prediction_towards_themselves() -> None:
    with_offsets = [abs(item.error()) for item, _ in sample()]
    constants_alone = [
        abs(item.with_model(item.replica.kernels, NO_OFFSETS).error()) for item, _ in sample()
    ]
    assert sum(with_offsets) < 0.7 * sum(constants_alone)
