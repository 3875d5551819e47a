"""Limits that stop the canary or drain an engine, and the diagnosis."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import regenerate
from pipeline.dataset import parts as run_parts
from pipeline.dataset import run_record
from pipeline.dataset.frozen import schema_from_text
from pipeline.errors import ResumeError
from pipeline.models.thinking import facts_by_name
from pipeline.quality.canary import broken_by_all, chance_of_as_many, excesses, tally_of, turned_bad
from pipeline.quality.diagnosis import Diagnosis, budgets_of, diagnosis
from pipeline.run.ledger import DONE, PENDING, Ledger, put_canary_first
from pipeline.run.session import Prepared, SessionOptions, prepare
from pipeline.store.folder import LocalFolder
from pipeline.store.journal import read_events
from schemas.completion import Completion, QualityFlag
from schemas.config.quality import QualityConfig
from schemas.config.run_file import RunFile
from schemas.progress import WorkerReport
from schemas.session import Tally
from tests.fakes.staged_part import stage_part
from tests.fakes.webhook_receiver import receiving

Build = Callable[..., Completion]


def config(**settings: object) -> RunFile:
    values: dict[str, object] = {
        "prompts": {"path": "unused"},
        "model": "Qwen/Qwen3-8B",
        "output": {"folder": "unused"},
    }
    return RunFile.model_validate(values | settings)


def tally(num_rows: int, errors: int = 0, tokens: int = 0, **flags: int) -> Tally:
    return Tally(
        num_rows=num_rows,
        num_errors=errors,
        num_turns=num_rows,
        completion_tokens=tokens,
        flag_counts=flags,
    )


# -- shares


def test_chance_is_the_binomial_tail() -> None:
    # 10 tosses of a fair coin: (C(10,8) + C(10,9) + C(10,10)) / 1024 = 56 / 1024.
    assert chance_of_as_many(8, 10, 0.5) == pytest.approx(56 / 1024)
    assert chance_of_as_many(1, 3, 0.1) == pytest.approx(1 - 0.9**3)
    assert chance_of_as_many(3, 500, 0.02) == 1.0
    assert chance_of_as_many(1, 500, 0.0) == 0.0
    assert 0 <= chance_of_as_many(900_000, 900_000, 0.02) < 1e-100


def test_share_well_over_its_limit_is_found_and_one_bad_row_is_not() -> None:
    found = excesses(tally(500, empty_answer=435), config(), num_rows=500)
    assert [(e.name, round(e.found, 2), e.limit) for e in found] == [("empty_answer", 0.87, 0.02)]
    assert excesses(tally(1, empty_answer=1), config(), num_rows=1) == ()
    assert excesses(tally(20, empty_answer=1), config(), num_rows=20) == ()


def test_empty_rows_that_end_first_do_not_stop_a_healthy_canary() -> None:
    # All ten of the allowed 2% of 500 are in before any other row: nothing is certain yet.
    assert excesses(tally(10, empty_answer=10), config(), num_rows=500) == ()
    assert excesses(tally(25, empty_answer=25), config(), num_rows=500)


def test_error_rows_have_a_limit_of_their_own() -> None:
    found = excesses(tally(50, errors=40), config(), num_rows=50)
    assert [excess.name for excess in found] == ["error_rows"]


def test_mean_length_is_held_to_what_the_run_file_says_and_not_to_a_default() -> None:
    long = tally(100, tokens=100 * 5000)
    assert excesses(long, config(), num_rows=100) == ()
    expects = config(lengths={"output_tokens_mean": 1000})
    assert [(e.name, e.found, e.limit) for e in excesses(long, expects, num_rows=100)] == [
        ("mean_tokens", 5000, 2500)
    ]
    assert excesses(tally(100, tokens=100 * 1000), expects, num_rows=100) == ()


def test_flag_that_no_row_has_is_within_a_limit_of_zero() -> None:
    none_may = config(quality={"looping": {"max_share": 0.0}})
    assert excesses(tally(500), none_may, num_rows=500) == ()
    (excess,) = excesses(tally(500, looping=1), none_may, num_rows=500)
    assert (excess.name, excess.found, excess.limit, excess.num_rows) == ("looping", 0.002, 0.0, 1)


def test_limit_of_null_is_none() -> None:
    off = config(quality={"empty_answer": {"max_share": None}})
    assert excesses(tally(500, empty_answer=500), off, num_rows=500) == ()


# -- the rows that are drawn


def test_canary_is_drawn_across_the_open_rows_and_is_the_same_for_a_seed() -> None:
    states = bytearray([PENDING] * 10_000)
    states[:100] = bytes([DONE] * 100)
    again = bytearray(states)
    assert put_canary_first(states, 500, 7) == 500
    put_canary_first(again, 500, 7)
    assert states == again
    drawn = [row for row, state in enumerate(states) if state == PENDING]
    assert len(drawn) == 500
    assert states.count(DONE) == 100
    # A sample of 500 has 50 in each tenth, give or take 7.
    tenths = [sum(low <= row < low + 1000 for row in drawn) for low in range(0, 10_000, 1000)]
    assert min(tenths) > 20


def test_small_input_is_its_own_canary() -> None:
    states = bytearray(7)
    assert put_canary_first(states, 500, None) == 7
    assert states == bytes(7)


def test_later_rows_are_leased_after_the_canarys_and_do_not_wait_for_them() -> None:
    states = bytearray([PENDING] * 40)
    put_canary_first(states, 6, 1)
    drawn = [row for row, state in enumerate(states) if state == PENDING]
    ledger = Ledger(
        row_states=states, shard_rows=8, lease_ttl_s=60, max_shard_losses=3, has_canary=True
    )
    leases = []
    while lease := ledger.lease("w", now_s=0.0):
        leases.append(lease)
    canary = [lease for lease in leases if lease.is_canary]
    assert leases[: len(canary)] == canary
    assert [row for lease in canary for row in lease.rows] == drawn
    assert sorted(row for lease in leases for row in lease.rows) == list(range(40))
    later = leases[-1]
    ledger.mark_done([(later.key, row) for row in later.rows])
    assert ledger.has_open_canary_rows
    for lease in canary:
        assert not ledger.have_later_ones([(lease.key, row) for row in lease.rows])
        ledger.mark_done([(lease.key, row) for row in lease.rows])
    assert not ledger.has_open_canary_rows
    assert not ledger.is_over
    assert ledger.have_later_ones([(leases[-2].key, leases[-2].rows[0])])


def test_canary_rows_are_leased_many_at_a_time() -> None:
    # 500 of 100,000 rows: one in three shards, which would be 300 leases of one or two rows.
    states = bytearray([PENDING] * 100_000)
    put_canary_first(states, 500, 1)
    ledger = Ledger(
        row_states=states, shard_rows=64, lease_ttl_s=60, max_shard_losses=3, has_canary=True
    )
    sizes = []
    while (lease := ledger.lease("w", now_s=0.0)) is not None and lease.is_canary:
        sizes.append(len(lease.rows))
    assert sum(sizes) == 500
    assert len(sizes) <= 500 // 16 + 1


# -- engines


def report(worker_id: str, num_rows: int, **flags: int) -> WorkerReport:
    return WorkerReport(
        worker_id=worker_id,
        state="running",
        engine="fake",
        engine_release=None,
        in_flight=0,
        not_started=0,
        backing_off=0,
        unflushed=0,
        requests=0,
        interruptions=0,
        restarts=0,
        completion_tokens=0,
        last_cause=None,
        window_rows=num_rows,
        window_flags=flags,
    )


def bad_ones(*reports: WorkerReport, **accepted: float) -> dict[str, str]:
    by_id = {one.worker_id: one for one in reports}
    causes = {name: turned_bad(name, by_id, QualityConfig(), accepted) for name in by_id}
    return {name: cause for name, cause in causes.items() if cause}


def test_engine_that_alone_breaks_a_limit_is_named() -> None:
    found = bad_ones(report("a", 200), report("b", 40, looping=30), report("c", 200, looping=4))
    assert found == {"b": "looping in 30 of its last 40 rows (limit 5%)"}


def test_limit_that_every_engine_breaks_drains_none_and_is_told() -> None:
    both = (report("a", 200, looping=90), report("b", 200, looping=95))
    assert bad_ones(*both) == {}
    by_id = {one.worker_id: one for one in both}
    # 185 of 400 rows
    assert broken_by_all(by_id, QualityConfig(), {}) == {"looping": 185 / 400}
    by_id["c"] = report("c", 200)
    assert broken_by_all(by_id, QualityConfig(), {}) == {}
    assert broken_by_all({"a": both[0]}, QualityConfig(), {}) == {}


def test_two_bad_engines_of_three_are_both_drained() -> None:
    assert set(
        bad_ones(report("a", 200, looping=90), report("b", 200, looping=95), report("c", 200))
    ) == {"a", "b"}


def test_only_engine_is_judged_by_a_full_window() -> None:
    assert bad_ones(report("a", 60, looping=50)) == {}
    assert set(bad_ones(report("a", 200, looping=150))) == {"a"}


def test_accepted_share_is_the_limit_from_there_on() -> None:
    reports = report("a", 200, looping=100), report("b", 200, looping=2)
    assert set(bad_ones(*reports)) == {"a"}
    assert bad_ones(*reports, looping=0.5) == {}


# -- budgets and causes


def turn(
    tokens: int, finish: str = "stop", answer: str = "x", reasoning: str = "hm"
) -> dict[str, Any]:
    return {
        "completion_tokens": tokens,
        "finish_reason": finish,
        "answer_text": answer,
        "reasoning_text": reasoning,
    }


def row(one: dict[str, Any], *flags: str, row_id: str = "r", **more: object) -> dict[str, Any]:
    return {
        "row_id": row_id,
        "messages": [{"role": "user", "content": "why?"}],
        "turns": [one],
        "flags": list(flags),
        "status": "ok",
        "finish_reason": one["finish_reason"],
        "error_text": None,
        **more,
    }


def lengths_cut_at(limit: int, num: int = 500) -> list[dict[str, Any]]:
    """Log-normal lengths of median 1,000 and deviation 0.6, as written with a limit."""
    chance = random.Random(3)
    lengths = [math.ceil(chance.lognormvariate(math.log(1000), 0.6)) for _ in range(num)]
    cut = [turn(min(n, limit), "length" if n >= limit else "stop") for n in lengths]
    return [row(one, "cut_in_answer" if one["finish_reason"] == "length" else "x") for one in cut]


# A limit of 300 cuts 49 of 50 turns.
@pytest.mark.parametrize("limit", [300, 900, 1500, 2500])
def test_budgets_come_out_right_from_lengths_that_were_cut(limit: int) -> None:
    budgets = budgets_of(lengths_cut_at(limit))
    assert budgets is not None
    # exp(ln 1000 + 0.6 * 1.645) = 2,683 and exp(ln 1000 + 0.6 * 2.326) = 4,038.
    assert budgets.tokens_95 == pytest.approx(2683, rel=0.2)
    assert budgets.tokens_99 == pytest.approx(4038, rel=0.25)


def test_budgets_are_not_told_from_nothing() -> None:
    assert budgets_of([row(turn(100, "length"), "cut_in_answer")] * 50) is None
    assert budgets_of([row(turn(100))] * 50) is None


def found(rows: list[dict[str, Any]], flag: str, **settings: object) -> Diagnosis:
    over = excesses(tally(500, **{flag: 400}), config(**settings), num_rows=500)
    run = config(**settings)
    return diagnosis(over, rows, run, facts_by_name(run.model))


def test_cut_rows_tell_the_budget() -> None:
    said = found(lengths_cut_at(1500), "cut_in_answer", sampling={"max_tokens": 1500}).causes[0]
    assert said.startswith("sampling.max_tokens is too small")
    assert "suffice for 95% of them" in said


def test_rows_cut_before_max_tokens_point_at_the_context() -> None:
    said = found(lengths_cut_at(1500), "cut_in_thinking", sampling={"max_tokens": 8000}).causes[0]
    assert said.startswith("the engine's context")


def test_rows_that_are_cut_since_they_loop_do_not_ask_for_a_larger_budget() -> None:
    rows = [row(turn(1500, "length"), "cut_in_answer", "looping")] * 20
    said = found(rows, "cut_in_answer", sampling={"max_tokens": 1500, "temperature": 0}).causes[0]
    assert "because they loop" in said
    assert "temperature is 0" in said


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model": "acme/wise-7b"}, "of no known family"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs sets"),
        ({"model": "Qwen/QwQ-32B"}, "has no switch for thinking"),
        ({}, "the model did not think"),
    ],
)
def test_missing_thinking_is_traced_to_the_template_word(
    settings: dict[str, object], expected: str
) -> None:
    rows = [row(turn(20, reasoning=""), "empty_reasoning")] * 5
    assert expected in found(rows, "empty_reasoning", **settings).causes[0]


@pytest.mark.parametrize(
    ("settings", "flags", "expected"),
    [
        ({"model": "openai/gpt-oss-20b"}, (), "cannot be switched off"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, (), "chat_template_kwargs sets"),
        ({}, ("empty_answer",), "reasoning parser expects thinking"),
        ({}, (), "thought all the same"),
        ({"model": "nvidia/Llama-3_3-Nemotron-Super-49B-v1"}, (), "'detailed thinking off'"),
    ],
)
def test_thinking_that_was_off_is_traced_to_the_switch_or_the_parser(
    settings: dict[str, object], flags: tuple[QualityFlag, ...], expected: str
) -> None:
    rows = [row(turn(20, reasoning="R"), "unasked_reasoning", *flags)] * 5
    causes = found(rows, "unasked_reasoning", thinking=False, **settings).causes
    assert any(expected in cause for cause in causes)


def test_empty_answers_behind_thinking_are_the_parsers_doing() -> None:
    swallowed = [row(turn(200, answer="", reasoning="long thoughts"), "empty_answer")] * 5
    assert "reasoning parser takes the answer" in found(swallowed, "empty_answer").causes[0]
    silent = [row(turn(1, answer="", reasoning=""), "empty_answer")] * 5
    assert "chat template is missing" in found(silent, "empty_answer").causes[0]


def test_three_examples_a_flag_are_shown_cut() -> None:
    rows = [row(turn(9, answer="word " * 200), "looping", row_id=f"r{n}") for n in range(9)]
    examples = found(rows, "looping").examples["looping"]
    assert [example.row_id for example in examples] == ["r0", "r1", "r2"]
    assert len(examples[0].answer) < 200
    assert "[...]" in examples[0].answer


# -- over sessions


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    rows = [{"id": f"r{n}", "prompt": f"What is {n} + {n}?"} for n in range(30)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    return folder


def settings_of(folder: LocalFolder) -> dict[str, object]:
    return {
        "prompts": {"path": str(folder.root.parent / "p.jsonl"), "id_column": "id"},
        "output": {"folder": str(folder.root)},
        "quality": {"canary_rows": 10},
    }


def started(folder: LocalFolder, *, accept: bool = False, **settings: object) -> Prepared:
    return prepare(
        config(**(settings_of(folder) | settings)),
        folder,
        SessionOptions(accept_drift=True, accept_canary=accept),
        token="t",
        now_s=1.0,
        log=lambda line: None,
    )


def publish(
    folder: LocalFolder, prepared: Prepared, build: Build, numbers: range, **changes: object
) -> None:
    rows = [build(f"r{n}", content_hash=_hash_of(folder, prepared, n), **changes) for n in numbers]
    part = stage_part(
        folder,
        f"p{numbers.start}.parquet",
        rows,
        run_id=prepared.plan.run_id,
        carried_schema=schema_from_text(prepared.plan.carried_schema),
        worker_id="w0",
    )
    run_parts.publish(folder, part, now_s=2.0)


def asked_again(folder: LocalFolder, first: Prepared) -> Prepared:
    """The next session of the same run, with `--retry-flagged` for loops."""
    return prepare(
        first.plan.config,
        folder,
        SessionOptions(retry_flags=frozenset({"looping"})),
        token="t",
        now_s=3.0,
        log=lambda line: None,
    )


def _hash_of(folder: LocalFolder, prepared: Prepared, number: int) -> str:
    from pipeline.dataset.frozen import frozen_prompts

    frozen = frozen_prompts(folder, prepared.plan.frozen_name)
    assert frozen is not None
    return frozen.prompt(number).content_hash


def test_canary_that_was_broken_off_goes_on_with_the_rows_that_are_left(
    folder: LocalFolder, completion: Build
) -> None:
    first = started(folder)
    assert first.plan.canary is not None
    assert first.plan.canary.rows_left == 10
    publish(folder, first, completion, range(4), flags=("looping",))
    second = started(folder)
    # Four loops among ten rows are over 5% already, whatever the other six are.
    assert [excess.name for excess in second.excesses] == ["looping"]
    third = started(folder, quality={"canary_rows": 10, "looping": {"max_share": 0.5}})
    assert third.plan.canary is not None
    assert third.plan.canary.rows_left == 6
    assert third.plan.canary.tally.flag_counts == {"looping": 4}


def resumed(folder: LocalFolder, monkeypatch: pytest.MonkeyPatch, hook: str) -> int:
    """The exit status of the job itself, which finds nothing to start an engine for."""
    run_file = folder.root.parent / "run.yaml"
    engine = {"kind": "endpoint", "base_urls": ["http://127.0.0.1:9/v1"]}
    values = {**settings_of(folder), "engine": engine, "events": {"webhook_env": "HOOK"}}
    run_file.write_text(yaml.safe_dump(config(**values).model_dump(mode="json")))
    monkeypatch.setenv("HOOK", hook)
    return regenerate.main([str(run_file), "--json"])


def test_canary_that_was_bad_is_told_again_on_each_resume(
    folder: LocalFolder, completion: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(folder, started(folder), completion, range(10), flags=("looping",))
    with receiving() as receiver:
        assert resumed(folder, monkeypatch, receiver.url) == 3
    told = [(n["event"], n["text"], n["rows_done"], n["rows_total"]) for n in receiver.got]
    assert told == [
        ("canary_failed", "rows=10", 10, 30),
        ("run_failed", "the first rows are worse than the limits", 10, 30),
    ]
    assert [event.kind for event in read_events(folder)] == ["canary_failed", "run_failed"]


def test_end_of_a_run_is_told_once_and_made_up_for_where_a_kill_came_first(
    folder: LocalFolder, completion: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(folder, started(folder), completion, range(30))
    with receiving() as receiver:
        assert [resumed(folder, monkeypatch, receiver.url) for _ in range(3)] == [0, 0, 0]
    assert [(n["event"], n["rows_done"]) for n in receiver.got] == [("run_done", 30)]


def test_canary_that_is_whole_has_passed_and_stays_so(
    folder: LocalFolder, completion: Build
) -> None:
    publish(folder, started(folder), completion, range(10))
    for _ in range(2):
        again = started(folder)
        assert (again.plan.canary, again.excesses) == (None, ())
    manifest = run_record.read_manifest(folder)
    assert manifest.canary is not None
    assert manifest.canary.verdict == "passed"


def test_accepted_canary_is_not_asked_about_again(folder: LocalFolder, completion: Build) -> None:
    publish(folder, started(folder), completion, range(10), flags=("looping",))
    assert started(folder).excesses
    accepted = started(folder, accept=True)
    assert (accepted.plan.canary, accepted.excesses) == (None, ())
    assert accepted.plan.accepted_shares == {"looping": 1.0}
    later = started(folder)
    assert later.plan.accepted_shares == {"looping": 1.0}
    assert later.excesses == ()


def test_canary_is_judged_anew_when_its_flagged_rows_are_asked_again(
    folder: LocalFolder, completion: Build
) -> None:
    first = started(folder)
    publish(folder, first, completion, range(6))
    publish(folder, first, completion, range(6, 10), flags=("looping",))
    assert started(folder).excesses
    mended = asked_again(folder, first)
    assert mended.excesses == ()
    assert mended.plan.canary is not None
    assert (mended.plan.canary.rows_left, mended.plan.canary.tally.num_rows) == (4, 6)


def test_other_settings_ask_for_another_canary(folder: LocalFolder, completion: Build) -> None:
    publish(folder, started(folder), completion, range(10))
    assert started(folder).plan.canary is None
    hotter = started(folder, sampling={"temperature": 0.9})
    assert hotter.plan.canary is not None
    assert hotter.plan.canary.rows_left == 10


def test_tally_counts_flags_of_good_rows_and_all_turns(
    folder: LocalFolder, completion: Build
) -> None:
    first = started(folder)
    publish(folder, first, completion, range(3), flags=("looping", "too_short"))
    publish(folder, first, completion, range(3, 5), error=True)
    parts = run_record.read_manifest(folder).canary_parts
    assert tally_of(parts) == Tally(
        num_rows=5,
        num_errors=2,
        num_turns=3,
        completion_tokens=9,
        flag_counts={"looping": 3, "too_short": 3},
    )


def test_flagged_rows_are_taken_back_when_that_is_asked(
    folder: LocalFolder, completion: Build
) -> None:
    first = started(folder)
    publish(folder, first, completion, range(6))
    publish(folder, first, completion, range(6, 9), flags=("looping",))
    again = asked_again(folder, first)
    assert again.session.rows_done == 6


def test_folder_with_rows_of_an_older_release_is_refused_in_one_line(folder: LocalFolder) -> None:
    started(folder)
    record = run_record.read_run(folder)
    assert record is not None
    old = json.loads(replace(record).to_json())
    del old["columns"], old["quality"]
    folder.write_whole("run.json", json.dumps(old).encode())
    with pytest.raises(
        ResumeError, match=r"output\.folder: .*\(flags, plan, quality_retries\)"
    ) as refused:
        started(folder)
    assert "\n" not in str(refused.value)
