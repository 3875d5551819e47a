"""Imports run one way between the rooms, and each package has one door.

Everything is read from the sources; nothing is run. A new file needs no entry here: its folder
says what it may import.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("schemas", "pipeline", "jobs")

CONFIG = "schemas.config"
STORE = "pipeline.store"
MODELS = "pipeline.models"
CHAT_TEMPLATE = "pipeline.chat_template"
CARDS = "pipeline.planner"
SGLANG = "pipeline.planner.sglang"
MEMORY = "pipeline.planner.memory"
LENGTHS = "pipeline.planner.lengths"
RATE = "pipeline.planner.rate"
RATE_READINGS = "pipeline.planner.rate.readings"
ESTIMATE = "pipeline.planner.estimate"
RUN_FILE = "pipeline.run_file"
QUALITY = "pipeline.quality"
SOURCES = "pipeline.dataset.sources"
DATASET = "pipeline.dataset"
EXPORT = "pipeline.export"
LIVE = "pipeline.live"
TRIAL = "pipeline.trial"
ENGINES = "pipeline.engines"
WIRE = "pipeline.engines.wire"
PROCESS = "pipeline.engines.process"
UNTRUSTED = "pipeline.untrusted"
RECIPES = "pipeline.recipes"
DEPLOY = "pipeline.recipes.deploy"
REPORT = "pipeline.report"
REPORT_ROWS = "pipeline.report.rows"
CHARTS = "pipeline.report.charts"
COURSE = "pipeline.report.course"
CONSOLE = "pipeline.console"
WORKER = "pipeline.worker"
CONNECTION = "pipeline.run.connection"
RUN = "pipeline.run"
PLANNER = {CARDS, SGLANG, MEMORY, LENGTHS, RATE, RATE_READINGS, ESTIMATE}

# Folder: the folders that it may import, besides itself. All may import `pipeline.errors`; all but
# `schemas` `pipeline.untrusted`; and all but `pipeline` and `CONFIG` the `schemas`.
# `pipeline.run_file` is the one file beside the folders that has rules of its own.
MAY_IMPORT: dict[str, set[str]] = {
    "pipeline": set(),
    UNTRUSTED: set(),
    CONFIG: {"pipeline"},
    "schemas": {"pipeline", CONFIG},
    STORE: set(),
    MODELS: set(),
    CARDS: set(),
    SGLANG: {MODELS},
    LENGTHS: set(),
    MEMORY: {CARDS, SGLANG, MODELS},
    RATE_READINGS: {MODELS},
    RATE: {RATE_READINGS, CARDS, SGLANG, MODELS, MEMORY, LENGTHS},
    ESTIMATE: {CARDS, SGLANG, MODELS, MEMORY, LENGTHS, RATE, RATE_READINGS},
    RUN_FILE: {MODELS, *PLANNER},
    CHAT_TEMPLATE: {MODELS, SGLANG},
    QUALITY: {MODELS, LENGTHS},
    SOURCES: {STORE},
    DATASET: {SOURCES, STORE, MODELS, SGLANG, LENGTHS},
    EXPORT: {DATASET, STORE, MODELS, SGLANG},
    LIVE: {DATASET, RUN_FILE, STORE, MODELS, *PLANNER},
    TRIAL: set(),
    WIRE: {MODELS},
    PROCESS: {SGLANG},
    ENGINES: {WIRE, PROCESS, CHAT_TEMPLATE, LIVE, RUN_FILE, STORE, MODELS, *PLANNER},
    REPORT_ROWS: {DATASET, STORE},
    CHARTS: {REPORT_ROWS},
    COURSE: {REPORT_ROWS, CHARTS, LIVE, DATASET, STORE},
    REPORT: {REPORT_ROWS, CHARTS, COURSE, LIVE, DATASET, RUN_FILE, STORE, *PLANNER},
    RECIPES: {DATASET, SOURCES, RUN_FILE, *PLANNER},
    DEPLOY: {RECIPES, SOURCES, RUN_FILE, *PLANNER},
    CONSOLE: {LIVE, STORE},
    WORKER: {QUALITY, DATASET},
    CONNECTION: set(),
    RUN: {
        CONNECTION,
        *(TRIAL, WORKER, ENGINES, WIRE, REPORT, CONSOLE, LIVE, QUALITY, DATASET, RUN_FILE, STORE),
        MODELS,
        *(CHAT_TEMPLATE, *PLANNER),
    },
    "jobs": {
        *(RUN, ENGINES, RECIPES, DEPLOY, REPORT, CONSOLE, LIVE, EXPORT, QUALITY, DATASET, SOURCES),
        *(RUN_FILE, STORE, MODELS),
        *(CHAT_TEMPLATE, *PLANNER),
    },
}  # fmt: skip

# Package: the folders, or single modules, through which it comes in.
DOORS: dict[str, set[str]] = {
    "ray": {RUN, CONNECTION},
    "openai": {WIRE},
    # HTTP of `openai` and of the hub's library, with the errors of its transport.
    "httpx2": {WIRE, "pipeline.models.hub"},
    "aiohttp": {WIRE},
    "orjson": {ENGINES, WIRE, UNTRUSTED},
    "datasets": {SOURCES},
    "pyarrow": {"schemas.completion", STORE, SOURCES, DATASET, EXPORT, REPORT_ROWS, RUN},
    "rich": {"pipeline.console.console"},
    "pydantic": {"schemas", CONFIG},
    "pydantic_core": {CONFIG},
    "yaml": {CONFIG},
    "tokenizers": {MODELS},
    "huggingface_hub": {MODELS, EXPORT},
    # Templates of models run in a process of their own.
    "jinja2": {REPORT, DEPLOY, "pipeline.chat_template.sandbox"},
    "py3langid": {QUALITY},
    # One inverse of a few hundred rows.
    "numpy": {RATE_READINGS},
    "xllamacpp": {ENGINES},
    "subprocess": {ENGINES, PROCESS, "pipeline.chat_template.rendering"},
    "pynvml": {ENGINES},
    "urllib.request": {"pipeline.report.webhook"},
    "http.server": {"pipeline.report.serve"},
    "time": {
        "pipeline.store.lock",
        "pipeline.store.object_store",
        CONSOLE,
        ENGINES,
        PROCESS,
        WORKER,
        RUN,
        CONNECTION,
        "jobs",
    },
}

# First words of a docstring that is a fragment rather than a sentence.
NEITHER_NOUN_NOR_VERB = {
    *("of", "by", "as", "at", "for", "from", "in", "on", "to", "with", "until", "upon", "within"),
    *("what", "whether", "how", "where", "when", "why", "which", "who", "if", "so", "than", "that"),
    *("all", "both", "each", "every", "none", "nothing", "one", "such", "those", "these", "it"),
}

MAX_FILES_IN_FOLDER = 14
MAX_FILES_BESIDE_FOLDERS = 4
MAX_LINES_OF_FILE = 550
MAX_LINES_OF_CLASS = 330


@cache
def modules() -> list[str]:
    files = [file for package in OURS for file in (ROOT / package).rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return sorted(name for name in names if not name.endswith("__init__"))


@cache
def source(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


@cache
def imported(module: str) -> set[str]:
    """Every module that this one names in an import, wherever the import stands."""
    return named_in(module, ast.walk(tree(module)))


def named_in(module: str, nodes: Iterable[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & set(modules()) or {str(node.module)}
    return names


def imported_with(module: str) -> set[str]:
    """All that is imported when this module is: by it, and by what it imports."""
    met: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in met:
            met.add(name)
            if name in modules():
                waiting += named_in(name, tree(name).body)
    return met


def room(module: str) -> str:
    return module if module in MAY_IMPORT else module.rpartition(".")[0]


def ours_imported(module: str) -> set[str]:
    return imported(module) & set(modules())


def check_no_circle(arrows: dict[str, set[str]]) -> None:
    try:
        list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        pytest.fail(f"imports go round: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("module", modules())
def test_module_imports_only_from_the_rooms_that_its_room_may_import(module: str) -> None:
    own = room(module)
    assert own in MAY_IMPORT, f"{module}: {own} is not a room"
    for name in ours_imported(module):
        other = room(name)
        records = set() if own in {"pipeline", CONFIG} else {"schemas", CONFIG}
        may = {own, *MAY_IMPORT[own]} | records
        is_for_all = name == "pipeline.errors" or (other == UNTRUSTED and own != "schemas")
        assert is_for_all or other in may, f"{module} imports {name}: {own} may not import {other}"


def test_no_circle_among_modules() -> None:
    check_no_circle({module: ours_imported(module) for module in modules()})


def test_no_circle_among_rooms() -> None:
    arrows: dict[str, set[str]] = {name: set() for name in MAY_IMPORT}
    for module in modules():
        own = room(module)
        arrows[own] |= {room(name) for name in ours_imported(module)} - {own}
    check_no_circle(arrows)


def test_rooms_that_may_be_imported_are_rooms() -> None:
    assert {name for names in MAY_IMPORT.values() for name in names} <= set(MAY_IMPORT)
    check_no_circle(MAY_IMPORT)


@pytest.mark.parametrize("module", modules())
def test_package_is_imported_through_its_door_alone(module: str) -> None:
    for name in imported(module):
        for package, doors in DOORS.items():
            if f"{name}.".startswith(f"{package}."):
                is_door = {module, room(module), module.split(".")[0]} & doors
                assert is_door, f"{module} imports {name}: not its door"


def test_driver_starts_without_the_libraries_that_only_some_of_its_work_needs() -> None:
    own = {name for name in imported("jobs.regenerate") if name in modules()}
    assert "pipeline.run.session" in own
    for module in own:
        assert not {"datasets", "openai"} & imported_with(module), module


def test_modules_are_not_named_after_others() -> None:
    for module in modules():
        name = module.rpartition(".")[2]
        is_top = module.count(".") == 0
        assert not is_top or name not in sys.stdlib_module_names, f"{module} hides a module"
        assert name not in DOORS or name == "time", f"{module} hides a package"


def test_jobs_define_functions_only() -> None:
    for module in modules():
        if module.startswith("jobs."):
            classes = [node for node in tree(module).body if isinstance(node, ast.ClassDef)]
            assert not classes, f"{module}: a class there is another one on a worker"


def test_every_module_and_folder_says_what_it_is() -> None:
    for module in modules():
        assert ast.get_docstring(tree(module)), module
    for package in OURS:
        for file in (ROOT / package).rglob("__init__.py"):
            assert ast.get_docstring(ast.parse(file.read_text())), file


def documented(module: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring of a module, those of attributes included."""
    for node in ast.walk(tree(module)):
        body = getattr(node, "body", None)
        for before, after in pairwise(body if isinstance(body, list) else ()):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(before, ast.AnnAssign | ast.Assign) and is_text:
                yield after.lineno, str(after.value.value)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize("module", modules())
def test_docstrings_begin_with_a_verb_or_a_noun(module: str) -> None:
    for line, text in documented(module):
        words = text.lower().split()
        is_fragment = words[0].strip(".,:;") in NEITHER_NOUN_NOR_VERB or words[:2] == [
            "the",
            "same",
        ]
        assert not is_fragment, f"{module}:{line}: {text.splitlines()[0]}"


def test_folders_hold_a_handful_of_files() -> None:
    folders = {file.parent for package in OURS for file in (ROOT / package).rglob("*.py")}
    for folder in folders:
        files = [file for file in folder.iterdir() if file.is_file()]
        files = [file for file in files if file.name != "__init__.py" or folder.name == "pipeline"]
        most = MAX_FILES_BESIDE_FOLDERS if folder.name == "pipeline" else MAX_FILES_IN_FOLDER
        assert len(files) <= most, f"{folder} holds {len(files)} files"


def test_files_and_classes_are_short_enough_to_be_read() -> None:
    for module in modules():
        lines = source(module).count("\n")
        assert lines <= MAX_LINES_OF_FILE, f"{module} has {lines} lines"
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= MAX_LINES_OF_CLASS, f"{module}.{node.name} has {length} lines"
