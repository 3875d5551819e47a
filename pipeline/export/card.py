"""Card of an exported data set: its contents, their origin, and what was left out."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.errors import PlanError
from pipeline.export.fidelity import fidelity_lines
from pipeline.export.files import data_files
from pipeline.export.index import ExportSource
from pipeline.export.markup import code, plain_name
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from schemas.export import ExportOptions, ExportRecord
from schemas.manifest import EngineRun, RunRecord

# Launches in the table; a run that falls back often has a long tail of launches with few rows.
_MAX_LAUNCHES = 20
_UNKNOWN = "not known"
_COLUMNS = (
    "Launch", "engine", "release", "tp", "pp", "dp", "mem_fraction_static", "running requests",
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
class EngineLaunch:
    """An engine, its release and its flags; engines that were launched alike are one."""

    engine: str
    release: str | None
    plan: str | None


@dataclass(slots=True)
class RowFacts:
    """Counts over all published rows."""

    flags: Counter[str] = field(default_factory=Counter)
    launches: Counter[EngineLaunch] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, Counter[int]] = field(
        default_factory=lambda: {name: Counter() for name in _LENGTH_COLUMNS}
    )


def row_facts(source: ExportSource) -> RowFacts:
    """Count over all published rows, kept and dropped."""
    facts = RowFacts()
    columns = ["flags", "finish_reason", "engine", "engine_release", "plan"]
    columns += [f"turns.list.element.{name}" for name in _LENGTH_COLUMNS]
    for part in source.parts:
        with source.opened(part) as file:
            table = file.read(columns=columns)
        for row in table.to_pylist():
            facts.flags.update(row["flags"])
            facts.finishes[row["finish_reason"] or "error"] += 1
            launch = EngineLaunch(
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
            f"# Completions of {plain_name(settings.get('model'))}",
            "",
            (
                f"{record.rows_exported:,} of {record.rows_published:,} generated rows, in the "
                f"format `{record.format}`."
            ),
            "",
            *_form_lines(run, record, options, facts),
            *_table("Split | rows", _split_rows(record, options)),
            *_table("Left out because of | rows", sorted(record.dropped.items())),
            *_table("Flag (all generated rows) | rows", facts.flags.most_common()),
            *_table("Ended with | rows", facts.finishes.most_common()),
            *_table("Engine release | rows", _releases(facts).most_common()),
            *_lengths(facts),
            *launch_lines(str(settings.get("model")), facts.launches, engines),
            "## How it was made",
            "",
            *(f"- `{name}`: {code(json.dumps(value))}" for name, value in settings.items()),
            f"- run `{run.run_id}`, export `{record.fingerprint}`",
            *(f"- changed during the run: {plain_name(line)}" for line in run.accepted_drift),
            "",
            f"Order: {_order(options)}. A hash of the row's id decides its split.",
            "",
        ]
    )


def _header(record: ExportRecord, options: ExportOptions) -> list[str]:
    present, suffix = {file.split for file in record.files}, data_files(options).suffix
    size = next((name for most, name in _SIZES if record.rows_exported < most), _LARGER)
    files = [
        line
        for split, _ in options.splits
        if split in present
        # In quotes: YAML reads a bare `no` or `on` as a boolean.
        for line in (f'  - split: "{split}"', f"    path: data/{split}-*{suffix}")
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


def _form_lines(
    run: RunRecord, record: ExportRecord, options: ExportOptions, facts: RowFacts
) -> list[str]:
    """Sentences on what the format keeps of what the model saw, and on rows that were cut."""
    head, *losses = fidelity_lines(options, run.template, rows_cut_off=facts.finishes["length"])
    lines = [head, "", *losses, *([""] if losses else [])]
    if record.rows_cut:
        lines += [
            (
                f"{record.rows_cut:,} rows end at an earlier turn, the last one within "
                f"{options.max_tokens:,} tokens; `dropped.jsonl` lists them."
            ),
            "",
        ]
    return lines


def _split_rows(record: ExportRecord, options: ExportOptions) -> list[tuple[str, int]]:
    """Count the rows of each split's files; token rows are one per turn."""
    rows: Counter[str] = Counter()
    for file in record.files:
        rows[file.split] += file.num_rows
    return [(split, rows[split]) for split, _ in options.splits]


