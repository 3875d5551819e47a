"""The readings of a run: `live-readings.jsonl`, bounded in size.

Neighbouring readings are merged as they become many, so that the file stays within a few thousand
lines for any number of engines and any length of run. One record per line: the run file, the
lengths of completions, estimates of the time left, readings. Only the coordinator writes the
file, whole and by rename.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from pipeline.errors import ConfigError
from pipeline.store.folder import Folder
from pipeline.store.run_folder import READINGS_FILE
from pipeline.untrusted.parsing import UNREADABLE
from schemas.config.run_file import RunFile
from schemas.estimate import Band, LiveReading
from schemas.progress import LiveSpan, TimeLeft, slot_of

_MOST_READINGS = 4_000
_FEWEST_OF_AN_ENGINE, _MOST_OF_AN_ENGINE = 4, 120
# More than a chart of them can show.
_MOST_TIMES_LEFT = 240
# Readings of one launch that are at most this far apart can be merged.
_CONTIGUOUS_S = 10.0
# After this long without a reading, an engine's requests do not count as in flight.
_SILENT_AFTER_S = 120.0
# The file is written at most this often: 4,000 readings once a minute.
_WRITE_INTERVAL_S, _WRITE_INTERVAL_PER_READING_S = 15.0, 0.015


@dataclass(slots=True, kw_only=True)
class LiveLog:
    """Readings of a run's engines. Times are seconds since the job began."""

    began_at_s: float
    run_file: Mapping[str, object]
    session_starts_s: list[float] = field(default_factory=list)
    readings: dict[str, list[LiveReading]] = field(default_factory=dict)
    """Readings by worker, in order of time."""
    finished: Counter[int] = field(default_factory=Counter)
    """Number of finished completions by tokens."""
    interrupted: Counter[int] = field(default_factory=Counter)
    """Number of interrupted attempts by tokens so far."""
    running: dict[str, Counter[int]] = field(default_factory=dict)
    """Number of requests in flight by tokens so far, by slot, as last reported."""
    cards: dict[str, str] = field(default_factory=dict)
    """GPU by worker, where the worker knows it."""
    times_left: list[TimeLeft] = field(default_factory=list)
    """The estimate of the time left whenever it changed, thinned evenly."""
    num_added: int = 0
    counted_by_answers: bool = False
    """True if any reading is counted from completions instead of the engine's counters."""

    def add(self, worker_id: str, span: LiveSpan, *, now_s: float) -> None:
        """Add a worker's span that ends at `now_s`."""
        end_s = now_s - self.began_at_s
        reading = LiveReading(
            engine=worker_id,
            start_s=end_s - span.duration_s,
            end_s=end_s,
            engine_age_s=span.engine_age_s,
            cap_requests=span.cap_requests,
            running_requests=span.running_requests,
            tokens_per_s=span.tokens_per_s,
            accept_length=span.accept_length,
            prompt_tokens_per_s=span.prompt_tokens_per_s,
            finished=sum(count for _, count in span.finished),
            finished_tokens=sum(tokens * count for tokens, count in span.finished),
        )
        self.readings.setdefault(worker_id, []).append(reading)
        self.finished.update(dict(span.finished))
        self.interrupted.update(dict(span.interrupted))
        # A worker that replaces a dead one has its slot: the requests died with the old one.
        self.running[slot_of(worker_id)] = Counter(dict(span.running))
        self.counted_by_answers = self.counted_by_answers or span.counted_by == "answers"
        if span.card is not None:
            self.cards[worker_id] = span.card
        self.num_added += 1
        self._thin(worker_id)

    def note_time_left(self, days: Band, *, now_s: float) -> None:
        """Note the estimate of the time left, unless it is the one noted last."""
        if self.times_left and self.times_left[-1].days == days:
            return
        times = self.times_left
        times.append(TimeLeft(at_s=now_s - self.began_at_s, days=days))
        if len(times) > _MOST_TIMES_LEFT:
            # The first and the newest stay; the one with the closest neighbours goes.
            inner = range(1, len(times) - 1)
            del times[min(inner, key=lambda n: times[n + 1].at_s - times[n - 1].at_s)]

    def all_readings(self) -> list[LiveReading]:
        """Return the readings of all engines in order of time."""
        readings = [reading for own in self.readings.values() for reading in own]
        return sorted(readings, key=lambda reading: reading.end_s)

    def running_tokens(self) -> Iterator[int]:
        """Yield the tokens so far of each request in flight, in engines that report."""
        for slot in self._reporting():
            yield from self.running[slot].elements()

    def tokens_since(self, now_s: float | None) -> float:
        """Return the mean tokens that a request in flight wrote since its engine's last reading.

        `now_s` is Unix time; None for a run that is not going on.
        """
        requests = tokens = 0.0
        if now_s is None:
            return 0.0
        for slot, reading in self._reporting().items():
            if reading.running_requests > 0:
                pace = reading.tokens_per_s / reading.running_requests
                since_s = min(max(now_s - self.began_at_s - reading.end_s, 0.0), _SILENT_AFTER_S)
                requests += self.running[slot].total()
                tokens += self.running[slot].total() * pace * since_s
        return tokens / requests if requests else 0.0

    def _reporting(self) -> dict[str, LiveReading]:
        """Return the last reading of each slot with requests, for the engines that report."""
        latest: dict[str, LiveReading] = {}
        for worker, own in self.readings.items():
            slot = slot_of(worker)
            if slot not in latest or latest[slot].end_s < own[-1].end_s:
                latest[slot] = own[-1]
        latest_s = max((reading.end_s for reading in latest.values()), default=0.0)
        return {
            slot: latest[slot]
            for slot in self.running
            if latest_s - latest[slot].end_s <= _SILENT_AFTER_S
        }

    def _thin(self, worker_id: str) -> None:
        readings = self.readings[worker_id]
        share = _MOST_READINGS // len(self.readings)
        most = min(max(share, _FEWEST_OF_AN_ENGINE), _MOST_OF_AN_ENGINE)
        while len(readings) > most:
            # The newest is never merged: it is compared with all earlier ones.
            pairs = [
                (readings[place + 1].end_s - readings[place].start_s, place)
                for place in range(len(readings) - 2)
                if _is_one_stretch(readings[place], readings[place + 1])
            ]
            if not pairs:
                del readings[0]
                continue
            _, place = min(pairs)
            readings[place : place + 2] = [_merged(readings[place], readings[place + 1])]


