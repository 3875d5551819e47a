"""Log excerpts of failed and of good launches, in old and new wording, to one cause each.

A file's name begins with the cause that it ends of. Figures are those of known launches.
"""

from pathlib import Path

import pytest

from pipeline.planner.sglang.failures import (
    LAUNCH_MARK,
    OomFigures,
    failure_cause,
    figures,
    last_launch,
)

LOGS = Path(__file__).parents[2] / "data" / "engine_logs"
EXCERPTS = sorted(path.stem for path in LOGS.glob("*.log"))


def excerpt(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


def test_there_are_excerpts_of_every_cause() -> None:
    assert len(EXCERPTS) >= 40
    kinds = {name.partition("--")[0] for name in EXCERPTS}
    assert len(kinds) == 24


@pytest.mark.parametrize("name", EXCERPTS)
def test_excerpt_ends_of_one_cause_and_shows_it(name: str) -> None:
    cause = failure_cause(excerpt(name), status=1)
    assert cause.kind == name.partition("--")[0]
    assert "\n" not in cause.summary
    assert 1 <= len(cause.evidence) <= 6
    assert all(len(line) <= 300 for line in cause.evidence)
    assert all(line in excerpt(name) or line.endswith("...") for line in cause.evidence)
    assert "kill_process_tree" not in " ".join(cause.evidence)


@pytest.mark.parametrize(
    ("name", "tried_gib", "free_gib", "total_gib", "others_gib"),
    [
        ("weights--hopper-bf16-before-torchao", 2.0, 1.27, 95.08, 0.0),
        ("weights--old-wording-of-torch", 0.4375, 0.0187, 79.15, 0.0),
        ("weights--small-card", 0.082, 0.0909, 31.35, 0.0),
        # In a container torch tells its own memory as that of "Process 88".
        ("weights--capacty-typo", 0.0781, 0.059, 139.72, 0.0),
        ("graph_capture--decode-new", 2.78, 1.6, 94.97, 0.0),
        ("graph_capture--old-wording", 1.24, 0.4004, 95.0, 0.0),
        ("runtime--indexer-scratch-at-prefill", 7.5, 2.3, 94.97, 0.0),
        ("runtime--old-scheduler-hit", 3.77, 3.2, 94.97, 0.0),
        ("unbalanced--another-process-named-by-torch", 2.0, 1.1, 94.97, 34.02),
    ],
)
def test_figures_of_a_failed_allocation_are_read(
    name: str, tried_gib: float, free_gib: float, total_gib: float, others_gib: float
) -> None:
    assert failure_cause(excerpt(name)).oom == OomFigures(
        tried_gib=tried_gib, free_gib=free_gib, total_gib=total_gib, others_gib=others_gib
    )


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("weights--cuda-error-without-figures", "weights"),
        ("draft_weights--before-the-pool", "draft_weights"),
        ("draft_weights--whole-model-loaded-twice", "draft_weights"),
        ("pool--allocation-of-the-pool-itself", "pools"),
        ("graph_capture--draft-decode", "capture"),
        ("runtime--after-six-hours", "serving"),
        ("killed--scheduler-killed-while-serving", "serving"),
        ("flag--renamed", "start"),
    ],
)
def test_cause_has_the_stage_of_the_launch(name: str, stage: str) -> None:
    assert failure_cause(excerpt(name)).stage == stage


def test_renamed_flag_is_told_with_the_release_that_renamed_it() -> None:
    cause = failure_cause(excerpt("flag--renamed"))
    assert cause.flag == "mamba-scheduler-strategy"
    assert "--mamba-radix-cache-strategy since SGLang 0.5.14; 0.5.21 no longer" in cause.summary
    newer = failure_cause(excerpt("flag--newer-than-the-release"))
    assert "before it is called --mamba-scheduler-strategy" in newer.summary


def test_flags_that_do_not_go_together_are_told_in_the_engines_words() -> None:
    cause = failure_cause(excerpt("flag--refused-together"))
    assert cause.flag is None
    assert "not supported together with the radix cache" in cause.summary


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("max_total_num_tokens=9, context_len=5", "ready"),
        ("The server is fired up and ready to roll!", "ready"),
        ("Decode batch, #running-req: 3", "serving"),
        ("Capture draft extend begin", "capture"),
        ("KV Cache is allocated. #tokens: 9", "pools"),
        ("Memory pool end. avail mem=1 GB", "pools"),
        ("Load weight begin. avail mem=1 GB", "weights"),
        ("something", "start"),
    ],
)
def test_line_shows_the_stage_of_its_rank(line: str, stage: str) -> None:
    assert failure_cause(f"[2026-11-12 03:14:00 TP0] {line}\n", status=1).stage == stage


