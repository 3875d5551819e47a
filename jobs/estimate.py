"""Estimate days and dollars of a run on each hardware option: `python -m jobs.estimate`.

Nothing is started and no GPU is needed. `--point` estimates one rate instead.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.hardware_options import MAX_CARDS, groups_of, own_price, own_prices
from jobs.terminal import read_text, tell, tell_error, unreadable, write_text
from pipeline.console.commands import program, split_launch_line
from pipeline.errors import ConfigError, PipelineError, PlanError

# The planner's modules load inside the functions, so that --help stays quick.
if TYPE_CHECKING:
    from pipeline.planner.estimate.estimate import EstimateQuery, PricedGroup
    from schemas.config.run_file import RunFile
    from schemas.estimate import InputSize
    from schemas.plan import Calibration

# More than any request or node holds: a larger figure is a typing mistake.
_MOST = {
    "running_requests": 1e7,
    "input_tokens": 1e8,
    "output_tokens": 1e8,
    "output_cv": 100.0,
    "num_gpus": 1e6,
}

# Options that --update-from does not take: the folder answers for them.
_NOT_OF_A_RUN = (
    *("set", "completions", "lengths_from", "calibration", "model_config", "sglang_version"),
    "html",
)

_EXAMPLES = """\
examples:
  python -m jobs.estimate run.yaml
  python -m jobs.estimate run.yaml --hardware rtx-pro-6000:8 --hardware b200:7 --html cost.html
  python -m jobs.estimate run.yaml --hardware rtx-pro-6000:4+b200:2 --price b200=4.20
  python -m jobs.estimate run.yaml --hardware all --gpus 8
  python -m jobs.estimate run.yaml --lengths-from out/pilot
  python -m jobs.estimate run.yaml -- --tp 2 --mem-fraction-static 0.8      # as you launch it
  python -m jobs.estimate --update-from out/run
  python -m jobs.estimate --point --model Qwen/Qwen3.6-27B --gpu b200 --dtype bf16 \\
    --running-requests 64 --input-tokens 512 --output-tokens 2529
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the estimate; return 2 for an error that the user can fix."""
    own, line = split_launch_line(sys.argv[1:] if argv is None else argv)
    options = argument_parser().parse_args(own)
    try:
        tell(_answered(options, line))
    except PipelineError as error:
        tell_error(f"estimate: {error}")
        return 2
    return 0


def _answered(options: argparse.Namespace, line: list[str] | None) -> str:
    if line is not None and (options.point or options.update_from is not None):
        raise PlanError("a launch line after -- is estimated for a run file alone")
    if options.point:
        return _point(options)
    if options.update_from is not None:
        return _updated(options)
    if options.run_file is None:
        raise PlanError("give a run file, or --point, or --update-from; --help shows all")
    return _estimated(options, line)


def argument_parser() -> argparse.ArgumentParser:
    """Return the command's own parser."""
    parser = argparse.ArgumentParser(
        prog=program("jobs.estimate"),
        usage="%(prog)s RUN.yaml [options] [-- LAUNCH LINE]\n"
        "       %(prog)s --point --model M --gpu G [options]",
        description="Tokens/s, days and dollars of a run on each hardware option.",
        epilog=_EXAMPLES.replace("python -m jobs.estimate", program("jobs.estimate")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the run file, for example sampling.max_tokens=512",
    )
    add("--hardware", action="append", default=[], metavar="GPU:COUNT[+GPU:COUNT]",
        help="a hardware option, repeatable; all: every card of the catalogue; default: the run "
        "file's hardware")  # fmt: skip
    add(
        "--gpus",
        type=int,
        default=8,
        metavar="N",
        help="cards per option with --hardware all; default: 8",
    )
    add("--price", action="append", default=[], metavar="GPU=USD[/SPOT]",
        help="your own price in USD per GPU-hour, and on spot")  # fmt: skip
    add("--completions", type=int, metavar="N", help="completions, instead of counting prompts")
    add("--lengths-from", metavar="FOLDER", help="output lengths from a finished pilot run")
    add("--update-from", metavar="FOLDER", help="estimate the time left of a run from its folder")
    add("--calibration", action="append", type=Path, default=[], metavar="FILE",
        help="a launch log's figures, as jobs.plan --save-calibration writes them")  # fmt: skip
    add(
        "--model-config",
        type=Path,
        metavar="FILE|DIR",
        help="a config.json; default: by the model's name",
    )
    add(
        "--sglang-version",
        metavar="X",
        help="release, image tag or build date; default: the newest known",
    )
    add("--json", action="store_true", help="print JSON")
    add("--html", type=Path, metavar="FILE", help="write the page as well")
    point = parser.add_argument_group("one point: the rate at a number of running requests")
    add = point.add_argument
    add("--point", action="store_true", help="estimate one rate instead of a run")
    add("--model", metavar="NAME", help="hub name or folder")
    add("--gpu", metavar="NAME", help="a card: rtx-pro-6000, 'B200 180GB'")
    add("--num-gpus", type=int, metavar="N", help="cards; default: tp-size x pp-size")
    add("--tp-size", type=int, default=1, metavar="T", help="tensor-parallel ranks; default: 1")
    add("--dp-size", type=int, default=1, metavar="D", help="data-parallel ranks; default: 1")
    add("--pp-size", type=int, default=1, metavar="S", help="pipeline stages; default: 1")
    add("--dtype", metavar="FORMAT", help="bf16, fp8, nvfp4, mxfp4, int4, …; default: by the name")
    add("--engine", choices=("sglang", "vllm", "trtllm"), default="sglang",
        help="the engine; default: sglang")  # fmt: skip
    add("--kv-format", choices=("bf16", "fp8"), help="format of the KV cache; default: the "
        "engine's own choice")  # fmt: skip
    add("--running-requests", type=float, metavar="B", help="requests at once over all GPUs")
    add("--input-tokens", type=float, metavar="P", help="mean prompt, in tokens")
    add("--output-tokens", type=float, metavar="O", help="mean completion, in tokens")
    add(
        "--output-cv",
        type=float,
        default=0.0,
        metavar="CV",
        help="standard deviation of the completions over their mean; default: 0",
    )
    add(
        "--mtp-accept-length",
        type=float,
        metavar="A",
        help="tokens kept per verify step; default: MTP off",
    )
    add(
        "--draft-tokens",
        type=int,
        metavar="D",
        help="tokens verified per step; default: by the accept length",
    )
    return parser


# --- a run ------------------------------------------------------------------------------------


def _estimated(options: argparse.Namespace, line: list[str] | None) -> str:
    from pipeline.planner.estimate.estimate import run_estimate
    from pipeline.planner.estimate.output import estimate_json, estimate_text
    from pipeline.run_file import own_launch_of
    from schemas.config.reader import read_run_file

    run = read_run_file(options.run_file, options.set)
    groups = _options(options, run)
    query = _query(options, run, groups)
    if line is not None:
        query = replace(query, own_launch=own_launch_of(run, line))
    estimate = run_estimate(query, groups)
    if not estimate.options:
        reasons = "".join(f"\n  {item.option}: {item.reason}" for item in estimate.unfit)
        raise PlanError(f"{run.model} fits on no option:{reasons}")
    if options.html is not None:
        from pipeline.report.estimate_page import estimate_page

        write_text(options.html, estimate_page(estimate))
    if options.json:
        return json.dumps(estimate_json(estimate), indent=1)
    return estimate_text(estimate)


def _query(
    options: argparse.Namespace, run: "RunFile", groups: "list[tuple[PricedGroup, ...]]"
) -> "EstimateQuery":
    from pipeline.dataset.lengths import expected_lengths
    from pipeline.run_file import estimate_query, with_planner_settings, with_row_budgets

    run = with_planner_settings(
        run, model_config_path=options.model_config, sglang_version=options.sglang_version
    )
    size = _size(options, run)
    run = with_row_budgets(run, size.budgets)
    query = estimate_query(
        run,
        size,
        expected_lengths(run, options.lengths_from),
        today=datetime.now(UTC).date(),
    )
    return replace(query, calibrations=_calibrations(options, query, groups))


def _size(options: argparse.Namespace, run: "RunFile") -> "InputSize":
    """Return the size of the input, which is read only where the options leave something open."""
    from pipeline.dataset.lengths import input_size, stated_prompts
    from schemas.estimate import InputSize

    completions, mean_tokens = options.completions, run.lengths.prompt_tokens_mean
    if completions is not None and completions < 1:
        raise PlanError(f"--completions: found {completions}; it must be at least 1")
    prompts = None if mean_tokens is None else stated_prompts(mean_tokens)
    if completions is not None and prompts is not None:
        return InputSize(num_completions=completions, prompts=prompts, longest=None)
    size = input_size(run)
    return replace(
        size,
        num_completions=completions or size.num_completions,
        prompts=prompts or size.prompts,
    )


def _calibrations(
    options: argparse.Namespace, query: "EstimateQuery", groups: "list[tuple[PricedGroup, ...]]"
) -> "dict[str, Calibration]":
    """Return the calibrations by card. Raises PlanError for one that no option can use."""
    from pipeline.planner.sglang.calibration import calibration_from_text, check_calibration
    from pipeline.planner.sglang.releases import rules_for

    cards = {group.hardware.gpu.name for option in groups for group in option}
    release = rules_for(query.version)[0].label
    calibrations: dict[str, Calibration] = {}
    for path in options.calibration:
        calibration = calibration_from_text(read_text(path), str(path))
        try:
            check_calibration(
                calibration, model=query.model.name, gpu=calibration.gpu, release=release
            )
        except PlanError as error:
            raise PlanError(f"--calibration {path}: {error}") from None
        if calibration.gpu not in cards:
            raise PlanError(f"--calibration {path}: no option has {calibration.gpu}")
        if calibration.gpu in calibrations:
            raise PlanError(f"--calibration {path}: a second file for {calibration.gpu}")
        calibrations[calibration.gpu] = calibration
    return calibrations


# --- hardware options -------------------------------------------------------------------------


def _options(options: argparse.Namespace, run: "RunFile") -> "list[tuple[PricedGroup, ...]]":
    from pipeline.planner.cards import gpu_keys
    from pipeline.run_file import configured_group

    prices = own_prices(options.price)
    words = options.hardware
    if "all" in words:
        if not 1 <= options.gpus <= MAX_CARDS:
            raise PlanError(
                f"--gpus: found {options.gpus}; it must be at least 1 and at most {MAX_CARDS}"
            )
        words = [word for word in words if word != "all"]
        words += [f"{key}:{options.gpus}" for key in gpu_keys()]
    if not words and not run.hardware:
        raise PlanError("name an option with --hardware GPU:COUNT, or list cards under hardware")
    found = [groups_of(word, prices) for word in words]
    found = found or [(configured_group(entry, prices),) for entry in run.hardware]
    _check_differ(found, "--hardware" if words else f"{options.run_file}: hardware")
    _check_priced(options.price, found)
    return found


def _check_differ(found: "list[tuple[PricedGroup, ...]]", where: str) -> None:
    """Raise PlanError for an option that is given twice: the page refers to options by name."""
    from pipeline.planner.estimate.estimate import option_name

    names = [option_name(groups) for groups in found]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"{where}: {name} is listed twice")


