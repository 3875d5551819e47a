"""A planned run as the files that submit it need it: its run file, and its nodes and their needs.

The numbers come from one plan. What the plan does not know, such as the memory of the host, is
assumed here, each figure with its source.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.dataset.sources.files import is_file_name
from pipeline.errors import ConfigError, PlanError
from pipeline.planner.cards import gpu_key
from pipeline.planner.estimate import figures
from pipeline.planner.sglang.layout import cards_of
from pipeline.planner.sglang.releases import rules_for
from pipeline.recipes.deploy.launch import PlannedLaunch
from pipeline.recipes.flags import engine_flags
from pipeline.recipes.schema import SCHEMA_FILE
from schemas.config.reader import run_file_of, run_file_text
from schemas.config.section import is_url
from schemas.plan import LaunchPlan
from schemas.units import GIB

# Of the image that jobs/deploy/Dockerfile builds.
_IMAGE_PYTHON = "/usr/local/bin/sglang-python"
_EMBEDDED_KEYS = {"model_file", "threads"}
# GPUs of the largest usual machine.
_MOST_GPUS_PER_NODE = 8
# The tokenizer, the scheduler and the worker of one engine; estimate.py warns below it as well.
_CPUS_PER_GPU = 8
# assumed: processes of one engine and Ray's share, without the page cache of the weights
_HOST_GIB_PER_GPU = 32
# As SGLang's own Docker commands give it: --shm-size 32g. docs.sglang.io, install, 2026-11
_SHM_GIB = 32
# Time to flush after the drain, before Ray or a scheduler kills the driver.
_AFTER_DRAIN_S = 10
# Slurm sends signals up to 60 s late. slurm.schedmd.com/sbatch.html, --signal
_SIGNAL_LATE_S = 60
_LEAST_WARNING_S = 180
# A file system that needs longer than the default to take a flush is usual on a cluster.
_DRAIN_S = 20.0
# KubeRay refuses longer names of a RayJob, and those that begin with a digit. validation.go, 1.7.0
_LONGEST_NAME = 47

# Names of cards as NVIDIA's device plugin labels nodes with them, and as SkyPilot's catalogue
# lists them. nvidia.com/gpu.product in public node listings; skypilot 0.14.1, catalog
_PRODUCT_LABELS = {
    "rtx-pro-6000": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "rtx-pro-6000-max-q": "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition",
    "l4": "NVIDIA-L4",
    "l40s": "NVIDIA-L40S",
    "a100-40gb": "NVIDIA-A100-SXM4-40GB",
    "a100-80gb": "NVIDIA-A100-SXM4-80GB",
    "h100": "NVIDIA-H100-80GB-HBM3",
    "h200": "NVIDIA-H200",
    "b200": "NVIDIA-B200",
    "b300": "NVIDIA-B300-SXM6-AC",
}
_ACCELERATORS = {
    "rtx-pro-6000": "RTXPRO6000",
    "rtx-pro-6000-max-q": "RTXPRO6000-MaxQ",
    "rtx-5090": "RTX5090",
    "rtx-4090": "RTX4090",
    "rtx-3090": "RTX3090",
    "l4": "L4",
    "l40s": "L40S",
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "h100": "H100",
    "h100-nvl": "H100-NVL",
    "h200": "H200",
    "gh200": "GH200",
    "b200": "B200",
    "b300": "B300",
    "gb200": "GB200",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run on nodes of one kind."""

    name: str
    summary: str
    run_file: str
    gpu: str
    release: str
    """Release of SGLang that the plan is for."""
    product_label: str | None
    accelerator: str | None
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    memory_gib_per_node: int
    shm_gib: int
    stop_wait_s: int
    warning_s: int
    """Time between Slurm's signal and the time limit."""
    shared: str
    """Folder that all nodes share."""
    moved_paths: tuple[tuple[str, str], ...]
    """Paths of the run file that were relative, and where they are below `shared`."""


