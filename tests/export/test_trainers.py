"""Exports of a run, loaded by SpecForge and speculators themselves: `make test-trainers`.

Runs only where TRAINERS_ENV names the environment that `tests/trainers/install.sh` makes. A target
with scripted answers and a real tokenizer answers a run of the job; what the trainers' own loading
and preprocessing make of the exports is compared with the ids that it generated.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import jobs.export
from pipeline.export.chats import ChatForm
from pipeline.export.files import data_files
from schemas.export import ExportFormat, ExportOptions
from tests.fakes.running import ROOT, new_run
from tests.fakes.tool_rows import CALL, TOOLS, with_tools

ENVIRONMENT = os.environ.get("TRAINERS_ENV")
HERE = ROOT / "tests" / "trainers"
END, MAX_LENGTH = "<|im_end|>", 4096
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    END,
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|channel|>",
)
# ChatML with thinking that the template opens nowhere and drops from earlier turns, as Qwen3's.
CHATML = """\
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}\
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > last.user and m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.ray,
    pytest.mark.skipif(not ENVIRONMENT, reason="needs TRAINERS_ENV; make test-trainers"),
]


def program(name: str) -> str:
    return f"{ENVIRONMENT}/bin/{name}"


def build_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer without merges, with a chat template that has thinking."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": SPECIAL[0],
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