def _check_priced(texts: Sequence[str], found: "list[tuple[PricedGroup, ...]]") -> None:
    """Raise PlanError for a price that no option uses, as after a mistyped card name."""
    cards = {group.hardware.gpu.name for groups in found for group in groups}
    for text in texts:
        name = own_price(text)[0]
        if name not in cards:
            raise PlanError(f"--price {text}: no option has {name}; they have {', '.join(cards)}")


# --- one point --------------------------------------------------------------------------------


def _point(options: argparse.Namespace) -> str:
    from pipeline.models.dtypes import load_model_as
    from pipeline.planner.estimate.rate_output import point_json, point_text
    from pipeline.planner.rate.point import PointQuery, rate_at_point

    for name in ("model", "gpu", "running_requests", "input_tokens", "output_tokens"):
        if getattr(options, name) is None:
            raise PlanError(f"--point: --{name.replace('_', '-')} is missing")
    _check_point(options)
    rate = rate_at_point(
        PointQuery(
            model=load_model_as(options.model, options.dtype),
            gpu=options.gpu,
            num_gpus=options.tp_size * options.pp_size
            if options.num_gpus is None
            else options.num_gpus,
            tp_size=options.tp_size,
            pp_size=options.pp_size,
            dp_size=options.dp_size,
            running_requests=options.running_requests,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            output_cv=options.output_cv,
            accept_length=options.mtp_accept_length,
            num_draft_tokens=options.draft_tokens,
            sglang_version=options.sglang_version,
            engine=options.engine,
            kv_format=options.kv_format,
        )
    )
    return json.dumps(point_json(rate), indent=1) if options.json else point_text(rate)


