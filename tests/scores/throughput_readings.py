"""The published readings beside what the model says of them: shared by the score and the fit."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.models.dtypes import load_model_as
from pipeline.planner.rate.kernels import FITTED, Kernels
from pipeline.planner.rate.point import PointQuery, point_replica
from pipeline.planner.rate.replica import Replica
from pipeline.planner.rate.throughput import Rate, Workload, model_family, rate_at

DATA = Path(__file__).parents[1] / "data" / "throughput"

# The SGLang cookbook gives no accept length for Qwen3.6; for Qwen3.8-27B, the same recipe on the
# same random prompts, it gives 3.22 (bf16), 3.16 (fp8) and 3.31 (nvfp4).
_COOKBOOK_ACCEPT_LENGTH = 3.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One row, and the launch that it speaks of."""

    row: dict[str, Any]
    query: PointQuery
    replica: Replica
    running_requests: float
    """Of one replica."""
    accept_known: bool

    def pair(self) -> str:
        """The model's family and the card: readings of one pair err together."""
        return f"{model_family(self.row['model'])} on {self.replica.gpu}"

    def measured(self) -> bool:
        """Whether a machine said it."""
        return bool(self.row["kind"] == "measured")

    def rate(self, kernels: Kernels = FITTED) -> Rate:
        """What the model says."""
        query = self.query
        work = Workload(
            prompt_tokens_mean=query.input_tokens,
            output_tokens_mean=query.output_tokens,
            output_tokens_cv=0.0,
        )
        replica = self.replica if kernels is FITTED else replace(self.replica, kernels=kernels)
        return rate_at(replica, self.running_requests, work, accept_length=query.accept_length)

    def predicted(self, kernels: Kernels = FITTED) -> float:
        """Output tokens/s of one GPU, with or without prefill as the reading was taken."""
        rate = self.rate(kernels)
        if self.row["prefill_included"]:
            return rate.tokens_per_s_per_gpu.p50
        decoded = self.running_requests * rate.accept_length / rate.step.step_s()
        return decoded / (self.replica.ranks.tp_size * self.replica.ranks.pp_size)

    def error(self, kernels: Kernels = FITTED) -> float:
        """log(measured / predicted)."""
        return math.log(self.row["tokens_per_s_per_gpu"] / self.predicted(kernels))

    def rate_class(self) -> str:
        """The class that its band is taken from."""
        return self.replica.rate_class


@cache
def readings() -> tuple[Reading, ...]:
    """Every row of the file."""
    lines = (DATA / "readings.jsonl").read_text().splitlines()
    return tuple(_reading(json.loads(line)) for line in lines)


def scored() -> tuple[Reading, ...]:
    """Measured, with every fact that the model needs."""
    return tuple(item for item in readings() if item.measured() and item.accept_known)


def left_out() -> Counter[str]:
    """Reasons, and how many rows each."""
    lines = (DATA / "left_out.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["reason"].split(":")[0] for line in lines)


def split(items: Iterable[Reading]) -> tuple[list[Reading], list[Reading]]:
    """The part to fit on and the part to report on: three pairs to two, from the largest on."""
    groups: dict[str, list[Reading]] = defaultdict(list)
    for item in items:
        groups[item.pair()].append(item)
    calibrate: list[Reading] = []
    score: list[Reading] = []
    for place, pair in enumerate(sorted(groups, key=lambda name: (-len(groups[name]), name))):
        part = score if place % 5 in (1, 3) else calibrate
        part += groups[pair]
    return calibrate, score


def median_percent(errors: Sequence[float]) -> float:
    """The median of |measured / predicted| away from 1, in percent."""
    if not errors:
        return math.nan
    ordered = sorted(abs(error) for error in errors)
    middle = len(ordered) // 2
    half = (ordered[middle] + ordered[~middle]) / 2
    return 100 * math.expm1(half)


def _reading(row: dict[str, Any]) -> Reading:
    accept, known = row["accept_length"], True
    if row["mtp"] and accept is None:
        if row["source"].startswith("SGLang cookbook") and row["num_draft_tokens"] == 4:
            accept = _COOKBOOK_ACCEPT_LENGTH
        else:
            known = False
    query = PointQuery(
        model=load_model_as(row["model"], row["dtype"]),
        gpu=row["gpu"],
        num_gpus=row["num_gpus"],
        tp_size=row["tp_size"],
        dp_size=row["dp_size"] or 1,
        running_requests=row["running_requests"] or row["concurrency"],
        input_tokens=row["input_tokens"],
        output_tokens=row["output_tokens"],
        accept_length=accept,
        num_draft_tokens=row["num_draft_tokens"] if row["mtp"] else None,
        sglang_version=row["version"] if row["engine"] == "sglang" else None,
        attention_backend=row["attention_backend"],
    )
    replica, replicas = point_replica(query, FITTED)
    return Reading(
        row=row,
        query=query,
        replica=replica,
        running_requests=query.running_requests / replicas,
        accept_known=known,
    )
