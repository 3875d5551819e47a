"""Run files and the files that submit a plan: made, and checked against the tools they are for."""

import json
import os
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
from pipeline.errors import RayLostError
from pipeline.planner.cards import gpu_named
from pipeline.recipes.deploy.files import RAY_VERSION
from pipeline.recipes.schema import SCHEMA_FILE
from schemas.config.reader import parse_run_file, read_run_file
from schemas.config.run_file import RunFile
from tests.fakes.running import ROOT

RUNS, DEPLOY = ROOT / "jobs" / "runs", ROOT / "jobs" / "deploy"
RUN_FILES = sorted(RUNS.glob("*.yaml"))
# Folder of ready files -> the cards that `plan --gpu` was given; `make recipes` writes them.
READY = {
    "rtx-pro-6000-x4": "rtx-pro-6000:4",
    "rtx-pro-6000-x8": "rtx-pro-6000:8",
    "b200-x8": "b200:8",
}
FOUNDING = (*(f"qwen3.6-27b-{name}" for name in READY), "deepseek-v4-flash-tp4")
SCHEMA = json.loads((ROOT / "tests" / "data" / "deploy" / "rayjob-v1.7.0.json").read_text())
SKY_PYTHON = os.environ.get("SKYPILOT_PYTHON", "")

# Of a task, as docs.skypilot.co lists them under reference/yaml-spec, 2026-11.
SKYPILOT_KEYS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes"}
SKYPILOT_KEYS |= {"file_mounts", "setup", "run", "config"}


