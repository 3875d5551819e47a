"""Time of a plan, of a search, and of the command's help.

usage: python -m tests.benchmarks.planner
"""

import subprocess
import sys
import time
from collections.abc import Callable

from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.plan import ExpectedLengths, explain_launch
from pipeline.planner.rate.search import HardwareOption, SearchLimits, SearchQuery, best_plans
from pipeline.planner.sglang.flags import parse_launch_line

_TRIES = 5
_MODEL = "Qwen/Qwen3.6-27B"


def main() -> int:
    model = load_model(_MODEL)
    gpu = gpu_named("rtx-pro-6000")
    line = "--mem-fraction-static 0.8 --speculative-algorithm EAGLE --disable-radix-cache"
    flags, base = parse_launch_line(line.split()), parse_launch_line(["--model-path", _MODEL])
    options = (HardwareOption(gpu=gpu, count=4),)
    limits = SearchLimits(kv_dtype=True, state_dtype=True)
    query = SearchQuery(model=model, options=options, limits=limits, base=base)
    lengths = ExpectedLengths(prompt_tokens=300, output_tokens=6000)
    help_command = [sys.executable, "-m", "jobs.plan", "--help"]
    _report("plan with advice", lambda: explain_launch(model, gpu, flags, version="0.5.12"))
    _report("search", lambda: best_plans(query, lengths))
    _report(
        "--help",
        lambda: subprocess.run(help_command, check=True, capture_output=True),
    )
    return 0


def _report(what: str, act: Callable[[], object]) -> None:
    times_s = []
    for _ in range(_TRIES):
        began_s = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - began_s)
    print(f"{what:18} {1000 * min(times_s):7.1f} ms, the best of {_TRIES}")


if __name__ == "__main__":
    sys.exit(main())
