"""The estimate of a run as it runs, from its output folder: readings, manifest and run file.

Works the same on a folder that is being filled, was stopped, or is finished. Reads and never
writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from pipeline.dataset.frozen import frozen_in
from pipeline.dataset.lengths import expected_lengths, frozen_size, stated_prompts
from pipeline.dataset.run_record import check_has_begun, check_has_run, read_manifest
from pipeline.errors import ConfigError, PipelineError, PlanError
from pipeline.live.log import LiveLog, engine_seconds, read_live_log
from pipeline.live.update import Expected, NoDryRun, RunSoFar, run_update
from pipeline.planner.estimate.estimate import EstimateQuery, PricedGroup, rated_group
from pipeline.planner.estimate.prices import prices_of
from pipeline.planner.lengths.lengths import LengthModel
from pipeline.planner.sglang.calibration import (
    calibration_from_text,
    check_calibration,
    fits_layout,
)
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.layout import tensor_ranks_of
from pipeline.planner.sglang.releases import rules_for
from pipeline.run_file import configured_group, estimate_query
from pipeline.store.folder import Folder
from pipeline.store.run_folder import CALIBRATIONS, READINGS_FILE
from schemas.config import EngineConfig, RunFile, run_file_of
from schemas.estimate import InputSize, Price, RunUpdate
from schemas.plan import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What was expected of a run before it ran."""

    lengths: LengthModel
    turns_per_row: float
    dry_run: Expected | NoDryRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """How far the rows of a run are."""

    rows_total: int
    rows_done: int
    rows_failed: int
    rows_unpublished: int = 0
    """Finished, and not yet in a part."""

    @property
    def rows_open(self) -> int:
        return max(self.rows_total - self.rows_done - self.rows_failed - self.rows_unpublished, 0)


def folder_update(
    folder: Folder, *, today: date, hardware: Sequence[PricedGroup] = ()
) -> RunUpdate:
    """The estimate of the run in this folder. `hardware` stands in for the run file's own.

    Raises ConfigError for a folder without a run or without readings.
    """
    check_has_run(folder)
    log = read_live_log(folder)
    if log is None or not log.readings:
        raise ConfigError(
            f"{folder.where}: no readings here: engines tell the first some seconds after their "
            "first request"
        )
    manifest = read_manifest(folder)
    check_has_begun(folder, manifest)
    session = manifest.sessions[-1]
    rows = RowCounts(
        rows_total=session.rows_total,
        rows_done=session.rows_done + manifest.rows_gained,
        rows_failed=len(manifest.failed),
    )
    config = config_of(folder, log)
    launched = manifest.engines[-1].plan if manifest.engines else None
    expected = expectation(folder, config, today=today, hardware=hardware, launched=launched)
    return update(log, config, rows, expected)


def update(log: LiveLog, config: RunFile, rows: RowCounts, expected: Expectation) -> RunUpdate:
    """What the readings make of the expectation."""
    ran_s, passed_s = engine_seconds(log)
    return run_update(
        RunSoFar(
            model=config.model,
            engine=f"{config.engine.kind} engines",
            gpus_per_engine=config.engine.gpus_per_worker,
            rows_total=rows.rows_total,
            rows_done=rows.rows_done,
            rows_open=rows.rows_open,
            turns_per_row=expected.turns_per_row,
            readings=log.all_readings(),
            cards=log.cards,
            finished=log.finished.elements(),
            running=tuple(log.running_tokens()),
            ran_s=ran_s,
            passed_s=passed_s,
            counted_by_answers=log.counted_by_answers,
        ),
        expected.lengths,
        expected.dry_run,
    )


def config_of(folder: Folder, log: LiveLog) -> RunFile:
    """The run file that the readings were taken under."""
    return run_file_of(log.run_file, f"{folder.place(READINGS_FILE)}, its run file")


# --- what was expected --------------------------------------------------------------------------


