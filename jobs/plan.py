"""Forecast an SGLang launch before it happens: `python -m jobs.plan`.

Two forms. With `--` and a launch line, explain that launch. With a run file, search for the
fastest flags.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.hardware_options import counted_card
from jobs.terminal import read_text, tell, tell_error, write_text
from pipeline.console.commands import command, program, split_launch_line
from pipeline.errors import PipelineError, PlanError

# The planner's modules load inside the functions, so that --help stays quick.
if TYPE_CHECKING:
    from pipeline.planner.memory.plan import ExpectedLengths, RefusedPlan
    from pipeline.planner.rate.ranking import RatedPlan, RatedSearch
    from pipeline.planner.rate.search import HardwareOption
    from pipeline.planner.sglang.flags import LaunchFlags
    from pipeline.recipes.deploy.launch import PlannedLaunch
    from schemas.config.run_file import RunFile
    from schemas.plan import Calibration, Gpu, LaunchPlan, ModelFacts

_CONTEXT = "context-length"
# The scripts of `--write` start Ray with it; it is the same for all plans.
_NODE_SCRIPT = Path(__file__).with_name("deploy") / "node.sh"
_SHARED = "/shared"
_EXAMPLES = """\
examples:
  python -m jobs.plan --gpu rtx-pro-6000 --sglang-version 0.5.23 -- \\
    python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B --mem-fraction-static 0.80
  python -m jobs.plan --gpu h200 --model-config config.json --json -- --tp 2
  python -m jobs.plan --gpu h200 --calibrate-from engine.log --save-calibration h200.json -- …
  python -m jobs.plan run.yaml
  python -m jobs.plan run.yaml --html plan.html
  python -m jobs.plan run.yaml --gpu b200:8 --write submit/
  python -m jobs.plan --gpu b200:8 --write submit/ -- --model-path Qwen/Qwen3.6-27B --tp 2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Explain a launch, or search for one.

    Return 0 if it fits or may fit, 1 if it does not or SGLang refuses it, and 2 for a question that
    cannot be answered.
    """
    own, line = split_launch_line(sys.argv[1:] if argv is None else argv)
    parser = argument_parser()
    options = parser.parse_args(own)
    try:
        if line is None and options.run_file is None:
            raise PlanError("give a launch line after --, or a run file; --help shows both")
        if line is not None and options.run_file is not None:
            raise PlanError("give a launch line or a run file, not both")
        for flag, value in (
            ("--prompt-tokens", options.prompt_tokens),
            ("--output-tokens", options.output_tokens),
            ("--most", options.most),
        ):
            if value < 1:
                raise PlanError(f"{flag}: found {value}; it must be at least 1")
        for flag, is_given in (("--shared", options.shared), ("--force", options.force)):
            if is_given and options.write is None:
                raise PlanError(f"{flag}: only with --write")
        if line is None:
            tell(_searched(options))
            return 0
        plan, answer = _explained(options, line)
        tell(answer)
    except PipelineError as error:
        tell_error(f"plan: {error}")
        return 2
    return int(getattr(plan, "verdict", "refused") not in ("fits", "marginal"))


def argument_parser() -> argparse.ArgumentParser:
    """Return the command's own parser."""
    parser = argparse.ArgumentParser(
        prog=program("jobs.plan"),
        usage="%(prog)s [RUN.yaml] [options] [-- LAUNCH LINE]",
        description="Forecast an SGLang launch, or search for the best one.",
        epilog=_EXAMPLES.replace("python -m jobs.plan", program("jobs.plan")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="search from a run file")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the run file, for example sampling.max_tokens=512",
    )
    add(
        "--gpu",
        metavar="CARD[:N]",
        help="a card, and how many: rtx-pro-6000:4, 'B200 180GB'; default: the run file's hardware",
    )
    add(
        "--gpu-memory-gib",
        type=float,
        metavar="GIB",
        help="memory in GiB of a card that is not in the catalogue",
    )
    add(
        "--sglang-version",
        metavar="X",
        help="release, image tag or build date; default: the newest known",
    )
    add(
        "--model-config",
        type=Path,
        metavar="FILE|DIR",
        help="a config.json; default: by the model's name",
    )
    add(
        "--weights-format",
        metavar="FORMAT",
        help="bf16, fp8, nvfp4, int4-awq, …; default: by the config",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=512,
        metavar="N",
        help="mean prompt, in tokens; default: 512",
    )
    add(
        "--output-tokens",
        type=int,
        default=7680,
        metavar="N",
        help="mean completion, in tokens; default: 7680",
    )
    add("--calibrate-from", type=Path, metavar="LOG", help="read an engine's launch log")
    add("--save-calibration", type=Path, metavar="FILE", help="save the figures of the log")
    add("--calibration", type=Path, metavar="FILE", help="use saved figures of a log")
    add(
        "--most",
        type=int,
        default=10,
        metavar="N",
        help="plans to print from a search; default: 10",
    )
    add("--write", type=Path, metavar="DIR", help="write the files that submit the plan: run file, "
        "RayJob, Slurm job, SkyPilot task, plain Ray")  # fmt: skip
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the page as well: memory, speed, launch lines",
    )
    add(
        "--shared",
        metavar="DIR",
        help="folder that all nodes share, for relative paths of --write; default: /shared",
    )
    add("--force", action="store_true", help="replace files of --write that were edited")
    add("--json", action="store_true", help="print JSON")
    return parser


