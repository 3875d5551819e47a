"""What a run has cost and will: GPU-hours by card, at the user's price or the listed one. Pure.

An engine's card is the one that its readings name; else the run file's, where that names one kind.
Where a card or its price is not known there are no dollars, and a line says why.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from pipeline.errors import PlanError
from pipeline.planner.cards import gpu_named, gpu_of_memory
from pipeline.planner.estimate.prices import prices_of
from schemas.config import HardwareConfig, RunFile
from schemas.estimate import Band, Price
from schemas.progress import slot_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSpending:
    """The part of one kind of card."""

    gpu: str
    num_gpus: int
    price: Price
    gpu_hours: float
    usd_so_far: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Dollars of all cards."""

    cards: tuple[CardSpending, ...]
    gpu_hours: float
    usd_so_far: float
    usd_to_go: Band | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSpending:
    """Why no dollars are known."""

    why: str


def spending(
    config: RunFile | None,
    *,
    slots: Sequence[str],
    cards: Mapping[str, str],
    ran_s: float,
    left_s: Band | None,
    today: date,
) -> Spending | NoSpending:
    """`slots` are the places of engines that were seen; `cards` names the card of a worker."""
    if config is None:
        return NoSpending(why="the folder has no copy of the run file")
    counts = _gpus_by_card(config, slots, cards)
    if isinstance(counts, NoSpending):
        return counts
    found = []
    for gpu, number in counts.items():
        price = _price(gpu, config.hardware, today)
        if isinstance(price, NoSpending):
            return price
        hours = ran_s / 3600 * number
        found.append(
            CardSpending(
                gpu=gpu,
                num_gpus=number,
                price=price,
                gpu_hours=hours,
                usd_so_far=hours * price.usd_per_gpu_hour,
            )
        )
    usd_a_second = sum(card.num_gpus * card.price.usd_per_gpu_hour for card in found) / 3600
    return Spending(
        cards=tuple(found),
        gpu_hours=sum(card.gpu_hours for card in found),
        usd_so_far=sum(card.usd_so_far for card in found),
        usd_to_go=left_s
        and Band(
            p10=left_s.p10 * usd_a_second,
            p50=left_s.p50 * usd_a_second,
            p90=left_s.p90 * usd_a_second,
        ),
    )


def _gpus_by_card(
    config: RunFile, slots: Sequence[str], cards: Mapping[str, str]
) -> dict[str, int] | NoSpending:
    """GPUs that engines hold, by the card's name: of the run file's engines, or of those seen."""
    if config.engine.kind == "embedded":
        return NoSpending(why="embedded engines run on CPUs")
    named = {_catalogue_name(entry.gpu) for entry in config.hardware}
    only = next(iter(named)) if len(named) == 1 else None
    told = {slot_of(worker): _catalogue_name(card) for worker, card in cards.items()}
    of_slot = {slot: told.get(slot, only) for slot in sorted({*slots, *told})}
    engines = Counter(gpu for gpu in of_slot.values() if gpu is not None)
    silent = next((slot for slot, gpu in of_slot.items() if gpu is None), None)
    if silent is not None or not (engines or only):
        whose = f"{silent} has not told its card" if silent else "no engine was seen"
        number = f"{len(named)} kinds" if named else "none"
        return NoSpending(why=f"{whose}, and the run file's hardware names {number}")
    gpus_each = config.engine.gpus_per_worker
    if len(engines) > 1:
        if not gpus_each:
            return NoSpending(why="engines are on several cards, and engine.gpus is not given")
        return {gpu: number * gpus_each for gpu, number in sorted(engines.items())}
    gpu = next(iter(engines), only or "")
    held = (config.engine.num_workers or len(of_slot)) * gpus_each
    if not held and len(config.hardware) == 1:
        held = config.hardware[0].count
    if not held:
        return NoSpending(why="the run file does not say how many GPUs its engines hold")
    return {gpu: held}


def _catalogue_name(text: str) -> str:
    """The card's one name; of a card that the catalogue lacks, the name that it was given."""
    try:
        return gpu_named(text).name
    except PlanError:
        return text


def _price(gpu: str, entries: Sequence[HardwareConfig], today: date) -> Price | NoSpending:
    """The user's own price of this card, else the listed one; on demand rather than spot."""
    own = {
        (entry.usd_per_gpu_hour, entry.spot_usd_per_gpu_hour)
        for entry in entries
        if _catalogue_name(entry.gpu) == gpu
    } - {(None, None)}
    if len(own) > 1:
        return NoSpending(why=f"the run file's hardware has several prices for {gpu}")
    usd, spot_usd = next(iter(own), (None, None))
    try:
        card = gpu_named(gpu)
    except PlanError:
        # A card of the user's, known by its memory: only an own price tells its cost.
        card = gpu_of_memory(1.0, gpu)
    prices = prices_of(card, today, own_usd=usd, own_spot_usd=spot_usd)
    if not prices:
        return NoSpending(why=f"no price of {gpu} is known: give hardware its usd_per_gpu_hour")
    return prices[0]
