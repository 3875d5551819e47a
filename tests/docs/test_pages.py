"""README and docs say what the commands do: each command is accepted, and the cheap ones run."""

import re
import shutil
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from jobs import cli
from pipeline.console.events import EVENTS
from pipeline.recipes.reference import reference_text
from pipeline.store.folder import LocalFolder
from schemas.completion import COMPLETION_SCHEMA
from schemas.config.run_file import RunFile
from tests.docs.pictures import PLAN_PICTURE, plan_picture
from tests.docs.reading import (
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    command_words,
    links,
    shell_lines,
)
from tests.fakes.example_run import write_example_run
from tests.fakes.published_run import conversation_row, published_run

BLOCKS = blocks()
COMMANDS = list(
    dict.fromkeys(line for block in BLOCKS for line in shell_lines(block) if command_words(line))
)
# Commands that read a run, without those that go on until they are stopped or need a store.
FOLDER_COMMANDS = [
    line
    for line in COMMANDS
    if re.search(r"(status|report|export|canary|--update-from) (FOLDER|out/)", line)
    and not re.search(r"--watch|--serve|s3://", line)
]
CONSOLE = [block for block in BLOCKS if block.language == "console"]
RUN_FILES = [block for block in BLOCKS if block.language == "yaml" and "output:" in block.text]
MOST_README_WORDS = 1500
# Words of examples, and values of their kind.
PLACEHOLDERS = {"GPU": "b200", "LOG": "engine.log", "RUN.yaml": "run.yaml", "FOLDER": "out/run"}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_README_WORDS


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_accepted(line: str) -> None:
    found = command_words(line)
    assert found is not None
    module, words = found
    if module == "jobs.completion":
        assert words in (["bash"], ["zsh"], ["tcsh"])
        return
    # The planner takes the words after `--` itself.
    own = words[: words.index("--")] if "--" in words else words
    parser = import_module(module).argument_parser()
    options = parser.parse_args([PLACEHOLDERS.get(word, word) for word in own])
    run_file = str(getattr(options, "run_file", None) or "")
    assert not run_file.startswith("jobs/") or (ROOT / run_file).is_file()


@pytest.mark.parametrize("name", ["init", "run", "plan", "estimate", "status", "report", "export"])
def test_readme_shows_every_main_command(name: str) -> None:
    assert f"regenerate {name} " in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.name)
def test_output_is_as_shown(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the command of a console block, and find the lines shown, in order, in what it prints."""
    monkeypatch.chdir(ROOT)
    (line,) = shell_lines(block)
    words = line.split()[1:]
    assert cli.main(words) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for shown in block.text.splitlines()[1:]:
        if shown != "...":
            assert any(shown.rstrip() == out.rstrip() for out in printed), shown


def test_commands_of_the_first_hour_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"id": "q1", "prompt": "Why is the sky blue?"}\n')
    inits = [line for line in COMMANDS if line.startswith("regenerate init prompts.jsonl")]
    assert len(inits) >= 3
    for line in inits:
        words = command_words(line)
        assert words is not None
        (tmp_path / "run.yaml").unlink(missing_ok=True)
        assert cli.main(["init", *words[1]]) == 0, line
        assert RunFile.model_validate(yaml.safe_load((tmp_path / "run.yaml").read_text()))
    (tmp_path / "run.yaml").unlink()
    assert cli.main(["init", "prompts.jsonl"]) == 0
    assert cli.main(["run", "run.yaml", "--dry-run"]) == 0
    assert "rows       1 to generate" in capsys.readouterr().out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a finished run, `run`, and one that is watched, `example`."""
    root = tmp_path_factory.mktemp("runs")
    published_run(root, [conversation_row(f"r{n}", (f"answer {n}", None)) for n in range(5)])
    write_example_run(LocalFolder(root / "example"), num_parts=6)
    return root


@pytest.mark.parametrize("line", FOLDER_COMMANDS)
def test_command_on_a_run_works(line: str, runs: Path, tmp_path: Path) -> None:
    found = command_words(line)
    assert found is not None
    module, words = found
    kind = "run" if module == "jobs.export" else "example"
    copy = tmp_path / "copy"
    shutil.copytree(runs / kind, copy)
    if "--to" in words:
        words[words.index("--to") + 1] = str(tmp_path / "export")
    words = [str(copy) if word == "FOLDER" or word.startswith("out/") else word for word in words]
    assert import_module(module).main(words) == 0


@pytest.mark.parametrize("block", RUN_FILES, ids=lambda block: block.name)
def test_run_file_is_valid(block: Block) -> None:
    assert RunFile.model_validate(yaml.safe_load(block.text))


def test_own_file_of_the_readme_has_five_lines() -> None:
    (block,) = [one for one in RUN_FILES if one.page.name == "README.md"]
    assert len(block.text.splitlines()) == 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            continue
        where, _, anchor = link.partition("#")
        target = (page.parent / where).resolve() if where else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


def test_messages_of_the_remedies_are_those_of_the_sources() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    seen = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    events = {name for cell in seen for name in re.findall(r"event=(\w+)", cell)}
    assert events <= EVENTS.keys()
    messages = [text for cell in seen for text in re.findall(r'`([^`]*…[^`]*)`|"([^"]+)"', cell)]
    source = strings_of_the_sources()
    pieces = [piece.strip() for pair in messages for piece in "".join(pair).split("…")]
    assert len(pieces) > 30
    assert [piece for piece in pieces if piece.strip(" :;,") and piece not in source] == []


def strings_of_the_sources() -> str:
    """Return the sources, with texts that go over several lines joined."""
    files = (
        file for room in ("jobs", "pipeline", "schemas") for file in (ROOT / room).rglob("*.py")
    )
    return "\n".join(re.sub(r'"\n\s*f?"', "", file.read_text()) for file in files)


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/-]+\.md", text))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}


def test_reference_of_the_run_file_is_current() -> None:
    assert (ROOT / "docs" / "run-file.md").read_text() == reference_text()


def test_every_key_of_the_run_file_is_described() -> None:
    rows = [line for line in reference_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if row.endswith("|  |")] == []


def test_picture_of_the_plan_is_current() -> None:
    assert PLAN_PICTURE.read_text() == plan_picture()


def test_columns_of_the_output_are_those_of_the_schema() -> None:
    text = (ROOT / "docs" / "output.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE)
    turn = COMPLETION_SCHEMA.field("turns").type.value_type
    fields = [*COMPLETION_SCHEMA, *(turn.field(place) for place in range(turn.num_fields))]
    assert listed == [(field.name, kind_of(field.type)) for field in fields]


def kind_of(kind: pa.DataType) -> str:
    """Return the word of the page for a type; nested ones are described in words."""
    return re.split(r"[<\[]", str(kind))[0]
