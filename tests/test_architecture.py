"""Imports point down, and each package has one door. Read from the sources, nothing is run."""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the ground up; a module imports only from lower floors. Neighbours do not import each other.
FLOORS = (
    ("pipeline.errors", "pipeline.durations"),
    ("schemas.prompt", "schemas.shard", "schemas.manifest"),
    ("schemas.section",),
    ("schemas.quality_config",),
    ("schemas.config", "schemas.completion", "schemas.plan", "schemas.live", "schemas.export"),
    ("schemas.estimate",),
    ("schemas.session", "schemas.progress"),
    ("pipeline.planner", "pipeline.chart_geometry"),
    ("pipeline.estimate_page",),
    ("pipeline.storage", "pipeline.object_store"),
    ("pipeline.store_folder", "pipeline.parquet_files"),
    (
        "pipeline.driver_lock",
        "pipeline.checkpoint",
        "pipeline.engine_deaths",
        "pipeline.intake",
        "pipeline.sources",
    ),
    ("pipeline.prompts", "pipeline.run_history", "pipeline.run_events", "pipeline.row_figures"),
    ("pipeline.looping",),
    ("pipeline.quality", "pipeline.languages"),
    ("pipeline.shards", "pipeline.rows", "pipeline.tries", "pipeline.races", "pipeline.status"),
    (
        "pipeline.engines.thinking",
        "pipeline.engines.counters",
        "pipeline.engines.tokens",
        "pipeline.engines.guard",
        "pipeline.engines.embedded",
        "pipeline.engines.embedded_server",
        "pipeline.engines.fake",
        "pipeline.engines.failure_wordings",
        "pipeline.engines.health",
        "pipeline.engines.gpus",
    ),
    ("pipeline.canary", "pipeline.suspects"),
    (
        "pipeline.engines.client",
        "pipeline.engines.launch_log",
        "pipeline.engines.blind_steps",
        "pipeline.diagnosis",
    ),
    ("pipeline.engines.ladder", "pipeline.engines.server"),
    ("pipeline.engines.launch_setting",),
    ("pipeline.engines.launch",),
    ("pipeline.engines.assembly",),
    ("pipeline.run_lengths", "pipeline.live_meter", "pipeline.live_log"),
    ("pipeline.run_query", "pipeline.metered_engine"),
    ("pipeline.live_estimate",),
    ("pipeline.live_eta",),
    ("pipeline.export_rows", "pipeline.export_launches"),
    ("pipeline.export_index",),
    ("pipeline.export", "pipeline.export_card", "pipeline.hub"),
    ("pipeline.report_sources", "pipeline.time_chart", "pipeline.run_series"),
    ("pipeline.report_engines", "pipeline.report_plan", "pipeline.report_spending"),
    ("pipeline.report",),
    ("pipeline.report_page", "pipeline.webhook"),
    ("pipeline.observer",),
    ("pipeline.worker_ports",),
    ("pipeline.worker",),
    ("pipeline.session",),
    ("pipeline.placement", "pipeline.metrics"),
    ("pipeline.coordinator",),
    ("pipeline.cluster", "pipeline.dry_run"),
    ("jobs.telling", "jobs.progress"),
    ("jobs.status", "jobs.plan", "jobs.estimate", "jobs.canary", "jobs.export", "jobs.report"),
    ("jobs.regenerate",),
)

