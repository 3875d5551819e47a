"""Launch, step-down and supervision with a real process, through the real worker."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.ladder import Again
from pipeline.engines.launch import LaunchHistory, server_figures
from pipeline.engines.remedies import Step
from pipeline.engines.served import ServedEngine
from pipeline.errors import EngineError
from pipeline.planner.sglang.failures import Cause
from pipeline.store.folder import LocalFolder
from schemas.config.run_file import RunFile
from tests.fakes.desk import (
    each_once,
    prompts_of,
    published_rows,
)
from tests.fakes.engine_site import MODEL, STANDIN, MakeSite

pytestmark = [pytest.mark.engine]


def test_what_the_run_file_leaves_open_is_planned_and_the_engines_figure_is_kept(
    site: MakeSite,
) -> None:
    at = site(prompts_of(40), {}, flags=["--reasoning-parser", "qwen3"])
    at.run()
    each_once(at.book, 40)
    (line,) = at.starts()
    assert "--reasoning-parser qwen3" in line
    assert "--mem-fraction-static 0." in line
    assert "--enable-metrics" in line
    assert "--host 127.0.0.1" in line
    # The stand-in's own memory model gives fewer than were asked for: its figure is followed.
    capped = at.logged("requests_capped")
    assert len(capped) == 1
    effective = int(capped[0].rpartition("=")[2])
    assert at.engine.max_running_requests == effective
    row = published_rows(at.book)["q000"]
    assert "--mem-fraction-static" in str(row["plan"])
    assert row["engine_release"] == "sglang 0.5.23"
    assert at.engine.card == "RTX PRO 6000 Blackwell"


def test_engine_gets_no_pythonpath_and_only_what_is_passed(
    site: MakeSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OTHER_SECRET", "s")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    seen = tmp_path / "seen"
    script = tmp_path / "engine.sh"
    script.write_text(f'#!/bin/sh\nenv > {seen}\nexec {sys.executable} -I {STANDIN} "$@"\n')
    script.chmod(0o755)
    at = site(prompts_of(2), {}, command=[str(script)], pass_env=["HF_TOKEN", "NCCL_*"])
    at.run()
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert {"HF_TOKEN", "NCCL_DEBUG", "PATH", "CUDA_DEVICE_ORDER"} <= names
    assert not {"PYTHONPATH", "OTHER_SECRET", "GUARD_SECRET"} & names
    assert "hf_secret" not in at.folder.path("logs/engine-0.log").read_text()


def test_key_of_the_engine_stands_in_no_log(site: MakeSite) -> None:
    at = site(prompts_of(2), {})
    at.run()
    key = at.starts()[0].partition("--api-key ")[2].split()[0]
    log = at.folder.path("logs/engine-0.log").read_text()
    assert log.startswith("--- launch ")
    assert key not in log
    assert len(key) >= 24
    assert key.isalnum(), "a dash at its beginning would be taken for a flag"


def test_first_launch_measures_for_the_next(site: MakeSite) -> None:
    # The stand-in's weights are 4 GiB more than the planner's figure: beyond its uncertainty.
    at = site(prompts_of(4), {"weights_gib": 55.0})
    at.run()
    off = at.logged("plan_off")
    assert any("weights_gib" in line and "55.00" in line for line in off)
    (kept,) = at.folder.names("calibrations")
    assert json.loads(at.folder.read(f"calibrations/{kept}"))["weights_bytes"] == 55 * 2**30
    again = site(prompts_of(4), {"weights_gib": 55.0})
    again.run()
    assert not again.logged("plan_off"), "told once for a model, card and release"
    fractions = [line.partition("--mem-fraction-static ")[2][:4] for line in at.starts()]
    assert len(fractions) == 2


PLANNED = "--mem-fraction-static 0.85"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"at": "capture", "as": "capture", "times": 1}, "graph_capture"),
        ({"at": "draft", "as": "oom", "times": 1}, "draft_weights"),
        ({"at": "pool", "as": "RuntimeError: Not enough memory. Please try to increase "
          "--mem-fraction-static.", "times": 1}, "pool"),
    ],
)  # fmt: skip
def test_start_that_runs_out_of_memory_steps_down_and_runs(
    site: MakeSite, fault: dict[str, Any], kind: str, old: bool
) -> None:
    mtp = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    flags = [*PLANNED.split(), *mtp.split(), "--speculative-num-draft-tokens", "4"]
    at = site(prompts_of(6), {"fail": fault, "old": old, "release": "0.5.23"}, flags=flags)
    at.run()
    each_once(at.book, 6)
    starts = at.starts()
    # An engine older than it says it is may refuse the flag of the first step.
    assert 2 <= len(starts) <= 3
    step = at.logged("step_down")[0]
    assert f"cause={kind}" in step
    assert "price=" in step
    # What finally ran is what each row says, and none that failed before.
    ran = str(published_rows(at.book)["q000"]["plan"])
    assert ran in starts[-1]
    assert not any(ran in line for line in starts[:-1])


def test_model_of_memory_that_differs_from_the_planners_is_met_by_stepping(
    site: MakeSite,
) -> None:
    # Graphs that need 14 GiB, which no plan foresees: several steps down until they fit.
    at = site(prompts_of(4), {"graphs_gib": 14.0})
    at.run()
    each_once(at.book, 4)
    assert len(at.logged("step_down")) >= 1
    lines = [line.partition("--api-key ")[2].partition(" ")[2] for line in at.starts()]
    assert len(set(lines)) == len(lines), "no configuration twice"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("launch_server.py: error: unrecognized arguments: --no-such-flag", "flag"),
        ("OSError: x is not a local folder and is not a valid model identifier", "model_missing"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("RuntimeError: CUDA error: no kernel image is available for execution", "kernel"),
    ],
)
def test_what_the_user_alone_can_mend_ends_the_worker_after_one_start(
    site: MakeSite, words: str, cause: str
) -> None:
    at = site(prompts_of(3), {"fail": {"at": "start", "as": words}})
    with pytest.raises(EngineError) as raised:
        at.run()
    assert "\n" not in str(raised.value)
    assert f"cause={cause}" in at.logged("given_up")[0]
    assert len(at.starts()) == 1


def test_taken_port_is_nobodys_fault_and_another_is_tried(site: MakeSite) -> None:
    fault = {"at": "start", "as": "OSError: [Errno 98] address already in use", "times": 2}
    at = site(prompts_of(3), {"fail": fault})
    at.run()
    each_once(at.book, 3)
    ports = [line.partition("--port ")[2].split()[0] for line in at.starts()]
    assert len(set(ports)) == 3


def test_silent_start_is_given_up_by_its_counters(site: MakeSite) -> None:
    at = site(prompts_of(1), {"silent": True}, start_silence_s=0.4)
    began_s = time.monotonic()
    with pytest.raises(EngineError, match="no sign of life"):
        at.run()
    assert time.monotonic() - began_s < 30
    assert len(at.starts()) == 4, "once, and again as often as a stuck engine is tried"


def test_scheduler_that_dies_alone_costs_its_requests_and_nothing_else(site: MakeSite) -> None:
    at = site(prompts_of(60), {"die_after": 20, "fault_starts": 1, "linger_s": 0.5})
    at.run()
    each_once(at.book, 60)
    assert len(at.starts()) == 2
    assert at.logged("start_again")[0].startswith("event=start_again cause=killed")


def test_engine_that_hangs_behind_a_healthy_page_is_started_again(site: MakeSite) -> None:
    at = site(prompts_of(60), {"hang_after": 20, "fault_starts": 1}, hang_timeout_s=1.0)
    at.run()
    each_once(at.book, 60)
    assert "hung: no token for" in at.book.lost[0]
    assert len(at.starts()) == 2


def test_memory_that_runs_out_while_serving_steps_down(site: MakeSite) -> None:
    # Out of memory above 12 at once. No row is to blame: the configuration is.
    at = site(prompts_of(40), {"oom_above": 12, "slow_s": 0.4}, max_deaths_in_flight=50)
    at.run()
    each_once(at.book, 40)
    steps = at.logged("step_down")
    assert steps
    assert all("cause=runtime" in line for line in steps)
    lines = [line.partition("--api-key ")[2].partition(" ")[2] for line in at.starts()]
    assert len(set(lines)) == len(lines), "no configuration twice"


def test_fault_of_speculation_is_met_once_more_and_then_without_it(site: MakeSite) -> None:
    # Ten rows finish before each crash: that an engine works meanwhile is no reason to go on.
    standin = {"mtp_fault_after": 10}
    mtp = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    at = site(
        prompts_of(60),
        standin,
        flags=[*mtp.split(), "--speculative-num-draft-tokens", "4"],
        max_deaths_in_flight=50,
    )
    at.run()
    each_once(at.book, 60)
    assert [line.partition(" wait")[0] for line in at.logged("start_again")] == [
        "event=start_again cause=speculation"
    ]
    (step,) = at.logged("step_down")
    assert "--speculative-algorithm EAGLE → off" in step
    assert "as planned" in step
    assert ["--speculative-algorithm" in start for start in at.starts()] == [True, True, False]


def test_leak_is_met_by_a_restart(site: MakeSite) -> None:
    # 400 MiB an answer: the headroom is gone after some thirty.
    at = site(prompts_of(60), {"leak_mib": 400, "fault_starts": 1})
    at.run()
    each_once(at.book, 60)
    assert len(at.starts()) == 2


def test_poison_prompt_kills_three_engines_and_ends_as_an_error_row(site: MakeSite) -> None:
    at = site(
        prompts_of(20),
        {"kill_on": "question 7.0", "linger_s": 0.05},
        plan="off",
        max_deaths_in_flight=2,
        # So few that each suspect goes alone.
        max_running_requests=8,
    )
    at.run()
    each_once(at.book, 20)
    errors = [row for row in published_rows(at.book).values() if row["status"] == "error"]
    assert [(row["row_id"], row["error_kind"]) for row in errors] == [("q007", "engine_killed")]
    assert len(at.starts()) == 4


def test_starts_on_one_node_wait_for_the_first(site: MakeSite) -> None:
    # Two engines of one model: the second begins when the first has fetched and compiled all.
    at = site(prompts_of(1), {"load_s": 0.5})
    second = ServedEngine(
        config=at.config,
        worker_number=1,
        log_path=at.folder.path("logs/engine-1.log"),
        log=at.events.append,
    )

    async def start_both() -> list[float]:
        ready_at_s: list[float] = []

        async def timed(engine: ServedEngine) -> None:
            await engine.start()
            ready_at_s.append(time.time())

        await asyncio.gather(timed(at.engine), timed(second))
        await asyncio.gather(at.engine.stop(), second.stop())
        return ready_at_s

    ready_at_s = asyncio.run(start_both())
    # The stand-in notes its start before it loads; 0.1 s for the first's last steps.
    assert at.started_at_s()[1] > min(ready_at_s) - 0.1


def test_flag_that_sglang_never_had_stays_on_the_line_as_it_was_given(tmp_path: Path) -> None:
    given = ["--no-such-flag", '{"a": 1}', "--trust-remote-code", "--mem-fraction-static", "0.8"]
    config = RunFile.model_validate(
        {
            "prompts": {"path": "unused"},
            "model": MODEL,
            "output": {"folder": str(tmp_path)},
            "engine": {"kind": "sglang", "command": ["c"], "flags": given},
            "hardware": [{"gpu": "RTX PRO 6000"}],
        }
    )
    events: list[str] = []
    launch = LaunchHistory(
        config=config, folder=LocalFolder(tmp_path), log=events.append, release="0.5.12"
    )
    launch.begin(())
    words = launch.arguments()
    assert words[words.index("--no-such-flag") + 1] == '{"a": 1}'
    assert words[words.index("--mem-fraction-static") + 1] == "0.8"
    assert "--max-running-requests" in words, "what was left open is planned"
    assert any(line.startswith("event=planned gpu='RTX PRO 6000") for line in events)


def test_crash_of_hours_ago_is_forgotten_and_one_of_late_is_not(tmp_path: Path) -> None:
    cause = Cause(kind="pool_leak", stage="serving", summary="leak", evidence=())
    launch, hour_s = launch_of(tmp_path, None), 3600.0
    for at_s in (0.0, 7 * hour_s, 14 * hour_s):
        assert isinstance(launch.note_end(cause, "", now_s=at_s), Again)
        launch.note_served()
    assert isinstance(launch.note_end(cause, "", now_s=15 * hour_s), Step)


def test_engine_that_hangs_once_an_hour_gets_other_flags(tmp_path: Path) -> None:
    cause = Cause(kind="watchdog", stage="serving", summary="hung", evidence=())
    launch, answers = launch_of(tmp_path, None), []
    for hour in range(7):
        answers.append(type(launch.note_end(cause, "", now_s=3600.0 * hour)))
        launch.note_served()
    assert answers == [Again] * 6 + [Step]


def launch_of(
    folder: Path, longest: list[tuple[int, int]] | None, **changes: object
) -> LaunchHistory:
    values: dict[str, Any] = {
        "prompts": {"path": "unused"},
        "model": MODEL,
        "output": {"folder": str(folder)},
        "sampling": {"max_tokens": 28672},
        "engine": {"kind": "sglang", "command": ["c"]},
        "hardware": [{"gpu": "RTX PRO 6000"}],
        "planner": {"sglang_version": "0.5.23"},
        **changes,
    }
    config = RunFile.model_validate(values)
    launch = LaunchHistory(
        config=config, folder=LocalFolder(folder), log=print, longest_prompts=longest
    )
    launch.begin(())
    return launch


@pytest.mark.parametrize(
    ("longest", "context"),
    [
        # 1,203 + 28,672 + 1,024 for the template = 30,899: 31 times 1,024.
        ([(1, 1_203)], 31_744),
        # Two turns of 28,672 and 900 ask for more than one turn after 20,000.
        ([(1, 20_000), (2, 900)], 59_392),
        # More than the model holds, and not known: its whole context.
        ([(1, 400_000)], 262_144),
        (None, 262_144),
    ],
)
def test_context_is_what_the_longest_prompt_and_its_budget_need(
    tmp_path: Path, longest: list[tuple[int, int]] | None, context: int
) -> None:
    launch = launch_of(tmp_path, longest)
    assert launch.flags is not None
    assert launch.flags.number("context-length") == context
    assert launch.basis is not None
    assert launch.basis.least_context_tokens == (context if longest else None)


def test_context_of_the_run_file_stands_and_retries_of_cut_turns_are_reckoned_with(
    tmp_path: Path,
) -> None:
    engine = {"kind": "sglang", "command": ["c"], "context_length": 40_960}
    given = launch_of(tmp_path, [(1, 1_203)], engine=engine)
    assert given.flags is not None
    assert given.flags.number("context-length") == 40_960
    # Three tries, each twice as long: 4 times 28,672, and 2,227 beside it.
    cut = launch_of(tmp_path, [(1, 1_203)], quality={"cut_in_answer": {"policy": "retry"}})
    assert cut.flags is not None
    assert cut.flags.number("context-length") == 117_760


def test_context_grows_by_what_the_chat_template_takes(site: MakeSite) -> None:
    # The longest prompt and 4,096 need 8,192 at most; with a template of 5,000 tokens they do not
    # fit, and each row would be refused.
    at = site(prompts_of(6), {"template_tokens": 5000})
    at.engine.longest_prompts = [(1, 60)]
    at.run()
    each_once(at.book, 6)
    assert {row["status"] for row in published_rows(at.book).values()} == {"ok"}
    contexts = [line.partition("--context-length ")[2].split()[0] for line in at.starts()]
    # 60 + 4,096 + 5,000, and two words of the first question: 9 times 1,024.
    assert contexts == ["8192", "9216"]
    assert "had_tokens=8192" in at.logged("context_lengthened")[0]
    assert at.engine.context_length == 9216


@pytest.mark.parametrize(
    ("given", "has", "trial_tokens", "context"),
    [
        (None, 31_744, 20, None),
        (None, 31_744, None, None),
        # 1,203 + 28,672 + 3,000 = 32,875: 33 times 1,024.
        (None, 31_744, 3000, 33_792),
        # The run file's own stands, and comes back where a step down had cut it.
        (31_744, 31_744, 3000, None),
        (32_768, 31_744, 3000, 32_768),
        (40_960, 31_744, 3000, 33_792),
    ],
)
def test_context_is_lengthened_no_further_than_the_run_file_has_it(
    tmp_path: Path, given: int | None, has: int, trial_tokens: int | None, context: int | None
) -> None:
    engine = {"kind": "sglang", "command": ["c"], "context_length": given}
    launch = launch_of(tmp_path, [(1, 1_203)], engine=engine)
    assert launch.flags is not None
    launch.flags = launch.flags.changed({"context-length": str(has)})
    assert launch.lengthen_context(trial_tokens) == (context is not None)
    assert launch.flags.number("context-length") == (context or has)


def test_context_of_the_run_file_that_may_be_too_short_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {"kind": "sglang", "command": ["c"], "flags": ["--context-length=30720"]}
    launch_of(tmp_path, [(1, 1_000)], engine=engine)
    assert "context_short" not in capsys.readouterr().out
    launch_of(tmp_path, [(1, 17_606)], engine=engine)
    told = capsys.readouterr().out
    assert "event=context_short context_tokens=30720 enough_tokens=48128" in told


def test_launch_that_no_plan_fits_has_the_context_of_its_prompts_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 13.6 GiB of the card are left to the weights' 51: what the run file gives stands.
    engine = {"kind": "sglang", "command": ["c"], "flags": ["--mem-fraction-static=0.15"]}
    launch = launch_of(tmp_path, [(1, 1_203)], engine=engine)
    assert "event=unplanned reason='no plan fits" in capsys.readouterr().out
    assert launch.arguments() == ["--mem-fraction-static", "0.15", "--context-length", "31744"]


@pytest.mark.parametrize(
    ("engine", "info", "in_flight"),
    [
        ({}, 40, 40),
        ({"max_running_requests": 8}, 40, 8),
        ({"flags": ["--max-running-requests=24"]}, 40, 24),
        ({"flags": ["--max-running-requests=24"]}, 12, 12),
        ({}, None, 16),
    ],
)
def test_requests_in_flight_are_what_the_engine_runs_where_nobody_asks_for_fewer(
    tmp_path: Path, engine: dict[str, object], info: int | None, in_flight: int
) -> None:
    command = {"kind": "sglang", "command": ["c"], "plan": "off"}
    launch = launch_of(tmp_path, None, engine={**command, **engine})
    ranks = [{"effective_max_running_requests_per_dp": info}] if info else []
    assert launch.note_up("", {"internal_states": ranks}) == in_flight


def test_engines_own_figure_counts_all_ranks_and_an_old_release_has_its_log() -> None:
    each = {"effective_max_running_requests_per_dp": 12}
    both = server_figures({"version": "0.5.23", "internal_states": [each, each]})
    assert (both.release, both.effective_running_requests) == ("0.5.23", 24)
    old = server_figures({"max_running_requests": 48, "internal_states": [{}]})
    assert old.effective_running_requests is None
