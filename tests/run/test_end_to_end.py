"""Whole runs with real Ray, real engines and real HTTP, killed at any place and resumed."""

import collections
import json
import os
import random
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import estimate
from pipeline.live.log import read_live_log
from pipeline.run.metrics import EXPORTED
from pipeline.store.folder import LocalFolder
from tests.fakes.ray_head import Head
from tests.fakes.running import (
    Run,
    below,
    ended,
    engine_pids,
    kill,
    new_run,
    printed_json,
    questions,
    start_job,
    wait_until,
    write_run_file,
)
from tests.fakes.scripted_model import EMPTY_ANSWERS, END, SCRIPT, write_scripted_model
from tests.fakes.scripted_server import (
    Reply,
    ScriptedServer,
    answer,
    completion_body,
    last_text,
    serving,
)
from tests.fakes.webhook_receiver import receiving

pytestmark = [pytest.mark.ray, pytest.mark.engine]


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "scripted.gguf"
    write_scripted_model(path)
    return path


@pytest.fixture
def cluster(head: Head) -> str:
    """The address of the shared cluster."""
    return head.address


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving(ScriptedServer()) as running:
        yield running


def embedded(model_file: Path, **more: object) -> dict[str, Any]:
    return {"kind": "embedded", "count": 2, "model_file": str(model_file), "threads": 1} | more


def endpoint(*servers: ScriptedServer, **more: object) -> dict[str, Any]:
    return {"kind": "endpoint", "base_urls": [server.url for server in servers]} | more


def each_once(run: Run, num_rows: int) -> None:
    ids = run.ids()
    assert len(ids) == num_rows
    assert sorted(ids) == sorted({row["id"] for row in pq.read_table(run.prompts).to_pylist()})


def test_two_engines_regenerate_every_turn_of_a_conversation(
    tmp_path: Path, model_file: Path
) -> None:
    rows = [
        {
            "id": number,
            "category": "chat",
            "messages": [
                {"role": "user", "content": f"first {number}"},
                {"role": "assistant", "content": "an old answer"},
                {"role": "user", "content": "and then?"},
            ],
        }
        for number in range(400)
    ]
    rows.append({"id": 400, "category": "bad", "messages": []})
    rows.append(
        {"id": 401, "category": "long", "messages": [{"role": "user", "content": "ha " * 9000}]}
    )
    run = new_run(tmp_path, rows)
    write_run_file(
        run,
        prompts={"keep_columns": ["category"]},
        sampling={"max_tokens": 60},
        # Few at once, so that the run lasts until engines have told what they do: 3 s.
        engine=embedded(model_file, max_running_requests=2),
        # Else the first that is up may have done them all.
        cluster={"min_engines": 2},
        output={"mode": "private"},
    )
    result = run.finish()
    assert result.code == 3, result.err
    # Private prompts stay so: nothing in the folder is anybody else's to read.
    written = [run.folder, *run.folder.rglob("*")]
    assert {path.stat().st_mode & 0o077 for path in written} == {0}
    assert "rows       402 of 402 done, 2 of them error rows; 0 failed" in result.out
    table = {row["row_id"]: row for row in run.published().to_pylist()}
    assert len(table) == 402
    assert (table["400"]["error_kind"], table["400"]["attempt"]) == ("no_user_turn", 0)
    assert (table["401"]["error_kind"], table["401"]["attempt"]) == ("over_context", 0)
    for number in range(400):
        row = table[str(number)]
        assert row["status"] == "ok"
        assert row["category"] == "chat"
        assert row["engine"] == "llama.cpp"
        assert row["engine_release"].startswith("xllamacpp ")
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "user", "assistant"]
        assert "old answer" not in str(row["messages"])
        assert len(row["turns"]) == 2
        for turn, message in zip(row["turns"], row["messages"][1::2], strict=True):
            assert turn["reasoning_text"].startswith("First we")
            assert message["content"] == turn["answer_text"]
            assert message["reasoning_content"] == turn["reasoning_text"]
            assert not turn["answer_text"].startswith("\n")
            assert turn["finish_reason"] == "stop" or turn["completion_tokens"] == 60
    finishes = {turn["finish_reason"] for row in table.values() for turn in row["turns"]}
    assert finishes == {"stop", "length"}
    assert {row["worker_id"] for row in table.values()} == {"w0", "w1"}
    loaded = datasets.load_dataset(
        "parquet", data_dir=str(run.folder / "data"), cache_dir=str(tmp_path / "cache")
    )
    assert loaded["train"].num_rows == 402
    assert not engine_pids(run.folder)
    again = run.finish("--accept-errors")
    assert "event=nothing_to_do" in again.err
    assert again.code == 0
    update = printed_json(estimate.main, "--update-from", str(run.folder), "--json")
    assert (update["rows_done"], update["days_left"]["p50"]) == (402, 0)
    assert update["completions_seen"] > 0
    assert update["output_lengths"]["mean_tokens"] <= 60
    assert update["tokens_per_s"]["p50"] > 0
    assert "embedded engines run on CPUs" in update["no_dry_run"]


