"""Precision and recall of each quality flag on the labelled set.

usage: python -m tests.scores.score_quality [--errors]
"""

import argparse
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.quality.flags import FLAGS, LanguageOf, turn_flags
from pipeline.quality.languages import language_detector
from schemas.completion import Turn
from schemas.config.quality import QualityConfig
from tests.scores.make_quality_set import LabelledRow, read_labelled_rows

ALL_ON = QualityConfig.model_validate(
    {"refusal": {"enabled": True}, "wrong_language": {"enabled": True}}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of one flag on one half of the set."""

    positives: int
    precision: float
    recall: float


def has_detector() -> bool:
    return importlib.util.find_spec("py3langid") is not None


def detector() -> LanguageOf | None:
    return language_detector() if has_detector() else None


def found_flags(row: LabelledRow, language_of: LanguageOf | None) -> tuple[str, ...]:
    turn = Turn(
        reasoning_text=row.reasoning,
        answer_text=row.answer,
        finish_reason="length" if row.finish_reason == "length" else "stop",
        prompt_tokens=None,
        completion_tokens=None,
        reasoning_tokens=None,
        prompt_token_ids=None,
        completion_token_ids=None,
        generation_boundary=None,
        duration_s=0.0,
    )
    return turn_flags(
        turn,
        question=row.question,
        thinking=row.thinking,
        quality=ALL_ON,
        language_of=language_of,
    )


def scores(pairs: Iterable[tuple[LabelledRow, tuple[str, ...]]]) -> dict[str, Score]:
    right, wrong, missed = Counter[str](), Counter[str](), Counter[str]()
    for row, found in pairs:
        right.update(set(found) & set(row.flags))
        wrong.update(set(found) - set(row.flags))
        missed.update(set(row.flags) - set(found))
    return {
        flag: Score(
            positives=right[flag] + missed[flag],
            precision=right[flag] / max(1, right[flag] + wrong[flag]),
            recall=right[flag] / max(1, right[flag] + missed[flag]),
        )
        for flag in FLAGS
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.scores.score_quality", description=__doc__
    )
    parser.add_argument("--errors", action="store_true", help="show the rows that are misjudged")
    arguments = parser.parse_args(argv)
    language_of = detector()
    pairs = [(row, found_flags(row, language_of)) for row in read_labelled_rows()]
    for half in ("tuned", "held_out"):
        chosen = [pair for pair in pairs if pair[0].half == half]
        num_good = sum(not row.flags for row, _ in chosen)
        print(f"{half}: {len(chosen)} rows, {num_good} of them good")
        for flag, score in scores(chosen).items():
            note = "" if flag != "wrong_language" or language_of else "   py3langid is missing"
            print(
                f"  {flag:28} {score.positives:4} rows   precision {score.precision:.2f}   "
                f"recall {score.recall:.2f}{note}"
            )
    if arguments.errors:
        for row, found in pairs:
            if set(found) != set(row.flags):
                print(f"{row.half} {row.kind}: expected {row.flags}, found {found}")
                print(f"   Q {row.question[:80]!r} A {row.answer[:160]!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
