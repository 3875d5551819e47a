"""Where a chat template comes from: a model's folder, the hub's cache, the hub, flags, GGUF."""

import json
import struct
from pathlib import Path

import pytest

from pipeline.chat_template.rendering import ChatTemplate
from pipeline.chat_template.source import (
    NoTemplate,
    gguf_template,
    launch_template,
    model_template,
)
from pipeline.errors import ConfigError
from tests.fakes.hub import only_hub


def found(template: ChatTemplate | NoTemplate) -> ChatTemplate:
    assert isinstance(template, ChatTemplate), template
    return template


def write(folder: Path, **files: object) -> str:
    """Write files; `__` in a name is a slash, and the last `_` its dot."""
    for name, content in files.items():
        stem, _, ending = name.replace("__", "/").rpartition("_")
        path = folder / f"{stem}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def test_file_of_jinja_goes_before_the_tokenizers_field(tmp_path: Path) -> None:
    config = {"chat_template": "old", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    model = write(tmp_path, tokenizer_config_json=config)
    assert found(model_template(model)).text == "old"
    write(tmp_path, chat_template_jinja="new")
    template = found(model_template(model))
    assert (template.text, template.source) == ("new", f"chat_template.jinja of {model}")
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_named_templates_are_read_from_a_list_and_from_their_folder(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    model = write(tmp_path / "a", tokenizer_config_json={"chat_template": named})
    template = found(model_template(model))
    assert (template.text, template.tool_text) == ("d", "t")
    model = write(
        tmp_path / "b",
        chat_template_jinja="d",
        additional_chat_templates__tool_use_jinja="t",
        additional_chat_templates__rag_jinja="r",
    )
    template = found(model_template(model))
    assert (template.text, template.tool_text) == ("d", "t")
    assert found(launch_template(model, ["--hf-chat-template-name", "rag"])).text == "r"
    with pytest.raises(ConfigError, match=r"'none' is none of .*; it has: default, tool_use"):
        launch_template(model, ["--hf-chat-template-name", "none"])


def test_processors_template_and_the_map_of_special_tokens_are_read(tmp_path: Path) -> None:
    model = write(
        tmp_path,
        chat_template_json={"chat_template": "p"},
        special_tokens_map_json={"bos_token": "<b>"},
    )
    template = found(model_template(model))
    assert (template.text, template.special_tokens) == ("p", {"bos_token": "<b>"})


def test_file_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    model = write(tmp_path, tokenizer_config_json="{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        model_template(model)


def test_template_of_the_flags_is_the_one_that_the_server_uses(tmp_path: Path) -> None:
    model = write(tmp_path / "m", chat_template_jinja="own")
    write(tmp_path, other_jinja="given")
    flags = ["--chat-template", str(tmp_path / "other.jinja")]
    assert found(launch_template(model, flags)).text == "given"
    built_in = launch_template(model, ["--chat-template", "llama-2"])
    assert isinstance(built_in, NoTemplate)
    assert "llama-2" in built_in.why


def test_reason_is_given_where_there_is_no_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reasons = [model_template(name) for name in (str(tmp_path), "gpt", "some/model")]
    assert [one.why if isinstance(one, NoTemplate) else "" for one in reasons] == [
        f"{tmp_path} contains no chat template",
        "'gpt' is neither a folder nor a name on the hub",
        "HF_HUB_OFFLINE is set, so nothing is fetched from the hub",
    ]


def test_cached_snapshot_is_read_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    write(snapshot, config_json={}, chat_template_jinja="cached")
    assert found(model_template("some/model")).text == "cached"


def test_template_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with only_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.files["some/model/chat_template.jinja"] = b"fetched"
        hub.files["some/model/tokenizer_config.json"] = b'{"bos_token": "<s>", "eos_token": "</s>"}'
        template = found(model_template("some/model"))
        assert (template.text, template.special_tokens["bos_token"]) == ("fetched", "<s>")
        without = model_template("other/model")
    assert isinstance(without, NoTemplate)
    assert "has no chat template" in without.why


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf(*pairs: tuple[str, int, bytes]) -> bytes:
    """Build the head of a GGUF file with these values: key, type, content."""
    values = b"".join(text(key) + struct.pack("<I", kind) + data for key, kind, data in pairs)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + values


def test_template_and_special_tokens_of_a_gguf_file_are_read(tmp_path: Path) -> None:
    tokens = struct.pack("<IQ", 8, 3) + text("<unk>") + text("<s>") + text("</s>")
    scores = struct.pack("<IQ", 6, 3) + struct.pack("<fff", 0, 1, 2)
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf(
            ("general.quantized", 7, b"\x01"),
            ("tokenizer.ggml.scores", 9, scores),
            ("tokenizer.ggml.tokens", 9, tokens),
            ("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 1)),
            ("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 7)),
            ("tokenizer.chat_template", 8, text("{{ bos_token }}")),
        )
    )
    template = found(gguf_template(path))
    # An id outside the vocabulary names no token.
    assert (template.text, template.special_tokens) == ("{{ bos_token }}", {"bos_token": "<s>"})
    path.write_bytes(gguf(("general.quantized", 7, b"\x01")))
    assert isinstance(gguf_template(path), NoTemplate)


@pytest.mark.parametrize(
    "data", [b"", b"GGML1234567890123456789012345", gguf(("k", 8, struct.pack("<Q", 1 << 60)))]
)
def test_file_that_is_not_gguf_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"engine\.model_file: cannot read .*m\.gguf as GGUF"):
        gguf_template(path)
