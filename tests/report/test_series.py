"""Series of a run over time, from parts and readings."""

from pipeline.report.series import (
    Published,
    added,
    eta_points,
    of_readings,
    rates,
    rows_over_time,
    step_s,
    stepped,
)
from schemas.estimate import Band, LiveReading
from schemas.live import TimeLeft


def part(at_s: float, rows: int = 10, tokens: int = 100, worker: str = "w0") -> Published:
    return Published(at_s=at_s, rows=rows, tokens=tokens, worker=worker)


def reading(start_s: float, end_s: float, rate: float, accept: float | None = None) -> LiveReading:
    return LiveReading(
        engine="w0", start_s=start_s, end_s=end_s, engine_age_s=start_s, cap_requests=8,
        running_requests=4.0, tokens_per_s=rate, accept_length=accept, prompt_tokens_per_s=0.0,
    )  # fmt: skip


def test_value_holds_until_it_changes() -> None:
    points = stepped([(1.0, 5.0), (3.0, 0.0)], [0.0, 1.0, 2.9, 3.0])
    assert points == [(0.0, None), (1.0, 5.0), (2.9, 5.0), (3.0, 0.0)]


def test_rates_add_up_to_all_tokens() -> None:
    parts = [part(5.0), part(15.0, tokens=300), part(25.0)]
    assert rates(parts, 25.0, 10.0) == [(5.0, 10.0), (15.0, 30.0), (25.0, 20.0)]
    assert rows_over_time(parts, 25.0)[-1] == (25.0, 30.0)
    assert step_s(1000.0, 15.0) == 30.0
    assert step_s(36_000.0, 15.0) == 300.0


def test_readings_are_means_by_time_and_gaps_stay_gaps() -> None:
    found = of_readings([reading(0, 10, 5.0), reading(10, 15, 20.0)], 40.0, 20.0, "tokens_per_s")
    assert found == [(10.0, 10.0), (30.0, None)]
    assert of_readings([reading(0, 10, 5.0)], 20.0, 20.0, "accept_length") == [(10.0, None)]
    assert added([found, [(10.0, 1.0), (30.0, 2.0)]]) == [(10.0, 11.0), (30.0, 2.0)]


def test_estimates_are_drawn_on_the_clock_of_the_run() -> None:
    # The readings' clock began 10 s after the run. A day left after 50 s: 86,460 s in all.
    band = Band(p10=0.5, p50=1.0, p90=2.0)
    noted = [TimeLeft(at_s=50.0, days=band), TimeLeft(at_s=91.0, days=band)]
    (point,) = eta_points(noted, 10.0, 100.0)
    assert point.at_s == 60.0
    assert point.total_s == Band(p10=43_260.0, p50=86_460.0, p90=172_860.0)
