"""Run files and recipes: read, planned, and checked against the tools that they are for."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.dashboard.modules.job.cli import submit
from ray.scripts.scripts import start

from jobs import plan, regenerate
from pipeline.planner.cards import gpu_named
from schemas.config.reader import read_run_file
from schemas.config.run_file import RunFile
from tests.fakes.running import ROOT

RUN_FILES = sorted((ROOT / "jobs" / "runs").glob("*.yaml"))
FOUNDING = ("qwen3.6-27b-rtx-pro-6000", "qwen3.6-27b-b200", "deepseek-v4-flash-tp4")
DEPLOY = ROOT / "jobs" / "deploy"
RAY_JOBS = ("rayjob-b200.yaml", "rayjob-rtx-pro-6000.yaml")
SCHEMA = json.loads((ROOT / "tests" / "data" / "deploy" / "rayjob-v1.7.0.json").read_text())

# Of a task, as docs.skypilot.co lists them under reference/yaml-spec, 2026-11.
SKYPILOT_KEYS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes"}
SKYPILOT_KEYS |= {"file_mounts", "setup", "run", "config"}


# -- run files


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_run_file_is_valid(path: Path) -> None:
    config = read_run_file(path)
    context = config.engine.context_length or flag(config, "--context-length")
    assert context is None or int(context) > (config.sampling.max_tokens or 0)


@pytest.mark.parametrize("name", FOUNDING)
def test_run_file_carries_the_flags_that_the_planner_finds(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "jobs" / "runs" / f"{name}.yaml"
    engine = read_run_file(path).engine
    assert plan.main([str(path), "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    best = plans[0]
    assert best["verdict"] == "fits"
    assert best["requests_in_all"] // best["replicas"] == engine.max_running_requests
    assert best["replicas"] == engine.count
    assert flag(read_run_file(path), "--tp-size") == str(engine.gpus_per_worker)
    carried = {text for given in engine.flags for text in given.split("=")}
    assert carried <= set(best["argv"])


def flag(config: RunFile, name: str) -> str | None:
    values = [text.partition("=")[2] for text in config.engine.flags if text.startswith(name)]
    return values[0] if values else None


# -- KubeRay


def ray_job(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())  # type: ignore[no-any-return]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]  # type: ignore[no-any-return]


def mistakes(job: dict[str, Any]) -> list[str]:
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(job["spec"])
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize("name", RAY_JOBS)
def test_ray_job_is_what_kuberay_takes(name: str) -> None:
    job = ray_job(name)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert mistakes(job) == []


def test_schema_refuses_what_kuberay_refuses() -> None:
    job = ray_job(RAY_JOBS[0])
    job["spec"]["backofLimit"] = job["spec"].pop("backoffLimit")
    job["spec"]["ttlSecondsAfterFinished"] = "soon"
    del job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    worker = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    pod(worker)["containers"][0]["env"][0]["valu"] = "x"
    assert sorted(line.partition(":")[0] for line in mistakes(job)) == [
        "$",
        "$.rayClusterSpec.headGroupSpec",
        "$.rayClusterSpec.workerGroupSpecs[0].template.spec.containers[0].env[0]",
        "$.ttlSecondsAfterFinished",
    ]


@pytest.mark.parametrize("name", RAY_JOBS)
def test_ray_job_runs_our_command_on_a_head_without_a_gpu(name: str) -> None:
    spec = ray_job(name)["spec"]
    cluster = spec["rayClusterSpec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in str(pod(head)["containers"][0]["resources"])
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    assert spec["backoffLimit"] > 0
    assert spec["shutdownAfterJobFinishes"]
    assert cluster["authOptions"] == {"mode": "token"}
    config = commanded(spec["entrypoint"])
    assert config.output.folder.startswith("/shared/")
    [container] = pod(workers)["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus % config.engine.gpus_per_worker == 0
    pool = pod(workers)["nodeSelector"]["nvidia.com/gpu.product"]
    assert gpu_named(pool) == gpu_named(config.hardware[0].gpu)
    for group in (head, workers):
        [container] = pod(group)["containers"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
            "/shared",
            "/dev/shm",
        }
        values = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert values["HF_TOKEN"] is None, "a secret comes by reference"
        assert int(values["RAY_JOB_STOP_WAIT_TIME_S"]) > config.cluster.drain_timeout_s


def commanded(command: str) -> RunFile:
    """Read the run file and the overrides of a `python -m jobs.regenerate ...`."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "jobs.regenerate"]
    given = regenerate.argument_parser().parse_args(words[3:])
    relative = str(given.run_file).removeprefix("/opt/regenerate/")
    return read_run_file(ROOT / relative, given.set)