def test_kills_in_mid_run_cost_seconds_and_no_row(
    tmp_path: Path, head: Head, model_file: Path
) -> None:
    run = new_run(tmp_path, questions(500), head.address, engine=embedded(model_file))
    process = run.start()
    # The run mends itself after the first two, the same command goes on after the others.
    run.wait_for_rows(50, process)
    kill(engine_pids(run.folder)[0])
    run.wait_for_rows(120, process)
    kill(head.actor_pid("WorkerActor"))
    run.wait_for_rows(220, process)
    kill(head.actor_pid("Coordinator"))
    assert ended(process).code != 0
    wait_until(lambda: not engine_pids(run.folder))
    published = len(run.ids())
    assert 220 <= published < 500
    process = run.start()
    run.wait_for_rows(published + 60, process)
    kill(process.pid)
    assert ended(process).code != 0
    wait_until(lambda: not engine_pids(run.folder))
    assert len(run.ids()) < 500
    last = run.finish()
    assert last.code == 0, last.err
    each_once(run, 500)
    assert run.status()["rows_done"] == 500


@pytest.mark.slow
def test_failing_answers_and_cut_connections_lose_no_row(tmp_path: Path, cluster: str) -> None:
    def flaky(request: dict[str, Any], number: int) -> Reply:
        if number % 100 == 17:
            return Reply(status=500, body=completion_body("not an answer"))
        if number % 100 == 61:
            return Reply(body=completion_body("not an answer either"), cut=True)
        return answer(request, number)

    with serving(ScriptedServer(script=flaky)) as server:
        run = new_run(
            tmp_path,
            questions(2000),
            cluster,
            engine=endpoint(server),
            retry={"backoff_initial_s": 0.05},
        )
        result = run.finish()
    assert result.code == 0, result.err
    each_once(run, 2000)
    answers = {row["row_id"]: row["turns"][0]["answer_text"] for row in run.published().to_pylist()}
    assert answers["q00007"] == "answer to question 7?"
    # A failed try is asked again, and nothing else is: 2% of 2,000, and those again.
    assert 2040 <= len(server.requests) <= 2043


@pytest.mark.slow
def test_row_that_uses_up_its_budget_is_listed_and_tried_again(
    tmp_path: Path, cluster: str
) -> None:
    def down_for_seven(request: dict[str, Any], number: int) -> Reply:
        if last_text(request) == "question 7?":
            return Reply(status=500, body=b'{"error": {"message": "no tokenizer"}}')
        if last_text(request) == "question 8?":
            return Reply(status=400, body=b'{"error": {"message": "template refuses"}}')
        return answer(request, number)

    with serving(ScriptedServer(script=down_for_seven)) as server:
        run = new_run(
            tmp_path,
            questions(20),
            cluster,
            engine=endpoint(server),
            retry={"backoff_initial_s": 0.01, "max_attempts": 3},
        )
        result = run.finish()
        assert result.code == 3, result.err
        assert "failed     q00007: HTTP 500: no tokenizer" in result.out
        assert sum(last_text(request) == "question 7?" for request in server.requests) == 3
        status = run.status()
        assert (status["rows_done"], status["rows_failed"], status["rows_error"]) == (19, 1, 1)
        assert status["failed"][0]["cause"] == "HTTP 500: no tokenizer"
        server.script = answer
        server.requests.clear()
        again = run.finish()
        assert again.code == 3
        assert "event=error_rows rows=1 --retry-errors generates them again" in again.err
        # The failed row is tried again; the error row is not, unless that is asked for.
        assert [last_text(request) for request in server.requests] == ["question 7?"]
        assert run.finish("--retry-errors").code == 0
        assert last_text(server.requests[-1]) == "question 8?"
    each_once(run, 20)


