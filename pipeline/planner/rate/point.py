"""Rate of a model on N GPUs at a given number of running requests.

`jobs.estimate --point` prints it, and published readings are scored against it. Nothing here
checks whether the requests fit in memory.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import PlanError
from pipeline.planner.cards import gpu_named
from pipeline.planner.memory.launch import resolve_launch
from pipeline.planner.rate.kernels import FITTED, Kernels
from pipeline.planner.rate.readings.traits import Engine
from pipeline.planner.rate.replica import Replica, replica_of_launch
from pipeline.planner.rate.throughput import Rate, Workload, rate_at
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.planner.sglang.releases import rules_for
from pipeline.planner.sglang.settings import RefusedLaunch
from schemas.plan import Gpu, ModelFacts, Moe

# As SGLang names them.
_KV_DTYPES = {"bf16": "bfloat16", "fp8": "fp8_e4m3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PointQuery:
    """A point as a person writes it. `running_requests` counts over all GPUs.

    With `output_cv` 0 all completions have the same length, as in benchmarks.
    """

    model: ModelFacts
    gpu: str
    num_gpus: int
    tp_size: int
    pp_size: int = 1
    dp_size: int = 1
    running_requests: float
    input_tokens: float
    output_tokens: float
    output_cv: float = 0.0
    accept_length: float | None = None
    num_draft_tokens: int | None = None
    sglang_version: str | None = None
    attention_backend: str | None = None
    engine: Engine = "sglang"
    kv_format: Literal["bf16", "fp8"] | None = None
    """Format of the KV cache; None for the engine's default."""


def rate_at_point(query: PointQuery, kernels: Kernels = FITTED) -> Rate:
    """Return the rate of one replica at a point, and its step."""
    replica, replicas = point_replica(query, kernels)
    return rate_at(
        replica,
        query.running_requests / replicas,
        Workload(
            prompt_tokens_mean=query.input_tokens,
            output_tokens_mean=query.output_tokens,
            output_tokens_cv=query.output_cv,
        ),
        accept_length=query.accept_length,
        release_measured=not rules_for(query.sglang_version)[1] or query.sglang_version is None,
    )


def point_replica(query: PointQuery, kernels: Kernels) -> tuple[Replica, int]:
    """Weigh the launch of a point, and count its copies on the GPUs."""
    _check(query)
    gpu = gpu_named(query.gpu)
    tp, adp, replicas = _layout(query)
    # Prompts of a batch job are distinct, so a prefix cache would save nothing.
    words = ["--model-path", query.model.name, "--tp-size", str(tp), "--disable-radix-cache"]
    if query.pp_size > 1:
        words += ["--pp-size", str(query.pp_size)]
    if adp > 1:
        words += ["--dp-size", str(adp), "--enable-dp-attention"]
    if query.attention_backend is not None:
        words += ["--attention-backend", query.attention_backend]
    draft_tokens = query.num_draft_tokens or _usual_draft_tokens(query.accept_length)
    if draft_tokens is not None:
        words += _speculative_words(draft_tokens)
    if query.kv_format is not None:
        words += ["--kv-cache-dtype", _KV_DTYPES[query.kv_format]]
    return _replica(query, gpu, words, kernels), replicas


def _replica(query: PointQuery, gpu: Gpu, words: list[str], kernels: Kernels) -> Replica:
    flags = parse_launch_line(words)
    rules, _ = rules_for(query.sglang_version)
    launch = resolve_launch(query.model, gpu, flags, rules)
    if isinstance(launch, RefusedLaunch):
        raise PlanError(launch.message)
    return replica_of_launch(launch, kernels, query.engine)


def _speculative_words(draft_tokens: int) -> list[str]:
    return [
        "--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(draft_tokens - 1),
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(draft_tokens),
    ]  # fmt: skip


def _check(query: PointQuery) -> None:
    for name, value, least in (
        ("--tp-size", query.tp_size, 1),
        ("--pp-size", query.pp_size, 1),
        ("--num-gpus", query.num_gpus, 1),
        ("--dp-size", query.dp_size, 1),
        ("--input-tokens", query.input_tokens, 0),
        ("--output-tokens", query.output_tokens, 1),
    ):
        if value < least:
            raise PlanError(f"{name}: found {value:g}; it must be at least {least}")
    if query.running_requests <= 0:
        raise PlanError(f"--running-requests: found {query.running_requests:g}; it must be above 0")
    if query.tp_size > query.num_gpus:
        raise PlanError(
            f"--tp-size: found {query.tp_size}; it must not exceed --num-gpus, {query.num_gpus}"
        )
    if query.num_gpus % query.pp_size:
        raise PlanError(
            f"--pp-size: found {query.pp_size}; it must divide --num-gpus, {query.num_gpus}"
        )
    drafts, accepted = query.num_draft_tokens, query.accept_length
    if drafts is not None and drafts < 2:
        raise PlanError(f"--draft-tokens: found {drafts}; it must be at least 2")
    most = drafts or _usual_draft_tokens(accepted)
    if accepted is not None and most is not None and not 1 <= accepted <= most:
        raise PlanError(
            f"--mtp-accept-length: found {accepted:g}; it must be between 1 and the "
            f"{most} draft tokens"
        )


def _usual_draft_tokens(accept_length: float | None) -> int | None:
    """Return 4, as in SGLang's MTP recipes; 8 or 16, as of block drafts, if more are accepted."""
    if accept_length is None:
        return None
    return next((count for count in (4, 8, 16) if accept_length <= count), 16)


def _layout(query: PointQuery) -> tuple[int, int, int]:
    """Return the ranks of one stage, its attention ranks, and the copies of all stages."""
    tp, dp = query.tp_size, query.dp_size
    num_gpus = query.num_gpus // query.pp_size
    shared = dp > 1 and isinstance(query.model.ffn, Moe)
    if shared and num_gpus == tp * dp:
        # Attention in `dp` groups of `tp` ranks, experts over all of them.
        tp *= dp
    elif shared and dp <= tp and tp % dp == 0:
        pass  # SGLang's own layout: dp attention ranks inside tp
    elif dp > 1 and num_gpus == tp * dp:
        # Copies of a dense model, each on its own ranks.
        dp = 1
    elif dp > 1:
        raise PlanError(
            f"--dp-size: found {dp}; expected a divisor of --tp-size {tp} for a model with "
            f"experts, or --num-gpus = {tp} x {dp}"
        )
    if num_gpus % tp:
        ranks = tp * query.pp_size
        raise PlanError(f"--num-gpus: found {query.num_gpus}; expected a multiple of {ranks} ranks")
    return tp, dp, num_gpus // tp
