"""The trial of a run: engines of one kind of card, the plans that they run, orders to change. Pure.

Invariants: an engine gets no second order before the first one has shown, and a bounded number in
all; a plan that failed on an engine is tried on none; nothing is ordered before the time left is
known.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.trial.beliefs import Beliefs, PlanForecast, prior_beliefs
from pipeline.trial.decision import EngineState, Job, Switch, next_switches
from pipeline.trial.readings import LaunchMeter, Reading, joined
from schemas.plan import CardResult, EngineTrial, PlanOption, PlanResult
from schemas.progress import LiveSpan

# Time beside the start itself: requests are aborted, files written, the batch fills. assumed
_AROUND_START_S = 30.0
# A start that was not timed. assumed: weights of 30 GB from a local disk, and graphs
_UNKNOWN_START_S = 300.0
# A plan that failed counts as this much slower than any other.
_FAILED_RATE, _FAILED_SD = 1e-3, 1e-3
_DECIDE_EVERY_S = 30.0
# Changes of one engine in a session, per plan: one to try it, and one to take over another.
_MOST_CHANGES_PER_PLAN = 2
# Results are for later sessions, and a bucket charges for each write.
_WRITE_EVERY_S = 60.0


@dataclass(slots=True, kw_only=True)
class _Engine:
    """Engine of the trial, with its present launch."""

    trial: EngineTrial
    meter: LaunchMeter
    ordered: str | None = None
    """Name of the plan that it is to run, until it does or has failed to."""
    sent: bool = False


@dataclass(slots=True, kw_only=True)
class CardTrial:
    """Trial on one kind of card."""

    card: str
    longest_reading_s: float
    log: Callable[[str], None]
    options: tuple[PlanOption, ...] = ()
    shared_log_sd: float = 0.0
    failed: set[str] = field(default_factory=set)
    spent_s: float = 0.0
    tried: set[str] = field(default_factory=set)
    """Plans that an engine has run, or was ordered to."""
    _past: list[tuple[str, Reading]] = field(default_factory=list)
    """Readings of launches that have ended."""
    _engines: dict[str, _Engine] = field(default_factory=dict)
    _num_changes: Counter[str] = field(default_factory=Counter)
    """Orders so far, by worker."""

    # -- engines

    def note_engine(self, worker_id: str, trial: EngineTrial, *, now_s: float) -> None:
        """Note which plan an engine runs."""
        if not self.options:
            self.options, self.shared_log_sd = trial.options, trial.shared_log_sd
            self.log(f"event=trial card={self.card!r} plans={len(self.options)}")
        self._note_failed(trial.failed)
        engine = self._engines.get(worker_id)
        plan = trial.running or ""
        self.tried.add(plan)
        if engine is not None and engine.trial == trial:
            return
        if engine is not None:
            self._keep_reading(engine.meter)
        meter = LaunchMeter(plan=plan, output_tokens_mean=trial.output_tokens_mean, since_s=now_s)
        # Whatever it runs is the outcome of an order before.
        self._engines[worker_id] = _Engine(trial=trial, meter=meter)

    def forget_engine(self, worker_id: str) -> None:
        engine = self._engines.pop(worker_id, None)
        if engine is not None:
            self._keep_reading(engine.meter)

    def note_span(self, worker_id: str, span: LiveSpan) -> None:
        if worker_id in self._engines:
            self._engines[worker_id].meter.note(span)

    def take_order(self, worker_id: str) -> tuple[str, ...] | None:
        """Return the flags that an engine is to start with, once."""
        engine = self._engines.get(worker_id)
        if engine is None or engine.ordered is None or engine.sent:
            return None
        engine.sent = True
        return self._option(engine.ordered).words

    def _note_failed(self, failed: Sequence[str]) -> None:
        for plan in failed:
            if plan not in self.failed:
                self.failed.add(plan)
                self.spent_s += self._restart_s() / max(1, len(self._engines))
                self.log(f"event=trial_dropped card={self.card!r} why='it failed' plan={plan!r}")

    def _keep_reading(self, meter: LaunchMeter) -> None:
        reading = meter.reading()
        if reading is not None:
            self._past.append((meter.plan, reading))

    # -- decisions

    def decide(self, *, time_left_s: float, elapsed_s: float, now_s: float) -> None:
        """Order the changes that pay at this moment."""
        names = [option.name for option in self.options]
        engines = {
            worker_id: engine
            for worker_id, engine in self._engines.items()
            if engine.meter.plan in names
        }
        if len(names) < 2 or not engines:
            return
        states = [
            EngineState(
                plan=names.index(engine.meter.plan),
                is_read=engine.meter.is_read
                or now_s - engine.meter.since_s >= self.longest_reading_s,
                is_switching=engine.ordered is not None,
            )
            for engine in engines.values()
        ]
        job = Job(
            num_engines=len(engines),
            first=0,
            time_left_s=time_left_s,
            whole_s=elapsed_s + time_left_s,
            restart_s=self._restart_s(),
            reading_s=self._reading_s(),
            spent_s=self.spent_s,
        )
        tried = frozenset(names.index(one) for one in self.tried | self.failed if one in names)
        for switch in next_switches(self.beliefs(), states, tried, job):
            worker_id = list(engines)[switch.engine]
            if self._num_changes[worker_id] < _MOST_CHANGES_PER_PLAN * len(names):
                self._order(worker_id, switch, job)

    def _order(self, worker_id: str, switch: Switch, job: Job) -> None:
        engine, plan = self._engines[worker_id], self.options[switch.plan].name
        engine.ordered = plan
        self._num_changes[worker_id] += 1
        self.tried.add(plan)
        if switch.reason == "try" or switch.plan == job.first:
            self.spent_s += job.restart_s / job.num_engines
        to = switch.reason.replace("_", " ")
        self.log(
            f"event=trial_change to={to!r} card={self.card!r} worker={worker_id} "
            f"gain_s={switch.gain_s:.0f} restart_s={job.restart_s:.0f} plan={plan!r}"
        )
        for result in self.result().plans:
            if result.tokens_per_s is not None and result.log_sd is not None:
                self.log(
                    f"event=trial_read card={self.card!r} tokens_per_s={result.tokens_per_s:.0f} "
                    f"error={result.log_sd:.1%} forecast={result.forecast_tokens_per_s:.0f} "
                    f"plan={result.name!r}"
                )

    def beliefs(self) -> Beliefs:
        """Return what forecasts and readings say of the plans' rates."""
        known = prior_beliefs(
            [
                PlanForecast(name=one.name, tokens_per_s=one.tokens_per_s, log_sd=one.log_sd)
                for one in self.options
            ],
            self.shared_log_sd,
        )
        for number, option in enumerate(self.options):
            reading = self.reading_of(option.name)
            if reading is not None:
                known = known.after_reading(number, math.exp(reading.log_rate), reading.log_sd)
        slowest = min(known.means)
        for number, option in enumerate(self.options):
            if option.name in self.failed:
                known = _without(known, number, slowest + math.log(_FAILED_RATE))
        return known

    def reading_of(self, plan: str) -> Reading | None:
        """Return the mean of all launches of a plan; None before any is steady."""
        meters = (engine.meter for engine in self._engines.values())
        present = [meter.reading() for meter in meters if meter.plan == plan]
        past = [reading for name, reading in self._past if name == plan]
        return joined([*past, *(reading for reading in present if reading is not None)])

    def result(self) -> CardResult:
        """Return what is known of the plans that were tried."""
        best = self.beliefs().best
        known = [option for option in self.options if option.name in self.tried | self.failed]
        return CardResult(
            card=self.card,
            best=self.options[best].name if self.options[best] in known else self.options[0].name,
            plans=tuple(self._result_of(option) for option in known),
        )

    def _result_of(self, option: PlanOption) -> PlanResult:
        reading = None if option.name in self.failed else self.reading_of(option.name)
        return PlanResult(
            name=option.name,
            forecast_tokens_per_s=option.tokens_per_s,
            tokens_per_s=math.exp(reading.log_rate) if reading else None,
            log_sd=reading.log_sd if reading else None,
            has_failed=option.name in self.failed,
        )

    def restore(self, result: CardResult) -> None:
        """Take over what an earlier session has measured."""
        for plan in result.plans:
            self.tried.add(plan.name)
            if plan.has_failed:
                self.failed.add(plan.name)
            elif plan.tokens_per_s is not None and plan.log_sd is not None:
                reading = Reading(log_rate=math.log(plan.tokens_per_s), log_sd=plan.log_sd)
                self._past.append((plan.name, reading))

    def _option(self, name: str) -> PlanOption:
        return next(option for option in self.options if option.name == name)

    def _restart_s(self) -> float:
        longest_s = max((engine.trial.start_s for engine in self._engines.values()), default=0.0)
        return (longest_s or _UNKNOWN_START_S) + _AROUND_START_S + self._lost_s()

    def _lost_s(self) -> float:
        """Time for what requests have at a restart, as if none could be continued."""
        residences = (engine.meter.residence_s for engine in self._engines.values())
        return max((one / 2 for one in residences if math.isfinite(one)), default=0.0)

    def _reading_s(self) -> float:
        longest_s = max((engine.meter.reading_s for engine in self._engines.values()), default=0.0)
        return min(longest_s, self.longest_reading_s)