@pytest.mark.slow
def test_resume_with_other_workers_shards_limit_and_order_keeps_rows(
    tmp_path: Path, cluster: str
) -> None:
    rows = questions(600)
    with serving(ScriptedServer()) as one, serving(ScriptedServer()) as two:
        run = new_run(tmp_path, rows, cluster, prompts={"limit": 250}, engine=endpoint(one))
        assert run.finish().code == 0
        assert len(run.ids()) == 250
        pq.write_table(pa.Table.from_pylist(rows[100:500][::-1]), run.prompts)
        write_run_file(
            run,
            engine=endpoint(one, two, max_running_requests=7),
            work={"shard_rows": 11},
            output={"flush_interval_s": 0.2},
        )
        assert run.finish().code == 0
        assert len(set(run.ids())) == len(run.ids()) == 500
        pq.write_table(pa.Table.from_pylist(rows[300:] + rows[:300]), run.prompts)
        assert run.finish().code == 0
        asked = collections.Counter(last_text(r) for r in one.requests + two.requests)
    each_once(run, 600)
    assert set(asked.values()) == {1}
    assert two.requests


@pytest.mark.slow
def test_changed_setting_is_refused_by_name_until_drift_is_accepted(
    tmp_path: Path, cluster: str
) -> None:
    with serving(ScriptedServer()) as server:
        run = new_run(tmp_path, questions(5), cluster, engine=endpoint(server))
        assert run.finish().code == 0
        refused = run.finish("--set", "sampling.temperature=0.9", "--set", "model=Qwen/Qwen3-4B")
        assert refused.code == 2
        assert "sampling.temperature: the run in this folder has 0.6" in refused.err
        assert "model: the run in this folder has 'Qwen/Qwen3-8B'" in refused.err
        accepted = run.finish("--set", "sampling.temperature=0.9", "--accept-drift")
        assert accepted.code == 0, accepted.err
    each_once(run, 5)
    assert "sampling.temperature" in (run.folder / "run.json").read_text()


@pytest.mark.slow
def test_second_driver_is_refused_while_the_first_lives(tmp_path: Path, cluster: str) -> None:
    slow = ScriptedServer(
        script=lambda request, n: Reply(body=answer(request, n).body, delay_s=0.3)
    )
    with serving(slow) as server:
        run = new_run(
            tmp_path, questions(600), cluster, engine=endpoint(server, max_running_requests=4)
        )
        process = run.start()
        run.wait_for_rows(4, process)
        second = run.finish()
        assert second.code == 2
        assert f"written by another driver (process {process.pid}" in second.err
        assert run.status()["state"] == "running"
        process.send_signal(signal.SIGTERM)
        stopped = ended(process)
    assert stopped.code == 128 + signal.SIGTERM, stopped.err
    assert "the same command resumes" in stopped.err
    assert run.status()["state"] == "stopped"


@pytest.mark.slow
def test_idle_worker_takes_over_rows_that_have_not_started(tmp_path: Path, cluster: str) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        return Reply(body=answer(request, number).body, delay_s=0.2)

    with serving(ScriptedServer(script=slow)) as one, serving(ScriptedServer(script=slow)) as two:
        run = new_run(
            tmp_path,
            questions(100),
            cluster,
            engine=endpoint(one, two, max_running_requests=4),
            work={"shard_rows": 100},
        )
        result = run.finish()
        assert result.code == 0, result.err
    each_once(run, 100)
    # One worker leases the only shard; by itself it would have asked its own server for all.
    assert len(one.requests) + len(two.requests) == 100
    assert len(one.requests) >= 20
    assert len(two.requests) >= 20
    # The engines' readings hold what they did up to their end, but for half a second: 10 rows.
    log = read_live_log(LocalFolder(run.folder))
    assert log is not None
    assert log.finished.total() >= 80
    assert set(log.readings) == {"w0", "w1"}


