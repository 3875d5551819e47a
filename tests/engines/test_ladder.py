"""The ladder after a failure: every cause, in old and new wording, with and without a plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.engines.ladder import (
    MOST_ENDS,
    MOST_STEPS,
    Again,
    Stop,
    has_ended_too_often,
    next_step,
)
from pipeline.engines.remedies import LadderBasis, Step, Tried
from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.plan import plan_launch
from pipeline.planner.sglang.calibration import calibration_of
from pipeline.planner.sglang.failures import Cause, OomFigures, failure_cause, figures
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line
from pipeline.planner.sglang.wordings import CauseKind
from schemas.plan import Calibration, LaunchPlan

LOGS = Path(__file__).parents[1] / "data" / "engine_logs"
EXCERPTS = sorted(path.stem for path in LOGS.glob("*.log"))
QWEN = "Qwen/Qwen3.6-27B"
MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)


def setting(model: str = QWEN, gpu: str = "rtx-pro-6000", **changes: object) -> LadderBasis:
    values = {"model": load_model(model), "gpu": gpu_named(gpu), "num_gpus": 1, "version": "0.5.23"}
    return LadderBasis(**values | changes)  # type: ignore[arg-type]


BLIND = LadderBasis(model=None, gpu=None, num_gpus=1, version=None)


def flags(line: str, model: str = QWEN) -> LaunchFlags:
    return parse_launch_line(["--model-path", model, *line.split()])


def tried(line: str, excerpt: str) -> Tried:
    cause = failure_cause((LOGS / f"{excerpt}.log").read_text(), status=1)
    return Tried(flags=flags(line), cause=cause)


def plan(line: LaunchFlags, on: LadderBasis) -> LaunchPlan:
    assert on.model is not None
    assert on.gpu is not None
    made = plan_launch(on.model, on.gpu, line, version=on.version)
    assert isinstance(made, LaunchPlan)
    return made


def fraction(line: LaunchFlags) -> float:
    value = line.fraction("mem-fraction-static")
    assert value is not None
    return value


# What the ladder does first about each cause, whatever the wording. The launch is Qwen3.6-27B with
# MTP on one RTX PRO 6000.
FIRST = {
    "weights": "stop",
    "draft_weights": "step",
    "pool": "step",
    "state_pool": "step",
    "graph_capture": "step",
    "runtime": "step",
    "tokens_ran_out": "again",
    "pool_leak": "again",
    "speculation": "again",
    "state_path": "again",
    "unbalanced": "again",
    "kernel": "stop",
    "gpu_fault": "again",
    "flag": "stop",
    "model_missing": "stop",
    "hub_refused": "stop",
    "hub_unreachable": "again",
    "port": "again",
    "host_memory": "again",
    "nccl": "again",
    "disk_full": "stop",
    "watchdog": "again",
    "killed": "again",
    "unknown": "again",
}


ONE_OF_EACH = [next(name for name in EXCERPTS if name.startswith(f"{kind}--")) for kind in FIRST]


@pytest.mark.parametrize(
    ("excerpt", "on"),
    [*((name, "planned") for name in EXCERPTS), *((name, "blind") for name in ONE_OF_EACH)],
)
def test_every_cause_has_its_first_answer(excerpt: str, on: str) -> None:
    line = f"--mem-fraction-static 0.85 {MTP}"
    answer = next_step((tried(line, excerpt),), setting() if on == "planned" else BLIND)
    wanted = FIRST[excerpt.partition("--")[0]]
    assert type(answer).__name__.lower() == wanted
    if isinstance(answer, Step):
        assert answer.flags.argv() != flags(line).argv()
        assert answer.change
    if isinstance(answer, Stop):
        assert "\n" not in answer.reason


@pytest.mark.parametrize("excerpt", ONE_OF_EACH)
@pytest.mark.parametrize("on", ["planned", "blind"])
def test_every_ladder_ends_and_never_tries_a_failed_configuration_twice(
    excerpt: str, on: str
) -> None:
    on_what = setting() if on == "planned" else BLIND
    so_far: tuple[Tried, ...] = (tried(f"--mem-fraction-static 0.85 {MTP}", excerpt),)
    steps = {so_far[0].flags.argv()}
    for _ in range(40):
        answer = next_step(so_far, on_what)
        if isinstance(answer, Stop):
            break
        line = so_far[-1].flags
        if isinstance(answer, Step):
            line = answer.flags
            assert line.argv() not in steps
            steps.add(line.argv())
        so_far += (Tried(flags=line, cause=so_far[-1].cause),)
    else:
        pytest.fail("the ladder has no end")
    assert len(steps) <= MOST_STEPS + 1


@pytest.mark.parametrize("kinds", [("killed", "nccl"), ("unknown", "watchdog")])
def test_causes_that_take_turns_come_to_an_end(kinds: tuple[CauseKind, ...]) -> None:
    so_far: tuple[Tried, ...] = ()
    line = flags("--mem-fraction-static 0.85")
    for number in range(40):
        kind = kinds[number % 2]
        so_far += (Tried(flags=line, cause=bare_cause(kind)),)
        answer = next_step(so_far, setting())
        if isinstance(answer, Stop):
            break
        line = answer.flags if isinstance(answer, Step) else line
    else:
        pytest.fail("the ladder has no end")
    assert len(so_far) < 14


def bare_cause(kind: CauseKind, flag: str | None = None) -> Cause:
    return Cause(kind=kind, stage="start", summary=kind, evidence=(), flag=flag)


def test_slack_failure_leaves_more_outside_the_pools_by_what_was_lacking() -> None:
    # 7.50 GiB were tried and 2.30 were free: 5.2 GiB were lacking.
    at, on = tried("--mem-fraction-static 0.90 --max-running-requests 8", RUNTIME), setting()
    answer = next_step((at,), on)
    assert isinstance(answer, Step)
    before, after = plan(at.flags, on), plan(answer.flags, on)
    assert headroom(after) - headroom(before) >= 5.2 * 2**30
    assert after.verdict == "fits"


RUNTIME = "runtime--indexer-scratch-at-prefill"


def headroom(made: LaunchPlan) -> int:
    return made.headroom_bytes - sum(item.bytes for item in made.headroom_items)


@pytest.mark.parametrize(
    ("excerpt", "unforeseen_gib"),
    # Lacking by the log, with the margin: 0.32 and 1.43 GiB. Asks that do not grow need four steps.
    [("runtime--after-six-hours", 7.5), ("graph_capture--decode-new", 10)],
)
def test_three_steps_at_most_meet_needs_that_no_plan_foresees(
    excerpt: str, unforeseen_gib: float
) -> None:
    def by_requests_and_chunk(made: LaunchPlan) -> float:
        return made.requests_at_expected_length + made.settings.chunked_prefill_size / 1e6

    on = setting(price=by_requests_and_chunk)
    line = "--mem-fraction-static 0.91 --max-running-requests 128 --disable-radix-cache"
    so_far: tuple[Tried, ...] = (tried(line, excerpt),)
    while headroom(plan(so_far[-1].flags, on)) < unforeseen_gib * 2**30:
        answer = next_step(so_far, on)
        assert isinstance(answer, Step)
        so_far += (Tried(flags=answer.flags, cause=so_far[0].cause),)
    assert len(so_far) - 1 <= 3


def test_where_no_step_grows_as_asked_the_one_with_most_room_is_taken() -> None:
    # A launch whose chunk, graphs and requests are down already: the fraction alone is left.
    line = (
        "--chunked-prefill-size 1024 --cuda-graph-max-bs-decode 8 --max-running-requests 1 "
        "--disable-radix-cache --context-length 8192 --mem-fraction-static"
    )
    so_far = tuple(tried(f"{line} {value}", RUNTIME) for value in ("0.80", "0.74", "0.66"))
    on, asked_gib = setting(), 5.2 + 0.25
    answer = next_step(so_far, on)
    assert isinstance(answer, Step)
    grown = headroom(plan(answer.flags, on)) - headroom(plan(so_far[-1].flags, on))
    assert asked_gib * 2**30 <= grown < 4 * asked_gib * 2**30


def test_pool_failure_is_answered_with_a_higher_fraction() -> None:
    answer = next_step((tried("--mem-fraction-static 0.58", "pool--not-enough-new"),), setting())
    assert isinstance(answer, Step)
    assert fraction(answer.flags) > 0.58


def test_candidate_that_loses_least_is_taken_by_the_given_price() -> None:
    # Priced by speculation alone, MTP stays on and something else gives way.
    def steps_of_speculation(made: LaunchPlan) -> float:
        return float(getattr(made.settings.speculation, "steps", 0))

    at = tried(f"--mem-fraction-static 0.90 {MTP}", "graph_capture--draft-decode")
    kept = next_step((at,), setting(price=steps_of_speculation, price_unit="steps"))
    assert isinstance(kept, Step)
    assert kept.flags.has("speculative-algorithm")
    assert kept.price == "3 → 3 steps (+0 %), as planned"
    off = next_step((at,), setting())
    assert isinstance(off, Step)
    assert not off.flags.has("speculative-algorithm")
    assert "requests at once" in off.price


def test_states_are_stored_in_bf16_only_where_that_is_allowed() -> None:
    def slots(made: LaunchPlan) -> float:
        return float(made.capacity.state_slots)

    line = "--mem-fraction-static 0.70"
    so_far: tuple[Tried, ...] = (tried(line, "state_pool--no-slots"),)
    kept = next_step(so_far, setting(price=slots))
    assert isinstance(kept, Step)
    assert not kept.flags.has("mamba-ssm-dtype")
    allowed = next_step(so_far, setting(may_change_state_dtype=True, price=slots))
    assert isinstance(allowed, Step)
    assert allowed.flags.text("mamba-ssm-dtype") == "bfloat16"


def test_without_a_plan_the_prefix_cache_goes_before_requests_where_state_slots_lack() -> None:
    # 0.97 is the highest fraction, and there is no draft to leave out.
    at = tried("--mem-fraction-static 0.97 --max-running-requests 16", "state_pool--no-slots")
    answer = next_step((at,), BLIND)
    assert isinstance(answer, Step)
    assert answer.flags.has("disable-radix-cache")
    assert answer.flags.number("max-running-requests") == 16
    after = next_step((at, Tried(flags=answer.flags, cause=at.cause)), BLIND)
    assert isinstance(after, Step)
    assert after.flags.number("max-running-requests") == 8


def test_more_cards_are_used_only_if_they_are_there() -> None:
    at = tried("", "weights--cuda-error-without-figures")
    assert isinstance(next_step((at,), setting()), Stop)
    answer = next_step((at,), setting(num_gpus=2))
    assert isinstance(answer, Step)
    assert answer.flags.text("tp-size") == "2"


def test_context_is_shortened_no_further_than_the_rows_bear() -> None:
    at = tried("--mem-fraction-static 0.90 --context-length 262144", RUNTIME)
    # As if a short context were worth all: what the rows need is kept all the same.
    on = setting(least_context_tokens=16384, price=lambda p: -float(p.settings.context_length))
    answer = next_step((at,), on)
    assert isinstance(answer, Step)
    assert answer.flags.text("context-length") == "16384"
    kept = next_step((at,), setting())
    assert isinstance(kept, Step)
    assert kept.flags.text("context-length") == "262144"
    short = tried("--mem-fraction-static 0.90 --context-length 8192", RUNTIME)
    as_given = next_step((short,), on)
    assert isinstance(as_given, Step)
    assert as_given.flags.text("context-length") == "8192"


@pytest.mark.parametrize("on", [setting(), BLIND], ids=["planned", "blind"])
def test_context_that_serves_no_row_goes_with_the_first_step(on: LadderBasis) -> None:
    at = tried("--mem-fraction-static 0.90 --context-length 262144", RUNTIME)
    answer = next_step((at,), replace(on, least_context_tokens=31744))
    assert isinstance(answer, Step)
    assert answer.flags.text("context-length") == "31744"
    assert "--context-length 262144 → 31744" in answer.change
    alone = at.flags.changed({"context-length": "31744"})
    assert answer.flags.argv() != alone.argv(), "and something else gives way too"


def test_plan_is_made_anew_with_the_figures_of_the_log() -> None:
    # The log shows 12 GiB less free than the catalogue: the same card, another tenant.
    log = "Load weight begin. avail mem=82.00 GB\nLoad weight end. avail mem=31.04 GB, "
    found = figures(log + "mem usage=50.96 GB.\n")
    assert found is not None
    measured = calibration_of(found, model=QWEN, gpu="RTX PRO 6000", release="0.5.23")
    at = tried("--mem-fraction-static 0.70", "pool--not-enough-new")
    answers = [next_step((at,), setting(), known) for known in (None, measured)]
    assert all(isinstance(answer, Step) for answer in answers)
    fractions = [fraction(answer.flags) for answer in answers if isinstance(answer, Step)]
    assert fractions[0] != fractions[1] or answers[0] != answers[1]


def test_another_process_on_the_card_is_waited_for_once_and_then_planned_around() -> None:
    at = tried("--mem-fraction-static 0.80", "unbalanced--another-process-named-by-torch")
    first = next_step((at,), setting())
    assert isinstance(first, Again)
    assert first.wait_s >= 10
    measured = Calibration(
        model=QWEN,
        gpu="RTX PRO 6000",
        release="0.5.23",
        free_before_load_bytes=70 * 2**30,
        weights_bytes=int(50.96 * 2**30),
        draft_weights_bytes=None,
        graph_bytes=None,
    )
    second = next_step((at, at), setting(), measured)
    assert isinstance(second, Step)
    raised = tried("", "unbalanced--raised")
    last = next_step((raised, raised), setting())
    assert isinstance(last, Stop)
    assert "end that process" in last.reason


def test_flag_of_the_plans_own_that_a_release_refuses_is_left_out() -> None:
    at = tried("--mamba-radix-cache-strategy extra_buffer", "flag--newer-than-the-release")
    mine = next_step((at,), setting())
    assert isinstance(mine, Step)
    assert not mine.flags.has("mamba-radix-cache-strategy")
    users = next_step((at,), setting(users_flags=frozenset({"mamba-radix-cache-strategy"})))
    assert isinstance(users, Stop)
    assert "correct engine.flags" in users.reason


def test_refused_line_that_was_killed_before_is_not_tried_again() -> None:
    # A step that only adds a flag; its engine is killed before it reads its flags, then refuses it.
    at = tried("--mem-fraction-static 0.80", RUNTIME)
    added = at.flags.changed({"disable-radix-cache": ""})
    refused = bare_cause("flag", "disable-radix-cache")
    so_far = (at, *(Tried(flags=added, cause=why) for why in (bare_cause("killed"), refused)))
    answer = next_step(so_far, setting())
    assert isinstance(answer, Step)
    assert not answer.flags.has("disable-radix-cache")


def test_flag_that_was_refused_comes_back_with_no_later_step() -> None:
    # The price calls for the flag each time, with another fraction.
    on = setting(price=lambda made: float(made.settings.disable_radix_cache))
    at = tried("--mem-fraction-static 0.80", RUNTIME)
    added = flags("--mem-fraction-static 0.74 --disable-radix-cache")
    refused = Tried(flags=added, cause=bare_cause("flag", "disable-radix-cache"))
    without = Tried(flags=added.changed({"disable-radix-cache": None}), cause=at.cause)
    answer = next_step((at, refused, without), on)
    assert isinstance(answer, Step)
    assert not answer.flags.has("disable-radix-cache")


@pytest.mark.parametrize(
    ("excerpt", "word"),
    [
        ("model_missing--no-such-folder", "correct model"),
        ("hub_refused--gated", "HF_TOKEN"),
        ("kernel--no-kernel-image", "for this card"),
        ("disk_full--download", "free space"),
        ("flag--unknown", "engine.flags"),
    ],
)
def test_what_the_user_alone_can_mend_is_said_in_one_line(excerpt: str, word: str) -> None:
    answer = next_step((tried("", excerpt),), setting())
    assert isinstance(answer, Stop)
    assert word in answer.reason


@pytest.mark.parametrize(
    ("kind", "repeats", "waits_s"),
    [
        ("port", 5, [0, 0, 0, 0, 0]),
        ("hub_unreachable", 6, [20, 40, 60, 80, 100, 120]),
        ("nccl", 2, [5, 10]),
        ("gpu_fault", 2, [5, 10]),
        ("host_memory", 1, [10]),
        ("unbalanced", 1, [15]),
        ("watchdog", 3, [1, 2, 3]),
        ("killed", 5, [1, 2, 3, 4, 5]),
        ("unknown", 1, [2]),
    ],
)
def test_same_configuration_is_started_again_so_often_and_each_wait_is_longer(
    kind: CauseKind, repeats: int, waits_s: list[float]
) -> None:
    so_far: tuple[Tried, ...] = ()
    answers: list[Step | Again | Stop] = []
    for _ in range(repeats):
        so_far += (Tried(flags=flags("--mem-fraction-static 0.8"), cause=bare_cause(kind)),)
        answers.append(next_step(so_far, BLIND))
    assert answers == [
        Again(wait_s=wait_s, reason=f"try {number}: {kind}")
        for number, wait_s in enumerate(waits_s, start=2)
    ]
    assert not isinstance(next_step((*so_far, so_far[-1]), BLIND), Again)


@pytest.mark.parametrize(
    ("kind", "line", "change"),
    [
        ("nccl", "", "--disable-custom-all-reduce off → on"),
        ("pool", "--mem-fraction-static 0.80", "--mem-fraction-static 0.80 → 0.83"),
        ("state_pool", "--mem-fraction-static 0.80", "--mem-fraction-static 0.80 → 0.83"),
        ("graph_capture", "--mem-fraction-static 0.80", "--mem-fraction-static 0.80 → 0.76"),
        ("runtime", "", "--mem-fraction-static off → 0.81"),
        ("draft_weights", "--speculative-algorithm EAGLE", "--speculative-algorithm EAGLE → off"),
        ("host_memory", "--enable-hierarchical-cache --hicache-size 9",
         "--enable-hierarchical-cache on → off, --hicache-size 9 → off"),
    ],
)  # fmt: skip
def test_usual_remedy_comes_first_where_nothing_can_be_planned(
    kind: CauseKind, line: str, change: str
) -> None:
    # As often as the cause is met by the same configuration, and once more.
    at = Tried(flags=flags(line), cause=bare_cause(kind))
    answer = next_step((at, at, at), BLIND)
    assert isinstance(answer, Step)
    assert (answer.change, answer.price) == (change, "unknown")


def test_usual_remedies_for_memory_come_in_order_until_none_is_left() -> None:
    # 0.42 - 0.04 would be below the lowest fraction.
    so_far: tuple[Tried, ...] = (
        Tried(
            flags=flags("--mem-fraction-static 0.42 --max-running-requests 3"),
            cause=bare_cause("runtime"),
        ),
    )
    changes = []
    while isinstance(answer := next_step(so_far, BLIND), Step):
        changes.append(answer.change)
        so_far += (Tried(flags=answer.flags, cause=so_far[0].cause),)
    assert changes == [
        "--cuda-graph-max-bs-decode off → 16",
        "--chunked-prefill-size off → 2048",
        "--max-running-requests 3 → 1",
    ]
    assert answer == Stop(reason="runtime; no other flags fit this card")


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("weights", "more cards per engine, or a smaller format"),
        ("draft_weights", "more cards per engine, or a smaller format"),
        ("unknown", "it came back every time"),
        ("pool_leak", "other flags did not help: use another release"),
    ],
)
def test_end_says_what_is_left_to_do(kind: CauseKind, end: str) -> None:
    at = Tried(
        flags=flags("--max-running-requests 1 --disable-radix-cache"), cause=bare_cause(kind)
    )
    assert next_step((at, at), BLIND) == Stop(reason=f"{kind}; {end}")


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("tokens_ran_out", ["requests", "mtp", "cache"]),
        ("pool_leak", ["requests", "mtp", "cache"]),
        ("speculation", ["mtp", "requests", "cache"]),
        ("state_path", ["cache", "mtp", "requests"]),
    ],
)
@pytest.mark.parametrize("on", ["planned", "blind"])
def test_crash_is_met_by_one_more_start_and_then_by_less_of_what_crashed(
    kind: CauseKind, order: list[str], on: str
) -> None:
    on_what, line = (
        setting() if on == "planned" else BLIND,
        flags(f"--max-running-requests 64 {MTP}"),
    )
    so_far: tuple[Tried, ...] = (Tried(flags=line, cause=bare_cause(kind)),)
    assert isinstance(next_step(so_far, on_what), Again)
    so_far += so_far
    for change in order:
        answer = next_step(so_far, on_what)
        assert isinstance(answer, Step)
        gone = {
            "requests": answer.flags.number("max-running-requests") == 32,
            "mtp": not answer.flags.has("speculative-algorithm"),
            "cache": answer.flags.has("disable-radix-cache"),
        }
        assert gone[change], answer.change
        assert ("as planned" in answer.price) == (on == "planned")
        so_far += (Tried(flags=answer.flags, cause=bare_cause(kind)),)


@pytest.mark.parametrize("kind", ["unknown", "watchdog", "gpu_fault", "speculation"])
def test_configuration_that_ends_too_often_is_left_whatever_it_finished(kind: CauseKind) -> None:
    at = [
        Tried(flags=flags(MTP), cause=bare_cause(kind), ended_s=3600.0 * number)
        for number in range(MOST_ENDS + 1)
    ]
    assert not has_ended_too_often(tuple(at[:-1]), now_s=at[-2].ended_s)
    # One an hour: the first of seven is six hours old, and still counts.
    assert has_ended_too_often(tuple(at), now_s=at[-1].ended_s)
    assert not has_ended_too_often(tuple(at), now_s=at[-1].ended_s + 1.0)
    assert isinstance(next_step((at[-1],), BLIND), Again)
    assert isinstance(next_step((at[-1],), BLIND, ends_too_often=True), Step)


def test_engine_that_is_killed_from_outside_keeps_its_flags() -> None:
    at = tuple(
        Tried(flags=flags(MTP), cause=bare_cause("killed"), ended_s=60.0 * number)
        for number in range(21)
    )
    assert not has_ended_too_often(at[:20], now_s=1200.0)
    assert has_ended_too_often(at, now_s=1200.0)
    answer = next_step(at[-1:], BLIND, ends_too_often=True)
    assert answer == Stop(reason="killed; 20 times in 6 hours")
    crash = replace(at[-1], cause=bare_cause("unknown"))
    assert not has_ended_too_often((*at, crash), now_s=1200.0), "kills are counted apart"


def test_ladder_ends_after_eight_other_configurations() -> None:
    so_far = tuple(
        Tried(flags=flags(f"--mem-fraction-static 0.{90 - n}"), cause=bare_cause("runtime"))
        for n in range(9)
    )
    assert isinstance(next_step(so_far[:8], BLIND), Step)
    assert next_step(so_far, BLIND) == Stop(reason="runtime; 8 other configurations were tried")


def test_two_changes_are_made_at_once_where_no_single_one_is_enough() -> None:
    # With another fraction, MTP off leaves 24.1 GiB more and a smaller chunk some 6; 27 were
    # lacking, and a margin is demanded.
    line = f"--mem-fraction-static 0.70 --max-running-requests 48 --disable-radix-cache {MTP}"
    oom = OomFigures(tried_gib=27.0, free_gib=0.0, total_gib=None, others_gib=0.0)
    cause = replace(bare_cause("runtime"), oom=oom)
    at = Tried(flags=flags(f"{line} --chunked-prefill-size 16384"), cause=cause)
    on = setting()
    answer = next_step((at,), on)
    assert isinstance(answer, Step)
    assert not answer.flags.has("speculative-algorithm")
    assert answer.flags.text("chunked-prefill-size") != "16384"
    assert headroom(plan(answer.flags, on)) - headroom(plan(at.flags, on)) >= 27.25 * 2**30
