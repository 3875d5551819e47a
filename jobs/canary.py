"""The canary's findings as a table for people and as JSON."""

from dataclasses import asdict

from pipeline.canary import MEAN_TOKENS, Excess
from pipeline.diagnosis import Diagnosis, Example

_BELOW = " " * 11


def as_json(found: Diagnosis) -> dict[str, object]:
    return {"canary": asdict(found)}


def text(found: Diagnosis) -> str:
    lines = [f"canary     stopped the run after {found.num_rows:,} rows"]
    lines += [f"{_BELOW}{'limit':30} {'found':>10} {'allowed':>10}"]
    lines += [_row(excess) for excess in found.excesses]
    for name, examples in found.examples.items():
        for example in examples:
            lines += _example(name, example)
    lines += [f"likely     {cause}" for cause in found.causes]
    lines.append(
        "next       mend the cause, then: another output.folder for other settings; the same "
        "command with\n"
        f"{_BELOW}--retry-flagged where the engines alone were mended; --accept-canary to go on "
        "as it is"
    )
    return "\n".join(lines)


def _row(excess: Excess) -> str:
    if excess.name == MEAN_TOKENS:
        return f"{_BELOW}{excess.name:30} {excess.found:>10,.0f} {excess.limit:>10,.0f}"
    return f"{_BELOW}{excess.name:30} {excess.found:>10.1%} {excess.limit:>10.1%}"


def _example(name: str, example: Example) -> list[str]:
    return [
        f"example    {name}: {example.row_id}",
        f"{_BELOW}asked:    {example.question!r}",
        f"{_BELOW}thinking: {example.reasoning!r}",
        f"{_BELOW}answer:   {example.answer!r}",
    ]
