"""What SGLang will do at launch, before it does: `python -m jobs.plan`.

Two forms. With `--` and a launch line, explain that launch. With a run file, search for the
flags that give the most.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import PipelineError, PlanError

_EXAMPLES = """\
examples:
  python -m jobs.plan --gpu rtx-pro-6000 --sglang-version 0.5.23 -- \\
    python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B --mem-fraction-static 0.80
  python -m jobs.plan --gpu h200 --model-config config.json --json -- --tp 2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Explain a launch, or search for one; 2 where the user can mend what is wrong."""
    own, line = _split(list(sys.argv[1:] if argv is None else argv))
    options = _parser().parse_args(own)
    try:
        if line is not None:
            print(_explained(options, line))
        else:
            raise PlanError("give a launch line after --, or a run file")
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
    parser.add_argument("run_file", nargs="?", metavar="RUN.yaml", help="search from a run file")
    parser.add_argument(
        "--gpu", metavar="NAME", help="a card: rtx-pro-6000, 'B200 180GB', H100-SXM"
    )
    parser.add_argument(
        "--gpu-memory-gib", type=float, metavar="GIB", help="memory of a card that is not listed"
    )
    parser.add_argument("--sglang-version", metavar="X", help="release, image tag or build date")
    parser.add_argument("--model-config", type=Path, metavar="FILE|DIR", help="a config.json")
    parser.add_argument("--weights-format", metavar="FORMAT", help="bf16, fp8, nvfp4, int4-awq, …")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="mean prompt")
    parser.add_argument("--output-tokens", type=int, default=7680, metavar="N", help="mean output")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _explained(options: argparse.Namespace, line: list[str]) -> str:
    # The planner's modules load here, so that --help stays quick.
    from pipeline.planner.hardware import gpu_named, gpu_of_memory, gpu_with_memory
    from pipeline.planner.launch_flags import parse_launch_line
    from pipeline.planner.launch_plan import ExpectedLengths, plan_launch
    from pipeline.planner.model_facts import model_facts
    from pipeline.planner.model_files import find_model, read_model
    from pipeline.planner.plan_output import plan_json, plan_text

    flags = parse_launch_line(line)
    if options.gpu is None and options.gpu_memory_gib is None:
        raise PlanError("name the card with --gpu, or its memory with --gpu-memory-gib")
    if options.gpu is None:
        gpu = gpu_of_memory(options.gpu_memory_gib)
    elif options.gpu_memory_gib is None:
        gpu = gpu_named(options.gpu)
    else:
        gpu = gpu_with_memory(gpu_named(options.gpu), options.gpu_memory_gib)
    name = flags.model_path or (str(options.model_config) if options.model_config else "")
    if not name:
        raise PlanError("the launch line names no model, and no --model-config is given")
    files = read_model(options.model_config) if options.model_config else find_model(name)
    model = model_facts(
        name,
        files.config,
        hf_quant=files.hf_quant,
        weights_format=options.weights_format,
        checkpoint_bytes=files.checkpoint_bytes,
    )
    plan = plan_launch(
        model,
        gpu,
        flags,
        version=options.sglang_version,
        lengths=ExpectedLengths(
            prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens
        ),
    )
    return json.dumps(plan_json(plan), indent=1) if options.json else plan_text(plan)


if __name__ == "__main__":
    sys.exit(main())
