"""Runs inside a side environment: what aiconfigurator makes of points.

Started by `peer_estimate.py`; one JSON object of its own arguments a line on stdin, one JSON answer
a line on stdout. It is imported by name, so that this file needs none of it to be read.
"""

import importlib
import json
import logging
import sys
from typing import Any


def main() -> None:
    """Answer every line; a point that it refuses is answered with the kind of its refusal."""
    estimate = importlib.import_module("aiconfigurator.cli.api").cli_estimate
    logging.disable(logging.ERROR)
    for line in sys.stdin:
        print("PEER " + json.dumps(_answer(estimate, json.loads(line))), flush=True)


def _answer(estimate: Any, arguments: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401  # theirs
    try:
        found = estimate(**arguments)
    except Exception as error:  # noqa: BLE001  # a refusal of any kind is its answer
        return {"refused": type(error).__name__}
    return {
        "tokens_per_s_per_gpu": round(found.tokens_per_second_per_gpu, 3),
        "tpot_ms": round(found.tpot, 3),
        "tables": f"{found.backend_name} {found.backend_version}",
    }


if __name__ == "__main__":
    main()