# --- form 1 -----------------------------------------------------------------------------------


def _explained(
    options: argparse.Namespace, line: list[str]
) -> "tuple[LaunchPlan | RefusedPlan, str]":
    """Return the plan of a launch line, and what is printed of it."""
    from pipeline.planner.launch_text import launch_words
    from pipeline.planner.memory.plan import ExpectedLengths, explain_launch
    from pipeline.planner.sglang.flags import parse_launch_line
    from pipeline.recipes.deploy.launch import launch_of_line, values_of_line

    flags = parse_launch_line(launch_words(line))
    gpu = _gpu(options)
    lengths = ExpectedLengths(
        prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens
    )
    model = _model(options, flags)

    def planned(calibration: "Calibration | None") -> "LaunchPlan | RefusedPlan":
        return explain_launch(
            model, gpu, flags, version=options.sglang_version, lengths=lengths,
            calibration=calibration,
        )  # fmt: skip

    if options.calibrate_from is not None:
        return _calibrated(options, planned(None), planned)
    plan = planned(_kept_calibration(options, model, gpu))
    shown = _shown(plan, options, {})
    if options.html is not None:
        from pipeline.report.plan_page import launch_page

        search, own = _rated(model, gpu, flags, lengths, options.sglang_version)
        write_text(options.html, launch_page(plan, dict(flags.env), search, own))
    if options.write is None:
        return plan, shown
    launch = launch_of_line(plan, flags, gpu, counted_card(options.gpu or "")[1])
    config_path = str(options.model_config) if options.model_config else None
    values = values_of_line(flags, plan.model, config_path)
    return plan, _with_files(shown, options, values, launch)


def _rated(
    model: "ModelFacts",
    gpu: "Gpu",
    flags: "LaunchFlags",
    lengths: "ExpectedLengths",
    version: str | None,
) -> "tuple[RatedSearch | None, RatedPlan | None]":
    """Return the speed of launches on the same ranks with MTP and without, and of this one.

    Each is None where it is not known, as for a launch that does not start.
    """
    from pipeline.planner.cards import speed_known
    from pipeline.planner.lengths.lengths import output_lengths
    from pipeline.planner.rate.own_launch import rated_launch
    from pipeline.planner.rate.ranking import Load, rated_search
    from pipeline.planner.rate.search import HardwareOption, SearchLimits, SearchQuery
    from pipeline.planner.sglang.layout import parallel_of

    if not speed_known(gpu):
        return None, None
    ranks = parallel_of(flags)
    # What MTP changes is searched; all else stays as it is.
    searched = [name for name, _ in flags.values if name.startswith("speculative-")]
    searched += ["max-running-requests", "mem-fraction-static"]
    layout = {"tp-size": str(ranks.tp_size), "pp-size": str(ranks.pp_size)}
    base = flags.changed({**dict.fromkeys(searched), **layout})
    limit = max(model.context_length - lengths.prompt_tokens, lengths.output_tokens)
    load = Load(
        prompt_tokens_mean=lengths.prompt_tokens,
        lengths=output_lengths(
            lengths.output_tokens, lengths.output_tokens_cv, limit, "--output-tokens"
        ),
    )
    option = HardwareOption(gpu=gpu, count=ranks.tp_size * ranks.pp_size)
    query = SearchQuery(
        model=model, options=(option,), limits=SearchLimits(), base=base, version=version
    )
    alone = flags.changed({"dp-size": None}) if not flags.has("enable-dp-attention") else flags
    search: RatedSearch | None = None
    own: RatedPlan | None = None
    with suppress(PlanError):
        search = rated_search(query, load, most=1)
    with suppress(PlanError):
        own = rated_launch(model, option, alone, load, version=version)
    return search, own