def expectation(
    folder: Folder,
    config: RunFile,
    *,
    today: date,
    hardware: Sequence[PricedGroup] = (),
    launched: str | None = None,
) -> Expectation:
    """Lengths and turns before any reading, and the dry run where there can be one.

    `launched` are the flags that the engines came up with; None: those of the run file.
    """
    frozen = frozen_in(folder)
    size = frozen_size(config, frozen) if frozen else None
    lengths = expected_lengths(config)
    turns = 1.0
    if frozen and size:
        turns = size.num_completions / (frozen.num_rows * config.samples_per_prompt)
    try:
        dry_run: Expected | NoDryRun = _dry_run(
            folder, _as_launched(config, launched), size, lengths, today, hardware
        )
    except PipelineError as error:
        # A model or card that the planner does not know is no fault of a run that goes on.
        dry_run = NoDryRun(reason=str(error))
    return Expectation(lengths=lengths, turns_per_row=turns, dry_run=dry_run)


def _dry_run(
    folder: Folder,
    config: RunFile,
    size: InputSize | None,
    lengths: LengthModel,
    today: date,
    hardware: Sequence[PricedGroup],
) -> Expected | NoDryRun:
    if not hardware:
        if config.engine.kind == "embedded":
            return NoDryRun(reason="embedded engines run on CPUs, which no plan is made for")
        if len(config.hardware) != 1:
            kinds = f"{len(config.hardware)} kinds of cards" if config.hardware else "no card"
            return NoDryRun(
                reason=f"the run file names {kinds}: say --hardware GPU:COUNT, as it runs"
            )
        hardware = [configured_group(config.hardware[0], {})]
    if config.lengths.prompt_tokens_mean is not None:
        prompts = stated_prompts(config.lengths.prompt_tokens_mean)
    elif size is not None:
        prompts = size.prompts
    else:
        return NoDryRun(reason="the prompts are not in the folder, and the run file has no mean")
    query = estimate_query(
        config,
        InputSize(
            num_completions=size.num_completions if size else 1,
            prompts=prompts,
            longest=size.longest if size else None,
        ),
        lengths,
        today=today,
    )
    query = replace(query, calibrations=_calibrations(folder, query))
    return Expected(
        groups=tuple(rated_group(query, group) for group in hardware),
        load=query.load,
        price=_price(hardware, today),
        num_gpus=sum(group.hardware.count for group in hardware),
    )


def _calibrations(folder: Folder, query: EstimateQuery) -> dict[str, Calibration]:
    """Return what the run's own engines measured at launch, by card.

    Measurements of another model, release or layout, and files that cannot be read, are left out.
    """
    release = rules_for(query.version)[0].label
    calibrations = {}
    for name in folder.names(CALIBRATIONS):
        place = f"{CALIBRATIONS}/{name}"
        try:
            measured = calibration_from_text(folder.read(place).decode(), place)
            check_calibration(measured, model=query.model.name, gpu=measured.gpu, release=release)
        except (PlanError, UnicodeDecodeError):
            continue
        if fits_layout(measured, query.base):
            calibrations[measured.gpu] = measured
    return calibrations


def _as_launched(config: RunFile, launched: str | None) -> RunFile:
    """The run file whose plan is the launch that its workers make: flags as they are.

    How many requests run is left to memory, so that a limit set too low shows.
    """
    flags = launched.split() if launched else list(config.engine.flags)
    if "--max-running-requests" in flags:
        place = flags.index("--max-running-requests")
        del flags[place : place + 2]
    if config.engine.kind == "sglang":
        ranks = tensor_ranks_of(parse_launch_line(flags), config.engine.gpus_per_worker)
        flags += [] if any("tp-size" in flag for flag in flags) else ["--tp-size", str(ranks)]
    names = ("allow_mtp", "allow_prefix_cache", "allow_attention_dp", "allow_pipeline")
    fixed = dict.fromkeys(names, False)
    told = config.engine.model_dump(exclude_unset=True, exclude={"max_running_requests"})
    return config.model_copy(
        update={
            "engine": EngineConfig.model_validate({**told, "flags": flags}),
            "planner": config.planner.model_copy(update=fixed),
        }
    )


def _price(hardware: Sequence[PricedGroup], today: date) -> Price | None:
    """Of a GPU-hour, on demand or the user's own; None for cards of several prices."""
    if len(hardware) != 1:
        return None
    group = hardware[0]
    prices = prices_of(
        group.hardware.gpu, today, own_usd=group.own_usd, own_spot_usd=group.own_spot_usd
    )
    return next((price for price in prices if price.kind != "spot"), None)
