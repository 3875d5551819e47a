"""Reference of the run file as Markdown, made from the JSON Schema and so from the docstrings."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from schemas.config.run_file import RunFile

Schema = Mapping[str, Any]

_HEAD = """\
<!-- Made by `make reference` from schemas/config/; edit the docstrings there. -->

# Run file

A run file is YAML. `prompts.path`, `model` and `output.folder` are required; every other key has a
default. A key that does not exist is refused by its name. `--set sampling.max_tokens=512` overrides
a key on the command line. `null` is written `null` or left empty.

`regenerate init` writes a first run file. Its first line names the JSON Schema of this page, with
which editors complete and check the keys. A longer one:

```yaml
prompts:
  path: /shared/prompts.parquet
  id_column: id
  keep_columns: [category]
model: Qwen/Qwen3.6-27B
thinking: true
sampling: {temperature: 0.6, top_p: 0.95, top_k: 20, max_tokens: 28672, seed: 7}
engine:
  kind: sglang
  python: /opt/sglang/bin/python   # interpreter of SGLang's environment
  count: null                      # as many engines as fit on the cluster
  flags: [--reasoning-parser=qwen3]  # the worker plans the others
output:
  folder: /shared/run-1
quality:
  cut_in_thinking: {policy: retry, max_share: 0.05}
  looping: {policy: retry}
```
"""
_TYPE_NAMES = {
    "integer": "whole number", "number": "number", "string": "text", "boolean": "true or false",
    "null": "null",
}  # fmt: skip
_BOUNDS = (
    ("minimum", "≥"),
    ("exclusiveMinimum", ">"),
    ("maximum", "≤"),
    ("exclusiveMaximum", "<"),
)
# Larger bounds are those of the columns' integers.
_LARGEST_SHOWN = 2**31 - 1


def reference_text() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *_sections(RunFile.model_json_schema())])


def _sections(schema: Schema) -> Iterator[str]:
    """Yield the top-level keys, then a table for each section of keys, each once."""
    definitions = schema["$defs"]
    yield from _table("Top level", schema, definitions)
    waiting = _children("", schema, definitions)
    while waiting:
        name, section = waiting.pop(0)
        yield from _table(f"`{name}`", section, definitions)
        waiting = _children(f"{name}.", section, definitions) + waiting


def _children(prefix: str, schema: Schema, definitions: Schema) -> list[tuple[str, Schema]]:
    """List the sections among the keys of a section, with their full names."""
    found = []
    for name, key in schema["properties"].items():
        reference = key.get("$ref") or key.get("items", {}).get("$ref")
        section = definitions[_name_of(reference)] if reference else {}
        if "properties" in section:
            found.append((f"{prefix}{name}{'[]' if 'items' in key else ''}", section))
    return found


def _table(title: str, schema: Schema, definitions: Schema) -> Iterator[str]:
    required = schema.get("required", ())
    yield from (f"## {title}", "")
    if title != "Top level":
        yield from (_one_line(schema.get("description", "")), "")
    yield from ("| key | value | default | |", "| --- | --- | --- | --- |")
    for name, key in schema["properties"].items():
        kind = _kind(key, definitions)
        default = "required" if name in required else _default(key)
        yield f"| `{name}` | {kind} | {default} | {_one_line(_meaning(key, definitions))} |"
    yield ""


def _meaning(key: Schema, definitions: Schema) -> str:
    """Return the docstring of a key, or else that of the section that it is."""
    reference = key.get("$ref") or key.get("items", {}).get("$ref")
    section = definitions[_name_of(reference)] if reference else {}
    return str(key.get("description") or section.get("description", ""))


def _kind(key: Schema, definitions: Schema) -> str:
    """Describe the values that a key takes, with their bounds."""
    if "$ref" in key:
        section = definitions[_name_of(key["$ref"])]
        return "section" if "properties" in section else _kind(section, definitions)
    if "anyOf" in key:
        kinds = [_kind(one, definitions) for one in key["anyOf"]]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in key or "const" in key:
        values = key.get("enum", [key.get("const")])
        return ", ".join(f"`{_yaml(value)}`" for value in values)
    if key.get("type") == "array":
        return f"list of {_kind(key.get('items', {}), definitions)}"
    if key.get("type") == "object":
        return "map"
    bounds = [
        f"{sign} {key[name]:,}"
        for name, sign in _BOUNDS
        if name in key and abs(key[name]) < _LARGEST_SHOWN
    ]
    return " ".join([_TYPE_NAMES.get(str(key.get("type")), "any value"), ", ".join(bounds)]).strip()


def _default(key: Schema) -> str:
    if "default" not in key or ("$ref" in key and isinstance(key["default"], dict)):
        return ""
    return f"`{_yaml(key['default'])}`"


def _yaml(value: object) -> str:
    """Write a value as YAML; JSON is YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _one_line(text: str) -> str:
    """Join a docstring's lines; a cell of a table ends at a bar."""
    return " ".join(text.split()).replace("|", "\\|")


def _name_of(reference: str) -> str:
    return reference.rpartition("/")[2]
