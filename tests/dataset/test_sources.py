"""Files and folders of the input: each format is read as its owner means it, or is named."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.dataset.prompts import PromptStream, read_prompts
from pipeline.dataset.sources import json_values
from pipeline.dataset.sources.lines import LongLine
from pipeline.dataset.sources.rows import MAX_ROW_BYTES
from pipeline.errors import ConfigError
from schemas.config.requests import PromptsConfig
from schemas.prompt import Prompt

ROWS = [{"prompt": "a"}, {"prompt": 'b{["\\'}, {"prompt": "ä\n"}]
TEXTS = [row["prompt"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
SPLIT = datasets.Dataset.from_list(ROWS)


def opened(path: Path, **section: Any) -> PromptStream:  # noqa: ANN401 - any key of the section
    return read_prompts(PromptsConfig(path=str(path), **section))


def questions(path: Path, **section: Any) -> list[str]:  # noqa: ANN401
    """The first user turn of each row, and the kind of problem of a bad one."""
    return [question(prompt) for prompt in opened(path, **section).prompts]


def question(prompt: Prompt) -> str:
    if prompt.problem is not None:
        return f"<{prompt.problem.kind}>"
    return next(message.content for message in prompt.messages if message.role == "user")


def refusal(path: Path, **section: Any) -> str:  # noqa: ANN401
    with pytest.raises(ConfigError) as caught:
        questions(path, **section)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def arrow_bytes(*, is_stream: bool) -> bytes:
    table, sink = pa.Table.from_pylist(ROWS), pa.BufferOutputStream()
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("lines.json", LINES),
        ("array.json", json.dumps(ROWS).encode()),
        ("pretty.json", json.dumps(ROWS, indent=2).encode()),
        ("mark.json", b"\xef\xbb\xbf" + json.dumps(ROWS, indent=2).encode()),
        ("array.jsonl", json.dumps(ROWS).encode()),
        ("blank-first.json", b"\n\n" + json.dumps(ROWS, indent=2).encode() + b"\n\n"),
        ("objects.json", "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()),
        ("UPPER.JSONL", LINES),
        ("no-end.jsonl", LINES.rstrip()),
        ("p.jsonl.gz", gzip.compress(LINES)),
        ("members.jsonl.gz", b"".join(gzip.compress(line) for line in LINES.splitlines(True))),
        ("p.jsonl.zst", zstd(LINES)),
        ("frames.ndjson.zst", b"".join(zstd(line) for line in LINES.splitlines(True))),
        ("p.jsonl.bz2", bz2.compress(LINES)),
        ("p.jsonl.xz", lzma.compress(LINES)),
        ("array.json.gz", gzip.compress(json.dumps(ROWS, indent=1).encode())),
        ("p.csv", 'prompt\na\n"b{[""\\"\n"ä\n"\n'.encode()),
        ("mark.csv", '\ufeffprompt,n\r\na,1\r\n"b{[""\\",2\r\n"ä\n",3\r\n'.encode()),
        ("semicolon.csv", 'n;prompt\n1;a\n2;"b{[""\\"\n3;"ä\n"\n'.encode()),
        ("p.tsv", 'n\tprompt\n1\ta\n2\t"b{[""\\"\n3\t"ä\n"\n'.encode()),
        ("p.csv.gz", gzip.compress('prompt\na\n"b{[""\\"\n"ä\n"\n'.encode())),
        ("stream.arrow", arrow_bytes(is_stream=True)),
        ("file.arrow", arrow_bytes(is_stream=False)),
    ],
)
def test_every_file_is_read_as_its_owner_means_it(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert questions(tmp_path / name) == TEXTS
    assert questions(tmp_path) == TEXTS


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("p.json", b'[{"prompt": "a"}, {"prompt": "b"}', "the JSON breaks off or has text behind"),
        ("p.json", b'[{"prompt": "a"}] x', "the JSON breaks off or has text behind its end"),
        ("p.json", b'{\n"prompt": "a"\n}\n{', "the JSON breaks off or has text behind its end"),
        ("p.json", b"[]", "has no rows"),
        ("p.csv", b"", "has no line with the names of its columns"),
        ("p.csv", b"prompt,prompt\na,b\n", "has two columns named 'prompt'"),
        ("p.csv", "prompt\na\n".encode("utf-16"), "is UTF-16 text; expected UTF-8"),
        ("p.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "is UTF-16 text; expected UTF-8"),
        ("p.jsonl.gz", gzip.compress(LINES * 999)[:-20], "Truncated compressed stream"),
        ("p.jsonl.gz", b"not gzip", "cannot read"),
        ("p.jsonl.xz", b"not xz", "cannot read"),
        ("p.arrow", b"ARROW1 not", "cannot read"),
        ("p.arrow", b"", "cannot read"),
    ],
)
def test_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(data)
    assert str(tmp_path / name) in refusal(tmp_path / name)
    assert said in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("p.json", b'[{"prompt": "a"}, 7, {"prompt": }, {"prompt": "b"}]', "a <> <> b"),
        ("p.json", b'[{"prompt": "a"}, {"prompt": "\xff"}, {"prompt": "b"}]', "a <> b"),
        ("p.json", b'[\n{"prompt": "a"}},\n{"prompt": "b"}\n]', "<> b"),
        ("p.csv", b"prompt,n\na,1\ntorn\nb,2\nc,3,4\n", "a <> b <>"),
        ("p.csv", b"prompt,n\na,1\n\xff,2\nb,3\n", "a <> b"),
    ],
)
def test_bad_row_stays_a_single_bad_row(
    tmp_path: Path, name: str, data: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(data)
    assert questions(tmp_path / name) == expected.replace("<>", "<unreadable>").split()


@pytest.mark.parametrize("name", ["p.json", "p.jsonl", "p.csv", "p.parquet", "p.arrow"])
def test_row_above_the_limit_is_a_bad_row_among_good_ones(tmp_path: Path, name: str) -> None:
    rows = [{"id": "1", "prompt": "a"}, {"id": "2", "prompt": "x" * MAX_ROW_BYTES}]
    rows += [{"id": "3", "prompt": "b"}]
    path, table = tmp_path / name, pa.Table.from_pylist(rows)
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(rows))
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case ".csv":
            path.write_text("id,prompt\n" + "\n".join(f"{r['id']},{r['prompt']}" for r in rows))
        case ".parquet":
            pq.write_table(table, path)
        case ".arrow":
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    prompts = list(opened(path, id_column="id").prompts)
    assert [question(prompt) for prompt in prompts] == ["a", "<too_large>", "b"]
    assert prompts[1].row_id == "2" or not path.suffix.startswith((".parquet", ".arrow"))


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_small_parquet_that_unpacks_to_gigabytes_stays_small(tmp_path: Path, column: str) -> None:
    text = "x" * (MAX_ROW_BYTES + 1)
    value: object = text if column == "prompt" else [{"role": "user", "content": text}]
    one = pa.Table.from_pylist([{column: value}])
    path = tmp_path / "bomb.parquet"
    indices = pa.array([0] * 200, pa.int32())
    # The rows share one text: 1.6 GB once they are decoded.
    whole = (
        pa.DictionaryArray.from_arrays(indices, one["prompt"].combine_chunks())
        if (column == "prompt")
        else one[column].combine_chunks().take(pa.array([0] * 20))
    )
    pq.write_table(pa.table({column: whole}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    del whole, one
    pool = pa.default_memory_pool()
    before, peak = pool.bytes_allocated(), 0
    kinds = set()
    for prompt in opened(path).prompts:
        kinds.add(question(prompt))
        peak = max(peak, pool.bytes_allocated() - before)
    assert kinds == {"<too_large>"}
    assert peak < 8 * MAX_ROW_BYTES


def test_views_of_texts_are_texts(tmp_path: Path) -> None:
    texts = ["a", "b" * 40, "c"]
    pq.write_table(pa.table({"prompt": pa.array(texts, pa.string_view())}), tmp_path / "p.parquet")
    assert questions(tmp_path / "p.parquet") == texts
    turn = pa.struct([("role", pa.string_view()), ("content", pa.string_view())])
    rows = [[{"role": "user", "content": text}] for text in texts]
    table = pa.table({"messages": pa.array(rows, pa.list_(turn))})
    with pa.ipc.new_file(tmp_path / "p.arrow", table.schema) as writer:
        writer.write_table(table)
    assert questions(tmp_path / "p.arrow") == texts


@pytest.mark.parametrize("kind", ["/dev/null", "fifo"])
def test_path_that_is_neither_file_nor_folder_is_refused(tmp_path: Path, kind: str) -> None:
    path = Path(kind)
    if kind == "fifo":
        path = tmp_path / "p.jsonl"
        os.mkfifo(path)
    assert refusal(path) == f"prompts.path: {path} is neither a file nor a folder"


def test_views_that_share_one_large_text_stay_small(tmp_path: Path) -> None:
    two = pa.array(["x" * (MAX_ROW_BYTES + 1), "small"], pa.string_view())
    _, views, *texts = two.buffers()
    large, small = views.to_pybytes()[:16], views.to_pybytes()[16:32]
    repeated = pa.py_buffer(300 * large + small)
    shared = pa.Array.from_buffers(pa.string_view(), 301, [None, repeated, *texts])
    path = tmp_path / "bomb.arrow"
    table = pa.table({"prompt": shared})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    del table, shared, two, texts
    pool = pa.default_memory_pool()
    before, peak = pool.bytes_allocated(), 0
    found = []
    for prompt in opened(path).prompts:
        found.append(question(prompt))
        peak = max(peak, pool.bytes_allocated() - before)
    assert found == ["<too_large>"] * 300 + ["small"]
    assert peak < 8 * MAX_ROW_BYTES


def test_group_of_rows_that_are_all_too_large_is_not_decoded(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}" * (MAX_ROW_BYTES + 9)} for number in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet", use_dictionary=False)
    prompts = list(opened(tmp_path / "p.parquet").prompts)
    assert [question(prompt) for prompt in prompts] == ["<too_large>"] * 3
    assert len({prompt.row_id for prompt in prompts}) == 3


# -- folders, splits, saved data sets


def test_folder_with_every_format_is_read_and_what_is_left_out_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "b.JSONL").write_text('{"prompt": "b"}\n')
    (tmp_path / "c.csv").write_text("prompt\nc\n")
    (tmp_path / "d.json").write_text('[{"prompt": "d"}]')
    (tmp_path / "notes.txt").write_text("prompt")
    (tmp_path / "dataset_infos.json").write_text("{}")
    stream = opened(tmp_path)
    assert [question(prompt) for prompt in stream.prompts] == ["a", "b", "c", "d"]
    assert stream.left_out == (
        f"notes.txt in {tmp_path}: they have no format that is read",
        f"dataset_infos.json in {tmp_path}: they describe a data set and have no rows",
    )


def test_file_of_a_folder_without_the_column_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("question\nb\n")
    assert refusal(tmp_path) == f"prompts.path: {tmp_path / 'b.csv'} has no column 'prompt'"


def test_column_that_only_some_files_have_is_null_in_the_others(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "system": ["s"]}), tmp_path / "b.parquet")
    first, second = opened(tmp_path, keep_columns=["system"]).prompts
    assert [len(first.messages), len(second.messages)] == [2, 3]
    assert [first.carried["system"], second.carried["system"]] == [None, "s"]


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (["data/train-00000-of-00001", "data/test-00000-of-00001"], None, [0]),
        (["data/train-00000-of-00001", "data/test-00000-of-00001"], "test", [1]),
        (["data/train_sft-00000-of-00001", "data/test_sft-00000-of-00001"], "train_sft", [0]),
        (["train/a", "valid/b"], "validation", [1]),
        (["my-dev-set", "other"], None, [1]),
        (["a", "b"], None, [0, 1]),
        (["test"], None, [0]),
        (["contest", "latest"], "train", [0, 1]),
    ],
)
def test_split_of_a_folder_is_told_by_the_names_of_its_files(
    tmp_path: Path, files: list[str], split: str | None, expected: list[int]
) -> None:
    for number, name in enumerate(files):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"prompt": str(number)}))
    stream = opened(tmp_path, split=split)
    assert sorted(question(prompt) for prompt in stream.prompts) == list(map(str, expected))
    assert bool(stream.left_out) == (len(expected) < len(files))


def test_split_that_no_file_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}')
    assert "has no split 'dev'; its files are named after train" in refusal(tmp_path, split="dev")
    said = refusal(tmp_path / "train.jsonl", split="test")
    assert said.endswith("is one file, which has no splits; remove the key")


def test_saved_data_sets_are_read_with_their_splits(tmp_path: Path) -> None:
    SPLIT.save_to_disk(tmp_path / "one")
    assert questions(tmp_path / "one") == TEXTS
    assert "is a data set without splits" in refusal(tmp_path / "one", split="test")
    datasets.DatasetDict({"sft": SPLIT}).save_to_disk(tmp_path / "only")
    assert questions(tmp_path / "only") == TEXTS
    datasets.DatasetDict({"a": SPLIT, "b": SPLIT}).save_to_disk(tmp_path / "two")
    assert "has no split 'train'; it has a, b" in refusal(tmp_path / "two")
    assert questions(tmp_path / "two", split="b") == TEXTS


def test_saved_data_set_without_rows_or_with_foreign_files_is_refused(tmp_path: Path) -> None:
    SPLIT.save_to_disk(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "_data_files": []}))
    assert refusal(tmp_path) == f"prompts.path: {tmp_path} has no rows"
    foreign = [{"filename": "../../secret.arrow"}]
    (tmp_path / "state.json").write_text(json.dumps({**state, "_data_files": foreign}))
    assert "names '../../secret.arrow', outside its folder" in refusal(tmp_path)
    (tmp_path / "state.json").write_text("[]")
    assert "is not what save_to_disk writes" in refusal(tmp_path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "p.parquet")
    assert refusal(tmp_path / "p.parquet").endswith("has two columns named 'prompt'")


@pytest.mark.parametrize("key", ["keep_columns", "id_column"])
def test_binary_column_does_not_become_text(tmp_path: Path, key: str) -> None:
    table = pa.table({"prompt": ["a"], "image": [b"\xff\x00"]})
    pq.write_table(table, tmp_path / "p.parquet")
    value: object = ["image"] if key == "keep_columns" else "image"
    assert f"prompts.{key}: 'image' has binary data" in refusal(
        tmp_path / "p.parquet", **{key: value}
    )
    assert questions(tmp_path / "p.parquet", column="image") == ["<not_text>"]
    assert questions(tmp_path / "p.parquet", template="{image}") == ["<not_text>"]


# -- splitting JSON

json_rows = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{},:ä\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"]', max_size=2), inner),
    max_leaves=6,
)


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(json_rows, max_size=5),
    indent=st.sampled_from([None, 1]),
    piece=st.integers(min_value=1, max_value=7),
)
def test_array_is_split_into_its_elements_wherever_the_reads_end(
    monkeypatch: pytest.MonkeyPatch, rows: list[object], indent: int | None, piece: int
) -> None:
    monkeypatch.setattr(json_values, "MIB", piece)
    stream = Pieces(json.dumps(rows, indent=indent, ensure_ascii=False).encode())
    elements = list(json_values.array_elements(stream))  # type: ignore[arg-type]
    assert [json.loads(element) for element in elements if isinstance(element, bytes)] == rows


class Pieces:
    """A stream that returns at most as many bytes as are asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read1(self, num_bytes: int) -> bytes:
        piece, self._data = self._data[:num_bytes], self._data[num_bytes:]
        return piece


def test_element_above_the_limit_is_passed_over_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_values, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(json_values, "MIB", 10)
    data = json.dumps([{"a": "x" * 5000}, {"a": "y"}]).encode()
    long, short = json_values.array_elements(Pieces(data))  # type: ignore[arg-type]
    assert isinstance(long, LongLine)
    assert long.num_bytes == len(json.dumps({"a": "x" * 5000}))
    assert isinstance(short, bytes)
    assert json.loads(short) == {"a": "y"}
