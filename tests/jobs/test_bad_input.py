"""Mistakes of users, given to the job itself: one line with the place, the fault and the remedy.

Each mistake is found before Ray or an engine starts. Bad rows do not stop a run.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import regenerate
from schemas.completion import COMPLETION_SCHEMA

ENDPOINT = "kind: endpoint, base_urls: ['http://127.0.0.1:9/v1']"
HI = [{"role": "user", "content": "hi"}]

Told = Callable[..., str]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Write a run file without mistakes."""
    source = tmp_path / "p.jsonl"
    source.write_text('{"id": "a", "prompt": "q", "label": "x"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        f"prompts: {{path: {source}}}\n"
        "model: m\n"
        f"engine: {{{ENDPOINT}}}\n"
        f"output: {{folder: {tmp_path / 'out'}}}\n"
    )
    return path


@pytest.fixture
def told(run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Told:
    """Return the only stderr line of a dry run that exits with 2; each argument is a --set."""

    def line(*overrides: str) -> str:
        settings = [text for override in overrides for text in ("--set", override)]
        assert regenerate.main([str(run_file), "--dry-run", *settings]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert not (tmp_path / "out").exists()
        [only] = err.splitlines()
        return only

    return line


def test_run_file_without_mistakes_is_counted(
    run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert regenerate.main([str(run_file), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[5:]] == ["endpoint", "template", "thinking", "prompt"]
    assert lines[5].startswith("endpoint   http://")
    assert lines[:5] == [
        f"prompts    {tmp_path / 'p.jsonl'}: column 'prompt', read as prompt",
        (
            "not read   columns 'id', 'label': prompts.id_column takes ids from one, and "
            "prompts.keep_columns carries columns to the output"
        ),
        "rows       1 to generate, 0 of them done",
        "turns      1 assistant turns",
        # One byte is one token, and the template five.
        "tokens     6 in prompts (approximated: 4 UTF-8 bytes per token)",
    ]
    assert not (tmp_path / "out").exists()


# -- the run file


def test_missing_run_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.yaml"
    assert regenerate.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said == f"{path}: cannot read the run file: No such file or directory\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # Noticed where the file ends.
        ("work: [1", "line 6, column 1 not valid YAML: expected ',' or ']'"),
        (
            "model: other",
            "line 5, column 1 not valid YAML: the key 'model' is given twice; keep one",
        ),
        ("thinkin: true", "thinkin: unknown key; did you mean 'thinking'?"),
        ("banana: 1", "banana: unknown key; known keys: prompts, model, thinking"),
        ("sampling: {max_token: 5}", "sampling.max_token: unknown key; did you mean 'max_tokens'?"),
        ("sampling: {banana: 5}", "sampling.banana: unknown key; known keys: temperature, top_p"),
        ("sampling: {top-k: 5}", "sampling.top-k: unknown key; did you mean 'top_k'?"),
        ("sampling: {max_tokens: many}", "sampling.max_tokens: found 'many' (str); it should be"),
        ("sampling: {top_p: 1.5}", "sampling.top_p: found 1.5 (float); it should be less than or"),
        ("work: {lease_ttl_s: 0}", "work.lease_ttl_s: found 0 (int); it should be greater than"),
        ("sampling: null", "sampling: found null; it should be a section with keys of its own"),
    ],
)
def test_mistake_in_the_run_file_is_one_line(
    run_file: Path, told: Told, text: str, line: str
) -> None:
    run_file.write_text(run_file.read_text() + text + "\n")
    said = told()
    assert said.startswith(f"{run_file}: {line}")


@pytest.mark.parametrize("section", ["prompts", "model", "output"])
def test_missing_required_key_is_named(run_file: Path, told: Told, section: str) -> None:
    lines = run_file.read_text().splitlines(keepends=True)
    run_file.write_text("".join(line for line in lines if not line.startswith(section)))
    assert told() == f"{run_file}: {section}: missing; this key has no default"


def test_run_file_that_is_no_mapping_is_told_so(run_file: Path, told: Told) -> None:
    run_file.write_text("- prompts\n")
    assert told() == f"{run_file}: found ['prompts'] (list); expected a mapping of keys to values"


def test_several_mistakes_are_told_together(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["--set", "sampling.top_p=2", "--set", "modle=x", "--set", "thinking=maybe"]
    assert regenerate.main([str(run_file), "--dry-run", *overrides]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split(": ")[1] for line in lines) == ["modle", "sampling.top_p", "thinking"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("sampling.top_p", "--set sampling.top_p: expected key=value, for example sampling.top_p="),
        ("model=[1", "--set model=[1: the value is not valid YAML"),
        ("model.name=x", "--set model.name=x: model is 'm' (str), not a section"),
        ("sampling.topp=0.9", "{run_file}: sampling.topp: unknown key; did you mean 'top_p'?"),
        ("prompts.limit=0", "{run_file}: prompts.limit: found 0 (int); it should be greater"),
    ],
)
def test_mistake_in_an_override_is_one_line(
    run_file: Path, told: Told, override: str, line: str
) -> None:
    assert told(override).startswith(line.format(run_file=run_file))


# -- the input


@pytest.mark.parametrize("name", ["none.parquet", "none.jsonl", "none"])
def test_missing_input_is_named(tmp_path: Path, told: Told, name: str) -> None:
    path = tmp_path / name
    assert told(f"prompts.path={path}") == f"prompts.path: no file or folder {path}"


def test_input_with_an_unknown_ending_is_named(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "p.docx"
    path.write_text("prompt\nq\n")
    assert told(f"prompts.path={path}") == (
        f"prompts.path: {path} ends in '.docx'; expected .parquet, .pq, .jsonl, .ndjson, .json, "
        ".csv, .tsv, .arrow, or a text format with .gz, .bz2, .zst, .xz behind it"
    )


def test_empty_folder_is_named(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "empty"
    path.mkdir()
    assert told(f"prompts.path={path}") == (
        f"prompts.path: folder {path} has no file that ends in .parquet, .pq, .jsonl, .ndjson, "
        ".json, .csv, .tsv, .arrow"
    )


@pytest.mark.parametrize("name", ["e.jsonl", "e.parquet"])
def test_file_without_rows_is_named(tmp_path: Path, told: Told, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    if name.endswith("parquet"):
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    assert told(f"prompts.path={path}") == f"prompts.path: {path} has no rows"


def test_broken_parquet_file_is_named(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["q"] * 50}), path)
    path.write_bytes(path.read_bytes()[:-10])
    said = told(f"prompts.path={path}")
    assert said.startswith(f"prompts.path: cannot read {path}: Parquet magic bytes not found")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"prompt": "b"\n', "line 1: not JSON: Expecting ',' delimiter at column 15"),
        (b'"b"\n', "line 1: found a str; expected one JSON object per row"),
        ('{"prompt": "Grüße"}\n'.encode("latin-1"), "line 1: not UTF-8 at byte 14"),
    ],
)
def test_input_without_a_row_that_can_be_read_is_named(
    tmp_path: Path, told: Told, data: bytes, said: str
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(data)
    expected = f"prompts.path: {path} has no rows that can be read: {path} {said}"
    assert told(f"prompts.path={path}").startswith(expected)


@pytest.mark.parametrize("data", [b'[{"prompt": "a"}, {"prompt": "b"', b'[{"prompt": "a"}] b'])
def test_array_that_breaks_off_is_named(tmp_path: Path, told: Told, data: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    assert told(f"prompts.path={path}") == (
        f"prompts.path: {path}: the JSON breaks off or has text behind its end, after element 1"
    )


def test_input_without_a_known_column_lists_what_it_has(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n')
    assert told(f"prompts.path={path}") == (
        "prompts.column: none of messages, conversations, conversation, prompt is a column of "
        f"{path}; name one of: question, answer"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("column", "question"),
        ("id_column", "uid"),
        ("system_column", "persona"),
        ("keep_columns", "[label, topic]"),
    ],
)
def test_named_column_that_is_missing_is_one_line(
    tmp_path: Path, told: Told, field: str, value: str
) -> None:
    name = value.strip("[]").rpartition(", ")[2]
    assert told(f"prompts.{field}={value}") == (
        f"prompts.{field}: no column {name!r} in {tmp_path / 'p.jsonl'}; it has: id, prompt, label"
    )


def test_kept_column_with_an_output_columns_name_is_refused(tmp_path: Path, told: Told) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "q", "status": "new"}\n')
    assert told("prompts.keep_columns=[status]") == (
        "prompts.keep_columns: 'status' is the name of a column of the output; "
        "rename it in the input"
    )


def test_repeated_id_is_named_with_its_row(tmp_path: Path, told: Told) -> None:
    rows = [{"id": value, "prompt": "q"} for value in ("a", "b", "a", "b")]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert told("prompts.id_column=id") == (
        f"prompts.id_column: the id 'a' is in more than one row of {tmp_path / 'p.jsonl'} "
        f"(again in row 3); ids must be unique"
    )


def test_null_id_is_named_with_its_row(tmp_path: Path, told: Told) -> None:
    table = pa.table({"id": ["a", None], "prompt": ["q", "r"]})
    pq.write_table(table, tmp_path / "p.parquet")
    assert told(f"prompts.path={tmp_path / 'p.parquet'}", "prompts.id_column=id") == (
        f"prompts.id_column: row 2 of {tmp_path / 'p.parquet'} has no 'id'"
    )


# -- bad rows


def test_bad_rows_are_counted_by_kind_and_do_not_stop_the_run(
    tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values: list[object] = [
        HI,
        None,
        "hi",
        [{"role": "critic", "content": "t"}],
        [{"role": "assistant", "content": "a"}],
        [{"role": "user", "content": " "}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": "\ud800"}],
        [*HI, {"role": "assistant", "content": "a"}, *HI],
    ]
    lines = [json.dumps({"messages": value}) for value in values]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    assert regenerate.main([str(run_file), "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    counts = json.loads(out)
    assert err == ""
    assert (counts["rows_total"], counts["rows_done"], counts["turns"]) == (9, 0, 3)
    # The first request of two rows: one token of text, and five of the template.
    assert counts["prompt_tokens"] == 2 * 6
    assert {kind: count for kind, (count, _) in counts["problems"].items()} == {
        "not_a_list": 2,
        "unknown_role": 1,
        "no_user_turn": 1,
        "empty_text": 1,
        "not_text": 2,
    }
    assert counts["problems"]["unknown_role"][1].startswith("messages[0]: role 'critic'; known are")


def test_dry_run_shows_a_bad_row_of_each_kind(
    tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": ""}\n{"prompt": "q"}\n{"prompt": null}\n')
    assert regenerate.main([str(run_file), "--dry-run"]) == 0
    *_, bad_rows, warning = capsys.readouterr().out.splitlines()
    assert bad_rows == (
        "bad rows   2 empty_text: they end as error rows, e.g. prompt: the text is empty"
    )
    assert warning.startswith("warning    66.7% of the prompts end as error rows")


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        # Six tokens and 24 are the context; seven and 24 are refused.
        ("kind: endpoint, base_urls: ['http://h/v1'], context_length: 30", True),
        ("kind: sglang, command: [x], flags: ['--context-length=30']", True),
        ("kind: sglang, command: [x]", False),
        ("kind: embedded, context_length: 30", False),
    ],
)
def test_dry_run_counts_the_prompts_that_have_no_room_in_a_given_context(
    tmp_path: Path,
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    told: bool,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "p.jsonl").write_text('{"prompt": "aaaa"}\n{"prompt": "aaaaaaaa"}\n')
    words = [f"engine={{{engine}}}", "model=none/such", "sampling.max_tokens=24"]
    sets = [part for word in words for part in ("--set", word)]
    assert regenerate.main([str(run_file), "--dry-run", *sets]) == 0
    line = (
        "no room    1 prompts and sampling.max_tokens are more than the context of 30: an engine "
        "refuses them"
    )
    assert (line in capsys.readouterr().out.splitlines()) == told


# -- engines


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("kind: vllm", "engine.kind: found 'vllm' (str); it should be 'embedded', 'endpoint' or"),
        ("kind: endpoint", "engine.base_urls: found none; kind 'endpoint' needs at least one URL"),
        (
            "kind: sglang",
            "engine.python: found null; kind 'sglang' needs the path of an interpreter",
        ),
        (
            "kind: endpoint, base_urls: ['localhost:30000']",
            "engine.base_urls: found 'localhost:30000'; expected a URL with http:// or https://",
        ),
        (
            "kind: endpoint, base_urls: ['http://me:sk-secret@host/v1']",
            "engine.base_urls: a URL contains a user or key; use api_key_env instead",
        ),
        (
            "kind: sglang, command: [x], flags: [--api-key, sk-secret]",
            "engine.flags: found --api-key; remove it, each worker sets its own",
        ),
        (
            "kind: sglang, command: [x], flags: ['--port=30000']",
            "engine.flags: found --port; remove it, each worker sets its own",
        ),
        (
            "kind: sglang, command: [x], flags: [tp-size=2]",
            "engine.flags: found 'tp-size=2'; the first word must be a flag with --",
        ),
        (
            "kind: sglang, command: ['']",
            "engine.command: the first word is empty; expected the program to start",
        ),
        ("env: {'A=B': '1'}", "engine.env: found 'A=…'; expected the name of a variable"),
        (
            "env: {HF_TOKEN: sk-secret}",
            "engine.env: HF_TOKEN looks like a secret, and the run file is stored with the",
        ),
        (
            "api_key_env: sk-secret",
            "engine.api_key_env: expected the name of an environment variable",
        ),
        ("env: {'': '1'}", "engine.env: found ''; expected the name of a variable"),
        (
            "pass_env: ['HF_TOKEN=sk-secret']",
            "engine.pass_env: found 'HF_TOKEN=…'; expected the name",
        ),
        (
            "pass_env: ['*_TOKEN']",
            "engine.pass_env: found '*_TOKEN'; expected the name of a variable",
        ),
    ],
)
def test_mistake_in_the_engines_section_is_one_line(
    run_file: Path, told: Told, engine: str, line: str
) -> None:
    said = told(f"engine={{{engine}}}")
    assert said.startswith(f"{run_file}: {line}")
    assert "sk-secret" not in said


def test_webhook_that_stands_in_place_of_its_name_is_not_shown(run_file: Path, told: Told) -> None:
    said = told("events.webhook_env=https://hooks.example/secret")
    assert said == (f"{run_file}: events.webhook_env: expected the name of an environment variable")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "engine.flags=[--mem-fraction-static=x]",
            "engine.flags: argument --mem-fraction-static: invalid float value: 'x'",
        ),
        ("engine.flags=[--tp-size, '2', '4']", "engine.flags: found '4', which belongs to no flag"),
        ("engine.flags=[--tp-size=2, -x]", "engine.flags: found '-x', which belongs to no flag"),
        (
            "hardware=[{gpu: B200}, {gpu: B-none}]",
            "hardware.1.gpu: unknown GPU 'B-none'; known: a100",
        ),
        ("planner.model_config_path=/none", "planner.model_config_path: no model config at /none"),
    ],
)
def test_launch_that_cannot_be_made_is_told_before_anything_starts(
    told: Told, setting: str, line: str
) -> None:
    assert told("engine={kind: sglang, command: [x]}", setting).startswith(line)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "hooks.example/secret",
        "http://hooks.example:abc/secret",
        "http://hooks.example:0/secret",
        "http://hooks.example:99999/secret",
        "http://hooks.example/the secret",
        "http://hooks.example/the\nsecret",
        "http://hooks.example/secr\u00e9t",
    ],
)
def test_webhook_variable_without_a_url_is_named_and_its_value_is_not(
    told: Told, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("HOOK", value)
    said = told("events.webhook_env=HOOK")
    assert said.startswith("events.webhook_env: ")
    assert "environment variable HOOK" in said
    assert "secr" not in said


@pytest.mark.parametrize("value", [None, ""])
def test_key_variable_that_is_not_set_is_named(
    told: Told, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("ENDPOINT_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("ENDPOINT_KEY", value)
    assert told("engine.api_key_env=ENDPOINT_KEY") == (
        "engine.api_key_env: the environment has no variable ENDPOINT_KEY"
    )


def test_interpreter_that_is_not_there_is_named(tmp_path: Path, told: Told) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    assert told(f"engine={{kind: sglang, python: {python}}}") == f"engine.python: no file {python}"


def test_model_file_that_is_not_there_is_named(tmp_path: Path, told: Told) -> None:
    pytest.importorskip("xllamacpp")
    path = tmp_path / "none.gguf"
    assert told(f"engine={{model_file: {path}}}") == f"engine.model_file: no file {path}"


def test_model_file_that_is_no_gguf_is_named(tmp_path: Path, told: Told) -> None:
    pytest.importorskip("xllamacpp")
    path = tmp_path / "m.gguf"
    path.write_text("weights, honestly " * 20)
    assert told(f"engine={{model_file: {path}}}").startswith(
        f"engine.model_file: cannot read {path} as GGUF: "
    )


def test_broken_tokenizer_of_the_model_is_named(tmp_path: Path, told: Told) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    said = told(f"model={tmp_path / 'm'}")
    assert said.startswith(f"model: cannot read {tmp_path / 'm' / 'tokenizer.json'}: ")


# -- the output folder


def test_output_folder_that_cannot_be_made_is_named(
    tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "out"
    assert regenerate.main([str(run_file), "--set", f"output.folder={folder}"]) == 2
    assert capsys.readouterr().err == f"output.folder: cannot create {folder}: Not a directory\n"


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_folder_with_another_runs_settings_is_refused(
    tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str], dry_run: list[str]
) -> None:
    identity = {"model": "another", "thinking": True}
    (tmp_path / "out").mkdir()
    record = {"run_id": "r", "created_at_s": 1.0, "identity": {"settings": identity}}
    record |= {"carried_schema": "", "accepted_drift": []}
    record |= {"columns": COMPLETION_SCHEMA.names}
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    assert regenerate.main([str(run_file), *dry_run]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "model: the run in this folder has 'another', the run file says 'm'" in lines
    assert not any(line.startswith("thinking:") for line in lines)
    assert lines[-1].endswith("use another output.folder, or --accept-drift to go on")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.json"]


def test_input_mistake_of_a_real_run_leaves_the_folder_free(
    tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": 1, "prompt": "q"}\n{"id": 1, "prompt": "r"}\n')
    for _ in range(2):
        assert regenerate.main([str(run_file), "--set", "prompts.id_column=id"]) == 2
        *events, last = capsys.readouterr().err.splitlines()
        assert last.startswith("prompts.id_column: the id '1' is in more than one row")
        assert all("event=reading_prompts" in event for event in events)
    assert not (tmp_path / "out" / "driver.json").exists()
