"""Finished run with given rows, as the coordinator leaves it."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.dataset.frozen import schema_from_text
from pipeline.dataset.parts import publish
from pipeline.run.session import SessionOptions, prepare
from pipeline.store.folder import LocalFolder
from schemas.completion import Completion, Turn
from schemas.config.run_file import RunFile
from schemas.prompt import Message
from tests.fakes.example_completion import COMPLETION, TURN
from tests.fakes.staged_part import stage_part


def published_run(
    root: Path,
    rows: Sequence[Completion],
    *,
    model: str = "m",
    carried: Sequence[str] = (),
    part_rows: int = 7,
) -> LocalFolder:
    """Publish the rows in small parts, the last ones first; the input has sample 0 of each."""
    inputs = [
        {"id": row.row_id, "prompt": "asked", **row.carried} for row in rows if not row.sample_index
    ]
    source = root / "prompts.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in inputs))
    folder = LocalFolder(root / "run")
    folder.make()
    values = {
        "prompts": {"path": str(source), "id_column": "id", "keep_columns": list(carried)},
        "model": model,
        "samples_per_prompt": 1 + max(row.sample_index for row in rows),
        "output": {"folder": str(folder.root)},
    }
    plan = prepare(
        RunFile.model_validate(values),
        folder,
        SessionOptions(),
        token="t",
        now_s=1.0,
        log=lambda line: None,
    ).plan
    backwards = list(reversed(rows))
    for start in range(0, len(rows), part_rows):
        part = stage_part(
            folder,
            f"part-{start:04d}.parquet",
            backwards[start : start + part_rows],
            run_id=plan.run_id,
            carried_schema=schema_from_text(plan.carried_schema),
            own_schema=schema_from_text(plan.own_schema),
            worker_id="w0",
        )
        publish(folder, part, now_s=2.0)
    return folder


def conversation_row(
    row_id: str, *turns: tuple[str, str | None], sample: int = 0, system: str | None = None
) -> Completion:
    """Build a row whose turns have these answers and reasonings.

    Turn n was asked `question n` and has 10 · n tokens of prompt and 5 of completion.
    """
    messages = [] if system is None else [Message(role="system", content=system)]
    made: list[Turn] = []
    for number, (answer, reasoning) in enumerate(turns, start=1):
        messages.append(Message(role="user", content=f"question {number}"))
        messages.append(Message(role="assistant", content=answer, reasoning_content=reasoning))
        made.append(
            replace(
                TURN,
                answer_text=answer,
                reasoning_text=reasoning,
                prompt_tokens=10 * number,
                completion_tokens=5,
                prompt_token_ids=array("i", range(10 * number)),
                completion_token_ids=array("i", [101, 102, 103, 104, 105]),
                generation_boundary=10 * number,
            )
        )
    return replace(
        COMPLETION,
        row_id=row_id,
        sample_index=sample,
        messages=tuple(messages),
        turns=tuple(made),
    )
