"""What SGLang will do at launch, before it does: `python -m jobs.plan`.

Two forms. With `--` and a launch line, explain that launch. With a run file, search for the
flags that give the most.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.terminal import tell
from pipeline.errors import PipelineError, PlanError
from schemas.units import GIB

# The planner's modules load inside the functions, so that --help stays quick.
if TYPE_CHECKING:
    from pipeline.planner.memory.plan import RefusedPlan
    from pipeline.planner.rate.ranking import Load, RatedSearch
    from pipeline.planner.rate.search import HardwareOption
    from schemas.config import RunFile
    from schemas.plan import Calibration, Gpu, LaunchPlan, ModelFacts

_CONTEXT = "context-length"
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
        for flag, value in (
            ("--prompt-tokens", options.prompt_tokens),
            ("--output-tokens", options.output_tokens),
            ("--most", options.most),
        ):
            if value < 1:
                raise PlanError(f"{flag}: found {value}; it must be at least 1")
        tell(_searched(options) if line is None else _explained(options, line))
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
    from pipeline.planner.memory.plan import ExpectedLengths, plan_launch
    from pipeline.planner.sglang.flags import parse_launch_line

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
    from pipeline.planner.cards import gpu_named, gpu_of_memory, gpu_with_memory

    if memory_gib is None:
        try:
            return gpu_named(name or "")
        except PlanError as error:
            raise PlanError(f"{error}; or give its memory with --gpu-memory-gib") from None
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
    from pipeline.models.facts import model_facts
    from pipeline.models.files import find_model, read_model

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
    from pipeline.planner.memory.plan_output import plan_json, plan_text

    if options.json:
        return json.dumps({**plan_json(plan), **extra}, indent=1)
    return plan_text(plan)


# --- calibration ------------------------------------------------------------------------------


def _calibrated(options: argparse.Namespace, before: Any, planned: Any) -> str:  # noqa: ANN401  # a plan or a refusal
    from pipeline.planner.sglang.calibration import (
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
    from pipeline.planner.sglang.calibration import calibration_from_json
    from pipeline.planner.sglang.releases import rules_for

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
    from pipeline.dataset.lengths import expected_lengths, longest_prompts
    from pipeline.planner.rate.ranking import Load, rated_search
    from pipeline.planner.rate.search import SearchLimits
    from pipeline.planner.rate.throughput import accept_odds
    from pipeline.run_file import needed_context_tokens, plan_base, run_model
    from schemas.config import read_run_file

    run = read_run_file(options.run_file, options.set)
    planner, told = run.planner, run.estimate
    if options.weights_format:
        planner = planner.model_copy(update={"weights_format": options.weights_format})
    model = run_model(run.model_copy(update={"planner": planner}), options.model_config)
    # A run takes the context that its longest prompt needs. What lies elsewhere is not fetched.
    are_here = Path(run.prompts.path).exists()
    longest = longest_prompts(run) if are_here and not plan_base(run, None).has(_CONTEXT) else None
    base = plan_base(run, needed_context_tokens(run, model, longest))
    odds = None
    if told.accept_length is not None:
        odds = accept_odds(told.accept_length, told.draft_tokens)
    load = Load(
        prompt_tokens_mean=run.lengths.prompt_tokens_mean or options.prompt_tokens,
        lengths=expected_lengths(run, limit_tokens=_longest_output(run)),
        accept_odds=odds,
    )
    hardware = _hardware(options, run)
    found = rated_search(
        model,
        hardware,
        load,
        SearchLimits(
            mtp=planner.allow_mtp,
            prefix_cache=planner.allow_prefix_cache,
            attention_dp=planner.allow_attention_dp,
            pipeline=planner.allow_pipeline,
            kv_dtype=planner.allow_kv_dtype,
            state_dtype=planner.allow_state_dtype,
        ),
        base=base,
        version=options.sglang_version or planner.sglang_version,
        usd_per_gpu_hour=_usd_per_gpu_hour(hardware, run),
        most=options.most,
    )
    if options.json:
        return _search_json(found)
    is_assumed = not base.has(_CONTEXT)
    return _search_text(model, load, found, context_is_assumed=is_assumed)


def _longest_output(run: "RunFile") -> int:
    """`sampling.max_tokens` where it is given; its default must not cut what lengths state."""
    from pipeline.planner.lengths.lengths import longest_output

    return longest_output(
        run.lengths.output_tokens_mean,
        run.lengths.output_tokens_cv,
        run.sampling.max_tokens,
        max_tokens_given="max_tokens" in run.sampling.model_fields_set,
    )


def _usd_per_gpu_hour(hardware: "tuple[HardwareOption, ...]", run: "RunFile") -> dict[str, float]:
    """The run file's prices, else the catalogue's on demand, by card."""
    from pipeline.planner.estimate.prices import prices_of

    own: dict[str, float | None] = {}
    for entry in run.hardware:
        name, usd = _card(entry.gpu, entry.memory_gib).name, entry.usd_per_gpu_hour
        if own.setdefault(name, usd) != usd:
            raise PlanError(
                f"hardware: {name} has two prices, usd_per_gpu_hour {own[name]} and {usd}; "
                "one a card was expected"
            )
    today = datetime.now(UTC).date()
    prices = {}
    for option in hardware:
        found = prices_of(option.gpu, today, own_usd=own.get(option.gpu.name))
        if found and found[0].kind != "spot":
            prices[option.gpu.name] = found[0].usd_per_gpu_hour
    return prices


def _hardware(options: argparse.Namespace, run: "RunFile") -> "tuple[HardwareOption, ...]":
    from pipeline.planner.rate.search import HardwareOption

    if options.gpu is not None or options.gpu_memory_gib is not None:
        return (HardwareOption(gpu=_gpu(options), count=1),)
    if not run.hardware:
        raise PlanError("the run file has no hardware section: list cards as {gpu, count}")
    return tuple(
        HardwareOption(gpu=_card(entry.gpu, entry.memory_gib), count=entry.count)
        for entry in run.hardware
    )


def _search_json(found: "RatedSearch") -> str:
    from pipeline.planner.memory.plan_output import plan_json

    by_rate = _ranks_by_rate(found)
    plans = [
        {
            **plan_json(item.found.plan),
            "gpu_count": item.found.hardware.count,
            "replicas": item.found.replicas,
            "requests_in_all": item.found.requests_in_all,
            "running_requests": item.resident.running_requests * item.found.replicas,
            "limited_by": item.resident.limited_by,
            "retraction_risk": item.resident.retraction_risk,
            "tokens_per_s": item.tokens_per_s,
            "tokens_per_s_rank": by_rate[place],
            "usd_per_million_tokens": item.usd_per_million_tokens,
            "mtp_break_even_requests": found.break_even_requests,
        }
        for place, item in enumerate(found.plans)
    ]
    return json.dumps(plans, indent=1)


def _ranks_by_rate(found: "RatedSearch") -> list[int]:
    """Each plan's place by tokens/s, 1 for the fastest."""
    rates = sorted((item.tokens_per_s for item in found.plans), reverse=True)
    return [1 + rates.index(item.tokens_per_s) for item in found.plans]


