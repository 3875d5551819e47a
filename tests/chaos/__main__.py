"""Kill, stop and starve every kind of process of real runs, resume them, and check each row.

usage: python -m tests.chaos [--kills N] [--seed S] [--folder F]

Each run is started with the same command until every row is done. After every session each
published row must have its own text, none may be gone or there twice, and no process may be left.
Prints the figures as JSON; the exit status is 1 when something was wrong, and FOLDER keeps the runs
in which it was.
"""

import argparse
import collections
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.load import KINDS, EngineKind, Load, load_of
from tests.chaos.processes import HARMS, TAG, Family, Injuries, Role
from tests.fakes.running import ROOT

# The first harm comes within so many seconds of a session's start, or, in most sessions, of its
# Ray's: a start needs half a minute on a busy machine, and the driver is alone until then.
_FIRST_HARM_S, _BETWEEN_HARMS_S = 15.0, 2.0
_HARMED_IN_START, _RAY_RUNS = 0.2, "event=look"
# Driver, gcs, raylet and coordinator end a session; too many of them, and no other process is met.
_DRIVER_SHARE = 0.3
# Kills of one run: the next run has other engines.
_KILLS_PER_RUN = 25
# A session that neither ends nor publishes for so long after the last harm hangs.
_HANGS_S = 240.0
# Time for a dead session's processes to notice.
_GONE_S = 90.0
_TICK_S = 0.1
# 0: done; 3: rows failed, or Ray or all engines were lost. Below 0: the driver itself was killed.
_GOOD_CODES = {0, 3}


@dataclass(slots=True, kw_only=True)
class Figures:
    """What was done to the runs, and what came of it."""

    harms: Counter[str] = field(default_factory=collections.Counter)
    runs: Counter[str] = field(default_factory=collections.Counter)
    sessions: int = 0
    rows: int = 0
    rows_lost: int = 0
    rows_doubled: int = 0
    rows_wrong: int = 0
    answers: int = 0
    answers_repeated: int = 0
    longest_recovery_s: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(n for name, n in self.harms.items() if name.startswith("kill "))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos", description="Kill runs and resume them.")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    chance, figures = random.Random(args.seed), Figures()
    number = 0
    while figures.kills < args.kills:
        number += 1
        place = folder / f"run-{number:04d}"
        place.mkdir(parents=True)
        num_faults = len(figures.faults)
        kind = KINDS[number % len(KINDS)]
        harm_one_run(kind, place, chance, figures, max_kills=args.kills)
        print(_as_json(figures), file=sys.stderr, flush=True)
        if len(figures.faults) == num_faults:
            shutil.rmtree(place)
    print(_as_json(figures))
    return 1 if figures.faults else 0


