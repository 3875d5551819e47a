"""Model configs: in folders and files, in the catalogue, in the hub's cache, on the hub."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PlanError
from pipeline.models.files import (
    catalogue_names,
    default_repetition_penalty,
    find_model,
    has_weights,
    load_model,
    read_model,
)
from tests.fakes.hub import Hub, only_hub

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
    "vocab_size": 100, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 512,
}  # fmt: skip
QUANT = {"quantization": {"quant_algo": "FP8"}}


def write(path: Path, value: object) -> Path:
    """Write a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


# --- files and folders ------------------------------------------------------------------------


def test_folder_has_config_format_and_size(tmp_path: Path) -> None:
    write(tmp_path / "config.json", CONFIG)
    assert read_model(tmp_path).hf_quant is None
    write(tmp_path / "hf_quant_config.json", QUANT)
    write(tmp_path / "model.safetensors.index.json", {"metadata": {"total_size": 1234.0}})
    files = read_model(tmp_path)
    assert (files.config, files.hf_quant, files.checkpoint_bytes) == (CONFIG, QUANT, 1234)
    assert find_model(str(tmp_path)) == files


def test_size_without_an_index_is_that_of_the_tensors(tmp_path: Path) -> None:
    write(tmp_path / "config.json", CONFIG)
    assert read_model(tmp_path).checkpoint_bytes == 0
    for name, ends in (("a", [5, 70]), ("b", [30])):
        header: dict[str, Any] = {str(n): {"data_offsets": [0, end]} for n, end in enumerate(ends)}
        text = json.dumps({**header, "__metadata__": {}}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert read_model(tmp_path).checkpoint_bytes == 70 + 30
    # An index without a total is no better than none.
    for metadata in ({}, {"metadata": {"total_size": 0}}, {"metadata": 1}):
        write(tmp_path / "model.safetensors.index.json", metadata)
        assert read_model(tmp_path).checkpoint_bytes == 100
    (tmp_path / "a.safetensors").write_bytes(b"short")
    with pytest.raises(PlanError, match=r"cannot read the header of .*a\.safetensors"):
        read_model(tmp_path)


def test_config_file_has_the_format_of_its_own_name(tmp_path: Path) -> None:
    config = write(tmp_path / "config.json", CONFIG)
    other = write(tmp_path / "qwen.json", CONFIG)
    assert read_model(config).hf_quant is None
    write(tmp_path / "hf_quant_config.json", QUANT)
    assert read_model(config).hf_quant == QUANT
    # hf_quant_config.json belongs to config.json.
    assert read_model(other).hf_quant is None
    own = {"quantization": {"quant_algo": "NVFP4"}}
    write(tmp_path / "qwen.hf_quant.json", own)
    assert read_model(other).hf_quant == own
    assert read_model(other).checkpoint_bytes == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"[]", "is not a JSON object"), (b"\xff", "is not usable as JSON")],
)
def test_unreadable_config_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=message):
        read_model(path)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no model config at .*none\.json"):
        read_model(tmp_path / "none.json")
    with pytest.raises(PlanError, match=f"no config.json in {tmp_path}"):
        read_model(tmp_path)


