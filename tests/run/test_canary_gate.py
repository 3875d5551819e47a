"""The canary's gate: rows arrive part by part, and the verdict falls as soon as it is certain."""

from pipeline.run.canary import CanaryGate
from schemas.config.run_file import RunFile
from schemas.manifest import Part
from schemas.session import Tally

CONFIG = RunFile.model_validate(
    {
        "prompts": {"path": "x"},
        "model": "m",
        "output": {"folder": "x"},
        "quality": {"empty_answer": {"max_share": 0.1}},
    }
)


def gate(num_rows: int = 100) -> CanaryGate:
    return CanaryGate(config=CONFIG, state="running", num_rows=num_rows)


def part(num_rows: int, num_flagged: int = 0) -> Part:
    return Part(
        name="p",
        size_bytes=0,
        row_ids=tuple(map(str, range(num_rows))),
        sample_indexes=(0,) * num_rows,
        content_hashes=("",) * num_rows,
        num_errors=0,
        prompt_tokens=0,
        completion_tokens=10 * num_rows,
        num_turns=num_rows,
        flag_counts=(("empty_answer", num_flagged),) if num_flagged else (),
        worker_id="w0",
    )


def test_good_rows_pass_only_when_all_are_done() -> None:
    one = gate()
    one.note_published(part(99))
    assert one.close_if_certain(is_complete=False) is None
    assert one.is_running
    one.note_published(part(1))
    assert one.close_if_certain(is_complete=True) == ()
    assert one.state == "passed"


def test_bad_rows_fail_before_the_rest_is_done() -> None:
    one = gate()
    # 19 of 100 come by chance less than once in a hundred at a limit of 10 %; 17 of 100 do not.
    one.note_published(part(30, 17))
    assert one.close_if_certain(is_complete=False) is None
    one.note_published(part(2, 2))
    over = one.close_if_certain(is_complete=False)
    assert over is not None
    assert [(excess.name, excess.num_rows) for excess in over] == [("empty_answer", 19)]
    assert one.state == "failed"


def test_rows_that_failed_for_good_do_not_dilute_the_others() -> None:
    one = gate()
    one.note_published(part(30, 10))
    assert one.close_if_certain(is_complete=False) is None
    assert one.close_if_certain(is_complete=True) != ()
    assert one.state == "failed"


def test_rows_of_earlier_sessions_count() -> None:
    one = gate()
    one.tally = Tally(num_rows=68, num_turns=68, flag_counts={"empty_answer": 18})
    one.note_published(part(1, 1))
    assert one.close_if_certain(is_complete=False)


def test_rows_after_the_verdict_change_nothing() -> None:
    one = gate(num_rows=10)
    one.note_published(part(10))
    one.close_if_certain(is_complete=True)
    one.note_published(part(50, 50))
    assert one.tally.num_rows == 10
    assert not one.is_running


def test_run_without_a_canary_judges_nothing() -> None:
    one = CanaryGate(config=CONFIG)
    one.note_published(part(10, 10))
    assert (one.state, one.is_running, one.tally.num_rows) == ("none", False, 0)
