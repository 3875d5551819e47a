"""What a Python needs that runs SGLang on a CPU without AMX. Loaded by a .pth file.

SGLang defines Triton kernels at import and launches none on a CPU; torchvision is for images alone,
and its wheel does not load beside a CPU build of torch. Every name in these packages is there and
does nothing, except for two functions of arithmetic that are called on the way.

SGLang asks in a few places whether the CPU has AMX, and takes a Triton kernel where it has none. A
hybrid model and its draft head come that way, so there the answer is changed: the kernels behind it
are those of the stand-in beside.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable
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


def _says_that_it_uses_cpu_kernels(module: Any) -> None:
    module._use_cpu = True


def _says_that_it_has_amx(module: Any) -> None:
    """So that `--attention-backend intel_amx` stays, the one on a CPU that checks drafts."""
    asked = module.get_platform

    class Platform:
        has_amx = True

        def __getattr__(self, name: str) -> Any:
            return getattr(asked(), name)

    module.get_platform = Platform


def _scatters_on_a_cpu(module: Any) -> None:
    """What commits the states of kept drafts takes CUDA tensors alone."""
    from sgl_kernel.mamba import scatter_with_mask

    module.fused_mamba_state_scatter_with_mask = scatter_with_mask
    module.fused_conv_window_scatter_with_mask = scatter_with_mask
    module._conv_multi_eligible = lambda _pairs: False


_OPS = "sglang.kernels.ops"
_CHANGES: dict[str, Callable[[Any], None]] = {
    f"{_OPS}.attention.fla.layernorm_gated": _says_that_it_uses_cpu_kernels,
    f"{_OPS}.attention.fla.fused_norm_gate": _says_that_it_uses_cpu_kernels,
    f"{_OPS}.mamba.mamba_state_scatter_triton": _scatters_on_a_cpu,
    "sglang.srt.arg_groups.overrides": _says_that_it_has_amx,
}  # as of SGLang 0.5.23


class _Changer:
    """Changes a module of SGLang's right after it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: object = None) -> Any:
        if name not in _CHANGES:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_change(module: types.ModuleType) -> None:
            load(module)
            _CHANGES[name](module)

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path[:0] = [_Finder(), _Changer()]  # type: ignore[list-item]
