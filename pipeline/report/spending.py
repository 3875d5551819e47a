"""Cost of a run so far and to its end: GPU-hours by card, at your own or the list price. Pure.

An engine's card is the one that its readings name, else the run file's if that names one kind. If a
card or its price is unknown there are no dollars, but a reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from pipeline.errors import PlanError
from pipeline.planner.cards import gpu_named, gpu_of_memory
from pipeline.planner.estimate.prices import prices_of
from schemas.config.planning import HardwareConfig
from schemas.config.run_file import RunFile
from schemas.estimate import Band, Price
from schemas.progress import slot_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSpending:
    """Share of one kind of card."""

    gpu: str
    num_gpus: int
    price: Price
    gpu_hours: float
    usd_so_far: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Cost of all cards."""

    cards: tuple[CardSpending, ...]
    gpu_hours: float
    usd_so_far: float
    usd_to_go: Band | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSpending:
    """Reason that the cost is unknown."""

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
    """Price the GPU-hours of a run.

    `slots` are those of the engines that published; `cards` maps workers to the cards that they
    reported.
    """
    if config is None:
        return NoSpending(why="the folder has no copy of the run file")
    counts = _gpus_by_card(config, slots, cards)
    if isinstance(counts, NoSpending):
        return counts
    spent = []
    for gpu, number in counts.items():
        price = _price(gpu, config.hardware, today)
        if isinstance(price, NoSpending):
            return price
        hours = ran_s / 3600 * number
        spent.append(
            CardSpending(
                gpu=gpu,
                num_gpus=number,
                price=price,
                gpu_hours=hours,
                usd_so_far=hours * price.usd_per_gpu_hour,
            )
        )
    usd_per_s = sum(card.num_gpus * card.price.usd_per_gpu_hour for card in spent) / 3600
    return Spending(
        cards=tuple(spent),
        gpu_hours=sum(card.gpu_hours for card in spent),
        usd_so_far=sum(card.usd_so_far for card in spent),
        usd_to_go=left_s.times(usd_per_s) if left_s else None,
    )


def _gpus_by_card(
    config: RunFile, slots: Sequence[str], cards: Mapping[str, str]
) -> dict[str, int] | NoSpending:
    """Count the GPUs of the run's engines by card."""
    if config.engine.kind == "embedded":
        return NoSpending(why="embedded engines run on CPUs")
    named = {_catalogue_name(entry.gpu) for entry in config.hardware}
    only = next(iter(named)) if len(named) == 1 else None
    reported = {slot_of(worker): _catalogue_name(card) for worker, card in cards.items()}
    of_slot = {slot: reported.get(slot, only) for slot in sorted({*slots, *reported})}
    engines = Counter(gpu for gpu in of_slot.values() if gpu is not None)
    unknown = next((slot for slot, gpu in of_slot.items() if gpu is None), None)
    if unknown is not None or not (engines or only):
        cause = f"{unknown} has not reported its card" if unknown else "no engine has published"
        number = f"{len(named)} kinds" if named else "none"
        return NoSpending(why=f"{cause}, and the run file's hardware names {number}")
    gpus_each = config.engine.gpus_per_worker
    if len(engines) > 1:
        if not gpus_each:
            return NoSpending(why="engines run on several cards, and engine.gpus is not given")
        return {gpu: number * gpus_each for gpu, number in sorted(engines.items())}
    gpu = next(iter(engines), only or "")
    number_of_gpus = (config.engine.num_workers or len(of_slot)) * gpus_each
    if not number_of_gpus and len(config.hardware) == 1:
        number_of_gpus = config.hardware[0].count
    if not number_of_gpus:
        return NoSpending(why="the run file does not say how many GPUs its engines use")
    return {gpu: number_of_gpus}


def _catalogue_name(text: str) -> str:
    """Return the catalogue's name of a card; a card that it lacks keeps the given name."""
    try:
        return gpu_named(text).name
    except PlanError:
        return text


def _price(gpu: str, entries: Sequence[HardwareConfig], today: date) -> Price | NoSpending:
    """Return the user's own price of a card, else the list price, on demand rather than spot."""
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
        # A card that the catalogue lacks has only the user's own price.
        card = gpu_of_memory(1.0, gpu)
    prices = prices_of(card, today, own_usd=usd, own_spot_usd=spot_usd)
    if not prices:
        return NoSpending(why=f"no price of {gpu} is known: set its usd_per_gpu_hour in hardware")
    return prices[0]
