"""Answers of the planner and the estimate that change only on purpose.

usage: python -m tests.scores.kept_answers    (`make answers`)

The file keeps what `jobs.plan --json` and `jobs.estimate --point --json` answered to questions over
cards, releases, models, layouts and formats. Whether they are right is for the scores against
public launches and readings to say; that no other change of the code moves them, for
`tests/jobs/test_kept_answers.py`. After a deliberate change, write the file anew and read its diff.
"""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "data" / "kept_answers.jsonl"
_DIGITS = 9


def answer(argv: list[str]) -> dict[str, Any]:
    """Run a command, as `jobs.plan --gpu b200 …`, and return its status and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = importlib.import_module(argv[0]).main(argv[1:])
    text = out.getvalue()
    return {
        "status": status,
        "out": rounded(json.loads(text)) if text else "",
        "err": err.getvalue(),
    }


def rounded(value: Any) -> Any:  # noqa: ANN401  # any JSON value
    """Round all numbers to nine digits: the last ones differ between machines."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return value


def kept() -> list[tuple[list[str], dict[str, Any]]]:
    """Return the questions with their answers."""
    cases = [json.loads(line) for line in FILE.read_text().splitlines()]
    return [(case["argv"], case["answer"]) for case in cases]


def main() -> int:
    """Write the answers anew and name the questions whose answers have changed."""
    cases, num_changed = [], 0
    for argv, before in kept():
        now = answer(argv)
        if now != before:
            num_changed += 1
            print(f"changed: {' '.join(argv)}")
        cases.append(json.dumps({"argv": argv, "answer": now}, ensure_ascii=False))
    FILE.write_text("\n".join(cases) + "\n")
    print(f"{num_changed} of {len(cases)} answers have changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
