"""No flag is ignored in silence: it has no effect, is modelled, is a doubt, or is unknown."""

import json
import re
from pathlib import Path

import pytest

from pipeline.planner.sglang.effects import MODELLED, doubts_of_flags, refusal_of_unknown
from pipeline.planner.sglang.flags import known_by_release, parse_launch_line
from pipeline.planner.sglang.releases import rules_for

PLANNER = Path(__file__).parents[3] / "pipeline" / "planner"
DATA = PLANNER / "sglang" / "data"


def doubts(line: str, version: str = "0.5.23") -> list[str]:
    return list(doubts_of_flags(parse_launch_line(line.split()), rules_for(version)[0]))


def refusal(line: str, version: str | None = "0.5.23") -> str:
    return refusal_of_unknown(parse_launch_line(line.split()), rules_for(version)[0])


def test_flags_that_are_called_modelled_are_read_by_the_planner() -> None:
    files = [file for file in PLANNER.rglob("*.py") if file.name not in ("flags.py", "effects.py")]
    read = "".join(file.read_text() for file in files)
    phases = {f"cuda-graph-{key}-{phase}" for phase in ("decode", "prefill")
              for key in ("backend", "bs", "max-bs")}  # fmt: skip
    phases |= {"cuda-graph-config", "disable-cuda-graph", "disable-prefill-cuda-graph",
               "disable-decode-cuda-graph"}  # fmt: skip
    assert {name for name in MODELLED - phases if f'"{name}"' not in read} == set()


def test_lists_name_flags_that_exist() -> None:
    known = frozenset().union(*known_by_release().values())
    names = json.loads((DATA / "sglang_flags.json").read_text())
    everything = known.union(*(names[arity] for arity in ("no_value", "one_value", "many_values")))
    lists = json.loads((DATA / "flag_effects.json").read_text())
    patterns = [*lists["no_effect"], *lists["not_modelled"]]
    exact = [pattern for pattern in patterns if not re.search(r"[*?]", pattern)]
    assert set(exact) <= everything


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--enable-eplb", ["--enable-eplb changes memory (redundant experts"]),
        ("--kt-method x --offload-group-size 2", ["--kt-method changes", "--offload-group-size"]),
        # nobody has said what it does
        ("--enable-dsa-fused-indexer", ["its effect is not known here"]),
        ("--stream-interval 5 --log-level debug --api-key k", []),
        ("--tp 2 --mem-fraction-static 0.8", []),
    ],
)
def test_flag_that_is_not_modelled_is_a_doubt(line: str, words: list[str]) -> None:
    found = doubts(line)
    assert len(found) == len(words)
    assert all(word in one for word, one in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("line", "version", "unknown"),
    [
        ("--no-such-flag 3", "0.5.23", "--no-such-flag 3"),
        ("--no-such-flag 3", None, "--no-such-flag 3"),
        ("--no-such-flag 3", "lmsysorg/sglang:v0.5.18-cu129", "--no-such-flag 3"),
        # it left between 0.5.18 and 0.5.23, where nobody looked
        ("--stream-output", "0.5.23", "--stream-output"),
        ("--stream-output", "0.5.20", ""),
        ("--stream-output", "0.5.18", ""),
        ("--stream-output", None, ""),
        # an older name of a flag that there is
        ("--cuda-graph-max-bs 8", "0.5.23", ""),
        # builds that may have flags of their own, releases beyond those read, and a date
        ("--no-such-flag 3", "0.5.16 + patches", ""),
        ("--no-such-flag 3", "0.5.99", ""),
        ("--no-such-flag 3", "0.4.6", ""),
        ("--no-such-flag 3", "nightly-20260901", ""),
    ],
)
def test_flag_that_the_parser_lacks_is_refused_where_that_is_certain(
    line: str, version: str | None, unknown: str
) -> None:
    expected = f"error: unrecognized arguments: {unknown}" if unknown else ""
    assert refusal(line, version) == expected