@pytest.mark.slow
def test_engine_stays_full_and_never_overfull(tmp_path: Path, cluster: str) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        return Reply(body=answer(request, number).body, delay_s=0.02)

    with serving(ScriptedServer(script=slow)) as server:
        run = new_run(
            tmp_path,
            questions(400),
            cluster,
            engine=endpoint(server, max_running_requests=8),
            work={"shard_rows": 5},
        )
        assert run.finish().code == 0
    assert server.peak_in_flight == 8


@pytest.mark.slow
def test_samples_per_prompt_have_seeds_of_their_own(tmp_path: Path, cluster: str) -> None:
    with serving(ScriptedServer()) as server:
        run = new_run(
            tmp_path, questions(10), cluster, engine=endpoint(server), samples_per_prompt=3
        )
        assert run.finish().code == 0
    keys = [(row["row_id"], row["sample_index"]) for row in run.published().to_pylist()]
    assert len(set(keys)) == len(keys) == 30
    assert len({request["seed"] for request in server.requests}) == 30


@pytest.mark.slow
def test_killed_process_of_several_endpoints_is_replaced_and_costs_no_row(tmp_path: Path) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        return Reply(body=answer(request, number).body, delay_s=0.2)

    with serving(ScriptedServer(script=slow)) as server:
        # One server under more names than the machine has CPUs: some workers share a process.
        num_workers = (os.cpu_count() or 1) + 1
        urls = [server.url.replace("/v1", f"/{number}/v1") for number in range(num_workers)]
        engine = {"kind": "endpoint", "base_urls": urls, "max_running_requests": 4}
        run = new_run(tmp_path, questions(400), engine=engine)
        process = run.start()
        run.wait_for_rows(16, process)
        workers = [p for p in below(process.pid) if "WorkerActor" in " ".join(p.cmdline())]
        assert len(workers) < num_workers
        kill(workers[0].pid)
        result = ended(process)
    assert result.code == 0, result.err
    # Each worker of the process is replaced once, whichever end is noticed first.
    replaced = re.findall(r"event=worker_ended worker=(w\d+) cause='its process died'", result.err)
    assert 1 < len(replaced) == len(set(replaced))
    each_once(run, 400)


@pytest.mark.slow
def test_lost_endpoint_gives_its_rows_to_the_other(tmp_path: Path, cluster: str) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        return Reply(body=answer(request, number).body, delay_s=0.2)

    with serving(ScriptedServer(script=slow)) as two:
        with serving(ScriptedServer(script=slow)) as one:
            run = new_run(
                tmp_path,
                questions(150),
                cluster,
                engine=endpoint(
                    one, two, max_running_requests=8, outage_patience_s=2, ready_timeout_s=1
                ),
            )
            process = run.start()
            run.wait_for_rows(16, process)
        result = ended(process)
    assert result.code == 0, result.err
    assert "event=engine_lost" in result.err
    each_once(run, 150)


@pytest.mark.slow
def test_model_that_answers_empty_stops_at_the_canary(tmp_path: Path, cluster: str) -> None:
    model_file = tmp_path / "empty.gguf"
    write_scripted_model(model_file, EMPTY_ANSWERS)
    run = new_run(
        tmp_path,
        questions(3000),
        cluster,
        engine=embedded(model_file, count=1),
        quality={"canary_rows": 60},
    )
    result = run.finish()
    assert result.code == 3, result.err
    assert "event=canary_failed" in result.err
    assert 3 <= len(run.ids()) <= 60
    table = result.out.splitlines()
    assert table[2].split() == ["empty_answer", "100.0%", "2.0%"]
    assert sum(line.startswith("example    empty_answer: q") for line in table) == 3
    assert "reasoning parser" in next(line for line in table if line.startswith("likely"))
    # The rows are those drawn from the whole input by the run's seed, however many are published
    # when the verdict comes.
    drawn = random.Random(7).sample(range(3000), 60)
    assert max(drawn) > 1500
    assert set(run.ids()) <= {f"q{number:05d}" for number in drawn}
    again = run.finish("--json")
    assert again.code == 3
    assert json.loads(again.out)["canary"]["excesses"][0]["name"] == "empty_answer"
    assert "event=engine_ready" not in again.err
    accepted = run.finish("--accept-canary", "--set", "prompts.limit=300")
    assert accepted.code == 0, accepted.err
    assert run.status()["rows_done"] == 300


