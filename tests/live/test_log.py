"""The log of the readings: how it is bounded, and that its file gives it back."""

from itertools import pairwise
from pathlib import Path

from pipeline.live.log import LiveLog, read_live_log, write_live_log
from pipeline.store.folder import LocalFolder
from schemas.estimate import Band
from schemas.live import TimeLeft


def days(middle: float) -> Band:
    return Band(p10=middle / 2, p50=middle, p90=middle * 2)


def test_time_left_is_noted_when_it_changes_and_read_again(tmp_path: Path) -> None:
    log = LiveLog(began_at_s=1000.0, run_file={})
    for now_s, middle in ((1010.0, 3.0), (1020.0, 3.0), (1030.0, 2.0), (1040.0, 3.0)):
        log.note_time_left(days(middle), now_s=now_s)
    assert log.times_left == [
        TimeLeft(at_s=10.0, days=days(3.0)),
        TimeLeft(at_s=30.0, days=days(2.0)),
        TimeLeft(at_s=40.0, days=days(3.0)),
    ]
    write_live_log(LocalFolder(tmp_path), log)
    assert read_live_log(LocalFolder(tmp_path)) == log


def test_noted_times_are_thinned_evenly() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    for number in range(1000):
        log.note_time_left(days(1000.0 - number), now_s=float(number))
    times = [noted.at_s for noted in log.times_left]
    assert len(times) == 240
    assert (times[0], times[-1]) == (0.0, 999.0)
    # 999 s between 240 times: 4.2 s on average.
    assert max(after - before for before, after in pairwise(times)) <= 9