def _gpu(options: argparse.Namespace) -> "Gpu":
    if options.gpu is None and options.gpu_memory_gib is None:
        raise PlanError("name the card with --gpu, or its memory with --gpu-memory-gib")
    from pipeline.planner.cards import gpu_of

    try:
        return gpu_of(counted_card(options.gpu or "")[0], options.gpu_memory_gib)
    except PlanError as error:
        if options.gpu_memory_gib is not None:
            raise
        raise PlanError(f"{error}; or give its memory with --gpu-memory-gib") from None


def _model(options: argparse.Namespace, flags: "LaunchFlags") -> "ModelFacts":
    from pipeline.models.files import load_model

    config = options.model_config
    name = flags.model_path or (str(config) if config else "")
    if not name:
        raise PlanError("the launch line names no model, and no --model-config is given")
    return load_model(
        name,
        config_path=config,
        weights_format=options.weights_format,
        overrides=flags.text("json-model-override-args"),
    )


def _shown(
    plan: "LaunchPlan | RefusedPlan", options: argparse.Namespace, extra: dict[str, Any]
) -> str:
    from pipeline.planner.memory.plan_output import plan_json, plan_text

    if options.json:
        return json.dumps({**plan_json(plan), **extra}, indent=1)
    return plan_text(plan)


# --- calibration ------------------------------------------------------------------------------


def _calibrated(
    options: argparse.Namespace,
    before: "LaunchPlan | RefusedPlan",
    planned: "Callable[[Calibration], LaunchPlan | RefusedPlan]",
) -> "tuple[LaunchPlan | RefusedPlan, str]":
    from pipeline.planner.sglang.calibration import (
        calibration_json,
        calibration_of,
        differences,
        readings,
    )
    from pipeline.planner.sglang.flags import parse_launch_line
    from pipeline.planner.sglang.layout import layout_name
    from schemas.plan import LaunchPlan

    found = readings(read_text(options.calibrate_from))
    if not isinstance(before, LaunchPlan):
        return before, _shown(before, options, {})
    calibration = calibration_of(
        found,
        model=before.model,
        gpu=before.gpu,
        release=before.release_profile,
        layout=layout_name(parse_launch_line(before.argv)),
    )
    off = differences(before, found)
    if options.save_calibration is not None:
        kept = json.dumps(calibration_json(calibration), indent=1)
        write_text(options.save_calibration, kept + "\n")
    after = planned(calibration)
    extra = {
        "calibration": calibration_json(calibration),
        "differences": [
            {
                "name": item.name,
                "forecast": item.forecast,
                "logged": item.logged,
                "percent": round(item.percent(), 2),
            }
            for item in off
        ],
    }
    text = _shown(after, options, extra)
    if options.json:
        return after, text
    rows = [
        f"  {item.name:<24}{item.forecast:>14,.2f}{item.logged:>14,.2f}{item.percent():>+9.1f} %"
        for item in off
    ]
    head = f"  {'':<24}{'forecast':>14}{'logged':>14}{'off by':>11}"
    return after, "\n".join(["forecast against the log", head, *rows, "", text])


def _kept_calibration(
    options: argparse.Namespace, model: "ModelFacts", gpu: "Gpu"
) -> "Calibration | None":
    if options.calibration is None:
        return None
    from pipeline.planner.sglang.calibration import calibration_from_text, check_calibration
    from pipeline.planner.sglang.releases import rules_for

    path = options.calibration
    calibration = calibration_from_text(read_text(path), str(path))
    release = rules_for(options.sglang_version)[0].label
    check_calibration(calibration, model=model.name, gpu=gpu.name, release=release)
    return calibration


# --- form 2 -----------------------------------------------------------------------------------