def test_weights_are_on_disk_once_every_shard_is(tmp_path: Path) -> None:
    assert not has_weights("no/such-model")
    write(tmp_path / "config.json", CONFIG)
    assert not has_weights(str(tmp_path))
    write(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "1.st", "b": "2.st"}})
    (tmp_path / "1.st").touch()
    assert not has_weights(str(tmp_path))
    (tmp_path / "2.st").touch()
    assert has_weights(str(tmp_path))
    one_file = tmp_path / "one"
    write(one_file / "config.json", CONFIG)
    (one_file / "model.safetensors").touch()
    assert has_weights(str(one_file))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": ' + "9" * 5000 + "}", "is not usable as JSON: Exceeds the limit"),
        ('{"a": ' + "[" * 200_000, "is not usable as JSON: nested too deep"),
        ('{"num_hidden_layers": 1e999}', "num_hidden_layers out of range"),
        ('{"num_hidden_layers": ' + "9" * 4000 + "}", "num_hidden_layers out of range"),
        ('{"num_hidden_layers": NaN}', "num_hidden_layers out of range"),
        ("\xff", "is not JSON"),
    ],
    ids=["digits", "nested", "infinite", "huge", "not a number", "not text"],
)
def test_hostile_config_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match=said) as error:
        load_model(str(tmp_path))
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("<Q", 2**62) + b"{}", "it claims 4,611,686,018,427,387,904 bytes"),
        (struct.pack("<Q", 2**64 - 1), "it claims"),
        (struct.pack("<Q", 4) + b"[[[[", "not JSON"),
        (struct.pack("<Q", 13) + b'{"a": {"b":1}', "not JSON"),
        (struct.pack("<Q", 7) + b'{"a":1}', "not subscriptable"),
        (b"", "requires a buffer of 8 bytes"),
    ],
)
def test_hostile_header_of_tensors_is_one_line(tmp_path: Path, data: bytes, said: str) -> None:
    write(tmp_path / "config.json", CONFIG)
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(PlanError, match="cannot read the header of .*: .*" + said):
        read_model(tmp_path)


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("other/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/models/Qwen3-8B/", "Qwen/Qwen3-8B"),
        ("other/Qwen3-8B-AWQ", "Qwen/Qwen3-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
    ],
)
def test_catalogue_knows_other_spellings_and_formats(name: str, known: str) -> None:
    assert known in catalogue_names()
    assert find_model(name) == find_model(known)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with only_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def test_unknown_model_comes_from_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["some/model/config.json"] = json.dumps(CONFIG).encode()
    assert find_model("some/model").checkpoint_bytes == 0
    hub.files["other/model/config.json"] = json.dumps(CONFIG).encode()
    hub.files["other/model/hf_quant_config.json"] = json.dumps(QUANT).encode()
    index = {"metadata": {"total_size": 77}}
    hub.files["other/model/model.safetensors.index.json"] = json.dumps(index).encode()
    files = find_model("other/model")
    assert (files.config, files.hf_quant, files.checkpoint_bytes) == (CONFIG, QUANT, 77)


def test_model_that_nobody_knows_is_refused(hub: Hub) -> None:
    for name in ("some/model", "model"):
        with pytest.raises(PlanError, match=f"no config known for model '{name}': .*--model-confi"):
            find_model(name)
    # A name without an owner is not requested from the hub.
    assert set(hub.requested) == {"some/model/config.json"}
    hub.files["some/model/config.json"] = b"[]"
    with pytest.raises(PlanError, match="no config known"):
        find_model("some/model")


@pytest.mark.parametrize(
    ("variable", "place"), [("HF_HUB_CACHE", "cache"), ("HF_HOME", "cache/hub")]
)
def test_cached_model_is_read_from_its_newest_snapshot(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    variable: str, place: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    snapshots = tmp_path / place / "models--some--model" / "snapshots"
    write(snapshots / "a" / "config.json", {})
    write(snapshots / "b" / "config.json", CONFIG)
    write(snapshots / "c" / "other.json", {})
    assert find_model("some/model").config == CONFIG
    assert hub.requested == []


# --- facts ------------------------------------------------------------------------------------


def test_overrides_replace_fields_of_the_config(tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", CONFIG)
    overrides = '{"max_position_embeddings": 4096}'
    assert load_model("m", config_path=path).context_length == 512
    model = load_model("m", config_path=path, overrides=overrides, weights_format="fp8")
    assert (model.name, model.context_length, model.layers) == ("m", 4096, 2)
    assert (model.format.base, model.format.source) == ("fp8", "as told")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("{", "is not JSON: Expecting"),
        ("[1]", "is not a JSON object"),
        ("1", "is not a JSON object"),
        ('{"a": ' + "9" * 5000 + "}", "is not usable as JSON: Exceeds the limit"),
        ("[" * 100_000, "is not usable as JSON: nested too deep"),
    ],
)
def test_overrides_that_are_no_object_are_refused(overrides: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"--json-model-override-args {message}"):
        load_model("Qwen/Qwen3-8B", overrides=overrides)


def test_size_of_the_files_is_that_of_the_model(tmp_path: Path) -> None:
    write(tmp_path / "config.json", CONFIG)
    write(tmp_path / "model.safetensors.index.json", {"metadata": {"total_size": 9}})
    assert load_model(str(tmp_path)).checkpoint_bytes == 9


@pytest.mark.parametrize(
    ("text", "penalty"),
    [(None, 1.0), ("{}", 1.0),
     ('{"repetition_penalty": 1.05}', 1.05), ('{"repetition_penalty": "x"}', 1.0)],
)  # fmt: skip
def test_repetition_penalty_that_requests_get_without_one_is_the_models_own(
    tmp_path: Path, text: str | None, penalty: float
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert default_repetition_penalty(str(tmp_path)) == penalty


def test_generation_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(PlanError, match=r"generation_config\.json"):
        default_repetition_penalty(str(tmp_path))
