"""The planner against SGLang itself, on generated launches of three releases.

`make planner-oracle` builds one environment without a GPU (about 1.6 GB, outside the checkout,
which Ray ships) and a tree a release, asks each release's own argument resolution and pool
configurators, and compares.
Every difference is either a fault of ours or stands in `EXCEPTIONS` with its reason.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.models.facts import model_facts
from pipeline.models.files import catalogue_files
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.kv_cache import kv_pool, token_cost
from pipeline.planner.memory.launch import resolve_launch
from pipeline.planner.memory.sizing import running_requests
from pipeline.planner.memory.state_pool import NoStatePool, StatePool, state_pool
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.releases import rules_for
from pipeline.planner.sglang.settings import RefusedLaunch
from schemas.plan import CompressedCache, LinearState, NoSpeculation, SlidingCache
from schemas.units import GIB

ENGINE_SIDE = Path(__file__).with_name("engine_side.py")
RELEASES = ("0.5.12.post1", "0.5.17", "0.5.23")
MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
MODELS = (
    "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B",
    "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b", "meta-llama/Meta-Llama-3.1-70B",
    "deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V4-Flash", "zai-org/GLM-5.2-FP8",
    "google/gemma-4-26B-A4B", "moonshotai/Kimi-K2.5", "MiniMaxAI/MiniMax-M2.5",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3-VL-30B-A3B-Instruct",
)  # fmt: skip
CARDS = ("rtx-pro-6000", "h100", "b200")
LINES = (
    "--tp 1",
    "--tp 2 --chunked-prefill-size 4096",
    "--tp 4 --max-running-requests 64",
    "--tp 8 --disable-cuda-graph",
    "--tp 8 --context-length 8192 --max-total-tokens 200000",
    "--tp 4 --disable-radix-cache",
    f"--tp 4 --disable-radix-cache {MTP}",
    "--tp 8 --dp 8 --enable-dp-attention --disable-radix-cache --max-running-requests 128",
    "--tp 4 --kv-cache-dtype fp8_e4m3 --page-size 64 --disable-radix-cache",
)
# Models whose checkpoint has the draft that the line asks for.
_DRAFTED = ("deepseek-ai/", "Qwen/Qwen3.5", "zai-org/")
REST_GIB = (3.0, 17.0, 60.0)

# Differences that are not faults of ours: (field, substring of the case) → why.
_TRANSFORMERS = "the environment's transformers is newer than this release can read Gemma-4 with"
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("refused", f"{release} {card} google/gemma-4"): _TRANSFORMERS
    for release in ("0.5.12.post1", "0.5.17")
    for card in CARDS
}

_PACKAGES = (
    "torch==2.13.0", "transformers==5.19.0", "tokenizers==0.23.2", "aiohttp", "einops", "fastapi",
    "gguf", "interegular", "IPython", "mistral_common>=1.11.5", "msgspec", "numpy", "openai==2.8.0",
    "openai-harmony==0.0.4", "orjson", "packaging", "partial_json_parser", "pillow",
    "prometheus-client", "psutil", "pybase64", "pydantic", "python-dateutil", "python-multipart",
    "pyzmq", "regex", "requests", "scipy", "sentencepiece", "setproctitle", "tiktoken", "tqdm",
    "uvicorn", "uvloop", "watchfiles", "xxhash", "zstandard", "distro", "blobfile==3.0.0",
    "easydict", "soundfile==0.13.1", "dill", "loguru",
)  # fmt: skip
_PACKAGES_ALONE = ("apache-tvm-ffi==0.1.11", "xgrammar==0.2.7", "compressed-tensors==0.18.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch to ask about."""

    model: str
    card: str
    line: str
    rest_gib: float

    def label(self, release: str) -> str:
        """How a difference names it."""
        return f"{release} {self.card} {self.model} {self.line} (rest {self.rest_gib:g} GiB)"


