"""Score the trial of plans on simulated clusters, with true rates drawn from the forecast's error.

usage: python -m tests.scores.score_trial [--seeds N]

Each seed is one job: engines, a length, a few plans with forecasts and true rates, and the price of
a restart. The real rule decides by noisy readings. Its end is compared with that of a job that runs
the best plan from its start (regret), and of one that never tries another plan (loss). A job whose
engines run a plan that fails to start falls back to the plan before.
"""

import argparse
import math
import statistics
import sys
from dataclasses import dataclass, field
from random import Random

from pipeline.trial.beliefs import Beliefs, PlanForecast, prior_beliefs
from pipeline.trial.decision import EngineState, Job, first_plans, next_switches

# What must hold: mean regret by number of engines for long jobs, and the loss of any job.
MOST_REGRET, MOST_LOSS = 0.02, 0.01
LONG_S = 12 * 3600.0
_ENGINES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_STEP_S = 60.0
# assumed: errors as in `pipeline.planner.rate.errors`, of card and model, and of one plan. The rule
# assumes the latter of all plans; true ones are drawn with others, as of a pipeline or of MTP.
_SHARED_SD, _OWN_SD = 0.2, 0.1
_TRUE_OWN_SD = (0.05, 0.2)
# assumed: noise of a minute's tokens/s once the batch is mixed, and what age and engine add
_MINUTE_SD, _READING_SD = 0.04, 0.01
_READ_S = 600.0
_FAILS = 0.05
"""Share of plans that do not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulated job."""

    num_engines: int
    oracle_s: float
    restart_s: float
    plans: tuple[PlanForecast, ...]
    """The forecast's best is the first."""
    rates: tuple[float, ...]
    """True tokens/s of an engine; 0 for a plan that does not come up."""

    @property
    def work(self) -> float:
        return self.oracle_s * self.num_engines * max(self.rates)

    @property
    def static_s(self) -> float:
        """Time of the job that runs the forecast's best plan all along."""
        rate = self.rates[0] or max(self.rates)
        return self.work / (self.num_engines * rate)


def drawn_case(seed: int) -> Case:
    random = Random(seed)
    gaps = sorted(random.uniform(0.0, 0.25) for _ in range(random.randint(1, 4)))
    rates = [1.0, *(1.0 - gap for gap in gaps)]
    shared = random.gauss(0.0, _SHARED_SD)
    own_sd = random.uniform(*_TRUE_OWN_SD)
    true = [rate * math.exp(shared + random.gauss(0.0, own_sd)) for rate in rates]
    for number in range(1, len(true)):
        if random.random() < _FAILS:
            true[number] = 0.0
    is_long = random.random() < 0.8
    shortest_s, longest_s = (LONG_S, 20 * LONG_S) if is_long else (600.0, LONG_S)
    return Case(
        num_engines=random.choice(_ENGINES),
        oracle_s=math.exp(random.uniform(math.log(shortest_s), math.log(longest_s))),
        restart_s=random.uniform(60.0, 300.0),
        plans=tuple(
            PlanForecast(name=f"plan {number}", tokens_per_s=rate, log_sd=_OWN_SD)
            for number, rate in enumerate(rates)
        ),
        rates=tuple(true),
    )


@dataclass(slots=True, kw_only=True)
class SimulatedEngine:
    """An engine that is up, or comes up at some time."""

    plan: int
    fallback: int
    up_at_s: float = 0.0
    steady_s: float = 0.0
    sum_log: float = 0.0
    bias: float = 0.0

    @property
    def reading(self) -> tuple[float, float]:
        """Mean of the logarithm of tokens/s so far, and its error."""
        minutes = self.steady_s / 60
        return self.sum_log / minutes, math.hypot(_READING_SD, _MINUTE_SD / minutes**0.5)


