"""Runs inside a side environment: what one SGLang release makes of launch lines.

Started by `planner_oracle.py` as `engine_side.py TREE MAJOR.MINOR SMI_MIB`; one JSON case a line
on stdin, one JSON answer a line on stdout. No GPU is there: compiled packages are replaced by
stand-ins that answer anything, and the card's figures are the ones given. SGLang is imported by
name, so that this file needs none of it to be read.
"""

# ruff: noqa: ANN401  # stand-ins for another program's objects have no types of ours

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

GIB = 1 << 30
_COMPILED = (
    "torchvision",
    "triton",
    "sgl_kernel",
    "flashinfer",
    "deep_gemm",
    "cutlass",
    "tilelang",
)


class _Anything:
    """Answers every use, so that module-level code of kernels runs through."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def get_current_target(self) -> Any:
        raise RuntimeError("no driver")


class _AnyClass(type):
    """A class whose attributes are anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _StandIn(types.ModuleType):
    """A module that has every name: capitalised ones are classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.lstrip("_")[:1].isupper():
            return _AnyClass(name, (), {"__init__": lambda self, *args, **kwargs: None})
        return _Anything()


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the compiled packages."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in _COMPILED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        module.__version__ = "99.0"  # type: ignore[attr-defined]  # read by version checks
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def main() -> None:
    """Answer cases until stdin ends."""
    tree, capability, smi_mib = sys.argv[1:4]
    sys.meta_path.insert(0, _StandIns())
    sys.path.insert(0, tree)
    _pretend_card(tuple(map(int, capability.split("."))))
    _allow_known_configs()
    server_args = importlib.import_module("sglang.srt.server_args")
    logging.disable(logging.CRITICAL)
    _replace("get_device_memory_capacity", lambda *args, **kwargs: int(smi_mib))
    _replace("get_nvgpu_memory_capacity", lambda *args, **kwargs: int(smi_mib))
    for line in sys.stdin:
        case = json.loads(line)
        print("ORACLE " + json.dumps(_answer(server_args, case)), flush=True)


def _pretend_card(capability: tuple[int, ...]) -> None:
    torch = importlib.import_module("torch")
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 16
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda *args, **kwargs: "NVIDIA stand-in"
    torch.cuda.get_device_capability = lambda *args, **kwargs: capability
    properties = types.SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, name="stand-in",
        total_memory=80 * GIB, is_integrated=False, gcnArchName="",
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda *args, **kwargs: properties


def _allow_known_configs() -> None:
    """Older releases register config classes that newer transformers already have."""
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    register = auto.CONFIG_MAPPING.register
    auto.CONFIG_MAPPING.register = lambda key, value, exist_ok=False: register(
        key, value, exist_ok=True
    )


def _replace(name: str, value: Any) -> list[tuple[Any, str, Any]]:
    """Set a function in every loaded module of SGLang that has it; gives back what was there."""
    replaced = []
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sglang") and name in vars(module):
            replaced.append((module, name, vars(module)[name]))
            setattr(module, name, value)
    return replaced


def _answer(server_args: Any, case: dict[str, Any]) -> dict[str, Any]:
    try:
        args = server_args.prepare_server_args(["--device", "cuda", *case["argv"]])
        view = args
        if hasattr(args, "resolve_once"):
            args.resolve_once()
            view = importlib.import_module("sglang.srt.arg_groups.overrides").resolved_view(args)
        answer = _resolved(args, view)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a refusal is an answer
        return {"refused": f"{type(error).__name__}: {error}"[:300]}
    replaced: list[tuple[Any, str, Any]] = []
    try:
        answer |= _pools(args, view, case, replaced)
    except Exception as error:  # noqa: BLE001  # the pools are optional: say why not
        answer["pools_failed"] = f"{type(error).__name__}: {error}"[:200]
    finally:
        for module, name, value in reversed(replaced):
            setattr(module, name, value)
    return answer


def _resolved(args: Any, view: Any) -> dict[str, Any]:
    graphs = getattr(view, "cuda_graph_config", None) or getattr(args, "cuda_graph_config", None)
    if graphs is not None:
        decode = graphs.decode.max_bs
        prefill = len(graphs.prefill.bs or ())
        prefill = 0 if str(graphs.prefill.backend).lower().endswith("disabled") else prefill
    else:
        decode = args.cuda_graph_max_bs
        off = args.disable_piecewise_cuda_graph
        prefill = 0 if off else len(args.piecewise_cuda_graph_tokens or ())
    return {
        "mem_fraction_static": view.mem_fraction_static,
        "chunked_prefill_size": view.chunked_prefill_size,
        "decode_graph_max_bs": decode,
        "prefill_graph_buckets": prefill,
        "max_running_requests": view.max_running_requests,
        "page_size": view.page_size,
        "attention_backend": view.attention_backend,
        "num_draft_tokens": view.speculative_num_draft_tokens,
    }


# --- pools ------------------------------------------------------------------------------------


def _pools(
    args: Any, view: Any, case: dict[str, Any], replaced: list[tuple[Any, str, Any]]
) -> dict[str, Any]:
    """Slots, bytes a token, tokens and requests, for a made-up rest of memory."""
    bags = _bags(args, view, replaced)
    config = _model_config(args)
    runner = _runner(args, view, config, bags)
    rest_gib = case["rest_gib"]
    answer: dict[str, Any] = {}
    if runner.mambaish_config is not None:
        rest_gib = _call(runner, ("_handle_max_mamba_cache", "handle_max_mamba_cache"), rest_gib)
        answer["state_slots"] = bags.max_mamba_cache_size or args.max_mamba_cache_size
    module = importlib.import_module("sglang.srt.model_executor.pool_configurator")
    configurator = module.create_memory_pool_configurator(runner)
    sizes = configurator.calculate_pool_sizes(int(rest_gib * GIB), view.page_size)
    answer["max_total_num_tokens"] = sizes.max_total_num_tokens
    for name in ("_cell_size", "bytes_per_full_token"):
        # A pool capped by requests inherits a cell size that it does not use.
        if hasattr(configurator, name) and "Cap" not in type(configurator).__name__:
            answer["kv_bytes_per_token"] = float(getattr(configurator, name))
    names = ("resolve_max_num_reqs", "_resolve_max_num_reqs")
    answer["effective_requests"] = _call(runner, names, sizes.max_total_num_tokens)
    return answer


class _Bags:
    """Stands in for the runtime context: every namespace reads the resolved arguments."""

    def __init__(self, args: Any, view: Any) -> None:
        self.args, self.view = args, view
        self.max_mamba_cache_size = view.max_mamba_cache_size
        tp = view.tp_size
        dp = view.dp_size if getattr(view, "enable_dp_attention", False) else 1
        dp = getattr(view, "attn_dp_size", None) or dp
        self.parallel = _Switches(
            attn_tp_size=tp // dp, attn_dcp_size=1, tp_size=tp, pp_size=1, attn_dp_size=dp,
            attn_cp_size=1,
        )  # fmt: skip
        bag = _Namespace(self)
        self.functions: dict[str, Any] = {
            name: (lambda: bag)
            for name in (
                "get_schedule", "get_memory", "get_exec", "get_spec", "get_disagg", "get_mm",
                "get_model", "get_context",
            )
        }  # fmt: skip
        drafted = view.speculative_num_draft_tokens
        self.functions["max_speculative_num_draft_tokens"] = lambda: drafted
        self.functions["get_parallel"] = lambda: self.parallel
        self.functions["get_attention_tp_size"] = lambda: self.parallel.attn_tp_size


class _Switches(types.SimpleNamespace):
    """Known figures; every switch that is not named is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("enable_"):
            return False
        raise AttributeError(name)