# -- the image, and scripts


def test_image_has_the_interpreter_and_the_release_of_the_run_files() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    release = re.search(r"SGLANG_IMAGE=\S+:v(\S+)", text)
    assert release is not None
    for name in FOUNDING:
        config = read_run_file(ROOT / "jobs" / "runs" / f"{name}.yaml")
        assert f"> {config.engine.python} " in text
        assert config.planner.sglang_version == release[1]
    for instruction in re.findall(r"^([A-Za-z]+) ", text, re.MULTILINE):
        assert instruction in {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR"}


def scripts() -> dict[str, str]:
    return {
        "node.sh": (DEPLOY / "node.sh").read_text(),
        "slurm.sbatch": (DEPLOY / "slurm.sbatch").read_text(),
        "skypilot.yaml": "#!/bin/bash\n" + skypilot()["run"],
    }


def skypilot() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", scripts())
def test_script_passes_bash_and_shellcheck(name: str) -> None:
    subprocess.run(["bash", "-n"], input=scripts()[name], text=True, check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; `make install` brings it")
    found = subprocess.run([shellcheck, "-"], input=scripts()[name], text=True, capture_output=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", scripts())
def test_options_of_ray_are_those_that_ray_has(name: str) -> None:
    known = {
        ("ray", "start"): {option for param in start.params for option in param.opts},
        ("ray", "job"): {option for param in submit.params for option in param.opts},
    }
    seen = 0
    for line in scripts()[name].replace("\\\n", " ").splitlines():
        command = re.search(r"\b(ray) (start|job)\b(.*)", line.partition("#")[0])
        if command is None:
            continue
        seen += 1
        options = re.findall(r"(?<!\S)--[a-z-]+", command[3].partition(" -- ")[0])
        assert set(options) <= known[command[1], command[2]], line
    assert seen or name != "node.sh"


def test_skypilot_task_runs_our_command_and_holds_no_secret() -> None:
    task = skypilot()
    assert set(task) <= SKYPILOT_KEYS
    assert task["secrets"] == {"HF_TOKEN": None, "RAY_AUTH_TOKEN": None}
    run = task["run"].replace("\\\n", " ").replace('"$RUN_FILE"', task["envs"]["RUN_FILE"])
    [command] = re.findall(r"python -m jobs\.regenerate.*", run)
    config = commanded(command)
    assert config.engine.count is None
    accelerators = task["resources"]["accelerators"].partition(":")
    assert gpu_named(accelerators[0]) == gpu_named(config.hardware[0].gpu)
    assert all(mount in config.output.folder for mount in task["volumes"])


def test_slurm_job_is_told_before_its_end_in_time_to_drain() -> None:
    text = (DEPLOY / "slurm.sbatch").read_text()
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    warned = re.fullmatch(r"B:USR1@(\d+)", directives["signal"])
    assert warned is not None
    for name in FOUNDING:
        config = read_run_file(ROOT / "jobs" / "runs" / f"{name}.yaml")
        assert int(warned[1]) > config.cluster.drain_timeout_s
    assert "requeue" in directives
    assert "trap" in text
