"""The published readings beside what the model says of them: shared by the score and the fit."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import quantiles
from typing import Any

from pipeline.models.dtypes import load_model_as
from pipeline.planner.rate.kernels import FITTED, Kernels
from pipeline.planner.rate.point import PointQuery, point_replica
from pipeline.planner.rate.readings.offsets import Offsets
from pipeline.planner.rate.readings.stored import readings as published
from pipeline.planner.rate.readings.traits import Traits, traits_of
from pipeline.planner.rate.replica import Replica
from pipeline.planner.rate.throughput import Rate, Workload, rate_at, time_shares
from schemas.plan import LinearState, Moe

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

    def traits(self) -> Traits:
        """What its error may come from."""
        return traits_of(self.replica.model, self.replica.gpu, self.row["engine"])

    def pair(self) -> str:
        """The model's shape, the card and the engine: readings of one pair err together."""
        traits = self.traits()
        return f"{traits.family} on {traits.card} with {traits.engine}"

    def measured(self) -> bool:
        """Whether a machine said it."""
        return bool(self.row["kind"] == "measured")

    def with_model(self, kernels: Kernels, offsets: Offsets) -> "Reading":
        """The reading beside another model of the step."""
        return replace(self, replica=replace(self.replica, kernels=kernels, offsets=offsets))

    def rate(self) -> Rate:
        """What the model says."""
        query = self.query
        work = Workload(
            prompt_tokens_mean=query.input_tokens,
            output_tokens_mean=query.output_tokens,
            output_tokens_cv=0.0,
        )
        return rate_at(self.replica, self.running_requests, work, accept_length=query.accept_length)

    def predicted(self) -> float:
        """Output tokens/s of one GPU, with or without prefill as the reading was taken."""
        return self._tokens_per_s(self.rate())

    def _tokens_per_s(self, rate: Rate) -> float:
        if self.row["prefill_included"]:
            return rate.tokens_per_s_per_gpu.p50
        decoded = self.running_requests * rate.accept_length / rate.step.step_s()
        return decoded / (self.replica.ranks.tp_size * self.replica.ranks.pp_size)

    def error(self) -> float:
        """log(measured / predicted)."""
        return math.log(self.row["tokens_per_s_per_gpu"] / self.predicted())

    def error_and_shares(self) -> tuple[float, tuple[float, ...]]:
        """log(measured / predicted), and the shares of the time that the parts have in it."""
        rate = self.rate()
        error = math.log(self.row["tokens_per_s_per_gpu"] / self._tokens_per_s(rate))
        prefill = rate.prefill_share if self.row["prefill_included"] else 0.0
        return error, time_shares(rate.step, prefill)

    def log_sd(self) -> float:
        """The error that the model admits."""
        return self.replica.offsets.log_sd(self.error_and_shares()[1])

    def rate_class(self) -> str:
        """The class of its weights and layers."""
        return self.replica.rate_class

    def is_bf16_dense_or_hybrid(self) -> bool:
        """Whether its weights have 16 bits, and its model no experts or linear attention."""
        model = self.replica.model
        plain = isinstance(model.state, LinearState) or not isinstance(model.ffn, Moe)
        return plain and self.replica.rate_class.startswith("bf16")


@cache
def readings() -> tuple[Reading, ...]:
    """Every published reading, and every rate of another program."""
    lines = (DATA / "modelled.jsonl").read_text().splitlines()
    rows = [{"kind": "measured", **row} for row in published()]
    return tuple(reading_of(row) for row in [*rows, *map(json.loads, lines)])


def scored() -> tuple[Reading, ...]:
    """Measured, with every fact that the model needs."""
    return tuple(item for item in readings() if item.measured() and item.accept_known)


def left_out() -> Counter[str]:
    """Reasons, and how many rows each."""
    lines = (DATA / "left_out.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["reason"].split(":")[0] for line in lines)


def median_percent(errors: Sequence[float]) -> float:
    """The median of |measured / predicted| away from 1, in percent."""
    if not errors:
        return math.nan
    ordered = sorted(abs(error) for error in errors)
    middle = len(ordered) // 2
    half = (ordered[middle] + ordered[~middle]) / 2
    return 100 * math.expm1(half)


def p90_percent(errors: Sequence[float]) -> float:
    """The p90 of |measured / predicted| away from 1, in percent."""
    if len(errors) < 2:
        return median_percent(errors)
    deciles = quantiles([abs(error) for error in errors], n=10, method="inclusive")
    return 100 * math.expm1(deciles[-1])


def reading_of(row: dict[str, Any]) -> Reading:
    """Return one row beside the launch that it speaks of."""
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
        engine=row["engine"],
        kv_format=row["kv_dtype"],
    )
    replica, replicas = point_replica(query, FITTED)
    return Reading(
        row=row,
        query=query,
        replica=replica,
        running_requests=query.running_requests / replicas,
        accept_known=known,
    )
