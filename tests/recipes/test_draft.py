"""A first run file: read as its owner means it, and accepted by the dry run as it is."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from jobs import init, regenerate
from pipeline.recipes.schema import SCHEMA_FILE, schema_text
from schemas.config.reader import read_run_file
from schemas.config.run_file import RunFile

RUNS = Path(__file__).resolve().parents[2] / "jobs" / "runs"
ROWS: list[dict[str, object]] = [
    {"id": f"r{number}", "question": f"What is {number} + {number}?"} for number in range(3)
]
TURNS = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]
SHAREGPT = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}]


def json_lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_folder(path: Path, kind: str) -> None:
    if kind == "a saved data set":
        Dataset.from_list(ROWS).save_to_disk(str(path))
        return
    path.mkdir()
    (path / "b.JSONL").write_text(json_lines(ROWS))
    if kind == "a mixed folder":
        pq.write_table(pa.Table.from_pylist(ROWS), path / "a.parquet")
        (path / "c.csv").write_text("id,question\nx,Why?\n")
    else:
        (path / "part-1.jsonl").write_text(json_lines(ROWS))


def write_input(folder: Path, kind: str) -> Path:
    """Write prompts as users have them; the name says the kind."""
    path = folder / kind
    if kind == "messages.parquet":
        pq.write_table(pa.Table.from_pylist([{"messages": TURNS}] * 2), path)
    elif kind == "lines.jsonl.gz":
        path.write_bytes(gzip.compress(json_lines([{"prompt": "Hello?"}]).encode()))
    elif kind == "sharegpt.json":
        path.write_text(json.dumps([{"id": "a", "conversations": SHAREGPT}]))
    elif kind == "alpaca.json":
        path.write_text(json.dumps([{"instruction": "Add", "input": "1 2", "output": "3"}]))
    elif kind == "questions.csv":
        path.write_text("id,Question\n1,Hello?\n2,Why?\n")
    elif kind == "one column.jsonl":
        path.write_text(json_lines([{"q": "Hello?"}]))
    elif kind == "stream.arrow":
        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    elif kind.startswith("a "):
        write_folder(path, kind)
    else:
        path.write_text(json_lines([{"conversation": TURNS, "model": "vicuna"}]))
    return path


KINDS = {
    "messages.parquet": "column: messages",
    "lines.jsonl.gz": "column: prompt",
    "sharegpt.json": "column: conversations",
    "alpaca.json": r'template: "{instruction}\n\n{input}"',
    "questions.csv": "column: Question",
    "one column.jsonl": "column: q",
    "a folder": "column: question",
    "chat.jsonl": "column: conversation",
    "stream.arrow": "column: question",
    "a saved data set": "column: question",
    "a mixed folder": "column: question",
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafted_run_file_is_accepted_by_the_dry_run(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = write_input(tmp_path, kind)
    assert init.main([str(prompts), "--model", "Qwen/Qwen3-8B", "--gpu", "b200:2"]) == 0
    text = (tmp_path / "run.yaml").read_text()
    assert f"\n  {KINDS[kind]}\n" in text
    assert text.startswith("# yaml-language-server: $schema=regenerate.schema.json\n")
    assert len(text.splitlines()) <= 25
    capsys.readouterr()
    assert regenerate.main(["run.yaml", "--dry-run"]) == 0, capsys.readouterr().err


def test_flags_are_those_of_the_best_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = write_input(tmp_path, "messages.parquet")
    assert init.main([str(prompts), "--model", "Qwen/Qwen3.6-27B", "--gpu", "rtx-pro-6000:4"]) == 0
    engine = read_run_file(Path("run.yaml")).engine
    assert engine.kind == "sglang"
    assert (engine.count or 0) * engine.gpus_per_worker == 4
    assert any(flag.startswith("--mem-fraction-static=0.9") for flag in engine.flags)
    assert not any(flag.startswith("--context-length") for flag in engine.flags)


def test_schema_beside_the_run_file_describes_every_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init.main([str(write_input(tmp_path, "chat.jsonl"))]) == 0
    schema = json.loads((tmp_path / "regenerate.schema.json").read_text())
    assert set(schema["properties"]) == set(RunFile.model_fields)
    patience = schema["$defs"]["EngineConfig"]["properties"]["outage_patience_s"]
    assert "endpoint" in patience["description"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such.jsonl"], "no file or folder no-such.jsonl"),
        (["someone/some-data"], "someone/some-data is not a file or folder here and could not"),
        (["chat.jsonl", "--gpu", "b200:0"], "--gpu b200:0: expected CARD or CARD:COUNT"),
        (["chat.jsonl", "--gpu", "b200", "--endpoint", "http://x/v1"], "--gpu: not with"),
        (["chat.jsonl", "--to", "chat.jsonl"], "chat.jsonl exists; choose another"),
    ],
)
def test_mistake_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_input(tmp_path, "chat.jsonl")
    before = (tmp_path / "chat.jsonl").read_text()
    assert init.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert (tmp_path / "chat.jsonl").read_text() == before


@pytest.mark.parametrize("run_file", sorted(RUNS.glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_run_file_names_the_schema(run_file: Path) -> None:
    first = run_file.read_text().splitlines()[0]
    assert first == f"# yaml-language-server: $schema={SCHEMA_FILE}"


def test_schema_of_the_ready_run_files_is_the_present_one() -> None:
    assert (RUNS / SCHEMA_FILE).read_text() == schema_text(), "write it anew: make schema"