def test_exit_status_decides_where_the_log_is_silent() -> None:
    log = "[2026-11-12 03:14:00] Load weight begin. avail mem=94.12 GB\n"
    killed = failure_cause(log, status=137)
    assert (killed.kind, killed.stage) == ("killed", "weights")
    assert killed.summary == "the engine exited with status 137 and logged no error"
    assert killed.evidence == (log.strip(),)
    by_kernel = failure_cause(log, status=137, kernel_kills=1)
    assert by_kernel.kind == "host_memory"
    assert by_kernel.summary == "the kernel killed the engine for host memory"
    assert failure_cause("", status=1).evidence == ()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (137, "killed"), (143, "killed"), (-9, "killed"), (-15, "killed"), (134, "gpu_fault"),
        (135, "gpu_fault"), (139, "gpu_fault"), (-6, "gpu_fault"), (-7, "gpu_fault"),
        (-11, "gpu_fault"), (0, "unknown"), (1, "unknown"), (130, "unknown"), (None, "unknown"),
    ],
)  # fmt: skip
def test_kind_of_each_exit_status(status: int | None, kind: str) -> None:
    assert failure_cause("", status=status).kind == kind


def test_silent_log_shows_its_last_lines() -> None:
    log = "one\ntwo\n\nthree\nfour\nkill_process_tree called\n" + "x" * 400
    assert failure_cause(log, status=1).evidence == ("three", "four", "x" * 297 + "...")


def test_errors_shortly_before_a_batch_of_another_rank_count() -> None:
    error = "[2026-11-12 03:14:00 TP0] NCCL error: unhandled system error\n"
    batch = "[2026-11-12 03:14:01 TP1] Decode batch, #running-req: 3, #token: 100\n"
    other = "[2026-11-12 03:14:01 TP1] something\n"
    near, far = error + other * 119 + batch, error + other * 120 + batch
    assert failure_cause(near, status=1).kind == "nccl"
    assert failure_cause(far, status=1).kind == "unknown"


def test_errors_further_back_than_any_dump_are_over() -> None:
    line = "[2026-11-12 03:14:00] something\n"
    assert failure_cause("NCCL error\n" + line * 5999, status=1).kind == "nccl"
    assert failure_cause("NCCL error\n" + line * 6000, status=1).kind == "unknown"


@pytest.mark.parametrize(
    ("free", "others", "kind"),
    [
        # 94.97 GiB x 0.88 = 83.57
        (83.5, 0.0, "unbalanced"), (83.6, 0.0, "weights"), (94.0, 0.99, "weights"),
        (94.0, 1.0, "unbalanced"),
    ],
)  # fmt: skip
def test_memory_of_other_processes_is_told_from_weights_that_are_too_large(
    free: float, others: float, kind: str
) -> None:
    log = (
        f"[2026-11-12 03:14:00 TP0] Load weight begin. avail mem={free} GB\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 94.97 GiB of which 1.00 GiB is free. "
        f"Process 7 has {others} GiB memory in use; this process has 90.00 GiB memory in use\n"
    )
    cause = failure_cause(log, status=1)
    assert cause.kind == kind
    assert cause.oom == OomFigures(tried_gib=2.0, free_gib=1.0, total_gib=94.97, others_gib=others)
    used = f", {others:g} GiB used by others" if others else ""
    assert cause.summary.endswith(f"(tried 2 GiB, 1 of 94.97 GiB free{used})")


def test_scheduler_that_the_kernel_killed_while_serving_ran_out_of_host_memory() -> None:
    log = excerpt("killed--scheduler-killed-while-serving")
    assert failure_cause(log).kind == "killed"
    assert failure_cause(log, kernel_kills=1).kind == "host_memory"


def test_long_dump_between_the_cause_and_the_end_does_not_hide_it() -> None:
    log = excerpt("runtime--after-six-hours")
    dump = "\n".join(f'  File "/x/sglang/a.py", line {n}, in forward' for n in range(2000))
    assert failure_cause(f"{log}\n{dump}\nKilled\n").kind == "runtime"


def test_trouble_that_was_survived_is_not_the_cause_of_a_later_death() -> None:
    early = "[2026-11-12 03:00:00] Port 30000 is already in use, trying port 30001\n"
    early += "ValueError: NCCL error that was caught\n"
    batch = "[2026-11-12 03:14:00] Decode batch, #running-req: 3, #token: 100\n"
    log = early + batch * 300 + "[2026-11-12 04:00:00] SIGTERM received. signum=None frame=None.\n"
    assert failure_cause(log).kind == "killed"