def _is_one_stretch(first: LiveReading, second: LiveReading) -> bool:
    """Return True for two successive readings of one launch of the engine."""
    older_s = second.engine_age_s - first.engine_age_s
    return (
        first.cap_requests == second.cap_requests
        and abs(second.start_s - first.end_s) <= _CONTIGUOUS_S
        and abs(older_s - (second.start_s - first.start_s)) <= _CONTIGUOUS_S
    )


def _merged(first: LiveReading, second: LiveReading) -> LiveReading:
    """Return one reading with the means over both spans, weighted by time."""
    first_s, second_s = first.end_s - first.start_s, second.end_s - second.start_s
    part = second_s / (first_s + second_s)

    def mean(before: float, after: float) -> float:
        return before + part * (after - before)

    accept = first.accept_length or second.accept_length
    if first.accept_length is not None and second.accept_length is not None:
        accept = mean(first.accept_length, second.accept_length)
    return LiveReading(
        engine=second.engine,
        start_s=first.start_s,
        end_s=second.end_s,
        engine_age_s=first.engine_age_s,
        cap_requests=second.cap_requests,
        running_requests=mean(first.running_requests, second.running_requests),
        tokens_per_s=mean(first.tokens_per_s, second.tokens_per_s),
        accept_length=accept,
        prompt_tokens_per_s=mean(first.prompt_tokens_per_s, second.prompt_tokens_per_s),
        finished=first.finished + second.finished,
        finished_tokens=first.finished_tokens + second.finished_tokens,
    )


# --- availability -------------------------------------------------------------------------------


def engine_seconds(log: LiveLog) -> tuple[float, float]:
    """Return the seconds that engines ran and the seconds that passed, over all slots.

    Time between sessions and before an engine's first reading does not count.
    """
    slots: dict[str, list[LiveReading]] = {}
    for reading in log.all_readings():
        slots.setdefault(slot_of(reading.engine), []).append(reading)
    ran_s = lost_s = 0.0
    for readings in slots.values():
        ran_s += sum(reading.end_s - reading.start_s for reading in readings)
        for before, after in pairwise(readings):
            between = (before.end_s <= start_s <= after.start_s for start_s in log.session_starts_s)
            if not any(between):
                lost_s += max(after.start_s - before.end_s, 0.0)
    return ran_s, ran_s + lost_s