def _without(known: Beliefs, plan: int, log_rate: float) -> Beliefs:
    """Return the beliefs with one plan known to be useless, which says nothing of the others."""
    size = range(len(known.means))
    return Beliefs(
        means=tuple(log_rate if one == plan else known.means[one] for one in size),
        covariances=tuple(
            tuple(
                (_FAILED_SD**2 if one == other else 0.0)
                if plan in (one, other)
                else known.covariances[one][other]
                for other in size
            )
            for one in size
        ),
    )


@dataclass(slots=True, kw_only=True)
class Tuning:
    """Trials of a run, one for each kind of card; none while `longest_reading_s` is None."""

    longest_reading_s: float | None
    log: Callable[[str], None]
    results: tuple[CardResult, ...] = ()
    """Results of earlier sessions."""
    cards: dict[str, CardTrial] = field(default_factory=dict)
    _card_of: dict[str, str] = field(default_factory=dict)
    _began_s: float | None = None
    _decided_s: float = -math.inf
    _written_s: float = -math.inf

    def note_engine(self, worker_id: str, trial: EngineTrial, *, now_s: float) -> None:
        if self.longest_reading_s is None:
            return
        self._began_s = now_s if self._began_s is None else self._began_s
        if trial.card not in self.cards:
            card = self.cards[trial.card] = CardTrial(
                card=trial.card, longest_reading_s=self.longest_reading_s, log=self.log
            )
            for result in self.results:
                if result.card == trial.card:
                    card.restore(result)
        self._card_of[worker_id] = trial.card
        self.cards[trial.card].note_engine(worker_id, trial, now_s=now_s)

    def forget_engine(self, worker_id: str) -> None:
        if (card := self._of(worker_id)) is not None:
            card.forget_engine(worker_id)

    def note_span(self, worker_id: str, span: LiveSpan) -> None:
        if (card := self._of(worker_id)) is not None:
            card.note_span(worker_id, span)

    def take_order(self, worker_id: str) -> tuple[str, ...] | None:
        card = self._of(worker_id)
        return card.take_order(worker_id) if card is not None else None

    def decide(self, time_left_s: float, *, now_s: float) -> tuple[CardResult, ...] | None:
        """Order the changes that pay. Return the results to write down, if they are due."""
        if self._began_s is None or now_s - self._decided_s < _DECIDE_EVERY_S:
            return None
        self._decided_s = now_s
        for card in self.cards.values():
            card.decide(time_left_s=time_left_s, elapsed_s=now_s - self._began_s, now_s=now_s)
        others = [one for one in self.results if one.card not in self.cards]
        results = (*others, *(card.result() for card in self.cards.values()))
        if results == self.results or now_s - self._written_s < _WRITE_EVERY_S:
            return None
        self.results, self._written_s = results, now_s
        return results

    def _of(self, worker_id: str) -> CardTrial | None:
        return self.cards.get(self._card_of.get(worker_id, ""))
