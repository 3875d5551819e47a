"""The table of one GPU's bytes: its rows sum to the card's memory, whatever the verdict.

A shortage is a negative last row.
"""

from pipeline.planner.memory.launch import ResolvedLaunch
from pipeline.planner.memory.sizing import Sized, Stopped, multimodal_reserve_bytes
from pipeline.planner.memory.state_pool import StatePool
from schemas.plan import BudgetRow, MemoryBudget
from schemas.units import MIB


def memory_budget(launch: ResolvedLaunch, outcome: Stopped | Sized) -> MemoryBudget:
    """List where the card's bytes go."""
    load = outcome.load
    total = launch.gpu.total_bytes
    rows = [
        BudgetRow(
            name="context, drivers, communicators",
            bytes=total - load.free_before_bytes,
            note="before the weights",
        ),
        BudgetRow(name="weights", bytes=load.weights_bytes, note=launch.model.format.source),
    ]
    if load.draft_resident_bytes + load.draft_freed_bytes:
        when = "before" if load.draft_first else "after"
        rows.append(
            BudgetRow(
                name="draft weights",
                bytes=load.draft_resident_bytes,
                note=f"loaded {when} the pools",
            )
        )
    if load.adapters_bytes:
        rows.append(BudgetRow(name="LoRA buffers", bytes=load.adapters_bytes, note="all ranks"))
    rows += _pool_rows(launch, outcome)
    if isinstance(outcome, Sized):
        rows += [
            BudgetRow(name=item.name, bytes=item.bytes, note="in the headroom")
            for item in outcome.needs.items()
        ]
    left = total - sum(row.bytes for row in rows)
    note = "unclaimed" if left >= 0 else "missing"
    reserve = multimodal_reserve_bytes(launch)
    if reserve and left >= reserve:
        rows.append(BudgetRow(name="multimodal reserve", bytes=reserve, note="in the headroom"))
        left -= reserve
    rows.append(BudgetRow(name="left over", bytes=left, note=note))
    return MemoryBudget(total_bytes=total, rows=tuple(rows))


def _pool_rows(launch: ResolvedLaunch, outcome: Stopped | Sized) -> list[BudgetRow]:
    if isinstance(outcome, Stopped):
        return _stopped_rows(launch, outcome)
    rows = []
    if isinstance(outcome.states, StatePool):
        states = outcome.states
        note = f"{states.slots} slots of {states.slot_bytes / MIB:.2f} MiB"
        rows.append(BudgetRow(name="state pool", bytes=states.state_bytes, note=note))
        if states.intermediate_bytes:
            rows.append(
                BudgetRow(
                    name="verify states",
                    bytes=states.intermediate_bytes,
                    note="kept until a speculative step is settled",
                )
            )
    note = f"{outcome.pool.tokens:,} tokens of {outcome.cost.priced_bytes:,.0f} B"
    rows.append(BudgetRow(name="KV pool", bytes=outcome.pool.bytes, note=note))
    return rows


def _stopped_rows(launch: ResolvedLaunch, stopped: Stopped) -> list[BudgetRow]:
    """List the claims up to the point where the engine stops."""
    if stopped.stage in ("weights", "draft_weights"):
        return []
    kept_free = stopped.load.free_before_bytes * (1 - launch.settings.mem_fraction_static)
    rows = [
        BudgetRow(
            name="kept free by mem_fraction_static",
            bytes=int(kept_free),
            note="for everything else",
        )
    ]
    if stopped.intermediate_bytes:
        settings = launch.settings
        rows.append(
            BudgetRow(
                name="verify states",
                bytes=stopped.intermediate_bytes,
                note=f"reserved for {settings.max_running_requests} requests",
            )
        )
    return rows