class _Namespace:
    """One namespace of the runtime context."""

    def __init__(self, bags: _Bags) -> None:
        self._bags = bags

    def override(self, source: str, **values: Any) -> None:
        for name, value in values.items():
            setattr(self._bags, name, value)

    def __getattr__(self, name: str) -> Any:
        bags = self._bags
        if name == "max_mamba_cache_size":
            return bags.max_mamba_cache_size
        if name in ("mamba", "kernel", "features", "graph"):
            return self
        strategy = getattr(bags.view, "mamba_radix_cache_strategy", None)
        if name == "enable_mamba_extra_buffer":
            return str(strategy).startswith("extra_buffer") and not bags.view.disable_radix_cache
        if name == "enable_mamba_extra_buffer_lazy":
            return strategy == "extra_buffer_lazy"
        value = getattr(bags.view, name)
        # Fields that nothing resolved have a declared fallback. arg_groups/fields/schedule.py.
        fallbacks = {"mamba_full_memory_ratio": 0.9, "swa_full_tokens_ratio": 0.8}
        return fallbacks.get(name) if value is None else value


def _bags(args: Any, view: Any, replaced: list[tuple[Any, str, Any]]) -> _Bags:
    bags = _Bags(args, view)
    for module in (
        "sglang.srt.mem_cache.kv_cache_configurator",
        "sglang.srt.model_executor.model_runner_kv_cache_mixin",
        "sglang.srt.model_executor.pool_configurator",
        "sglang.srt.layers.dp_attention",
        "sglang.srt.configs.mamba_utils",
    ):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    for name, value in bags.functions.items():
        replaced += _replace(name, value)
    return bags


