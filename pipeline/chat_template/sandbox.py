"""Render chat templates in a process of their own, with the environment of transformers.

Run as a script: JSON on stdin, JSON on stdout. A template is code of strangers: the sandbox keeps
it away from Python, and the limits of this process end one that needs too much memory or time.
"""

import json
import resource
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# assumed: the largest published templates have 30 kB, and prompts of a dry run a few MB
_MOST_BYTES = 1 << 30
_MOST_CHARACTERS = 8_000_000


class _Generation(Extension):
    """Accept `{% generation %}`, which marks the model's own text and renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def main() -> None:
    task, limit_s = json.load(sys.stdin), int(sys.argv[1])
    _limit(resource.RLIMIT_AS, _MOST_BYTES)
    _limit(resource.RLIMIT_CPU, limit_s)
    json.dump(_answer(task), sys.stdout)


def _limit(kind: int, most: int) -> None:
    try:
        resource.setrlimit(kind, (most, most))
    except (ValueError, OSError):
        # A lower limit is set already, or this system has none of that kind.
        return


def _answer(task: dict[str, Any]) -> dict[str, object]:
    environment = _environment(task["now"])
    try:
        variables = find_undeclared_variables(environment.parse(task["template"]))
        template = environment.from_string(task["template"])
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return {"error": _cause(error)}
    rendered = [
        _rendered(template.render, {**task["special_tokens"], **variables_of_prompt})
        for variables_of_prompt in task["prompts"]
    ]
    return {"variables": sorted(variables), "prompts": rendered}


def _environment(now: str) -> ImmutableSandboxedEnvironment:
    """Build the environment of transformers 5, utils/chat_template_utils.py."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    time = datetime.fromisoformat(now) if now else datetime.now(UTC).astimezone()
    environment.globals["strftime_now"] = time.strftime
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _rendered(render: Callable[..., str], variables: dict[str, object]) -> dict[str, str]:
    try:
        text = render(**variables)
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return {"error": _cause(error)}
    if len(text) > _MOST_CHARACTERS:
        return {"error": f"it renders {len(text):,} characters"}
    return {"text": text}


def _cause(error: Exception) -> str:
    return " ".join(f"{error}".split())[:300] or type(error).__name__


if __name__ == "__main__":
    main()