def _searched(options: argparse.Namespace) -> str:
    from pipeline.dataset.lengths import expected_lengths, prompt_bounds
    from pipeline.planner.estimate.rate_output import search_json, search_text
    from pipeline.planner.rate.ranking import rated_search
    from pipeline.planner.rate.search import SearchQuery
    from pipeline.recipes.deploy.launch import launch_of_plan
    from pipeline.run_file import (
        needed_context_tokens,
        output_limit_tokens,
        plan_base,
        run_load,
        run_model,
        search_limits,
        usd_per_gpu_hour,
        with_planner_settings,
        with_row_budgets,
    )
    from schemas.config.reader import read_run_file, run_file_values

    run = with_planner_settings(
        read_run_file(options.run_file, options.set),
        model_config_path=options.model_config,
        sglang_version=options.sglang_version,
        weights_format=options.weights_format,
    )
    model = run_model(run)
    # A run uses the context that its longest prompt needs. Prompts elsewhere are not fetched.
    are_here = Path(run.prompts.path).exists()
    is_read = are_here and not plan_base(run, None).has(_CONTEXT)
    bounds = prompt_bounds(run) if is_read else None
    run = with_row_budgets(run, bounds.budgets if bounds else None)
    base = plan_base(run, needed_context_tokens(run, model, bounds.longest if bounds else None))
    load = run_load(
        run,
        prompt_tokens_mean=run.lengths.prompt_tokens_mean or options.prompt_tokens,
        lengths=expected_lengths(run, limit_tokens=output_limit_tokens(run)),
    )
    hardware = _hardware(options, run)
    search = rated_search(
        SearchQuery(
            model=model,
            options=hardware,
            limits=search_limits(run),
            base=base,
            version=run.planner.sglang_version,
        ),
        load,
        usd_per_gpu_hour=usd_per_gpu_hour(run, hardware, today=datetime.now(UTC).date()),
        most=options.most,
    )
    shown = (
        json.dumps(search_json(search), indent=1)
        if options.json
        else search_text(model.name, load, search, context_is_assumed=not base.has(_CONTEXT))
    )
    if options.html is not None:
        from pipeline.report.plan_page import search_page

        write_text(options.html, search_page(search, run.engine.env))
    if options.write is None:
        return shown
    values = run_file_values(options.run_file, options.set)
    if options.weights_format or options.model_config:
        values["planner"] = run.planner.model_dump(exclude_unset=True)
    gives_context = plan_base(run, None).has(_CONTEXT)
    launch = launch_of_plan(search.plans[0], gives_context=gives_context)
    return _with_files(shown, options, values, launch)


def _hardware(options: argparse.Namespace, run: "RunFile") -> "tuple[HardwareOption, ...]":
    from pipeline.planner.rate.search import HardwareOption
    from pipeline.run_file import configured_hardware

    if options.gpu is not None or options.gpu_memory_gib is not None:
        count = counted_card(options.gpu or "")[1]
        return (HardwareOption(gpu=_gpu(options), count=count or 1),)
    return configured_hardware(run)


# --- files to submit --------------------------------------------------------------------------


def _with_files(
    shown: str, options: argparse.Namespace, values: dict[str, Any], launch: "PlannedLaunch"
) -> str:
    """Write the files of a launch, and add to the answer what follows; beside JSON, to stderr."""
    from pipeline.recipes.deploy.files import write_submission
    from pipeline.recipes.deploy.submission import submission_of

    shared = (options.shared or _SHARED).rstrip("/")
    submission, folder = submission_of(values, launch, shared=shared), options.write
    write_submission(submission, folder, _NODE_SCRIPT, replaces=options.force)
    lines = (
        f"written to {folder}: {submission.summary}",
        *(f"  {path} is expected at {where}" for path, where in submission.moved_paths),
        "  edit what is marked EDIT; then check the run file, and use one of the others",
        f"  {command('jobs.regenerate', str(folder / 'run.yaml'), '--dry-run')}",
        f"  kubectl apply -f {folder / 'rayjob.yaml'}",
        f"  cd {folder} && sbatch slurm.sbatch",
        f"  cd {folder} && sky jobs launch skypilot.yaml",
        f"  {folder / 'ray.sh'} head HEAD_IP",
    )
    if options.json:
        tell_error(*lines)
        return shown
    return "\n".join((shown, "", *lines))


if __name__ == "__main__":
    sys.exit(main())
