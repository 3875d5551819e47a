"""What a run needs is checked before anything starts; servers are real ones on loopback."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.regenerate import main
from pipeline.errors import ConfigError
from pipeline.run.start_check import (
    EndpointReport,
    check_endpoints,
    check_writable,
    disk_space,
    seed_warning,
)
from pipeline.store.folder import LocalFolder
from schemas.config.run_file import RunFile
from schemas.units import GIB
from tests.fakes.scripted_server import Reply, ScriptedServer, serving

NOBODY = "http://127.0.0.1:9/v1"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving(ScriptedServer()) as running:
        yield running


def run_file(*urls: str, model: str = "m", seed: int | None = None, **engine: object) -> RunFile:
    return RunFile.model_validate(
        {
            "prompts": {"path": "x"},
            "model": model,
            "output": {"folder": "x"},
            "sampling": {"seed": seed},
            "engine": {"kind": "endpoint", "base_urls": list(urls), **engine},
        }
    )


# -- endpoints


def test_model_that_is_offered_passes(server: ScriptedServer) -> None:
    assert check_endpoints(run_file(server.url)) == EndpointReport(num_endpoints=1)
    named = run_file(server.url, model="Qwen/Qwen3", served_model_name="m")
    assert check_endpoints(named).silent == ()
    assert server.requests == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (None, "model: {url} offers 'm', 'n', not 'x'; set engine.served_model_name to the name"),
        ("y", "engine.served_model_name: {url} offers 'm', 'n', not 'y'; set engine."),
    ],
)
def test_model_that_is_not_offered_is_named_with_those_that_are(
    server: ScriptedServer, name: str | None, line: str
) -> None:
    server.models = Reply(body=json.dumps({"data": [{"id": "m"}, {"id": "n"}]}).encode())
    with pytest.raises(ConfigError) as caught:
        check_endpoints(run_file(server.url, model="x", served_model_name=name))
    assert str(caught.value).startswith(line.format(url=server.url))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
def test_refused_key_is_named(
    server: ScriptedServer, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "s3cret")
    server.models = Reply(status=status, body=b'{"error": "s3cret is wrong"}')
    config = run_file(server.url, api_key_env="THE_KEY")
    with pytest.raises(ConfigError) as caught:
        check_endpoints(config)
    expected = f"{server.url} refuses the key in THE_KEY (HTTP {status})"
    assert expected in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "models",
    [
        Reply(status=404),
        Reply(status=503),
        Reply(body=b"hello"),
        Reply(body=b'{"data": []}'),
    ],
)
def test_server_that_lists_no_models_is_not_checked(server: ScriptedServer, models: Reply) -> None:
    server.models = models
    assert check_endpoints(run_file(server.url, model="x")) == EndpointReport(num_endpoints=1)


def test_endpoint_that_does_not_answer_is_reported(server: ScriptedServer) -> None:
    report = check_endpoints(run_file(server.url, NOBODY))
    [line] = report.silent
    assert line.startswith(f"{NOBODY} does not answer: ")
    assert report.num_endpoints == 2


# -- the seed


def test_seed_that_sglang_ignores_is_reported() -> None:
    for ignores, warns in ((True, True), (False, False)):
        report = EndpointReport(ignores_seed=ignores)
        assert (seed_warning(run_file(NOBODY, seed=7), report) is not None) == warns
    assert seed_warning(run_file(NOBODY), EndpointReport(ignores_seed=True)) is None


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ([], True),
        (["--enable-deterministic-inference"], False),
        (["--rl-on-policy-target", "fsdp"], False),
    ],
)
def test_seed_of_a_launch_without_deterministic_inference_is_reported(
    flags: list[str], warns: bool
) -> None:
    engine = {"kind": "sglang", "python": "/usr/bin/python3", "flags": flags}
    values = {"prompts": {"path": "x"}, "model": "m", "output": {"folder": "x"}, "engine": engine}
    line = seed_warning(RunFile.model_validate(values), EndpointReport())
    assert (line is not None) == warns


# -- the folder


def test_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_writable(LocalFolder(tmp_path / "a" / "b"))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"output\.folder: cannot create .*file is not a folder"):
        check_writable(LocalFolder(tmp_path / "file" / "out"))


def test_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"output\.folder: cannot write to .*permission denied"):
        check_writable(LocalFolder(tmp_path))


def test_disk_is_short_of_more_than_it_has(tmp_path: Path) -> None:
    plenty = disk_space(LocalFolder(tmp_path / "out"), 1000)
    short = disk_space(LocalFolder(tmp_path / "out"), 1e15)
    assert plenty is not None
    assert short is not None
    assert (plenty.is_short, short.is_short) == (False, True)
    assert short.expected_bytes == 8_000_000_000_000_000
    assert f"{short.expected_bytes / GIB:,.1f} GiB expected" in short.text


# -- the command


def command(tmp_path: Path, url: str, *words: str, **settings: object) -> int:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "q"}\n')
    values = {
        "prompts": {"path": str(tmp_path / "prompts.jsonl")},
        "model": "m",
        "output": {"folder": str(tmp_path / "out")},
        "engine": {"kind": "endpoint", "base_urls": [url]},
        **settings,
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps(values))
    return main([str(run_file), *words])


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_wrong_model_ends_the_command_before_a_row_is_asked(
    tmp_path: Path,
    server: ScriptedServer,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    assert command(tmp_path, server.url, *words, model="x") == 2
    assert capsys.readouterr().err.strip().startswith(f"model: {server.url} offers 'm', not 'x'")
    assert server.requests == []
    assert not (tmp_path / "out").exists()


def test_dry_run_reports_endpoints_that_do_not_answer(
    tmp_path: Path, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, server.url, "--dry-run") == 0
    assert "does not answer" not in capsys.readouterr().out
    assert command(tmp_path, NOBODY, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    [endpoint] = [line for line in lines if line.startswith("endpoint ")]
    assert endpoint.startswith(f"endpoint   {NOBODY} does not answer: ")


def test_dry_run_without_room_on_the_disk_exits_2(
    tmp_path: Path,
    server: ScriptedServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1))
    assert command(tmp_path, server.url, "--dry-run") == 2
    assert capsys.readouterr().err.endswith(" GiB expected; use another disk\n")


def test_dry_run_refuses_an_output_among_the_prompts(
    tmp_path: Path, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = {"path": str(tmp_path)}
    assert command(tmp_path, server.url, "--dry-run", prompts=prompts) == 2
    assert "output.folder" in capsys.readouterr().err
