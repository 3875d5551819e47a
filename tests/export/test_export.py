"""An export holds every row once or names why not, in order, in size, and after any break."""

import hashlib
import itertools
import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

from jobs.export import main
from pipeline.dataset.frozen import schema_from_text
from pipeline.dataset.parts import publish
from pipeline.dataset.run_record import check_has_run, list_in_manifest, read_manifest
from pipeline.export import buckets as export_buckets
from pipeline.export import export
from pipeline.export.index import KEPT, ExportSource, Index, index_rows
from pipeline.export.rows import form_of
from pipeline.run.session import SessionOptions, prepare
from pipeline.store.folder import LocalFolder
from schemas.completion import Completion
from schemas.config.run_file import RunFile
from schemas.export import ExportOptions
from schemas.manifest import EngineRun
from schemas.prompt import Message
from tests.fakes.staged_part import stage_part

Build = Callable[..., Completion]
NUM_ROWS = 120
PLAN = "--tp-size 2 --mem-fraction-static 0.86"


@pytest.fixture
def run(tmp_path: Path, completion: Build) -> LocalFolder:
    """A finished run of 120 rows: published out of order, in parts, some of them bad."""
    return finished_run(tmp_path, completion)


def finished_run(
    tmp_path: Path,
    build: Build,
    *,
    num_published: int = NUM_ROWS,
    kept_column: str = "level",
    num_samples: int = 1,
    num_turns: int = 1,
) -> LocalFolder:
    source = tmp_path / "p.jsonl"
    lines = [
        {"id": f"r{n:03d}", "prompt": f"question {n}", kept_column: n} for n in range(NUM_ROWS)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    values = {
        "prompts": {"path": str(source), "id_column": "id", "keep_columns": [kept_column]},
        "samples_per_prompt": num_samples,
        "model": "m",
        "output": {"folder": str(folder.root)},
    }
    prepared = prepare(
        RunFile.model_validate(values),
        folder,
        SessionOptions(),
        token="t",
        now_s=1.0,
        log=lambda line: None,
    )
    numbers = list(range(NUM_ROWS))
    random.Random(2).shuffle(numbers)
    for start in range(0, num_published, 17):
        made = [row(build, n) for n in numbers[start : min(start + 17, num_published)]]
        rows = [
            replace(
                one,
                sample_index=sample,
                turns=one.turns * num_turns,
                carried={kept_column: one.carried["level"]},
            )
            for sample in reversed(range(num_samples))
            for one in made
        ]
        part = stage_part(
            folder,
            f"part-{start:03d}.parquet",
            rows,
            run_id=prepared.plan.run_id,
            carried_schema=schema_from_text(prepared.plan.carried_schema),
            worker_id="w0",
        )
        publish(folder, part, now_s=2.0)
    return folder


def row(build: Build, number: int) -> Completion:
    """Row 7 is an error, 11 loops, 13 is without thinking, which is kept."""
    row_id, question = f"r{number:03d}", Message(role="user", content=f"question {number}")
    if number == 7:
        return build(row_id, error=True, messages=(question,), carried={"level": number})
    good = build(row_id)
    turn = replace(
        good.turns[0],
        answer_text=f"answer {number}",
        prompt_token_ids=array("i", [1, 2, 3]),
        completion_token_ids=array("i", range(100, 100 + number % 5 + 1)),
        completion_tokens=number % 5 + 1,
        generation_boundary=3,
    )
    answer = Message(role="assistant", content=f"answer {number}", reasoning_content="hm")
    flags: dict[int, tuple[str, ...]] = {11: ("looping",), 13: ("empty_reasoning",)}
    return replace(
        good,
        messages=(question, answer),
        turns=(turn,),
        plan=PLAN,
        flags=flags.get(number, ()),  # type: ignore[arg-type]
        carried={"level": number},
    )


def kept() -> list[str]:
    return [f"r{n:03d}" for n in range(NUM_ROWS) if n not in (7, 11)]


def exported(folder: LocalFolder, dest: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each split in order, as files hold them."""
    assert main([str(folder.root), "--to", str(dest), *options]) == 0
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((dest / "data").glob("*.parquet")):
        rows.setdefault(file.name.partition("-")[0], []).extend(pq.read_table(file).to_pylist())
    return rows


def loaded(dest: Path, cache: Path) -> "datasets.DatasetDict":
    return datasets.load_dataset(str(dest), cache_dir=str(cache))


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few rows, three of them open at once: several passes over the parts."""
    monkeypatch.setattr("pipeline.export.buckets._BUCKET_BYTES", 1_000)
    monkeypatch.setattr("pipeline.export.buckets._MAX_OPEN_BUCKETS", 3)
    monkeypatch.setattr("pipeline.export.buckets._BATCH_ROWS", 5)
    monkeypatch.setattr("pipeline.export.buckets._CHUNK_BYTES", 500)


# -- rows


def test_rows_go_out_in_the_order_of_the_input(run: LocalFolder, tmp_path: Path) -> None:
    rows = exported(run, tmp_path / "d")["train"]
    assert [row["row_id"] for row in rows] == kept()
    assert rows[0]["messages"] == [
        {"role": "user", "content": "question 0", "reasoning_content": None},
        {"role": "assistant", "content": "answer 0", "reasoning_content": "hm"},
    ]
    assert [row["level"] for row in rows[:3]] == [0, 1, 2]


def test_dropped_rows_are_named_with_their_reasons(run: LocalFolder, tmp_path: Path) -> None:
    exported(run, tmp_path / "d")
    lines = (tmp_path / "d" / "dropped.jsonl").read_text().splitlines()
    dropped = {line["row_id"]: line["reason"] for line in map(json.loads, lines)}
    assert dropped == {"r007": "error_row", "r011": "looping"}
    record = json.loads((tmp_path / "d" / "export.json").read_text())
    assert (record["rows_published"], record["rows_exported"]) == (120, 118)
    assert record["dropped"] == {"error_row": 1, "looping": 1}


def test_flags_to_drop_by_can_be_given(run: LocalFolder, tmp_path: Path) -> None:
    rows = exported(run, tmp_path / "d", "--drop", "empty_reasoning")["train"]
    assert {"r011"} <= {row["row_id"] for row in rows}
    assert "r013" not in {row["row_id"] for row in rows}


@pytest.mark.usefixtures("small_buckets")
def test_many_buckets_and_passes_give_the_same_rows(run: LocalFolder, tmp_path: Path) -> None:
    assert [row["row_id"] for row in exported(run, tmp_path / "d")["train"]] == kept()


def test_shuffle_is_the_same_for_a_seed_and_another_for_another(
    run: LocalFolder, tmp_path: Path
) -> None:
    orders = [
        [row["row_id"] for row in exported(run, tmp_path / name, "--shuffle", seed)["train"]]
        for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == kept()
    assert orders[0] != kept()


def test_split_hangs_on_the_row_id_alone(run: LocalFolder, tmp_path: Path) -> None:
    options = ("--split", "train=0.8", "--split", "test=0.2")
    plain = exported(run, tmp_path / "a", *options)
    shuffled = exported(run, tmp_path / "b", *options, "--shuffle", "3", "--drop", "")
    ids = {name: {row["row_id"] for row in rows} for name, rows in plain.items()}
    assert sorted(ids["train"] | ids["test"]) == kept()
    # 24 of 120 are expected; three standard deviations are 13.
    assert 11 <= len(ids["test"]) <= 37
    assert ids["test"] <= {row["row_id"] for row in shuffled["test"]}


def test_files_are_of_the_size_that_is_asked(
    run: LocalFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.export.buckets._BUCKET_BYTES", 500)
    monkeypatch.setattr("jobs.export.MIB", 3_000)
    exported(run, tmp_path / "d", "--file-mib", "1")
    sizes = [file.stat().st_size for file in sorted((tmp_path / "d" / "data").iterdir())]
    assert len(sizes) >= 3
    # A bucket of rows and the footer, some 2 KB of schema, come on top.
    assert all(3_000 <= size < 9_000 for size in sizes[:-1])


# -- forms


def test_conversations_have_sharegpts_names_and_the_thinking_inside(
    run: LocalFolder, tmp_path: Path
) -> None:
    rows = exported(run, tmp_path / "d", "--format", "conversations")["train"]
    assert rows[2]["conversations"] == [
        {"from": "human", "value": "question 2"},
        {"from": "gpt", "value": "<think>\nhm\n</think>\n\nanswer 2"},
    ]


@pytest.mark.parametrize(
    ("reasoning", "content"),
    [("inline", "<think>\nhm\n</think>\n\nanswer 2"), ("drop", "answer 2")],
)
def test_reasoning_goes_where_it_is_asked_to(
    run: LocalFolder, tmp_path: Path, reasoning: str, content: str
) -> None:
    rows = exported(run, tmp_path / "d", "--reasoning", reasoning)["train"]
    assert rows[2]["messages"][1] == {"role": "assistant", "content": content}


def test_token_rows_are_masked_up_to_the_boundary(run: LocalFolder, tmp_path: Path) -> None:
    rows = exported(run, tmp_path / "d", "--format", "tokens")["train"]
    assert [row["row_id"] for row in rows] == kept()
    assert rows[2]["input_ids"] == [1, 2, 3, 100, 101, 102]
    assert rows[2]["loss_mask"] == [0, 0, 0, 1, 1, 1]
    assert rows[2]["turn_index"] == 0


def test_rows_without_token_ids_or_with_another_boundary_are_dropped_and_counted(
    tmp_path: Path, completion: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = row

    def faulty(build: Build, number: int) -> Completion:
        made = usual(build, number)
        changes: dict[int, dict[str, Any]] = {
            20: {"completion_token_ids": None},
            21: {"generation_boundary": 2},
            22: {"completion_tokens": 99},
        }
        if number not in changes:
            return made
        return replace(made, turns=(replace(made.turns[0], **changes[number]),))

    monkeypatch.setitem(globals(), "row", faulty)
    folder = finished_run(tmp_path, completion)
    exported(folder, tmp_path / "d", "--format", "tokens")
    record = json.loads((tmp_path / "d" / "export.json").read_text())
    assert record["dropped"] == {
        "error_row": 1,
        "looping": 1,
        "no_token_ids": 1,
        "boundary_is_not_the_prompts_end": 1,
        "as_many_ids_as_tokens_are_missing": 1,
    }
    assert record["rows_exported"] == 115


def test_token_rows_are_held_against_the_text_with_a_tokenizer(
    tmp_path: Path, completion: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = row

    def as_its_ids_say(build: Build, number: int) -> Completion:
        made = usual(build, number)
        if number in (7, 30):
            return made
        words = " ".join(f"w{n}" for n in made.turns[0].completion_token_ids or ())
        return replace(made, turns=(replace(made.turns[0], answer_text=f"{words}\n"),))

    monkeypatch.setitem(globals(), "row", as_its_ids_say)
    words = {f"w{n}": n for n in range(200)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    folder = finished_run(tmp_path, completion)
    exported(folder, tmp_path / "d", "--format", "tokens", "--tokenizer", str(tmp_path))
    record = json.loads((tmp_path / "d" / "export.json").read_text())
    assert record["dropped"] == {"error_row": 1, "looping": 1, "tokens_are_not_the_text": 1}


def test_export_of_nothing_is_refused(
    tmp_path: Path, completion: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished_run(tmp_path, completion, num_published=0)
    assert main([str(folder.root), "--to", str(tmp_path / "d"), "--partial"]) == 2
    assert "no row is left to export" in capsys.readouterr().err
    assert not list(folder.root.glob(".export-*"))


def test_whole_rows_keep_every_column(run: LocalFolder, tmp_path: Path) -> None:
    rows = exported(run, tmp_path / "d", "--format", "rows")["train"]
    assert rows[3]["turns"][0]["completion_token_ids"] == [100, 101, 102, 103]
    assert rows[3]["sampling"]["temperature"] == 0.6


def test_samples_and_turns_of_a_row_stay_together_and_in_order(
    tmp_path: Path, completion: Build
) -> None:
    folder = finished_run(tmp_path, completion, num_samples=2, num_turns=2)
    options = ("--format", "tokens", "--split", "a=0.5", "--split", "b=0.5")
    splits = exported(folder, tmp_path / "d", *options)
    keys = {
        name: [(row["row_id"], row["sample_index"], row["turn_index"]) for row in rows]
        for name, rows in splits.items()
    }
    assert all(found == sorted(found) for found in keys.values())
    whole = [(row_id, sample, turn) for row_id in kept() for sample in (0, 1) for turn in (0, 1)]
    assert sorted(keys["a"] + keys["b"]) == whole
    assert not {key[0] for key in keys["a"]} & {key[0] for key in keys["b"]}


@pytest.mark.parametrize(
    ("name", "format_", "out"),
    [
        ("rank", "messages", "rank"),
        ("turn_index", "tokens", "kept_turn_index"),
        ("conversations", "conversations", "kept_conversations"),
    ],
)
def test_kept_column_may_have_any_name(
    tmp_path: Path, completion: Build, name: str, format_: str, out: str
) -> None:
    folder = finished_run(tmp_path, completion, kept_column=name)
    rows = exported(folder, tmp_path / "d", "--format", format_)["train"]
    assert [row["row_id"] for row in rows] == kept()
    assert [row[out] for row in rows] == [int(row_id[1:]) for row_id in kept()]


# -- what it is for


def test_data_set_loads_with_its_splits_and_its_card(run: LocalFolder, tmp_path: Path) -> None:
    exported(run, tmp_path / "d", "--split", "train=0.8", "--split", "test=0.2")
    found = loaded(tmp_path / "d", tmp_path / "cache")
    assert set(found) == {"train", "test"}
    assert found["train"].num_rows + found["test"].num_rows == 118
    card = (tmp_path / "d" / "README.md").read_text()
    for said in (
        "# license:",
        "| looping | 1 |",
        "| stop | 119 |",
        "`sampling.temperature`: `0.6`",
    ):
        assert said in card


def test_card_tells_the_launches_of_the_manifest_and_the_rows(
    run: LocalFolder, tmp_path: Path
) -> None:
    started = EngineRun(
        worker_id="w0", engine="fake", release="1", plan=PLAN, max_running_requests=31,
        ready_at_s=2.0,
    )  # fmt: skip
    list_in_manifest(run, started)
    exported(run, tmp_path / "d")
    card = (tmp_path / "d" / "README.md").read_text()
    assert "| 1 | fake | 1 | 2 | 1 | 1 | 0.86 | 31 | off | 1 | 119 |" in card
    # The error row was never asked.
    assert f"| 2 | fake | 1 | {'not known | ' * 7}1 |" in card
    assert f"- launch 1: `{PLAN}`" in card


def test_empty_split_is_left_out_of_the_card(run: LocalFolder, tmp_path: Path) -> None:
    # YAML takes a bare `on` for a truth value.
    exported(run, tmp_path / "d", "--split", "on=0.9999999", "--split", "rare=0.0000001")
    assert set(loaded(tmp_path / "d", tmp_path / "cache")) == {"on"}


# -- refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--split", "train=0.5"], "the shares sum to 0.5; expected 1"),
        (["--split", "train"], "--split train: expected a new NAME=SHARE"),
        (["--split", "a=0.5", "--split", "a=0.5"], "--split a=0.5: expected a new"),
        (["--drop", "loping"], "--drop: unknown flag 'loping'"),
        (["--file-mib", "0"], "--file-mib: found 0; expected 1 or more"),
        (["--format", "tokens", "--tokenizer", "no/where"], "--tokenizer no/where: found no token"),
        (
            ["--format", "tokens", "--reasoning", "drop"],
            "not go with --format tokens; expected none",
        ),
        (
            ["--format", "conversations", "--reasoning", "apart"],
            "--reasoning apart: does not go with --format conversations; expected inline or drop",
        ),
    ],
)
def test_bad_option_is_refused_in_one_line(
    run: LocalFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    assert main([str(run.root), "--to", str(tmp_path / "d"), *options]) == 2
    err = capsys.readouterr().err.strip()
    assert said in err
    assert "\n" not in err


@pytest.mark.parametrize("option", ["--to", "--scratch"])
def test_place_that_cannot_be_written_to_is_told_in_one_line(
    run: LocalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    # A folder below /proc cannot be made, by root either.
    assert main([str(run.root), "--to", str(tmp_path / "d"), option, "/proc/none"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("--to ")
    assert "No such file or directory: '/proc/none" in said


@pytest.mark.parametrize(("token", "name"), [("", "me/data"), ("hf_x", "me/data/more")])
def test_push_that_cannot_be_is_told_before_anything_is_exported(
    run: LocalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, token: str, name: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    assert main([str(run.root), "--to", str(tmp_path / "d"), "--push-to-hub", name]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("--push-to-hub: ")
    assert not (tmp_path / "d").exists()


def test_unfinished_run_is_refused_unless_partial_is_asked(
    tmp_path: Path, completion: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished_run(tmp_path, completion, num_published=50)
    assert main([str(folder.root), "--to", str(tmp_path / "d")]) == 2
    assert "70 of 120 rows are open" in capsys.readouterr().err
    rows = exported(folder, tmp_path / "d", "--partial")["train"]
    assert [row["row_id"] for row in rows] == sorted(row["row_id"] for row in rows)
    assert 48 <= len(rows) <= 50


def test_folder_that_holds_something_else_is_refused(
    run: LocalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "d"
    dest.mkdir()
    (dest / "thesis.txt").write_text("all of it")
    assert main([str(run.root), "--to", str(dest)]) == 2
    assert "found thesis.txt there" in capsys.readouterr().err
    exported(run, tmp_path / "e")
    assert main([str(run.root), "--to", str(tmp_path / "e"), "--shuffle", "1"]) == 2
    assert "contains another export" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["zeroed", "cut", "gone"])
def test_damaged_part_is_named_with_what_to_do(
    run: LocalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    part = sorted((run.root / "data").iterdir())[2]
    data = part.read_bytes()
    if harm == "zeroed":
        # The size stays, and so does the footer.
        part.write_bytes(data[:4] + bytes(len(data) // 2) + data[4 + len(data) // 2 :])
    elif harm == "cut":
        part.write_bytes(data[:-9])
    else:
        part.unlink()
    assert main([str(run.root), "--to", str(tmp_path / "d")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"{part}: is {'missing' if harm == 'gone' else 'damaged'}")
    assert "run the same `jobs.regenerate` again, which does its 17 rows again" in said
    assert str(tmp_path / "d") not in said


# -- buckets


def test_size_of_a_row_is_estimated_from_kept_rows_alone(run: LocalFolder) -> None:
    record = check_has_run(run)
    parts = tuple(read_manifest(run).parts.values())
    source = ExportSource(
        folder=run,
        run=record,
        parts=parts,
        form=form_of(ExportOptions(), record.columns, ["level"], None),
    )
    index = index_rows(source, ExportOptions())
    kept_rows = next(source.batches(NUM_ROWS))[1]
    # Only row 5 of the second part is kept.
    index.reasons = array("B", [1] * NUM_ROWS)
    index.reasons[parts[0].num_rows + 5] = KEPT
    (second,) = source.batches_of(parts[1], NUM_ROWS)
    exported_row = source.form.convert(second.take([5]))[0]
    assert export_buckets.estimated_row_bytes(source, index) == exported_row.nbytes
    index.reasons = array("B", [1] * NUM_ROWS)
    assert export_buckets.estimated_row_bytes(source, index) == 1
    assert kept_rows.num_rows == parts[0].num_rows


def test_buckets_are_runs_of_one_split() -> None:
    index = Index(
        ids=None, samples=None, reasons=array("B"), reason_names=[], split_of=array("B"),
        split_starts=[0, 5, 7],
    )  # fmt: skip
    options = ExportOptions(splits=(("a", 0.7), ("b", 0.3)), file_bytes=250)
    # 250 bytes are two rows of 100 bytes.
    buckets = export_buckets.cut_buckets(index, options, 100)
    ranks = [(one.number, one.split, one.first_rank, one.stop_rank) for one in buckets]
    assert ranks == [(0, "a", 0, 2), (1, "a", 2, 4), (2, "a", 4, 5), (3, "b", 5, 7)]
    # A row larger than a file has a bucket of its own.
    assert len(export_buckets.cut_buckets(index, options, 1_000)) == 7


@pytest.mark.usefixtures("small_buckets")
def test_progress_is_logged_by_groups_of_buckets(
    run: LocalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(run, tmp_path / "d")
    lines = [line.partition(" INFO export ")[2] for line in capsys.readouterr().err.splitlines()]
    scattered = [line for line in lines if line.startswith("event=scattered")]
    total = int(scattered[0].rpartition("=")[2])
    assert total > 3
    steps = [*range(3, total, 3), total]
    assert scattered == [f"event=scattered buckets={n} of={total}" for n in steps]
    assert 'event=indexed rows=120 dropped={"looping":1,"error_row":1}' in lines


# -- breaks


def test_same_export_again_has_nothing_to_do(
    run: LocalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(run, tmp_path / "d")
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "d").rglob("*")}
    # An end between the record and the scratch's removal leaves it behind.
    name = hashlib.sha256(str(tmp_path / "d").encode()).hexdigest()[:12]
    scratch = run.root / f".export-{name}"
    scratch.mkdir()
    exported(run, tmp_path / "d")
    assert not scratch.exists()
    assert "event=nothing_to_do" in capsys.readouterr().err
    assert stamps == {file: file.stat().st_mtime_ns for file in (tmp_path / "d").rglob("*")}


def breaking(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> Iterator[None]:
    """Interrupt the export before the `at`-th call of one of its functions."""
    modules = [module for module in (export, export_buckets) if hasattr(module, name)]
    usual, calls = getattr(modules[0], name), itertools.count()

    def call(*arguments: object, **options: object) -> object:
        if next(calls) == at:
            raise KeyboardInterrupt
        return usual(*arguments, **options)

    with monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(module, name, call)
        yield


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("name", "at"),
    [
        *(("_by_bucket", at) for at in (0, 1, 9)),
        *(("replacing", at) for at in (0, 1, 2, 3)),
        *(("_write_file", at) for at in (0, 1, 3)),
        *(("sorted_bucket", at) for at in (0, 1, 5)),
        *(("remove_bucket", at) for at in (0, 2, 3)),
        ("commit", 0),
    ],
)
def test_export_that_breaks_off_anywhere_goes_on_and_is_the_same(
    run: LocalFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    monkeypatch.setattr("jobs.export.MIB", 3_000)
    options = ("--file-mib", "1", "--format", "tokens", "--split", "a=0.6", "--split", "b=0.4")
    whole = exported(run, tmp_path / "whole", *options)
    for _ in breaking(monkeypatch, name, at):
        with pytest.raises(KeyboardInterrupt):
            main([str(run.root), "--to", str(tmp_path / "d"), *options])
        assert not (tmp_path / "d" / "export.json").exists()
    assert exported(run, tmp_path / "d", *options) == whole
    assert not list(run.root.glob(".export-*"))
    counts = Counter(row["row_id"] for rows in whole.values() for row in rows)
    assert sorted(counts) == kept()
    assert set(counts.values()) == {1}


def test_what_a_killed_export_leaves_behind_goes_when_it_goes_on(
    run: LocalFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "d"
    for _ in breaking(monkeypatch, "commit", 0):
        with pytest.raises(KeyboardInterrupt):
            main([str(run.root), "--to", str(dest)])
    # As SIGKILL leaves them in the midst of a file.
    (dest / "data" / ".train-00001.parquet.0123abcd.tmp").write_bytes(b"PAR1")
    (dest / ".README.md.89abcdef.tmp").write_bytes(b"#")
    (dest / "LICENSE").write_text("the user's own")
    exported(run, dest)
    found = sorted(str(file.relative_to(dest)) for file in dest.rglob("*") if file.is_file())
    ours = ["README.md", "data/train-00000.parquet", "dropped.jsonl", "export.json"]
    assert found == sorted([*ours, "LICENSE"])


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_bucket_that_is_not_whole_is_told_with_what_to_remove(
    run: LocalFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], harm: str,
) -> None:  # fmt: skip
    for _ in breaking(monkeypatch, "_write_file", 0):
        with pytest.raises(KeyboardInterrupt):
            main([str(run.root), "--to", str(tmp_path / "d")])
    (bucket,) = run.root.glob(".export-*/bucket-*.arrow")
    if harm == "cut":
        bucket.write_bytes(bucket.read_bytes()[:300])
    else:
        bucket.unlink()
    assert main([str(run.root), "--to", str(tmp_path / "d")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"{bucket}: cannot be read: ")
    assert f"remove {bucket.parent} and the files in the destination to begin again" in said
