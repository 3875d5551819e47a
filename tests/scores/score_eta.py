"""Score the time left: streams of completions played through the real estimator, without a clock.

usage: python -m tests.scores.score_eta [--seeds N] [--kind NAME] [--worst N]

A stream is one run on simulated engines. Its requests go through the worker's `Meter`, its spans
into the coordinator's `LiveLog`, and at some shares of the rows the estimator is asked for the time
left, which is compared with the stream's own end. Time between two sessions does not count.
"""

import argparse
import heapq
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random

from pipeline.live.log import LiveLog
from pipeline.live.meter import Meter
from pipeline.live.update import Expectation, RowCounts, Unplanned, run_update
from pipeline.planner.lengths.lengths import LengthModel, configured_lengths, log_normal_cut
from pipeline.planner.sglang.metrics import EngineCounters
from schemas.completion import Interruption, Turn
from schemas.config.run_file import RunFile
from schemas.estimate import Band
from schemas.units import SECONDS_PER_DAY

CHECKPOINTS = (0.03, 0.10, 0.25, 0.50, 0.75, 0.90, 0.97)
# What must hold: the median factor from a quarter on, the worst from a tenth on, the band's hits.
MOST_MEDIAN_FACTOR, MOST_WORST_FACTOR = 1.15, 2.0
LEAST_HITS, MOST_HITS = 0.70, 0.90
_TICK_S = 1.0
_FLUSH_S = 15.0
# Sizes that a stream draws: engines, their requests at once, and rows over both.
_ENGINES, _CAPS, _WAVES, _ROWS = (2, 3, 4, 8), (8, 16, 32), (8.0, 140.0), (400, 8_000)
_INTERRUPTED = Interruption(cause="simulated")

