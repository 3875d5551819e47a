"""A model's config: from disk, the catalogue, the local hub cache, or the hub.

The only module that reads model configs from files or the network.
"""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import PlanError
from pipeline.models.facts import model_facts
from pipeline.models.hub import hub_text
from pipeline.untrusted.parsing import UNREADABLE, UnreadableError, bytes_of, json_object, reason
from schemas.plan import ModelFacts

_CATALOGUE = Path(__file__).with_name("data") / "model_configs.json"
_GENERATION_FILE = "generation_config.json"
# assumed: the index of a model with 100,000 tensors has a tenth of it
_MOST_JSON_BYTES = 64 << 20
# safetensors/src/tensor.rs: MAX_HEADER_SIZE
_MOST_HEADER_BYTES = 100_000_000


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
        return json_object(text or "{}")
    except UnreadableError as error:
        raise PlanError(f"--json-model-override-args is {error}") from None


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


def end_token_ids(name: str) -> frozenset[int]:
    """Return the ids that end a turn, from the model's folder or the hub's cache; empty: unknown.

    SGLang stops at those of both files: model_config.py, _get_hf_eos_token_id, 0.5.23.
    """
    folder = model_folder(name)
    found: set[int] = set()
    for file in ("config.json", _GENERATION_FILE):
        if folder is None or not (folder / file).exists():
            continue
        fields = _read(folder / file)
        inner = fields.get("text_config")
        for values in (fields, inner if isinstance(inner, dict) else {}):
            ids = values.get("eos_token_id")
            found.update(one for one in (ids if isinstance(ids, list) else [ids])
                         if isinstance(one, int))  # fmt: skip
    return frozenset(found)


def default_repetition_penalty(name: str) -> float:
    """Return the penalty that SGLang applies to requests without one; 1.0 is none.

    It is that of the generation_config.json in the model's folder or the hub's cache. Raises
    PlanError for a file that cannot be read.
    """
    folder = model_folder(name)
    if folder is None or not (folder / _GENERATION_FILE).exists():
        return 1.0
    value = _read(folder / _GENERATION_FILE).get("repetition_penalty")
    return float(value) if isinstance(value, int | float) else 1.0


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return json_object(bytes_of(path, most=_MOST_JSON_BYTES))
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error}") from error
    except UnreadableError as error:
        raise PlanError(f"{path} is {error}") from None


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
            if length > min(path.stat().st_size, _MOST_HEADER_BYTES):
                raise UnreadableError(f"it claims {length:,} bytes")
            header = json_object(file.read(length))
        tensors = [entry for key, entry in header.items() if key != "__metadata__"]
        return max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except (OSError, struct.error, *UNREADABLE) as error:
        raise PlanError(f"cannot read the header of {path}: {reason(error)}") from None


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
        text = hub_text(name, file)
        return None if text is None else json_object(text)
    except (PlanError, UnreadableError):
        return None