def flag(config: RunFile, name: str) -> str | None:
    values = [text.partition("=")[2] for text in config.engine.flags if text.startswith(name)]
    return values[0] if values else None


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
    path = RUNS / f"{name}.yaml"
    config = read_run_file(path)
    assert plan.main([str(path), "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    best = plans[0]
    assert best["verdict"] == "fits"
    assert best["requests_in_all"] // best["replicas"] == config.engine.max_running_requests
    assert best["replicas"] == config.engine.count
    assert int(flag(config, "--tp-size") or 1) == config.engine.gpus_per_worker
    carried = {text for given in config.engine.flags for text in given.split("=")}
    assert carried <= set(best["argv"])


# -- what `plan --write` makes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, cards in READY.items():
            words = ["jobs/runs/qwen3.6-27b.yaml", "--gpu", cards, "--write", str(root / name)]
            assert plan.main(words) == 0
    return root


@pytest.mark.parametrize("name", READY)
def test_ready_files_are_those_of_their_plan(name: str, made: Path) -> None:
    """If the planner's answer has changed, `make recipes` writes the ready files again."""
    fresh = {path.name: path.read_text() for path in (made / name).iterdir()}
    # The schema of the run file is ready once, in jobs/runs.
    assert fresh.pop(SCHEMA_FILE) == (RUNS / SCHEMA_FILE).read_text()
    assert fresh == {path.name: path.read_text() for path in (DEPLOY / name).iterdir()}
    assert fresh["run.yaml"] == (RUNS / f"qwen3.6-27b-{name}.yaml").read_text()
    assert fresh["node.sh"] == (DEPLOY / "node.sh").read_text()


def test_files_of_a_launch_line_have_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "OMP_NUM_THREADS=4 python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B --tp 2 "
    line += "--context-length 40000 --cuda-graph-bs-decode 1 2 4 --max-running-requests 48"
    words = ["--gpu", "h200:16", "--sglang-version", "0.5.12", "--shared", "/data/"]
    assert plan.main([*words, "--write", str(tmp_path), "--", *line.split()]) == 0
    assert "prompts.parquet is expected at /data/prompts.parquet" in capsys.readouterr().out
    config = read_run_file(tmp_path / "run.yaml")
    assert (config.engine.count, config.engine.gpus, config.engine.max_running_requests) == (
        8, 2, 48,
    )  # fmt: skip
    # The names that this release knows; several values stay several words.
    assert config.engine.flags == [
        "--tp-size=2", "--context-length=40000", "--cuda-graph-bs", "1", "2", "4",
    ]  # fmt: skip
    assert config.engine.env == {"OMP_NUM_THREADS": "4"}
    assert config.planner.sglang_version == "0.5.12"
    assert config.prompts.path == "/data/prompts.parquet"
    cluster = ray_job(tmp_path)["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    assert (workers["replicas"], gpus_of(workers)) == (2, 8)
    assert yaml.safe_load((tmp_path / "skypilot.yaml").read_text())["num_nodes"] == 2
    assert "#SBATCH --nodes=2\n" in (tmp_path / "slurm.sbatch").read_text()


def test_file_that_was_edited_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu", "b200", "--write", str(tmp_path)]
    line = ["--", "--model-path", "Qwen/Qwen3-8B"]
    assert plan.main([*words, *line]) == 0
    assert plan.main([*words, *line]) == 0
    edited = tmp_path / "rayjob.yaml"
    made = edited.read_text()
    edited.write_text(made.replace("image: regenerate", "image: mine"))
    assert plan.main([*words, *line]) == 2
    assert "rayjob.yaml exists with other text; choose" in capsys.readouterr().err
    assert "image: mine" in edited.read_text()
    assert plan.main([*words, "--force", *line]) == 0
    assert edited.read_text() == made


def test_options_of_the_command_are_in_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "9-model_of_ours").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "9-model_of_ours" / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.yaml").write_text(
        "prompts: {path: p.jsonl}\nmodel: 9-model_of_ours\noutput: {folder: out}\n"
        "sampling: {max_tokens: 512}\n"
        "planner: {sglang_version: 0.5.12, allow_mtp: false}\n"
    )
    words = ["--gpu", "b200:2", "--sglang-version", "v0.5.21", "--weights-format", "fp8"]
    assert plan.main(["run.yaml", *words, "--write", "made"]) == 0
    after = read_run_file(tmp_path / "made" / "run.yaml")
    assert after.planner.sglang_version == "0.5.21"
    assert (after.planner.weights_format, after.planner.allow_mtp) == ("fp8", False)
    assert after.model == "/shared/9-model_of_ours"
    # A name in Kubernetes begins with a letter.
    assert ray_job(tmp_path / "made")["metadata"]["name"] == "run-9-model-of-ours-b200-x2"
    assert "lmsysorg/sglang:v0.5.21" in (tmp_path / "made" / "rayjob.yaml").read_text()


def test_copies_of_a_launch_are_one_engine(tmp_path: Path) -> None:
    line = [
        "--model-path",
        "Qwen/Qwen3-8B",
        "--tp",
        "2",
        "--dp",
        "2",
        "--max-running-requests",
        "8",
    ]
    assert plan.main(["--gpu", "h100:8", "--write", str(tmp_path), "--", *line]) == 0
    engine = read_run_file(tmp_path / "run.yaml").engine
    assert (engine.count, engine.gpus, engine.max_running_requests) == (2, 4, 16)


def test_keys_of_the_users_run_file_stay(tmp_path: Path) -> None:
    run = tmp_path / "own.yaml"
    run.write_text(
        "prompts: {path: HuggingFaceH4/ultrachat_200k, split: train_sft}\n"
        "model: Qwen/Qwen3-8B\n"
        "engine: {kind: sglang, command: [docker, mine], env: {A: b}, flags: [--log-requests]}\n"
        "sampling: {max_tokens: 4096, seed: 5}\n"
        "quality: {looping: {policy: drop}}\n"
        "cluster: {drain_timeout_s: 200}\n"
        "output: {folder: 's3://bucket/run'}\n"
    )
    assert plan.main([str(run), "--gpu", "h100:3", "--write", str(tmp_path / "made")]) == 0
    before, after = read_run_file(run), read_run_file(tmp_path / "made" / "run.yaml")
    assert (after.prompts, after.sampling, after.quality, after.output, after.cluster) == (
        before.prompts, before.sampling, before.quality, before.output, before.cluster,
    )  # fmt: skip
    assert after.engine.command == ["docker", "mine"]
    assert after.engine.env == {"A": "b"}
    assert "--log-requests" in after.engine.flags
    # Longer to flush, so an earlier warning: 200 s, 10 s until Ray kills it, 60 s of Slurm's.
    assert "--signal=B:USR1@270\n" in (tmp_path / "made" / "slurm.sbatch").read_text()


def test_card_that_is_not_in_the_catalogue_is_left_to_the_user(tmp_path: Path) -> None:
    words = ["--gpu-memory-gib", "47.5", "--write", str(tmp_path)]
    assert plan.main([*words, "--", "--model-path", "Qwen/Qwen3-8B"]) == 0
    [card] = read_run_file(tmp_path / "run.yaml").hardware
    assert card.memory_gib == 47.5
    assert mistakes(ray_job(tmp_path)) == []
    assert "EDIT: select nodes" in (tmp_path / "rayjob.yaml").read_text()
    assert "EDIT: image, volume, accelerators" in (tmp_path / "skypilot.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "line", "said"),
    [
        (["--gpu", "rtx-4090:2"], ["--model-path", "Qwen/Qwen3.6-27B"], "does not fit"),
        (["--gpu", "b200:1"], ["--model-path", "Qwen/Qwen3-8B", "--tp", "2"], "line needs 2"),
        (["--gpu", "b200:x"], ["--model-path", "Qwen/Qwen3-8B"], "expected CARD or CARD:COUNT"),
        (["--gpu", "b200"], ["--model-path", "Qwen/Qwen3-8B", "--tp", "16"], "spans machines"),
        (
            ["--gpu", "b200", "--shared", "a b"],
            ["--model-path", "Qwen/Qwen3-8B"],
            "--shared: found",
        ),
    ],
)
def test_launch_that_cannot_be_submitted_is_refused(
    words: list[str],
    line: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan.main([*words, "--write", str(tmp_path / "made"), "--", *line]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("{kind: endpoint, base_urls: ['http://127.0.0.1:1/v1']}", "endpoint"),
        ("{kind: embedded}", "embedded"),
        ("{model_file: m.gguf, count: 1}", "embedded"),
    ],
)
def test_engines_that_a_run_does_not_start_on_gpus_are_not_submitted(
    engine: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "own.yaml"
    run.write_text(
        "prompts: {path: p.jsonl}\nmodel: Qwen/Qwen3-8B\noutput: {folder: out}\n"
        f"engine: {engine}\n"
    )
    assert plan.main([str(run), "--gpu", "b200", "--write", str(tmp_path / "made")]) == 2
    assert f"engine.kind: found {kind!r}" in capsys.readouterr().err


# -- KubeRay


def documents(folder: Path) -> dict[str, dict[str, Any]]:
    found = yaml.safe_load_all((folder / "rayjob.yaml").read_text())
    return {document["kind"]: document for document in found}


def ray_job(folder: Path) -> dict[str, Any]:
    return documents(folder)["RayJob"]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]  # type: ignore[no-any-return]


def gpus_of(group: dict[str, Any]) -> int:
    return int(pod(group)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


def mistakes(job: dict[str, Any]) -> list[str]:
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(job["spec"])
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize("name", READY)
def test_ray_job_is_what_kuberay_takes(name: str) -> None:
    job = ray_job(DEPLOY / name)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert mistakes(job) == []
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job["metadata"]["name"])
    assert len(job["metadata"]["name"]) <= 47


def test_schema_refuses_what_kuberay_refuses() -> None:
    job = ray_job(DEPLOY / "b200-x8")
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


@pytest.mark.parametrize("name", READY)
def test_run_file_comes_by_config_map(name: str) -> None:
    found = documents(DEPLOY / name)
    config_map, spec = found["ConfigMap"], found["RayJob"]["spec"]
    assert config_map["data"]["run.yaml"] == (DEPLOY / name / "run.yaml").read_text()
    head = pod(spec["rayClusterSpec"]["headGroupSpec"])
    [volume] = [volume for volume in head["volumes"] if "configMap" in volume]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    [mount] = [m for m in head["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
    given = commanded(spec["entrypoint"])
    assert str(given.run_file) == f"{mount['mountPath']}/run.yaml"
    # KubeRay pastes the entrypoint into a line of bash.
    assert not set(spec["entrypoint"]) & set("&|;<>$`\"'")


def commanded(command: str) -> Any:  # noqa: ANN401 - what argparse returns
    """Parse the words of a `regenerate run ...`."""
    words = shlex.split(command)
    assert words[:2] == ["regenerate", "run"]
    return regenerate.argument_parser().parse_args(words[2:])


@pytest.mark.parametrize("name", READY)
def test_ray_job_has_the_plans_numbers_and_no_root(name: str) -> None:
    found = documents(DEPLOY / name)
    spec = found["RayJob"]["spec"]
    config = parse_run_file(found["ConfigMap"]["data"]["run.yaml"], name)
    cluster = spec["rayClusterSpec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in str(pod(head)["containers"][0]["resources"])
    assert cluster["rayVersion"] == RAY_VERSION
    assert cluster["authOptions"] == {"mode": "token"}
    assert gpus_of(workers) * workers["replicas"] == config.hardware[0].count
    pool = pod(workers)["nodeSelector"]["nvidia.com/gpu.product"]
    assert gpu_named(pool) == gpu_named(config.hardware[0].gpu)
    for group in (head, workers):
        [container] = pod(group)["containers"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts >= {"/shared", "/dev/shm", "/scratch"}
        shm = next(v for v in pod(group)["volumes"] if v["name"] == "shm")["emptyDir"]
        assert shm["medium"] == "Memory"
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert pod(group)["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        values = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert values["HF_TOKEN"] is None, "a secret comes by reference"
        # The root of the file system is not writable for this user.
        assert {values["HOME"], values["HF_HOME"]} == {"/scratch", "/shared/hf"}
        stop_wait_s = int(values["RAY_JOB_STOP_WAIT_TIME_S"])
        assert config.cluster.drain_timeout_s < stop_wait_s
        assert stop_wait_s < pod(group)["terminationGracePeriodSeconds"]


def test_ray_version_is_the_pinned_one() -> None:
    assert f"ray=={RAY_VERSION}" in (ROOT / "constraints.txt").read_text().split()


@pytest.mark.parametrize("name", READY)
def test_kuberay_does_not_start_a_mistake_again(name: str) -> None:
    """KubeRay restarts what does not exit with 0, so a mistake has to."""
    spec = ray_job(DEPLOY / name)["spec"]
    assert spec["backoffLimit"] > 0
    assert spec["shutdownAfterJobFinishes"]
    assert commanded(spec["entrypoint"]).no_restart


@pytest.mark.parametrize("words", [["missing.yaml"], ["--no-such-option"], ["a.yaml", "b.yaml"]])
def test_command_exits_with_0_where_a_restart_would_not_help(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert regenerate.main([*words, "--no-restart"]) == 0
    try:
        status: object = regenerate.main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2


@pytest.mark.parametrize(
    ("status", "shown"), [(0, 0), (2, 0), (3, 0), (1, 1), (128 + 15, 128 + 15)]
)
def test_only_what_a_restart_would_not_mend_exits_with_0(
    status: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regenerate, "_status", lambda *_: status)
    assert regenerate.main(["run.yaml", "--no-restart"]) == shown
    assert regenerate.main(["run.yaml"]) == status


def test_lost_cluster_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> int:
        raise RayLostError("the head is gone")

    monkeypatch.setattr(regenerate, "_status", lost)
    assert regenerate.main(["run.yaml", "--no-restart"]) == 3


# -- the image, and scripts


def test_image_has_the_interpreter_and_the_release_of_the_run_files() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    release = re.search(r"SGLANG_IMAGE=\S+:v([\d.]+)", text)
    assert release is not None
    for name in FOUNDING:
        config = read_run_file(RUNS / f"{name}.yaml")
        assert f"> {config.engine.python} " in text
        assert config.planner.sglang_version == release[1]


def test_image_runs_as_no_root() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER ${RUN_AS}"] == lines[-1:]
    assert "ARG RUN_AS=1000:1000" in lines


def scripts(folder: Path) -> dict[str, str]:
    task = yaml.safe_load((folder / "skypilot.yaml").read_text())
    files = {name: (folder / name).read_text() for name in ("node.sh", "slurm.sbatch", "ray.sh")}
    return {**files, "skypilot.yaml": "#!/bin/bash\n" + task["run"]}


@pytest.mark.parametrize("name", READY)
def test_scripts_pass_bash_and_shellcheck(name: str) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; `make install` brings it")
    for text in scripts(DEPLOY / name).values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        found = subprocess.run([shellcheck, "-"], input=text, text=True, capture_output=True)
        assert found.returncode == 0, found.stdout
    for script in ("node.sh", "slurm.sbatch", "ray.sh"):
        assert os.access(DEPLOY / name / script, os.X_OK)


@pytest.mark.parametrize("name", READY)
def test_options_of_ray_are_those_that_ray_has(name: str) -> None:
    known = {
        "start": {option for param in start.params for option in param.opts},
        "job": {option for param in submit.params for option in param.opts},
    }
    seen = set()
    for text in scripts(DEPLOY / name).values():
        joined = text.replace("\\\n", " ")
        for command, words in re.findall(r"\bray (start|job)\b(.*)", joined):
            options = re.findall(r"(?<!\S)--[a-z-]+", words.partition(" -- ")[0])
            assert set(options) <= known[command], words
            seen.add(command)
        # Options that are passed on to `ray start`.
        ports = re.findall(r"--[a-z-]+-port|--num-gpus", joined)
        assert set(ports) <= known["start"]
    assert seen == {"start", "job"}


# -- scripts run with stand-ins

STANDINS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'echo "$SLURM_JOB_NODELIST"',
    "ray": 'echo "ray $*" >> "$SEEN"; [ "$1" = status ] && exit "${STATUS_EXIT:-0}"\n'
    '[ "$1" = start ] && { echo "first line"; echo "why it failed"; exit "${START_EXIT:-1}"; }\n'
    "true",
    "regenerate": 'echo "regenerate $*" >> "$SEEN"; exit "${RUN_EXIT:-0}"',
    "sleep": "true",
}


class Script:
    """A script of a ready folder, whose commands are stand-ins."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.seen = folder / "seen"
        (folder / "bin").mkdir()
        (folder / "home").mkdir()
        for path in (DEPLOY / name).iterdir():
            shutil.copy(path, folder / path.name)
        for command, text in STANDINS.items():
            (folder / "bin" / command).write_text(f"#!/bin/bash\n{text}\n")
            (folder / "bin" / command).chmod(0o755)

    def run(self, text: str, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        own = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "REGENERATE_BIN": str(self.folder / "bin"),
            "HOME": str(self.folder / "home"),
            "SEEN": str(self.seen),
            "RAY_AUTH_TOKEN": "secret",
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_ID": "4711",
            "RAY_PORT": "6379",
        }
        return subprocess.run(
            ["bash", "-c", text, "script", *words],
            cwd=self.folder, env=own | environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def lines(self, start: str) -> list[str]:
        return [line for line in self.seen.read_text().splitlines() if line.startswith(start)]


@pytest.fixture
def slurm(tmp_path: Path) -> tuple[Script, str]:
    return Script(tmp_path, "b200-x8"), (DEPLOY / "b200-x8" / "slurm.sbatch").read_text()


def test_slurm_job_ends_with_the_heads_log_when_it_does_not_come_up(
    slurm: tuple[Script, str],
) -> None:
    script, text = slurm
    ended = script.run(text, STATUS_EXIT="1")
    assert ended.returncode == 1
    assert "did not come up; the last lines of regenerate-4711-head.log:" in ended.stderr
    assert ended.stderr.endswith("first line\nwhy it failed\n")
    assert script.lines("regenerate") == []


def test_slurm_job_gives_up_on_a_head_that_hangs(slurm: tuple[Script, str]) -> None:
    script, text = slurm
    (script.folder / "node.sh").write_text("#!/bin/bash\nexec /bin/sleep 5\n")
    ended = script.run(text, STATUS_EXIT="1", HEAD_TIMEOUT_S="0")
    assert (ended.returncode, "did not come up" in ended.stderr) == (1, True)


def test_slurm_jobs_have_ports_of_their_own(slurm: tuple[Script, str]) -> None:
    script, text = slurm
    ports: list[set[str]] = []
    for job in ("4711", "4712"):
        ended = script.run(text, "--set", "prompts.limit=5", SLURM_JOB_ID=job, RAY_PORT="")
        assert ended.returncode == 0, ended.stderr
        subprocess.run(["sleep", "0.2"], check=True)
        [started] = script.lines("ray start")
        found = re.findall(r"--(?:\w+-)*port=(\d+)", started)
        # The ports of workers are any free ones.
        assert found.count("0") == 2
        ports.append(set(found) - {"0"})
        assert len(ports[-1]) == 7
        assert all(1024 < int(port) < 32768 for port in ports[-1])
        assert script.lines("regenerate") == ["regenerate run run.yaml --set prompts.limit=5"]
        script.seen.unlink()
    assert not ports[0] & ports[1]


def test_slurm_job_is_warned_before_its_end_in_time_to_drain() -> None:
    for name in READY:
        text = (DEPLOY / name / "slurm.sbatch").read_text()
        directives = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
        warned = re.fullmatch(r"B:USR1@(\d+)", directives["signal"])
        assert warned is not None
        config = read_run_file(DEPLOY / name / "run.yaml")
        assert int(warned[1]) > config.cluster.drain_timeout_s + 60
        cards = int(directives["nodes"]) * int(directives["gpus-per-node"])
        assert cards == config.hardware[0].count
        assert "requeue" in directives


def test_slurm_job_ends_with_the_runs_exit_status(slurm: tuple[Script, str]) -> None:
    script, text = slurm
    assert [script.run(text, RUN_EXIT=status).returncode for status in ("0", "2", "3")] == [0, 2, 3]


# -- SkyPilot


def sky_task(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name / "skypilot.yaml").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", READY)
def test_skypilot_task_has_the_plans_numbers_and_no_secret(name: str) -> None:
    task = sky_task(name)
    assert set(task) <= SKYPILOT_KEYS
    assert task["secrets"] == {"HF_TOKEN": None, "RAY_AUTH_TOKEN": None}
    config = read_run_file(DEPLOY / name / task["file_mounts"]["/etc/regenerate/run.yaml"])
    card, _, count = task["resources"]["accelerators"].partition(":")
    assert gpu_named(card) == gpu_named(config.hardware[0].gpu)
    assert int(count) * task["num_nodes"] == config.hardware[0].count
    assert any(config.output.folder.startswith(mount) for mount in task["volumes"])


@pytest.mark.parametrize(
    ("status", "attempts"), [("0", 1), ("2", 1), ("3", 1), ("143", 1), ("1", 3), ("137", 3)]
)
def test_skypilot_tries_a_lost_driver_again_and_rents_nothing_for_a_mistake(
    status: str, attempts: int, tmp_path: Path
) -> None:
    task = sky_task("b200-x8")
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 0}
    script = Script(tmp_path, "b200-x8")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "deploy").symlink_to(tmp_path)
    text = task["run"].replace("/opt/regenerate", str(tmp_path))
    text = text.replace("/opt/pipeline/bin", str(tmp_path / "bin"))
    text = text.replace("/tmp/regenerate", str(tmp_path / "regenerate"))
    environment = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n"}
    ended = script.run(text, RUN_EXIT=status, START_EXIT="0", **environment)
    assert ended.returncode == int(status), ended.stderr
    assert len(script.lines("regenerate run ")) == attempts


def test_skypilot_loads_the_task() -> None:
    if not SKY_PYTHON:
        pytest.skip("SkyPilot is not installed; SKYPILOT_PYTHON=its interpreter runs this test")
    code = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print(task.num_nodes)"
    for name in READY:
        loaded = subprocess.run(
            [SKY_PYTHON, "-c", code, str(DEPLOY / name / "skypilot.yaml")],
            capture_output=True, text=True, cwd=DEPLOY / name, timeout=120,
            env={**os.environ, "HF_TOKEN": "x", "RAY_AUTH_TOKEN": "y"},
        )  # fmt: skip
        assert loaded.returncode == 0, loaded.stderr
        assert loaded.stdout.split()[-1] == str(sky_task(name)["num_nodes"])


# -- plain Ray


def test_plain_ray_submits_the_run_file(tmp_path: Path) -> None:
    script = Script(tmp_path, "b200-x8")
    command = f"{tmp_path}/ray.sh"
    assert script.run(f"{command} submit").returncode == 0
    [submitted] = script.lines("ray job submit")
    assert submitted.endswith(f"-- regenerate run {tmp_path}/run.yaml")
    script.run(f"{command} head 10.0.0.1", START_EXIT="0")
    [started] = script.lines("ray start")
    assert "--num-gpus=8" in started
    assert script.run(command).returncode == 2


def test_token_of_a_cluster_is_for_its_user_alone(tmp_path: Path) -> None:
    """Ray writes it with the permissions that the shell gives, and our runs refuse a wide one."""
    script = Script(tmp_path, "b200-x8")
    token = tmp_path / "home" / ".ray" / "auth_token"
    (tmp_path / "bin" / "ray").write_text(
        '#!/bin/bash\n[ "$1" = get-auth-token ] && mkdir -p ~/.ray && echo x > ~/.ray/auth_token\n'
    )
    for existing in (False, True):
        if existing:
            token.chmod(0o644)
        script.run("umask 022; ./node.sh head 10.0.0.1", RAY_AUTH_TOKEN="")
        assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
