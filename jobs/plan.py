"""What SGLang will do at launch, before it does: `python -m jobs.plan`.

Two forms. With `--` and a launch line, explain that launch. With a run file, search for the
flags that give the most.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError, PlanError

# The planner's modules load inside the functions, so that --help stays quick.
if TYPE_CHECKING:
    from pipeline.planner.launch_plan import ExpectedLengths, RefusedPlan
    from pipeline.planner.search import FoundPlan, HardwareOption
    from schemas.config import RunFile
    from schemas.plan import Calibration, Gpu, LaunchPlan, ModelFacts

_EXAMPLES = """\
examples:
  python -m jobs.plan --gpu rtx-pro-6000 --sglang-version 0.5.23 -- \\
    python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B --mem-fraction-static 0.80
  python -m jobs.plan --gpu h200 --model-config config.json --json -- --tp 2
  python -m jobs.plan --gpu h200 --calibrate-from engine.log --save-calibration h200.json -- …
  python -m jobs.plan run.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Explain a launch, or search for one; 2 where the user can mend what is wrong."""
    own, line = _split(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    options = parser.parse_args(own)
    try:
        if line is None and options.run_file is None:
            raise PlanError("give a launch line after --, or a run file; --help shows both")
        if line is not None and options.run_file is not None:
            raise PlanError("give a launch line or a run file, not both")
        print(_searched(options) if line is None else _explained(options, line))
    except PipelineError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def _split(words: list[str]) -> tuple[list[str], list[str] | None]:
    """The job's own options, and the launch line after the first `--`."""
    if "--" not in words:
        return words, None
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.plan",
        usage="%(prog)s [RUN.yaml] [options] [-- LAUNCH LINE]",
        description="Forecast an SGLang launch, or search for the best one.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="search from a run file")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override the run file")
    add("--gpu", metavar="NAME", help="a card: rtx-pro-6000, 'B200 180GB', H100-SXM")
    add("--gpu-memory-gib", type=float, metavar="GIB", help="memory of a card not listed")
    add("--sglang-version", metavar="X", help="release, image tag or build date")
    add("--model-config", type=Path, metavar="FILE|DIR", help="a config.json")
    add("--weights-format", metavar="FORMAT", help="bf16, fp8, nvfp4, int4-awq, …")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="mean prompt length")
    add("--output-tokens", type=int, default=7680, metavar="N", help="mean output length")
    add("--calibrate-from", type=Path, metavar="LOG", help="an engine's launch log")
    add("--save-calibration", type=Path, metavar="FILE", help="keep what the log says")
    add("--calibration", type=Path, metavar="FILE", help="a kept calibration")
    add("--most", type=int, default=10, metavar="N", help="plans to print from a search")
    add("--json", action="store_true", help="print JSON")
    return parser


# --- form 1 -----------------------------------------------------------------------------------


def _explained(options: argparse.Namespace, line: list[str]) -> str:
    from pipeline.planner.launch_flags import parse_launch_line
    from pipeline.planner.launch_plan import ExpectedLengths, plan_launch

    flags = parse_launch_line(line)
    gpu = _gpu(options)
    lengths = ExpectedLengths(
        prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens
    )
    model = _model(
        flags.model_path,
        options.model_config,
        options.weights_format,
        overrides=flags.text("json-model-override-args"),
    )

    def planned(calibration: "Calibration | None") -> "LaunchPlan | RefusedPlan":
        return plan_launch(
            model, gpu, flags, version=options.sglang_version, lengths=lengths,
            calibration=calibration,
        )  # fmt: skip

    if options.calibrate_from is not None:
        return _calibrated(options, planned(None), planned)
    return _shown(planned(_kept_calibration(options, model, gpu)), options, {})


def _gpu(options: argparse.Namespace) -> "Gpu":
    if options.gpu is None and options.gpu_memory_gib is None:
        raise PlanError("name the card with --gpu, or its memory with --gpu-memory-gib")
    return _card(options.gpu, options.gpu_memory_gib)


def _card(name: str | None, memory_gib: float | None) -> "Gpu":
    from pipeline.planner.hardware import gpu_named, gpu_of_memory, gpu_with_memory

    if memory_gib is None:
        return gpu_named(name or "")
    if name is None:
        return gpu_of_memory(memory_gib)
    try:
        return gpu_with_memory(gpu_named(name), memory_gib)
    except PlanError:
        return gpu_of_memory(memory_gib, name)


def _model(
    name: str, config: Path | None, weights_format: str | None, *, overrides: str = ""
) -> "ModelFacts":
    """The model's facts; `overrides` is the JSON of --json-model-override-args."""
    from pipeline.planner.model_facts import model_facts
    from pipeline.planner.model_files import find_model, read_model

    name = name or (str(config) if config else "")
    if not name:
        raise PlanError("the launch line names no model, and no --model-config is given")
    files = read_model(config) if config else find_model(name)
    return model_facts(
        name,
        {**files.config, **_overriding(overrides)},
        hf_quant=files.hf_quant,
        weights_format=weights_format,
        checkpoint_bytes=files.checkpoint_bytes,
    )