def submission_of(values: Mapping[str, Any], launch: PlannedLaunch, *, shared: str) -> Submission:
    """Return the submission of a run file's values with the plan's launch.

    Raises ConfigError for a run whose engines are not started by it, and PlanError for one that
    no usual machine has the cards for.
    """
    if not re.fullmatch(r"/[\w./-]+", shared):
        raise PlanError(f"--shared: found {shared!r}; expected an absolute path of plain letters")
    gpus_per_engine = cards_of(launch.flags)
    gpus_per_node = _gpus_per_node(launch, gpus_per_engine)
    planned, moved = _planned_values(values, launch, gpus_per_engine, shared)
    key = gpu_key(launch.hardware.gpu) or ""
    drain_s = run_file_of(planned, "the planned run file").cluster.drain_timeout_s
    stop_wait_s = math.ceil(drain_s) + _AFTER_DRAIN_S
    return Submission(
        name=_name(launch, key),
        summary=_summary(launch, gpus_per_engine),
        run_file="\n".join((*_head_lines(launch, gpus_per_engine), run_file_text(planned))),
        gpu=launch.hardware.gpu.name,
        release=_release(launch.plan),
        product_label=_PRODUCT_LABELS.get(key),
        accelerator=_ACCELERATORS.get(key),
        nodes=launch.engines * gpus_per_engine // gpus_per_node,
        gpus_per_node=gpus_per_node,
        cpus_per_node=_CPUS_PER_GPU * gpus_per_node,
        memory_gib_per_node=_memory_gib(launch, gpus_per_engine, gpus_per_node),
        shm_gib=_SHM_GIB,
        stop_wait_s=stop_wait_s,
        warning_s=max(stop_wait_s + _SIGNAL_LATE_S, _LEAST_WARNING_S),
        shared=shared,
        moved_paths=moved,
    )


# --- nodes --------------------------------------------------------------------------------------