@pytest.mark.slow
def test_thinking_that_is_cut_tells_the_budget_that_would_do(
    tmp_path: Path, cluster: str, model_file: Path
) -> None:
    run = new_run(
        tmp_path,
        questions(500),
        cluster,
        sampling={"max_tokens": 60},
        engine=embedded(model_file),
        quality={
            "canary_rows": 400,
            "looping": {"enabled": False},
            # Whichever limit is broken for certain first would end the canary.
            "empty_answer": {"max_share": None},
            "cut_in_answer": {"max_share": None},
        },
    )
    result = run.finish()
    assert result.code == 3, result.err
    assert "cut_in_thinking" in result.out
    said = next(line for line in result.out.splitlines() if "max_tokens is too small" in line)
    budget = int(
        re.findall(r"an estimated ([\d,]+) tokens suffice for 95%", said)[0].replace(",", "")
    )
    lengths = scripted_lengths(2000)
    share_held = sum(length <= budget for length in lengths) / len(lengths)
    assert 0.88 <= share_held <= 0.99


def scripted_lengths(num: int) -> list[int]:
    """Tokens that the scripted model takes at temperature 0.6 when nothing cuts it."""
    chance = random.Random(1)
    lengths = []
    for _ in range(num):
        word, length = "\n", 0
        while word != END:
            nexts = [(then, share ** (1 / 0.6)) for first, then, share in SCRIPT if first == word]
            word = chance.choices(*zip(*nexts, strict=True))[0]
            length += 1
        lengths.append(length)
    return lengths


