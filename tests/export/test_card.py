"""The card lists the launches, with their rows, and the engines that came up."""

from collections import Counter

from pipeline.export.card import EngineLaunch, launch_lines
from schemas.manifest import EngineRun

RELEASE = "sglang 0.5.23"
MTP_PLAN = (
    "--tp-size 2 --dp-size 4 --mem-fraction-static 0.86 --max-running-requests 48 "
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4"
)


def launch(plan: str | None, engine: str = "sglang", release: str | None = RELEASE) -> EngineLaunch:
    return EngineLaunch(engine=engine, release=release, plan=plan)


def started(worker_id: str, plan: str | None, max_running_requests: int) -> EngineRun:
    return EngineRun(
        worker_id=worker_id, engine="sglang", release=RELEASE, plan=plan,
        max_running_requests=max_running_requests, ready_at_s=5.0,
    )  # fmt: skip


def cells(lines: list[str]) -> list[list[str]]:
    rows = [line for line in lines if line.startswith("| ")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_launches_are_listed_with_their_settings_and_rows() -> None:
    rows = Counter({launch("--tp 8 --pp-size 3"): 10, launch(MTP_PLAN): 1234})
    runs = [
        started("w0", MTP_PLAN, 31),
        started("w1", MTP_PLAN, 48),
        started("w0", "--tp 8 --pp-size 3", 31),
    ]
    lines = launch_lines("a/model", rows, runs)
    assert lines[0] == "## Launches of a/model"
    assert cells(lines) == [
        [
            "1",
            "sglang",
            RELEASE,
            "2",
            "1",
            "4",
            "0.86",
            "31 to 48",
            "EAGLE, 4 drafts",
            "2",
            "1,234",
        ],
        ["2", "sglang", RELEASE, "8", "3", "1", "SGLang's own", "31", "off", "1", "10"],
    ]
    assert f"- launch 1: `{MTP_PLAN}`" in lines


def test_what_is_not_known_of_a_launch_stays_open() -> None:
    rows = Counter({launch(None, "endpoint", None): 3, launch("--tp-size x"): 2})
    assert cells(launch_lines("m", rows, [])) == [
        ["1", "endpoint", *["not known"] * 8, "3"],
        ["2", "sglang", RELEASE, *["not known"] * 7, "2"],
    ]


def test_launch_without_rows_is_listed_too() -> None:
    assert cells(launch_lines("m", Counter(), [started("w0", "--tp 1", 7)]))[0][-2:] == ["1", "0"]
    assert launch_lines("m", Counter(), []) == []


def test_long_tail_of_launches_is_summed() -> None:
    rows = Counter({launch(f"--max-running-requests {n}"): n for n in range(1, 26)})
    lines = launch_lines("m", rows, [])
    # 25, 24 ... 6 are listed; 5 + 4 + 3 + 2 + 1 are 15.
    assert [row[7] for row in cells(lines)] == [f"{n}" for n in range(25, 5, -1)]
    assert "- 5 other launches: 15 rows" in lines


def test_names_of_a_server_stay_in_their_cell_and_are_no_markup() -> None:
    hostile = "v1 | 9,999 |\n# Title\n[click](http://x) <img src=x> `code` \x1b[31m\u202e"
    lines = launch_lines("m", Counter({launch(None, release=hostile): 3}), [])
    (row,) = [line for line in lines if line.startswith("| 1 |")]
    unescaped = row.replace("\\|", "")
    assert unescaped.count("|") == 12
    assert row.isprintable()
    assert "<img" not in row
    assert "\\[click\\]" in row
    assert "\\`code\\`" in row
    assert not any(line.startswith("# ") for line in lines)


def test_long_name_of_a_server_is_capped() -> None:
    lines = launch_lines("m" * 5_000, Counter({launch(None, release="v" * 1_000_000): 3}), [])
    assert all(len(line) < 400 for line in lines)
    assert any("v…" in line for line in lines)


def test_plan_with_backticks_is_code_all_the_same() -> None:
    lines = launch_lines("m", Counter({launch("--model-path a`b``c"): 1}), [])
    assert "- launch 1: ``` --model-path a`b``c ```" in lines
