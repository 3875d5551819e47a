"""A model's config: from disk, the catalogue, the local hub cache, or the hub.

The only module that reads model configs from files or the network.
"""

import http
import json
import os
import struct
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import PlanError
from pipeline.models.facts import model_facts
from schemas.plan import ModelFacts

_CATALOGUE = Path(__file__).with_name("data") / "model_configs.json"
_GENERATION_FILE = "generation_config.json"
_HUB = "https://huggingface.co"
_HUB_TIMEOUT_S = 5.0
# assumed: far more than a config, an index or a chat template has
_MOST_HUB_BYTES = 64 << 20
# Variables with which huggingface_hub and transformers stay off the network.
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's config and what lies next to it."""

    config: Mapping[str, Any]
    hf_quant: Mapping[str, Any] | None
    checkpoint_bytes: int


def load_model(
    name: str,
    *,
    config_path: Path | None = None,
    weights_format: str | None = None,
    overrides: str = "",
) -> ModelFacts:
    """Return a model's facts, from the config at `config_path`, else from the one of its name.

    `overrides` is the JSON of `--json-model-override-args`. Raises PlanError where there is no
    config or one of them cannot be used.
    """
    files = read_model(config_path) if config_path else find_model(name)
    return model_facts(
        name,
        {**files.config, **_override_fields(overrides)},
        hf_quant=files.hf_quant,
        weights_format=weights_format,
        checkpoint_bytes=files.checkpoint_bytes,
    )


def _override_fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise PlanError(f"--json-model-override-args is not JSON: {error.msg}") from None
    if not isinstance(fields, dict):
        raise PlanError("--json-model-override-args must be a JSON object")
    return fields


def read_model(path: Path) -> ModelFiles:
    """Read a `config.json`, or a folder with one. Raises PlanError."""
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise PlanError(f"no model config at {path}")
    quant_files = [path.with_suffix(".hf_quant.json")]
    if path.name == "config.json":
        quant_files.insert(0, path.with_name("hf_quant_config.json"))
    quant = next((_read(file) for file in quant_files if file.exists()), None)
    return ModelFiles(config=_read(path), hf_quant=quant, checkpoint_bytes=0)


def find_model(name: str) -> ModelFiles:
    """Find a config by the model's name: a folder, the catalogue, the hub's cache, then the hub.

    Raises PlanError where none has it.
    """
    if Path(name).is_dir() and (Path(name) / "config.json").exists():
        return _from_folder(Path(name))
    key = _catalogued(name)
    if key is not None:
        return catalogue_files(key)
    cached = _hub_cache(name)
    if cached is not None:
        return _from_folder(cached)
    if "/" in name:
        from_hub = _from_hub(name)
        if from_hub is not None:
            return from_hub
    raise PlanError(
        f"no config known for model {name!r}: not in the catalogue, not in the hub cache, and "
        f"the hub did not return it; pass --model-config FILE"
    )


def generation_config(name: str) -> Mapping[str, Any] | None:
    """Find a model's generation_config.json: in its folder, the hub's cache, then on the hub."""
    folder = Path(name) if Path(name).is_dir() else _hub_cache(name)
    if folder is not None and (folder / _GENERATION_FILE).exists():
        return _read(folder / _GENERATION_FILE)
    return _download(name, _GENERATION_FILE) if "/" in name and folder != Path(name) else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise PlanError(f"{path} is not a JSON object")
    return loaded


def _from_folder(folder: Path) -> ModelFiles:
    config = folder / "config.json"
    if not config.exists():
        raise PlanError(f"no config.json in {folder}")
    quant = folder / "hf_quant_config.json"
    return ModelFiles(
        config=_read(config),
        hf_quant=_read(quant) if quant.exists() else None,
        checkpoint_bytes=_checkpoint_bytes(folder),
    )