_SEARCH_HEAD = (
    f"  {'usd/M':>7}  {'tokens/s':>9}  {'by rate':>7}  {'running':>8}  {'replicas':>8}  "
    f"{'left GiB':>8}  hardware and flags"
)


def _search_text(
    model: "ModelFacts", load: "Load", found: "RatedSearch", *, context_is_assumed: bool
) -> str:
    from pipeline.planner.memory.plan_output import plan_text

    summary = load.lengths.summary
    best = found.plans[0].found.plan
    context = f"context {best.settings.context_length:,}"
    if context_is_assumed:
        context += ", assumed: the prompts are not here, and a run takes what the longest needs"
    lines = [
        (
            f"{model.name}: {load.prompt_tokens_mean:,.0f} prompt tokens; output mean "
            f"{summary.mean_tokens:,.0f}, CV {summary.cv:.2g}, limit {summary.limit_tokens:,}"
        ),
        context,
        "",
        _SEARCH_HEAD,
    ]
    for rank, item in zip(_ranks_by_rate(found), found.plans, strict=True):
        plan = item.found.plan
        left = (plan.slack_bytes - sum(need.bytes for need in plan.slack_items)) / GIB
        usd = item.usd_per_million_tokens
        lines.append(
            f"  {'-' if usd is None else f'{usd:.3f}':>7}  {item.tokens_per_s:>9,.0f}  "
            f"{rank:>7}  {item.resident.running_requests * item.found.replicas:>8,.0f}  "
            f"{item.found.replicas:>8}  {left:>8.1f}  "
            f"{item.found.hardware.count} x {item.found.hardware.gpu.name}: "
            f"{' '.join(plan.argv[2:])}"
        )
    best = found.plans[0].found.plan
    told = [*lines, *_stages_text(found), "", _break_even_text(found)]
    return "\n".join([*told, "", "the best, in full", "", plan_text(best)])


def _stages_text(found: "RatedSearch") -> list[str]:
    """Why plans with stages stand lower than their figures."""
    from pipeline.planner.rate.ranking import UNBACKED_SHARE

    if all(item.replica.ranks.pp_size == 1 for item in found.plans):
        return []
    lower = f"{1 - UNBACKED_SHARE:.0%}"
    return [
        "",
        f"--pp-size: no reading backs these rates; in the order they stand {lower} lower",
    ]


def _break_even_text(found: "RatedSearch") -> str:
    caps = {curve.mtp: curve.cap_requests for curve in found.curves}
    if True not in caps or False not in caps:
        return "MTP: only one setting fits or is allowed, so none is weighed against another"
    if found.break_even_requests is None:
        at = "MTP gives more at every batch"
    elif found.break_even_requests <= 1:
        at = "MTP gives less at every batch"
    else:
        at = f"MTP gives more below {found.break_even_requests} running requests a replica"
    return f"{at}; memory holds {caps[True]} a replica with it and {caps[False]} without"


if __name__ == "__main__":
    sys.exit(main())
