"""The readings that the estimate is scored against: whole, and answered by the other estimate."""

import json
from typing import Any

import pytest

from pipeline.planner.rate.readings.stored import readings
from tests.scores.peer_estimate import DATA, our_rate, our_tokens_per_s, peer_arguments


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


READINGS = list(readings())


def reading(row_id: str) -> dict[str, Any]:
    return next(row for row in READINGS if row["id"] == row_id)


def test_a_reading_is_used_once_or_left_out_with_its_reason() -> None:
    left_out = rows("left_out.jsonl")
    ids = [row["id"] for row in (*READINGS, *rows("modelled.jsonl"), *left_out)]
    assert len(set(ids)) == len(ids)
    assert all(row["reason"] for row in left_out)


def test_a_reading_agrees_with_itself() -> None:
    for row in READINGS:
        name = row["id"]
        assert set(row) == set(READINGS[0]), name
        assert row["tp_size"] % row["dp_size"] == row["tp_size"] % row["ep_size"] == 0, name
        assert row["num_gpus"] % row["tp_size"] == 0, name
        assert 0 < row["running_requests"] <= row["concurrency"], name
        assert row["mtp"] == (row["num_draft_tokens"] is not None), name


def test_the_running_batch_is_the_rate_times_the_time_a_token() -> None:
    for row in READINGS:
        if row["tpot_ms"]:
            all_gpus_per_s = row["tokens_per_s_per_gpu"] * row["num_gpus"]
            running = all_gpus_per_s * row["tpot_ms"] / 1000
            # Published with one decimal, of three requests at least.
            near = pytest.approx(row["running_requests"], rel=0.016)
            assert running == near, row["id"]


def test_answers_of_the_other_estimate_are_to_measured_readings() -> None:
    peer = rows("peer.jsonl")
    assert {row["id"] for row in peer} <= {row["id"] for row in READINGS}
    assert all(("refused" in row) != ("tokens_per_s_per_gpu" in row) for row in peer)


def test_a_point_is_asked_in_the_other_estimates_words() -> None:
    # DP attention over 8 ranks: 8 attention ranks of 1, experts over all 8; 128 clients of whom
    # 229.3 * 8 * 0.0612 = 112 decode, so none queues: 128 / 8 a rank.
    asked = peer_arguments(reading("r0172"), accept_length=1.0)
    assert asked is not None
    layout = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "batch_size")
    assert [asked[key] for key in layout] == [1, 8, 1, 8, 16]
    # 1,024 clients of whom 76 run: the others queue outside the batch.
    queued = peer_arguments(reading("r0005"), accept_length=1.0)
    assert queued is not None
    assert (queued["batch_size"], queued["mode"]) == (76, "agg")
    # Of 2.6 tokens a step 1.6 are drafted; 4 are verified, of which the draft proposes 3.
    drafted = peer_arguments(reading("r0010"), accept_length=2.6)
    assert drafted is not None
    assert (drafted["nextn"], drafted["nextn_accepted"]) == (3, 1.6)
    assert peer_arguments(reading("blog-spark-super"), accept_length=1.0) is None


def test_a_window_of_decoding_is_compared_without_prefill() -> None:
    window = reading("community-3c71848d")
    rate = our_rate(window)
    assert window["input_tokens"] == 16384
    assert our_tokens_per_s(window, rate) == pytest.approx(
        window["running_requests"] * rate.accept_length / rate.step.step_s() / window["num_gpus"]
    )