def _checkpoint_bytes(folder: Path) -> int:
    """Return the bytes of all tensors: the index's total, else the sum over the files' headers."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        metadata = _read(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int | float) and total > 0:
            return int(total)
    return sum(_header_bytes(path) for path in sorted(folder.glob("*.safetensors")))


def _header_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file's tensors, from the JSON header at its start."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, struct.error, ValueError) as error:
        raise PlanError(f"cannot read the header of {path}: {error}") from error
    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    return max(ends, default=0)


# --- by name ----------------------------------------------------------------------------------


@cache
def _catalogue() -> Mapping[str, Any]:
    catalogue: Mapping[str, Any] = json.loads(_CATALOGUE.read_text())
    return catalogue


def catalogue_names() -> tuple[str, ...]:
    """Return the models that can be planned without any file."""
    return tuple(sorted(_catalogue()["models"]))


def catalogue_files(key: str) -> ModelFiles:
    """Return one entry of the catalogue."""
    entry = _catalogue()["models"][key]
    return ModelFiles(
        config=entry["config"],
        hf_quant=entry.get("quant"),
        checkpoint_bytes=0,
    )


def _catalogued(name: str) -> str | None:
    data = _catalogue()
    models, aliases = data["models"], data["aliases"]
    by_lower = {key.lower(): key for key in models}
    key = aliases.get(name) or by_lower.get(name.lower())
    if key is None:
        tail = name.rstrip("/").rsplit("/", 1)[-1].lower()
        tails = {known.rsplit("/", 1)[-1].lower(): known for known in models}
        tails.update({a.rsplit("/", 1)[-1].lower(): k for a, k in aliases.items()})
        key = tails.get(tail) or tails.get(_plain_tail(tail))
    return None if key is None else str(key)


def _plain_tail(tail: str) -> str:
    """Strip the suffix of another format or tuning: such models have the same shapes."""
    for suffix in ("-fp8", "-bf16", "-nvfp4", "-awq", "-gptq-int4", "-instruct", "-thinking",
                   "-instruct-2507", "-thinking-2507"):  # fmt: skip
        if tail.endswith(suffix):
            return tail.removesuffix(suffix)
    return tail


def model_folder(name: str) -> Path | None:
    """Return the model's own folder, else the newest snapshot in the hub's cache, if any."""
    if Path(name).is_dir():
        return Path(name)
    return _hub_cache(name) if name.count("/") == 1 else None


def _hub_cache(name: str) -> Path | None:
    home = os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME")
    root = Path(home) if home else Path.home() / ".cache" / "huggingface"
    if not os.environ.get("HF_HUB_CACHE"):
        root = root / "hub"
    snapshots = root / f"models--{name.replace('/', '--')}" / "snapshots"
    if not snapshots.is_dir():
        return None
    folders = [path for path in sorted(snapshots.iterdir()) if (path / "config.json").exists()]
    return folders[-1] if folders else None


def has_weights(name: str) -> bool:
    """Return whether all of the model's weights are in its folder or the hub's cache."""
    folder = model_folder(name)
    if folder is None:
        return Path(name).is_file()
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return any(any(folder.glob(f"*{suffix}")) for suffix in (".safetensors", ".bin", ".gguf"))
    shards = _read(index).get("weight_map")
    return isinstance(shards, dict) and all((folder / str(s)).exists() for s in shards.values())


def _from_hub(name: str) -> ModelFiles | None:
    config = _download(name, "config.json")
    if config is None:
        return None
    index = _download(name, "model.safetensors.index.json")
    total = ((index or {}).get("metadata") or {}).get("total_size") or 0
    return ModelFiles(
        config=config,
        hf_quant=_download(name, "hf_quant_config.json"),
        checkpoint_bytes=int(total),
    )


def _download(name: str, file: str) -> dict[str, Any] | None:
    try:
        loaded = json.loads(hub_text(name, file) or "null")
    except (PlanError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def hub_text(name: str, file: str) -> str | None:
    """Fetch a text file of a hub repository; None where the repository does not have it.

    Raises PlanError where the hub does not return it for another reason.
    """
    offline = next((one for one in _OFFLINE if is_switched_on(os.environ.get(one))), None)
    if offline is not None:
        raise PlanError(f"{offline} is set, so nothing is fetched from the hub")
    request = urllib.request.Request(f"{_HUB}/{name}/resolve/main/{file}")  # noqa: S310  # https only
    token = os.environ.get("HF_TOKEN")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S) as reply:  # noqa: S310
            text: str = reply.read(_MOST_HUB_BYTES).decode()
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.NOT_FOUND:
            return None
        raise PlanError(f"the hub answers {error.code} for {name}") from None
    except (urllib.error.URLError, TimeoutError, OSError, ValueError) as error:
        raise PlanError(f"the hub does not answer: {error}") from None
    return text


def is_switched_on(value: str | None) -> bool:
    """Read a variable as huggingface_hub does. huggingface_hub/constants.py: _is_true, 2.4."""
    return (value or "").upper() in ("1", "ON", "YES", "TRUE")