def _gpus_per_node(launch: PlannedLaunch, gpus_per_engine: int) -> int:
    """Return the most GPUs of a usual machine that whole engines use, and all nodes alike."""
    if gpus_per_engine > _MOST_GPUS_PER_NODE:
        raise PlanError(
            f"an engine of {gpus_per_engine} GPUs spans machines, which no file here starts; plan "
            f"for at most {_MOST_GPUS_PER_NODE} GPUs of one engine: --tp-size"
        )
    each = range(1, _MOST_GPUS_PER_NODE // gpus_per_engine + 1)
    return gpus_per_engine * max(count for count in each if launch.engines % count == 0)


def _memory_gib(launch: PlannedLaunch, gpus_per_engine: int, gpus_per_node: int) -> int:
    """Return host memory that also caches the weights once, for engines that start together."""
    weights_gib = launch.plan.weights_bytes * gpus_per_engine / GIB
    return math.ceil((_HOST_GIB_PER_GPU * gpus_per_node + weights_gib) / 16) * 16


def _name(launch: PlannedLaunch, key: str) -> str:
    """Return the name as Kubernetes takes it: a small letter, then also digits and dashes."""
    cards = _dashed(f"{key or launch.hardware.gpu.name}-x{launch.hardware.count}")
    model = _dashed(PurePosixPath(launch.plan.model).name)
    if not model[:1].isalpha():
        model = f"run-{model}"
    return f"{model[: _LONGEST_NAME - len(cards) - 1].rstrip('-')}-{cards}"


def _dashed(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _summary(launch: PlannedLaunch, gpus_per_engine: int) -> str:
    rate = (
        ""
        if launch.tokens_per_s is None
        else f", about {figures.tokens_per_s(launch.tokens_per_s)}"
    )
    each = f"{gpus_per_engine} GPU{'' if gpus_per_engine == 1 else 's'}"
    return (
        f"{launch.plan.model} on {launch.hardware.count} x {launch.hardware.gpu.name}: "
        f"{launch.engines} engine{'' if launch.engines == 1 else 's'} of {each}, at most "
        f"{launch.requests_per_engine:,} requests in each{rate}."
    )


# --- the run file -------------------------------------------------------------------------------


def _head_lines(launch: PlannedLaunch, gpus_per_engine: int) -> tuple[str, ...]:
    plan = launch.plan
    left = plan.headroom_bytes - sum(item.bytes for item in plan.headroom_items)
    doubt = "" if plan.verdict == "fits" else f"; {plan.verdict}: {' '.join(plan.message.split())}"
    return (
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"# {_summary(launch, gpus_per_engine)}",
        f"# SGLang {plan.release_profile}; {left / GIB:.1f} GiB of each card are left{doubt}.",
        "# EDIT: the paths. With engine.count: null there are as many engines as GPUs for them.",
    )


def _planned_values(
    values: Mapping[str, Any], launch: PlannedLaunch, gpus_per_engine: int, shared: str
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Return the run file with the plan's engine, cards and release, and with absolute paths."""
    found, moved = _with_shared_paths(values, shared)
    hardware = {"gpu": launch.hardware.gpu.name, "count": launch.hardware.count}
    if not launch.hardware.gpu.known:
        hardware["memory_gib"] = round(launch.hardware.gpu.total_bytes / GIB, 2)
    planner = {**(found.get("planner") or {}), "sglang_version": _release(launch.plan)}
    return {
        **found,
        "engine": _engine(found.get("engine") or {}, launch, gpus_per_engine),
        "cluster": {"drain_timeout_s": _DRAIN_S, **(found.get("cluster") or {})},
        "hardware": [hardware],
        "planner": planner,
    }, moved


def _engine(
    given: Mapping[str, Any], launch: PlannedLaunch, gpus_per_engine: int
) -> dict[str, Any]:
    # The default kind is embedded: a file that names nothing of it leaves the engines to the plan.
    kind = given.get("kind") or ("embedded" if _EMBEDDED_KEYS & given.keys() else "sglang")
    if kind != "sglang":
        raise ConfigError(
            f"engine.kind: found {kind!r}; files are written for engines that the run starts, so "
            "set it to sglang"
        )
    release = rules_for(launch.plan.release_profile)[0].release
    started = {key: given[key] for key in ("python", "command") if given.get(key)}
    planned = {
        "kind": "sglang",
        **(started or {"python": _IMAGE_PYTHON}),
        "count": launch.engines,
        "gpus": gpus_per_engine,
        "max_running_requests": launch.requests_per_engine,
        "flags": list(engine_flags(launch.flags, release, keeps_context=launch.gives_context)),
    }
    return planned | {key: value for key, value in given.items() if key not in planned}


def _release(plan: LaunchPlan) -> str:
    found = re.search(r"\d+\.\d+\.\d+", plan.release_profile)
    return found[0] if found else plan.release_profile


# --- paths --------------------------------------------------------------------------------------


def _with_shared_paths(
    values: Mapping[str, Any], shared: str
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Put relative paths below the shared folder: a node has another working directory."""
    found = {**values}
    moved: list[tuple[str, str]] = []
    model = str(found.get("model", ""))
    if _is_relative(model, is_name=True):
        found["model"] = f"{shared}/{PurePosixPath(model).name}"
        moved.append((model, found["model"]))
    for section, key in (
        ("prompts", "path"),
        ("output", "folder"),
        ("planner", "model_config_path"),
    ):
        inner = found.get(section)
        path = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(path, str) and _is_relative(path, is_name=section == "prompts"):
            where = f"{shared}/{PurePosixPath(path).name}"
            found[section] = {**inner, key: where} if isinstance(inner, Mapping) else inner
            moved.append((path, where))
    return found, tuple(moved)


def _is_relative(path: str, *, is_name: bool) -> bool:
    """Return whether a path is of this folder; prompts and models may be names on the hub."""
    if is_url(path) or path.startswith(("/", "~", "$")):
        return False
    return not is_name or is_file_name(path) or Path(path).exists()