@pytest.mark.slow
def test_engine_that_turns_to_garbage_is_drained_and_the_run_ends_clean(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        return Reply(body=answer(request, number).body, delay_s=0.02)

    def turns_to_garbage(request: dict[str, Any], number: int) -> Reply:
        if number < 100:
            return slow(request, number)
        return Reply(body=completion_body("!" * 800, reasoning_content="!" * 800), delay_s=0.02)

    good, bad = ScriptedServer(script=slow), ScriptedServer(script=turns_to_garbage)
    third = ScriptedServer(script=slow)
    with serving(good), serving(third) as other, serving(bad), receiving() as hook:
        hook.codes = [503, 500]
        monkeypatch.setenv("HOOK", hook.url)
        run = new_run(
            tmp_path,
            questions(2000),
            cluster,
            events={"webhook_env": "HOOK"},
            engine=endpoint(good, other, bad, max_running_requests=4),
            quality={"canary_rows": 50, "window_rows": 100},
            output={"flush_interval_s": 4},
        )
        result = run.finish()
        assert result.code == 0, result.err
        assert "event=canary_passed rows=50" in result.err
        drained = [line for line in result.err.splitlines() if "event=engine_drained" in line]
        assert len(drained) == 1
        assert "worker=w2" in drained[0]
        assert "looping in" in drained[0]
        asked_before = len(bad.requests)
        assert asked_before < 1000
        each_once(run, 2000)
        flagged = [row for row in run.published().to_pylist() if row["flags"]]
        assert {row["worker_id"] for row in flagged} <= {"w2"}
        assert len(flagged) < 400
        assert [notice["event"] for notice in hook.got] == ["engine_drained", "run_done"]
        assert (hook.got[0]["worker"], hook.got[1]["rows_done"]) == ("w2", 2000)
        page = (run.folder / "report.html").read_text()
        assert '<span data-figure="status.rows_done">2,000</span>' in page
        assert 'class="state done"' in page
        assert "looping in" in page
        assert hook.url.partition("key=")[2] not in result.err + page


@pytest.mark.slow
def test_rays_metrics_page_has_the_runs_figures(tmp_path: Path, head: Head) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        is_last = last_text(request).endswith(" 29?")
        return replace(answer(request, number), delay_s=30.0 if is_last else 0.0)

    with serving(ScriptedServer(script=slow)) as server:
        run = new_run(tmp_path, questions(30), head.address, engine=endpoint(server))
        process = run.start()
        found: dict[str, float] = {}

        # These are told as they happen, and none of them happens here.
        silent = {f"ray_regenerate_{name}_total" for name in ("flags", "retries", "restarts")}

        def has_all() -> bool:
            found.update(scraped(head.metrics_port, run))
            at_last = found.get("ray_regenerate_in_flight"), found.get("ray_regenerate_rows_open")
            return (at_last == (1, 1) and EXPORTED - silent <= found.keys()) or (
                process.poll() is not None
            )

        wait_until(has_all)
        assert process.poll() is None, ended(process)
        process.terminate()
        ended(process)
    assert found.keys() <= EXPORTED
    assert found["ray_regenerate_rows_total"] == 29


def scraped(port: int, run: Run) -> dict[str, float]:
    """Sums by name of the samples of one run."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return {}
    record = run.folder / "run.json"
    run_id = json.loads(record.read_text())["run_id"] if record.exists() else "?"
    sums: collections.Counter[str] = collections.Counter()
    for line in lines:
        if f'run="{run_id}"' in line:
            sums[line.partition("{")[0]] += float(line.rpartition(" ")[2])  # type: ignore[assignment]
    return dict(sums)


def test_no_engine_at_all_ends_with_its_cause(tmp_path: Path, cluster: str) -> None:
    run = new_run(
        tmp_path,
        questions(3),
        cluster,
        engine={"kind": "endpoint", "base_urls": ["http://127.0.0.1:9/v1"], "ready_timeout_s": 1},
    )
    result = run.finish()
    assert result.code == 2
    assert "http://127.0.0.1:9/v1 does not answer" in result.err.splitlines()[-1]


@pytest.mark.slow
def test_broken_file_in_the_data_folder_is_left_out_and_reported(
    tmp_path: Path, cluster: str
) -> None:
    with serving(ScriptedServer()) as server:
        run = new_run(
            tmp_path, questions(40), cluster, prompts={"limit": 20}, engine=endpoint(server)
        )
        assert run.finish().code == 0
        part = next((run.folder / "data").glob("*.parquet"))
        shutil.copy(part, part.with_name("copy.parquet"))
        (run.folder / "data" / "notes.txt").write_text("hello")
        part.write_bytes(part.read_bytes()[:-100])
        write_run_file(run, engine=endpoint(server))
        result = run.finish()
        assert result.code == 0, result.err
    assert "event=mended" in result.err
    each_once(run, 40)
    assert {file.suffix for file in (run.folder / "data").iterdir()} == {".parquet"}


def test_private_ray_is_small_and_unreachable_and_ends_with_a_killed_driver(
    tmp_path: Path, model_file: Path
) -> None:
    run = new_run(tmp_path, questions(3000), engine=embedded(model_file))
    of_that_name = tmp_path / "elsewhere" / "pipeline" / "__init__.py"
    of_that_name.parent.mkdir(parents=True)
    of_that_name.write_text("raise RuntimeError('a package of the user, not ours')")
    process = start_job(run.run_file, folder=tmp_path / "elsewhere")
    run.wait_for_rows(50, process)
    commands = [" ".join(p.cmdline()) for p in below(process.pid)]
    unused = ("dashboard.py", "DashboardAgent", "RuntimeEnvAgent", "monitor.py")
    assert not [c for c in commands if any(name in c.partition(" --")[0] for name in unused)]
    assert listening_ips(process.pid) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    # Ray's own agents notice after a minute; what is ours is gone in seconds.
    ours = ("WorkerActor", "Coordinator", "guard.py", "embedded_server.py")

    def of_ours() -> list[psutil.Process]:
        return [
            p for p in below(process.pid) if any(name in " ".join(p.cmdline()) for name in ours)
        ]

    # On a busy machine the second engine comes up after the first rows.
    wait_until(lambda: len(of_ours()) == 7)
    family = of_ours()
    kill(process.pid)
    process.communicate()
    wait_until(
        lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    )


def listening_ips(pid: int) -> set[str]:
    """Return the addresses at which a process and those below it accept connections."""
    processes = [psutil.Process(pid), *below(pid)]
    sockets = [socket for process in processes for socket in process.net_connections("tcp")]
    found = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    assert found
    return found


def test_signal_while_prompts_are_read_gives_the_folder_free(tmp_path: Path) -> None:
    engine = {"kind": "endpoint", "base_urls": ["http://127.0.0.1:9/v1"]}
    run = new_run(tmp_path, questions(300_000), engine=engine)
    process = run.start()
    wait_until(lambda: (run.folder / "driver.json").exists())
    process.send_signal(signal.SIGINT)
    result = ended(process)
    assert result.code == 128 + signal.SIGINT
    assert "Traceback" not in result.err
    assert not (run.folder / "driver.json").exists()