def test_soft_watchdog_is_no_failure() -> None:
    log = "[2026-11-12 03:14:00] Detokenizer watchdog timeout (self.watchdog_timeout=60, "
    assert failure_cause(log + "self.soft=True)\n", status=137).kind == "killed"
    assert failure_cause(log + "self.soft=False)\n", status=137).kind == "watchdog"


def test_leak_that_is_only_warned_of_is_no_cause() -> None:
    leak = "[2026-11-12 03:14:08 TP0] token_to_kv_pool_allocator memory leak detected! total=9"
    working = excerpt("pool_leak--at-idle").partition("[2026-11-12 03:14:08")[0]
    assert failure_cause(f"{working}{leak}\n", status=137).kind == "killed"


def test_path_of_a_crash_is_that_of_its_innermost_frame() -> None:
    log = excerpt("speculation--assertion")
    model = '  File "/x/sglang/srt/models/qwen3_5.py", line 9, in forward\n'
    last = log.index("AssertionError")
    # The draft's own layers, and those of the target at its verification, are below these frames.
    assert failure_cause(log[:last] + model + log[last:], status=1).kind == "speculation"
    without = "\n".join(line for line in log.splitlines() if "speculative/" not in line)
    assert failure_cause(without, status=1).kind == "unknown"


def test_name_of_a_function_is_no_part_of_the_path() -> None:
    log = excerpt("unknown--own-exception").replace("load_weights", "draft_mamba_weights")
    assert failure_cause(log, status=1).kind == "unknown"


def test_earlier_launches_in_the_same_log_are_over() -> None:
    first, second = excerpt("pool--not-enough-new"), excerpt("graph_capture--draft-decode")
    log = f"{LAUNCH_MARK}1 ---\n{first}{LAUNCH_MARK}2 ---\n{second}"
    assert last_launch(log).startswith(f"{LAUNCH_MARK}2")
    assert failure_cause(log).kind == "graph_capture"


READY = """\
[2026-11-12 03:14:00] Max running requests is reset to 48 for speculative decoding. You can override
[2026-11-12 03:14:01] Memory baseline taken. mem usage=0.00 GB
[2026-11-12 03:14:01] Load weight begin. avail mem=94.17 GB
[2026-11-12 03:14:41] Load weight end. elapsed=40.02 s, type=Qwen3_5ForConditionalGeneration, \
avail mem=43.21 GB, mem usage=50.96 GB.
[2026-11-12 03:14:41] Load weight begin. avail mem=43.21 GB
[2026-11-12 03:14:44] Load weight end. elapsed=3.11 s, type=Qwen3_5ForCausalLMMTP, \
avail mem=37.68 GB, mem usage=5.53 GB.
[2026-11-12 03:14:44] Mamba Cache is allocated. max_mamba_cache_size: 31, conv_state size: 0.09GB, \
ssm_state size: 4.50GB intermediate_ssm_state_cache size: 3.94GB
[2026-11-12 03:14:44] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 166133, \
K size: 5.07 GB, V size: 5.07 GB
[2026-11-12 03:14:45] Memory pool end. avail mem=18.90 GB
[2026-11-12 03:14:45] max_running_requests is capped to 6 by the mamba state cache (31 slots)
[2026-11-12 03:14:45] Capture target verify CUDA graph begin. backend=full, avail mem=18.80 GB
[2026-11-12 03:14:55] Capture target verify CUDA graph end. bs=[1, 2, 4, 6], elapsed=9.80 s, \
mem usage=1.20 GB, avail mem=17.60 GB.
[2026-11-12 03:14:58] Capture draft decode CUDA graph end. elapsed=1.80 s, mem usage=0.31 GB, \
avail mem=17.29 GB.
[2026-11-12 03:15:00] max_total_num_tokens=166133, chunked_prefill_size=8192, \
max_prefill_tokens=16384, max_running_requests=6, context_len=262144, available_gpu_mem=17.20 GB
[2026-11-12 03:15:04] The server is fired up and ready to roll!
"""


def test_figures_of_a_good_launch_are_read() -> None:
    found = figures(READY)
    assert found is not None
    assert (found.free_before_load_gib, found.weights_gib) == (94.17, 50.96)
    assert found.draft_weights_gib == 5.53
    assert found.graphs_gib == pytest.approx(1.51)
    assert (found.max_total_num_tokens, found.state_slots) == (166133, 31)
    assert found.max_running_requests == 6
    assert figures("no line of a launch") is None


def test_reset_to_48_is_information_and_no_failure() -> None:
    cause = failure_cause(READY, status=137)
    assert cause.kind == "killed"
    assert "reset to 48" not in cause.summary