Lengths = Callable[[Random, float], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of stream."""

    name: str
    lengths: Lengths
    """Tokens of a completion, by a generator and the row's place in the input, 0 to 1."""
    limit_tokens: int = 32_768
    rows: int | None = None
    """None: the stream draws its own size."""
    engines: int = 4
    cap_requests: int = 32
    tokens_per_s: float = 40.0
    """Of a request that runs alone."""
    slow_down: float = 0.02
    """By how much each further request slows all of them."""
    turns: int = 1
    samples: int = 1
    stalled_rows: int = 0
    """Requests that hang until they time out, and are asked again."""
    stall_s: float = 600.0
    retry_share: float = 0.0
    """Of the requests, those that fail at some point and are asked again."""
    speed: Callable[[float], float] = lambda done: 1.0
    """The engines' speed over their first, by the share of rows that are done."""
    lost_at: float | None = None
    joined_at: float | None = None
    """Share of rows at which an engine leaves or joins."""
    pause_at: float | None = None
    """Share of rows at which the run is stopped and resumed an hour later."""
    canary_rows: int = 0
    """Rows that run alone first."""
    counters: bool = False
    """Whether the engines have counters, as SGLang does."""
    prior: tuple[float, float] | None = None
    """Mean and CV that the run file states; None leaves the planner's prior."""
    thinking: bool = True


def log_normal(mean: float, cv: float, limit: int = 32_768) -> Lengths:
    """Lengths of a cut log-normal."""
    shape = log_normal_cut(mean, cv, limit)
    return lambda random, place: max(
        1, min(round(math.exp(random.gauss(shape.mu, shape.sigma))), limit)
    )


def one_length(tokens: int, spread: float = 0.0) -> Lengths:
    """Lengths that are all alike, but for a few percent."""
    return lambda random, place: max(1, round(tokens * (1 + random.uniform(-spread, spread))))


def cut_at(limit_tokens: int, lengths: Lengths) -> Lengths:
    """Lengths of which many reach the limit."""
    return lambda random, place: min(lengths(random, place), limit_tokens)


def two_humps(short: float, long: float, share_long: float) -> Lengths:
    """Answers without and with thinking."""
    few, many = log_normal(short, 0.5), log_normal(long, 0.5)
    return lambda random, place: (many if random.random() < share_long else few)(random, place)


def growing(mean: float, cv: float, factor: float) -> Lengths:
    """An input sorted by length: its last rows write `factor` times as much as its first."""
    drawn = log_normal(mean, cv)

    def length(random: Random, place: float) -> int:
        scale = factor ** (place - 0.5)
        return int(max(1, min(round(drawn(random, place) * scale), 32_768)))

    return length


def step_down(done: float) -> float:
    """Fewer running requests after an engine ran out of memory: slower by a quarter."""
    return 0.75 if done > 0.3 else 1.0


KINDS: tuple[Kind, ...] = (
    Kind(name="one length", lengths=one_length(1200, 0.02)),
    Kind(
        name="one length, two stall", lengths=one_length(1200), stalled_rows=2, stall_s=300.0,
        rows=6000,
    ),
    Kind(name="one length, counters", lengths=one_length(1200, 0.02), counters=True),
    Kind(name="log-normal 0.3", lengths=log_normal(1500, 0.3)),
    Kind(name="log-normal 0.6", lengths=log_normal(2000, 0.6)),
    Kind(name="log-normal 1.2", lengths=log_normal(2500, 1.2)),
    Kind(name="log-normal 1.2, counters", lengths=log_normal(2500, 1.2), counters=True),
    Kind(name="log-normal 2", lengths=log_normal(2000, 2.0)),
    Kind(name="log-normal 3", lengths=log_normal(1200, 3.0)),
    Kind(name="log-normal 3, counters", lengths=log_normal(1200, 3.0), counters=True),
    Kind(name="two humps", lengths=two_humps(300, 4000, 0.5)),
    Kind(name="two humps, counters", lengths=two_humps(300, 4000, 0.3), counters=True),
    Kind(name="capped", lengths=cut_at(4096, log_normal(6000, 1.0)), limit_tokens=4096),
    Kind(name="rare answers", lengths=log_normal(12_000, 0.5), rows=200, engines=2, cap_requests=8),
    Kind(name="stalls", lengths=log_normal(1500, 0.6), stalled_rows=20, stall_s=300.0),
    Kind(name="engine lost", lengths=log_normal(2500, 1.2), lost_at=0.4),
    Kind(name="engine joined", lengths=log_normal(2500, 1.2), joined_at=0.3),
    Kind(name="step down", lengths=log_normal(2500, 1.2), speed=step_down, counters=True),
    Kind(name="drifting speed", lengths=log_normal(2000, 0.8), speed=lambda d: 1.2 - 0.4 * d),
    Kind(name="sorted input", lengths=growing(1500, 0.5, 3.0)),
    Kind(name="canary first", lengths=log_normal(2000, 0.8), canary_rows=64),
    Kind(name="retries", lengths=log_normal(2000, 0.8), retry_share=0.1),
    Kind(name="multi-turn", lengths=log_normal(900, 0.8), turns=3),
    Kind(name="several samples", lengths=log_normal(1500, 0.8), samples=4),
    Kind(name="pause and resume", lengths=log_normal(2000, 0.8), pause_at=0.5),
    Kind(
        name="embedded, no thinking", lengths=log_normal(250, 0.6, 512), limit_tokens=512,
        thinking=False, engines=2, cap_requests=4, rows=800, tokens_per_s=25.0,
    ),
    Kind(
        name="stated lengths, wrong by half", lengths=log_normal(2500, 1.0), prior=(1250.0, 1.0),
    ),
)  # fmt: skip


# --- the engines ------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Row:
    tokens: list[int]
    """Lengths of its turns."""
    turn: int = 0
    fails: bool = False
    stalls: bool = False


@dataclass(slots=True, kw_only=True)
class _Engine:
    """Running requests that all write at one pace; `clock` is what one of them has written."""

    slot: int
    meter: Meter
    born_s: float
    clock: float = 0.0
    decoded_tokens: float = 0.0
    ends: list[tuple[float, int, int, _Row]] = field(default_factory=list)
    """Clock at which it ends, a tie-break, its number in the meter, the row."""
    stalled: list[tuple[float, int, _Row]] = field(default_factory=list)
    """When it times out, its number in the meter, the row."""

    @property
    def num_running(self) -> int:
        return len(self.ends) + len(self.stalled)

    @property
    def name(self) -> str:
        return f"n0-{self.slot}-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The estimate at one moment, and the truth."""

    share: float
    days_left: Band | None
    at_s: float
    true_s: float = 0.0

    def factor(self) -> float:
        """How far the estimate lies off, 1 or more; infinite where nothing is known."""
        if self.days_left is None or self.days_left.p50 <= 0:
            return math.inf
        ratio = self.days_left.p50 * SECONDS_PER_DAY / max(self.true_s, _TICK_S)
        return max(ratio, 1 / ratio)

    def hits(self) -> bool:
        """True where the 80 % band holds the truth."""
        band = self.days_left
        return band is not None and band.p10 <= self.true_s / SECONDS_PER_DAY <= band.p90


class Stream:
    """One run of a kind, played from its first row to its last."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.random = Random(f"{kind.name} {seed}")
        kind, self.rows_of_input = _sized(kind, self.random)
        self.kind = kind
        self.config = _config(kind)
        self.prior = _prior(kind)
        self.now_s = 0.0
        self.log = LiveLog(began_at_s=0.0, run_file=self.config.model_dump(mode="json"))
        self.log.session_starts_s.append(0.0)
        self.queue = deque(self._rows())
        self.num_rows = len(self.queue)
        self.held: deque[_Row] = deque()
        if kind.canary_rows:
            self.held = self.queue
            picked = self.random.sample(range(self.num_rows), kind.canary_rows)
            rows = list(self.queue)
            self.queue = deque(rows[place] for place in picked)
            chosen = set(picked)
            self.held = deque(row for place, row in enumerate(rows) if place not in chosen)
        self.num_finished = self.num_published = 0
        self.flushed_s = 0.0
        self.engines: list[_Engine] = []
        self.paused_s = 0.0
        self.speed_by_slot: dict[int, float] = {}
        self.looks: list[Look] = []

    def _rows(self) -> Iterator[_Row]:
        kind, random = self.kind, self.random
        stalled = set(random.sample(range(self.rows_of_input * kind.samples), kind.stalled_rows))
        number = 0
        for place in range(self.rows_of_input):
            for _ in range(kind.samples):
                tokens = [
                    kind.lengths(random, place / self.rows_of_input) for _ in range(kind.turns)
                ]
                fails = random.random() < kind.retry_share
                yield _Row(tokens=tokens, fails=fails, stalls=number in stalled)
                number += 1

    # -- the course of events

    def play(self) -> list[Look]:
        """Return the looks, each with the true time left."""
        for slot in range(self.kind.engines):
            self._add_engine(slot)
        due = deque(CHECKPOINTS)
        changes = self._changes()
        while self.num_finished < self.num_rows:
            self._step()
            share = self.num_finished / self.num_rows
            while changes and share >= changes[0][0]:
                changes.popleft()[1]()
            while due and share >= due[0] and self.num_finished < self.num_rows:
                self.looks.append(self._look(due.popleft()))
        end_s = self.now_s - self.paused_s
        return [
            Look(
                share=look.share, days_left=look.days_left, at_s=look.at_s,
                true_s=end_s - look.at_s,
            )
            for look in self.looks
        ]  # fmt: skip

    def _changes(self) -> deque[tuple[float, Callable[[], None]]]:
        kind = self.kind
        listed: list[tuple[float | None, Callable[[], None]]] = [
            (kind.lost_at, self._lose_engine),
            (kind.joined_at, lambda: self._add_engine(kind.engines)),
            (kind.pause_at, self._pause),
        ]
        return deque(
            sorted(((at, act) for at, act in listed if at is not None), key=lambda x: x[0])
        )

    def _add_engine(self, slot: int) -> None:
        meter = Meter()
        meter.started(self.kind.cap_requests)
        self.engines.append(_Engine(slot=slot, meter=meter, born_s=self.now_s))
        self.speed_by_slot[slot] = math.exp(self.random.gauss(0, 0.05))

    def _lose_engine(self) -> None:
        engine = self.engines.pop()
        for _, _, number, row in engine.ends:
            engine.meter.note_outcome(number, None, self.now_s)
            self.queue.appendleft(row)
        self.queue.extendleft(row for *_, row in engine.stalled)

    def _pause(self) -> None:
        """Stop everything; what was in flight starts again an hour later, as a new session."""
        slots = [engine.slot for engine in self.engines]
        while self.engines:
            self._lose_engine()
        self.num_published = self.num_finished
        self.now_s += 3600.0
        self.paused_s += 3600.0
        self.log.session_starts_s.append(self.now_s)
        self.log.running.clear()
        for slot in slots:
            self._add_engine(slot)

    def _step(self) -> None:
        """Go to the next end of a request or the next tick, whichever comes first."""
        self._fill()
        tick_s = (math.floor(self.now_s / _TICK_S) + 1) * _TICK_S
        next_s = min([tick_s, *(self._next_end_s(engine) for engine in self.engines)])
        for engine in self.engines:
            self._run(engine, next_s - self.now_s)
        self.now_s = next_s
        for engine in self.engines:
            self._end_requests(engine)
        if next_s == tick_s:
            self._tick()

    def _pace(self, engine: _Engine) -> float:
        done = self.num_finished / self.num_rows
        speed = self.kind.speed(done) * self.speed_by_slot[engine.slot]
        return self.kind.tokens_per_s * speed / (1 + self.kind.slow_down * engine.num_running)

    def _next_end_s(self, engine: _Engine) -> float:
        ends = [stall[0] for stall in engine.stalled]
        if engine.ends:
            ends.append(self.now_s + (engine.ends[0][0] - engine.clock) / self._pace(engine))
        return min(ends, default=math.inf)

    def _run(self, engine: _Engine, seconds: float) -> None:
        pace = self._pace(engine)
        engine.clock += pace * seconds
        engine.decoded_tokens += pace * seconds * len(engine.ends)

    def _fill(self) -> None:
        while self.queue:
            engine = min(self.engines, key=lambda engine: engine.num_running)
            if engine.num_running >= self.kind.cap_requests:
                return
            self._send(engine, self.queue.popleft())

    def _send(self, engine: _Engine, row: _Row) -> None:
        number = engine.meter.note_request(self.now_s)
        if row.stalls:
            engine.stalled.append((self.now_s + self.kind.stall_s, number, row))
            return
        tokens = float(row.tokens[row.turn])
        if row.fails:
            tokens *= self.random.random()
        heapq.heappush(engine.ends, (engine.clock + tokens, number, number, row))

    def _end_requests(self, engine: _Engine) -> None:
        while engine.ends and engine.ends[0][0] <= engine.clock + 1e-6:
            _, _, number, row = heapq.heappop(engine.ends)
            self._end(engine, number, row)
        for stall in [stall for stall in engine.stalled if stall[0] <= self.now_s + 1e-9]:
            engine.stalled.remove(stall)
            engine.meter.note_outcome(stall[1], _INTERRUPTED, self.now_s)
            stall[2].stalls = False
            self.queue.append(stall[2])

    def _end(self, engine: _Engine, number: int, row: _Row) -> None:
        if row.fails:
            row.fails = False
            engine.meter.note_outcome(number, _INTERRUPTED, self.now_s)
            self.queue.append(row)
            return
        engine.meter.note_outcome(number, _turn(row.tokens[row.turn]), self.now_s)
        row.turn += 1
        if row.turn < len(row.tokens):
            self._send(engine, row)
            return
        self.num_finished += 1
        if self.held and self.num_finished >= self.kind.canary_rows:
            self.queue, self.held = self.held, deque()

    def _tick(self) -> None:
        if self.now_s - self.flushed_s >= _FLUSH_S:
            self.flushed_s, self.num_published = self.now_s, self.num_finished
        for engine in self.engines:
            if self.kind.counters:
                engine.meter.note_counters(_counters(engine), self.now_s)
            span = engine.meter.take_span(self.now_s)
            if span is not None:
                self.log.add(engine.name, span, now_s=self.now_s)

    def _look(self, share: float) -> Look:
        rows = RowCounts(
            rows_total=self.num_rows,
            rows_done=self.num_published,
            rows_failed=0,
            rows_unpublished=self.num_finished - self.num_published,
            counted_at_s=self.now_s,
        )
        expected = Expectation(
            lengths=self.prior,
            turns_per_row=float(self.kind.turns),
            plan=Unplanned(reason="simulated engines"),
        )
        band = None
        if self.log.readings:
            band = run_update(self.log, self.config, rows, expected).days_left
        return Look(share=share, days_left=band, at_s=self.now_s - self.paused_s)


def _sized(kind: Kind, random: Random) -> tuple[Kind, int]:
    """Return the kind with its engines, and the rows of its input.

    Runs of 900,000 rows fill their engines' places some 140 times, tests and pilots a few times.
    """
    if kind.rows is not None:
        return kind, kind.rows
    engines, cap_requests = random.choice(_ENGINES), random.choice(_CAPS)
    waves = math.exp(random.uniform(*map(math.log, _WAVES)))
    completions = min(max(engines * cap_requests * waves, _ROWS[0]), _ROWS[1])
    sized = replace(kind, engines=engines, cap_requests=cap_requests)
    return sized, math.ceil(completions / kind.turns / kind.samples)


def _turn(tokens: int) -> Turn:
    return Turn(
        reasoning_text=None, answer_text="", finish_reason="stop", prompt_tokens=100,
        completion_tokens=tokens, reasoning_tokens=None, prompt_token_ids=None,
        completion_token_ids=None, generation_boundary=None, duration_s=0.0,
    )  # fmt: skip


def _counters(engine: _Engine) -> EngineCounters:
    return EngineCounters(
        running_requests=float(engine.num_running),
        decoded_tokens=engine.decoded_tokens,
        prefilled_tokens=0.0,
        tokens_per_s=0.0,
        accept_length=None,
    )


def _config(kind: Kind) -> RunFile:
    return RunFile.model_validate(
        {
            "prompts": {"path": "unused"},
            "model": "simulated",
            "thinking": kind.thinking,
            "sampling": {"max_tokens": kind.limit_tokens},
            "samples_per_prompt": kind.samples,
            "engine": {"kind": "endpoint", "base_urls": ["http://127.0.0.1:1/v1"]},
            "output": {"folder": "unused"},
        }
    )


def _prior(kind: Kind) -> LengthModel:
    mean, cv = kind.prior or (None, None)
    return configured_lengths(
        mean, cv, thinking=kind.thinking, limit_tokens=kind.limit_tokens, source="stated"
    )


# --- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One stream's looks."""

    kind: str
    seed: int
    looks: tuple[Look, ...]


def played(kind_name: str, seed: int) -> Played:
    """Play one stream, by the name of its kind, so that a process of its own can."""
    kind = next(kind for kind in KINDS if kind.name == kind_name)
    return Played(kind=kind_name, seed=seed, looks=tuple(Stream(kind, seed).play()))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a requirement is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--kind", default=None)
    parser.add_argument("--worst", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(argv)
    names = [kind.name for kind in KINDS if options.kind in (None, kind.name)]
    first = options.first_seed
    jobs = [(name, seed) for name in names for seed in range(first, first + options.seeds)]
    with ProcessPoolExecutor(options.processes) as pool:
        streams = list(pool.map(played, *zip(*jobs, strict=True), chunksize=2))
    print(f"time left, {len(streams)} streams: median factor, worst factor, band's hits, unknown")
    print(f"{'share of rows':<32}" + "".join(f"{f'{share:.0%}':>17}" for share in CHECKPOINTS))
    for name in names:
        print(_line(name, [stream for stream in streams if stream.kind == name]))
    print(_line("all", streams))
    for text in _worst(streams, options.worst):
        print(text)
    return 1 if list(_missed(streams)) else 0


def looks_at(streams: Sequence[Played], share: float) -> list[Look]:
    """Return the looks of all streams at one share of the rows."""
    return [look for stream in streams for look in stream.looks if look.share == share]


def _line(name: str, streams: Sequence[Played]) -> str:
    cells = []
    for share in CHECKPOINTS:
        looks = looks_at(streams, share)
        factors = [look.factor() for look in looks]
        unknown = sum(math.isinf(factor) for factor in factors)
        known = [factor for factor in factors if math.isfinite(factor)] or [math.inf]
        hits = sum(look.hits() for look in looks) / max(len(looks), 1)
        cell = f"{statistics.median(known):.2f} {max(known):.1f} {hits:.0%}{_side(looks)}"
        cells.append(f"{cell + (f' ?{unknown}' if unknown else ''):>17}")
    return f"{name:<32}" + "".join(cells)


def _side(looks: Sequence[Look]) -> str:
    """Return + where most estimates are too long, - where most are too short."""
    known = [look.days_left.p50 for look in looks if look.days_left is not None]
    trues = [look.true_s / SECONDS_PER_DAY for look in looks if look.days_left is not None]
    longer = sum(p50 > true for p50, true in zip(known, trues, strict=True))
    if not known or 0.3 <= longer / len(known) <= 0.7:
        return ""
    return "+" if longer / len(known) > 0.7 else "-"


def _missed(streams: Sequence[Played]) -> Iterator[str]:
    for share in CHECKPOINTS:
        looks = looks_at(streams, share)
        factors = [look.factor() for look in looks]
        hits = sum(look.hits() for look in looks) / len(looks)
        if share >= 0.25 and statistics.median(factors) > MOST_MEDIAN_FACTOR:
            yield f"{share:.0%}: median factor {statistics.median(factors):.2f}"
        if share >= 0.10 and max(factors) > MOST_WORST_FACTOR:
            yield f"{share:.0%}: worst factor {max(factors):.2f}"
        if share >= 0.10 and not LEAST_HITS <= hits <= MOST_HITS:
            yield f"{share:.0%}: the band holds {hits:.0%}"


def _worst(streams: Sequence[Played], most: int) -> Iterator[str]:
    for text in _missed(streams):
        yield f"missed at {text}"
    looks = [(look.factor(), stream, look) for stream in streams for look in stream.looks]
    late = [entry for entry in looks if entry[2].share >= 0.10]
    for factor, stream, look in sorted(late, key=lambda entry: -entry[0])[:most]:
        band = look.days_left
        told = "unknown" if band is None else f"{band.p50 * SECONDS_PER_DAY:,.0f} s"
        yield (
            f"  {factor:5.2f}  {stream.kind}, seed {stream.seed}, at {look.share:.0%}: "
            f"{told}, true {look.true_s:,.0f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
