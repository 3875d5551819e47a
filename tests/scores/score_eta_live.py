"""Score the time left of real runs: `jobs.status --json` every 3 s, held against the real end.

usage: python -m tests.scores.score_eta_live [--kind NAME] [--seed N] [--looks]

Each run is the job as its user starts it, against stand-in servers on loopback that answer whole,
without counters. The end is when the coordinator writes the final state. Unknown figures do not
count.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.fakes.running import Run, new_run, questions, start_job
from tests.fakes.scripted_server import Reply, ScriptedServer, serving

LEAST_SHARE = 0.15
MOST_MEDIAN_FACTOR, MOST_WORST_FACTOR = 1.5, 4.0
_LOOK_EVERY_S = 3.0
# A look that comes within this time of the end cannot be judged more finely.
_LEAST_LEFT_S = 1.0

Lengths = Callable[[Random], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveKind:
    """One run and its stand-in servers."""

    name: str
    lengths: Lengths
    """Tokens of an answer."""
    rows: int
    servers: int = 1
    requests_at_once: int = 16
    tokens_per_s: float = 100.0
    slow_down: float = 0.0
    """By how much each further request of a server slows a new one."""
    stalled: float = 0.0
    """Share of requests that hang."""
    stall_s: float = 30.0
    """The answer of a request that hangs comes after this time, unless it times out before."""
    timeout_s: float | None = None
    first_s: float = 0.0
    """Delay of the first answer of each server, as of one that loads its model."""
    max_tokens: int = 8192


def one_length(tokens: int) -> Lengths:
    return lambda random: tokens


def wide(mean: float, cv: float, most: int = 8192) -> Lengths:
    sigma = math.sqrt(math.log1p(cv * cv))
    mu = math.log(mean) - sigma * sigma / 2
    return lambda random: max(1, min(round(random.lognormvariate(mu, sigma)), most))


def either(first: Lengths, second: Lengths) -> Lengths:
    return lambda random: (first if random.random() < 0.5 else second)(random)


KINDS: tuple[LiveKind, ...] = (
    LiveKind(name="one length, stalls", lengths=one_length(300), rows=400, stalled=0.01),
    LiveKind(
        name="one length, stalls time out", lengths=one_length(200), rows=1200, servers=2,
        requests_at_once=24, stalled=0.01, stall_s=300.0, timeout_s=25.0,
    ),
    LiveKind(
        name="one length, all of a wave end at once", lengths=one_length(1500), rows=96,
        requests_at_once=16,
    ),
    LiveKind(
        name="one length, the last requests hang", lengths=one_length(150), rows=300,
        requests_at_once=8, stalled=0.012, stall_s=40.0,
    ),
    LiveKind(name="wide lengths", lengths=wide(400, 1.2), rows=300),
    LiveKind(
        name="wide lengths, many at once", lengths=wide(800, 1.5), rows=800, servers=2,
        requests_at_once=48, slow_down=0.01,
    ),
    LiveKind(
        name="wide lengths, few at once", lengths=wide(250, 1.0), rows=100, requests_at_once=4,
    ),
    LiveKind(
        name="rare answers", lengths=wide(2500, 0.4), rows=24, requests_at_once=4,
        max_tokens=32_768,
        tokens_per_s=200.0,
    ),
    LiveKind(
        name="rare answers, two servers", lengths=wide(3000, 0.3), rows=20, servers=2,
        requests_at_once=2, tokens_per_s=200.0,
    ),
    LiveKind(
        name="slow first answer", lengths=wide(300, 0.5), rows=200, requests_at_once=12,
        first_s=15.0,
    ),
    LiveKind(
        name="two kinds of answers", lengths=either(one_length(100), one_length(1500)), rows=120,
    ),
)  # fmt: skip


def answering(kind: LiveKind, server: ScriptedServer, seed: int) -> Callable[..., Reply]:
    """Return the script of one server."""
    random = Random(seed)

    def answer(request: dict[str, Any], number: int) -> Reply:
        tokens = kind.lengths(random)
        pace = kind.tokens_per_s / (1 + kind.slow_down * server.in_flight)
        seconds = tokens / pace
        if random.random() < kind.stalled:
            seconds = kind.stall_s
        if number <= kind.requests_at_once:
            seconds += kind.first_s
        return Reply(body=body(tokens, kind.max_tokens), delay_s=seconds)

    return answer


def body(tokens: int, max_tokens: int) -> bytes:
    """Return a chat completion of this many tokens."""
    message = {"role": "assistant", "content": "an answer", "reasoning_content": "thinking"}
    finish = "length" if tokens >= max_tokens else "stop"
    usage = {"prompt_tokens": 20, "completion_tokens": tokens, "total_tokens": 20 + tokens}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()


# --- a run ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLook:
    """What the status reported at one moment."""

    at_s: float
    share: float
    left_s: float | None
    """None: not known yet."""
    true_s: float = math.nan

    def factor(self) -> float | None:
        """Return how far the figure is off, 1 or more; None where it is not known."""
        if self.left_s is None:
            return None
        ratio = max(self.left_s, 0.01) / max(self.true_s, _LEAST_LEFT_S)
        return max(ratio, 1 / ratio) if self.true_s > _LEAST_LEFT_S else max(ratio, 1.0)


def played(kind: LiveKind, seed: int) -> list[LiveLook]:
    """Run the job against its servers and return the looks, each with the true time left."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        servers = []
        for number in range(kind.servers):
            server = ScriptedServer(keeps_requests=False)
            server.script = answering(kind, server, 1000 * seed + number)
            servers.append(stack.enter_context(serving(server)))
        engine: dict[str, Any] = {
            "kind": "endpoint", "base_urls": [server.url for server in servers],
            "max_running_requests": kind.requests_at_once,
        }  # fmt: skip
        if kind.timeout_s is not None:
            engine["request_timeout_s"] = kind.timeout_s
        run = new_run(
            Path(place), questions(kind.rows), engine=engine,
            sampling={"max_tokens": kind.max_tokens}, output={"flush_interval_s": 3.0},
        )  # fmt: skip
        return _looked_at(run, kind)


