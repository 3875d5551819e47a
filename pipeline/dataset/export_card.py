"""The data set's card: what is in it, where it comes from, and what was left out."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.errors import PlanError
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA
from schemas.export import ExportOptions, ExportRecord
from schemas.manifest import EngineRun, Part, RunRecord

_MOST_LAUNCHES = 20
"""In the table; a run that steps down often has a long tail of launches with few rows."""
_OPEN = "not told"
_COLUMNS = (
    "LaunchRow", "engine", "release", "tp", "pp", "dp", "mem_fraction_static", "requests at once",
    "MTP", "starts", "rows",
)  # fmt: skip

_SIZES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)
_LARGER = "10M<n<100M"
_LENGTH_COLUMNS = ("completion_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRow:
    """What an engine was launched with; engines that were launched alike are one."""

    engine: str
    release: str | None
    plan: str | None


@dataclass(slots=True)
class RowFacts:
    """Counts over all published rows; a length takes one entry however many rows have it."""

    flags: Counter[str] = field(default_factory=Counter)
    launches: Counter[LaunchRow] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, Counter[int]] = field(
        default_factory=lambda: {name: Counter() for name in _LENGTH_COLUMNS}
    )


def row_facts(folder: Folder, parts: Iterable[Part]) -> RowFacts:
    facts = RowFacts()
    columns = ["flags", "finish_reason", "engine", "engine_release", "plan"]
    columns += [f"turns.list.element.{name}" for name in _LENGTH_COLUMNS]
    for part in parts:
        with opened_parquet(folder, f"{DATA}/{part.name}") as file:
            table = file.read(columns=columns)
        for row in table.to_pylist():
            facts.flags.update(row["flags"])
            facts.finishes[row["finish_reason"] or "error"] += 1
            launch = LaunchRow(
                engine=row["engine"], release=row["engine_release"], plan=row["plan"]
            )
            facts.launches[launch] += 1
            for turn in row["turns"]:
                for name in _LENGTH_COLUMNS:
                    if turn[name] is not None:
                        facts.lengths[name][turn[name]] += 1
    return facts


def card(
    run: RunRecord,
    record: ExportRecord,
    options: ExportOptions,
    facts: RowFacts,
    engines: Iterable[EngineRun],
) -> str:
    settings = run.identity.settings
    return "\n".join(
        [
            *_header(record, options),
            "",
            f"# Completions of {settings.get('model')}",
            "",
            (
                f"{record.rows_exported:,} rows of the format `{record.format}`, out of "
                f"{record.rows_published:,} that were generated."
            ),
            "",
            *_table("Split | rows", _split_rows(record, options)),
            *_table("Left out because of | rows", sorted(record.dropped.items())),
            *_table("Flag (of all generated rows) | rows", facts.flags.most_common()),
            *_table("Ended with | rows", facts.finishes.most_common()),
            *_table("Engine release | rows", _releases(facts).most_common()),
            *_lengths(facts),
            *launch_lines(str(settings.get("model")), facts.launches, engines),
            "## How it was made",
            "",
            *(f"- `{name}`: `{json.dumps(value)}`" for name, value in settings.items()),
            f"- run `{run.run_id}`, export `{record.fingerprint}`",
            *(f"- changed on the way: {line}" for line in run.accepted_drift),
            "",
            f"Order: {_order(options)}. A row's split hangs on a hash of its id.",
            "",
        ]
    )


def _header(record: ExportRecord, options: ExportOptions) -> list[str]:
    present = {file.split for file in record.files}
    size = next((name for most, name in _SIZES if record.rows_exported < most), _LARGER)
    files = [
        line
        for split, _ in options.splits
        if split in present
        # In quotes: YAML takes a bare `no` or `on` for a truth value.
        for line in (f'  - split: "{split}"', f"    path: data/{split}-*.parquet")
    ]
    return [
        "---",
        "# license: yours to choose; the terms of the model and of the prompts apply",
        "task_categories: [text-generation]",
        f"size_categories: [{size}]",
        "configs:",
        "- config_name: default",
        "  data_files:",
        *files,
        "---",
    ]


def _split_rows(record: ExportRecord, options: ExportOptions) -> list[tuple[str, int]]:
    """Rows of the files: of token rows, a row a turn."""
    rows: Counter[str] = Counter()
    for file in record.files:
        rows[file.split] += file.num_rows
    return [(split, rows[split]) for split, _ in options.splits]


def _releases(facts: RowFacts) -> Counter[str]:
    rows: Counter[str] = Counter()
    for launch, count in facts.launches.items():
        rows[launch.release or launch.engine] += count
    return rows


def _table(head: str, rows: Sequence[tuple[str, int]]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {head} |", "| --- | ---: |"]
    return [*lines, *(f"| {name} | {count:,} |" for name, count in rows), ""]


def _lengths(facts: RowFacts) -> list[str]:
    lines = []
    for name, counts in facts.lengths.items():
        total = sum(counts.values())
        if not total:
            continue
        mean = sum(length * count for length, count in counts.items()) / total
        marks = " | ".join(f"{_quantile(counts, total, q):,}" for q in (0.5, 0.95, 0.99, 1.0))
        lines.append(f"| {name.replace('_', ' ')} a turn | {mean:,.0f} | {marks} |")
    if not lines:
        return []
    head = [
        "| Lengths | mean | median | 95% | 99% | longest |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    return [*head, *lines, ""]


def _quantile(counts: Counter[int], total: int, share: float) -> int:
    seen = 0
    for length in sorted(counts):
        seen += counts[length]
        if seen >= share * total:
            return length
    raise AssertionError("shares are one at most")


def _order(options: ExportOptions) -> str:
    if options.shuffle_seed is None:
        return "as in the prompts"
    return f"shuffled with the seed {options.shuffle_seed}"


def launch_lines(model: str, rows: Counter[LaunchRow], engines: Iterable[EngineRun]) -> list[str]:
    """A section of the card: a line a launch, most rows first, then its flags."""
    starts: dict[LaunchRow, list[EngineRun]] = {}
    for run in engines:
        launch = LaunchRow(engine=run.engine, release=run.release, plan=run.plan)
        starts.setdefault(launch, []).append(run)
    launches = sorted({*rows, *starts}, key=lambda one: (-rows[one], repr(one)))
    if not launches:
        return []
    told, rest = launches[:_MOST_LAUNCHES], launches[_MOST_LAUNCHES:]
    numbered = list(enumerate(told, start=1))
    return [
        f"## Launches of {model}",
        "",
        _cells(_COLUMNS),
        _cells(["---"] * len(_COLUMNS)),
        *(_row(number, one, starts.get(one, []), rows[one]) for number, one in numbered),
        "",
        *(f"- launch {number}: `{one.plan}`" for number, one in numbered if one.plan),
        *([_rest(rest, rows)] if rest else []),
        "",
    ]


def _rest(rest: Sequence[LaunchRow], rows: Counter[LaunchRow]) -> str:
    return f"- {len(rest):,} other launches: {sum(rows[one] for one in rest):,} rows"


def _row(number: int, launch: LaunchRow, starts: Sequence[EngineRun], num_rows: int) -> str:
    cells = [
        f"{number}",
        launch.engine,
        launch.release or _OPEN,
        *_settings(launch.plan, starts),
        f"{len(starts):,}" if starts else _OPEN,
        f"{num_rows:,}",
    ]
    return _cells(cells)


def _cells(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _settings(plan: str | None, starts: Sequence[EngineRun]) -> tuple[str, ...]:
    flags = _flags(plan)
    at_once = _at_once(flags, starts)
    if flags is None:
        return (_OPEN, _OPEN, _OPEN, _OPEN, at_once, _OPEN)
    return (
        flags.text("tp-size", "1"),
        flags.text("pp-size", "1"),
        flags.text("dp-size", "1"),
        flags.text("mem-fraction-static", "SGLang's own"),
        at_once,
        _mtp(flags),
    )


def _flags(plan: str | None) -> LaunchFlags | None:
    """None where there is no plan, and where it is one that cannot be read."""
    if plan is None:
        return None
    try:
        return parse_launch_line(plan.split())
    except PlanError:
        return None


def _at_once(flags: LaunchFlags | None, starts: Sequence[EngineRun]) -> str:
    """As the engines told when they came up, else as they were asked to."""
    found = sorted({run.max_running_requests for run in starts})
    if not found:
        return flags.text("max-running-requests", _OPEN) if flags else _OPEN
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def _mtp(flags: LaunchFlags) -> str:
    algorithm = flags.text("speculative-algorithm")
    if not algorithm:
        return "off"
    drafts = flags.text("speculative-num-draft-tokens")
    return f"{algorithm}, {drafts} drafts" if drafts else algorithm