# --- the file -----------------------------------------------------------------------------------


def write_live_log(folder: Folder, log: LiveLog) -> None:
    """Write the whole file, by rename."""
    records: list[dict[str, object]] = [
        {
            "record": "run",
            "began_at_s": log.began_at_s,
            "session_starts_s": log.session_starts_s,
            "num_added": log.num_added,
            "counted_by_answers": log.counted_by_answers,
            "cards": log.cards,
            "run_file": log.run_file,
        },
        {
            "record": "lengths",
            "finished": sorted(log.finished.items()),
            "interrupted": sorted(log.interrupted.items()),
            "running": {name: sorted(counts.items()) for name, counts in log.running.items()},
        },
    ]
    records += [{"record": "time_left", **asdict(noted)} for noted in log.times_left]
    records += [{"record": "reading", **asdict(reading)} for reading in log.all_readings()]
    lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in records]
    folder.write_whole(READINGS_FILE, ("\n".join(lines) + "\n").encode())


def read_live_log(folder: Folder) -> LiveLog | None:
    """Return the log of the run, or None where there is no file. Raises ConfigError."""
    if not folder.exists(READINGS_FILE):
        return None
    log: LiveLog | None = None
    for number, line in enumerate(folder.read_lines(READINGS_FILE), start=1):
        try:
            log = _with_record(log, json.loads(line))
        except UNREADABLE as error:
            raise ConfigError(
                f"{folder.place(READINGS_FILE)} line {number}: not a record of readings: {error!r}"
            ) from None
    return log


def _with_record(log: LiveLog | None, values: dict[str, object]) -> LiveLog:
    kind = values.pop("record")
    if kind == "run":
        return LiveLog(**values)  # type: ignore[arg-type]
    if log is None:
        raise ValueError("the run's record must come first")
    if kind == "lengths":
        log.finished = Counter(dict(values["finished"]))  # type: ignore[call-overload]
        # Earlier releases counted no interruptions.
        log.interrupted = Counter(dict(values.get("interrupted", ())))  # type: ignore[call-overload]
        running: dict[str, list[tuple[int, int]]] = values["running"]  # type: ignore[assignment]
        log.running = {name: Counter(dict(pairs)) for name, pairs in running.items()}
        return log
    if kind == "time_left":
        days = Band(**values["days"])  # type: ignore[arg-type]
        log.times_left.append(TimeLeft(at_s=float(values["at_s"]), days=days))  # type: ignore[arg-type]
        return log
    reading = LiveReading(**values)  # type: ignore[arg-type]
    log.readings.setdefault(reading.engine, []).append(reading)
    return log


@dataclass(slots=True, kw_only=True)
class LogKeeper:
    """The coordinator's log of the run, and what was last written of it."""

    folder: Folder
    log: LiveLog
    _written: tuple[int, list[TimeLeft]] = field(default_factory=lambda: (0, []))
    _written_s: float = 0.0

    @classmethod
    def opened(cls, folder: Folder, config: RunFile, *, now_s: float) -> "LogKeeper":
        """Continue the log of an earlier session, without its requests in flight."""
        try:
            log = read_live_log(folder)
        except ConfigError:
            # Readings serve only the estimate: a damaged file does not stop a run.
            log = None
        log = log or LiveLog(began_at_s=now_s, run_file={})
        log.session_starts_s.append(now_s - log.began_at_s)
        log.running.clear()
        log.run_file = config.model_dump(mode="json")
        return cls(folder=folder, log=log, _written=(log.num_added, log.times_left[-1:]))

    def write_if_due(self, *, now_s: float) -> None:
        """Write the file unless it was written recently, by a monotonic clock."""
        num_readings = sum(len(readings) for readings in self.log.readings.values())
        interval_s = max(_WRITE_INTERVAL_S, _WRITE_INTERVAL_PER_READING_S * num_readings)
        if now_s - self._written_s >= interval_s:
            self._written_s = now_s
            self.write()

    def write(self) -> None:
        """Write the file if there is anything new."""
        latest = (self.log.num_added, self.log.times_left[-1:])
        if latest != self._written:
            write_live_log(self.folder, self.log)
            self._written = latest