def _check_point(options: argparse.Namespace) -> None:
    for name, most in _MOST.items():
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and not 0 <= value <= most:
            raise PlanError(f"{flag}: found {value:g}; it must be between 0 and {most:g}")
    if options.dp_size > 1 and options.num_gpus is None:
        raise PlanError("--num-gpus: missing; --dp-size needs it")
    for flag, given in (("--html", options.html), ("RUN.yaml", options.run_file)):
        if given is not None:
            raise PlanError(f"--point: found {flag} {given}; one point takes no run file and "
                            "makes no page")  # fmt: skip


# --- a running job ----------------------------------------------------------------------------


def _updated(options: argparse.Namespace) -> str:
    from pipeline.live.estimate import folder_update
    from pipeline.live.output import update_json, update_text
    from pipeline.live.update import as_reported
    from pipeline.report.status import run_status
    from pipeline.store.bucket import open_folder

    if options.run_file is not None:
        raise PlanError(
            f"--update-from: {options.run_file} is not read; the folder has its own run file"
        )
    for name in _NOT_OF_A_RUN:
        if getattr(options, name):
            raise PlanError(
                f"--{name.replace('_', '-')}: not with --update-from, which reads the run's own "
                f"files; python -m jobs.report writes its page"
            )
    hardware = _hardware_of_the_run(options)
    try:
        folder = open_folder(options.update_from)
        now = datetime.now(UTC)
        update = folder_update(folder, today=now.date(), hardware=hardware)
        days_left = run_status(folder, now_s=now.timestamp()).days_left
    except OSError as error:
        raise ConfigError(unreadable(options.update_from, error)) from None
    if days_left is not None and not hardware:
        update = as_reported(update, days_left)
    return json.dumps(update_json(update), indent=1) if options.json else update_text(update)


def _hardware_of_the_run(options: argparse.Namespace) -> "tuple[PricedGroup, ...]":
    """Return the cards that the run uses, where --hardware names them."""
    if not options.hardware:
        return ()
    prices = own_prices(options.price)
    if len(options.hardware) > 1 or options.hardware == ["all"]:
        raise PlanError("--update-from: a run uses one option: give --hardware once")
    return groups_of(options.hardware[0], prices)


if __name__ == "__main__":
    sys.exit(main())
