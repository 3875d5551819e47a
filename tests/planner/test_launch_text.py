"""Launches pasted from manifests and config files are those of the plain line."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import PipelineError
from pipeline.planner.launch_text import launch_words
from pipeline.planner.sglang.flags import parse_launch_line

LINE = "SGLANG_X=1 python3 -m sglang.launch_server --model-path a/b --tp 2 --enable-metrics"
KUBERNETES = """
apiVersion: v1
kind: Service
spec: {ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: proxy
          command: ["sleep", "inf"]
        - name: engine
          command: ["python3", "-m", "sglang.launch_server"]
          args: [--model-path, a/b, --tp=2, --enable-metrics]
          env:
            - {name: SGLANG_X, value: 1}
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: x, key: y}}}
"""
SHELL = """
containers:
  - command:
      - sh
      - -c
      - exec python3 -m sglang.launch_server --model-path a/b --tp 2 --enable-metrics
    env: [{name: SGLANG_X, value: "1"}]
"""
COMPOSE = """
services:
  engine:
    image: lmsysorg/sglang:v0.5.23
    environment: {SGLANG_X: 1}
    entrypoint: python3 -m sglang.launch_server
    command: >
      --model-path a/b
      --tp 2 --enable-metrics
  web: {image: nginx}
"""
# The image has the program; a list of assignments.
ARGUMENTS = """
command: ["--model-path", "a/b", "--tp", "2", "--enable-metrics"]
environment:
  - SGLANG_X=1
"""


@pytest.mark.parametrize("text", [KUBERNETES, SHELL, COMPOSE, ARGUMENTS])
def test_manifest_is_read_as_its_line(text: str) -> None:
    found = parse_launch_line(launch_words([text]))
    assert replace(found, stray=()) == replace(parse_launch_line(LINE.split()), stray=())


@pytest.mark.parametrize(
    "text",
    [
        '["python3", "-m", "sglang.launch_server", "--model-path", "a/b", "--tp", "2"]',
        "- --model-path\n- a/b\n- --tp\n- 2\n",
    ],
)
def test_list_of_words_is_read_as_its_line(text: str) -> None:
    flags = parse_launch_line(launch_words([text]))
    assert (flags.model_path, flags.text("tp-size")) == ("a/b", "2")


def test_plain_lines_and_scripts_stay_as_they_are() -> None:
    for text in (LINE, "set -e\n# args: none\n" + LINE.replace(" --", " \\\n  --")):
        assert launch_words([text]) == [text]
    assert launch_words(LINE.split()) == LINE.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spec:\n  containers: [{command: [sleep, inf]}]", "no container with a launch line"),
        ("services:\n" + "".join(
            f"  e{n}: {{command: python -m sglang.launch_server --tp 2}}\n" for n in range(2)),
         "2 containers with a launch line"),
        ("spec:\n  x: [", "not valid YAML"),
    ],
)  # fmt: skip
def test_manifest_without_one_launch_is_named(text: str, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        launch_words([text])


def test_config_file_gives_what_the_line_does_not(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "model-path: a/b\ntp_size: 4\nenable-metrics: true\nlog-requests: false\n"
        "cuda-graph-bs-decode: [1, 2]\njson-model-override-args: {max_position_embeddings: 8}\n"
    )
    line = f"python -m sglang.launch_server --config {config} --tp 2"
    flags = parse_launch_line(launch_words(line.split()))
    assert flags.model_path == "a/b"
    assert flags.number("tp-size") == 2
    assert flags.words("cuda-graph-bs-decode") == ("1", "2")
    assert flags.text("json-model-override-args") == '{"max_position_embeddings": 8}'
    assert flags.has("enable-metrics")
    assert not flags.has("log-requests")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory"),
        ("[1]", "expected a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_config_file_that_cannot_be_read_is_named(
    tmp_path: Path, text: str | None, words: str
) -> None:
    config = tmp_path / "c.yaml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(PipelineError, match=f"--config {config}: .*{words}"):
        launch_words(["--config", str(config)])