def _looked_at(run: Run, kind: LiveKind) -> list[LiveLook]:
    process, looks = start_job(run.run_file), []
    began_s, began_at_s = time.monotonic(), time.time()
    for number in itertools.count(1):
        while process.poll() is None and time.monotonic() < began_s + number * _LOOK_EVERY_S:
            time.sleep(0.05)
        if process.poll() is not None:
            break
        if (run.folder / "live.json").exists() and (status := run.status())["state"] == "running":
            looks.append(_look(status, time.monotonic() - began_s))
    _, errors = process.communicate()
    assert process.returncode in (0, 3), errors
    end_s = (run.folder / "live.json").stat().st_mtime - began_at_s
    return [
        LiveLook(at_s=look.at_s, share=look.share, left_s=look.left_s, true_s=end_s - look.at_s)
        for look in looks
        if look.at_s < end_s
    ]


def _look(status: dict[str, Any], at_s: float) -> LiveLook:
    assert status["eta_s"] is None or status["eta_s"] > 0 or status["rows_done"], status
    share = status["rows_done"] / status["rows_total"]
    return LiveLook(at_s=at_s, share=share, left_s=status["eta_s"])


# --- the table --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each run; return 1 where a requirement is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="", help="only kinds whose name starts with this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--looks", action="store_true", help="print every look")
    options = parser.parse_args(argv)
    print(f"{'run':<40}{'s':>6}{'looks':>7}{'unknown':>9}{'median':>8}{'worst':>8}")
    is_missed = False
    for kind in KINDS:
        if not kind.name.startswith(options.kind):
            continue
        looks = played(kind, options.seed)
        judged = [look for look in looks if look.share >= LEAST_SHARE]
        factors = [factor for look in judged if (factor := look.factor()) is not None]
        median, worst = statistics.median(factors or [math.inf]), max(factors, default=math.inf)
        is_missed |= median > MOST_MEDIAN_FACTOR or worst > MOST_WORST_FACTOR
        duration_s = looks[-1].at_s + looks[-1].true_s
        print(
            f"{kind.name:<40}{duration_s:>6.0f}{len(judged):>7}{len(judged) - len(factors):>9}"
            f"{median:>8.2f}{worst:>8.2f}",
            flush=True,
        )
        if options.looks:
            print("\n".join(_lines(looks)), flush=True)
    return 1 if is_missed else 0


def _lines(looks: Sequence[LiveLook]) -> Iterator[str]:
    for look in looks:
        left = "unknown" if look.left_s is None else f"{look.left_s:,.1f} s"
        factor = look.factor()
        off = "" if factor is None else f"  {factor:.2f}"
        yield f"    {look.at_s:6.1f} s {look.share:4.0%}: {left}, true {look.true_s:,.1f} s{off}"


if __name__ == "__main__":
    sys.exit(main())
