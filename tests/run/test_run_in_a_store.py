"""A whole run with its prompts and its output folder in an object store, killed and resumed."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jobs import export, report, status
from pipeline.dataset.run_record import read_manifest
from pipeline.store.bucket import open_folder
from pipeline.store.object_store import place
from tests.fakes.output_folder import table_of
from tests.fakes.running import ended, kill, questions, start_job, wait_until
from tests.fakes.scripted_model import write_scripted_model

pytestmark = [pytest.mark.ray, pytest.mark.engine]

NUM_ROWS = 300


@pytest.mark.slow
def test_killed_run_in_a_store_is_resumed_and_exported(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = open_folder(place(bucket, "in")), open_folder(place(bucket, "run"))
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(questions(NUM_ROWS)), buffer)
    prompts.write_whole("prompts.parquet", buffer.getvalue().to_pybytes())
    write_scripted_model(tmp_path / "scripted.gguf")
    run_file = tmp_path / "run.yaml"
    values = {
        "prompts": {"path": prompts.where, "id_column": "id", "keep_columns": ["category"]},
        "model": "Qwen/Qwen3-8B",
        "sampling": {"max_tokens": 60},
        "engine": {"kind": "embedded", "count": 1, "model_file": str(tmp_path / "scripted.gguf")},
        "output": {"folder": output.where, "flush_interval_s": 0.5},
        "quality": {"canary_rows": 0, "window_rows": 0},
    }
    run_file.write_text(yaml.safe_dump(values))
    process = start_job(run_file)
    wait_until(lambda: bool(read_manifest(output).parts) or process.poll() is not None)
    kill(process.pid)
    assert ended(process).code == -9
    parts = read_manifest(output).parts
    assert 0 < sum(part.num_rows for part in parts.values()) < NUM_ROWS
    resumed = ended(start_job(run_file))
    assert resumed.code == 0, resumed.err
    rows = [row for name in output.names("data") for row in table_of(output, name).to_pylist()]
    assert sorted(row["row_id"] for row in rows) == [row["id"] for row in questions(NUM_ROWS)]
    assert {row["category"] for row in rows} == {"c0", "c1", "c2"}
    assert output.names("staging") == []
    assert b"model" in output.read("logs/engine-0.log").lower()

    assert status.main([output.where, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["rows_done"]) == ("done", NUM_ROWS)
    assert report.main([output.where]) == 0
    assert capsys.readouterr().out.strip() == output.place("report.html")
    assert b"<html" in output.read("report.html")
    exported = place(bucket, "export")
    assert export.main([output.where, "--to", exported, "--scratch", str(tmp_path)]) == 0
    dest = open_folder(exported)
    with dest.open_input("data/train-00000.parquet") as file:
        kept = pq.read_table(file)["row_id"].to_pylist()
    dropped = [json.loads(line)["row_id"] for line in dest.read_lines("dropped.jsonl")]
    assert sorted(kept + dropped) == [row["id"] for row in questions(NUM_ROWS)]
    assert kept == sorted(kept), "in the order of the input"


def test_run_whose_bucket_is_not_there_says_so(bucket: str, tmp_path: Path) -> None:
    folder = bucket.replace("s3://sets/", "s3://nowhere/")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        yaml.safe_dump(
            {
                "prompts": {"path": str(tmp_path / "p.jsonl")},
                "model": "Qwen/Qwen3-8B",
                "engine": {"kind": "endpoint", "base_urls": ["http://127.0.0.1:1/v1"]},
                "output": {"folder": folder},
            }
        )
    )
    refused = ended(start_job(run_file))
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.strip() == f"{folder}: there is no bucket 'nowhere'"