@dataclass(slots=True, kw_only=True)
class Simulation:
    """One job under the rule."""

    case: Case
    random: Random
    now_s: float = 0.0
    done: float = 0.0
    spent_s: float = 0.0
    num_switches: int = 0
    engines: list[SimulatedEngine] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)
    past: dict[int, list[float]] = field(default_factory=dict)
    """Readings of engines before they switched: plan, and sums of weights and weighted logs."""

    def job(self, known: Beliefs) -> Job:
        rate = math.exp(max(known.means)) * self.case.num_engines
        return Job(
            num_engines=self.case.num_engines,
            first=0,
            time_left_s=max(0.0, self.case.work - self.done) / rate,
            whole_s=self.case.work / rate,
            restart_s=self.case.restart_s,
            reading_s=_READ_S,
            spent_s=self.spent_s,
        )

    def beliefs(self) -> Beliefs:
        """Weigh all readings of a plan by their errors, and update the forecasts by each plan's."""
        sums = {plan: list(values) for plan, values in self.past.items()}
        for engine in self.engines:
            if engine.steady_s > 0:
                _add(sums, engine)
        known = prior_beliefs(self.case.plans, _SHARED_SD)
        for plan, (weight, weighted) in sums.items():
            known = known.after_reading(plan, math.exp(weighted / weight), weight**-0.5)
        for plan in self.tried:
            if not self.case.rates[plan]:
                known = known.after_reading(plan, 1e-3, 1e-3)
        return known

    def run(self) -> float:
        """Return the time of the job."""
        known = self.beliefs()
        for plan in first_plans(known, self.job(known)):
            # Engines start anyway; one whose plan fails starts again.
            engine = SimulatedEngine(plan=plan, fallback=0)
            self.engines.append(engine)
            self._start(engine, plan, starts_s=0.0)
        while self.done < self.case.work:
            self._step()
            if self._is_settled():
                break
        # Of the last step only the part that was needed counts.
        rate = sum(self.case.rates[engine.plan] for engine in self.engines)
        return self.now_s + (self.case.work - self.done) / rate

    def _start(self, engine: SimulatedEngine, plan: int, *, starts_s: float) -> None:
        self.tried.add(plan)
        if engine.steady_s > 0:
            _add(self.past, engine)
        if not self.case.rates[plan]:
            plan, starts_s = engine.fallback, starts_s + self.case.restart_s
            self.spent_s += self.case.restart_s / self.case.num_engines
        engine.fallback, engine.plan = plan, plan
        engine.up_at_s, engine.steady_s, engine.sum_log = self.now_s + starts_s, 0.0, 0.0
        engine.bias = self.random.gauss(0.0, _READING_SD)

    def _step(self) -> None:
        end_s = self.now_s + _STEP_S
        for engine in self.engines:
            up_s = max(0.0, end_s - max(engine.up_at_s, self.now_s))
            self.done += self.case.rates[engine.plan] * up_s
            if engine.up_at_s <= self.now_s and engine.steady_s < 3600.0:
                minute = math.log(self.case.rates[engine.plan]) + engine.bias
                engine.sum_log += minute + self.random.gauss(0.0, _MINUTE_SD)
                engine.steady_s += _STEP_S
        self.now_s = end_s

    def _states(self) -> list[EngineState]:
        return [
            EngineState(
                plan=engine.plan,
                is_read=engine.steady_s >= _READ_S,
                is_switching=engine.up_at_s > self.now_s,
            )
            for engine in self.engines
        ]

    def _is_settled(self) -> bool:
        """Order the switches that pay; return whether none will follow."""
        known, states = self.beliefs(), self._states()
        switches = next_switches(known, states, frozenset(self.tried), self.job(known))
        for switch in switches:
            engine = self.engines[switch.engine]
            self.num_switches += 1
            if switch.reason == "try" or switch.plan == 0:
                self.spent_s += self.case.restart_s / self.case.num_engines
            engine.fallback = engine.plan
            self._start(engine, switch.plan, starts_s=self.case.restart_s)
        return not switches and all(state.is_read for state in states)


def _add(sums: dict[int, list[float]], engine: SimulatedEngine) -> None:
    mean, error = engine.reading
    of_plan = sums.setdefault(engine.plan, [0.0, 0.0])
    of_plan[0] += error**-2
    of_plan[1] += mean * error**-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Outcome of one case: shares of the job's time."""

    case: Case
    regret: float
    loss: float
    static_regret: float
    num_switches: int


def scored(seed: int) -> Scored:
    case = drawn_case(seed)
    simulation = Simulation(case=case, random=Random(seed + 1_000_000))
    took_s = simulation.run()
    return Scored(
        case=case,
        regret=took_s / case.oracle_s - 1.0,
        loss=took_s / case.static_s - 1.0,
        static_regret=case.static_s / case.oracle_s - 1.0,
        num_switches=simulation.num_switches,
    )


def report(results: list[Scored]) -> int:
    """Print the scores by number of engines. Return 1 if one is beyond its limit."""
    is_bad = False
    print("regret of long jobs (12 h to 10 days), mean and 9th decile; loss of all jobs, highest")
    print(f"{'engines':>8}{'jobs':>6}{'never tried':>13}{'regret':>9}{'p90':>8}{'loss':>8}")
    for engines in (*_ENGINES, None):
        of = [one for one in results if engines in (None, one.case.num_engines)]
        long = [one for one in of if one.case.oracle_s >= LONG_S]
        if not long:
            continue
        regret = statistics.fmean(one.regret for one in long)
        tenths = sorted(one.regret for one in long)
        loss = max(one.loss for one in of)
        is_bad |= regret > MOST_REGRET or loss > MOST_LOSS
        print(
            f"{engines or 'all':>8}{len(of):>6}"
            f"{statistics.fmean(one.static_regret for one in long):>12.1%} {regret:>8.1%} "
            f"{tenths[int(0.9 * len(tenths))]:>7.1%} {loss:>7.1%}"
        )
    return int(is_bad)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=500)
    arguments = parser.parse_args(argv)
    return report([scored(seed) for seed in range(arguments.seeds)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
