"""Launch lines as they stand in other files: compose and Kubernetes manifests, `--config FILE`.

`launch_words` turns what was pasted into the words of a line, which `parse_launch_line` reads.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PlanError

_MANIFEST = re.compile(r"^[ \t-]*(command|args|entrypoint|containers|services|spec)[ \t]*:", re.M)
_WORD_KEYS = ("entrypoint", "command", "args")
_PROGRAM = re.compile(r"sglang\.launch_server|launch_server\.py|\bsglang\b.*\bserve\b", re.S)
# ["python3", "-m", …], or a list with a word a line
_LIST = re.compile(r"\s*(\[\s*[\"']|-\s+[\"']?--)")
_DOCUMENT_MARK = re.compile(r"^---.*$", re.M)


def launch_words(tokens: Sequence[str]) -> list[str]:
    """Return the words of a pasted launch: a manifest's container, and what `--config` names.

    Raises PlanError for a manifest without a launch or with several, and for a config file that
    cannot be read.
    """
    text = "\n".join(tokens)
    if _LIST.match(text) and isinstance(words := _value(text, "the list of words"), list):
        return _with_config([word for each in words for word in _words([each])])
    words = _of_manifest(text) if "\n" in text and _MANIFEST.search(text) else list(tokens)
    return _with_config(words)


# --- compose and Kubernetes -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Container:
    environment: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def is_launch(self) -> bool:
        return _PROGRAM.search(" ".join(self.words)) is not None


def _of_manifest(text: str) -> list[str]:
    found = [each for document in _documents(text) for each in _containers(document)]
    launches = [each for each in found if each.is_launch] or [
        each for each in found if any(word.startswith("--") for word in each.words)
    ]
    if not launches:
        raise PlanError("the manifest has no container with a launch line of SGLang")
    if len(launches) > 1:
        raise PlanError(
            f"the manifest has {len(launches)} containers with a launch line; paste one of them"
        )
    return [*launches[0].environment, *launches[0].words]


def _documents(text: str) -> Iterator[object]:
    for part in _DOCUMENT_MARK.split(text):
        if part.strip():
            yield _value(part, "the manifest")


def _containers(value: object) -> Iterator[_Container]:
    """Yield the mappings with a command, at any depth."""
    if isinstance(value, list):
        for each in value:
            yield from _containers(each)
    if not isinstance(value, Mapping):
        return
    words = tuple(word for key in _WORD_KEYS for word in _words(value.get(key)))
    if words:
        environment = _environment(value.get("env"), value.get("environment"))
        yield _Container(tuple(environment), words)
        return
    for each in value.values():
        yield from _containers(each)


def _words(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from shlex.split(value.replace("\\\n", " "), comments=True)
    elif isinstance(value, list):
        for each in value:
            text = _text(each)
            # `sh -c` has its whole command in one word.
            is_line = isinstance(each, str) and re.search(r"\s", text) and _PROGRAM.search(text)
            yield from _words(text) if is_line else [text]


def _environment(*values: object) -> Iterator[str]:
    for value in values:
        if isinstance(value, Mapping):
            yield from (f"{name}={_text(each)}" for name, each in value.items())
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, Mapping) and "value" in each:
                    yield f"{each.get('name')}={_text(each['value'])}"
                elif isinstance(each, str):
                    yield each


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


# --- --config ---------------------------------------------------------------------------------


def _with_config(words: list[str]) -> list[str]:
    """Put the values of the file that `--config` names before the line's own, which win.

    SGLang 0.5.23, utils/server_args_config_parser.py.
    """
    if "--config" not in words:
        return words
    at = words.index("--config")
    if at + 1 == len(words):
        raise PlanError("argument --config: expected one argument")
    program = [*words[:at], *words[at + 2 :]]
    given = list(_config_words(Path(words[at + 1]).expanduser()))
    first = next((n for n, word in enumerate(program) if word.startswith("--")), len(program))
    return [*program[:first], *given, *program[first:]]


def _config_words(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise PlanError(f"--config {path}: cannot be read: {reason}") from None
    values = _value(text, f"--config {path}")
    if not isinstance(values, dict):
        raise PlanError(f"--config {path}: expected a mapping of arguments to values")
    for key, value in values.items():
        flag = f"--{str(key).replace('_', '-')}"
        if value is True:
            yield flag
        elif isinstance(value, list):
            yield from (flag, *map(_text, value))
        elif value is not False and value is not None:
            yield from (flag, _text(value))


def _value(text: str, source: str) -> object:
    # Plain lines need neither YAML nor the run file's models, which take half a second to import.
    from schemas.config.reader import yaml_value

    return yaml_value(text, source)