def _releases(facts: RowFacts) -> Counter[str]:
    rows: Counter[str] = Counter()
    for launch, count in facts.launches.items():
        rows[plain_name(launch.release or launch.engine)] += count
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
        lines.append(f"| {name.replace('_', ' ')} per turn | {mean:,.0f} | {marks} |")
    if not lines:
        return []
    head = [
        "| Lengths | mean | median | 95% | 99% | longest |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    return [*head, *lines, ""]


def _quantile(counts: Counter[int], total: int, share: float) -> int:
    num_shorter = 0
    for length in sorted(counts):
        num_shorter += counts[length]
        if num_shorter >= share * total:
            return length
    raise AssertionError("a share is at most one")


def _order(options: ExportOptions) -> str:
    if options.shuffle_seed is None:
        return "as in the prompts"
    return f"shuffled with the seed {options.shuffle_seed}"


def launch_lines(
    model: str, rows: Counter[EngineLaunch], engines: Iterable[EngineRun]
) -> list[str]:
    """Section of the card: one line per launch, most rows first, then the flags of each."""
    starts: dict[EngineLaunch, list[EngineRun]] = {}
    for run in engines:
        launch = EngineLaunch(engine=run.engine, release=run.release, plan=run.plan)
        starts.setdefault(launch, []).append(run)
    launches = sorted({*rows, *starts}, key=lambda one: (-rows[one], repr(one)))
    if not launches:
        return []
    shown, rest = launches[:_MAX_LAUNCHES], launches[_MAX_LAUNCHES:]
    numbered = list(enumerate(shown, start=1))
    return [
        f"## Launches of {plain_name(model)}",
        "",
        _cells(_COLUMNS),
        _cells(["---"] * len(_COLUMNS)),
        *(_row(number, one, starts.get(one, []), rows[one]) for number, one in numbered),
        "",
        *(f"- launch {number}: {code(one.plan)}" for number, one in numbered if one.plan),
        *([_rest(rest, rows)] if rest else []),
        "",
    ]


def _rest(rest: Sequence[EngineLaunch], rows: Counter[EngineLaunch]) -> str:
    return f"- {len(rest):,} other launches: {sum(rows[one] for one in rest):,} rows"


def _row(number: int, launch: EngineLaunch, starts: Sequence[EngineRun], num_rows: int) -> str:
    cells = [
        f"{number}",
        plain_name(launch.engine),
        plain_name(launch.release or _UNKNOWN),
        *(plain_name(text) for text in _settings(launch.plan, starts)),
        f"{len(starts):,}" if starts else _UNKNOWN,
        f"{num_rows:,}",
    ]
    return _cells(cells)


def _cells(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _settings(plan: str | None, starts: Sequence[EngineRun]) -> tuple[str, ...]:
    flags = _flags(plan)
    running = _max_running(flags, starts)
    if flags is None:
        return (_UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN, running, _UNKNOWN)
    return (
        flags.text("tp-size", "1"),
        flags.text("pp-size", "1"),
        flags.text("dp-size", "1"),
        flags.text("mem-fraction-static", "SGLang's own"),
        running,
        _mtp(flags),
    )


def _flags(plan: str | None) -> LaunchFlags | None:
    """Parse a plan; None without one, or when it cannot be parsed."""
    if plan is None:
        return None
    try:
        return parse_launch_line(plan.split())
    except PlanError:
        return None


def _max_running(flags: LaunchFlags | None, starts: Sequence[EngineRun]) -> str:
    """Format max_running_requests as the engines reported it, else as the flags set it."""
    reported = sorted({run.max_running_requests for run in starts})
    if not reported:
        return flags.text("max-running-requests", _UNKNOWN) if flags else _UNKNOWN
    return f"{reported[0]:,}" if len(reported) == 1 else f"{reported[0]:,} to {reported[-1]:,}"


def _mtp(flags: LaunchFlags) -> str:
    algorithm = flags.text("speculative-algorithm")
    if not algorithm:
        return "off"
    drafts = flags.text("speculative-num-draft-tokens")
    return f"{algorithm}, {drafts} drafts" if drafts else algorithm