def _overriding(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise PlanError(f"--json-model-override-args is not JSON: {error.msg}") from None
    if not isinstance(fields, dict):
        raise PlanError("--json-model-override-args must be a JSON object")
    return fields


def _shown(
    plan: "LaunchPlan | RefusedPlan", options: argparse.Namespace, extra: dict[str, Any]
) -> str:
    from pipeline.planner.plan_output import plan_json, plan_text

    if options.json:
        return json.dumps({**plan_json(plan), **extra}, indent=1)
    return plan_text(plan)


# --- calibration ------------------------------------------------------------------------------


def _calibrated(options: argparse.Namespace, before: Any, planned: Any) -> str:  # noqa: ANN401  # a plan or a refusal
    from pipeline.planner.calibration import (
        calibration_json,
        calibration_of,
        differences,
        readings,
    )
    from schemas.plan import LaunchPlan

    found = readings(_text(options.calibrate_from))
    if not isinstance(before, LaunchPlan):
        return _shown(before, options, {})
    calibration = calibration_of(
        found, model=before.model, gpu=before.gpu, release=before.release_profile
    )
    off = differences(before, found)
    if options.save_calibration is not None:
        kept = json.dumps(calibration_json(calibration), indent=1)
        _write(options.save_calibration, kept + "\n")
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
        return text
    rows = [
        f"  {item.name:<24}{item.forecast:>14,.2f}{item.logged:>14,.2f}{item.percent():>+9.1f} %"
        for item in off
    ]
    head = f"  {'':<24}{'forecast':>14}{'logged':>14}{'off by':>11}"
    return "\n".join(["forecast against the log", head, *rows, "", text])


def _kept_calibration(
    options: argparse.Namespace, model: "ModelFacts", gpu: "Gpu"
) -> "Calibration | None":
    if options.calibration is None:
        return None
    from pipeline.planner.calibration import calibration_from_json
    from pipeline.planner.sglang_rules import rules_for

    try:
        values = json.loads(_text(options.calibration))
    except json.JSONDecodeError as error:
        raise PlanError(f"{options.calibration} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise PlanError(f"{options.calibration} is not a saved calibration")
    kept = calibration_from_json(values)
    release = rules_for(options.sglang_version)[0].label
    for name, theirs, ours in (
        ("model", kept.model, model.name),
        ("gpu", kept.gpu, gpu.name),
        ("release", kept.release, release),
    ):
        if theirs != ours:
            raise PlanError(f"the calibration is for {name} {theirs!r}, the launch for {ours!r}")
    return kept


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from error


# --- form 2 -----------------------------------------------------------------------------------


def _searched(options: argparse.Namespace) -> str:
    from pipeline.planner.launch_flags import parse_launch_line
    from pipeline.planner.launch_plan import ExpectedLengths
    from pipeline.planner.search import SearchLimits, best_plans
    from schemas.config import read_run_file

    run = read_run_file(options.run_file, options.set)
    planner = run.planner
    config = options.model_config or (
        Path(planner.model_config_path) if planner.model_config_path else None
    )
    model = _model(run.model, config, options.weights_format or planner.weights_format)
    environment = [f"{name}={value}" for name, value in run.engine.env.items()]
    base = parse_launch_line([*environment, *run.engine.flags, "--model-path", run.model])
    lengths = ExpectedLengths(
        prompt_tokens=round(run.lengths.prompt_tokens_mean),
        output_tokens=round(run.lengths.output_tokens_mean),
    )
    found = best_plans(
        model,
        _hardware(options, run),
        lengths,
        SearchLimits(
            mtp=planner.allow_mtp,
            prefix_cache=planner.allow_prefix_cache,
            attention_dp=planner.allow_attention_dp,
            kv_dtype=planner.allow_kv_dtype,
            state_dtype=planner.allow_state_dtype,
        ),
        base=base,
        version=options.sglang_version or planner.sglang_version,
        output_tokens_cv=run.lengths.output_tokens_cv,
        most=options.most,
    )
    return _search_json(found) if options.json else _search_text(model, lengths, found)


def _hardware(options: argparse.Namespace, run: "RunFile") -> "tuple[HardwareOption, ...]":
    from pipeline.planner.search import HardwareOption

    if options.gpu is not None or options.gpu_memory_gib is not None:
        return (HardwareOption(gpu=_gpu(options), count=1),)
    if not run.hardware:
        raise PlanError("the run file has no hardware section: list cards as {gpu, count}")
    return tuple(
        HardwareOption(gpu=_card(entry.gpu, entry.memory_gib), count=entry.count)
        for entry in run.hardware
    )


def _search_json(found: "tuple[FoundPlan, ...]") -> str:
    from pipeline.planner.plan_output import plan_json

    plans = [
        {
            **plan_json(item.plan),
            "gpu_count": item.hardware.count,
            "replicas": item.replicas,
            "requests_in_all": item.requests_in_all,
        }
        for item in found
    ]
    return json.dumps(plans, indent=1)


def _search_text(
    model: "ModelFacts", lengths: "ExpectedLengths", found: "tuple[FoundPlan, ...]"
) -> str:
    from pipeline.planner.plan_output import plan_text

    lines = [
        f"{model.name}: {lengths.prompt_tokens} prompt and {lengths.output_tokens} output tokens",
        "",
        f"  {'requests':>8}  {'replicas':>8}  {'tokens':>12}  {'left GiB':>8}  hardware and flags",
    ]
    for item in found:
        plan = item.plan
        left = (plan.slack_bytes - sum(need.bytes for need in plan.slack_items)) / (1 << 30)
        lines.append(
            f"  {item.requests_in_all:>8,}  {item.replicas:>8}  "
            f"{plan.capacity.max_total_num_tokens:>12,}  {left:>8.1f}  "
            f"{item.hardware.count} x {item.hardware.gpu.name}: {' '.join(plan.argv[2:])}"
        )
    return "\n".join([*lines, "", "the best, in full", "", plan_text(found[0].plan)])


if __name__ == "__main__":
    sys.exit(main())
