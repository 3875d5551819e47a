"""Base of every section of the run file: frozen, strict, unknown keys refused; paths."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

# Linux, limits.h: NAME_MAX and PATH_MAX without the closing null.
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 4095


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        # Docstrings are the descriptions of the keys in the JSON Schema.
        use_attribute_docstrings=True,
    )


def is_url(where: str) -> bool:
    """Return true for the URL of an object store, false for a local path."""
    return "://" in where


def _expanded_path(path: str) -> str:
    """Expand `~` and variables of the environment; check what no file system allows."""
    if not path.strip():
        raise PydanticCustomError("path", "it should be a path, not an empty text")
    if "\0" in path:
        raise PydanticCustomError("path", "a path should have no NUL character")
    if is_url(path):
        return path
    expanded = os.path.expandvars(Path(path).expanduser() if path[0] == "~" else path)
    names = os.fsencode(expanded).split(b"/")
    if max(map(len, names)) > _MOST_NAME_BYTES or len(os.fsencode(expanded)) > _MOST_PATH_BYTES:
        raise PydanticCustomError(
            "path",
            "a name in a path should have at most 255 bytes, and the path 4,095",
        )
    return expanded


PathText = Annotated[str, AfterValidator(_expanded_path)]
"""A path, or the URL of an object store; `~` and `$HOME` are expanded in a path."""