def cases() -> Iterator[Case]:
    """Every model, card and line; the made-up memory goes round."""
    number = 0
    for model in MODELS:
        for card in CARDS:
            for line in LINES:
                if MTP in line and not model.startswith(_DRAFTED):
                    continue
                yield Case(model=model, card=card, line=line, rest_gib=REST_GIB[number % 3])
                number += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all releases; 1 where a difference has no reason."""
    parser = argparse.ArgumentParser(description="Compare the planner with SGLang itself.")
    parser.add_argument(
        "--environments", type=Path, default=Path.home() / ".cache" / "regenerate-oracle"
    )
    options = parser.parse_args(argv)
    root = options.environments.resolve()
    python = _environment(root)
    models = _model_folders(root)
    compared: Counter[str] = Counter()
    differing: list[tuple[str, str]] = []
    for release in RELEASES:
        tree = _tree(root, python, release)
        for card in CARDS:
            batch = [case for case in cases() if case.card == card]
            answers = _asked(python, tree, card, batch, models)
            for case, answer in zip(batch, answers, strict=True):
                _compare(case, release, answer, compared, differing)
    return _report(compared, differing)


def _report(compared: Counter[str], differing: list[tuple[str, str]]) -> int:
    faults = [(field, text) for field, text in differing if not _reason(field, text)]
    for field, text in faults:
        print(f"DIFFERS {field}: {text}")
    wrong = Counter(field for field, _ in differing)
    print(f"\n{'compared':<28}{'cases':>7}{'differ':>8}")
    for field, count in sorted(compared.items()):
        print(f"  {field:<26}{count:>7}{wrong[field]:>8}")
    for (field, part), why in EXCEPTIONS.items():
        count = sum(1 for name, text in differing if name == field and part in text)
        print(f"exception, {count} times: {field} for {part!r}: {why}")
    return 1 if faults else 0


def _reason(field: str, text: str) -> str:
    found = (why for (name, part), why in EXCEPTIONS.items() if name == field and part in text)
    return next(found, "")


# --- their side -------------------------------------------------------------------------------


def _environment(root: Path) -> Path:
    """The interpreter of the side environment, built on first use."""
    python = root / "base" / "bin" / "python"
    if not python.exists():
        root.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(root / "base")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--only-binary", ":all:", *_PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", *_PACKAGES_ALONE], check=True)
    return python


def _tree(root: Path, python: Path, release: str) -> Path:
    """One release's Python files, unpacked on first use."""
    tree = root / release
    if not (tree / "sglang").exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(tree), f"sglang=={release}"], check=True)
    return tree


def _model_folders(root: Path) -> dict[str, Path]:
    """A folder with a config.json for each model."""
    folders = {}
    for model in MODELS:
        folder = root / "models" / model.replace("/", "--")
        folder.mkdir(parents=True, exist_ok=True)
        config = _complete(dict(catalogue_files(model).config))
        (folder / "config.json").write_text(json.dumps(config))
        folders[model] = folder
    return folders