def _model_config(args: Any) -> Any:
    if hasattr(args, "get_model_config"):
        return args.get_model_config()
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    return overrides.model_config_of(args)


def _runner(args: Any, view: Any, config: Any, bags: _Bags) -> Any:
    """An object with the attributes that the configurators read, and their methods."""
    torch = importlib.import_module("torch")
    spec_info = importlib.import_module("sglang.srt.speculative.spec_info")
    text = config.hf_text_config
    hybrid = text if hasattr(text, "mamba2_cache_params") else None
    layers = config.num_hidden_layers
    kv_dtype = torch.float8_e4m3fn if str(view.kv_cache_dtype).startswith("fp8") else torch.bfloat16
    drafted = getattr(config.hf_config, "num_nextn_predict_layers", None)
    info = types.SimpleNamespace(
        start_layer=0, end_layer=layers, num_effective_layers=layers,
        swa_attention_layer_ids=getattr(config, "swa_attention_layer_ids", None),
        full_attention_layer_ids=getattr(config, "full_attention_layer_ids", None),
        is_hybrid_swa_mtp_draft=False,
    )  # fmt: skip
    arch = getattr(config.attention_arch, "name", "")
    runner = _Runner()
    vars(runner).update(
        server_args=args, model_config=config, kv_cache_dtype=kv_dtype,
        kv_cache_dtype_str=str(view.kv_cache_dtype), model_dtype=torch.bfloat16, device="cuda",
        page_size=view.page_size, is_draft_worker=False, use_mla_backend=arch.endswith("MLA"),
        mambaish_config=hybrid, hybrid_gdn_config=hybrid, hybrid_kda_config=None,
        spec_algorithm=spec_info.SpeculativeAlgorithm.from_string(view.speculative_algorithm),
        spec_aux_config=types.SimpleNamespace(
            eagle_draft_num_layers=drafted, dflash_draft_num_layers=None, draft_model_config=None,
        ),
        is_hybrid_swa=bool(getattr(config, "is_hybrid_swa", False)),
        is_hybrid_swa_mtp_draft=False, draft_swa_full_capacity=False,
        is_hybrid_swa_compress=False,
        sliding_window_size=getattr(config, "sliding_window_size", None)
        or getattr(config, "window_size", None)
        or getattr(text, "sliding_window", None),
        layer_info=info, start_layer=0, end_layer=layers, num_effective_layers=layers,
        pp_size=1, attn_dp_size=bags.parallel.attn_dp_size, dp_size=bags.parallel.attn_dp_size,
        enable_hisparse=False, extra_mamba_cache_bytes_per_req=0,
        dflash_draft_cell_size_per_token=None, draft_parallel_layout=None,
        ps=types.SimpleNamespace(pp_size=1, attn_dp_size=bags.parallel.attn_dp_size,
                                 attn_tp_size=bags.parallel.attn_tp_size),
        fused_entry_bytes=lambda kind: None,
    )  # fmt: skip
    return runner


class _Runner:
    """Borrows the release's own methods by name."""

    def __getattr__(self, name: str) -> Any:
        for module, owner in (
            ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator"),
            ("sglang.srt.model_executor.model_runner_kv_cache_mixin", "ModelRunnerKVCacheMixin"),
        ):
            loaded = sys.modules.get(module)
            method = getattr(getattr(loaded, owner, None), name, None)
            if callable(method):
                return types.MethodType(method, self)
        raise AttributeError(name)


def _call(runner: Any, names: tuple[str, ...], value: Any) -> Any:
    for name in names:
        method = getattr(runner, name, None)
        if method is not None:
            return method(value)
    raise AttributeError(names[0])


if __name__ == "__main__":
    main()
