"""Empty `triton` and `torchvision` for a Python that runs SGLang on a CPU. Loaded by a .pth file.

SGLang defines Triton kernels at import and launches none on a CPU; torchvision is for images alone,
and its wheel does not load beside a CPU build of torch. Every name in these packages is there and
does nothing, except for two functions of arithmetic that are called on the way.
"""

import importlib.machinery
import sys
import types
from typing import Any

_PACKAGES = ("triton", "torchvision")
_VERSIONS = {"triton": "3.6.0", "torchvision": "0.28.0"}


class _AnyMember(type):
    """A class of which every attribute is there, for enumerations and constants."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _any_class(name: str) -> type:
    def remember(self: Any, *values: object, **named: object) -> None:
        self.__dict__.update(named)

    return _AnyMember(name, (), {"__init__": remember})


class _AnyModule(types.ModuleType):
    """A package of which every name is there: a class where it begins with a capital."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        root = name.partition(".")[0]
        if name == root:
            self.__version__ = _VERSIONS[root]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _any_class(name) if name[0].isupper() else _AnyModule(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *values: Any, **named: object) -> Any:
        """As a decorator it leaves the function as it is, with arguments and without."""
        if len(values) == 1 and callable(values[0]) and not named:
            return values[0]
        return lambda function: function

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__


class _Finder:
    """Makes a package or module of ours whenever one of these names is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] not in _PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _AnyModule(spec.name)
        if spec.name == "triton":
            module.cdiv = lambda over, under: -(-over // under)  # type: ignore[attr-defined]
            module.next_power_of_2 = lambda n: 1 << (int(n) - 1).bit_length()  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