def _complete(value: Any) -> Any:  # noqa: ANN401  # JSON is untyped
    """The catalogue keeps what bears on memory; transformers wants a little more."""
    if isinstance(value, list):
        return [_complete(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _complete(item) for key, item in value.items() if key != "indexer_types"}
    if "rope_type" in kept:
        kept.setdefault("rope_theta", 10000.0)
    return kept


def _asked(
    python: Path, tree: Path, card: str, batch: Sequence[Case], models: dict[str, Path]
) -> list[dict[str, Any]]:
    gpu = gpu_named(card)
    capability = f"{gpu.compute_capability // 10}.{gpu.compute_capability % 10}"
    lines = [
        json.dumps(
            {
                "argv": [*case.line.split(), "--model-path", str(models[case.model])],
                "rest_gib": case.rest_gib,
            }
        )
        for case in batch
    ]
    done = subprocess.run(
        [str(python), str(ENGINE_SIDE), str(tree), capability, str(gpu.smi_mib)],
        input="\n".join(lines) + "\n", capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    answers = [
        json.loads(line.removeprefix("ORACLE "))
        for line in done.stdout.splitlines()
        if line.startswith("ORACLE ")
    ]
    if len(answers) != len(batch):
        raise SystemExit(f"{tree.name} on {card} stopped early:\n{done.stderr[-2000:]}")
    return answers


# --- our side ---------------------------------------------------------------------------------


def _compare(
    case: Case,
    release: str,
    theirs: dict[str, Any],
    compared: Counter[str],
    differing: list[tuple[str, str]],
) -> None:
    ours = _ours(case, release)
    label = case.label(release)
    if "refused" in theirs or "refused" in ours:
        compared["refused"] += 1
        if ("refused" in theirs) != ("refused" in ours):
            text = f"{label}: ours {ours.get('refused')!r}, theirs {theirs.get('refused')!r}"
            differing.append(("refused", text))
        return
    compared["pools_failed"] += 1
    failed = theirs.get("pools_failed", "")
    if ours.pop("pool_fails") != bool(failed):
        differing.append(("pools_failed", f"{label}: theirs {failed!r}"))
    for field, value in ours.items():
        if field not in theirs:
            continue
        compared[field] += 1
        if not _same(value, theirs[field]):
            differing.append((field, f"{label}: ours {value!r}, theirs {theirs[field]!r}"))


def _same(ours: object, theirs: object) -> bool:
    if ours == "dsa" and theirs == "nsa":
        return True  # the older name of one backend
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return abs(ours - theirs) < 1e-6 * max(abs(ours), 1)
    return ours == theirs


def _ours(case: Case, release: str) -> dict[str, Any]:
    files = catalogue_files(case.model)
    model = model_facts(case.model, files.config, hf_quant=files.hf_quant)
    gpu = gpu_named(case.card)
    flags = parse_launch_line([*case.line.split(), "--model-path", case.model])
    rules, _ = rules_for(release)
    launch = resolve_launch(model, gpu, flags, rules)
    if isinstance(launch, RefusedLaunch):
        return {"refused": launch.message}
    settings = launch.settings
    drafted = not isinstance(settings.speculation, NoSpeculation)
    found: dict[str, Any] = {
        "mem_fraction_static": settings.mem_fraction_static,
        "chunked_prefill_size": settings.chunked_prefill_size,
        "prefill_graph_buckets": settings.prefill_graph_buckets,
        "max_running_requests": settings.max_running_requests,
        "page_size": settings.page_size,
        "attention_backend": settings.attention_backend,
    }
    if settings.decode_graph_max_bs:
        found["decode_graph_max_bs"] = settings.decode_graph_max_bs
    if drafted:
        found["num_draft_tokens"] = settings.speculation.num_draft_tokens  # type: ignore[union-attr]  # something is drafted
    rest = case.rest_gib * GIB
    states: NoStatePool | StatePool = NoStatePool(rest_bytes=rest)
    if isinstance(model.state, LinearState):
        states = state_pool(launch, model.state, rest)
        found["state_slots"] = states.slots
        if states.slots <= 0 or states.rest_bytes <= 0:
            return found | {"pool_fails": True}
    cost = token_cost(launch)
    found["kv_bytes_per_token"] = float(cost.priced_bytes)
    uncapped = kv_pool(cost, int(states.rest_bytes), settings)
    cache = model.cache
    window = cache.window_tokens if isinstance(cache, SlidingCache | CompressedCache) else 0
    floor = window + settings.page_size if uncapped.swa_tokens or window else 0
    if uncapped.tokens <= 0 or (window and uncapped.swa_tokens <= floor):
        return found | {"pool_fails": True}
    found["pool_fails"] = False
    if settings.max_total_tokens is None:
        found["max_total_num_tokens"] = uncapped.tokens
        found["effective_requests"] = running_requests(launch, uncapped, states)[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