def harm_one_run(
    kind: EngineKind, place: Path, chance: random.Random, figures: Figures, *, max_kills: int
) -> None:
    """Start one run again and again, harmed, until all its rows are done."""
    injuries = Injuries(chance)
    last_kill = min(max_kills, figures.kills + _KILLS_PER_RUN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with load_of(kind, place, seed=chance.getrandbits(32), environment=environment) as load:
        history = History(load=load, figures=figures)
        code, number, idle = None, 0, 0
        while code != 0:
            number += 1
            harms = figures.kills < last_kill
            session = Session(
                load=load,
                number=number,
                environment=environment,
                chance=chance,
                injuries=injuries,
                figures=figures,
                last_kill=last_kill,
            )
            code = session.run()
            injuries.end()
            history.check(session.name, is_end=code == 0)
            if remains := session.family.remains(_GONE_S):
                figures.faults.append(f"{session.name}: left running: {remains}")
            idle = 0 if harms else idle + 1
            if idle > 3:
                figures.faults.append(f"{session.name}: not done after {idle} sessions unharmed")
                break
    figures.runs[kind] += 1
    figures.sessions += number
    if load.endpoints is not None:
        answers, repeated = load.endpoints.num_repeated()
        figures.answers += answers
        figures.answers_repeated += repeated


@dataclass(slots=True, kw_only=True)
class Session:
    """One start of the command, harmed until it ends or the run has had its kills."""

    load: Load
    number: int
    environment: dict[str, str]
    chance: random.Random
    injuries: Injuries
    figures: Figures
    last_kill: int
    family: Family = field(init=False)

    def __post_init__(self) -> None:
        self.family = Family(tag=self.name)

    @property
    def name(self) -> str:
        return f"{self.load.run.folder.parent}:{self.number}"

    @property
    def log(self) -> Path:
        return self.load.run.folder.parent / f"session-{self.number:03d}.log"

    def run(self) -> int:
        """Run to the end; return the driver's exit status."""
        with self.log.open("w") as log:
            driver = subprocess.Popen(
                [sys.executable, "-P", "-m", "jobs.regenerate", str(self.load.run.run_file)],
                cwd=ROOT,
                env={**self.environment, TAG: self.name},
                stdout=log,
                stderr=log,
            )
            code = self._follow(driver)
        text = self.log.read_text()
        is_killed = code < 0
        if (code not in _GOOD_CODES and not is_killed) or "Traceback" in text:
            self.figures.faults.append(f"{self.name}: exit {code}: {text[-600:]}")
        return code

    def _follow(self, driver: "subprocess.Popen[bytes]") -> int:
        first_s = self.chance.uniform(0.0, _FIRST_HARM_S)
        next_s = time.monotonic() + first_s
        awaits_ray = self.chance.random() > _HARMED_IN_START
        rows, changed_s = self._num_listed(), time.monotonic()
        while driver.poll() is None:
            time.sleep(_TICK_S)
            now_s = time.monotonic()
            if self.load.endpoints is not None:
                self.load.endpoints.mend(self.environment)
            if (listed := self._num_listed()) != rows:
                recovery_s = now_s - changed_s
                self.figures.longest_recovery_s = max(self.figures.longest_recovery_s, recovery_s)
                rows, changed_s = listed, now_s
            if awaits_ray:
                awaits_ray, next_s = _RAY_RUNS not in self.log.read_text(), now_s + first_s
            elif now_s >= next_s and self.figures.kills < self.last_kill:
                self._harm_one()
                next_s = now_s + self.chance.expovariate(1 / _BETWEEN_HARMS_S)
            if now_s - max(changed_s, next_s) > _HANGS_S:
                self.figures.faults.append(f"{self.name}: hangs: {self.log.read_text()[-600:]}")
                driver.kill()
        return driver.wait()

    def _harm_one(self) -> None:
        victims = self.family.by_role()
        if self.load.endpoints is not None:
            own = [psutil.Process(p.pid) for p in self.load.endpoints.processes.values()]
            victims["endpoint"] = own
        role: Role = self.chance.choice(sorted(victims) or ["driver"])
        if role not in victims or (role == "driver" and self.chance.random() > _DRIVER_SHARE):
            return
        victim = self.chance.choice(sorted(victims[role], key=lambda process: process.pid))
        harm = self.chance.choices(list(HARMS), weights=list(HARMS.values()))[0]
        self.injuries.do(harm, victim)
        self.figures.harms[f"{harm} {role}"] += 1
        with self.log.open("a") as log:
            log.write(f"chaos: {harm} {role} {victim.pid}\n")

    def _num_listed(self) -> int:
        manifest = self.load.run.folder / "manifest.jsonl"
        return manifest.stat().st_size if manifest.exists() else 0


@dataclass(slots=True, kw_only=True)
class History:
    """Rows that a run has published, with their text: none may go or change."""

    load: Load
    figures: Figures
    texts: dict[str, str] = field(default_factory=dict)

    def check(self, session: str, *, is_end: bool) -> None:
        table = self.load.run.published()
        rows = table.to_pylist() if table.num_columns else []
        texts = {row["row_id"]: row["turns"][0]["answer_text"] for row in rows if row["turns"]}
        doubled = len(rows) - len({row["row_id"] for row in rows})
        wrong = [row["row_id"] for row in rows if row["status"] != "ok" or not self._is_right(row)]
        lost = [name for name, text in self.texts.items() if texts.get(name) != text]
        num_rows = len(_ids_of(self.load))
        missing = num_rows - len(texts) if is_end else 0
        if doubled or wrong or lost or missing:
            self.figures.faults.append(
                f"{session}: {doubled} doubled, wrong {wrong[:3]}, lost {lost[:3]}, "
                f"{missing} missing"
            )
        self.figures.rows_doubled += doubled
        self.figures.rows_wrong += len(wrong)
        self.figures.rows_lost += len(lost) + missing
        self.figures.rows += num_rows if is_end else 0
        self.texts = texts

    def _is_right(self, row: dict[str, object]) -> bool:
        return self.load.is_right(row) and row["row_id"] == _id_of_question(row)


def _ids_of(load: Load) -> list[str]:
    return [row["id"] for row in load.rows]


def _id_of_question(row: dict[str, object]) -> str:
    """`question 7?` is that of row q00007."""
    messages = row["messages"]
    assert isinstance(messages, list)
    return f"q{int(str(messages[0]['content']).removeprefix('question ').rstrip('?')):05d}"


def _as_json(figures: Figures) -> str:
    shown = {
        "kills": figures.kills,
        "harms": dict(sorted(figures.harms.items())),
        "runs": dict(figures.runs),
        "sessions": figures.sessions,
        "rows": figures.rows,
        "rows_lost": figures.rows_lost,
        "rows_doubled": figures.rows_doubled,
        "rows_wrong": figures.rows_wrong,
        "answers_of_endpoints": figures.answers,
        "answers_repeated": figures.answers_repeated,
        "longest_recovery_s": round(figures.longest_recovery_s, 1),
        "faults": figures.faults,
    }
    return json.dumps(shown, indent=2)


if __name__ == "__main__":
    sys.exit(main())
