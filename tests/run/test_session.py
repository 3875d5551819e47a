"""The start of a session: the run in its folder and the input as it is today."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from pipeline.dataset.frozen import frozen_prompts, schema_from_text
from pipeline.dataset.parts import publish
from pipeline.dataset.run_record import read_manifest, read_run
from pipeline.errors import ConfigError, ResumeError
from pipeline.run.ledger import DONE, PENDING
from pipeline.run.session import Prepared, SessionOptions, prepare
from pipeline.store.folder import LocalFolder
from schemas.completion import Completion
from schemas.config.run_file import RunFile
from schemas.manifest import Part
from schemas.prompt import Prompt
from tests.fakes.staged_part import stage_part

Build = Callable[..., Completion]
Row = dict[str, object]


def source_row(number: int) -> Row:
    return {
        "id": f"r{number}",
        "prompt": f"What is {number} + {number}?",
        "category": "math" if number % 2 else "other",
        "level": number,
    }


TEN_ROWS = [source_row(number) for number in range(10)]
FROZEN_FILES = ("rows-00000.parquet", "index.json")
SESSION_FOLDERS = ("data", "staging", "logs")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    write_rows(path, TEN_ROWS)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    return folder


def run_file(
    source: Path, folder: LocalFolder, settings: Mapping[str, object] | None = None
) -> RunFile:
    """A run file; `settings` are given as `--set` gives them, by dotted key."""
    values: dict[str, object] = {
        "prompts": {"path": str(source), "id_column": "id", "keep_columns": ["category"]},
        "model": "m",
        "output": {"folder": str(folder.root)},
    }
    for key, value in (settings or {}).items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})  # type: ignore[assignment]
        section[name] = value
    return RunFile.model_validate(values)


def prepared(
    source: Path,
    folder: LocalFolder,
    settings: Mapping[str, object] | None = None,
    *,
    accept_drift: bool = False,
    retry_errors: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Prepared:
    return prepare(
        run_file(source, folder, settings),
        folder,
        SessionOptions(accept_drift=accept_drift, retry_errors=retry_errors),
        token="t",
        now_s=100.0,
        log=log,
    )


def prompts_of(started: Prepared, folder: LocalFolder) -> list[Prompt]:
    frozen = frozen_prompts(folder, started.plan.frozen_name)
    assert frozen is not None
    return [frozen.prompt(number) for number in range(frozen.num_rows)]


def publish_rows(
    started: Prepared,
    folder: LocalFolder,
    build: Build,
    row_ids: Sequence[str],
    *,
    name: str = "p1",
    errors: Sequence[str] = (),
    sample_index: int = 0,
) -> Part:
    """Publish these rows as a worker and the coordinator do."""
    wanted = {prompt.row_id: prompt for prompt in prompts_of(started, folder)}
    rows = [
        build(
            row_id,
            error=row_id in errors,
            sample_index=sample_index,
            content_hash=wanted[row_id].content_hash,
            carried=wanted[row_id].carried,
        )
        for row_id in row_ids
    ]
    part = stage_part(
        folder,
        f"{name}.parquet",
        rows,
        run_id=started.plan.run_id,
        carried_schema=schema_from_text(started.plan.carried_schema),
        worker_id="w0",
    )
    return publish(folder, part, now_s=101.0)


def open_ids(started: Prepared, folder: LocalFolder) -> list[str]:
    """Row ids that are still to be done, one for each sample."""
    samples = started.plan.config.samples_per_prompt
    prompts = prompts_of(started, folder)
    assert len(started.row_states) == len(prompts) * samples
    states = enumerate(started.row_states)
    return [prompts[row // samples].row_id for row, state in states if state == PENDING]


# -- fresh and resumed


def test_fresh_folder_has_every_row_open(source: Path, folder: LocalFolder) -> None:
    started = prepared(source, folder)
    assert started.row_states == bytes(10)
    session = started.session
    assert (session.rows_total, session.rows_done, session.rows_error) == (10, 0, 0)
    assert [prompt.row_id for prompt in prompts_of(started, folder)] == [f"r{n}" for n in range(10)]
    record = read_run(folder)
    assert record is not None
    assert record.run_id == started.plan.run_id
    assert record.identity.settings["model"] == "m"
    assert record.identity.settings["prompts.column"] == "prompt"
    assert read_manifest(folder).sessions == [session]
    assert schema_from_text(started.plan.carried_schema).names == ["category"]


def test_input_without_rows_is_refused_and_starts_no_run(source: Path, folder: LocalFolder) -> None:
    write_rows(source, [])
    with pytest.raises(ConfigError, match=r"prompts\."):
        prepared(source, folder)
    assert read_run(folder) is None


def test_resume_with_the_same_settings_reads_the_input_no_more(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    first = prepared(source, folder)
    publish_rows(first, folder, completion, ["r1", "r4"])
    index = folder.path(f"prompts/{first.plan.frozen_name}/index.json")
    written_ns = index.stat().st_mtime_ns
    lines: list[str] = []
    second = prepared(source, folder, log=lines.append)
    assert second.plan.frozen_name == first.plan.frozen_name
    assert second.plan.run_id == first.plan.run_id
    assert second.plan.session_id != first.plan.session_id
    assert index.stat().st_mtime_ns == written_ns
    assert lines == []
    assert [row for row, state in enumerate(second.row_states) if state == DONE] == [1, 4]
    assert second.session.rows_done == 2


def test_resume_with_other_capacity_goes_on(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    publish_rows(prepared(source, folder), folder, completion, ["r1"])
    settings: dict[str, object] = {
        "engine.count": 3,
        "engine.max_running_requests": 2,
        "work.shard_rows": 1,
        "output.flush_interval_s": 0.5,
        "retry.max_attempts": 1,
    }
    assert prepared(source, folder, settings).session.rows_done == 1


def test_input_read_half_before_a_crash_is_read_again(source: Path, folder: LocalFolder) -> None:
    first = prepared(source, folder)
    folder.remove(f"prompts/{first.plan.frozen_name}/index.json")
    lines: list[str] = []
    second = prepared(source, folder, log=lines.append)
    assert any("event=prompts_read rows=10" in line for line in lines)
    assert len(prompts_of(second, folder)) == 10


def test_what_was_mended_is_logged_and_its_rows_are_open(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    publish_rows(prepared(source, folder), folder, completion, ["r1"])
    folder.remove("data/p1.parquet")
    lines: list[str] = []
    assert prepared(source, folder, log=lines.append).row_states == bytes(10)
    assert lines == ["event=mended data/p1.parquet is listed but gone; its 1 rows are done again"]


# -- the input changes between runs


def shuffled(rows: list[Row]) -> list[Row]:
    return random.Random(3).sample(rows, len(rows))


@pytest.mark.parametrize(
    ("rows", "limit", "num_outside"),
    [
        (shuffled(TEN_ROWS), None, 0),
        (TEN_ROWS, 5, 1),
        (TEN_ROWS[::2], None, 1),
        ([*map(source_row, range(10, 14)), *TEN_ROWS], None, 0),
    ],
    ids=["shuffled", "limited", "filtered", "extended"],
)
def test_changed_order_or_extent_keeps_what_is_done(
    source: Path,
    folder: LocalFolder,
    completion: Build,
    rows: list[Row],
    limit: int | None,
    num_outside: int,
) -> None:
    first = prepared(source, folder)
    publish_rows(first, folder, completion, ["r1", "r4"])
    publish_rows(first, folder, completion, ["r8"], name="p2")
    write_rows(source, rows)
    second = prepared(source, folder, {"prompts.limit": limit})
    kept = {str(row["id"]) for row in rows[:limit]}
    found = open_ids(second, folder)
    assert sorted(found) == sorted(kept - {"r1", "r4", "r8"})
    assert second.session.rows_outside_input == num_outside
    assert second.session.rows_done == 3 - num_outside
    assert len(read_manifest(folder).parts) == 2, "no published row is dropped"


def test_rows_named_by_their_content_are_found_after_a_shuffle(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    rows = [*TEN_ROWS, TEN_ROWS[3], TEN_ROWS[3]]
    write_rows(source, rows)
    by_content: dict[str, object] = {"prompts.id_column": None}
    first = prepared(source, folder, by_content)
    ids = [prompt.row_id for prompt in prompts_of(first, folder)]
    assert len(set(ids)) == 12
    publish_rows(first, folder, completion, [ids[0], ids[3], ids[10]])
    write_rows(source, shuffled(rows))
    second = prepared(source, folder, by_content)
    assert second.session.rows_done == 3
    assert sorted(open_ids(second, folder)) == sorted(set(ids) - {ids[0], ids[3], ids[10]})


def test_prompts_of_an_earlier_input_are_removed(source: Path, folder: LocalFolder) -> None:
    first = prepared(source, folder)
    write_rows(source, TEN_ROWS[:4])
    second = prepared(source, folder)
    assert first.plan.frozen_name != second.plan.frozen_name
    assert folder.names("prompts") == [second.plan.frozen_name]


def test_same_id_with_other_content_is_refused(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    publish_rows(prepared(source, folder), folder, completion, ["r1", "r4"])
    write_rows(source, [{**row, "prompt": f"{row['prompt']} Why?"} for row in TEN_ROWS])
    with pytest.raises(ResumeError, match=r"prompts\.path: the prompt with id 'r1' in"):
        prepared(source, folder)
    assert len(read_manifest(folder).sessions) == 1


def test_error_row_that_is_read_differently_is_no_other_input(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    bad = {**TEN_ROWS[4], "prompt": ""}
    write_rows(source, [*TEN_ROWS[:4], bad, *TEN_ROWS[5:]])
    first = prepared(source, folder)
    publish_rows(first, folder, completion, ["r1", "r4"], errors=["r4"])
    # The row is mended, or another release makes a prompt of it: both give it another content.
    write_rows(source, TEN_ROWS)
    second = prepared(source, folder)
    assert second.session.rows_done == 2
    assert "r4" not in open_ids(second, folder)
    assert "r4" in open_ids(prepared(source, folder, retry_errors=True), folder)
    write_rows(source, [TEN_ROWS[0], {**TEN_ROWS[1], "prompt": "Else?"}, *TEN_ROWS[2:]])
    with pytest.raises(ResumeError, match="the prompt with id 'r1' in"):
        prepared(source, folder)


def test_other_content_of_a_row_that_is_not_done_goes_on(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    publish_rows(prepared(source, folder), folder, completion, ["r1"])
    write_rows(source, [*TEN_ROWS[:9], {**TEN_ROWS[9], "prompt": "Something else?"}])
    assert prepared(source, folder).session.rows_done == 1


def test_disjoint_input_is_refused(source: Path, folder: LocalFolder, completion: Build) -> None:
    publish_rows(prepared(source, folder), folder, completion, ["r1", "r4"])
    write_rows(source, [source_row(number) for number in range(20, 25)])
    with pytest.raises(ResumeError, match=r"prompts\.path: none of the 2 published rows"):
        prepared(source, folder)


def test_disjoint_input_before_anything_is_published_goes_on(
    source: Path, folder: LocalFolder
) -> None:
    prepared(source, folder)
    write_rows(source, [source_row(number) for number in range(20, 25)])
    assert prepared(source, folder).session.rows_total == 5


@pytest.mark.parametrize(
    "rows",
    [
        [{**row, "prompt": f"{row['prompt']} Why?"} for row in TEN_ROWS],
        [source_row(number) for number in range(20, 25)],
    ],
    ids=["other content", "disjoint"],
)
def test_accepted_change_of_the_input_is_recorded(
    source: Path, folder: LocalFolder, completion: Build, rows: list[Row]
) -> None:
    publish_rows(prepared(source, folder), folder, completion, ["r1", "r4"])
    write_rows(source, rows)
    lines: list[str] = []
    for _ in range(2):
        prepared(source, folder, accept_drift=True, log=lines.append)
    record = read_run(folder)
    assert record is not None
    assert [line.split(":")[0] for line in record.accepted_drift] == ["prompts.path"]
    assert any("event=drift_accepted prompts.path:" in line for line in lines)
    assert len(read_manifest(folder).parts) == 1


# -- settings that alter rows


DRIFT: dict[str, object] = {
    "model": "another",
    "thinking": False,
    "reasoning_in_history": True,
    "chat_template_kwargs": {"effort": "high"},
    "sampling.temperature": 0.9,
    "sampling.top_p": 0.5,
    "sampling.top_k": None,
    "sampling.min_p": 0.1,
    "sampling.presence_penalty": 1.0,
    "sampling.repetition_penalty": 1.1,
    "sampling.max_tokens": 99,
    "sampling.frequency_penalty": 0.1,
    "sampling.stop": ["END"],
    "sampling.logit_bias": {"7": 1.0},
    "request": {"custom_params": {"thinking_budget": 2048}},
    "sampling.seed": 8,
    "prompts.column": "category",
    "prompts.shape": "messages",
    "prompts.system_column": "category",
    "prompts.system_prompt": "Be brief.",
    "prompts.history": "original",
    "prompts.tools_column": "category",
    "prompts.system_turns": "as_given",
    "prompts.id_column": None,
    "prompts.keep_columns": ["category", "level"],
    "prompts.row_settings": {"max_tokens": "level"},
    "engine.model_file": "other.gguf",
}


def test_every_field_of_the_identity_is_tried(source: Path, folder: LocalFolder) -> None:
    prepared(source, folder)
    record = read_run(folder)
    assert record is not None
    tried = DRIFT.keys() - {"engine.model_file"}
    # A template stands in place of the column, so two settings differ.
    assert set(record.identity.settings) == tried | {"prompts.template"}


def test_template_in_place_of_a_column_is_refused(source: Path, folder: LocalFolder) -> None:
    prepared(source, folder)
    with pytest.raises(ResumeError, match=r"prompts\.template: the run in this folder has None"):
        prepared(source, folder, {"prompts.template": "About {category}:"})


@pytest.mark.parametrize("key", DRIFT)
def test_setting_that_differs_is_refused_and_named(
    source: Path, folder: LocalFolder, completion: Build, key: str
) -> None:
    publish_rows(prepared(source, folder), folder, completion, ["r1"])
    before = folder.read("run.json"), folder.read("manifest.jsonl"), folder.names("data")
    with pytest.raises(ResumeError) as refused:
        prepared(source, folder, {key: DRIFT[key]})
    first_line, *others = str(refused.value).splitlines()
    assert first_line.startswith(f"{key}: the run in this folder has ")
    assert len(others) == 1, "nothing else is said to differ"
    assert before == (folder.read("run.json"), folder.read("manifest.jsonl"), folder.names("data"))


def test_all_settings_that_differ_are_named(source: Path, folder: LocalFolder) -> None:
    prepared(source, folder)
    with pytest.raises(ResumeError) as refused:
        prepared(source, folder, {"model": "another", "sampling.seed": 8})
    assert "model: the run in this folder has 'm', the run file says 'another'" in str(
        refused.value
    )
    assert "sampling.seed: the run in this folder has 7, the run file says 8" in str(refused.value)


def test_setting_that_differs_is_refused_before_the_input_is_read(
    source: Path, folder: LocalFolder
) -> None:
    prepared(source, folder)
    write_rows(source, TEN_ROWS[:3])
    lines: list[str] = []
    with pytest.raises(ResumeError, match="model: "):
        prepared(source, folder, {"model": "another"}, log=lines.append)
    assert lines == []


def test_accepted_drift_is_recorded_and_then_no_drift(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    first = prepared(source, folder)
    publish_rows(first, folder, completion, ["r1"])
    other: dict[str, object] = {"model": "another", "sampling.seed": 8}
    lines: list[str] = []
    second = prepared(source, folder, other, accept_drift=True, log=lines.append)
    record = read_run(folder)
    assert record is not None
    assert record.run_id == first.plan.run_id
    assert record.identity.settings["model"] == "another"
    assert record.accepted_drift == (
        "model: the run in this folder has 'm', the run file says 'another'",
        "sampling.seed: the run in this folder has 7, the run file says 8",
    )
    assert lines[-2:] == [f"event=drift_accepted {line}" for line in record.accepted_drift]
    assert second.session.rows_done == 1
    assert prepared(source, folder, other).session.rows_done == 1
    with pytest.raises(ResumeError, match="model: "):
        prepared(source, folder)


@pytest.mark.parametrize(
    "others", [{}, {"model": "another"}, {"engine.model_file": "other.gguf"}], ids=len
)
def test_other_kept_columns_are_refused_even_when_drift_is_accepted(
    source: Path, folder: LocalFolder, others: dict[str, object]
) -> None:
    prepared(source, folder)
    before = folder.read("run.json")
    settings = {**others, "prompts.keep_columns": ["level"]}
    with pytest.raises(ResumeError, match=r"^prompts\.keep_columns: .*\n.*--accept-drift"):
        prepared(source, folder, settings, accept_drift=True)
    assert folder.read("run.json") == before


def test_folder_with_an_unreadable_run_record_is_refused(source: Path, folder: LocalFolder) -> None:
    prepared(source, folder)
    folder.write_whole("run.json", b"{")
    with pytest.raises(ResumeError, match="not a run record"):
        prepared(source, folder)


# -- samples and errors


def test_more_samples_for_each_prompt_keep_the_rows(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    first = prepared(source, folder)
    publish_rows(first, folder, completion, ["r1", "r4"])
    second = prepared(source, folder, {"samples_per_prompt": 3})
    done = [row for row, state in enumerate(second.row_states) if state == DONE]
    assert done == [1 * 3, 4 * 3]
    assert second.session.rows_total == 30
    publish_rows(second, folder, completion, ["r4", "r5"], name="p2", sample_index=2)
    third = prepared(source, folder, {"samples_per_prompt": 3})
    done = [row for row, state in enumerate(third.row_states) if state == DONE]
    assert done == [1 * 3, 4 * 3, 4 * 3 + 2, 5 * 3 + 2]


def test_fewer_samples_for_each_prompt_leave_rows_outside(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    first = prepared(source, folder, {"samples_per_prompt": 2})
    publish_rows(first, folder, completion, ["r1"])
    publish_rows(first, folder, completion, ["r1", "r2"], name="p2", sample_index=1)
    second = prepared(source, folder)
    assert (second.session.rows_done, second.session.rows_outside_input) == (1, 2)
    assert len(read_manifest(folder).parts) == 2


def test_error_rows_are_done_unless_they_are_to_be_retried(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    first = prepared(source, folder)
    publish_rows(first, folder, completion, ["r1", "r2", "r3"], errors=["r2"])
    publish_rows(first, folder, completion, ["r4"], name="p2", errors=["r4"])
    resumed = prepared(source, folder)
    assert (resumed.session.rows_done, resumed.session.rows_error) == (4, 2)
    assert resumed.plan.rows_error == 2
    retried = prepared(source, folder, retry_errors=True)
    assert (retried.session.rows_done, retried.session.rows_error) == (2, 0)
    assert set(open_ids(retried, folder)) == {f"r{n}" for n in range(10)} - {"r1", "r3"}
    publish_rows(retried, folder, completion, ["r2", "r4"], name="p3")
    assert prepared(source, folder).session.rows_done == 4


def test_rows_to_be_retried_count_as_shared_with_the_input(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    started = prepared(source, folder)
    publish_rows(started, folder, completion, ["r0", "r5"], errors=["r0"])
    retried = prepared(source, folder, {"prompts.limit": 2}, retry_errors=True)
    assert (retried.session.rows_total, retried.session.rows_done) == (2, 0)


def test_error_row_whose_prompt_was_mended_is_retried(
    source: Path, folder: LocalFolder, completion: Build
) -> None:
    started = prepared(source, folder)
    publish_rows(started, folder, completion, ["r0", "r5"], errors=["r0"])
    write_rows(source, [{**source_row(0), "prompt": "mended"}, *TEN_ROWS[1:]])
    assert prepared(source, folder, retry_errors=True).session.rows_done == 1


def test_folder_of_a_version_with_other_columns_is_refused_by_their_names(
    source: Path, folder: LocalFolder
) -> None:
    prepared(source, folder)
    record = json.loads(folder.read("run.json"))
    assert "plan" in record["columns"]
    del record["columns"]
    folder.write_whole("run.json", json.dumps(record).encode())
    with pytest.raises(
        ResumeError, match=r"output\.folder: .*another version.*\(flags, plan, quality_retries\)"
    ):
        prepared(source, folder)


@pytest.mark.parametrize("harm", ["cut", "zeroed", "gone", "index"])
def test_frozen_prompts_that_are_damaged_are_frozen_again(
    source: Path, folder: LocalFolder, harm: str
) -> None:
    name = prepared(source, folder).plan.frozen_name
    rows, index = (folder.path(f"prompts/{name}/{file}") for file in FROZEN_FILES)
    data = rows.read_bytes()
    half = len(data) // 2
    match harm:
        case "cut":
            rows.write_bytes(data[:half])
        case "zeroed":
            # The footer stays: only what was frozen tells.
            rows.write_bytes(bytes(half) + data[half:])
        case "gone":
            rows.unlink()
        case "index":
            index.write_text('{"num_rows":')
    lines: list[str] = []
    assert prepared(source, folder, log=lines.append).plan.frozen_name == name
    assert rows.read_bytes() == data
    damage = f"event=mended prompts/{name}/rows-00000.parquet is "
    assert (harm == "index") != any(line.startswith(damage) for line in lines)
    assert any(line.startswith("event=reading_prompts ") for line in lines)


def test_frozen_prompts_of_a_release_without_checksums_are_used_as_they_are(
    source: Path, folder: LocalFolder
) -> None:
    name = prepared(source, folder).plan.frozen_name
    path = folder.path(f"prompts/{name}/index.json")
    index = json.loads(path.read_text())
    del index["files"]
    path.write_text(json.dumps(index))
    lines: list[str] = []
    prepared(source, folder, log=lines.append)
    assert not any("reading_prompts" in line or "mended" in line for line in lines)


def test_lost_sub_folders_are_made_again(source: Path, folder: LocalFolder) -> None:
    prepared(source, folder)
    for name in SESSION_FOLDERS:
        folder.path(name).rmdir()
    prepared(source, folder)
    assert all(folder.path(name).is_dir() for name in SESSION_FOLDERS)
