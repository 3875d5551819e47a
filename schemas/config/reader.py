"""Reading a run file: strict YAML, overrides, and one line for each mistake."""

import difflib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import ConfigError
from schemas.config.run_file import RunFile

_LONGEST_VALUE_SHOWN = 60
# assumed: a thousand times as many as the run file has keys
_MOST_VALUES = 100_000
_MERGE_TAG = "tag:yaml.org,2002:merge"


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read the run file at `path` and apply `key.path=value` overrides.

    Raises ConfigError with one line per mistake: the file, the field, the value found, what is
    allowed, and for an unknown key the nearest known one.
    """
    return run_file_of(run_file_values(path, overrides), str(path))


def run_file_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, object]:
    """Return the values of a run file with overrides, not yet checked. Raises ConfigError."""
    values = _mapping(_text_of(path), str(path))
    for override in overrides:
        _apply_override(values, override)
    return values


def run_file_text(values: Mapping[str, object]) -> str:
    """Write values as YAML, in the order given."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=100)


def parse_run_file(text: str, source: str) -> RunFile:
    """Parse a run file's text. Raises ConfigError with one line per mistake."""
    return run_file_of(_mapping(text, source), source)


def run_file_of(values: Mapping[str, object], source: str) -> RunFile:
    """Parse a run file from plain values. Raises ConfigError with one line per mistake."""
    try:
        return RunFile.model_validate(values)
    except ValidationError as error:
        lines = [f"{source}: {_mistake(details)}" for details in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def stored_run_file(text: bytes) -> RunFile | None:
    """Parse the run file that a session stored; None if a release with other keys wrote it."""
    try:
        return RunFile.model_validate_json(text)
    except ValidationError:
        return None


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML loader that refuses repeated keys, where the plain one keeps the last.

    It also refuses aliases that stand for more values than any run file has: nine lines of them can
    stand for a billion.
    """

    def get_single_data(self) -> object:
        node = self.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"aliases stand for more than {_MOST_VALUES:,} values")
        return self.construct_document(node)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = str(super().construct_scalar(node))
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise yaml.constructor.ConstructorError(
                None, None, "text contains half of a surrogate pair", node.start_mark
            )
        return text

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # the plain loader reports it
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice; keep one", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


def _num_values(node: yaml.Node, counted: dict[int, int]) -> int:
    """Count a node's values with its aliases written out, each node once."""
    if id(node) not in counted:
        # An alias of a node within itself has no end.
        counted[id(node)] = _MOST_VALUES + 1
        counted[id(node)] = 1 + sum(_num_values(each, counted) for each in _below(node))
    return counted[id(node)]


def _below(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _parsed(text: str) -> object:
    """Parse YAML into plain values. Raises YAMLError, and no other error."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a subclass of SafeLoader
    except (ValueError, LookupError) as error:
        # The library does not catch errors of single values: 2026-02-30 looks like a date.
        raise yaml.YAMLError(f"a value that cannot be read: {error}") from None
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the run file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from None


def yaml_value(text: str, source: str) -> object:
    """Parse YAML into plain values. Raises ConfigError, which begins with the source."""
    try:
        return _parsed(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}:{where} not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def _mapping(text: str, source: str) -> dict[str, object]:
    values = yaml_value(text, source)
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: found {_shown(values)}; expected a mapping of keys to values")
    return values


def _apply_override(values: dict[str, object], override: str) -> None:
    key_path, equals, text = override.partition("=")
    keys = key_path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: expected key=value, for example sampling.top_p=0.9")
    try:
        value = _parsed(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: the value is not valid YAML") from None
    section: dict[str, object] = values
    for depth, key in enumerate(keys[:-1], start=1):
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            found = ".".join(keys[:depth])
            raise ConfigError(f"--set {override}: {found} is {_shown(inner)}, not a section")
        section = inner
    section[keys[-1]] = value


def _mistake(details: ErrorDetails) -> str:
    loc = tuple(part for part in details["loc"] if part != "[key]")
    field = ".".join(str(part) for part in loc)
    kind, found = details["type"], details["input"]
    if kind == "extra_forbidden":
        return f"{field}: unknown key{_nearest_key(loc)}"
    if kind == "missing":
        return f"{field}: missing; this key has no default"
    if kind == "value_error":
        return f"{field}.{details['msg'].removeprefix('Value error, ')}".removeprefix(".")
    if kind == "model_type":
        return f"{field}: found {_shown(found)}; it should be a section with keys of its own"
    expected = details["msg"][0].lower() + details["msg"][1:]
    return f"{field}: found {_shown(found)}; {expected.replace('input should', 'it should')}"


def _nearest_key(loc: tuple[int | str, ...]) -> str:
    known = list(_section_at(loc[:-1]).model_fields)
    near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known keys: {', '.join(known)}"


def _section_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = RunFile
    for part in loc:
        annotation = section.model_fields[str(part)].annotation
        for candidate in (annotation, *get_args(annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                section = candidate
    return section


def _shown(value: object) -> str:
    text = repr(value) if value is not None else "null"
    if len(text) > _LONGEST_VALUE_SHOWN:
        text = text[: _LONGEST_VALUE_SHOWN - 3] + "..."
    return f"{text} ({type(value).__name__})" if value is not None else text
