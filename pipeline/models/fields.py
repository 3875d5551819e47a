"""Fields of a `config.json`, under any of the names that models give them.

`need` reads a field that the arithmetic depends on, and names it in a one-line error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import PlanError

# Whole numbers up to it are exact in every JSON reader.
_LARGEST = 2**53
_WRAPPERS = ("text_config", "thinker_config", "llm_config", "language_config")


class ConfigFields:
    """The text part of a config; the wrapper's fields count where it lacks one."""

    __slots__ = ("_text", "_whole")

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise PlanError("the model config is not a JSON object")
        self._whole = config
        self._text = _text_part(config)

    def architecture(self) -> str:
        """Return the class that SGLang loads: the wrapper's, if there is one."""
        for part in (self._whole, self._text):
            names = part.get("architectures")
            if isinstance(names, list) and names:
                return str(names[0])
        return "unknown"

    def get(self, *names: str, default: object = None) -> Any:  # noqa: ANN401  # JSON is untyped
        """Return the first of `names` that is present and not null."""
        for part in (self._text, self._whole):
            for name in names:
                value = part.get(name)
                if value is not None:
                    return value
        return default

    def number(self, *names: str, default: int = 0) -> int:
        """Return a whole number, or the default."""
        value = self.get(*names)
        if value is None:
            return default
        return _whole_number(names[0], value)

    def need(self, *names: str) -> int:
        """Return a whole number above 0. Raises PlanError where the config has none."""
        value = self.get(*names)
        if value is None:
            raise PlanError(f"the model config lacks {names[0]!r}, which the plan needs")
        number = _whole_number(names[0], value)
        if number <= 0:
            raise PlanError(f"the model config has {names[0]} = {number}; it must be above 0")
        return number

    def kinds(self, name: str) -> Sequence[Any]:
        """Return a list with one entry per layer, or an empty one."""
        value = self.get(name)
        return value if isinstance(value, Sequence) and not isinstance(value, str) else ()

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a nested object, or an empty one."""
        value = self.get(name)
        return value if isinstance(value, Mapping) else {}

    def whole_section(self, name: str) -> Mapping[str, Any]:
        """Return a nested object of the wrapper, or an empty one."""
        value = self._whole.get(name)
        return value if isinstance(value, Mapping) else {}


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _WRAPPERS:
        part = config.get(name)
        if isinstance(part, Mapping):
            return _text_part(part)
    return config


def _whole_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"the model config has {name} = {value!r}; it must be a number")
    if not abs(value) <= _LARGEST:
        raise PlanError(f"the model config has {name} out of range; it must be {_LARGEST} at most")
    return int(value)
