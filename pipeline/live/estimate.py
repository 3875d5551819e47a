"""The estimate of a run from its output folder: readings, manifest and run file.

Works on a folder that is being filled, was stopped, or is finished. Reads and never writes.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date

from pipeline.dataset.frozen import frozen_in
from pipeline.dataset.lengths import expected_lengths, frozen_size, stated_prompts
from pipeline.dataset.run_record import check_has_begun, check_has_run, read_manifest
from pipeline.errors import ConfigError, PipelineError, PlanError
from pipeline.live.log import LiveLog, read_live_log
from pipeline.live.update import Expectation, Planned, RowCounts, Unplanned, run_update
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
from pipeline.run_file import configured_group, estimate_query, with_row_budgets
from pipeline.store.folder import Folder
from pipeline.store.run_folder import CALIBRATIONS, READINGS_FILE
from schemas.config.engine import EngineConfig
from schemas.config.reader import run_file_of
from schemas.config.run_file import RunFile
from schemas.estimate import InputSize, Price, RunUpdate
from schemas.manifest import RunManifest
from schemas.plan import Calibration


def folder_update(
    folder: Folder, *, today: date, hardware: Sequence[PricedGroup] = ()
) -> RunUpdate:
    """Return the estimate of the run in this folder.

    `hardware` replaces the run file's cards. Raises ConfigError for a folder without a run or
    without readings.
    """
    check_has_run(folder)
    log = read_live_log(folder)
    if log is None or not log.readings:
        raise ConfigError(
            f"{folder.where}: no readings yet: engines report some seconds after their first "
            "request"
        )
    manifest = read_manifest(folder)
    check_has_begun(folder, manifest)
    return log_update(folder, log, manifest, today=today, hardware=hardware)


def log_update(
    folder: Folder,
    log: LiveLog,
    manifest: RunManifest,
    *,
    today: date,
    hardware: Sequence[PricedGroup] = (),
) -> RunUpdate:
    """Estimate the run of a manifest from the readings of its log."""
    session = manifest.sessions[-1]
    rows = RowCounts(
        rows_total=session.rows_total,
        rows_done=session.rows_done + manifest.rows_gained,
        rows_failed=len(manifest.failed),
    )
    config = config_of(folder, log)
    launched = manifest.engines[-1].plan if manifest.engines else None
    expected = expectation(folder, config, today=today, hardware=hardware, launched=launched)
    return run_update(log, config, rows, expected)


def config_of(folder: Folder, log: LiveLog) -> RunFile:
    """Return the run file of the session that wrote the readings."""
    return run_file_of(log.run_file, f"{folder.place(READINGS_FILE)}, its run file")


# --- the expectation ----------------------------------------------------------------------------


def expectation(
    folder: Folder,
    config: RunFile,
    *,
    today: date,
    hardware: Sequence[PricedGroup] = (),
    launched: str | None = None,
) -> Expectation:
    """Return lengths and turns before any reading, and the plan where there can be one.

    `launched` are the flags that the engines came up with; None means those of the run file.
    """
    frozen = frozen_in(folder)
    size = frozen_size(config, frozen) if frozen else None
    config = with_row_budgets(config, size.budgets if size else None)
    lengths = expected_lengths(config)
    turns = 1.0
    if frozen and size:
        turns = size.num_completions / (frozen.num_rows * config.samples_per_prompt)
    try:
        config = _as_launched(config, launched)
        groups = _hardware(config, hardware)
        query = _query(folder, config, size, lengths, today)
        plan: Planned | Unplanned = _planned(query, groups, today)
    except PipelineError as error:
        # A model or card that the planner does not know does not end a run.
        plan = Unplanned(reason=str(error))
    return Expectation(lengths=lengths, turns_per_row=turns, plan=plan)


def _hardware(config: RunFile, hardware: Sequence[PricedGroup]) -> Sequence[PricedGroup]:
    """Return the cards of the run. Raises PlanError where they cannot be planned for."""
    if hardware:
        return hardware
    if config.engine.kind == "embedded":
        raise PlanError("embedded engines run on CPUs, which cannot be planned for")
    if len(config.hardware) != 1:
        kinds = f"{len(config.hardware)} kinds of cards" if config.hardware else "no card"
        raise PlanError(f"the run file names {kinds}: pass --hardware GPU:COUNT for those in use")
    return [configured_group(config.hardware[0], {})]


def _query(
    folder: Folder, config: RunFile, size: InputSize | None, lengths: LengthModel, today: date
) -> EstimateQuery:
    if config.lengths.prompt_tokens_mean is not None:
        prompts = stated_prompts(config.lengths.prompt_tokens_mean)
    elif size is not None:
        prompts = size.prompts
    else:
        raise PlanError("the folder has no frozen prompts, and the run file gives no mean length")
    size = InputSize(
        num_completions=size.num_completions if size else 1,
        prompts=prompts,
        longest=size.longest if size else None,
    )
    query = estimate_query(config, size, lengths, today=today)
    return replace(query, calibrations=_calibrations(folder, query))


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


def _planned(query: EstimateQuery, hardware: Sequence[PricedGroup], today: date) -> Planned:
    return Planned(
        groups=tuple(rated_group(query, group) for group in hardware),
        load=query.load,
        price=_price(hardware, today),
        num_gpus=sum(group.hardware.count for group in hardware),
    )


def _as_launched(config: RunFile, launched: str | None) -> RunFile:
    """Return the run file with the launched flags fixed, so that the plan is that launch.

    The number of running requests is left to memory, so that a cap set too low shows.
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
    engine = config.engine.model_dump(exclude_unset=True, exclude={"max_running_requests"})
    return config.model_copy(
        update={
            "engine": EngineConfig.model_validate({**engine, "flags": flags}),
            "planner": config.planner.model_copy(update=fixed),
        }
    )


def _price(hardware: Sequence[PricedGroup], today: date) -> Price | None:
    """Return the price per GPU-hour: the user's own or on demand; None for several cards."""
    if len(hardware) != 1:
        return None
    group = hardware[0]
    prices = prices_of(
        group.hardware.gpu, today, own_usd=group.own_usd, own_spot_usd=group.own_spot_usd
    )
    return next((price for price in prices if price.kind != "spot"), None)