@contextmanager
def served(tokenizer: Path) -> Iterator[str]:
    """Start the target; yield its address."""
    command = [program("python"), str(HERE / "target.py"), str(tokenizer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "the target did not start"
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def endpoint(url: str) -> dict[str, object]:
    return {"kind": "endpoint", "base_urls": [f"{url}/v1"], "served_model_name": "target"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A run of the job, and what its target generated."""

    folder: Path
    tokenizer: Path
    url: str
    has_thinking: bool
    rows: list[dict[str, Any]]

    @property
    def turns(self) -> list[dict[str, Any]]:
        return [turn for row in self.rows for turn in row["turns"]]

    @property
    def words(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))

    def decoded(self, ids: Sequence[int]) -> str:
        return str(self.words.decode(list(ids), skip_special_tokens=False))


def chat(row_id: str, *questions: str, system: str | None = None) -> dict[str, Any]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": "to be replaced"})
    return {"id": row_id, "messages": messages}


PROMPTS = [
    chat("one", "is it so?"),
    chat("system", "why?", system="Be brief."),
    chat("three", "first?", "second?", "third?"),
    chat("two", "ein Wort über Bäume", "再说一次", system="Sprich Deutsch."),
    # The engine ends the last turn at its limit of tokens, without the end token.
    chat("cut", "whole", "cut here"),
    *(chat(f"more{n}", f"question {n}", f"and {n + 1}") for n in range(20)),
]
NUM_TURNS = 1 + 1 + 3 + 2 + 2 + 40


@pytest.fixture(scope="module", params=["built", "qwen3", "qwen3 without thinking"])
def generated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Generated]:
    root = tmp_path_factory.mktemp("run")
    name, _, without = request.param.partition(" ")
    tokenizer = Path(f"{ENVIRONMENT}/qwen3")
    if name == "built":
        tokenizer = build_tokenizer(root / "tokenizer")
    elif not (tokenizer / "tokenizer.json").exists():
        pytest.skip("install.sh found no npm to take Qwen3's tokenizer from")
    with served(tokenizer) as url:
        run = new_run(
            root,
            PROMPTS,
            model="target",
            thinking=not without,
            engine=endpoint(url),
        )
        ended = run.finish()
        assert ended.code == 0, ended.err
        yield Generated(
            folder=run.folder,
            tokenizer=tokenizer,
            url=url,
            has_thinking=not without,
            rows=run.published().to_pylist(),
        )


def exported(run: Generated, dest: Path, *options: str) -> Path:
    """Export; return the folder of the data files."""
    arguments = [str(run.folder), "--to", str(dest), "--drop", "", *options]
    assert jobs.export.main(arguments) == 0
    return dest / "data"


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def printed(command: Sequence[str], tmp_path: Path) -> str:
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def by_specforge(
    file: Path, tokenizer: Path, template: str, tmp_path: Path, *last: str
) -> list[dict[str, list[int]]]:
    script = str(HERE / "load_specforge.py")
    command = [program("python"), script, str(file), str(tokenizer), template, f"{MAX_LENGTH}"]
    rows: list[dict[str, list[int]]] = json.loads(printed([*command, *last], tmp_path))
    return rows


def by_speculators(
    data: Path, tokenizer: Path, tmp_path: Path, *render: str
) -> list[dict[str, list[int]]]:
    prepared = tmp_path / "prepared"
    command = [program("speculators"), "prepare-data", "--model", str(tokenizer)]
    command += ["--data", str(data), "--output", str(prepared), "--seq-length", f"{MAX_LENGTH}"]
    printed([*command, "--num-preprocessing-workers", "1", *render], tmp_path)
    script = str(HERE / "load_speculators.py")
    rows: list[dict[str, list[int]]] = json.loads(
        printed([program("python"), script, str(prepared)], tmp_path)
    )
    return rows


def masked(row: dict[str, list[int]]) -> list[list[int]]:
    """The runs of ids that the trainer learns from."""
    assert len(row["input_ids"]) == len(row["loss_mask"])
    pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
    return [
        [number for number, _ in run]
        for is_on, run in groupby(pairs, lambda pair: pair[1])
        if is_on
    ]


def counted(rows: Sequence[object]) -> Counter[str]:
    """Compare rows of any order: both trainers shuffle."""
    return Counter(json.dumps(row) for row in rows)


# -- tokens: exactly what the target had


def test_run_has_what_the_exports_are_compared_with(generated: Generated) -> None:
    assert len(generated.rows) == len(PROMPTS)
    assert len(generated.turns) == NUM_TURNS
    end = generated.words.token_to_id(END)
    ends = [turn["completion_token_ids"][-1] == end for turn in generated.turns]
    assert ends.count(False) == 1


@pytest.mark.parametrize("trainer", ["specforge", "speculators"])
def test_token_rows_reach_the_trainer_as_the_target_had_them(
    generated: Generated, tmp_path: Path, trainer: str
) -> None:
    data = exported(generated, tmp_path / "d", "--format", "tokens", "--file-type", "jsonl")
    if trainer == "specforge":
        file = data / "train-00000.jsonl"
        rows = by_specforge(file, generated.tokenizer, "qwen3-thinking", tmp_path)
    else:
        rows = by_speculators(data, generated.tokenizer, tmp_path)
    expected = [
        (
            turn["prompt_token_ids"] + turn["completion_token_ids"],
            [0] * len(turn["prompt_token_ids"]) + [1] * len(turn["completion_token_ids"]),
        )
        for turn in generated.turns
    ]
    assert counted([(row["input_ids"], row["loss_mask"]) for row in rows]) == counted(expected)


# -- text, rendered by the trainer again


def spoken(turn: dict[str, Any], *, with_reasoning: bool) -> str:
    """Text of a turn in Qwen3's and the built template, with the end token and its line feed."""
    reasoning = turn["reasoning_text"] if with_reasoning else None
    opening = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return f"{opening}{turn['answer_text']}{END}\n"


def test_conversations_reach_specforge_with_the_mask_on_the_answers(
    generated: Generated, tmp_path: Path
) -> None:
    data = exported(generated, tmp_path / "d", "--format", "specforge")
    template = "qwen3-thinking" if generated.has_thinking else "qwen3-instruct"
    rows = by_specforge(data / "train-00000.jsonl", generated.tokenizer, template, tmp_path)
    found = [[generated.decoded(ids) for ids in masked(row)] for row in rows]
    # The template drops the thinking of all turns but the last.
    expected = [
        [
            spoken(turn, with_reasoning=turn is row["turns"][-1] and generated.has_thinking)
            for turn in row["turns"]
        ]
        for row in generated.rows
    ]
    assert counted(found) == counted(expected)


def test_only_the_last_turn_is_learnt_where_specforge_is_told_so(
    generated: Generated, tmp_path: Path
) -> None:
    if not generated.has_thinking:
        pytest.skip("for templates that drop earlier thinking")
    data = exported(generated, tmp_path / "d", "--format", "specforge")
    file = data / "train-00000.jsonl"
    rows = by_specforge(file, generated.tokenizer, "qwen3-thinking", tmp_path, "last")
    found = [[generated.decoded(ids) for ids in masked(row)] for row in rows]
    expected = [[spoken(row["turns"][-1], with_reasoning=True)] for row in generated.rows]
    assert counted(found) == counted(expected)


def test_conversations_reach_speculators_as_a_row_per_turn(
    generated: Generated, tmp_path: Path
) -> None:
    data = exported(generated, tmp_path / "d", "--format", "speculators")
    rows = by_speculators(data, generated.tokenizer, tmp_path, "--render-endpoint", generated.url)
    assert len(rows) == NUM_TURNS
    if not generated.has_thinking:
        # The renders of speculators have no words for the template, so that they open no empty
        # thinking in the prompt and learn it as the answer's.
        assert all(len(masked(row)) == 1 for row in rows)
        return
    (line_feed,) = generated.words.encode("\n").ids
    expected = []
    for turn in generated.turns:
        # A turn that was cut gets the end token from the template.
        end = [] if turn["finish_reason"] == "stop" else [generated.words.token_to_id(END)]
        learnt = [*turn["completion_token_ids"], *end, line_feed]
        expected.append((turn["prompt_token_ids"] + learnt, [learnt]))
    assert counted([(row["input_ids"], masked(row)) for row in rows]) == counted(expected)


@pytest.mark.parametrize("trainer", ["specforge", "speculators"])
def test_rows_cut_at_a_turn_reach_the_trainer_whole(
    generated: Generated, tmp_path: Path, trainer: str
) -> None:
    (three,) = [row for row in generated.rows if row["row_id"] == "three"]
    first, second, third = (
        turn["prompt_tokens"] + turn["completion_tokens"] for turn in three["turns"]
    )
    assert first < second < third
    limit = ("--max-tokens", f"{third - 1}", "--cut")
    data = exported(generated, tmp_path / "d", "--format", trainer, *limit)
    listed = (tmp_path / "d" / "dropped.jsonl").read_text().splitlines()
    dropped = [json.loads(line) for line in listed]
    cut = {one["row_id"]: one["turns_kept"] for one in dropped if "turns_kept" in one}
    left_out = {one["row_id"] for one in dropped if "turns_kept" not in one}
    assert cut["three"] == 2
    kept = {
        row["row_id"]: row["turns"][: cut.get(row["row_id"], 99)]
        for row in generated.rows
        if row["row_id"] not in left_out
    }
    if trainer == "specforge":
        file = data / "train-00000.jsonl"
        rows = by_specforge(file, generated.tokenizer, "qwen3-thinking", tmp_path)
        assert len(rows) == len(kept)
        ends = [generated.decoded(row["input_ids"]) for row in rows]
        answers = [turns[-1]["answer_text"] for turns in kept.values()]
        assert all(sum(answer in end for end in ends) for answer in answers)
    else:
        render = ("--render-endpoint", generated.url)
        rows = by_speculators(data, generated.tokenizer, tmp_path, *render)
        assert len(rows) == sum(len(turns) for turns in kept.values())
    # The template adds an end token at most, and its line feed.
    assert max(len(row["input_ids"]) for row in rows) <= third - 1 + 2 + _system_tokens(generated)


def _system_tokens(run: Generated) -> int:
    """Tokens of the system turn that SpecForge adds to a conversation without one."""
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    return len(run.words.encode(text).ids)


# -- tools and channels


def written(tmp_path: Path, format_: ExportFormat, form: ChatForm) -> Path:
    """Write the rows of `with_tools` as an export does."""
    columns, _ = form.columns(with_tools(calls=[CALL], tools=TOOLS))
    table = pa.table(dict(columns))
    file = tmp_path / f"{format_}.jsonl"
    files = data_files(ExportOptions(file_type="jsonl", compression="none"))
    with file.open("wb") as stream, files.writer(stream, table.schema) as writer:
        writer.write_table(table)
    return file


@pytest.fixture
def qwen3() -> Path:
    folder = Path(f"{ENVIRONMENT}/qwen3")
    if not (folder / "tokenizer.json").exists():
        pytest.skip("install.sh found no npm to take Qwen3's tokenizer from")
    return folder


CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
ANSWERED = "<think>\nso\n</think>\n\nthree<|im_end|>\n"


@pytest.mark.parametrize("trainer", ["specforge", "speculators"])
def test_tools_and_calls_reach_the_trainers_template(
    tmp_path: Path, qwen3: Path, trainer: str
) -> None:
    words = Tokenizer.from_file(str(qwen3 / "tokenizer.json"))
    if trainer == "specforge":
        form = ChatForm(format="specforge", reasoning="apart", has_tools=True)
        file = written(tmp_path, "specforge", form)
        rows = by_specforge(file, qwen3, "qwen3-thinking", tmp_path)
        learnt = [[CALLED, ANSWERED], [ANSWERED]]
    else:
        form = ChatForm(format="speculators", reasoning="apart", has_tools=True)
        file = written(tmp_path, "speculators", form)
        with served(qwen3) as url:
            rows = by_speculators(file, qwen3, tmp_path, "--render-endpoint", url)
        learnt = [[f"<think>\n\n</think>\n\n{CALLED}"], [ANSWERED], [ANSWERED]]
    texts = [words.decode(row["input_ids"], skip_special_tokens=False) for row in rows]
    found = [[words.decode(ids, skip_special_tokens=False) for ids in masked(row)] for row in rows]
    assert sorted(map(len, found)) == sorted(map(len, learnt))
    assert sum("# Tools" in text for text in texts) == len(learnt) - 1
    assert counted(found) == counted(learnt)


def test_gpt_oss_reaches_specforge_in_its_channels(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path / "tokenizer")
    form = ChatForm(format="specforge", reasoning="apart", harmony_effort="medium")
    file = written(tmp_path, "specforge", form)
    # The row with tool turns is left out of an export.
    last = [line for line in file.read_text().splitlines() if '"id":"b"' in line]
    file.write_text("\n".join(last) + "\n")
    (row,) = by_specforge(file, tokenizer, "gpt-oss", tmp_path)
    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert "Reasoning: medium" in words.decode(row["input_ids"], skip_special_tokens=False)
    (learnt,) = masked(row)
    assert words.decode(learnt, skip_special_tokens=False) == (
        "<|channel|>analysis<|message|>so<|end|>"
        "<|start|>assistant<|channel|>final<|message|>three<|end|>"
    )


# -- the page


def commands(program_name: str) -> list[list[str]]:
    """Commands of a program in docs/trainers.md."""
    lines = (ROOT / "docs" / "trainers.md").read_text().splitlines()
    return [line.split()[1:] for line in lines if line.startswith(f"{program_name} ")]


def test_speculators_has_the_commands_and_options_of_the_page() -> None:
    found = commands("speculators")
    assert len(found) == 3
    for command, *arguments in found:
        done = subprocess.run(
            [program("speculators"), command, "--help"],
            env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        known = {word.strip("│|,") for word in done.stdout.replace("/", " ").split()}
        assert {word for word in arguments if word.startswith("--")} <= known


def test_specforge_plans_the_commands_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "trainers.md").read_text()
    config = page.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "drafter.yaml").write_text(config)
    found = commands("specforge")
    assert len(found) == 2
    for arguments in found:
        done = subprocess.run(
            [program("specforge"), *arguments, "--plan"],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