DOORS = {
    # Metrics have a module of their own, because their names are a contract with dashboards.
    "ray": {"pipeline.cluster", "pipeline.placement", "pipeline.metrics"},
    "openai": {"pipeline.engines.client"},
    # Scopes of cancellation, as `openai` has them.
    "anyio": {"pipeline.engines.client"},
    "datasets": {"pipeline.sources"},
    "pyarrow": {
        "schemas.completion",
        "pipeline.checkpoint",
        "pipeline.intake",
        "pipeline.sources",
        "pipeline.worker",
        "pipeline.dry_run",
        "pipeline.run_lengths",
        "pipeline.object_store",
        "pipeline.storage",
        "pipeline.parquet_files",
        "pipeline.export_rows",
        "pipeline.export_index",
        "pipeline.export",
        "pipeline.export_card",
        "pipeline.row_figures",
    },
    "tqdm": {"jobs.progress"},
    "pydantic": {
        "schemas.config",
        "schemas.quality_config",
        "schemas.section",
        "pipeline.report_sources",
    },
    "pydantic_core": {"schemas.config"},
    "yaml": {"schemas.config"},
    "tokenizers": {"pipeline.engines.tokens"},
    "jinja2": {"pipeline.estimate_page", "pipeline.report_page"},
    "gguf": {"pipeline.engines.tokens"},
    "huggingface_hub": {"pipeline.engines.tokens", "pipeline.hub"},
    "py3langid": {"pipeline.languages"},
    "xllamacpp": {"pipeline.engines.embedded_server"},
    "subprocess": {
        "pipeline.engines.server",
        "pipeline.engines.guard",
        # One question to nvidia-smi.
        "pipeline.engines.gpus",
    },
    "pynvml": {"pipeline.engines.gpus"},
    "time": {
        "jobs.progress",
        "jobs.regenerate",
        "jobs.status",
        "jobs.export",
        "jobs.report",
        "pipeline.cluster",
        "pipeline.coordinator",
        "pipeline.worker",
        "pipeline.metered_engine",
        "pipeline.object_store",
        # Durations and deadlines of what happens outside: no record is stamped there.
        "pipeline.engines.assembly",
        "pipeline.engines.client",
        "pipeline.engines.guard",
    },
}

OURS = ("schemas", "pipeline", "jobs")


@cache
def modules() -> list[str]:
    files = [file for package in OURS for file in (ROOT / package).rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return sorted(name for name in names if not name.endswith("__init__"))


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())


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
            known = {name for name in inner if (ROOT / (name.replace(".", "/") + ".py")).exists()}
            names |= known or {str(node.module)}
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


def floor(module: str) -> int | None:
    for height, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return height
    return None


@pytest.mark.parametrize("module", modules())
def test_module_has_a_floor_and_imports_only_from_below(module: str) -> None:
    own = floor(module)
    assert own is not None, f"{module} has no floor: say where it stands"
    for name in imported(module):
        if name.split(".")[0] not in OURS:
            continue
        other = floor(name)
        same_room = name.rpartition(".")[0] == module.rpartition(".")[0] == "pipeline.planner"
        assert other is not None, f"{module} imports {name}, which has no floor"
        assert other < own or same_room, f"{module} imports {name}, which does not stand below it"


@pytest.mark.parametrize("module", modules())
def test_package_is_imported_through_its_door_alone(module: str) -> None:
    for name in imported(module):
        package = name.split(".")[0]
        if package in DOORS:
            assert module in DOORS[package], f"{module} imports {package}: not its door"


def test_driver_starts_without_the_libraries_that_only_some_of_its_work_needs() -> None:
    own = {name for name in imported("jobs.regenerate") if name in modules()}
    assert "pipeline.session" in own
    for module in own:
        assert not {"datasets", "openai"} & imported_with(module), module


def test_modules_are_not_named_after_others() -> None:
    for module in modules():
        name = module.rpartition(".")[2]
        assert name not in sys.stdlib_module_names, f"{module} hides a module of Python's"
        assert name not in DOORS, f"{module} hides a package"


def test_jobs_define_functions_only() -> None:
    for module in modules():
        if module.startswith("jobs."):
            classes = [node for node in tree(module).body if isinstance(node, ast.ClassDef)]
            assert not classes, f"{module}: a class there is another one on a worker"


def test_every_module_says_what_it_is() -> None:
    for module in modules():
        assert ast.get_docstring(tree(module)), module


def test_files_are_short_enough_to_be_read() -> None:
    for module in modules():
        lines = (ROOT / (module.replace(".", "/") + ".py")).read_text().count("\n")
        assert lines <= 560, f"{module} has {lines} lines"
