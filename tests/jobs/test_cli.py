"""The console script: each command is a module, and says so in its own words."""

import argparse
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from jobs import cli
from pipeline.console import commands

NAMES = ["init", "run", "plan", "estimate", "status", "report", "export", "canary"]


def test_console_script_is_this_module() -> None:
    (script,) = entry_points(group="console_scripts", name="regenerate")
    assert script.value == "jobs.cli:main"


@pytest.mark.parametrize("name", NAMES)
def test_command_prints_its_help_under_the_name_it_was_called_by(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/regenerate", name, "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: regenerate {name}" in out
    assert "python -m jobs" not in out


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in NAMES)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"regenerate {version('regenerate')}\n"


@pytest.mark.parametrize(
    ("word", "hint"), [("plna", "did you mean plan?"), ("frobnicate", "commands: init, run, plan")]
)
def test_unknown_command_is_one_line(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert repr(word) in error
    assert hint in error


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_their_options(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--hardware" in script
    assert all(name in script for name in NAMES)


def test_next_command_is_spelled_as_this_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/bin/regenerate", "run", "a b.yaml"])
    assert commands.command("jobs.regenerate", "a b.yaml") == "regenerate run 'a b.yaml'"
    monkeypatch.setattr(sys, "argv", ["/checkout/jobs/regenerate.py", "a.yaml"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jobs.regenerate", "a.yaml"])
    assert commands.command("jobs.status", "out") == "python -m jobs.status out"


def test_script_works_in_a_folder_with_packages_of_our_names(tmp_path: Path) -> None:
    for name in ("pipeline", "jobs", "schemas"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    script = Path(sys.executable).with_name("regenerate")
    done = subprocess.run(
        [script, "plan", "--gpu", "b200", "--", "--model-path", "Qwen/Qwen3-8B"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Qwen/Qwen3-8B on B200" in done.stdout


COMMANDS = ("init", "regenerate", "plan", "estimate", "status", "report", "export", "canary")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_says_what_each_option_is_and_its_default(name: str) -> None:
    parser = import_module(f"jobs.{name}").argument_parser()
    text = parser.format_help()
    _, _, shown = text.partition("\nexamples:\n")
    assert shown.count(f"jobs.{name}") >= 2
    for action in parser._actions:
        assert action.help, action.option_strings
        is_switch = action.nargs == 0
        has_default = action.default not in (None, [], False, argparse.SUPPRESS)
        if has_default and not is_switch:
            assert "default" in action.help, action.option_strings


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_the_help_are_accepted(name: str) -> None:
    parser = import_module(f"jobs.{name}").argument_parser()
    _, _, shown = parser.format_help().partition("\nexamples:\n")
    lines = shown.replace("\\\n", " ").splitlines()
    examples = [line.partition(f"jobs.{name}")[2] for line in lines if f"jobs.{name}" in line]
    for example in examples:
        words = shlex.split(example, comments=True)
        own = words[: words.index("--")] if "--" in words else words
        parser.parse_args(own)
