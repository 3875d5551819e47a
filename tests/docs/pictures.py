"""Draw `docs/plan.svg` from the planner's own figures.

usage: python -m tests.docs.pictures
"""

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from jobs import plan

PLAN_PICTURE = Path(__file__).resolve().parents[2] / "docs" / "plan.svg"

_LAUNCH = (
    "--gpu rtx-pro-6000 --sglang-version 0.5.23 --json -- --model-path Qwen/Qwen3.6-27B "
    "--mem-fraction-static 0.80"
)
_MTP = (
    " --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
# Parts of the bar, with their colours; all others are the headroom that the launch uses.
_PARTS = {
    "weights": "#4c78a8",
    "draft weights": "#9ecae9",
    "state pool": "#f58518",
    "verify states": "#ffbf79",
    "KV pool": "#54a24b",
    "graphs, activations": "#b79a20",
    "left over": "#e8e8e8",
}
_LEFT, _WIDTH, _BAR = 120, 700, 46


def plan_picture() -> str:
    """Return the picture of one card without and with MTP."""
    plans = [("MTP off", _plan(_LAUNCH)), ("MTP on", _plan(_LAUNCH + _MTP))]
    bars = [
        line
        for number, (name, found) in enumerate(plans)
        for line in _bar(name, found, 40 + number * 92)
    ]
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 270" '
        'font-family="system-ui, sans-serif" font-size="14" role="img">\n'
        "<title>Memory of one RTX PRO 6000 with Qwen3.6-27B, without and with MTP</title>\n"
        '<rect width="860" height="270" fill="#ffffff"/>\n'
        '<text x="120" y="24" fill="#555">Qwen3.6-27B on one RTX PRO 6000, GiB of memory</text>'
    )
    return "\n".join([head, *bars, *_legend(), "</svg>", ""])


def _plan(line: str) -> Any:  # noqa: ANN401 - JSON
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert plan.main(line.split()) == 0
    return json.loads(printed.getvalue())


def _parts(budget: Mapping[str, float]) -> dict[str, float]:
    sizes = {name: budget.get(name, 0.0) for name in _PARTS}
    sizes["graphs, activations"] = sum(budget.values()) - sum(sizes.values())
    return sizes


def _bar(name: str, found: Any, top: int) -> Iterator[str]:  # noqa: ANN401 - JSON
    sizes = _parts(found["budget_gib"])
    scale, x = _WIDTH / sum(sizes.values()), float(_LEFT)
    yield f'<text x="{_LEFT - 12}" y="{top + 29}" text-anchor="end">{name}</text>'
    for part, gib in sizes.items():
        width = gib * scale
        yield (
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" '
            f'fill="{_PARTS[part]}"><title>{part}: {gib:.2f} GiB</title></rect>'
        )
        if width > 28:
            ink = "#fff" if part == "weights" else "#1c1c1c"
            yield (
                f'<text x="{x + width / 2:.1f}" y="{top + 29}" text-anchor="middle" '
                f'font-size="12" fill="{ink}">{gib:.1f}</text>'
            )
        x += width
    running, slots = found["max_running_requests"], found["state_slots"]
    yield (
        f'<text x="{_LEFT}" y="{top + _BAR + 18}" font-size="13" fill="#555">'
        f"{slots} state slots run {running} requests at once</text>"
    )


def _legend() -> Iterator[str]:
    x = 20
    for part, colour in _PARTS.items():
        yield f'<rect x="{x}" y="238" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17}" y="249" font-size="12" fill="#1c1c1c">{part}</text>'
        x += 17 + 7 * len(part) + 22


if __name__ == "__main__":
    PLAN_PICTURE.write_text(plan_picture())
