"""Trials over simulated time: engines end on the fastest plan, whatever they start with."""

from dataclasses import dataclass, field

import pytest

from pipeline.trial.tuning import Tuning
from schemas.plan import CardResult, EngineTrial, PlanOption, results_from_text, results_text
from schemas.progress import LiveSpan

NAMES = ("--a", "--b", "--c")
START_S, SPAN_S = 120.0, 30.0
MEAN_TOKENS, RUNNING = 2000.0, 50.0
LONG_S, SHORT_S = 40 * 3600.0, 900.0


def options(*forecasts: float) -> tuple[PlanOption, ...]:
    return tuple(
        PlanOption(words=(name,), tokens_per_s=rate, log_sd=0.1)
        for name, rate in zip(NAMES, forecasts, strict=False)
    )


def span(rate: float, age_s: float, running: float = RUNNING) -> LiveSpan:
    return LiveSpan(
        duration_s=SPAN_S, engine_age_s=age_s, cap_requests=64, running_requests=running,
        tokens_per_s=rate, prompt_tokens_per_s=0.0, accept_length=None, counted_by="engine",
        finished=(), running=(),
    )  # fmt: skip


@dataclass
class Cluster:
    """Engines with true rates; a rate of 0 is of a plan that does not start."""

    rates: dict[str, float]
    options: tuple[PlanOption, ...]
    plans: dict[str, str]
    """Plan that each worker runs."""
    cards: dict[str, str] = field(default_factory=dict)
    results: tuple[CardResult, ...] = ()
    lines: list[str] = field(default_factory=list)
    num_restarts: int = 0
    tuning: Tuning = field(init=False)
    _up_at_s: dict[str, float] = field(default_factory=dict)
    _is_noted: set[str] = field(default_factory=set)
    _failed: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tuning = Tuning(longest_reading_s=1200, log=self.lines.append, results=self.results)

    def run(self, work_s: float, hours: float = 4.0) -> None:
        """Run for some hours of a job that needs `work_s` at the rate of the start."""
        self._up_at_s = dict.fromkeys(self.plans, 0.0)
        for step in range(int(hours * 3600 / SPAN_S)):
            now_s = step * SPAN_S
            for worker, plan in list(self.plans.items()):
                age_s = now_s - self._up_at_s[worker]
                if age_s >= 0 and worker not in self._is_noted:
                    self._note(worker, now_s, step)
                elif age_s >= 0:
                    self.tuning.note_span(worker, span(self.rates[plan], age_s))
                    self._follow(worker, now_s, step)
            self.tuning.decide(max(work_s - now_s, 1.0), now_s=now_s)
            restarting = sum(up_at_s > now_s for up_at_s in self._up_at_s.values())
            num_cards = len(set(self.cards.values())) or 1
            assert restarting <= max(num_cards, len(self.plans) // 8)

    def _follow(self, worker: str, now_s: float, step: int) -> None:
        words = self.tuning.take_order(worker)
        if words is None:
            return
        self.num_restarts += 1
        assert words != (self.plans[worker],)
        if self.rates[words[0]]:
            self.plans[worker] = words[0]
        else:
            self._failed[worker] = (*self._failed.get(worker, ()), words[0])
        self._up_at_s[worker] = now_s + START_S
        self._is_noted.discard(worker)

    def _note(self, worker: str, now_s: float, step: int) -> None:
        self._is_noted.add(worker)
        trial = EngineTrial(
            card=self.cards.get(worker, "B200"), options=self.options, shared_log_sd=0.2,
            output_tokens_mean=MEAN_TOKENS, running=self.plans[worker],
            failed=self._failed.get(worker, ()), start_s=START_S + step / 1e6,
        )  # fmt: skip
        self.tuning.note_engine(worker, trial, now_s=now_s)


def all_on(plan: str, num: int) -> dict[str, str]:
    return {f"w{number}": plan for number in range(num)}


@pytest.mark.parametrize("start", NAMES)
@pytest.mark.parametrize("num", [1, 4, 16])
def test_engines_end_on_the_fastest_plan_from_every_start(start: str, num: int) -> None:
    rates = {"--a": 1000.0, "--b": 1200.0, "--c": 950.0}
    cluster = Cluster(rates, options(1000, 980, 970), all_on(start, num))
    cluster.run(LONG_S)
    assert set(cluster.plans.values()) == {"--b"}
    # Each plan is tried once; from the worst one, engines may go to the winner in two steps.
    assert cluster.num_restarts <= (1 if start == NAMES[0] else 2) * num + 3


def test_right_forecast_stays_and_each_other_plan_is_tried_at_most_once() -> None:
    cluster = Cluster(
        {"--a": 1000.0, "--b": 930.0, "--c": 900.0}, options(1000, 980, 970), all_on("--a", 4)
    )
    cluster.run(LONG_S)
    assert set(cluster.plans.values()) == {"--a"}
    assert cluster.num_restarts <= 4


def test_run_that_is_too_short_to_repay_a_trial_has_none() -> None:
    cluster = Cluster(
        {"--a": 1000.0, "--b": 1200.0, "--c": 950.0}, options(1000, 980, 970), all_on("--a", 4)
    )
    cluster.run(SHORT_S, hours=0.25)
    assert cluster.num_restarts == 0


def test_plan_that_fails_on_one_engine_is_tried_on_none() -> None:
    cluster = Cluster(
        {"--a": 1000.0, "--b": 0.0, "--c": 1100.0}, options(1000, 990, 980), all_on("--a", 4)
    )
    cluster.run(LONG_S)
    assert set(cluster.plans.values()) == {"--c"}
    assert sum("why='it failed' plan='--b'" in line for line in cluster.lines) == 1
    assert (
        sum(
            line.startswith("event=trial_change to='try' ") and "--b" in line
            for line in cluster.lines
        )
        == 1
    )


def test_engines_of_different_cards_try_for_themselves() -> None:
    plans = all_on("--a", 8)
    cards = {worker: "B200" if number < 4 else "H100" for number, worker in enumerate(plans)}
    cluster = Cluster({"--a": 1000.0, "--b": 1200.0}, options(1000, 980), plans, cards=cards)
    cluster.run(LONG_S)
    assert set(cluster.tuning.cards) == {"B200", "H100"}
    for card in ("B200", "H100"):
        tries = [
            line
            for line in cluster.lines
            if line.startswith(f"event=trial_change to='try' card={card!r}")
        ]
        assert len(tries) == 1


def test_next_session_neither_tries_nor_changes_what_is_settled() -> None:
    rates = {"--a": 1000.0, "--b": 1200.0, "--c": 950.0}
    first = Cluster(rates, options(1000, 980, 970), all_on("--a", 4))
    first.run(LONG_S)
    (result,) = first.tuning.results
    assert result.best == "--b"
    measured = {plan.name: plan.tokens_per_s for plan in result.plans}
    assert measured["--b"] == pytest.approx(1200)
    second = Cluster(
        rates, options(1000, 980, 970), all_on("--b", 4),
        results=results_from_text(results_text(first.tuning.results)),
    )  # fmt: skip
    second.run(LONG_S)
    assert second.num_restarts == 0


def test_engines_that_are_still_filling_or_half_empty_are_not_read() -> None:
    cluster = Cluster({}, options(1000, 980), {})
    cluster.plans = {"w0": "--a"}
    cluster._note("w0", 0.0, 0)
    card = cluster.tuning.cards["B200"]
    # One mean residence: 2,000 tokens at 20 tokens/s of each request.
    cluster.tuning.note_span("w0", span(1000.0, 90.0))
    assert card.reading_of("--a") is None
    cluster.tuning.note_span("w0", span(1000.0, 110.0))
    cluster.tuning.note_span("w0", span(100.0, 200.0, running=5.0))
    (result,) = card.result().plans
    assert result.tokens_per_s == pytest.approx(1000)


def test_engine_that_has_changed_often_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.trial.tuning._MOST_CHANGES_PER_PLAN", 1 / 3)
    rates = {"--a": 1000.0, "--b": 1200.0, "--c": 1400.0}
    cluster = Cluster(rates, options(1000, 980, 970), all_on("--a", 1))
    cluster.run(LONG_S)
    assert cluster.num_restarts == 1


def test_no_trial_is_made_of_a_run_that_wants_none() -> None:
    tuning = Tuning(longest_reading_s=None, log=print)
    trial = EngineTrial(
        card="B200", options=options(1, 2), shared_log_sd=0.1, output_tokens_mean=1.0, running="--a"
    )
    tuning.note_engine("w0", trial, now_s=0.0)
    assert tuning.decide(1e6, now_s=1.0) is None
    assert (tuning.cards, tuning.take_order("w0")) == ({}, None)
