"""The launcher: the program gets the key, and its command line does not show it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.engines.process.command import start_of_program, through_launcher

SHOW = (
    "import json, os, sys\n"
    "shown = open('/proc/self/cmdline').read().split('\\0')\n"
    "print(json.dumps({'argv': sys.argv, 'path': sys.path, 'name': __name__, 'shown': shown,\n"
    "                  'env': 'ENGINE_API_KEY' in os.environ}))\n"
)


def shown_by(command: list[str], arguments: list[str], folder: Path) -> dict[str, object]:
    at = start_of_program(command)
    assert at is not None
    done = subprocess.run(
        [*through_launcher(command, at), *arguments],
        env={"ENGINE_API_KEY": "k3y", "PYTHONPATH": str(folder / "modules")},
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    shown: dict[str, object] = json.loads(done.stdout)
    assert "k3y" not in str(shown["shown"])
    return shown


def test_script_runs_as_if_python_had_been_given_it(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "serve.py"
    script.parent.mkdir()
    script.write_text(SHOW)
    shown = shown_by([sys.executable, str(script)], ["--port", "1"], tmp_path)
    assert shown["argv"] == [str(script), "--api-key", "k3y", "--port", "1"]
    assert (shown["name"], shown["env"]) == ("__main__", False)
    assert isinstance(shown["path"], list)
    assert shown["path"][0] == str(script.parent)
    assert not any("pipeline" in entry for entry in shown["path"])


def test_module_gets_its_key_behind_its_subcommand(tmp_path: Path) -> None:
    package = tmp_path / "modules" / "served"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(SHOW)
    command = [sys.executable, "-u", "-m", "served", "serve"]
    shown = shown_by(command, ["--model-path", "m"], tmp_path)
    program = str(package / "__main__.py")
    assert shown["argv"] == [program, "serve", "--api-key", "k3y", "--model-path", "m"]
    assert shown["name"] == "__main__"


def test_children_that_a_module_spawns_find_their_main_module(tmp_path: Path) -> None:
    """SGLang's schedulers are spawned: each imports the main module by its name."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "spawning.py").write_text(
        "import multiprocessing, sys\n"
        "def child(queue):\n"
        "    queue.put((__name__, open('/proc/self/cmdline').read()))\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    name, shown = queue.get(timeout=30)\n"
        "    process.join()\n"
        "    print(name, 'k3y' in shown, sys.argv[1:])\n"
    )
    done = subprocess.run(
        through_launcher([sys.executable, "-m", "spawning"], 1),
        env={"ENGINE_API_KEY": "k3y", "PYTHONPATH": str(tmp_path / "modules")},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "__mp_main__ False ['--api-key', 'k3y']\n"


@pytest.mark.parametrize(
    ("command", "at"),
    [
        (["python3", "-m", "sglang.launch_server"], 1),
        (["/opt/sglang/bin/python3.12", "-I", "-u", "-m", "sglang.launch_server"], 3),
        (["python", "-X", "dev", "-Werror", "serve.py"], 4),
        (["python3.13t", "-Xfrozen_modules=off", "serve.py"], 2),
        (["python", "-c", "import sglang"], None),
        (["python", "-Im", "sglang.launch_server"], None),
        (["python", "-"], None),
        (["python"], None),
        (["docker", "run", "image", "python3", "-m", "sglang.launch_server"], None),
        (["/usr/local/bin/serve.sh"], None),
    ],
)
def test_program_of_an_interpreter_is_found(command: list[str], at: int | None) -> None:
    assert start_of_program(command) == at
